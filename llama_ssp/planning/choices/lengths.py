"""The K that comparisons give a draft: the fastest, or `auto` where nobody knows which K is best."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from llama_ssp.config.schema import ADAPTIVE, ADAPTIVE_LENGTHS
from llama_ssp.planning.spec import PlanSpec
from llama_ssp.planning.timing import Timing


def by_length(job: PlanSpec, timed: Timing) -> Iterator[tuple[float, PlanSpec]]:
    """Seconds per token of the job with every K, the fastest first; with K = auto alone where no K is recommended.

    Nothing without a draft.
    """
    if not timed.by_num_draft_tokens:
        return
    if job.overlaps and not timed.knows_best_k:  # which needs one K for all rounds
        yield timed.by_num_draft_tokens[job.num_draft_tokens - 1], replace(job, adapts=False)
        return
    if timed.knows_best_k:
        times = sorted((token_s, number) for number, token_s in enumerate(timed.by_num_draft_tokens, start=1))
        yield from ((token_s, replace(job, num_draft_tokens=number, adapts=False)) for token_s, number in times)
        return
    token_s = min(timed.plain_s, *(timed.by_num_draft_tokens[number - 1] for number in ADAPTIVE_LENGTHS))
    yield token_s, replace(job, num_draft_tokens=max(ADAPTIVE_LENGTHS), adapts=True)


def notes_on_guesses(adapts: Iterable[bool]) -> list[str]:
    """What a search notes if K adapts in one of its choices."""
    said = (
        "K auto: nobody has measured this pair, and its times rest on a forecast of its acceptance; the plan of a row "
        "has their range, and says how to narrow it"
    )
    return [said] if any(adapts) else []


def length_setting(job: PlanSpec) -> str:
    """The setting of a job's K."""
    return f"speculation.num_draft_tokens={ADAPTIVE if job.adapts else job.num_draft_tokens}"
