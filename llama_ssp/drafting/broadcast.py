"""On which ranks drafting and deciding happen.

Ranks are equal programs: the loop calls the same methods everywhere. Every token id that ranks act on is one rank's
word, sent to the others in two small messages a round: drafted ids before the target's forward, the decision after it.
So rounding can never make ranks part ways. The rule runs beside the draft where a rank holds both models; only where
none does are the draft's probabilities sent, to the rank of the target that decides.

Shapes: B sequences, R rows being prefilled, S slots, K drafted tokens, P = 2 numbers of a draw, W = K + 1, V
vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from llama_ssp.distributed.comms import Comm
from llama_ssp.drafting.protocol import Drafter
from llama_ssp.models.prefill import Buckets
from llama_ssp.recorded import Held, sizes
from llama_ssp.sampling.rules import Draft, Rule, Verdict
from llama_ssp.sampling.uniforms import Draws


class Judge(NamedTuple):
    """The rank that runs the rule without holding the draft, so that the draft's probabilities have to be sent to it.

    Attributes:
        rank: in the group that listens.
        vocab_size: V of the target.
    """

    rank: int
    vocab_size: int


class AgreedDrafter:
    """The drafter of some ranks, heard by all.

    Args:
        inner: the drafter on ranks that hold it, None elsewhere.
        comm: the ranks that listen.
        src: the rank in `comm` whose drafted ids count.
        num_draft_tokens: K.
        device: where the ids live.
        all_draft: whether all ranks hold a slice of the draft: they have agreed on every id already.
        judge: see `Judge`; None where the rule runs beside the draft, or needs no probabilities.
    """

    def __init__(
        self,
        inner: Drafter | None,
        *,
        comm: Comm,
        src: int,
        num_draft_tokens: int,
        device: torch.device,
        all_draft: bool = False,
        judge: Judge | None = None,
    ) -> None:
        self._inner = inner
        self._comm = comm
        self._src = src
        self.num_draft_tokens = num_draft_tokens
        self._offsets_K = torch.arange(num_draft_tokens, device=device)
        self._all_draft = all_draft
        self._judge = judge

    @property
    def num_allocations(self) -> int:
        """See `Drafter`."""
        return self._inner.num_allocations if self._inner else 0

    def allocate(self, *, batch_size: int, num_slots: int) -> None:
        """Make room on the ranks that draft."""
        if self._inner:
            self._inner.allocate(batch_size=batch_size, num_slots=num_slots)

    def prefill(
        self, tokens_RS: Tensor, lengths_R: Tensor, *, rows: Sequence[int], longest: int, buckets: Buckets
    ) -> None:
        """Read new prompts on the ranks that draft."""
        if self._inner:
            self._inner.prefill(tokens_RS, lengths_R, rows=rows, longest=longest, buckets=buckets)

    def propose(self, tokens_BS: Tensor, lengths_B: Tensor, *, uniforms_BKP: Tensor, bucket: int) -> Draft:
        """Draft on some ranks, and take the ids of one of them on all; see `Drafter.propose`."""
        if self._inner:
            draft = self._inner.propose(tokens_BS, lengths_B, uniforms_BKP=uniforms_BKP, bucket=bucket)
            if not self._all_draft:
                draft = draft._replace(ids_BK=self._comm.broadcast(draft.ids_BK, src=self._src))
            if self._judge and draft.probs_BTV is not None and self._comm.rank == self._src:
                self._comm.send(draft.probs_BTV[:, :-1], dst=self._judge.rank)
            return draft
        ids_BK = lengths_B.new_empty(*sizes(lengths_B), self.num_draft_tokens)
        ids_BK = self._comm.broadcast(ids_BK, src=self._src)
        tokens_BS.scatter_(1, lengths_B[:, None] + self._offsets_K, ids_BK)
        return Draft(ids_BK=ids_BK, probs_BTV=self._receive_probs(ids_BK))

    def held(self, *, bucket: int) -> Held | None:
        """The inner drafter's; see `Drafter.held`."""
        of_inner = self._inner.held(bucket=bucket) if self._inner else Held()
        return of_inner and of_inner.beside([self._offsets_K])

    def _receive_probs(self, ids_BK: Tensor) -> Tensor | None:
        """On the judge: the probabilities that the ids were drawn from, and the row of zeros behind them."""
        if self._judge is None or self._comm.rank != self._judge.rank:
            return None
        shape = (*sizes(ids_BK), self._judge.vocab_size)
        probs_BKV = self._comm.receive(torch.empty(shape, device=ids_BK.device), src=self._src)
        return pad(probs_BKV, (0, 0, 0, 1))


class Decision(NamedTuple):
    """What all ranks do after a forward of the target.

    Attributes:
        num_accepted_B1: how many drafted tokens become text.
        next_ids_B1: the token behind them.
        stop_B1: WISH where the rank that decided wishes to stop, plus NOT_A_NUMBER where a row's logits are none.
    """

    num_accepted_B1: Tensor
    next_ids_B1: Tensor
    stop_B1: Tensor


WISH, NOT_A_NUMBER = 1, 2


class AgreedRule:
    """The rule as run by one rank, whose word all take.

    Args:
        rule: the rule.
        comm: the ranks that listen.
        src: the rank in `comm` that decides.
        device: where the decision lives.

    Attributes:
        made: what it reads beside its arguments; see `Held`.
    """

    def __init__(self, rule: Rule, *, comm: Comm, src: int, device: torch.device) -> None:
        self._rule = rule
        self._comm = comm
        self._src = src
        self._decides = comm.rank == src
        self._wish_11 = torch.zeros(1, 1, dtype=torch.int64, device=device)
        self.made = (self._wish_11,)

    def wish_to_stop(self) -> None:
        """Let the next decision carry the wish to stop; counts on the deciding rank."""
        self._wish_11.fill_(WISH)

    def draw(self, logits_BV: Tensor, uniforms_BP: Tensor) -> Decision:
        """Sample one token for every row from the target's logits."""
        decision = None
        if self._decides:
            ids_B1, probs_BV = self._rule.draw(logits_BV, uniforms_BP)
            weights_B1 = (logits_BV if probs_BV is None else probs_BV).gather(1, ids_B1)
            decision = self._decision(Verdict(torch.zeros_like(ids_B1), ids_B1, weights_B1))
        return self._agree(decision, batch_size=sizes(uniforms_BP)[0])

    def process(self, logits_BWV: Tensor) -> Tensor:
        """Make of the target's logits what `verify` looks at, where it is looked at."""
        return self._rule.process(logits_BWV) if self._decides else logits_BWV

    def verify(self, draft: Draft, target_BWV: Tensor, *, draws: Draws) -> Decision:
        """Accept a prefix of the draft and choose the token behind it."""
        decision = self._decision(self._rule.verify(draft, target_BWV, draws=draws)) if self._decides else None
        return self._agree(decision, batch_size=sizes(draft.ids_BK)[0])

    def _decision(self, verdict: Verdict) -> Decision:
        num_accepted_B1, next_ids_B1, weights_B1 = verdict
        is_nan_B1 = weights_B1 != weights_B1  # noqa: PLR0124 - true of NaN alone
        return Decision(num_accepted_B1, next_ids_B1, torch.add(self._wish_11, is_nan_B1, alpha=NOT_A_NUMBER))

    def _agree(self, decision: Decision | None, *, batch_size: int) -> Decision:
        """Send the deciding rank's word to all in one message of 3 numbers a row; a lone rank keeps its own."""
        if decision and self._comm.size == 1:
            return decision
        word_B3 = torch.cat([*decision], dim=1) if decision else self._wish_11.new_empty(batch_size, 3)
        word_B3 = self._comm.broadcast(word_B3, src=self._src)
        return Decision(*word_B3.split_with_sizes([1, 1, 1], dim=1))
