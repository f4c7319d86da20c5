"""Computes the summary of a run from its lines; pure functions."""

from collections import Counter
from collections.abc import Sequence

from llama_ssp.reports.evaluation import Evaluation
from llama_ssp.reports.excerpts import Excerpt
from llama_ssp.reports.lines import (
    PLAIN,
    SPECULATIVE,
    BenchmarkRow,
    CompletionLine,
    PlainSummary,
    RunFacts,
    SpeculativeSummary,
    Summary,
)
from llama_ssp.reports.provenance import git_commit, versions
from llama_ssp.reports.rounds.overlap import OverlapSummary, idle_share, num_drafted


def summarise(
    facts: RunFacts,
    lines: Sequence[CompletionLine],
    cells: Sequence[BenchmarkRow] = (),
    *,
    evaluation: Evaluation | None = None,
    excerpts: Sequence[Excerpt] = (),
) -> Summary:
    """Make the summary of a run from its lines, including those of earlier parts of a resumed run.

    A number without measurements is None. The functions of this module define the numbers. `cells` are those of a
    benchmark, which has no lines; `evaluation` is the verdict of one, if it has come to its end; `excerpts` are for
    the report.
    """
    plain_lines = [line for line in lines if line.mode == PLAIN]
    speculative_lines = [line for line in lines if line.mode == SPECULATIVE]
    return Summary(
        task=facts.task, model=facts.model, draft=facts.draft, weights=facts.weights, placement=facts.placement,
        world_size=facts.world_size, seed=facts.seed, versions=versions(), git_commit=git_commit(),
        num_prompts=len({line.index for line in lines}) + sum(cell.batch_size for cell in cells),
        num_new_tokens=_num_new_tokens(lines) + sum(cell.batch_size * cell.max_new_tokens for cell in cells),
        plain=_plain(plain_lines) if plain_lines else None,
        speculative=_speculative(speculative_lines, facts.num_draft_tokens) if speculative_lines else None,
        speedup=speedup(lines), forecast=facts.forecast, memory=facts.memory, startup=facts.startup, cells=[*cells],
        evaluation=evaluation, excerpts=[*excerpts], overlap=_overlap(facts, speculative_lines),
    )  # fmt: skip


def ms_per_token(lines: Sequence[CompletionLine]) -> float | None:
    """Latency of a row: the sum of `ms`, including prefill, over the sum of new tokens."""
    return _ratio(sum(line.ms for line in lines), _num_new_tokens(lines))


def tokens_per_s(lines: Sequence[CompletionLine]) -> float | None:
    """Throughput of all rows and replicas: new tokens over wall time, above `1000 / ms_per_token` in a batch."""
    return _ratio(_num_new_tokens(lines), sum(line.share_s for line in lines))


def first_token_ms(lines: Sequence[CompletionLine]) -> float | None:
    """Mean time from the start of the prefill to the first token, of the lines that have it."""
    known = [line.first_token_ms for line in lines if line.first_token_ms is not None]
    return _ratio(sum(known), len(known))


def tokens_per_round(lines: Sequence[CompletionLine]) -> float | None:
    """New tokens from rounds, over rounds; a row's first token comes from its prefill."""
    return _ratio(_num_new_tokens(lines) - len(lines), sum(line.num_rounds for line in lines))


def acceptance_rate(lines: Sequence[CompletionLine]) -> float | None:
    """Accepted over examined drafted tokens, in rounds that `num_examined` counts."""
    counted = counted_rounds(lines)
    return _ratio(sum(accepted for accepted, _ in counted), sum(examined for _, examined in counted))


def accepted_histogram(lines: Sequence[CompletionLine], num_draft_tokens: int) -> list[int]:
    """For each number of accepted tokens 0..K, how many of the rounds that `num_examined` counts had it."""
    counts = Counter(accepted for accepted, _ in counted_rounds(lines))
    return [counts[length] for length in range(num_draft_tokens + 1)]


def drafted_histogram(lines: Sequence[CompletionLine], num_draft_tokens: int) -> list[int] | None:
    """For each number of drafted tokens 0..K, how many rounds had it, of a run that chooses K for each round."""
    if all(line.draft_lengths is None for line in lines):
        return None
    counts = Counter(drafted for line in lines for drafted in line.draft_lengths or ())
    return [counts[length] for length in range(num_draft_tokens + 1)]


def speedup(lines: Sequence[CompletionLine]) -> float | None:
    """Plain over speculative `ms_per_token`, over the completions that exist in both modes."""
    by_mode: dict[str, dict[tuple[int, int], CompletionLine]] = {PLAIN: {}, SPECULATIVE: {}}
    for line in lines:
        by_mode[line.mode][line.index, line.sample] = line
    common = by_mode[PLAIN].keys() & by_mode[SPECULATIVE].keys()
    plain_ms = ms_per_token([by_mode[PLAIN][key] for key in common])
    speculative_ms = ms_per_token([by_mode[SPECULATIVE][key] for key in common])
    return _ratio(plain_ms or 0.0, speculative_ms or 0.0)


def _plain(lines: Sequence[CompletionLine]) -> PlainSummary:
    return PlainSummary(
        ms_per_token=ms_per_token(lines),
        tokens_per_s=tokens_per_s(lines),
        num_target_forwards=sum(line.num_target_forwards for line in lines),
        first_token_ms=first_token_ms(lines),
    )


def _speculative(lines: Sequence[CompletionLine], num_draft_tokens: int) -> SpeculativeSummary:
    return SpeculativeSummary(
        **vars(_plain(lines)), tokens_per_round=tokens_per_round(lines),
        num_rounds=sum(line.num_rounds for line in lines),
        acceptance_rate=acceptance_rate(lines), accepted_histogram=accepted_histogram(lines, num_draft_tokens),
        draft_s=sum(line.draft_s for line in lines), verify_s=sum(line.verify_s for line in lines),
        other_s=sum(line.other_s for line in lines), drafted_histogram=drafted_histogram(lines, num_draft_tokens),
    )  # fmt: skip


def _overlap(facts: RunFacts, lines: Sequence[CompletionLine]) -> OverlapSummary | None:
    """What overlapped rounds did."""
    if not facts.activities:
        return None
    waits = any(each.waits for each in facts.activities)
    drafted = sum(num_drafted(line.accepted_lengths, facts.num_draft_tokens, waits=waits) for line in lines)
    num_copies, size = facts.placement["num_replicas"], facts.world_size
    each = range(0, size, size // num_copies)
    ranks = {
        model: [first + rank for first in each for rank in facts.placement[model]["ranks"]]
        for model in ("target", "draft")
    }
    return OverlapSummary(
        waits=waits,
        target_idle_share=idle_share(facts.activities, ranks["target"]),
        draft_idle_share=idle_share(facts.activities, ranks["draft"]),
        num_drafted_tokens=drafted,
        num_dropped_tokens=drafted - sum(sum(line.accepted_lengths) for line in lines),
        ranks=facts.activities,
    )


def _num_new_tokens(lines: Sequence[CompletionLine]) -> int:
    return sum(line.num_new_tokens for line in lines)


def counted_rounds(lines: Sequence[CompletionLine]) -> list[tuple[int, int]]:
    """Accepted and examined drafted tokens of each round that `num_examined` counts."""
    return [
        (accepted, examined)
        for line in lines
        for accepted, examined in zip(line.accepted_lengths, line.examined_lengths, strict=True)
        if examined
    ]


def num_examined(*, num_accepted: int, num_draft_tokens: int, room: int, ended_in_draft: bool) -> int:
    """Count the drafted tokens of one round that enter the acceptance rate.

    Args:
        num_accepted: drafted tokens that the round accepted.
        num_draft_tokens: K.
        room: tokens that the row could still take when the round began.
        ended_in_draft: the last accepted drafted token ended the row, so that no later one was examined.

    Returns:
        The accepted tokens and the first rejected one. 0 if the room was less than K + 1: the length limit shortens
        long acceptances of such a round but not short ones, so that counting it would bias the rate.
    """
    if room <= num_draft_tokens:
        return 0
    return num_accepted if ended_in_draft else min(num_accepted + 1, num_draft_tokens)


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
