"""A draft model on some of the ranks, whose drafted ids are broadcast to all, once in a round.

One rank's ids count. The rule runs on a rank that holds both models, if there is one. Otherwise the draft's
probabilities are sent to the rank of the target that verifies.

Ranks that share a draft send nothing between its steps but what the model itself sends, because all of them draw the
same ids. An all-gather gives all of them the same bytes as logits, uniforms are integer arithmetic on the same keys,
the same operators make probabilities of the logits, and a draw is integer arithmetic again. Only machines of two kinds
could round a probability differently. They cannot make ranks diverge, because the ids of one rank are broadcast before
the target reads them: ids and probabilities come from that rank, and the others continue from its ids.

Shapes: B sequences, K drafted tokens, P = 2 uniforms per draw, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from llama_ssp.distributed.comms import Comm
from llama_ssp.drafting.protocol import Drafter, SharedDrafter
from llama_ssp.sampling.context import Rows
from llama_ssp.sampling.rules import Draft
from llama_ssp.shapes import static_shape


class ProbsReceiver(NamedTuple):
    """A rank that verifies without holding the draft, to which the draft's probabilities are sent; V of the target.

    `truncates` says that the processors leave few tokens (top-k, top-p, min-p), so that these can be sent alone; of
    each position at most `num_left` if that is not 0, else the draft counts them.
    """

    rank: int
    vocab_size: int
    truncates: bool = False
    num_left: int = 0


class OneSourceDrafter(SharedDrafter):
    """A drafter of some ranks, of which the ids of one count.

    Args:
        comm: the ranks that receive the ids.
        src: the rank in `comm` whose drafted ids count.
        receiver: None if the rule runs on a rank with the draft, or needs no probabilities.
    """

    def __init__(
        self,
        inner: Drafter | None,
        *,
        comm: Comm,
        src: int,
        num_draft_tokens: int,
        device: torch.device,
        receiver: ProbsReceiver | None = None,
    ) -> None:
        super().__init__(inner, num_draft_tokens=num_draft_tokens, device=device)
        self._comm = comm
        self._src = src
        self._receiver = receiver


class BroadcastDrafter(OneSourceDrafter):
    """Broadcasts the ids as soon as they are drafted."""

    def propose(self, rows: Rows, *, uniforms_BKP: Tensor, bucket: int, num_unread: int = 2) -> Draft:
        """Draft on the ranks that hold the draft, and broadcast the ids of one; see `Drafter.propose`."""
        if self._inner:
            draft = self._inner.propose(rows, uniforms_BKP=uniforms_BKP, num_unread=num_unread, bucket=bucket)
            draft = draft._replace(ids_BK=self._comm.broadcast(draft.ids_BK, src=self._src))
            if self._comm.rank != self._src:  # which has written them
                self._write(draft.ids_BK, rows)
            if self._receiver and draft.probs_BTV is not None and self._comm.rank == self._src:
                self._comm.send(draft.probs_BTV[:, :-1], dst=self._receiver.rank)
            return draft
        ids_BK = rows.lengths_B.new_empty(static_shape(uniforms_BKP)[:2])
        ids_BK = self._comm.broadcast(ids_BK, src=self._src)
        self._write(ids_BK, rows)
        if self._receiver is None or self._comm.rank != self._receiver.rank:
            return Draft(ids_BK, None)
        shape = (*static_shape(ids_BK), self._receiver.vocab_size)
        probs_BKV = self._comm.receive(torch.empty(shape, device=ids_BK.device), src=self._src)
        return Draft(ids_BK, pad(probs_BKV, (0, 0, 0, 1)))  # a row of zeros follows
