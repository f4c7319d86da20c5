"""How a checkpoint stores its linear layers, from the `quantization_config` of its config.json.

Runs keep weights as they are stored where `layout_of` has a layout, and refuse others; plans say the same.

    compressed-tensors    integers of 4 or 8 bits, or FP8, with most of its strategies; MXFP4, NVFP4
    awq, gptq, auto-round 4 bits in groups of inputs, with zeros; gptq has the group of each input too, and 8 bits
    bitsandbytes          nf4 or fp4 in blocks of 64 weights, whose scales may be quantized too; 8 bits by outputs
    fp8, fbgemm_fp8       a scale per block, output or matrix
    mxfp4                 floats of 4 bits, with a power of two per 32 weights, in the experts of gpt-oss
    modelopt              FP8 with a scale per matrix; NVFP4, floats of 4 bits with FP8 per 16 weights
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from llama_ssp.errors import CheckpointError, ConfigError
from llama_ssp.settings.formats import (
    FP4_GROUP,
    FP4_SCALED,
    FP8_GROUP,
    INT4_GROUPS,
    NF4_GROUP,
    NO_QUANTIZATION,
    format_of,
)
from llama_ssp.settings.model_files import shown
from llama_ssp.settings.patterns import Pattern
from llama_ssp.words import said

QUANTIZATION = "quantization_config"
READ = (
    "unquantized weights are required, or int4 in groups of 32 inputs or a multiple (compressed-tensors "
    "pack-quantized, gptq, awq gemm, auto-round), int8 with a scale per output or matrix (compressed-tensors "
    "int-quantized, pack-quantized) or per group without zeros (gptq), FP8 (fp8, fbgemm_fp8, compressed-tensors "
    "float-quantized), bitsandbytes nf4, fp4 or 8 bits, MXFP4 (mxfp4, compressed-tensors), or NVFP4 "
    "(compressed-tensors, modelopt)"
)
"""What runs read, for messages."""
_Block: TypeAlias = tuple[int | None, int | None]
_ORDERS_IN_PLACE, _SCATTERED = (None, False, "weight", "static"), (True, "group", "dynamic")
"""Values of actorder that leave consecutive inputs in a group, and those that scatter them."""


@dataclass(frozen=True, kw_only=True)
class PackedLayout:
    """How a checkpoint stores weights that runs keep as they are.

    Attributes:
        name: for tables.
        storage: the storage format that they are read in.
        block: numbers of outputs and of inputs that share a scale; None for all of them.
        group: inputs that share a word in our format, the largest that the blocks consist of; 0 for all.
        weight, scale, zero, order: last parts of the tensors' names; `order` is g_idx. Zero and order may be absent.
        others: last parts of the names of tensors that are not needed.
        has_inputs_first: matrices are stored transposed.
        joins_outputs: a word has the codes of eight outputs, in AWQ's order, not of eight inputs.
        least_zero: what a stored zero of 0 stands for.
        is_scattered: any inputs may share a scale, as `order` says.
        steps: that a stored scale is divided into.
        factor: last part of the name of a scale of the matrix, which may be absent.
        divides: by that scale.
        joint: what precedes the last parts; none where a tensor has all experts.
    """

    name: str
    storage: str
    block: _Block
    group: int = 0
    weight: str
    scale: str
    zero: str = ""
    order: str = ""
    others: tuple[str, ...] = ()
    has_inputs_first: bool = False
    joins_outputs: bool = False
    least_zero: int = 0
    is_scattered: bool = False
    steps: int = 1
    factor: str = ""
    divides: bool = False
    joint: str = "."

    @property
    def slice_group(self) -> int:
        """Of which a slice of the inputs has a multiple; 0 for any slice. A word of a file has the codes of eight."""
        return 8 if self.is_scattered else self.group

    def num_with_gaps(self, num_inputs: int, *, of: int) -> int:
        """Inputs that are kept for a part of scattered inputs `of` all, which has a part of every group.

        Those are groups of 32, as many as the part may need.
        """
        group = INT4_GROUPS[-1]
        return group * (num_inputs // group + of // (self.block[1] or of))

    @property
    def leaves(self) -> tuple[str, ...]:
        """Last parts of the names of all tensors of a layer that are no ordinary parameters."""
        return tuple(filter(None, (self.weight, self.scale, self.zero, self.order, self.factor, *self.others)))


_Found: TypeAlias = PackedLayout | list[str]
"""A layout, or clauses that say why there is none."""


def layout_of(described: object) -> PackedLayout | str:
    """The layout of a `quantization_config` of a config.json, or a clause that says why it cannot be read."""
    method = _field(described, "quant_method")
    find = _LAYOUTS.get(method) if isinstance(method, str) else None
    found = find(described) if find and isinstance(described, dict) else [f"quant_method {shown(method)}"]
    return found if isinstance(found, PackedLayout) else "; ".join(dict.fromkeys(found))


def _gptq(described: Mapping[str, Any]) -> _Found:
    version, block = described.get("checkpoint_format") or "gptq", _grouped(described.get("group_size"))
    has_bytes = described.get("bits") == 8  # noqa: PLR2004 - a byte
    problems = [*_differences(described, {"sym": True, "desc_act": False} if has_bytes else {"bits": 4})]
    problems += [] if isinstance(order := described.get("desc_act"), bool) else [f"desc_act {shown(order)}"]
    problems += [] if version in ("gptq", "gptq_v2") else [f"checkpoint_format {shown(version)}"]
    if not all(pattern.startswith("-:") for pattern in described.get("dynamic") or ()):
        problems.append(f"dynamic {shown(described['dynamic'])}")
    layout: dict[str, Any] = {
        "weight": "qweight", "scale": "scales", "zero": "qzeros", "order": "g_idx", "has_inputs_first": True,
        "least_zero": int(version == "gptq"),
    }  # fmt: skip
    has_groups = block is None or block[1] is not None
    if not has_bytes or has_groups:
        storage, kind = ("int8_groups", "int8") if has_bytes else ("int4_weight_only", "int4")
        layout["is_scattered"] = order is True
        return _in_groups(block, described, problems, storage=storage, name=f"gptq {kind}", **layout)
    return problems or PackedLayout(name="gptq int8", storage="int8_weight_only", block=(1, None), **layout)


def _auto_round(described: Mapping[str, Any]) -> _Found:
    packing = described.get("packing_format")
    find = {"auto_round:auto_gptq": _gptq, "auto_round:auto_awq": _awq}.get(str(packing))
    problems = [*_differences(described, {"data_type": "int"})]
    extra = described.get("extra_config") or {}
    problems += [f"extra_config {shown(extra)}"] if _others_of(extra) is None else []
    found = find({"desc_act": False, "zero_point": True, **described}) if find else [f"packing_format {shown(packing)}"]
    return problems + found if isinstance(found, list) else problems or found


def _others_of(extra: object) -> list[str] | None:
    """The modules that an `extra_config` of auto-round leaves out; None if it says anything else."""
    modules = extra if isinstance(extra, dict) else {"": None}
    left_out = all((_field(module, "bits") or 0) in (16, 32) for module in modules.values())
    return [*modules] if left_out else None


def _awq(described: Mapping[str, Any]) -> _Found:
    version = described.get("version") or "gemm"
    problems = [*_differences(described, {"bits": 4, "zero_point": True})]
    problems += [] if str(version).lower() == "gemm" else [f"version {shown(version)}"]
    return _in_groups(
        _grouped(described.get("group_size")), described, problems, name="awq int4", weight="qweight", scale="scales",
        zero="qzeros", has_inputs_first=True, joins_outputs=True,
    )  # fmt: skip


def _compressed(described: Mapping[str, Any]) -> _Found:
    weights = _weights(described)
    first = weights[0] if weights else None
    problems = [f"transform_config {shown(found)}" for found in [described.get("transform_config")] if found]
    is_sparse = (_field(described.get("sparsity_config"), "format") or "dense") != "dense"
    problems += ["sparse weights"] if is_sparse else []
    if not isinstance(first, dict) or any(other != first for other in weights):
        return [*problems, "several config_groups" if len(weights) > 1 else "no config_groups"]
    form, block = described.get("format"), _block_of(first)
    form = f"{first.get('type')}-quantized" if form == "naive-quantized" else form
    form = _PACKED_BYTES if form == "pack-quantized" and first.get("num_bits") == 8 else form  # noqa: PLR2004 - a byte
    bits, kind = _FORMS_READ.get(str(form), (None, None))
    problems += [] if bits else [f"format {shown(form)}"]
    problems += _differences(first, {"num_bits": bits, "type": kind} if bits else {})
    order = first.get("actorder")
    problems += [] if order in (*_ORDERS_IN_PLACE, *_SCATTERED) else [f"actorder {shown(order)}"]
    if form == "pack-quantized":
        return _in_groups(
            block, first, problems, name="compressed-tensors int4", weight="weight_packed", scale="weight_scale",
            zero="weight_zero_point", order="weight_g_idx", others=("weight_shape", *_OF_ACTIVATIONS),
            is_scattered=order in _SCATTERED,
        )  # fmt: skip
    if (storage := str(form).removesuffix("-pack-quantized")) in FP4_SCALED:
        return _fp4(
            block, problems, storage=storage, name=f"compressed-tensors {storage}", weight="weight_packed",
            factor="weight_global_scale" if storage == "nvfp4" else "", divides=True,
        )  # fmt: skip
    if form == "float-quantized":
        return _fp8_in(block, problems, name="compressed-tensors fp8")
    problems += ["symmetric false"] if first.get("symmetric") is False else []
    problems += [f"strategy {shown(first.get('strategy'))}"] if bits and block not in _PER_OUTPUT else []
    return problems or PackedLayout(
        name="compressed-tensors int8", storage="int8_weight_only", block=block or _PER_OUTPUT[0],
        scale="weight_scale", weight="weight_packed" if form == _PACKED_BYTES else "weight",
        others=("weight_shape", *_OF_ACTIVATIONS),
    )  # fmt: skip


def _fp8(described: Mapping[str, Any]) -> _Found:
    block = described.get("weight_block_size")
    return _fp8_in((None, None) if block is None else _pair(block), [], name="fp8")


def _fp8_in(block: _Block | None, problems: list[str], *, name: str) -> _Found:
    if block is None or (block[1] or FP8_GROUP) % FP8_GROUP:
        problems = [*problems, f"blocks of {shown(block and block[1])} inputs"]
    return problems or PackedLayout(
        name=name, storage="fp8_weight_only", block=block or (None, None), weight="weight",
        group=FP8_GROUP if block and block[1] else 0, scale="weight_scale", others=_OF_ACTIVATIONS,
    )  # fmt: skip


def _fp4(
    block: _Block | None,
    problems: list[str],
    *,
    storage: str,
    **layout: Any,  # noqa: ANN401 - its fields
) -> _Found:
    if block != (1, FP4_SCALED[storage]):
        problems = [*problems, f"group_size {shown(block and block[1])}"]
    layout = {"scale": "weight_scale", "others": _OF_ACTIVATIONS} | layout
    return problems or PackedLayout(storage=storage, block=block or (1, None), group=FP4_GROUP, **layout)


def _modelopt(described: Mapping[str, Any]) -> _Found:
    weights = _weights(described) or [described]
    match described.get("quant_algo"):
        case "FP8":
            return _fp8_in((None, None), [], name="modelopt fp8")
        case "NVFP4" if len(weights) == 1:
            return _fp4(
                _grouped(_field(weights[0], "group_size")), [], storage="nvfp4", name="modelopt nvfp4",
                weight="weight", factor="weight_scale_2",
            )  # fmt: skip
        case algorithm:
            return [f"quant_algo {shown(algorithm)} with {len(weights)} config_groups"]


def _bitsandbytes(described: Mapping[str, Any]) -> _Found:
    if described.get("load_in_8bit") is True:
        return [*_differences({"load_in_4bit": False} | {**described}, {"load_in_4bit": False})] or PackedLayout(
            name="bitsandbytes int8", storage="int8_weight_only", block=(1, None), weight="weight", scale="SCB",
            others=(BNB_FORM,), steps=127,
        )  # fmt: skip
    wanted: dict[str, object] = {"load_in_4bit": True}
    kind = described.get("bnb_4bit_quant_type", "fp4")
    if kind not in ("nf4", "fp4"):
        wanted["bnb_4bit_quant_type"] = "nf4"
    if described.get("bnb_4bit_quant_storage") is not None:
        wanted["bnb_4bit_quant_storage"] = "uint8"
    return [*_differences(described, wanted)] or PackedLayout(
        name=f"bitsandbytes {kind}", storage=kind, block=(1, NF4_GROUP), group=NF4_GROUP, weight="weight",
        scale="weight.absmax",
        others=("weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map", f"{BNB_STATE}{kind}"),
    )  # fmt: skip


BNB_STATE = "weight.quant_state.bitsandbytes__"
"""What precedes the kind in the last part of the name of a tensor with JSON."""
_PACKED_BYTES = "pack-quantized with 8 bits"
_FORMS_READ = {
    "pack-quantized": (4, "int"), _PACKED_BYTES: (8, "int"), "int-quantized": (8, "int"),
    "float-quantized": (8, "float"), **{f"{storage}-pack-quantized": (4, "float") for storage in FP4_SCALED},
}  # fmt: skip
"""Bits and kind of the weights, by the `format` of compressed-tensors."""
_COUNTED = {4: "int4_weight_only", 8: "int8_weight_only"}
"""Storage formats, by the bits of weights that runs refuse."""
_PER_OUTPUT: tuple[_Block, ...] = ((1, None), (None, None))
"""Blocks without a border within a row."""


_OF_ACTIVATIONS = (
    "input_scale", "input_zero_point", "input_global_scale", "input_scale_ub", "activation_scale", "output_scale",
    "output_zero_point",
)  # fmt: skip
"""Tensors of engines that quantize activations."""
BNB_FORM = "weight_format"
"""Last part of the name of a tensor with the order of int8 weights; 0 for row by row."""
_COMPRESSED = "compressed-tensors"
_LAYOUTS: Mapping[str, Callable[[Mapping[str, Any]], _Found]] = {
    _COMPRESSED: _compressed, "gptq": _gptq, "awq": _awq, "auto-round": _auto_round, "fp8": _fp8,
    "bitsandbytes": _bitsandbytes,
    "modelopt": _modelopt, "fbgemm_fp8": lambda _: _fp8_in((1, None), [], name="fbgemm fp8"),
    "mxfp4": lambda _: _fp4(
        (1, 32), [], storage="mxfp4", name="mxfp4", weight="_blocks", scale="_scales", joint=""
    ),
}  # fmt: skip


def _in_groups(
    block: _Block | None,
    described: Mapping[str, Any],
    problems: list[str],
    storage: str = "int4_weight_only",
    **layout: Any,  # noqa: ANN401 - its fields
) -> _Found:
    """The layout of weights in groups, in the largest of ours that theirs consist of; or all that is wrong."""
    size = block[1] if block and block[0] == 1 else 1
    group = next((group for group in INT4_GROUPS if size is None or size % group == 0), 0)
    if not group:
        fields = [name for name in ("strategy", "group_size") if name in described] or ["group_size"]
        problems = [*problems, *(f"{name} {shown(described.get(name))}" for name in fields)]
    layout["is_scattered"] = bool(size and layout.get("is_scattered"))
    return problems or PackedLayout(storage=storage, block=(1, size), group=group, **layout)


def _differences(described: object, wanted: Mapping[str, object]) -> Iterator[str]:
    for name, value in wanted.items():
        found = _field(described, name)
        if type(found) is not type(value) or found != value:
            yield f"{name} {shown(found)}"


def _weights(described: object) -> list[Any]:
    """What the groups of compressed-tensors say of their weights."""
    groups = _field(described, "config_groups")
    return [_field(group, "weights") for group in groups.values()] if isinstance(groups, dict) else []


def _field(described: object, name: str) -> Any:  # noqa: ANN401 - JSON
    return described.get(name) if isinstance(described, dict) else None


@dataclass(frozen=True, kw_only=True)
class StoredFormat:
    """The format of the linear layers of a checkpoint.

    Attributes:
        name: for tables and notes.
        layout: in which runs read it; None if they cannot.
        problem: a clause that says why they cannot.
        counted: the storage format that a plan counts, if they cannot and the bits of a weight are known.
        kept_shares: by module, the share of the layers in which its matrix is not quantized; others are in none.
    """

    name: str
    layout: PackedLayout | None = None
    problem: str | None = None
    counted: str | None = None
    kept_shares: tuple[tuple[str, float], ...] = ()

    @property
    def storage(self) -> str | None:
        """The storage format in which runs keep it; None if they read numbers, or cannot read it."""
        return self.layout.storage if self.layout else None

    @property
    def planned(self) -> str | None:
        """The storage format that a plan counts; None for numbers."""
        return self.storage or self.counted

    def kept_format(self, quantization: str, *, where: object) -> str:
        """The storage format of a run of the checkpoint at `where`; see `kept_format`.

        Raises CheckpointError if runs cannot read it.
        """
        if self.problem:
            raise CheckpointError(f"{where} {unreadable(self.problem)}")
        return kept_format(quantization, self.storage, where=where)


def kept_format(quantization: str, storage: str | None, *, where: object) -> str:
    """The storage format of a run: that of the files, if they have one, else the one that was asked for.

    ConfigError if both are given and differ, or weights are not quantized to what was given.
    """
    if not storage and format_of(quantization).is_stored_alone:
        raise ConfigError(
            f"{where} holds no {quantization} weights, and model.quantization={quantization} is for checkpoints that "
            "do: use int4_weight_only, or another checkpoint"
        )
    if storage and quantization not in (NO_QUANTIZATION, storage):
        raise ConfigError(
            f"{where} holds {storage} weights, which are read as they are, and "
            f"{said('model.quantization', quantization)} was given: leave it out"
        )
    return storage or quantization


def unreadable(problem: str) -> str:
    """Say what is wrong with a checkpoint of this problem; a predicate."""
    return f"describes quantized weights that cannot be read ({problem}): {READ}"


def stored_format(
    content: Mapping[str, Any], *, modules: Collection[str], num_layers: int, ties_head: bool = False
) -> StoredFormat | None:
    """The format that a config.json describes, on top or in its text part; None without a description.

    `modules` are the matrices of a layer, by the last parts of their names. A head that `ties_head` to the embedding is
    not quantized.
    """
    parts = [part for part in (content, content.get("text_config")) if isinstance(part, dict)]
    holder = next((part for part in parts if QUANTIZATION in part), None)
    if holder is None:
        return None
    described, layout = holder[QUANTIZATION], layout_of(holder[QUANTIZATION])
    method = _field(described, "quant_method")
    named = method if isinstance(method, str) else f"quant_method {shown(method)}"
    if isinstance(layout, str):
        weights = _weights(described)
        bits = _field(described, "bits") or (weights and _field(weights[0], "num_bits"))
        return StoredFormat(name=named, problem=layout, counted=_COUNTED.get(bits) if type(bits) is int else None)
    kept, quantized = _patterns(described)
    kept += [] if layout.joint else ["self_attn", "lm_head"]  # experts alone are quantized
    try:
        are_kept, are_quantized = _Modules(kept), _Modules(quantized)
    except CheckpointError as error:
        return StoredFormat(name=layout.name, problem=str(error), counted=layout.storage)
    may_have_head = method in (_COMPRESSED, "modelopt") or described.get("lm_head") is True
    if may_have_head and not ties_head and not _kept_share([["lm_head"]], are_kept, are_quantized):
        return StoredFormat(name=layout.name, problem="a quantized output head", counted=layout.storage)
    shares = {module: _kept_share(_names(module, num_layers), are_kept, are_quantized) for module in modules}
    kept_shares = tuple((module, share) for module, share in shares.items() if share)
    return StoredFormat(name=layout.name, layout=layout, kept_shares=kept_shares)


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


_KEPT = ("ignore", "ignored_layers", "modules_to_not_convert", "llm_int8_skip_modules", "exclude_modules")
"""Fields that name modules that are not quantized."""
_CLASS = "Linear"
"""What compressed-tensors calls all linear layers."""


def _patterns(described: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The modules that are not quantized, and those that are; none of the latter stands for all."""
    kept = [name for field in _KEPT for name in _texts(described.get(field))]
    kept += [f"re:{pattern.removeprefix('-:')}" for pattern in described.get("dynamic") or ()]
    kept += _others_of(described.get("extra_config") or {}) or []
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


def _kept_share(names: list[list[str]], kept: "_Modules", quantized: "_Modules") -> float:
    """The share of the layers, each with its names, in which a matrix is not quantized."""
    alike = [
        any(name in kept for name in same) or (bool(quantized) and not any(name in quantized for name in same))
        for same in names
    ]
    return sum(alike) / len(alike)


class _Modules:
    """The modules that patterns name: consecutive parts of a name, also with `*`, or `re:` and an expression.

    CheckpointError for an expression that is not read.
    """

    def __init__(self, patterns: list[str]) -> None:
        self._parts = {pattern.strip(".") for pattern in patterns if "*" not in pattern}
        self._globs = [f"*.{each.strip('.')}.*" for each in patterns if "*" in each and not each.startswith("re:")]
        self._expressions = [
            Pattern(pattern.removeprefix("re:"), where="the pattern of modules")
            for pattern in patterns if pattern.startswith("re:")
        ]  # fmt: skip

    def __bool__(self) -> bool:
        return bool(self._parts or self._globs or self._expressions)

    def __contains__(self, name: str) -> bool:
        words = name.split(".")
        inner = (
            ".".join(words[start:stop]) for start in range(len(words)) for stop in range(start + 1, len(words) + 1)
        )
        return (
            any(part in self._parts for part in inner)
            or any(fnmatchcase(f".{name}.", glob) for glob in self._globs)
            or any(expression.match(name) for expression in self._expressions)
        )
