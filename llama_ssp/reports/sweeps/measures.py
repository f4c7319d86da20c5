"""What one run measured, with intervals over its prompts: each mode alone, and both modes prompt by prompt."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from llama_ssp.reports.lines import PLAIN, SPECULATIVE, CompletionLine
from llama_ssp.reports.runs import Run
from llama_ssp.reports.summary import counted_rounds, ms_per_token
from llama_ssp.reports.sweeps.intervals import Estimate, median, ratio

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, kw_only=True)
class ModeMeasures:
    """One mode of a run.

    Attributes:
        ms_per_token: median over prompts.
        ms_percentiles, first_token_percentiles: p50, p90 and p99 over completions, in ms; the second ones are None for
            lines of earlier versions.
    """

    mode: str
    num_prompts: int
    num_completions: int
    ms_per_token: Estimate
    ms_percentiles: tuple[float, ...]
    first_token_percentiles: tuple[float, ...] | None


@dataclass(frozen=True, kw_only=True)
class PairedMeasures:
    """Both modes of a run over the prompts that have both.

    Attributes:
        speedup: median over prompts of plain over speculative ms/token.
        num_faster: prompts whose speculative completions took less time per token.
        ms_per_token: of each prompt, plain and speculative.
    """

    num_prompts: int
    speedup: Estimate
    num_faster: int
    ms_per_token: list[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class RunMeasures:
    """A run; None for what it did not measure. `acceptance` is accepted over examined drafted tokens."""

    modes: tuple[ModeMeasures, ...]
    paired: PairedMeasures | None
    acceptance: Estimate | None

    def mode(self, name: str) -> ModeMeasures | None:
        """The measures of one mode."""
        return next((mode for mode in self.modes if mode.mode == name), None)


def measure(run: Run) -> RunMeasures:
    """Compute the measures of a run from its completions."""
    by_mode = {mode: [line for line in run.lines if line.mode == mode] for mode in (PLAIN, SPECULATIVE)}
    return RunMeasures(
        modes=tuple(found for mode, lines in by_mode.items() if (found := _of_mode(mode, lines))),
        paired=_paired(by_mode[PLAIN], by_mode[SPECULATIVE]),
        acceptance=_acceptance(by_mode[SPECULATIVE]),
    )


def _of_mode(mode: str, lines: Sequence[CompletionLine]) -> ModeMeasures | None:
    lines = [line for line in lines if line.num_new_tokens]
    if not lines:
        return None
    prompts = [ms for _, ms in _times(lines)]
    first = [line.first_token_ms for line in lines if line.first_token_ms is not None]
    return ModeMeasures(
        mode=mode, num_prompts=len(prompts), num_completions=len(lines),
        ms_per_token=median(prompts),
        ms_percentiles=_percentiles([line.ms / line.num_new_tokens for line in lines]),
        first_token_percentiles=_percentiles(first) if len(first) == len(lines) else None,
    )  # fmt: skip


def _paired(plain: Sequence[CompletionLine], speculative: Sequence[CompletionLine]) -> PairedMeasures | None:
    keys = {(line.index, line.sample) for line in plain} & {(line.index, line.sample) for line in speculative}
    both = [
        dict(_times([line for line in lines if (line.index, line.sample) in keys])) for lines in (plain, speculative)
    ]
    pairs = [(ms, both[1][prompt]) for prompt, ms in both[0].items() if both[1].get(prompt)]
    if not pairs:
        return None
    return PairedMeasures(
        num_prompts=len(pairs), speedup=median([plain_ms / fast_ms for plain_ms, fast_ms in pairs]),
        num_faster=sum(fast_ms < plain_ms for plain_ms, fast_ms in pairs), ms_per_token=pairs,
    )  # fmt: skip


def _acceptance(lines: Sequence[CompletionLine]) -> Estimate | None:
    counts = []
    for _, of_prompt in _by_prompt(lines):
        rounds = counted_rounds(of_prompt)
        if rounds:
            counts.append(
                (float(sum(accepted for accepted, _ in rounds)), float(sum(examined for _, examined in rounds)))
            )
    return ratio(counts) if counts else None


def _times(lines: Sequence[CompletionLine]) -> Iterator[tuple[int, float]]:
    """Yield each prompt and its ms/token over all its samples."""
    for prompt, of_prompt in _by_prompt(lines):
        if ms := ms_per_token(of_prompt):
            yield prompt, ms


def _by_prompt(lines: Sequence[CompletionLine]) -> list[tuple[int, list[CompletionLine]]]:
    """The completions of each prompt, in order; all turns of a conversation count as one prompt."""
    prompts: dict[int, list[CompletionLine]] = {}
    for line in lines:
        prompts.setdefault(line.index - line.turn, []).append(line)
    return sorted(prompts.items())


def _percentiles(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(float(value) for value in np.percentile(values, PERCENTILES))
