"""Storage of a checkpoint's linear layers, from the `quantization_config` of its config.json.

Runs keep weights as they are stored where a storage format has a layout, and refuse others; plans say the same.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from itertools import chain, count
from typing import Any

from llama_ssp.errors import CheckpointError, ConfigError, shown
from llama_ssp.storage import tools
from llama_ssp.storage.formats import NO_QUANTIZATION, Found, PackedLayout, counted_in, format_of, formats
from llama_ssp.storage.patterns import Pattern
from llama_ssp.text.messages import said

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
    kept: frozenset[str] = frozenset()  # modules of layers that are not quantized, by the library's names.

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
    content: Mapping[str, Any], *, layers: Sequence[Sequence[str]], head: str = "", has_odd_experts: bool = False
) -> StoredFormat | None:
    """The format that a config.json describes, on top or in its text part; None without a description.

    Args:
        content: content of the file.
        layers: the modules of each layer that may be quantized, by the library's names.
        head: the module of the output, if this is not the embedding, which is not quantized.
        has_odd_experts: whether the model has experts that no format keeps.
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
        are_kept, are_quantized = (_Modules(of, are_whole=method == tools.COMPRESSED) for of in (kept, quantized))
    except CheckpointError as error:
        return StoredFormat(name=layout.name, problem=str(error), counted=layout.storage)

    def keeps(module: str) -> bool:
        names = _names(module, words)
        return any(name in are_kept for name in names) or not any(name in are_quantized for name in names)

    words = "\n".join((*kept, *quantized))
    left = [{name for name in layer if keeps(name)} for layer in layers]
    problem = next(filter(None, map(_half_quantized, count(), layers, left)), None)
    if has_odd_experts and any(_EXPERTS in name for name in {*chain(*layers)}.difference(*left)):
        problem = "experts without a gate"
    may_have_head = method in (tools.COMPRESSED, tools.MODELOPT) or described.get("lm_head") is True
    if may_have_head and head and not keeps(head):
        problem = "a quantized output head"
    return StoredFormat(
        name=layout.name,
        layout=None if problem else layout,
        problem=problem,
        counted=layout.storage if problem else None,
        kept=frozenset().union(*left),
    )


def _half_quantized(number: int, layer: Sequence[str], kept: Collection[str]) -> str | None:
    """The matrices with one input of which a layer has some quantized, as a problem; None for none."""
    groups = defaultdict[tuple[str, str], list[str]](list)
    for name in layer:
        parent, _, leaf = name.rpartition(".")
        groups[parent, _FUSED.get(leaf, leaf)].append(name)
    for group in groups.values():
        if len({name in kept for name in group}) > 1:
            return f"some of {', '.join(name.rpartition('.')[2] for name in group)} alone, in layer {number}"
    return None


_KEPT = ("ignore", "ignored_layers", "modules_to_not_convert", "llm_int8_skip_modules", "exclude_modules")
"""Fields that name modules that are not quantized."""


def _patterns(described: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The modules that are not quantized, and the modules that are."""
    kept = [name for field in _KEPT for name in _texts(described.get(field))]
    kept += [f"re:{name.removeprefix('-:')}" for name in described.get("dynamic") or () if name.startswith("-:")]
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


_EXPERTS = ".experts."
_FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}
_LEAVES = {
    **{leaf: (fused,) for leaf, fused in _FUSED.items()},
    "gate_up_proj": ("gate_proj", "up_proj", "w1", "w3"),
    "down_proj": ("w2",),
}
"""Other last parts of a module's name in files, which may have fused matrices in parts, or parts fused."""
_PARTS = {".mlp.": ".block_sparse_moe.", ".forget_gate.": "."}
"""Parts of the library's names, and the parts that files have in their place."""
_BEGINNINGS = {
    "model.": (
        "backbone.",
        "language_model.model.",
        "model.language_model.",
        "language_model.",
        "language_model.backbone.",
        "thinker.model.",
    ),
    "lm_head": ("language_model.lm_head", "thinker.lm_head"),
}
"""Beginnings of the library's names, and what files have in their place, most of them of models that read images."""


def _names(module: str, words: str) -> list[str]:
    """The names that files may give a module of the library, as far as patterns have their `words`."""
    parent, dot, leaf = module.rpartition(".")
    parents = [parent + dot]
    parents += [parents[0].replace(ours, theirs) for ours, theirs in _PARTS.items() if ours in parents[0]]
    parents += [f"{each}0." for each in parents if each.endswith(_EXPERTS)]
    names = [each + last for each in parents for last in (leaf, *_LEAVES.get(leaf, ()))]
    renamed = (
        theirs + name.removeprefix(ours)
        for ours, beginnings in _BEGINNINGS.items()
        for theirs in beginnings
        if all(word in words for word in theirs.split("."))
        for name in names
        if name.startswith(ours)
    )
    return [*names, *renamed]


class _Modules:
    """The modules that patterns name: consecutive parts of a name, with `*` too, or `re:` and a `Pattern`.

    Names of tools that give all of a name `are_whole`.
    """

    def __init__(self, patterns: list[str], *, are_whole: bool) -> None:
        self._parts = {pattern.strip(".") for pattern in patterns if "*" not in pattern}
        self._first = {part.partition(".")[0] for part in self._parts}
        self._are_whole = are_whole
        globs = [f"*.{glob.strip('.')}.*" for glob in patterns if "*" in glob and not glob.startswith("re:")]
        self._globs = re.compile("|".join(map(translate, globs))) if globs else None
        self._expressions = [
            Pattern(pattern.removeprefix("re:"), where="the pattern of modules")
            for pattern in patterns
            if pattern.startswith("re:")
        ]

    def __contains__(self, name: str) -> bool:
        return (
            any(part in self._parts for part in ([name] if self._are_whole else self._inner(name)))
            or bool(self._globs and self._globs.match(f".{name}."))
            or any(expression.match(name) for expression in self._expressions)
        )

    def _inner(self, name: str) -> Iterator[str]:
        """Consecutive parts that begin as any pattern does."""
        words = name.split(".")
        for start in (place for place, word in enumerate(words) if word in self._first):
            yield from (".".join(words[start:stop]) for stop in range(start + 1, len(words) + 1))
