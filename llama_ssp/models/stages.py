"""Hidden states of a stage of layers, and the taps that travel with them; see `ranks.stages`.

Shapes: M tokens, E the model's width, X = E times one and the taps of earlier stages.
"""

from typing import Any

import torch
from torch import Tensor

from llama_ssp.models.cache import Taps
from llama_ssp.ranks.comms import Comm
from llama_ssp.ranks.stages import ModelStage


def entering(
    stage: ModelStage,
    num_tokens: int,
    taps: Taps | None,
    slots_M: Any,  # noqa: ANN401 - None without taps
    *,
    width: int,
    comm: Comm,
    like: Tensor,
) -> Tensor:
    """Return the states (M, E) that the stage before sends, with the dtype and device of `like`, and keep its taps."""
    earlier = taps.before(stage.layers.start) if taps else []
    found_MX = stage.receive(num_tokens, width * (1 + len(earlier)), comm=comm, dtype=like.dtype, device=like.device)
    x_ME, *of_taps = found_MX.split(width, dim=1)
    for number, tap_ME in zip(earlier, of_taps, strict=True):
        assert taps, "it names the earlier ones"
        taps.write(number, tap_ME, slots_M)
    states_ME: Tensor = x_ME.contiguous()
    return states_ME


def leaving(x_ME: Tensor, stage: ModelStage, taps: Taps | None, slots_M: Any) -> Tensor:  # noqa: ANN401 - None without taps
    """The states (M, X) after the last layer of a stage, with the taps that later stages lack."""
    earlier = taps.before(stage.layers.stop) if taps else []
    return torch.cat([x_ME, *(taps.at(number, slots_M) for number in earlier)], dim=1) if taps else x_ME
