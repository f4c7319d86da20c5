"""A draft on some of the ranks: the ranks that draft, and how all ranks get its tokens.

    BroadcastDrafter    the ids of one rank are broadcast to all, once in a round
    AheadDrafter        the draft has ranks of its own and drafts while the target verifies; then they exchange
    BatchSplitDrafter   every rank with a copy of the draft drafts and verifies some of the rows

Ranks that share a draft send nothing between its steps but what the model itself sends: from the same gathered logits
and the same keys all draw the same ids. Machines of two kinds could round a probability differently, so ids and
probabilities of one rank count. The rule runs on a rank that holds both models, if there is one. Otherwise the draft's
probabilities are sent to the rank that verifies.
Where top-k, top-p or min-p leave few tokens, only these are sent, which is exact, since all others have probability 0.
Between GPUs messages have one size, which a CUDA graph has captured: as many tokens as top-k leaves, or all.

A split batch: a rank has the draft's probabilities of its own rows and the target's logits of all rows, so it also
verifies its own rows (`engine.verifier`). Drafted ids are gathered before the target's forward, decisions after it.

    7 rows on 3 ranks   | 0 1 | 2 3 | 4 5 6 |

Shapes: B sequences, R rows being prefilled, S slots, K drafted tokens, P = 2 uniforms per draw, T = K + 1, V
vocabulary, S tokens that are left, X numbers of a row.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from llama_ssp.architectures.engine import PREFILL_CHUNK
from llama_ssp.models.cache import Taps
from llama_ssp.models.prefill import Buckets, Held, Prompts
from llama_ssp.models.upload import to_device
from llama_ssp.ranks.comms import Comm
from llama_ssp.speculate.drafters.drafter import Drafter, DrafterParts, heeds_masks, writes_ids
from llama_ssp.speculate.sampling.context import Rows
from llama_ssp.speculate.sampling.draft import POINT_MASS, Chain, Draft, Law, Topology, find_topology


class ProbsReceiver(NamedTuple):
    """A rank that verifies without holding the draft, so that the draft's probabilities are sent to it.

    Attributes:
        vocab_size: V of the target.
        truncates: whether the processors leave few tokens (top-k, top-p, min-p), so that only these need to be sent.
        num_left: the most tokens left at a position; 0 if the draft has to count them.
    """

    rank: int
    vocab_size: int
    truncates: bool = False
    num_left: int = 0


class TapsSender:
    """Sends the target's taps from one of its ranks to the draft head's ranks that have no target.

    `most_accepted` is the most drafted tokens that a round accepts.
    """

    def __init__(self, taps: Taps, src: int, *, most_accepted: int) -> None:
        self._taps, self._src, self._most_accepted = taps, src, most_accepted
        self._offsets: dict[int, Tensor] = {}

    def send_prompts(self, prompts: Prompts, rows: Sequence[int], *, comm: Comm) -> None:
        """Send the taps of prompts, which become these rows, from the first token that the head reads.

        If the held tokens of a prompt are whole chunks, a head may read the last of these chunks again.
        """
        rows_R = to_device(rows, prompts.tokens_RS.device)
        first = max(min(start - (1 if start % PREFILL_CHUNK else PREFILL_CHUNK) for start in prompts.starts), 0)
        for positions_RT in self._taps.read_of_prompts(prompts.lengths_R, first=first, longest=prompts.longest):
            self._taps.share(positions_RT, rows_R, comm=comm, src=self._src)

    def send_newest(self, rows: Rows, *, num_unread: int, comm: Comm) -> None:
        """Send the taps of each row's newest tokens, without those of the last token, which the target has not read."""
        number, lengths_B1 = self._most_accepted + num_unread - 1, rows.lengths_B[:, None]
        if number not in self._offsets:
            self._offsets[number] = torch.arange(number, device=lengths_B1.device)
        positions_BT = (lengths_B1 - 1 - number + self._offsets[number]).clamp_min(0)
        positions_BT = self._taps.read_of_newest(positions_BT)
        self._taps.share(positions_BT, rows.places, comm=comm, src=self._src)


class _SharedDrafter:
    """The drafter of some ranks, whose drafts all ranks receive; `inner` is this rank's part, None on other ranks."""

    def __init__(self, inner: Drafter | None, parts: DrafterParts) -> None:
        self._inner, self._tree = inner, parts.tree
        self.num_draft_tokens = parts.num_draft_tokens
        self.repeats_operators = inner is None or inner.repeats_operators
        self.reads_by_length = inner is None or inner.reads_by_length
        self.writes_ids, self.heeds_masks = inner is None or writes_ids(inner), inner is None or heeds_masks(inner)
        self._offsets_K = torch.arange(parts.num_draft_tokens, device=parts.device)
        self._ends_early = parts.config.ends_early

    @property
    def is_invariant(self) -> bool:
        """See `Drafter`."""
        return self._inner is None or bool(getattr(self._inner, "is_invariant", False))

    @property
    def num_allocations(self) -> int:
        """See `Drafter`."""
        return self._inner.num_allocations if self._inner else 0

    def allocate(self, *, batch_size: int, num_slots: int) -> None:
        """Allocate caches on the ranks that draft."""
        if self._inner:
            self._inner.allocate(batch_size=batch_size, num_slots=num_slots)

    def prefill(self, prompts: Prompts, *, rows: Sequence[int], buckets: Buckets) -> None:
        """Read new prompts on the ranks that draft."""
        if self._inner:
            self._inner.prefill(prompts, rows=rows, buckets=buckets)

    def _packed(self, draft: Draft) -> Tensor:
        """Return the ids of a draft, followed by how many of them count if such drafts say so: (B, X).

        If all tokens count, or on a rank without a draft, the number has no meaning.
        """
        if not self._ends_early:
            return draft.ids_BK
        num_B1 = draft.num_B1 if isinstance(draft.num_B1, Tensor) else draft.ids_BK[:, :1]
        return torch.cat([draft.ids_BK, num_B1], dim=1)

    def _unpacked(self, draft: Draft, packed_BX: Tensor) -> Draft:
        """A draft with the ids and numbers of `_packed`."""
        if not self._ends_early:
            return draft._replace(ids_BK=packed_BX)
        return draft._replace(ids_BK=packed_BX[:, :-1], num_B1=packed_BX[:, -1:])

    def _write(self, ids_BK: Tensor, rows: Rows, *, num_tokens: int) -> None:
        rows.tokens_BS.scatter_(1, rows.lengths_B[:, None] + self._offsets_K[:num_tokens], ids_BK)


class BroadcastDrafter(_SharedDrafter):
    """Broadcasts the ids that rank `src` of `comm` drafts, as soon as they are drafted.

    `receiver` is None if the rule runs on a rank with the draft, or needs no probabilities. On ranks that do not
    verify, a point mass can take the place of the probabilities. Messages of dynamic trees hold the ids, then the
    parents of the nodes.
    """

    def __init__(
        self,
        inner: Drafter | None,
        parts: DrafterParts,
        *,
        comm: Comm,
        src: int,
        receiver: ProbsReceiver | None = None,
        taps: TapsSender | None = None,
    ) -> None:
        super().__init__(inner, parts)
        self._comm, self._src, self._receiver, self._taps = comm, src, receiver, taps

    def prefill(self, prompts: Prompts, *, rows: Sequence[int], buckets: Buckets) -> None:
        """Read new prompts on the ranks that draft, with the target's taps of them."""
        if self._taps:
            self._taps.send_prompts(prompts, rows, comm=self._comm)
        super().prefill(prompts, rows=rows, buckets=buckets)

    def propose(self, rows: Rows, *, num_tokens: int, uniforms_BKP: Tensor, bucket: int, num_unread: int = 2) -> Draft:
        """Draft on the ranks that hold the draft, and broadcast the ids of one; see `Drafter.propose`."""
        if self._taps:
            self._taps.send_newest(rows, num_unread=num_unread, comm=self._comm)
        draft = self._own_draft(
            rows, num_tokens=num_tokens, uniforms_BKP=uniforms_BKP, bucket=bucket, num_unread=num_unread
        )
        if self._tree and self._tree.shape.is_dynamic:
            parents_BN = draft.nodes.parents_BN if isinstance(draft.nodes, Topology) else draft.ids_BK
            both_BX = self._comm.broadcast(torch.cat([draft.ids_BK, parents_BN], dim=1), src=self._src)
            ids_BK, parents_BN = both_BX.split(num_tokens, dim=1)
            draft = Draft(ids_BK, nodes=find_topology(parents_BN, depth=self._tree.depth))
        else:
            draft = self._unpacked(draft, self._comm.broadcast(self._packed(draft), src=self._src))
        if self._comm.rank != self._src:  # which has written them
            self._write(draft.ids_BK, rows, num_tokens=num_tokens)
        if self._receiver and self._comm.rank == self._src:
            self._comm.send(draft.drawn_law[:, :-1], dst=self._receiver.rank)
        elif self._receiver and self._comm.rank == self._receiver.rank:
            num_rows = self._tree.num_parents if self._tree else num_tokens
            shape = (draft.ids_BK.shape[0], num_rows, self._receiver.vocab_size)
            probs_BKV = self._comm.receive(torch.empty(shape, device=draft.ids_BK.device), src=self._src)
            draft = draft._replace(law=pad(probs_BKV, (0, 0, 0, 1)))  # a row of zeros follows
        return draft

    def _own_draft(self, rows: Rows, *, num_tokens: int, **how: Any) -> Draft:
        """The draft of this rank; on a rank without the draft, room for the ids of another."""
        if self._inner:
            return self._inner.propose(rows, num_tokens=num_tokens, **how)
        num_rows, tree = rows.lengths_B.shape[0], self._tree
        nodes = tree.nodes(num_rows) if tree and not tree.shape.is_dynamic else Chain()
        return Draft(rows.lengths_B.new_zeros(num_rows, num_tokens), nodes=nodes)


class AheadDrafter(BroadcastDrafter):
    """Drafts on some ranks while the target verifies on others; these get the tokens in `exchange`."""

    @property
    def drafts_here(self) -> bool:
        """Whether this rank has a part of the draft."""
        return self._inner is not None

    def propose(self, rows: Rows, **how: Any) -> Draft:
        """Draft on the ranks that hold the draft; the others have token 0 until the exchange."""
        return self._own_draft(rows, **how)

    def exchange(self, draft: Draft, rows: Rows) -> Draft:
        """Write the drafted ids after the rows on all ranks, and send their probabilities to the rank that verifies."""
        if self._comm.size == 1:
            return draft
        ids_BK, width = self._announced(draft)
        if self._comm.rank != self._src:  # which has written them
            self._write(ids_BK, rows, num_tokens=self.num_draft_tokens)
        return Draft(ids_BK, self._delivered(draft, width, self._receiver) if self._receiver else draft.law)

    def _announced(self, draft: Draft) -> tuple[Tensor, int]:
        """Broadcast the ids; return them, and the most tokens with a probability at any position, 0 for all of V."""
        receiver = self._receiver
        if receiver is None or draft.ids_BK.is_cuda or receiver.num_left or not receiver.truncates:
            width = receiver.num_left if receiver else 0
            return self._comm.broadcast(draft.ids_BK.contiguous(), src=self._src), width
        width = 0
        if self._comm.rank == self._src:
            width = int((draft.drawn_law > 0).sum(-1).amax())
            if 2 * width >= receiver.vocab_size:
                width = 0
        message = torch.cat([draft.ids_BK.flatten(), draft.ids_BK.new_full((1,), width)])
        message = self._comm.broadcast(message, src=self._src)
        return message[:-1].view_as(draft.ids_BK), int(message[-1])

    def _delivered(self, draft: Draft, width: int, receiver: ProbsReceiver) -> Law:
        """Return the probabilities on the rank that verifies, and a point mass on other ranks.

        If few probabilities are above zero, only these are sent, with their ids; a float of 24 bits holds any id.
        """
        is_receiver = self._comm.rank == receiver.rank
        shape, values = (*draft.ids_BK.shape, 2 * width or receiver.vocab_size), None
        if self._comm.rank == self._src:
            values = draft.drawn_law[:, :-1].float().contiguous()
            if width:
                values = torch.cat([part.float() for part in values.topk(width)], dim=-1)
        elif is_receiver:
            values = torch.empty(shape, device=draft.ids_BK.device)
        self._comm.deliver(values, shape=shape, src=self._src, dst=receiver.rank)
        if values is None or not is_receiver:
            return POINT_MASS
        if width:
            probs_BKS, ids_BKS = values.split(width, dim=-1)
            whole_BKV = values.new_zeros(*draft.ids_BK.shape, receiver.vocab_size)
            values = whole_BKV.scatter_(-1, ids_BKS.long(), probs_BKS)
        return pad(values, (0, 0, 0, 1))


class BatchSplit:
    """Assigns rows to some ranks of `comm`, in the order in which these are given, and gathers them on all ranks."""

    def __init__(self, comm: Comm, ranks: Sequence[int]) -> None:
        self._comm = comm
        self._places = {rank: place for place, rank in enumerate(ranks)}

    def own_rows(self, batch_size: int, rank: int | None = None) -> slice:
        """Return the rows of a rank, by default this one."""
        place, num_ranks = self._places.get(self._comm.rank if rank is None else rank), len(self._places)
        if place is None:
            return slice(0, 0)
        return slice(batch_size * place // num_ranks, batch_size * (place + 1) // num_ranks)

    def gather(self, own_RX: Tensor, *, batch_size: int) -> Tensor:
        """Gather the rows (B, X) of all ranks on every rank."""
        width = own_RX.shape[1]
        rows = [self.own_rows(batch_size, rank) for rank in range(self._comm.size)]
        widths = tuple((own.stop - own.start) * width for own in rows)
        return self._comm.all_gather_last(own_RX.flatten(), widths).view(batch_size, width)


class BatchSplitDrafter(_SharedDrafter):
    """Combines the drafters of several ranks."""

    def __init__(self, inner: Drafter | None, parts: DrafterParts, *, split: BatchSplit) -> None:
        super().__init__(inner, parts)
        self._split = split

    def allocate(self, *, batch_size: int, num_slots: int) -> None:
        """Allocate caches for this rank's rows."""
        self._own = self._split.own_rows(batch_size)
        if num_rows := self._own.stop - self._own.start:
            super().allocate(batch_size=num_rows, num_slots=num_slots)

    def prefill(self, prompts: Prompts, *, rows: Sequence[int], buckets: Buckets) -> None:
        """Read the new prompts that become rows of this rank."""
        own = range(self._own.start, self._own.stop)
        mine = [place for place, row in enumerate(rows) if row in own]
        if mine:
            own_rows = [rows[place] - self._own.start for place in mine]
            some, first = prompts.some(mine), self._own.start
            held = [place._replace(row=place.row - first) if place.row in own else Held() for place in some.held]
            super().prefill(some._replace(held=held, longest=prompts.longest), rows=own_rows, buckets=buckets)

    def propose(self, rows: Rows, *, num_tokens: int, uniforms_BKP: Tensor, bucket: int, num_unread: int = 2) -> Draft:
        """Draft this rank's rows and gather the ids of all; the probabilities are of its own rows only."""
        batch_size, own = rows.lengths_B.shape[0], self._own
        draft = Draft(rows.lengths_B.new_empty(0, num_tokens))
        if self._inner and own.start < own.stop:
            draft = self._inner.propose(
                rows.some(own),
                num_tokens=num_tokens,
                uniforms_BKP=uniforms_BKP[own],
                num_unread=num_unread,
                bucket=bucket,
            )
        draft = self._unpacked(draft, self._split.gather(self._packed(draft), batch_size=batch_size))
        self._write(draft.ids_BK, rows, num_tokens=num_tokens)
        return draft
