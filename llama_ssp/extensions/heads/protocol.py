"""The interfaces of a draft head on a rank.

Shapes: B sequences, T positions of a forward, R positions to score, E width, X taps, M nodes of a level, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from llama_ssp.models.runner import Cached, TreePlaces
from llama_ssp.speculate.drafters.drafter import Drafter, DrafterParts


class Head(Cached, Protocol):
    """A draft head on this rank, whose cache holds pair i in slot i; `runner` says what pairs are.

    Attributes:
        num_token_ids: V, the target's number of token ids.
        is_invariant: see `Runner`.
        uses_masks: see `models.cache.CachedRunner`.
        make_drafter: makes the drafter of its kind.
    """

    num_token_ids: int
    is_invariant: bool
    uses_masks: bool
    make_drafter: Callable[[DrafterParts], Drafter]

    def copy(self, from_row: int, to_rows: Sequence[int], num_tokens: int, *, from_saved: bool = False) -> None:
        """Copy the first pairs of a row of the cache to other rows; see `Runner.copy`."""

    def hidden_of(self, taps_BTX: Tensor) -> Tensor:
        """Return the hidden states (B, T, E) that the head computes from the target's taps."""

    def extend(
        self,
        ids_BT: Tensor,
        hidden_BTE: Tensor,
        positions_BT: Tensor,
        *,
        bucket: int,
        score_positions_B1: Tensor | None = None,
        cache_rows_B: Tensor | None = None,
        consecutive: bool = True,
        tree: TreePlaces | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Read pairs into the cache.

        Args:
            ids_BT: the token after each position.
            hidden_BTE: hidden states at the positions, from `hidden_of` or the call before; may be overwritten.
            positions_BT: positions of the pairs.
            bucket: see `Runner.forward`.
            score_positions_B1: which of the T pairs to score; None for all.
            cache_rows_B: see `Runner.forward`.
            consecutive: see `Runner.forward`.
            tree: see `Runner.forward`.

        Returns:
            The head's own hidden states (B, R, E) of the scored pairs, and logits (B, R, V) in fp32, minus infinity for
            tokens that it cannot draft; see `Runner.allocate`.
        """


class ModulesHead(Head, Protocol):
    """A draft head of several modules, of which each drafts one token; see `mtp`.

    With `chains` a module reads the hidden states of the module before it, else those of the target.
    """

    num_modules: int
    chains: bool

    def extend(  # noqa: PLR0913
        self,
        ids_BT: Tensor,
        hidden_BTE: Tensor,
        positions_BT: Tensor,
        *,
        bucket: int,
        score_positions_B1: Tensor | None = None,
        cache_rows_B: Tensor | None = None,
        consecutive: bool = True,
        tree: TreePlaces | None = None,
        module: int = 0,
        keeps_all: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Read pairs into the cache of a module; with `keeps_all` returns the hidden states of all T; see `Head`."""


Following = Callable[[int, Tensor, Tensor | None], Tensor]
"""Maps a depth, tokens (B, M) drafted before it, and their parents' places among the tokens of the call before (None in
chains) to the logits (B, M, V) of the tokens after them. Depth 0 comes first, with the newest token."""


@dataclass(frozen=True)
class Confident:
    """A `Following`, and a function from the tokens (B, K) before drafted ones to their logits of acceptance (B, K)."""

    following: Following
    confidence: Callable[[Tensor], Tensor]

    def __call__(self, depth: int, ids_BM: Tensor, parents_BM: Tensor | None) -> Tensor:
        """See `Following`."""
        return self.following(depth, ids_BM, parents_BM)


class OnePassHead(Head, Protocol):
    """A draft head that drafts a block of tokens in one forward; see `one_pass`.

    The token that a position drafts is `tokens_ahead` after it; `mask_token_id` is read in place of tokens to come.
    """

    mask_token_id: int
    tokens_ahead: int

    def block_size(self, num_drafted: int) -> int:
        """The number of positions after the context that drafting `num_drafted` tokens reads."""

    def draft(
        self,
        ids_BT: Tensor,
        context_BCE: Tensor,
        positions_BT: Tensor,
        *,
        num_drafted: int,
        bucket: int,
        cache_rows_B: Tensor | None = None,
        tree: TreePlaces | None = None,
    ) -> Following:
        """Read the newest positions of the context, with what `hidden_of` makes of their taps, and the block's.

        Several positions of the context may be the same one. `tree` has slots that differ from positions.
        """
