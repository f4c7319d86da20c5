"""Messages between the ranks of one replica in a round, in addition to the collectives inside the models.

    ids              the drafted ids to all ranks, before the target's forward; a replicated draft gathers the rows of
                     each rank
    probabilities    from the draft to the rank that runs the rule, only if no rank holds both models
    verdict          number of accepted tokens, the next token, and the stop request

Shapes: B sequences, K drafted tokens, V vocabulary.
"""

from dataclasses import dataclass

from llama_ssp.config.drafters import Matching
from llama_ssp.config.rules import rule_of
from llama_ssp.planning.spec import PlanSpec

ID_BYTES = 8
VERDICT_BYTES = 3 * ID_BYTES
"""Per row: number of accepted tokens, the next token, and the stop request."""
PROBABILITY_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Message:
    """One kind of message of a round: each sender sends `payload_bytes` to every other rank."""

    payload_bytes: int
    ranks: tuple[int, ...]
    num_senders: int = 1

    @property
    def received_bytes(self) -> int:
        """Bytes received in a round, over all ranks."""
        return self.payload_bytes * self.num_senders * (len(self.ranks) - 1)


@dataclass(frozen=True, kw_only=True)
class RoundMessages:
    """All kinds of messages; None for those that the placement does not need."""

    ids: Message | None
    probabilities: Message | None
    verdict: Message | None


_NO_MESSAGES = RoundMessages(ids=None, probabilities=None, verdict=None)


def round_messages(job: PlanSpec, num_draft_tokens: int) -> RoundMessages:
    """The messages of a round with K = `num_draft_tokens`; plain decoding (K = 0) has only the verdict."""
    layout, rows = job.layout, job.batch_size
    everyone = layout.ranks
    if len(everyone) == 1:
        return _NO_MESSAGES
    drafts = bool(job.draft) and num_draft_tokens > 0
    splits_batch = drafts and layout.splits_batch
    if splits_batch:
        rows = -(-rows // len(layout.draft_ranks))
    num_senders = len(everyone) if splits_batch else 1
    has_probs = rule_of(job.rule).needs_probs and job.matching is not Matching.text
    apart = drafts and layout.draft_source_rank not in layout.target_ranks and has_probs
    ids = Message(payload_bytes=ID_BYTES * rows * num_draft_tokens, ranks=everyone, num_senders=num_senders)
    verdict = Message(payload_bytes=VERDICT_BYTES * rows, ranks=everyone, num_senders=num_senders)
    probabilities = None
    if apart:
        num_bytes = PROBABILITY_BYTES * rows * num_draft_tokens * job.target.shape.vocab_size
        probabilities = Message(payload_bytes=num_bytes, ranks=(layout.draft_source_rank, layout.verify_rank))
    return RoundMessages(
        ids=ids if drafts else None,
        probabilities=probabilities,
        verdict=verdict,
    )
