"""A rank's stage of a model: which layers it has, and how hidden states reach it from one stage and go on to the next.

    stage 0                          stage 1
    rank 2   layers | slice 0  ----> rank 0   slice 0 |
    rank 3   layers | slice 1  ----> rank 1   slice 1 | gathered | layers | output

Every rank of a stage has the whole hidden states after its layers, so each sends its slice to one rank of the next
stage: slow links between nodes carry each number once. The ranks of the next stage gather the slices, inside a node.

Shapes: M tokens, X numbers of a token: its hidden state, and taps of earlier stages.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from llama_ssp.architectures.matrices import split_blocks
from llama_ssp.ranks.comms import Comm


@dataclass(frozen=True, kw_only=True)
class ModelStage:
    """This rank's stage; by default all of a model.

    Attributes:
        number, num_stages: counted from 0, and of all ranks of the target.
        before, behind: the group of this rank and the rank of the stage before that sends to it, and the group of this
            rank and the rank of the stage after that it sends to; None where there is no such stage.
        layers: its layers, once the model is known.
    """

    number: int = 0
    num_stages: int = 1
    before: Comm | None = None
    behind: Comm | None = None
    layers: range = range(0)

    @property
    def is_first(self) -> bool:
        """Whether it has the embedding."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the output."""
        return self.number == self.num_stages - 1

    def has_input(self, number: int) -> bool:
        """Whether it has the input of this layer, or in the last stage of what follows the last layer."""
        return self.layers.start <= number and (self.is_last or number < self.layers.stop)

    def receive(self, num_tokens: int, width: int, *, comm: Comm, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the numbers (M, X) of the stage before, of `width`, gathered over the ranks `comm` of this one."""
        assert self.before, "the first stage embeds tokens"
        sizes = _widths(width, comm.size)
        own = torch.empty(num_tokens, sizes[comm.rank], dtype=dtype, device=device)
        return comm.all_gather_last(self.before.broadcast(own, src=1 - self.before.rank), sizes)

    def send(self, x_MX: Tensor, *, comm: Comm) -> None:
        """Send this rank's slice of numbers that all ranks `comm` of its stage have."""
        assert self.behind, "the last stage scores tokens"
        own = x_MX.split(_widths(x_MX.shape[1], comm.size), dim=1)[comm.rank]
        self.behind.broadcast(own.contiguous(), src=self.behind.rank)


WHOLE_MODEL = ModelStage()


def _widths(width: int, num_ranks: int) -> tuple[int, ...]:
    return tuple(map(len, split_blocks(width, num_ranks, what="numbers of a hidden state")))
