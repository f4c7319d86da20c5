"""How a checkpoint stores its linear layers, from the `quantization_config` of its config.json.

Plans count the stored bytes of the formats below. Runs read those for which `layout_of` has a layout.

    fp8, fbgemm_fp8       a scale per block, output or matrix
    compressed-tensors    4 or 8 bits, integers or floats, with any of its strategies
    awq, gptq             2 to 8 bits in groups of inputs, with zeros; gptq has the group of each input too
    bitsandbytes          4 bits in blocks of 64 weights, whose scales may be quantized themselves; 8 bits by outputs
    mxfp4                 4 bits with a byte per 32 weights, in matrices of experts alone

A matrix of O outputs and I inputs in blocks of o x i has O I bits / 8 + ceil(O / o) ceil(I / i) scales.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from llama_ssp.settings.formats import INT4_GROUP as GROUP
from llama_ssp.settings.formats import NF4_GROUP
from llama_ssp.settings.model_files import shown

QUANTIZATION = "quantization_config"
_Block: TypeAlias = tuple[int | None, int | None]
_ORDERS_IN_PLACE = (None, False, "weight", "static")
"""Values of actorder that leave consecutive inputs in a group; the others scatter them."""


@dataclass(frozen=True, kw_only=True)
class PackedLayout:
    """How a checkpoint stores its int4 weights.

    Attributes:
        weight, scale, zero, order: last parts of the tensors' names; `order` is g_idx. Zero and order may be absent.
        others: last parts of the names of tensors that are not needed.
        has_inputs_first: matrices are stored transposed.
        least_zero: what a stored zero of 0 stands for.
    """

    weight: str
    scale: str
    zero: str
    order: str
    others: tuple[str, ...] = ()
    has_inputs_first: bool = False
    least_zero: int = 0

    @property
    def leaves(self) -> tuple[str, ...]:
        """Last parts of the names of all tensors of a layer that are no ordinary parameters."""
        return self.weight, self.scale, self.zero, self.order, *self.others


_COMPRESSED = PackedLayout(
    weight="weight_packed", scale="weight_scale", zero="weight_zero_point", order="weight_g_idx",
    others=("weight_shape",),
)  # fmt: skip
_GPTQ = PackedLayout(
    weight="qweight", scale="scales", zero="qzeros", order="g_idx", has_inputs_first=True, least_zero=1
)  # fmt: skip


def layout_of(described: object) -> PackedLayout | str:
    """The layout of a `quantization_config` of a config.json, or a clause that says why it cannot be read."""
    match _field(described, "quant_method"):
        case "compressed-tensors":
            problem = "; ".join(dict.fromkeys(_compressed_problems(described)))
            return problem or _COMPRESSED
        case "gptq":
            problem = "; ".join(_differences(described, {"bits": 4, "group_size": GROUP, "desc_act": False}))
            version = _field(described, "checkpoint_format") or "gptq"
            if version not in ("gptq", "gptq_v2"):
                problem = f"checkpoint_format {shown(version)}"
            return problem or (_GPTQ if version == "gptq" else replace(_GPTQ, least_zero=0))
        case method:
            return f"quant_method {shown(method)}"


def _compressed_problems(described: object) -> Iterator[str]:
    yield from _differences(described, {"format": "pack-quantized"})
    if transforms := _field(described, "transform_config"):
        yield f"transform_config {shown(transforms)}"
    groups = _field(described, "config_groups")
    if not isinstance(groups, dict) or not groups:
        yield "no config_groups"
        return
    wanted = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
    for group in groups.values():
        yield from _differences(_field(group, "weights"), wanted)
        if (order := _field(_field(group, "weights"), "actorder")) not in _ORDERS_IN_PLACE:
            yield f"actorder {shown(order)}"
        if _field(group, "input_activations") is not None:
            yield "quantized activations"


def _differences(described: object, wanted: Mapping[str, object]) -> Iterator[str]:
    for name, value in wanted.items():
        found = _field(described, name)
        if type(found) is not type(value) or found != value:
            yield f"{name} {shown(found)}"


def _field(described: object, name: str) -> Any:  # noqa: ANN401 - JSON
    return described.get(name) if isinstance(described, dict) else None


@dataclass(frozen=True, kw_only=True)
class StoredFormat:
    """The format of the linear layers of a checkpoint.

    Attributes:
        name: for tables and notes.
        bits: of a weight; None for a format that no plan knows, whose weights are counted unquantized.
        block: numbers of outputs and of inputs that share a scale; None for all of them.
        scale_bytes: of a scale and its zero.
        order_bytes: per input, of the index that says which group it belongs to.
        kept_shares: by module, the share of the layers in which its matrix is not quantized; others are in none.
        has_head: the output matrix is quantized too, unless it is tied to the embedding.
        problem: a clause that says why runs cannot read the format; None if they can.
    """

    name: str
    bits: int | None = None
    block: _Block = (None, None)
    scale_bytes: float = 0
    order_bytes: int = 0
    kept_shares: tuple[tuple[str, float], ...] = ()
    has_head: bool = False
    problem: str | None = None

    def matrix_bytes(self, module: str, num_rows: int, num_columns: int, *, unquantized: int) -> int:
        """Bytes of a matrix or of a rank's slice, as the mean over the layers, from those that it has unquantized."""
        assert self.bits, "a plan knows the format"
        kept = dict(self.kept_shares).get(module, 0.0)
        rows, columns = (
            1 if size is None else -(-whole // size)
            for size, whole in zip(self.block, (num_rows, num_columns), strict=True)
        )
        packed = math.ceil(num_rows * num_columns * self.bits / 8)
        packed += math.ceil(rows * columns * self.scale_bytes) + self.order_bytes * num_columns
        return round(kept * unquantized + (1 - kept) * packed)


def stored_format(content: Mapping[str, Any], *, modules: Collection[str], num_layers: int) -> StoredFormat | None:
    """The format that a config.json describes, on top or in its text part; None without a description.

    `modules` are the matrices of a layer, by the last parts of their names.
    """
    parts = [part for part in (content, content.get("text_config")) if isinstance(part, dict)]
    holder = next((part for part in parts if QUANTIZATION in part), None)
    if holder is None:
        return None
    described, layout = holder[QUANTIZATION], layout_of(holder[QUANTIZATION])
    method = _field(described, "quant_method")
    problem = layout if isinstance(layout, str) else None
    read = _READERS.get(method) if isinstance(method, str) else None
    found = read(described) if read else None
    if found is None:
        named = method if isinstance(method, str) else f"quant_method {shown(method)}"
        return StoredFormat(name=named, problem=problem)
    kept, quantized = _patterns(described)
    shares = {module: _kept_share(_names(module, num_layers), kept, quantized) for module in modules}
    return replace(
        found,
        kept_shares=tuple((module, share) for module, share in shares.items() if share),
        has_head=found.has_head and not _kept_share([["lm_head"]], kept, quantized),
        problem=problem,
    )


def _fp8(described: Mapping[str, Any]) -> StoredFormat | None:
    """An fp32 scale per block; without blocks, per matrix."""
    block = described.get("weight_block_size")
    sizes = (None, None) if block is None else _pair(block)
    return StoredFormat(name="fp8", bits=8, block=sizes, scale_bytes=4) if sizes else None


def _fbgemm(described: Mapping[str, Any]) -> StoredFormat:  # noqa: ARG001 - it has one form
    """An fp32 scale per output."""
    return StoredFormat(name="fbgemm fp8", bits=8, block=(1, None), scale_bytes=4)


def _awq(described: Mapping[str, Any]) -> StoredFormat | None:
    """A 16-bit scale per group, and a zero of as many bits as a weight."""
    bits, block = described.get("bits"), _grouped(described.get("group_size"))
    if bits not in _BITS or block is None:
        return None
    zero = 0 if described.get("zero_point") is False else bits / 8
    return StoredFormat(name=f"awq int{bits}", bits=bits, block=block, scale_bytes=2 + zero)


def _gptq(described: Mapping[str, Any]) -> StoredFormat | None:
    """As AWQ, always with zeros and with the group of each input, in 32 bits."""
    bits, block = described.get("bits"), _grouped(described.get("group_size"))
    if bits not in _BITS or block is None or described.get("dynamic"):
        return None
    has_head = described.get("lm_head") is True
    return StoredFormat(
        name=f"gptq int{bits}", bits=bits, block=block, scale_bytes=2 + bits / 8, order_bytes=4, has_head=has_head
    )


def _bitsandbytes(described: Mapping[str, Any]) -> StoredFormat | None:
    """An fp32 scale per output or per 64 weights; a double quantization makes it a byte, with fp32 per 256 of them."""
    if described.get("load_in_4bit") is True:
        kind = described.get("bnb_4bit_quant_type", "fp4")
        scale_bytes = 1 + 4 / 256 if described.get("bnb_4bit_use_double_quant") is True else 4
        name = f"bitsandbytes {kind if isinstance(kind, str) else shown(kind)}"
        return StoredFormat(name=name, bits=4, block=(1, NF4_GROUP), scale_bytes=scale_bytes)
    if described.get("load_in_8bit") is True:
        return StoredFormat(name="bitsandbytes int8", bits=8, block=(1, None), scale_bytes=4)
    return None


def _mxfp4(described: Mapping[str, Any]) -> StoredFormat:  # noqa: ARG001 - it has one form
    """A byte per 32 weights."""
    return StoredFormat(name="mxfp4", bits=4, block=(1, 32), scale_bytes=1)


def _compressed(described: Mapping[str, Any]) -> StoredFormat | None:
    """The format of all groups of modules, which must be one; matrices with zeros of their own have other bytes."""
    groups = described.get("config_groups")
    weights = [_field(group, "weights") for group in groups.values()] if isinstance(groups, dict) else []
    first = weights[0] if weights else None
    is_sparse = (_field(described.get("sparsity_config"), "format") or "dense") != "dense"
    form = described.get("format")
    if not isinstance(first, dict) or any(other != first for other in weights) or is_sparse or form not in _FORMS:
        return None
    bits, kind, block = first.get("num_bits"), first.get("type"), _block_of(first)
    if block is None or bits not in (4, 8) or kind not in ("int", "float"):
        return None
    stored_bits = bits if "pack" in str(form) else 8
    name = f"compressed-tensors {'fp' if kind == 'float' else 'int'}{bits}"
    scale_bytes = 1 if (kind, bits) == ("float", 4) else 2
    zero = stored_bits / 8 if first.get("symmetric") is False else 0
    order_bytes = 0 if first.get("actorder") in _ORDERS_IN_PLACE else 4
    return StoredFormat(
        name=name, bits=stored_bits, block=block, scale_bytes=scale_bytes + zero, order_bytes=order_bytes, has_head=True
    )


_FORMS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized")
"""Values of `format` of compressed-tensors; forms for sparse matrices have other bytes."""
_READERS: Mapping[str, Callable[[Mapping[str, Any]], StoredFormat | None]] = {
    "fp8": _fp8, "fbgemm_fp8": _fbgemm, "awq": _awq, "gptq": _gptq, "bitsandbytes": _bitsandbytes, "mxfp4": _mxfp4,
    "compressed-tensors": _compressed,
}  # fmt: skip


_BITS = (2, 3, 4, 8)


def _block_of(weights: Mapping[str, Any]) -> _Block | None:
    """The outputs and inputs that share a scale by a strategy of compressed-tensors; None for one that is not known."""
    match weights.get("strategy"):
        case "tensor":
            return None, None
        case "channel":
            return 1, None
        case "group" | "tensor_group":
            return _grouped(weights.get("group_size"))
        case "block":
            return _pair(weights.get("block_structure"))
        case _:
            return None


def _grouped(size: object) -> _Block | None:
    """One output and a group of inputs, which -1 makes all of them; None if this is no size."""
    if type(size) is not int or (size < 1 and size != -1):
        return None
    return 1, None if size == -1 else size


def _pair(sizes: object) -> _Block | None:
    """A block's outputs and inputs; None if these are no two sizes."""
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):  # noqa: PLR2004 - two dimensions
        return None
    return sizes[0], sizes[1]


_KEPT = ("ignore", "ignored_layers", "modules_to_not_convert", "llm_int8_skip_modules")
"""Fields that name modules that are not quantized."""
_CLASS = "Linear"
"""What compressed-tensors calls all linear layers."""


def _patterns(described: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The modules that are not quantized, and those that are; none of the latter stands for all."""
    kept = [name for field in _KEPT for name in _texts(described.get(field))]
    if described.get("quant_method") == "mxfp4":
        return kept, ["experts"]
    groups = described.get("config_groups")
    targets = [
        name
        for group in (groups.values() if isinstance(groups, dict) else ())
        for name in _texts(_field(group, "targets"))
    ]
    listed = described.get("modules_in_block_to_quantize")
    for names in listed if isinstance(listed, list) else []:
        targets += _texts(names if isinstance(names, list) else [names])
    return kept, [] if _CLASS in targets else targets


def _texts(values: object) -> list[str]:
    return [value for value in values if isinstance(value, str)] if isinstance(values, list) else []


_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "dense", "query_key_value")
_FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}
_PREFIXES = ("model", "model.language_model", "language_model.model", "language_model")


def _names(module: str, num_layers: int) -> list[list[str]]:
    """By layer, the names that files may give a module of it: of a text model, or of the text part of another."""
    parent = "self_attn" if module in _ATTENTION else "mlp"
    leaves = [module, *([_FUSED[module]] if module in _FUSED else [])]
    return [
        [f"{prefix}.layers.{layer}.{parent}.{leaf}" for prefix in _PREFIXES for leaf in leaves]
        for layer in range(num_layers)
    ]


def _kept_share(names: list[list[str]], kept: list[str], quantized: list[str]) -> float:
    """The share of the layers, each with its names, in which a matrix is not quantized."""
    is_kept, is_quantized = _matcher(kept), _matcher(quantized)
    alike = [any(map(is_kept, each)) or (bool(quantized) and not any(map(is_quantized, each))) for each in names]
    return sum(alike) / len(alike)


def _matcher(patterns: list[str]) -> Callable[[str], bool]:
    """Whether a name has one of the patterns: consecutive parts of it, also with `*`, or `re:` and an expression."""
    parts = {pattern.strip(".") for pattern in patterns if "*" not in pattern}
    globs = [f"*.{pattern.strip('.')}.*" for pattern in patterns if "*" in pattern and not pattern.startswith("re:")]
    expressions = [found for pattern in patterns if pattern.startswith("re:") and (found := _expression(pattern))]

    def matches(name: str) -> bool:
        words = name.split(".")
        inner = (
            ".".join(words[start:stop]) for start in range(len(words)) for stop in range(start + 1, len(words) + 1)
        )
        return (
            any(part in parts for part in inner)
            or any(fnmatchcase(f".{name}.", glob) for glob in globs)
            or any(expression.match(name) for expression in expressions)
        )

    return matches


def _expression(pattern: str) -> re.Pattern[str] | None:
    """A regular expression; None for a faulty one, which matches nothing."""
    try:
        return re.compile(pattern.removeprefix("re:"))
    except re.error:
        return None
