"""Models that are tables: random logits for every prefix of a small vocabulary. The law of their texts can be computed.

Shapes: G independent tables, V vocabulary, t length of a prefix. A prefix of ids i1 ... it has the code
i1 V^(t-1) + ... + it, so appending the token i to the prefix c gives the prefix c V + i.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TableModel:
    """Logits (G, V^t, V), fp64, for each length t of prefix, the shortest first."""

    logits: tuple[Tensor, ...]

    @property
    def num_tables(self) -> int:
        """How many independent tables there are (G)."""
        return self.logits[0].shape[0]

    @property
    def vocab_size(self) -> int:
        """How many tokens there are (V)."""
        return self.logits[0].shape[-1]


def random_table(*, seed: int, num_tables: int, max_length: int, vocab_size: int = 4) -> TableModel:
    """Draw the logits of every prefix of up to `max_length` tokens; a sixth of them are minus infinity.

    The best token of each row stays finite, and spread out by a standard deviation of 1.5.
    """
    generator = torch.Generator().manual_seed(seed)
    tables = []
    for length in range(max_length + 1):
        shape = (num_tables, vocab_size**length, vocab_size)
        logits = 1.5 * torch.randn(shape, generator=generator, dtype=torch.float64)
        impossible = torch.rand(shape, generator=generator) < 1 / 6
        impossible.scatter_(-1, logits.argmax(-1, keepdim=True), value=False)
        tables.append(logits.masked_fill(impossible, float("-inf")))
    return TableModel(tuple(tables))


def joint_law(conditionals: tuple[Tensor, ...]) -> Tensor:
    """Multiply conditional probabilities (G, V^t, V), t = 0, 1, ..., into the law of the text, (G, V^length)."""
    law = conditionals[0].new_ones(conditionals[0].shape[0], 1)
    for conditional in conditionals:
        law = (law[..., None] * conditional).flatten(1)
    return law
