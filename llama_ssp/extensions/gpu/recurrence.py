"""Tries the kernel of recurrent layers against torch's operators, with a layer of the model."""

from collections.abc import Callable
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from llama_ssp.extensions.gpu.attempts import attempt, check, is_current
from llama_ssp.models.states import LayerState, StateCache, StateView
from llama_ssp.types import LibraryPart

Mix = Callable[[LibraryPart, Tensor, StateView], Tensor]
"""The forward of a layer on our states, with its `own_kernels` or without."""


def find_recurrence(mixer: LibraryPart, width: int, *, mix: Mix, layer: LayerState, like: Tensor) -> ModuleType | None:
    """Our kernels, for layers like this one; None, after a warning, if they do not work.

    Args:
        mixer: the layer.
        width: of its inputs.
        mix: its forward.
        layer: the sizes of its state.
        like: a tensor of the format and on the device of its inputs.
    """
    if not is_current(like.device):
        return None
    instead = "continuing with torch's operators instead of the kernel of recurrent layers"
    return attempt(partial(_tried, mixer, width, mix, layer, like), instead=instead)


@torch.inference_mode()
def _tried(mixer: LibraryPart, width: int, mix: Mix, layer: LayerState, like: Tensor) -> ModuleType:
    """Our kernels, once a layer has the outputs and the states of torch's operators, and goes back in one row."""
    from llama_ssp.extensions.gpu.kernels import recurrence

    numbers = torch.randn(2, 2, 3, width, generator=torch.Generator().manual_seed(0)).to(like)
    positions_BT = torch.arange(3, device=like.device).repeat(2, 1)
    taken_B = torch.tensor([3, 2], device=like.device)
    found: list[list[Tensor]] = []
    for mixer.own_kernels in (None, recurrence):
        cache = StateCache([layer], batch_size=2, num_kept=3, dtype=like.dtype)
        mix(mixer, numbers[0], cache.view(positions_BT, taken_B=taken_B, cache_rows_B=None))
        behind = cache.view(positions_BT + 2, taken_B=None, cache_rows_B=None)
        last = mix(mixer, numbers[1], behind)
        found.append([last, *cache.inputs.values(), *cache.states.values()])
    for wanted, own in zip(*found, strict=True):
        check("recurrence", own, wanted)
    return recurrence
