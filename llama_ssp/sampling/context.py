"""What a rule may know of a row beyond its logits: the tokens before each scored position, and the row's key.

Shapes: B sequences, S slots, T scored positions.
"""

from typing import NamedTuple

from torch import Tensor


class Rows(NamedTuple):
    """Rows of a batch.

    Attributes:
        tokens_BS: token ids: prompt, text and drafted tokens; what follows them is undefined.
        lengths_B: tokens of prompt and text.
        keys_B: the key of each row's random numbers; see `uniforms.row_key`.
    """

    tokens_BS: Tensor
    lengths_B: Tensor
    keys_B: Tensor

    def part(self, start: int, stop: int) -> "Rows":
        """Some of the rows, as views."""
        return Rows(*(each[start:stop] for each in self))

    def before(self, last_BT: Tensor) -> "Context":
        """The context of positions whose last known token stands at `last_BT` (B, T)."""
        return Context(self.tokens_BS, self.keys_B, last_BT)


class Context(NamedTuple):
    """What precedes each scored position.

    Tokens and keys are those of `Rows`. The last token before each scored position stands at `last_BT` (B, T), which
    grows by 1 along T.
    """

    tokens_BS: Tensor
    keys_B: Tensor
    last_BT: Tensor

    def part(self, start: int, stop: int) -> "Context":
        """Some of the rows, as views."""
        return Context(*(each[start:stop] for each in self))
