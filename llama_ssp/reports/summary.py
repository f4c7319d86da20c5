"""Computes the summary of a run from its lines; pure functions. They define the numbers of `summary.json`."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from llama_ssp.reports import records
from llama_ssp.reports.provenance import git_commit, versions
from llama_ssp.reports.records import PLAIN, SPECULATIVE, CompletionLine


def summarise(
    facts: records.RunFacts,
    lines: Sequence[CompletionLine],
    cells: Sequence[records.Result] = (),
    *,
    num_draft_tokens: int,
    activities: Sequence[records.RankActivity] = (),
    evaluation: records.Evaluation | None = None,
    excerpts: Sequence[records.Excerpt] = (),
) -> records.Summary:
    """Make the summary of a run from its lines, including those of earlier parts of a resumed run.

    A number without measurements is None. `cells` are results of a task that has no lines; `num_draft_tokens` is 0
    without a draft; `activities` are those of the ranks of a run that overlaps.
    """
    by_mode = {mode: [line for line in lines if line.mode == mode] for mode in (PLAIN, SPECULATIVE)}
    plain, fast = by_mode[PLAIN], by_mode[SPECULATIVE]
    return records.Summary(
        **vars(facts),
        versions=versions(),
        git_commit=git_commit(),
        num_prompts=len({line.index for line in lines}) + sum(cell.figures.num_prompts for cell in cells),
        num_new_tokens=_num_new_tokens(lines) + sum(cell.figures.num_new_tokens for cell in cells),
        plain=_plain(plain) if plain else None,
        speculative=_speculative(fast, num_draft_tokens) if fast else None,
        speedup=speedup(lines),
        cells=[*cells],
        evaluation=evaluation,
        excerpts=[*excerpts],
        overlap=_overlap(facts, fast, activities, num_draft_tokens) if activities else None,
    )


def ms_per_token(lines: Sequence[CompletionLine]) -> float | None:
    """Latency of a row: the sum of `ms`, including prefill, over the sum of new tokens."""
    return _ratio(sum(line.ms for line in lines), _num_new_tokens(lines))


def acceptance_rate(lines: Sequence[CompletionLine]) -> float | None:
    """Accepted over examined drafted tokens, in rounds that count (see `engine.completion`)."""
    counted = counted_rounds(lines)
    return _ratio(sum(accepted for accepted, _ in counted), sum(examined for _, examined in counted))


def speedup(lines: Sequence[CompletionLine]) -> float | None:
    """Plain over speculative `ms_per_token`, over the completions that exist in both modes."""
    pairs = pairs_of(lines)
    plain_ms, fast_ms = (ms_per_token([pair[side] for pair in pairs]) for side in (0, 1))
    return _ratio(plain_ms or 0.0, fast_ms or 0.0)


class CompletionPair(NamedTuple):
    """The plain and the speculative completion of the same prompt and sample."""

    plain: CompletionLine
    speculative: CompletionLine


def pairs_of(lines: Iterable[CompletionLine]) -> list[CompletionPair]:
    """Pair the lines of a run, whatever their order; lines without a counterpart are left out."""
    by_mode: dict[str, dict[tuple[int, int], CompletionLine]] = {PLAIN: {}, SPECULATIVE: {}}
    for line in lines:
        by_mode[line.mode][line.index, line.sample] = line
    plain, fast = by_mode.values()
    return [CompletionPair(plain[key], fast[key]) for key in sorted(plain.keys() & fast.keys())]


def counted_rounds(lines: Sequence[CompletionLine]) -> list[tuple[int, int]]:
    """Return the accepted and the examined drafted tokens of each round that examined any."""
    return [
        (accepted, examined)
        for line in lines
        for accepted, examined in zip(line.accepted_lengths, line.examined_lengths, strict=True)
        if examined
    ]


def accepted_by_position(lines: Sequence[CompletionLine]) -> list[float]:
    """The share of counted rounds that accepted the token at each position, from the first on."""
    accepted = [number for number, _ in counted_rounds(lines)]
    most = max((examined for _, examined in counted_rounds(lines)), default=0)
    return [sum(number >= place for number in accepted) / len(accepted) for place in range(1, most + 1)]


def round_gains(accepted_lengths: Sequence[int], num_draft_tokens: int) -> list[int]:
    """New tokens of each overlapped round of a row: the accepted ones, and one of the target's only after a rejection.

    The first round and each round after a rejection examine one drafted token; all others examine K.
    """
    gains, examined = [], 1
    for num_accepted in accepted_lengths:
        goes_on = num_accepted == examined
        gains.append(num_accepted + (not goes_on))
        examined = num_draft_tokens if goes_on else 1
    return gains


def _plain(lines: Sequence[CompletionLine]) -> records.PlainSummary:
    first = [line.first_token_ms for line in lines if line.first_token_ms is not None]
    return records.PlainSummary(
        ms_per_token=ms_per_token(lines),
        num_target_forwards=sum(line.num_target_forwards for line in lines),
        # Of all rows and replicas: above 1000 / ms_per_token in a batch.
        tokens_per_s=_ratio(_num_new_tokens(lines), sum(line.share_s for line in lines)),
        first_token_ms=_ratio(sum(first), len(first)),
    )


def _speculative(lines: Sequence[CompletionLine], num_draft_tokens: int) -> records.SpeculativeSummary:
    def histogram(numbers: Iterable[int]) -> list[int]:
        counts = Counter(numbers)
        return [counts[number] for number in range(num_draft_tokens + 1)]

    num_rounds = sum(line.num_rounds for line in lines)
    adapts = any(line.draft_lengths is not None for line in lines)
    return records.SpeculativeSummary(
        **vars(_plain(lines)),
        num_rounds=num_rounds,
        acceptance_rate=acceptance_rate(lines),
        # A row's first token comes from its prefill.
        tokens_per_round=_ratio(_num_new_tokens(lines) - len(lines), num_rounds),
        accepted_by_position=accepted_by_position(lines),
        accepted_histogram=histogram(accepted for accepted, _ in counted_rounds(lines)),
        drafted_histogram=histogram(k for line in lines for k in line.draft_lengths or ()) if adapts else None,
        draft_s=sum(line.draft_s for line in lines),
        verify_s=sum(line.verify_s for line in lines),
        other_s=sum(line.other_s for line in lines),
    )


def _overlap(
    facts: records.RunFacts,
    lines: Sequence[CompletionLine],
    activities: Sequence[records.RankActivity],
    num_draft_tokens: int,
) -> records.OverlapSummary:
    drafted = num_draft_tokens * sum(len(line.accepted_lengths) for line in lines)

    def idle_share(model: str) -> float | None:
        size = facts.world_size // facts.placement["num_replicas"]
        ranks = facts.placement[model]["ranks"]
        of_model = [rank for rank in activities if rank.rank % size in ranks and rank.rounds_s]
        return _ratio(sum(rank.waited_s / rank.rounds_s for rank in of_model), len(of_model))

    return records.OverlapSummary(
        target_idle_share=idle_share("target"),
        draft_idle_share=idle_share("draft"),
        num_drafted_tokens=drafted,
        num_dropped_tokens=drafted - sum(sum(line.accepted_lengths) for line in lines),
        ranks=[*activities],
    )


def _num_new_tokens(lines: Sequence[CompletionLine]) -> int:
    return sum(line.num_new_tokens for line in lines)


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
