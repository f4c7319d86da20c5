"""The K that comparisons give a draft: the fastest, or `auto` where nobody knows which K is best."""

from dataclasses import replace

from llama_ssp.config.schema import ADAPTIVE, ADAPTIVE_LENGTHS
from llama_ssp.planning.spec import PlanSpec
from llama_ssp.planning.timing import Timing


def by_length(job: PlanSpec, timed: Timing) -> list[tuple[float, PlanSpec]]:
    """Seconds per token of the job with every K, the fastest first; with K = auto alone where no K is recommended.

    Empty without a draft.
    """
    if not timed.by_num_draft_tokens:
        return []
    if job.overlaps and not timed.knows_best_k:  # which needs one K for all rounds
        return [(timed.by_num_draft_tokens[job.num_draft_tokens - 1], replace(job, adapts=False))]
    if timed.knows_best_k:
        times = sorted((token_s, number) for number, token_s in enumerate(timed.by_num_draft_tokens, start=1))
        return [(token_s, replace(job, num_draft_tokens=number, adapts=False)) for token_s, number in times]
    token_s = min(timed.plain_s, *(timed.by_num_draft_tokens[number - 1] for number in ADAPTIVE_LENGTHS))
    return [(token_s, replace(job, num_draft_tokens=max(ADAPTIVE_LENGTHS), adapts=True))]


def length_setting(job: PlanSpec) -> str:
    """The setting of a job's K."""
    return f"speculation.num_draft_tokens={ADAPTIVE if job.adapts else job.num_draft_tokens}"
