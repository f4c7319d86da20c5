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
from llama_ssp.engine.state import BatchState
from llama_ssp.engine.verifier import Verifier
from llama_ssp.models.prefill import Buckets, Prompts, read_prompts
from llama_ssp.models.runner import Runner
from llama_ssp.sampling.context import Context
from llama_ssp.sampling.rules import Draft
from llama_ssp.sampling.uniforms import UniformTable


class DraftChoice(NamedTuple):
    """How a round drafts.

    Attributes:
        num_tokens: K of this round; 0 decodes one token without a draft.
        source: the drafter, as a place in `Round.drafters`.
        num_unread: tokens at the end of each row that the drafter reads first; see `Drafter.propose`.
    """

    num_tokens: int
    source: int = 0
    num_unread: int = 2


class Block(NamedTuple):
    """A drafted block: how it was drafted, the uniforms of its round, the ids, and their probabilities if any."""

    choice: DraftChoice
    uniforms_BN: Tensor
    ids_BK: Tensor
    probs_BWV: Tensor | None = None


class Executor(Protocol):
    """Runs the two pieces of a round; a `Round` is its own eager executor.

    Attributes:
        keeps_state: the executor depends on the addresses of the batch's tensors, so runs should share one batch.
    """

    keeps_state: bool

    def draft(self, state: BatchState, *, choice: DraftChoice, bucket: int) -> Block:
        """Extend every row by `choice.num_tokens` drafted tokens."""

    def verify(self, state: BatchState, block: Block | None, *, bucket: int) -> Tensor:
        """Score a block with the target, verify it and commit the decision; without a block, decode one token."""


class Round:
    """The target, the drafters (none for plain decoding) and the verifier, applied to a batch.

    Attributes:
        max_tokens_per_round: the most tokens that a round adds to a row.
        num_ahead: the most drafted tokens that wait for verification when a round begins.
        waits: see `OverlappedRound`.
    """

    keeps_state = False
    waits: bool | None = False

    def __init__(self, target: Runner, *drafters: Drafter, verifier: Verifier) -> None:
        self.target = target
        self.drafters = drafters
        self.verifier = verifier
        num_draft_tokens = max([drafter.num_draft_tokens for drafter in drafters], default=0)
        self.max_tokens_per_round = num_draft_tokens + 1
        self.num_ahead = 0
        self.last_and_drafted_W = torch.arange(-1, num_draft_tokens, device=target.device)
        self.uniforms = UniformTable(num_draft_tokens, target.device)

    @property
    def num_allocations(self) -> tuple[int, ...]:
        """How often each model's cache has been allocated."""
        return self.target.num_allocations, *[drafter.num_allocations for drafter in self.drafters]

    @property
    def reads_by_length(self) -> bool:
        """Whether no part reads buckets of a cache, so that one graph serves all lengths; see `Runner`."""
        return self.target.reads_by_length and all(drafter.reads_by_length for drafter in self.drafters)

    def allocate(self, *, batch_size: int, num_slots: int) -> None:
        """Make room for `batch_size` rows of `num_slots` tokens in the caches of both models."""
        self.target.allocate(batch_size=batch_size, capacity=num_slots)
        for drafter in self.drafters:
            drafter.allocate(batch_size=batch_size, num_slots=num_slots)

    def prefill(
        self,
        prompts: BatchState,
        rows: Sequence[int],
        *,
        lengths: Sequence[int],
        buckets: Buckets,
        drafters: Sequence[Drafter] | None = None,
    ) -> Tensor:
        """Read R prompts into the given rows of the caches and sample each one's first token; see `read_prompts`.

        `lengths` are those of the prompts, which the device knows as well; `drafters` are those that read them now, by
        default all. Returns the result of these rows; see `BatchState.commit`.
        """
        to_read = Prompts(prompts.tokens_BS, prompts.lengths_B, lengths, longest=max(lengths))
        drafters = self.drafters if drafters is None else drafters
        return self.read(prompts, to_read, rows, buckets=buckets, drafters=drafters)

    def read(
        self,
        prompts: BatchState,
        to_read: Prompts,
        rows: Sequence[int],
        *,
        buckets: Buckets,
        drafters: Sequence[Drafter],
    ) -> Tensor:
        """Prefill as `prefill` does, with the tokens that are to be read apart from the batch that they are in."""
        lengths_R = prompts.lengths_B
        logits_RV = read_prompts(self.target, to_read, rows=rows, buckets=buckets)
        for drafter in drafters:
            drafter.prefill(to_read, rows=rows, buckets=buckets)
        context = prompts.rows.before(lengths_R[:, None] - 1) if self.verifier.needs_context else None
        plain_RP = self.uniforms.split(prompts.uniforms()).plain_BP
        return prompts.commit(self.verifier.draw(logits_RV, plain_RP, context))

    def draft(self, state: BatchState, *, choice: DraftChoice, bucket: int) -> Block:
        """See `Executor.draft`."""
        uniforms_BN = state.uniforms()
        draft = self.drafters[choice.source].propose(
            state.rows,
            uniforms_BKP=self.uniforms.split(uniforms_BN, choice.num_tokens).draft_BKP,
            num_unread=choice.num_unread,
            bucket=bucket,
        )
        return Block(choice, uniforms_BN, *draft)

    def verify(self, state: BatchState, block: Block | None, *, bucket: int) -> Tensor:
        """See `Executor.verify`."""
        if block is None:
            logits_BWV, context = self.score(state, num_drafted=0, bucket=bucket)
            plain_BP = self.uniforms.split(state.uniforms()).plain_BP
            return state.commit(self.verifier.draw(logits_BWV[:, 0], plain_BP, context))
        num_drafted = block.choice.num_tokens
        target_BWV = self.verifier.process(*self.score(state, num_drafted=num_drafted, bucket=bucket))
        draft, draws = Draft(block.ids_BK, block.probs_BWV), self.uniforms.split(block.uniforms_BN, num_drafted)
        decision = self.verifier.verify(draft, target_BWV, draws=draws)
        return state.commit(decision, drafted_ids_BK=draft.ids_BK)

    def score(self, state: BatchState, *, num_drafted: int, bucket: int) -> tuple[Tensor, Context | None]:
        """The target's logits after the last token and each drafted one, and the rule's context if it needs one."""
        positions_BW = state.lengths_B[:, None] + self.last_and_drafted_W[: num_drafted + 1]
        ids_BW = state.tokens_BS.gather(1, positions_BW)
        logits_BWV = self.target.forward(ids_BW, positions_BW, bucket=bucket)
        return logits_BWV, state.rows.before(positions_BW) if self.verifier.needs_context else None
