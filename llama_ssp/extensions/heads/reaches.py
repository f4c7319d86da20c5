"""The positions that a layer of a head of blocks sees, as trainers of heads read their config.json; without torch.

    p a position of the block, a the first one, e the last one, W the window of the layer

                          causal          in both directions
    without a window      0 to p          0 to e
    flat layout           p-W+1 to p      p-W+1 to p+W-1, e at most
    `speculators`         a-W to p        a-W to e

The flat layout is that of the authors of DFlash: a layer is causal if `is_causal` says so, or, where that is null, if
it is of type `sliding_attention`. In `speculators` layers with a window are causal unless
`sliding_window_non_causal`, and others never are.

Source: packages `dflash` 0.1.0 and `speculators` 0.9.0.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from llama_ssp.errors import CheckpointError
from llama_ssp.extensions.heads.kinds import DEEPSPEC, DFLASH2, SPECULATOR, classes_of, fields_of_blocks
from llama_ssp.types import Parsed

SLIDING, _TYPES = "sliding_attention", {"sliding_attention", "full_attention"}
_OF_WINDOWS = "layer_types", "sliding_window", "use_sliding_window", "max_window_layers"
OF_REACHES = *_OF_WINDOWS, "is_causal"
"""Fields by which a model's config may describe reaches."""


class Reach(NamedTuple):
    """The positions that a layer sees, by default all; see the module."""

    window: int | None = None
    is_causal: bool = False
    from_anchor: bool = False  # the window is counted from the first position of the block.


ALL = Reach()


def reaches_of(content: Mapping[str, Any], sizes: Mapping[str, Any], kind: str, file: Path) -> tuple[Reach, ...]:
    """The reach of each layer of a head of blocks.

    `sizes` are the fields of its layers. Raises CheckpointError if they contradict each other, or if it is not known
    how a trainer reads them.
    """
    num_layers = sizes.get("num_hidden_layers", 1)
    types = _said("layer_types", content, sizes, file)
    window = _window(content, sizes, file)
    if types is None:
        first = sizes.get("max_window_layers", 28)
        types = [SLIDING if window and layer >= first else "full_attention" for layer in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers or not _TYPES.issuperset(types):
        raise CheckpointError(f"{file} has layer_types {types!r:.80} of {num_layers} layers: download it again")
    said = _said("is_causal", content, sizes, file)
    if DEEPSPEC in classes_of(content) and (SLIDING in types or said):
        problem = "layers with a sliding window, which DeepSpec does not say how to read in a block"
        raise CheckpointError(f"{file} has {problem}")
    if SPECULATOR not in content:
        return tuple(
            Reach(window if kind == SLIDING else None, kind == SLIDING if said is None else bool(said))
            for kind in types
        )
    if said:
        raise CheckpointError(f"{file} has is_causal, which `speculators` says by sliding_window_non_causal")
    is_causal = not content.get("sliding_window_non_causal", kind == DFLASH2)
    return tuple(Reach(window, is_causal, from_anchor=True) if kind == SLIDING and window else ALL for kind in types)


def beside(content: Mapping[str, Any], sizes: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Return the windows of layers of pairs, whose fields may be outside of `sizes` in a config.json of `speculators`.

    Raises CheckpointError if fields contradict each other.
    """
    found = {name: _said(name, content, sizes, file) for name in _OF_WINDOWS if content.get(name) is not None}
    return {"use_sliding_window": True} | found if found else {}


def _said(name: str, content: Mapping[str, Any], sizes: Mapping[str, Any], file: Path) -> Parsed:
    """Return a field of the layers, which may also be in `content` itself; CheckpointError if both are and differ."""
    found = [part[name] for part in (sizes, content) if part.get(name) is not None]
    if any(other != found[0] for other in found):
        raise CheckpointError(
            f"{file} has {name} {found[0]} of its layers and {found[1]} beside them: download it again"
        )
    return found[0] if found else None


def _window(content: Mapping[str, Any], sizes: Mapping[str, Any], file: Path) -> int | None:
    """The window of layers that have one; None where it is switched off, as Qwen 3's is by default."""
    problems = [name for name in ("causal", "use_swa", "attention_sink_bias") if fields_of_blocks(content).get(name)]
    if problems:
        raise CheckpointError(f"{file} has {', '.join(problems)} in dflash_config, which engines read differently")
    window, is_used = _said("sliding_window", content, sizes, file), _said("use_sliding_window", content, sizes, file)
    if is_used is None:
        is_beside = SPECULATOR in content and "sliding_window" not in sizes
        is_used = is_beside or (SPECULATOR in content and sizes.get("model_type", "qwen3") != "qwen3")
    if window is None or not is_used:
        return None
    if type(window) is not int or window < 1:
        raise CheckpointError(f"{file} has sliding_window {window!r:.40}: download it again")
    return window
