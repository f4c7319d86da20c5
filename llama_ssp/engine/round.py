"""Prefill, one plain step and one speculative round, as fixed sequences of tensor operations.

No step asks the device for a value, so a round costs its forwards and little else, and can be captured as a graph. The
host chooses only shapes: which rows, how wide a bucket of the cache.

    speculative round, K = 3                L-2   L-1    L    L+1   L+2   L+3
      the draft's first step reads           t     t
      its later steps read                               d1    d2
      the target reads                             t     d1    d2    d3
      two accepted: the text gains                       d1    d2    x           x is the target's own

Shapes: B sequences, R rows being prefilled, K drafted tokens, W = K + 1, V vocabulary, N random numbers of a round, P =
2 of a draw; L is a row's length.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from llama_ssp.drafting.broadcast import AgreedRule
from llama_ssp.drafting.protocol import Drafter
from llama_ssp.engine.clock import Clock
from llama_ssp.engine.state import BatchState
from llama_ssp.models.prefill import Buckets, read_prompts
from llama_ssp.models.runner import Runner
from llama_ssp.sampling.rules import Draft
from llama_ssp.sampling.uniforms import DrawTable


class Opening(NamedTuple):
    """What a round begins with: its random numbers, and the draft."""

    numbers_BN: Tensor
    ids_BK: Tensor
    probs_BTV: Tensor | None = None


class Rounds:
    """The target, the drafter and the rule, put to work on a batch.

    Args:
        target: the model whose distribution the text has.
        drafter: what proposes tokens; None for plain decoding.
        rule: how tokens are drawn and accepted, the same on every rank.
        clock: takes the time of the forwards.

    Attributes:
        growth: the most tokens by which a row grows in one round.
        keeps_state: a round counts on the addresses of the batch's tensors, so that one batch should serve many runs.
    """

    keeps_state = False

    def __init__(self, target: Runner, drafter: Drafter | None, *, rule: AgreedRule, clock: Clock) -> None:
        self.target = target
        self.drafter = drafter
        self.rule = rule
        self.clock = clock
        num_draft_tokens = drafter.num_draft_tokens if drafter else 0
        self.growth = num_draft_tokens + 1
        self.last_and_drafted_W = torch.arange(-1, num_draft_tokens, device=target.device)
        self.draws = DrawTable(num_draft_tokens, target.device)

    def prefill(self, prompts: BatchState, rows: Sequence[int], *, longest: int, buckets: Buckets) -> Tensor:
        """Read prompts into the caches and sample each row's first token.

        Args:
            prompts: the rows to be prefilled and no others (R rows).
            rows: which rows of the caches they become.
            longest: length of the longest prompt.
            buckets: widths of the cache.

        Returns:
            The result of these rows, as `BatchState.commit` gives it.
        """
        tokens_RS, lengths_R = prompts.tokens_BS, prompts.lengths_B
        rows_R = torch.tensor(rows, device=self.target.device)
        logits_RV = read_prompts(self.target, tokens_RS, lengths_R, rows_R=rows_R, longest=longest, buckets=buckets)
        if self.drafter:
            self.drafter.prefill(tokens_RS, lengths_R, rows=rows, longest=longest, buckets=buckets)
        draws = self.draws.split(prompts.numbers())
        return prompts.commit(self.rule.draw(logits_RV, draws.plain_BP))

    def advance(self, state: BatchState, *, bucket: int) -> Tensor:
        """One round: speculative where there is a drafter, else one plain token.

        Args:
            state: the batch, every row with at least two tokens.
            bucket: number of cache slots to read, at least the longest row's length + K.

        Returns:
            The round's result, as `BatchState.commit` gives it.
        """
        self.clock.start()
        opening = None
        if self.drafter:
            opening = self.open(state, bucket=bucket)
            self.clock.lap("draft")
        result = self.close(state, opening, bucket=bucket)
        self.clock.lap("verify")
        return result

    def open(self, state: BatchState, *, bucket: int) -> Opening:
        """Look up the round's numbers, and draft with them."""
        assert self.drafter
        numbers_BN = state.numbers()
        uniforms_BKP = self.draws.split(numbers_BN).draft_BKP
        draft = self.drafter.propose(state.tokens_BS, state.lengths_B, uniforms_BKP=uniforms_BKP, bucket=bucket)
        return Opening(numbers_BN, *draft)

    def close(self, state: BatchState, opening: Opening | None, *, bucket: int) -> Tensor:
        """All that follows the draft, or the whole of a plain step; returns the result."""
        target_BWV = self.score(state, bucket=bucket)
        if opening is None:
            return state.commit(self.rule.draw(target_BWV[:, 0], self.draws.split(state.numbers()).plain_BP))
        draft, draws = Draft(opening.ids_BK, opening.probs_BTV), self.draws.split(opening.numbers_BN)
        return state.commit(self.rule.verify(draft, target_BWV, draws=draws), drafted_ids_BK=draft.ids_BK)

    def score(self, state: BatchState, *, bucket: int) -> Tensor:
        """The target's logits behind the last token and each drafted one, processed if the rule will judge a draft."""
        positions_BW = state.lengths_B[:, None] + self.last_and_drafted_W
        ids_BW = state.tokens_BS.gather(1, positions_BW)
        logits_BWV = self.target.forward(ids_BW, positions_BW, bucket=bucket)
        return self.rule.process(logits_BWV) if self.drafter else logits_BWV
