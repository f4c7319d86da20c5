"""Storage of a checkpoint's linear layers, from the `quantization_config` of its config.json.

Runs keep weights as they are stored where a storage format has a layout, and refuse others; plans say the same.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from llama_ssp.errors import CheckpointError, ConfigError, shown
from llama_ssp.storage import tools
from llama_ssp.storage.formats import NO_QUANTIZATION, Found, PackedLayout, counted_in, format_of, formats
from llama_ssp.storage.patterns import Pattern
from llama_ssp.words import said

QUANTIZATION = "quantization_config"


def layout_of(described: object) -> PackedLayout | str:
    """The layout of a `quantization_config` of a config.json, or a clause that says why it cannot be read."""
    method = tools.field_of(described, "quant_method")
    found: Found = [f"quant_method {shown(method)}"]
    if isinstance(described, dict) and isinstance(method, str):
        compressed = tools.compressed(described)
        found = (compressed.problems or [f"format {shown(compressed.form)}"]) if compressed else found
        files = (record.files for record in formats().values())
        layouts = (kept.layout(described) for kept in files if kept.layout)
        found = next((layout for layout in layouts if layout is not None), found)
    return found if isinstance(found, PackedLayout) else "; ".join(dict.fromkeys(found))


@dataclass(frozen=True, kw_only=True)
class StoredFormat:
    """The format of the linear layers of a checkpoint."""

    name: str  # for tables and notes.
    layout: PackedLayout | None = None  # in which runs read it; None if they cannot.
    problem: str | None = None  # a clause that says why they cannot.
    counted: str | None = None  # the storage format that a plan counts, if they cannot and the bits are known.
    # by module, the share of the layers in which its matrix is not quantized; others are in none.
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
        """See `kept_format`; CheckpointError if runs cannot read the checkpoint at `where`."""
        if self.problem:
            raise CheckpointError(f"{where} {unreadable(self.problem)}")
        return kept_format(quantization, self.storage, where=where)


def kept_format(quantization: str, storage: str | None, *, where: object) -> str:
    """The storage format of a run: the files', if they have one, else the one that was asked for.

    ConfigError if both are given and differ, or weights are not quantized to what was given.
    """
    if not storage and format_of(quantization).is_stored_alone:
        other = "".join(f"{name}, or " for name in [counted_in(4) or counted_in(8)] if name)
        raise ConfigError(
            f"{where} holds no {quantization} weights, and {said('model.quantization', quantization)} is for "
            f"checkpoints that do: use {other}another checkpoint"
        )
    if storage and quantization not in (NO_QUANTIZATION, storage):
        raise ConfigError(
            f"{where} holds {storage} weights, which are read as they are, and "
            f"{said('model.quantization', quantization)} was given: leave it out"
        )
    return storage or quantization


def unreadable(problem: str) -> str:
    """Say what is wrong with a checkpoint of this problem; a predicate."""
    reads = "".join(f", or {record.files.reads}" for record in formats().values() if record.files.reads)
    return f"describes quantized weights that cannot be read ({problem}): unquantized weights are required{reads}"


def stored_format(
    content: Mapping[str, Any],
    *,
    modules: Collection[str],
    num_layers: int,
    ties_head: bool = False,
    has_odd_experts: bool = False,
) -> StoredFormat | None:
    """The format that a config.json describes, on top or in its text part; None without a description.

    `modules` are the matrices of a layer, by the last parts of their names. A head that `ties_head` to the embedding is
    not quantized. No format keeps the experts of a model that `has_odd_experts`.
    """
    parts = [part for part in (content, content.get("text_config")) if isinstance(part, dict)]
    holder = next((part for part in parts if QUANTIZATION in part), None)
    if holder is None:
        return None
    described, layout = holder[QUANTIZATION], layout_of(holder[QUANTIZATION])
    method = tools.field_of(described, "quant_method")
    named = method if isinstance(method, str) else f"quant_method {shown(method)}"
    if isinstance(layout, str):
        weights = tools.weights_of(described)
        bits = tools.field_of(described, "bits") or (weights and tools.field_of(weights[0], "num_bits"))
        return StoredFormat(name=named, problem=layout, counted=counted_in(bits))
    kept, quantized = _patterns(described)
    kept += [] if layout.joint else ["self_attn", "lm_head"]  # experts alone are quantized
    try:
        are_kept, are_quantized = _Modules(kept), _Modules(quantized)
    except CheckpointError as error:
        return StoredFormat(name=layout.name, problem=str(error), counted=layout.storage)
    kept_of = {module: _are_kept(_names(module, num_layers), are_kept, are_quantized) for module in modules}
    may_have_head = method in (tools.COMPRESSED, tools.MODELOPT) or described.get("lm_head") is True
    experts = [[f"{prefix}.layers.{layer}.mixer.experts.0.up_proj" for prefix in ("backbone", "model")]
               for layer in range(num_layers)]  # fmt: skip
    problem = _half_quantized(kept_of)
    if has_odd_experts and not all(_are_kept(experts, are_kept, are_quantized)):
        problem = "experts without a gate"
    if may_have_head and not ties_head and not all(_are_kept([["lm_head"]], are_kept, are_quantized)):
        problem = "a quantized output head"
    return StoredFormat(
        name=layout.name, layout=None if problem else layout, problem=problem,
        counted=layout.storage if problem else None,
        kept_shares=tuple((module, sum(found) / len(found)) for module, found in kept_of.items() if any(found)),
    )  # fmt: skip


def _half_quantized(kept_of: Mapping[str, list[bool]]) -> str | None:
    """The matrices with one input of which a layer has some quantized, as a problem; None for none."""
    for product in dict.fromkeys(_FUSED.values()):
        group = [module for module in kept_of if _FUSED.get(module) == product]
        for layer, found in enumerate(zip(*(kept_of[module] for module in group), strict=True)):
            if len({*found}) > 1:
                return f"some of {', '.join(group)} alone, in layer {layer}"
    return None


_KEPT = ("ignore", "ignored_layers", "modules_to_not_convert", "llm_int8_skip_modules", "exclude_modules")
"""Fields that name modules that are not quantized."""


def _patterns(described: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The modules that are not quantized, and the modules that are."""
    kept = [name for field in _KEPT for name in _texts(described.get(field))]
    kept += [f"re:{pattern.removeprefix('-:')}" for pattern in described.get("dynamic") or ()]
    kept += tools.left_out(described.get("extra_config") or {}) or []
    groups = described.get("config_groups")
    targets = [
        name
        for group in (groups.values() if isinstance(groups, dict) else ())
        for name in _texts(tools.field_of(group, "targets"))
    ]
    listed = described.get("modules_in_block_to_quantize")
    for names in listed if isinstance(listed, list) else []:
        targets += _texts(names if isinstance(names, list) else [names])
    return kept, ["*"] if not targets or "Linear" in targets else targets  # the latter in compressed-tensors


def _texts(values: object) -> list[str]:
    return [value for value in values if isinstance(value, str)] if isinstance(values, list) else []


_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "dense", "query_key_value")
_FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}
_PREFIXES = ("model", "model.language_model", "language_model.model", "language_model")


def _names(module: str, num_layers: int) -> list[list[str]]:
    """Names by layer that files may give a module of it: of a text model, or of the text part of another."""
    parent = "self_attn" if module in _ATTENTION else "mlp"
    leaves = [module, *([_FUSED[module]] if module in _FUSED else [])]
    return [
        [f"{prefix}.layers.{layer}.{parent}.{leaf}" for prefix in _PREFIXES for leaf in leaves]
        for layer in range(num_layers)
    ]


def _are_kept(names: list[list[str]], kept: "_Modules", quantized: "_Modules") -> list[bool]:
    """Whether a matrix is not quantized, for each layer with the names that it may have there."""
    return [any(name in kept for name in same) or not any(name in quantized for name in same) for same in names]


class _Modules:
    """The modules that patterns name: consecutive parts of a name, with `*` too, or `re:` and a `Pattern`."""

    def __init__(self, patterns: list[str]) -> None:
        self._parts = {pattern.strip(".") for pattern in patterns if "*" not in pattern}
        self._globs = [f"*.{glob.strip('.')}.*" for glob in patterns if "*" in glob and not glob.startswith("re:")]
        self._expressions = [
            Pattern(pattern.removeprefix("re:"), where="the pattern of modules")
            for pattern in patterns
            if pattern.startswith("re:")
        ]

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
