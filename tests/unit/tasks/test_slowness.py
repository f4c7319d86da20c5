"""A run that is much slower than its forecast says the likely reason, and what would help."""

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llama_ssp.distributed.comms import Comm
from llama_ssp.distributed.environment import Ranks
from llama_ssp.distributed.world import World
from llama_ssp.reports.records import Forecast, RankActivity
from llama_ssp.tasks.slowness import Surroundings, changed_machine, late_draft, slowness

ALONE = Surroundings(device="cpu", num_ranks=1, num_threads=8, num_cores=8, load=8.0)


def summary(plain_ms: float | None, speculative_ms: float | None = None, *, num_new_tokens: int = 64) -> Any:  # noqa: ANN401 - stands for a Summary
    plain, fast = (ms and SimpleNamespace(ms_per_token=ms) for ms in (plain_ms, speculative_ms))
    forecast = Forecast(plain_ms_per_token=10.0, speculative_ms_per_token=5.0)
    return SimpleNamespace(plain=plain, speculative=fast, forecast=forecast, num_new_tokens=num_new_tokens)


@pytest.mark.parametrize(
    ("found", "around", "reason"),
    [
        (
            summary(40.0), replace(ALONE, num_threads=1, load=1.0),
            "plain decoding took 4.0 times its forecast (40.00 ms/token, forecast 10.00): 1 of 8 cores compute (unset",
        ),
        (
            summary(40.0, 50.0), replace(ALONE, load=14.0),
            "took 10.0 times its forecast (50.00 ms/token, forecast 5.00): other programs run about 6 threads on",
        ),
        (summary(40.0), replace(ALONE, num_threads=16, load=16.0), "share 8 cores (set OMP_NUM_THREADS to 8)"),
        (
            summary(40.0), replace(ALONE, num_ranks=16, num_threads=16, load=16.0),
            "16 threads share 8 cores (start fewer ranks)",
        ),
        (
            summary(40.0), replace(ALONE, num_threads=1, load=4.0),
            "keeps the fastest), and other programs run about 3 threads on these 8 cores (end them)",
        ),
        (
            summary(40.0), replace(ALONE, load=15.0, slowness={8: 6.0, 7: 2.0, 1: 4.0}),
            "7 of 8 cores computed, since rounds on 8 took 3.0 times as long, and other programs run about 7 threads",
        ),
        (summary(None, 16.0), ALONE, "the forecast may describe another machine; task=calibrate measures this one"),
        (summary(40.0), replace(ALONE, device="cuda", load=1.0), "nvidia-smi shows whether the GPU is shared"),
    ],
)  # fmt: skip
def test_the_reason_is_that_of_the_machine(found: Any, around: Surroundings, reason: str) -> None:  # noqa: ANN401 - see above
    sentence = slowness(found, around)
    assert sentence is not None
    assert reason in sentence


@pytest.mark.parametrize(
    "found",
    [summary(29.0), summary(29.0, 14.0), summary(40.0, num_new_tokens=8), summary(None)],
    ids=["in time", "both in time", "too short", "nothing"],
)
def test_a_run_in_time_says_nothing(found: Any) -> None:  # noqa: ANN401 - see above
    assert slowness(found, replace(ALONE, num_threads=1)) is None


CALIBRATED: Any = SimpleNamespace(profiles=["one"])


@pytest.mark.parametrize(
    ("plain_ms", "around", "reason"),
    [
        (7.0, ALONE, "plain decoding took 0.70 times its forecast (7.00 ms/token, forecast 10.00): this machine"),
        (14.0, ALONE, "took 1.40 times its forecast (14.00 ms/token, forecast 10.00): this machine may be slower than"),
        (14.0, replace(ALONE, num_threads=1), "1 of 8 cores compute"),
        (7.0, replace(ALONE, num_threads=1), "faster than when it was calibrated; task=calibrate task.refresh=true"),
    ],
)  # fmt: skip
def test_a_calibrated_machine_that_has_changed_is_worth_a_refresh(
    plain_ms: float, around: Surroundings, reason: str
) -> None:
    sentence = changed_machine(summary(plain_ms), CALIBRATED, around)
    assert sentence is not None
    assert reason in sentence


@pytest.mark.parametrize(
    ("found", "hardware"),
    [
        (summary(8.2, 1.0), CALIBRATED), (summary(12.3), CALIBRATED), (summary(7.0, num_new_tokens=8), CALIBRATED),
        (summary(None, 2.0), CALIBRATED), (summary(7.0), SimpleNamespace(profiles=[])),
    ],
    ids=["almost", "almost slower", "too short", "no plain decoding", "data sheet"],
)  # fmt: skip
def test_a_machine_without_a_sign_of_change_is_not(found: Any, hardware: Any) -> None:  # noqa: ANN401 - see above
    assert changed_machine(found, hardware, ALONE) is None


def test_a_run_without_a_forecast_says_nothing() -> None:
    found = summary(40.0)
    found.forecast = Forecast()
    assert slowness(found, ALONE) is None


def world(cores: set[int], *, num_sharers: int) -> World:
    """A rank of four on a node."""
    ranks = Ranks(rank=0, size=4, local_rank=0, local_size=4)
    return World(
        comm=Comm.single(), ranks=ranks, device=torch.device("cpu"), note=None, cores=frozenset(cores),
        num_sharers=num_sharers,
    )  # fmt: skip


def test_ranks_with_cores_of_their_own_share_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `srun --cpus-per-task 4` binds them; the rest of the machine is somebody else's."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "getloadavg", lambda: (60.0, 60.0, 60.0))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    around = Surroundings.of(world({0, 1, 2, 3}, num_sharers=1))
    assert around == replace(ALONE, num_threads=4, num_cores=4, load=None)
    sentence = slowness(summary(40.0), around)
    assert sentence is not None
    assert "the forecast may describe another machine" in sentence


def test_ranks_that_share_all_cores_see_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "getloadavg", lambda: (9.0, 0.0, 0.0))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert Surroundings.of(world({*range(8)}, num_sharers=4)) == replace(ALONE, num_ranks=4, load=9.0)


def late(worked_s: float, *, cpu_share: float = 1.0, num_new_tokens: int = 64, device: str = "cpu") -> str | None:
    """What is said of a draft whose 100 rounds took so long, where the plan expects 1 ms each."""
    of_draft = RankActivity(
        rank=1, rounds_s=worked_s + 1, waited_s=1.0, num_rounds=100, draft_cpu_s=cpu_share * worked_s
    )
    of_target = RankActivity(rank=0, rounds_s=9.0, waited_s=0.0, num_rounds=100)
    found: Any = SimpleNamespace(overlap=SimpleNamespace(ranks=[of_target, of_draft]), num_new_tokens=num_new_tokens)
    timed: Any = SimpleNamespace(overlap=SimpleNamespace(draft_s=1e-3), num_draft_tokens=4)
    return late_draft(found, timed, replace(ALONE, num_ranks=2, device=device))


def test_a_draft_that_is_late_by_three_times_its_forecast_is_named_with_the_cause() -> None:
    assert late(0.29) is None
    assert late(0.4, num_new_tokens=8) is None
    busy, stopped = late(0.4), late(0.4, cpu_share=0.3)
    assert busy is not None
    assert busy.startswith("the draft on rank 1 was late: 4 tokens took 4.00 ms, 4.0 times the forecast (1.00): ")
    assert "the forecast may describe another machine" in busy
    assert stopped is not None
    assert "its process ran for 30 % of that time (other programs use its core, or stopped it)" in stopped


def test_a_process_that_only_launches_kernels_is_no_cause() -> None:
    named = late(0.4, cpu_share=0.3, device="cuda")
    assert named is not None
    assert "its process ran" not in named


def test_a_run_that_does_not_overlap_has_no_late_draft() -> None:
    found: Any = SimpleNamespace(overlap=None, num_new_tokens=64)
    timed: Any = SimpleNamespace(overlap=None, num_draft_tokens=4)
    assert late_draft(found, timed, ALONE) is None
