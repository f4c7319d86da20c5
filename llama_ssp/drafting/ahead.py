"""A draft model on ranks of its own, which drafts while the target verifies; the ranks exchange tokens afterwards.

    draft's ranks     | propose ........ |          | exchange |
    target's ranks    | forward ............. |     | exchange | rule |

Drafted ids go to all ranks. Their probabilities go to the rank that verifies, if the rule reads any. On CPUs both
messages go through shared memory if they fit: the draft then leaves them there, and does not wait for the target to
read them. Where top-k, top-p or min-p leave few tokens, only these are sent, which is exact, since all others have
probability 0. Between GPUs messages have one size, which a CUDA graph has captured: as many tokens as top-k leaves, or
all. How many others leave is known on the device alone, so that the host would wait in every round to learn it.

Shapes: B sequences, K drafted tokens, P = 2 uniforms per draw, T = K + 1, V vocabulary, S tokens that are left.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from llama_ssp.drafting.broadcast import OneSourceDrafter
from llama_ssp.sampling.context import Rows
from llama_ssp.sampling.rules import Draft
from llama_ssp.shapes import static_shape


class AheadDrafter(OneSourceDrafter):
    """Drafts on some ranks; the others get the tokens in `exchange`."""

    @property
    def drafts_here(self) -> bool:
        """Whether this rank has a part of the draft."""
        return self._inner is not None

    def propose(self, rows: Rows, *, uniforms_BKP: Tensor, bucket: int, num_unread: int = 2) -> Draft:
        """Draft on the ranks that hold the draft; the others have no ids before the exchange."""
        if self._inner:
            return self._inner.propose(rows, uniforms_BKP=uniforms_BKP, num_unread=num_unread, bucket=bucket)
        return Draft(rows.lengths_B.new_zeros(static_shape(uniforms_BKP)[:2]), None)

    def exchange(self, draft: Draft, rows: Rows) -> Draft:
        """Give all ranks the drafted ids, behind the rows, and the rank that verifies their probabilities."""
        if self._comm.size == 1:
            return draft
        ids_BK, width = self._announced(draft)
        if self._comm.rank != self._src:  # which has written them
            self._write(ids_BK, rows)
        return Draft(ids_BK, self._delivered(draft, width) if self._receiver else draft.probs_BTV)

    def _announced(self, draft: Draft) -> tuple[Tensor, int]:
        """The ids on all ranks, and how many tokens of a position may have been drawn; 0 for the whole vocabulary."""
        receiver, is_cuda = self._receiver, draft.ids_BK.is_cuda
        if receiver is None or is_cuda or receiver.num_left or not receiver.truncates:
            width = receiver.num_left if receiver else 0
            return self._comm.broadcast(draft.ids_BK.contiguous(), src=self._src), width
        width = 0
        if self._comm.rank == self._src and draft.probs_BTV is not None:
            width = int((draft.probs_BTV > 0).sum(-1).amax())
            width *= 2 * width < receiver.vocab_size
        message = torch.cat([draft.ids_BK.flatten(), draft.ids_BK.new_full((1,), width)])
        message = self._comm.broadcast(message, src=self._src)
        return message[:-1].view_as(draft.ids_BK), int(message[-1])

    def _delivered(self, draft: Draft, width: int) -> Tensor | None:
        """The probabilities (B, T, V) on the rank that verifies; their last row is zero.

        Only those above zero are sent, with their ids, if there are few; a float of 24 bits holds any id.
        """
        assert self._receiver
        rank, vocab_size = self._receiver.rank, self._receiver.vocab_size
        shape, values = (*draft.ids_BK.shape, 2 * width or vocab_size), None
        if self._comm.rank == self._src:
            assert draft.probs_BTV is not None, "a rule that reads probabilities"
            values = draft.probs_BTV[:, :-1].float().contiguous()
            if width:
                values = torch.cat([part.float() for part in values.topk(width)], dim=-1)
        elif self._comm.rank == rank:
            values = torch.empty(shape, device=draft.ids_BK.device)
        self._comm.deliver(values, shape=shape, src=self._src, dst=rank)
        if values is None or self._comm.rank != rank:
            return None
        if width:
            probs_BKS, ids_BKS = values.split(width, dim=-1)
            whole_BKV = values.new_zeros(*draft.ids_BK.shape, vocab_size)
            values = whole_BKV.scatter_(-1, ids_BKS.long(), probs_BKS)
        return pad(values, (0, 0, 0, 1))
