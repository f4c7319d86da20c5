"""What the ranks of one copy tell each other in a round, beside the collectives inside the models.

    sharded draft    each drawn token's ids inside the draft's own group, K times
    ids              the drafted ids to all ranks, before the target's forward; a draft that is sharded over all ranks
                     has told them already, and a replicated one gathers each rank's rows
    probabilities    from the draft to the rank that runs the rule, only where no rank holds both models
    verdict          how many tokens are accepted, the token behind them, and the wish to stop

Shapes: B sequences, K drafted tokens, V vocabulary.
"""

from dataclasses import dataclass

from llama_ssp.config.rules.rule import rule_of
from llama_ssp.config.schema import DraftLayout
from llama_ssp.planning.spec import PlanSpec

ID_BYTES = 8
VERDICT_BYTES = 3 * ID_BYTES
"""Of a row: how many tokens are accepted, the token behind them, and the wish to stop."""
PROBABILITY_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Message:
    """One kind of message of a round.

    Attributes:
        payload_bytes: what one sender tells each of the other ranks.
        ranks: who takes part.
        num_senders: how many of them have something to tell; a gathering has them all.
        num_times: how often in a round.
    """

    payload_bytes: int
    ranks: tuple[int, ...]
    num_senders: int = 1
    num_times: int = 1

    @property
    def received_bytes(self) -> int:
        """What arrives in a round, on all ranks together."""
        return self.payload_bytes * self.num_times * self.num_senders * (len(self.ranks) - 1)


@dataclass(frozen=True, kw_only=True)
class RoundMessages:
    """All kinds; None for those that the placement does without."""

    steps: Message | None
    ids: Message | None
    probabilities: Message | None
    verdict: Message | None

    @property
    def after_drafting(self) -> tuple[Message, ...]:
        """Those that come once in a round."""
        return tuple(message for message in (self.ids, self.probabilities, self.verdict) if message)


def round_messages(job: PlanSpec, num_draft_tokens: int) -> RoundMessages:
    """The messages of a round, by the job's placement; a plain token has the verdict alone.

    Args:
        job: says who holds what.
        num_draft_tokens: K; 0 for plain decoding.
    """
    layout, rows = job.layout, job.batch_size
    everyone, drafting = layout.ranks, layout.draft_ranks
    drafts = bool(job.draft) and num_draft_tokens > 0
    splits_batch = drafts and layout.splits_batch
    if splits_batch:
        rows = -(-rows // len(drafting))
    is_sharded = drafts and layout.draft_kind is not DraftLayout.replicated and len(drafting) > 1
    num_senders = len(everyone) if splits_batch else 1
    told = drafts and not (is_sharded and drafting == everyone)
    apart = drafts and layout.draft_source_rank not in layout.target_ranks and rule_of(job.rule).needs_probs
    steps = Message(payload_bytes=ID_BYTES * rows, ranks=drafting, num_times=num_draft_tokens)
    ids = Message(payload_bytes=ID_BYTES * rows * num_draft_tokens, ranks=everyone, num_senders=num_senders)
    verdict = Message(payload_bytes=VERDICT_BYTES * rows, ranks=everyone, num_senders=num_senders)
    return RoundMessages(
        steps=steps if is_sharded else None,
        ids=ids if told and len(everyone) > 1 else None,
        probabilities=Message(
            payload_bytes=PROBABILITY_BYTES * rows * num_draft_tokens * job.target.shape.vocab_size,
            ranks=(layout.draft_source_rank, layout.verify_rank),
        )
        if apart
        else None,
        verdict=verdict if len(everyone) > 1 else None,
    )
