"""Reads what tools write into the `quantization_config` of a config.json, for the layouts of all storage formats.

compressed-tensors    integers of 4 or 8 bits, or FP8, with most of its strategies; MXFP4, NVFP4
awq, gptq, auto-round 4 bits in groups of inputs, with zeros; gptq has the group of each input too, and 8 bits
bitsandbytes          nf4 or fp4 in blocks of 64 weights, whose scales may be quantized too; 8 bits by outputs
fp8, fbgemm_fp8       a scale per block, output or matrix
mxfp4                 floats of 4 bits, with a power of two per 32 weights, in the experts of gpt-oss
modelopt              FP8 with a scale per matrix; NVFP4, floats of 4 bits with FP8 per 16 weights
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from llama_ssp.errors import shown
from llama_ssp.storage.formats import INT4_GROUPS, Block, Found, PackedLayout
from llama_ssp.types import Parsed

COMPRESSED, GPTQ, AWQ, AUTO_ROUND, BITSANDBYTES, MODELOPT = (
    "compressed-tensors",
    "gptq",
    "awq",
    "auto-round",
    "bitsandbytes",
    "modelopt",
)
SCATTERED = (True, "group", "dynamic")
"""Values of actorder that scatter the groups."""
OF_ACTIVATIONS = (
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "input_scale_ub",
    "activation_scale",
    "output_scale",
    "output_zero_point",
)
"""Tensors of engines that quantize activations."""
_ORDERS_IN_PLACE = (None, False, "weight", "static")
_FORMS_READ = {
    "pack-quantized": (4, "int"),
    "packed bytes": (8, "int"),
    "int-quantized": (8, "int"),
    "float-quantized": (8, "float"),
    "mxfp4-pack-quantized": (4, "float"),
    "nvfp4-pack-quantized": (4, "float"),
}
"""Bits and kind of the weights, by the `format` of compressed-tensors; packed ones of 8 bits are "packed bytes"."""


class Compressed(NamedTuple):
    """Weights as compressed-tensors describes them, and all that no format reads."""

    form: str
    block: Block | None
    weights: Mapping[str, Any]
    problems: list[str]


def compressed(described: Mapping[str, Any]) -> Compressed | None:
    """Read a description of compressed-tensors; None for another tool's."""
    if described.get("quant_method") != COMPRESSED:
        return None
    weights = weights_of(described)
    first = weights[0] if weights else None
    problems = [f"transform_config {shown(found)}" for found in [described.get("transform_config")] if found]
    is_sparse = (field_of(described.get("sparsity_config"), "format") or "dense") != "dense"
    problems += ["sparse weights"] if is_sparse else []
    if not isinstance(first, dict) or any(other != first for other in weights):
        return Compressed(
            "", None, {}, [*problems, "several config_groups" if len(weights) > 1 else "no config_groups"]
        )
    form = described.get("format")
    form = f"{first.get('type')}-quantized" if form == "naive-quantized" else form
    form = "packed bytes" if form == "pack-quantized" and first.get("num_bits") == 8 else form
    bits, kind = _FORMS_READ.get(str(form), (None, None))
    problems += [] if bits else [f"format {shown(form)}"]
    problems += differences(first, {"num_bits": bits, "type": kind} if bits else {})
    order = first.get("actorder")
    problems += [] if order in (*_ORDERS_IN_PLACE, *SCATTERED) else [f"actorder {shown(order)}"]
    return Compressed(str(form), _block_of(first), first, problems)


def gptq(
    described: Mapping[str, Any], problems: list[str], wanted: Mapping[str, object], *, storage: str, name: str
) -> Found:
    """The layout of GPTQ, or of auto-round's packing of its kind; or all that is wrong, after the given problems."""
    version, order = described.get("checkpoint_format") or "gptq", described.get("desc_act")
    problems = [*problems, *differences(described, wanted)]
    problems += [] if isinstance(order, bool) else [f"desc_act {shown(order)}"]
    problems += [] if version in ("gptq", "gptq_v2") else [f"checkpoint_format {shown(version)}"]
    dynamic = described.get("dynamic") or {}
    if not isinstance(dynamic, dict) or any(found for name, found in dynamic.items() if not name.startswith("-:")):
        problems.append(f"dynamic {shown(described['dynamic'])}")
    return in_groups(
        grouped(described.get("group_size")),
        described,
        problems,
        storage=storage,
        name=name,
        weight="qweight",
        scale="scales",
        zero="qzeros",
        order="g_idx",
        has_inputs_first=True,
        least_zero=int(version == "gptq"),
        is_scattered=order is True,
    )


def of_auto_round(described: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """Layouts of auto-round in the words of the tool whose packing they have, and layouts that no format reads."""
    if described.get("quant_method") != AUTO_ROUND:
        return described, []
    packing, extra = described.get("packing_format"), described.get("extra_config") or {}
    method = {"auto_round:auto_gptq": GPTQ, "auto_round:auto_awq": AWQ}.get(str(packing))
    problems = [*differences(described, {"data_type": "int"})]
    problems += [f"extra_config {shown(extra)}"] if left_out(extra) is None else []
    problems += [] if method else [f"packing_format {shown(packing)}"]
    return {"desc_act": False, "zero_point": True, **described, "quant_method": method or GPTQ}, problems


def left_out(extra: object) -> list[str] | None:
    """The modules that an `extra_config` of auto-round leaves out; None if it says anything else."""
    modules = extra if isinstance(extra, dict) else {"": None}
    are_left_out = all((field_of(module, "bits") or 0) in (16, 32) for module in modules.values())
    return [*modules] if are_left_out else None


def in_groups(
    block: Block | None,
    described: Mapping[str, Any],
    problems: list[str],
    **layout: Any,
) -> Found:
    """The layout of weights in groups, in the largest of ours that theirs consist of; or all that is wrong."""
    size = block[1] if block and block[0] == 1 else 1
    group = next((group for group in INT4_GROUPS if size is None or size % group == 0), 0)
    if not group:
        fields = [name for name in ("strategy", "group_size") if name in described] or ["group_size"]
        problems = [*problems, *(f"{name} {shown(described.get(name))}" for name in fields)]
    layout["is_scattered"] = bool(size and layout.get("is_scattered"))
    return problems or PackedLayout(block=(1, size), group=group, **layout)


def differences(described: object, wanted: Mapping[str, object]) -> Iterator[str]:
    """Yield the fields that have other values than are read."""
    for name, value in wanted.items():
        found = field_of(described, name)
        if type(found) is not type(value) or found != value:
            yield f"{name} {shown(found)}"


def weights_of(described: object) -> list[Any]:
    """The descriptions of weights in the groups of compressed-tensors."""
    groups = field_of(described, "config_groups")
    return [field_of(group, "weights") for group in groups.values()] if isinstance(groups, dict) else []


def field_of(described: object, name: str) -> Parsed:
    """A field of an object; None of anything else."""
    return described.get(name) if isinstance(described, dict) else None


def _block_of(weights: Mapping[str, Any]) -> Block | None:
    """The outputs and inputs that share a scale by a strategy of compressed-tensors; None if it is not known."""
    match weights.get("strategy"):
        case "tensor":
            return None, None
        case "channel":
            return 1, None
        case "group" | "tensor_group":
            return grouped(weights.get("group_size"))
        case "block":
            return pair(weights.get("block_structure"))
        case _:
            return None


def grouped(size: object) -> Block | None:
    """One output and a group of inputs, which -1 makes all of them; None if this is no size."""
    if type(size) is not int or (size < 1 and size != -1):
        return None
    return 1, None if size == -1 else size


def pair(sizes: object) -> Block | None:
    """A block's outputs and inputs; None if these are no two sizes."""
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        return None
    return sizes[0], sizes[1]
