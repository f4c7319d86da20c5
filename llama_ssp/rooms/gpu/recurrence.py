"""Tries the kernel of recurrent layers against torch's operators, with a layer of the model."""

from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from llama_ssp.models.huggingface import recurrent
from llama_ssp.models.states import StateCache
from llama_ssp.rooms.gpu.attempts import attempt, check
from llama_ssp.untyped import LibraryPart


def find_recurrence(mixer: LibraryPart, width: int) -> ModuleType | None:
    """Our kernels, for layers like this one of inputs of this width; None, after a warning, if they do not work."""
    instead = "continuing with torch's operators instead of the kernel of recurrent layers"
    return attempt(partial(_tried, mixer, width), instead=instead)


@torch.inference_mode()
def _tried(mixer: LibraryPart, width: int) -> ModuleType:
    """Our kernels, once a layer has the outputs and the states of torch's operators, and goes back in one row."""
    from llama_ssp.rooms.gpu.kernels import recurrence

    like, layer = recurrent.convolution_of(mixer).weight, recurrent.state_of(mixer)
    numbers = torch.randn(2, 2, 3, width, generator=torch.Generator().manual_seed(0)).to(like)
    positions_BT = torch.arange(3, device=like.device).repeat(2, 1)
    taken_B = torch.tensor([3, 2], device=like.device)
    found: list[list[Tensor]] = []
    for mixer.own_kernels in (None, recurrence):
        cache = StateCache([layer], batch_size=2, num_kept=3, dtype=like.dtype)
        recurrent.mix_of(mixer)(mixer, numbers[0], cache.view(positions_BT, taken_B=taken_B, cache_rows_B=None))
        behind = cache.view(positions_BT + 2, taken_B=None, cache_rows_B=None)
        last = recurrent.mix_of(mixer)(mixer, numbers[1], behind)
        found.append([last, *cache.inputs.values(), *cache.states.values()])
    for wanted, own in zip(*found, strict=True):
        check("recurrence", own, wanted)
    return recurrence
