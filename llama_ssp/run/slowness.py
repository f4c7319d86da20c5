"""Says why a run took another time than its forecast, as far as this machine shows it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from llama_ssp.planning.plan import Plan
from llama_ssp.planning.timing import Timing
from llama_ssp.ranks.world import World
from llama_ssp.reports.records import PLAIN, SPECULATIVE, Summary

_MUCH_SLOWER = 3.0
"""Times its forecast, from which a run is worth a sentence."""
_LEAST_TOKENS = 32
"""Shorter runs mostly show their fixed costs."""
_RUNNING_SHARE = 0.6
"""Share of its time that a drafting rank runs, where nothing disturbs it."""
_BUSY_SHARE = 0.25
"""Share of the cores that other programs must use to be named."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Possible causes of a slow run.

    Attributes:
        num_ranks: the number of ranks that share the cores of this rank, which counts as one of them.
        num_threads: the threads of these ranks together.
        others: cores that other programs used, on average; None if unknown.
        slowness: the average time of a round by number of threads, if the run compared numbers; see `Threads`.
    """

    device: str
    num_ranks: int
    num_threads: int
    num_cores: int
    others: float | None
    slowness: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, world: World, slowness: Mapping[int, float], others: float | None) -> "Surroundings":
        """Make the surroundings of this process and the ranks that share its cores."""
        num_ranks, num_cores = world.num_sharers, len(world.cores)
        return cls(
            device=world.device.type,
            num_ranks=num_ranks,
            num_threads=torch.get_num_threads() * num_ranks,
            num_cores=num_cores,
            others=others,
            slowness=slowness,
        )

    @property
    def is_disturbed(self) -> bool:
        """Whether other programs used much of the cores."""
        return (self.others or 0.0) > _BUSY_SHARE * self.num_cores


def disturbance(summary: Summary, around: Surroundings) -> str | None:
    """Say that other programs used much of the cores during a run on CPUs; None otherwise, and for a short run."""
    if around.device != "cpu" or not around.is_disturbed or summary.num_new_tokens < _LEAST_TOKENS:
        return None
    return f"other programs used {around.others:.1f} of {around.num_cores} cores"


def unusual_times(summary: Summary, plan: Plan | None, around: Surroundings) -> str | None:
    """Say that a draft kept its target waiting, or else that decoding took much longer than forecast, and why.

    None for a run that did neither, or that was short.
    """
    if summary.num_new_tokens < _LEAST_TOKENS or plan is None:
        return None
    if sentence := _late_draft(summary, plan.timing, around):
        return sentence
    measured = (
        (PLAIN, summary.plain, summary.forecast.plain_ms_per_token),
        (SPECULATIVE, summary.speculative, summary.forecast.speculative_ms_per_token),
    )
    slow = [
        (found.ms_per_token / expected_ms, mode, found.ms_per_token, expected_ms)
        for mode, found, expected_ms in measured
        if found and found.ms_per_token and expected_ms
    ]
    ratio, mode, took_ms, expected_ms = max(slow, default=(0.0, PLAIN, 0.0, 0.0))
    if ratio <= _MUCH_SLOWER:
        return None
    both = f"{took_ms:.2f} ms/token, forecast {expected_ms:.2f}"
    return f"{mode} decoding took {ratio:.1f} times its forecast ({both}): {_reason(around)}"


def _late_draft(summary: Summary, timed: Timing, around: Surroundings) -> str | None:
    drafting = (
        [rank for rank in summary.overlap.ranks if rank.draft_cpu_s and rank.num_rounds] if summary.overlap else []
    )
    if not drafting or timed.overlap is None:
        return None
    slowest = max(drafting, key=lambda rank: rank.worked_s)
    expected_ms, took_ms = timed.overlap["draft_ms"], 1e3 * slowest.worked_s / slowest.num_rounds
    if took_ms <= _MUCH_SLOWER * expected_ms:
        return None
    share, reason = slowest.draft_cpu_s / slowest.worked_s, _reason(around)
    if around.device == "cpu" and share < _RUNNING_SHARE:  # on a GPU, a process only launches
        reason = f"its process ran for {100 * share:.0f} % of that time (other programs use its core, or stopped it)"
    return (
        f"the draft on rank {slowest.rank} was late: {timed.num_draft_tokens} tokens took {took_ms:.2f} ms, "
        f"{took_ms / expected_ms:.1f} times the forecast ({expected_ms:.2f}): {reason}"
    )


def _reason(around: Surroundings) -> str:
    is_on_cpu, cores = around.device == "cpu", around.num_cores
    reasons = []
    if is_on_cpu and around.num_ranks == 1 and around.num_threads < cores - round(around.others or 0.0):
        reasons.append(
            f"{around.num_threads} of {cores} cores compute (unset OMP_NUM_THREADS: "
            "the run then tries numbers of threads and keeps the fastest)"
        )
    if around.slowness and (fastest := min(around.slowness, key=around.slowness.__getitem__)) < cores:
        most = max(around.slowness)
        times = around.slowness[most] / around.slowness[fastest]
        reasons.append(f"{fastest} of {cores} cores computed, since rounds on {most} took {times:.1f} times as long")
    if is_on_cpu and around.num_threads > cores:
        remedy = "start fewer ranks" if around.num_ranks > 1 else f"set OMP_NUM_THREADS to {cores}"
        reasons.append(f"{around.num_threads} threads share {cores} cores ({remedy})")
    if around.is_disturbed:
        reasons.append(f"other programs used {around.others:.1f} of these {cores} cores (stop them or use fewer cores)")
    if not reasons:
        gpu = "" if is_on_cpu else "nvidia-smi shows whether the GPU is shared or throttled; "
        measure = "task=calibrate measures this one, hardware=NAME names one"
        reasons.append(f"the forecast may describe another machine; {gpu}{measure}")
    return ", and ".join(reasons)
