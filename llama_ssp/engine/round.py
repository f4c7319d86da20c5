"""One round of decoding: draft -> score -> verify -> commit, as a fixed sequence of tensor operations.

No step reads a value from the device, so a round costs little more than its forwards. The host chooses only shapes:
which rows, and which bucket of the cache.

    speculative round, K = 3                L-2   L-1    L    L+1   L+2   L+3
      the draft's first step reads           t     t
      its later steps read                               d1    d2
      the target reads                             t     d1    d2    d3
      two accepted: the text gains                       d1    d2    x           x: chosen by the target

The `executors` run the two pieces of a round, `draft` and `verify`, from Python, as CUDA graphs, or as traces. A round
without a drafter is plain decoding: `verify` then draws one token.

Shapes: B sequences, R rows being prefilled, S slots, K drafted tokens, W = K + 1, V vocabulary, N uniforms of a round;
L is a row's length.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from llama_ssp.drafting.protocol import Drafter
from llama_ssp.engine.clock import Clock
from llama_ssp.engine.state import BatchState
from llama_ssp.engine.verifier import Verifier
from llama_ssp.models.prefill import Buckets, read_prompts
from llama_ssp.models.runner import Runner
from llama_ssp.sampling.rules import Draft
from llama_ssp.sampling.uniforms import UniformTable


class Block(NamedTuple):
    """A drafted block: the uniforms of its round, the drafted ids, and the probabilities they were drawn from."""

    uniforms_BN: Tensor
    ids_BK: Tensor
    probs_BWV: Tensor | None = None


class Executor(Protocol):
    """Runs the two pieces of a round; a `Round` is its own eager executor.

    Attributes:
        keeps_state: the executor depends on the addresses of the batch's tensors, so runs should share one batch.
    """

    keeps_state: bool

    def draft(self, state: BatchState, *, bucket: int) -> Block:
        """Extend every row by K drafted tokens."""

    def verify(self, state: BatchState, block: Block | None, *, bucket: int) -> Tensor:
        """Score a block with the target, verify it and commit the decision; without a block, decode one token."""


def step(
    executor: Executor, state: BatchState, block: Block | None, *, drafts: bool, bucket: int, clock: Clock
) -> tuple[Tensor, Block | None]:
    """Run one round on a batch whose rows have at least two tokens.

    Args:
        executor: runs its pieces.
        state: the batch.
        block: drafted ahead by the previous round; None drafts now.
        drafts: whether the round is speculative.
        bucket: number of cache slots to read, at least the longest row's length + K.
        clock: times the pieces.

    Returns:
        The round's result (see `BatchState.commit`), and the block drafted ahead for the next round: None as long as no
        executor drafts while the target verifies.
    """
    clock.start()
    if drafts and block is None:
        block = executor.draft(state, bucket=bucket)
        clock.lap("draft")
    result = executor.verify(state, block, bucket=bucket)
    clock.lap("verify")
    return result, None


class Round:
    """The target, the drafter (None for plain decoding) and the verifier, applied to a batch.

    Attributes:
        max_tokens_per_round: the most tokens that a round adds to a row.
    """

    keeps_state = False

    def __init__(self, target: Runner, drafter: Drafter | None, *, verifier: Verifier) -> None:
        self.target = target
        self.drafter = drafter
        self.verifier = verifier
        num_draft_tokens = drafter.num_draft_tokens if drafter else 0
        self.max_tokens_per_round = num_draft_tokens + 1
        self.last_and_drafted_W = torch.arange(-1, num_draft_tokens, device=target.device)
        self.uniforms = UniformTable(num_draft_tokens, target.device)

    @property
    def num_allocations(self) -> tuple[int, ...]:
        """How often each model's cache has been allocated."""
        return self.target.num_allocations, self.drafter.num_allocations if self.drafter else 0

    def allocate(self, *, batch_size: int, num_slots: int) -> None:
        """Make room for `batch_size` rows of `num_slots` tokens in the caches of both models."""
        self.target.allocate(batch_size=batch_size, capacity=num_slots)
        if self.drafter:
            self.drafter.allocate(batch_size=batch_size, num_slots=num_slots)

    def prefill(self, prompts: BatchState, rows: Sequence[int], *, longest: int, buckets: Buckets) -> Tensor:
        """Read R prompts into the given rows of the caches and sample each one's first token; see `read_prompts`.

        Returns the result of these rows; see `BatchState.commit`.
        """
        tokens_RS, lengths_R = prompts.tokens_BS, prompts.lengths_B
        rows_R = torch.tensor(rows, device=self.target.device)
        logits_RV = read_prompts(self.target, tokens_RS, lengths_R, rows_R=rows_R, longest=longest, buckets=buckets)
        if self.drafter:
            self.drafter.prefill(tokens_RS, lengths_R, rows=rows, longest=longest, buckets=buckets)
        context = prompts.rows.before(lengths_R[:, None] - 1) if self.verifier.needs_context else None
        plain_RP = self.uniforms.split(prompts.uniforms()).plain_BP
        return prompts.commit(self.verifier.draw(logits_RV, plain_RP, context))

    def draft(self, state: BatchState, *, bucket: int) -> Block:
        """See `Executor.draft`."""
        assert self.drafter
        uniforms_BN = state.uniforms()
        uniforms_BKP = self.uniforms.split(uniforms_BN).draft_BKP
        draft = self.drafter.propose(state.rows, uniforms_BKP=uniforms_BKP, bucket=bucket)
        return Block(uniforms_BN, *draft)

    def verify(self, state: BatchState, block: Block | None, *, bucket: int) -> Tensor:
        """See `Executor.verify`."""
        if block is None:
            context = state.rows.before(state.lengths_B[:, None] - 1) if self.verifier.needs_context else None
            logits_BV = self.score(state, bucket=bucket)[:, 0]
            plain_BP = self.uniforms.split(state.uniforms()).plain_BP
            return state.commit(self.verifier.draw(logits_BV, plain_BP, context))
        target_BWV = self.score(state, bucket=bucket)
        draft, draws = Draft(block.ids_BK, block.probs_BWV), self.uniforms.split(block.uniforms_BN)
        decision = self.verifier.verify(draft, target_BWV, draws=draws)
        return state.commit(decision, drafted_ids_BK=draft.ids_BK)

    def score(self, state: BatchState, *, bucket: int) -> Tensor:
        """The target's logits after the last token and each drafted one, processed if a draft will be verified."""
        positions_BW = state.lengths_B[:, None] + self.last_and_drafted_W
        ids_BW = state.tokens_BS.gather(1, positions_BW)
        logits_BWV = self.target.forward(ids_BW, positions_BW, bucket=bucket)
        if not self.drafter:
            return logits_BWV
        context = state.rows.before(positions_BW) if self.verifier.needs_context else None
        return self.verifier.process(logits_BWV, context)
