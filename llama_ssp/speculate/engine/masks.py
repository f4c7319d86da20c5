"""Masks of the tokens that may follow a text: they restrict the target's law at each place, and a draft's.

A text's constraint lives on the host. Between drafting and verification the host reads the drafted ids, and writes a
mask for the text and one for each drafted token after it; so rounds with such a row wait for the host once.

    text so far, drafted tokens    t    d1   d2   d3
    the target's logits            after each of them
    masks of the constraint        m0   m1   m2   m3      bits; all ones after a token that m forbids, which is never
                                                          accepted, and in rows without a constraint

Tokens that a mask forbids get the logit minus infinity before biases, penalties and all processors.

A draft that draws from what the masks leave is accepted far more often, and any law of a draft is right. The first mask
is there before the round. On a CPU, where nothing runs ahead of the host, each drafted token gets its mask at once.

    on a GPU     m0 | draft d1, d2, d3 | m1 m2 m3, while the target reads
    on a CPU     m0 | d1 | m1 | d2 | m2 | d3 | the target reads | m3

Shapes: B sequences, R rows of a rank, K drafted tokens, T = K + 1 places, V vocabulary, X words of 32 bits.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from llama_ssp.models.graph_inputs import Workspace
from llama_ssp.models.upload import Arriving, to_device
from llama_ssp.ranks.comms import Comm
from llama_ssp.registry import imported
from llama_ssp.settings.constraints import constraint_asked
from llama_ssp.settings.schema import SamplingConfig
from llama_ssp.speculate.sampling.draft import Draft, Topology

WORD = 32
Constraints = Sequence["Constraint | None"]


class Vocabulary(NamedTuple):
    """The tokens that a constraint chooses from; the tokenizer may know fewer than `size`."""

    tokenizer: PreTrainedTokenizerBase
    size: int
    eos_ids: tuple[int, ...]


class Constraint(Protocol):
    """The tokens that may follow one text, as it grows; kept on the host of every rank.

    A class may have a static method `fill_rows(masks_BTX, nodes)`, which takes the `Nodes` of all rows of this class
    and writes their masks together. Without it, `fill` is called for each row, and again when the row's draft has
    grown.

    Attributes:
        may_end: whether the text may end here.
        is_over: whether only an end-of-sequence token may follow.
        problem: why the constraint can no longer say what may follow; empty if it can.
    """

    problem: str

    @property
    def may_end(self) -> bool:
        """See above."""

    @property
    def is_over(self) -> bool:
        """See above."""

    def extend(self, token: int) -> None:
        """Add a token to the text."""

    def forced(self, number: int) -> Sequence[int]:
        """Return up to `number` tokens that must follow, if they are known; drafts begin with them."""

    def fill(self, masks_TX: Tensor, ids: Sequence[int], parents: Sequence[int]) -> None:
        """Write the masks (T, X) after the text and after each node of a draft; bit 0 of word 0 is token 0.

        The first `len(ids) + 1` masks are written, except after a node whose token is forbidden. Node n + 1 has token
        `ids[n]` and follows node `parents[n]`, where node 0 is the text. If the constraint cannot say what may follow,
        nothing is allowed.
        """


class Nodes(NamedTuple):
    """A row whose masks are wanted, and its draft; masks of nodes before `first` have been written already."""

    row: int
    constraint: Any
    ids: Sequence[int] = ()
    parents: Sequence[int] = ()
    first: int = 0


Begin = Callable[[], Constraint]
"""Begins the constraint of a text, at once."""


def prepare_constraint(sampling: SamplingConfig, vocabulary: Vocabulary) -> Begin | None:
    """Prepare the constraint of a text, if sampling asks for one; raises ConfigError if it is invalid."""
    if not (record := constraint_asked(sampling)):
        return None
    prepared: Begin = imported(record.prepare, setting=record.name)(sampling, vocabulary)
    return prepared


def constraint_of(sampling: SamplingConfig, vocabulary: Vocabulary) -> Constraint | None:
    """Prepare and begin the constraint of a text; see `prepare_constraint`."""
    begin = prepare_constraint(sampling, vocabulary)
    return begin and begin()


class TokenMasks(Workspace):
    """The masks of a round's rows, and their forced tokens, at fixed addresses on the device.

    Attributes:
        follows_drafts: whether masks are written as drafts grow; if not, drafts are drawn from the first masks alone.
        number: the number by which traces find this object.
    """

    def __init__(self, num_places: int, vocab_size: int, device: torch.device) -> None:
        self._sizes, self._device = (num_places, -(-vocab_size // WORD)), device
        self.bits_BTX = self._host_BTX = torch.empty(0, *self._sizes, dtype=torch.int32)
        self.forced_BK = torch.empty(0, 0, dtype=torch.int64)
        self.num_allocations = self._num_written = 0
        self.follows_drafts = device.type == "cpu"
        self.number = next(_numbers)
        _of_number[self.number] = self

    def allocate(self, batch_size: int) -> None:
        """Make room for the masks of `batch_size` rows."""
        if len(self.bits_BTX) != batch_size:
            shape = batch_size, *self._sizes
            self.bits_BTX = self._host_BTX = torch.full(shape, -1, dtype=torch.int32, device=self._device)
            if self._device.type == "cuda":
                self._host_BTX = torch.empty(shape, dtype=torch.int32, pin_memory=True)
            self.forced_BK = torch.full((batch_size, self._sizes[0] - 1), -1, device=self._device)
            self.num_allocations += 1

    def force(self, constraints: Constraints, num_tokens: int) -> bool:
        """Write the forced tokens of all rows; returns whether there are any."""
        found = [[*constraint.forced(num_tokens)] if constraint else [] for constraint in constraints]
        if any(found):
            width = self.forced_BK.shape[1]
            filled = [tokens + [-1] * (width - len(tokens)) for tokens in found]
            self.forced_BK[: len(filled)].copy_(to_device(filled, self._device))
        return any(found)

    def begin(self, rows: slice, constraints: Constraints) -> None:
        """Write the masks after the texts of these rows, for drawing their drafts."""
        self._constraint_of = constraints.__getitem__  # not the constraints, in which a trace would look for tensors
        self._num_written = 0
        self._host_BTX.fill_(-1)
        self._write(Nodes(row, constraints[row]) for row in range(rows.start, rows.stop))

    def fill(self, rows: slice, constraints: Constraints, drafted: "Drafted | None") -> None:
        """Write the masks after these rows' texts and drafts; only the last ones if others were written before."""
        drafts = [(row, drafted.of_row(row) if drafted else ((), ())) for row in range(rows.start, rows.stop)]
        first, self._num_written = self._num_written, 0
        if not first:
            self._host_BTX.fill_(-1)
        self._write(
            Nodes(row, constraints[row], ids, parents, first) for row, (ids, parents) in drafts if first <= len(ids)
        )

    def after(self, drafted_RK: Tensor, first_row: int) -> Tensor:
        """Write the masks after the last of the tokens drafted so far for the rows from `first_row` on.

        Returns a copy (R, 1, X). While a trace is made, it is called twice for a place.
        """
        num_rows, place = drafted_RK.shape
        rows = enumerate(drafted_RK.tolist(), start=first_row)
        self._write(Nodes(row, self._constraint_of(row), ids, range(place), place) for row, ids in rows)
        self._num_written = place + 1
        return self._host_BTX[first_row : first_row + num_rows, place : place + 1].clone()

    def _write(self, nodes: Iterable[Nodes]) -> None:
        write(self._host_BTX, nodes)
        if self._host_BTX is not self.bits_BTX:
            self.bits_BTX.copy_(self._host_BTX, non_blocking=True)


class MasksOfDrafts:
    """The masks from which the drafts of some rows are drawn; see `sampling.context.DraftMasks`."""

    def __init__(self, masks: TokenMasks, rows: slice) -> None:
        self._masks, self._rows = masks, rows

    def __getitem__(self, rows: slice) -> "MasksOfDrafts":
        """Return the masks of some of the batch's rows."""
        return MasksOfDrafts(self._masks, rows)

    def forbidden(self, drafted: Sequence[Tensor], ids: range) -> Tensor | None:
        """See `sampling.context.DraftMasks`."""
        if not drafted:
            return forbidden(self._masks.bits_BTX[self._rows, :1], ids)
        if not self._masks.follows_drafts:
            return None
        drafted_RK = torch.cat([*drafted], dim=1)
        return forbidden(torch.ops.llama_ssp.masks_after(drafted_RK, self._masks.number, self._rows.start), ids)


_numbers, _of_number = count(), WeakValueDictionary[int, TokenMasks]()
_library = torch.library.Library("llama_ssp", "FRAGMENT")
_library.define("masks_after(Tensor drafted, int masks, int first_row) -> Tensor")  # which a trace can hold
_library.impl("masks_after", lambda drafted_RK, number, row: _of_number[number].after(drafted_RK, row), "CPU")


def write(masks_BTX: Tensor, nodes: Iterable[Nodes]) -> None:
    """Write the masks of the rows that have a constraint; a repeated row has the same draft and gets the same masks."""
    nodes = [one for one in nodes if one.constraint]
    first_rows, by_class = (
        {id(one.constraint): one.row for one in reversed(nodes)},
        defaultdict[type, list[Nodes]](list),
    )
    for one in nodes:
        if one.row == first_rows[id(one.constraint)]:
            by_class[type(one.constraint)].append(one)
    for kind, some in by_class.items():
        if fill_rows := getattr(kind, "fill_rows", None):
            fill_rows(masks_BTX, some)
        else:
            for row, constraint, ids, parents, _ in some:
                constraint.fill(masks_BTX[row], ids, parents)
    for one in nodes:
        if one.row != (first := first_rows[id(one.constraint)]):
            masks_BTX[one.row].copy_(masks_BTX[first])


class Drafted(NamedTuple):
    """The ids of drafts on their way to the host, with the parents of their nodes if they are trees."""

    arriving: Arriving
    comm: Comm
    is_tree: bool

    @classmethod
    def of(cls, draft: Draft, comm: Comm) -> "Drafted":
        """Begin to copy a draft to the host."""
        nodes, ids_BX = draft.nodes, draft.ids_BK
        if is_tree := isinstance(nodes, Topology):
            ids_BX = torch.cat([ids_BX, nodes.parents_BN], dim=1)
        return cls(Arriving.of(ids_BX), comm, is_tree)

    def of_row(self, row: int) -> tuple[list[int], Sequence[int]]:
        """The ids of a row, and the parents of its nodes; waits for them."""
        ids: list[int] = self.arriving.read(self.comm)[row].tolist()
        if not self.is_tree:
            return ids, range(len(ids))
        return ids[: len(ids) // 2], ids[len(ids) // 2 :]


def first_masks(constraints: Constraints, vocab_size: int, device: torch.device) -> Tensor | None:
    """The masks (B, 1, X) of texts that begin; None if no text has a constraint."""
    if not any(constraints):
        return None
    bits_B1X = torch.full((len(constraints), 1, -(-vocab_size // WORD)), -1, dtype=torch.int32)
    write(bits_B1X, (Nodes(row, constraint) for row, constraint in enumerate(constraints)))
    return to_device(bits_B1X, device)


def forbidden(bits_BTX: Tensor, ids: range) -> Tensor:
    """Whether tokens of these ids are forbidden: (B, T, V)."""
    places_32 = torch.ones(WORD, dtype=torch.int32, device=bits_BTX.device).bitwise_left_shift_(
        torch.arange(WORD, dtype=torch.int32, device=bits_BTX.device)
    )
    return ((bits_BTX[..., None] & places_32) == 0).flatten(-2)[..., ids.start : ids.stop]
