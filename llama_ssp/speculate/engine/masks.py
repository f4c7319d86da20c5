"""Masks of the tokens that may follow a text: they restrict the target's law at each place.

A text's constraint lives on the host. Between drafting and verification the host reads the drafted ids, and writes a
mask for the text and one for each drafted token after it; so rounds with such a row wait for the host once.

    text so far, drafted tokens    t    d1   d2   d3
    the target's logits            after each of them
    masks of the constraint        m0   m1   m2   m3      bits; all ones after a token that m forbids, which is never
                                                          accepted, and in rows without a constraint

Tokens that a mask forbids get the logit minus infinity before biases, penalties and all processors.

Shapes: B sequences, K drafted tokens, T = K + 1 places, V vocabulary, X words of 32 bits.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from llama_ssp.models.upload import Arriving, to_device
from llama_ssp.ranks.comms import Comm
from llama_ssp.registry import imported
from llama_ssp.settings.constraints import constraint_asked
from llama_ssp.settings.schema import SamplingConfig
from llama_ssp.speculate.sampling.draft import Draft, Topology
from llama_ssp.workspaces import Workspace

WORD = 32


class Vocabulary(NamedTuple):
    """The tokens that a constraint chooses from; the tokenizer may know fewer than `size`."""

    tokenizer: PreTrainedTokenizerBase
    size: int
    eos_ids: tuple[int, ...]


class Constraint(Protocol):
    """The tokens that one text may go on with, as it grows; on the host of every rank.

    Attributes:
        may_end: the text may end here.
        is_over: nothing may follow but an end-of-sequence token.
        problem: why the constraint can no longer say what may follow; empty if it can.
    """

    may_end: bool
    is_over: bool
    problem: str

    def extend(self, token: int) -> None:
        """Add a token to the text."""

    def forced(self, number: int) -> Sequence[int]:
        """Up to `number` tokens that will follow, if they are known: drafts begin with them."""

    def fill(self, masks_TX: Tensor, ids: Sequence[int], parents: Sequence[int]) -> None:
        """Write the masks (T, X) after the text and after each node of a draft, bit 0 of word 0 for token 0.

        The first `len(ids) + 1` are written, but for nodes after a forbidden one. Node `parents[n]`, 0 for the text, is
        followed by node n + 1 with token `ids[n]`. Nothing is allowed where the constraint cannot say what is.
        """


Begin = Callable[[], Constraint]
"""Begins the constraint of a text, at once."""


def prepare_constraint(sampling: SamplingConfig, vocabulary: Vocabulary) -> Begin | None:
    """Prepare the constraint of a text, if sampling asks for one; raises ConfigError for one that cannot be."""
    if not (record := constraint_asked(sampling)):
        return None
    prepared: Begin = imported(record.prepare, setting=record.name)(sampling, vocabulary)
    return prepared


def constraint_of(sampling: SamplingConfig, vocabulary: Vocabulary) -> Constraint | None:
    """Prepare and begin the constraint of a text; see `prepare_constraint`."""
    begin = prepare_constraint(sampling, vocabulary)
    return begin and begin()


class TokenMasks(Workspace):
    """The masks of a round's rows, and their forced tokens, in one place of the device."""

    def __init__(self, num_places: int, vocab_size: int, device: torch.device) -> None:
        self._sizes, self._device = (num_places, -(-vocab_size // WORD)), device
        self.bits_BTX = self._host_BTX = torch.empty(0, *self._sizes, dtype=torch.int32)
        self.forced_BK = torch.empty(0, 0, dtype=torch.int64)
        self.num_allocations = 0

    def allocate(self, batch_size: int) -> None:
        """Make room for the masks of `batch_size` rows."""
        if len(self.bits_BTX) != batch_size:
            shape = batch_size, *self._sizes
            self.bits_BTX = self._host_BTX = torch.full(shape, -1, dtype=torch.int32, device=self._device)
            if self._device.type == "cuda":
                self._host_BTX = torch.empty(shape, dtype=torch.int32, pin_memory=True)
            self.forced_BK = torch.full((batch_size, self._sizes[0] - 1), -1, device=self._device)
            self.num_allocations += 1

    def force(self, constraints: Sequence[Constraint | None], num_tokens: int) -> bool:
        """Write the forced tokens of all rows; returns whether there are any."""
        found = [[*constraint.forced(num_tokens)] if constraint else [] for constraint in constraints]
        if any(found):
            width = self.forced_BK.shape[1]
            filled = [tokens + [-1] * (width - len(tokens)) for tokens in found]
            self.forced_BK[: len(filled)].copy_(to_device(filled, self._device))
        return any(found)

    def fill(self, rows: slice, constraints: Sequence[Constraint | None], drafted: "Drafted | None") -> None:
        """Write the masks of these rows and their drafts."""
        self._host_BTX.fill_(-1)
        for row in range(rows.start, rows.stop):
            if constraint := constraints[row]:
                constraint.fill(self._host_BTX[row], *(drafted.of_row(row) if drafted else ((), ())))
        if self._host_BTX is not self.bits_BTX:
            self.bits_BTX.copy_(self._host_BTX, non_blocking=True)


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


def first_masks(constraints: Sequence[Constraint | None], vocab_size: int, device: torch.device) -> Tensor | None:
    """The masks (B, 1, X) of texts that begin; None if no text has a constraint."""
    if not any(constraints):
        return None
    bits_B1X = torch.full((len(constraints), 1, -(-vocab_size // WORD)), -1, dtype=torch.int32)
    for row, constraint in enumerate(constraints):
        if constraint:
            constraint.fill(bits_B1X[row], (), ())
    return to_device(bits_B1X, device)


def forbidden(bits_BTX: Tensor, ids: range) -> Tensor:
    """Whether tokens of these ids are forbidden: (B, T, V)."""
    places_32 = torch.arange(WORD, dtype=torch.int32, device=bits_BTX.device)
    bits_BTV = (bits_BTX[..., None] >> places_32).bitwise_and_(1).flatten(-2)
    return bits_BTV[..., ids.start : ids.stop] == 0
