"""The interface of a model, which every implementation and backend provides.

Shapes: B sequences, T positions of a forward, R positions to score, V vocabulary; M packed tokens, C pieces of them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from llama_ssp.architectures.family import Chunk
from llama_ssp.models.cache import Taps, agreed
from llama_ssp.ranks.comms import Comm, Reads


class Pieces(NamedTuple):
    """The prompts to which the tokens of a packed forward belong: pieces of several prompts in one row, unpadded.

        one row of M tokens   | prompt 0 ....... | prompt 1 .. | prompt 2, its beginning |
        first_C1              0                  18            31                        57

    Each piece is at consecutive positions of one row of the cache. All tensors are on the device.

    Attributes:
        rows_M: the row of the cache of each token.
        rows_C: the row of each piece.
        used_C: the slots that its last token sees, int32.
        first_C1: the index of each piece's first token, and M at the end, int32.
        longest: the most tokens of a piece.
    """

    rows_M: Tensor
    rows_C: Tensor
    used_C: Tensor
    first_C1: Tensor
    longest: int


class TreePlaces(NamedTuple):
    """Slots of the tokens of a forward that are nodes of trees, one tree in each row.

    Attributes:
        slots_BT: the slots of the cache that the nodes are written to, next to each other; several nodes can have one
            position.
        sees_BTA: whether each node sees each of the A slots from the root's to the last node's, its own included. All
            nodes see the slots before the root.
        slots_U: the numbers of the slots that are read.
    """

    slots_BT: Tensor
    sees_BTA: Tensor
    slots_U: Tensor

    def of_rows(self, part: slice) -> "TreePlaces":
        """The places of some rows."""
        return self._replace(slots_BT=self.slots_BT[part], sees_BTA=self.sees_BTA[part])

    @property
    def sees_to_itself(self) -> bool:
        """Whether one token of each row is read, which sees all slots up to its own."""
        return self.sees_BTA.shape[1:] == (1, 1)

    @property
    def seen_slots(self) -> Tensor:
        """Whether each token sees each slot of `slots_U`, (B, T, U)."""
        _, num_nodes, num_behind = self.sees_BTA.shape
        behind_BU = self.slots_U - (self.slots_BT[:, -1:] - (num_behind - 1))
        at_BTU = behind_BU.clamp(0, num_behind - 1)[:, None].expand(-1, num_nodes, -1)
        seen_BTU = self.sees_BTA.gather(2, at_BTU) & (behind_BU < num_behind)[:, None]
        return seen_BTU | (behind_BU < 0)[:, None]


def masks_of(tree: TreePlaces, windows: Iterable[int | None], *, dtype: torch.dtype) -> dict[int | None, Tensor]:
    """The term that attention adds to scores (B, T, U), by window: 0 for slots that a token sees, else -inf."""
    seen_BTU, masks = tree.seen_slots, {}
    for window in dict.fromkeys(windows):
        near_BTU = nearest(seen_BTU, window)
        masks[window] = torch.zeros_like(near_BTU, dtype=dtype).masked_fill_(~near_BTU, float("-inf"))
    return masks


def nearest(seen_BTX: Tensor, window: int | None) -> Tensor:
    """Return the last `window` of the slots that each token sees, which are in the order of their positions.

    If `window` is None, return all; if it is a `Chunk`, return the slots of the token's chunk.
    """
    if window is None:
        return seen_BTX
    if isinstance(window, Chunk):
        numbers_BTX = seen_BTX.cumsum(-1)
        return seen_BTX & (numbers_BTX > (numbers_BTX[..., -1:] - 1) // window * window)
    return seen_BTX & (seen_BTX.flip(-1).cumsum(-1).flip(-1) <= window)


class Cached(Protocol):
    """A model or a draft head on this rank, or a part of one, with its cache.

    Attributes:
        repeats_operators: whether a forward of the same shape calls the same operators on tensors that this object
            holds.
        reads_by_length: whether a forward reads each row up to its own length and ignores `bucket`.
        is_recurrent: whether layers keep states (`models.states`). Tokens that do not count must then leave no trace,
            and a row can be rolled back only as far as was allocated for.
        num_allocations: how often `allocate` has replaced the cache, which changes its addresses.
    """

    device: torch.device
    vocab_size: int
    num_allocations: int
    repeats_operators: bool
    reads_by_length: bool
    is_recurrent: bool

    def allocate(self, *, batch_size: int, capacity: int, reads: Reads = Reads.all, num_rolled_back: int = 0) -> None:
        """Allocate a cache for `batch_size` rows of `capacity` tokens, unless the current one suffices.

        A larger cache with as many rows takes over the current one's slots, but no states. Until the next call,
        forwards return what the caller `reads` of their logits. Each forward of a row may begin up to `num_rolled_back`
        tokens before the end of the tokens that the row holds.
        """


class Runner(Cached, Protocol):
    """A model on this rank.

    Attributes:
        is_invariant: whether a forward's results for a token have the same bits with any number of threads, and with
            any other tokens read at once.
        packs_prompts: whether a forward takes `pieces`, on every rank of the model.
        experts_read_3: sums over all layers of verifications: distinct experts that were read, experts expected if
            tokens choose evenly, and layers; None without experts.
        num_uses: how often `allocate` was called. Every use begins with that, and only the last caller knows what the
            rows hold.
    """

    max_position_embeddings: int
    num_uses: int
    is_invariant: bool
    packs_prompts: bool
    experts_read_3: Tensor | None

    def forward(  # noqa: PLR0913 - all that a forward may need
        self,
        ids_BT: Tensor,
        positions_BT: Tensor,
        *,
        bucket: int,
        score_positions_BR: Tensor | None = None,
        cache_rows_B: Tensor | None = None,
        consecutive: bool = True,
        pieces: Pieces | None = None,
        taps: Taps | None = None,
        tree: TreePlaces | None = None,
        taken_B: Tensor | None = None,
    ) -> Tensor:
        """Read tokens at given positions into the cache, and return the logits after them.

        A token sees the cache slots up to its own position. Writing at smaller positions than before rolls a row back.

        Args:
            ids_BT: token ids.
            positions_BT: their positions in their rows.
            bucket: number of cache slots to read; all positions are below it.
            score_positions_BR: which of the T tokens to score; None for all.
            cache_rows_B: each sequence's row in the cache; None for all rows, in order. A row may be there several
                times, with the same tokens.
            consecutive: each position of a row is the one before it plus 1, as attention by lengths assumes.
            pieces: the tokens are one packed row (B = 1), and these say which rows of the cache they belong to.
            taps: where the inputs of its layers are kept; None keeps none.
            tree: slots of all rows that differ from positions, and what each token sees.
            taken_B: how many of the T tokens of each row its states take in, from the first on; None for all. Only for
                runners that keep states, and consecutive positions.

        Returns:
            Logits (B, R, V) in fp32, over the full vocabulary, on every rank of the model; see `allocate`.
        """

    def agree(self, comm: Comm) -> None:
        """Keep `is_invariant` and `packs_prompts` only if they hold on all ranks of `comm`.

        Messages between the ranks need one shape. All ranks must call this together, with or without a part of the
        model.
        """

    def forget(self) -> None:
        """Count a use: from now on no caller knows what the rows hold."""

    def move(self, from_BD: Tensor, to_BD: Tensor, cache_rows_B: Tensor | None = None) -> None:
        """Copy the cache's contents from some slots of each row to others; for the rows see `forward`."""

    def copy(self, from_row: int, to_rows: Sequence[int], num_tokens: int, *, from_saved: bool = False) -> None:
        """Copy the cache's contents from the first slots of a row to other rows, which can include this row.

        The states are those after all tokens of the row, or with `from_saved` those that `save` kept.
        """

    def save(self, row: int, num_tokens: int) -> None:
        """Keep the state of a row after its first `num_tokens` tokens, which are all that it has read.

        It is kept until the next call of `save` or `copy`.
        """


@dataclass(kw_only=True, eq=False)
class NullRunner:
    """A `Runner` on ranks that hold nothing of the model, and run the same loop: no cache, no computation."""

    device: torch.device
    vocab_size: int
    max_position_embeddings: int
    num_allocations: int = 0
    num_uses: int = 0
    repeats_operators: bool = True
    is_invariant: bool = True
    reads_by_length: bool = True
    packs_prompts: bool = False
    is_recurrent: bool = False
    experts_read_3: Tensor | None = None

    def agree(self, comm: Comm) -> None:
        """See `Runner`."""
        self.is_invariant, self.packs_prompts = agreed(comm, is_invariant=True, packs_prompts=True)

    def allocate(self, **_how: object) -> None:
        """Count the use."""
        self.num_uses += 1

    def forget(self) -> None:
        """See `Runner`."""
        self.num_uses += 1

    def forward(
        self, ids_BT: Tensor, *_positions: Tensor, score_positions_BR: Tensor | None = None, **_options: object
    ) -> Tensor:
        """Return empty logits (B, R, 0)."""
        num_rows, num_wanted = (ids_BT if score_positions_BR is None else score_positions_BR).shape
        return torch.empty(num_rows, num_wanted, 0, device=self.device)

    def move(self, *_rows: object, **_options: object) -> None:
        """Do nothing."""

    copy = save = move
