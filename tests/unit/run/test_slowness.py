"""A run that took another time than its forecast says the likely reason, and what would help."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from llama_ssp.reports.records import Forecast, RankActivity
from llama_ssp.run.slowness import Surroundings, disturbance, unusual_times

ALONE = Surroundings(device="cpu", num_ranks=1, num_threads=8, num_cores=8, others=0.0)
FORECAST = Forecast(plain_ms_per_token=10.0, speculative_ms_per_token=5.0)


def said(*, around: dict[str, Any] | None = None, **run: Any) -> str:
    """What is said of a run, whose plan expects 1 ms of drafting per round; nothing of one in time."""
    plain, fast = (SimpleNamespace(ms_per_token=run.get(f"{mode}_ms")) for mode in ("plain", "speculative"))
    activities = run.get("activities")
    summary: Any = SimpleNamespace(
        plain=plain,
        speculative=fast,
        forecast=run.get("forecast", FORECAST),
        num_new_tokens=run.get("num_tokens", 64),
        overlap=activities and SimpleNamespace(ranks=activities),
    )
    timing = SimpleNamespace(num_draft_tokens=4, overlap={"draft_ms": 1.0} if activities else None)
    plan: Any = SimpleNamespace(timing=timing)
    return unusual_times(summary, plan, replace(ALONE, **around or {})) or ""


LATE = {"plain_ms": 40.0}


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (
            LATE | {"around": {"num_threads": 1}},
            "plain decoding took 4.0 times its forecast (40.00 ms/token, forecast 10.00): 1 of 8 cores compute (unset",
        ),
        (
            LATE | {"speculative_ms": 50.0, "around": {"others": 6.0}},
            "took 10.0 times its forecast (50.00 ms/token, forecast 5.00): other programs used 6.0 of these 8 cores",
        ),
        (LATE | {"around": {"num_ranks": 16, "num_threads": 16}}, "16 threads share 8 cores (start fewer ranks)"),
        (
            LATE | {"around": {"num_threads": 1, "others": 3.0}},
            "keeps the fastest), and other programs used 3.0 of these 8 cores (stop them or use fewer cores)",
        ),
        (
            LATE | {"around": {"num_threads": 1, "num_cores": 2, "others": 1.1}},
            "forecast 10.00): other programs used 1.1 of these 2 cores (stop them or use fewer cores)",
        ),
        (
            LATE | {"around": {"others": 7.0, "slowness": {8: 6.0, 7: 2.0, 1: 4.0}}},
            "7 of 8 cores computed, since rounds on 8 took 3.0 times as long, and other programs used 7.0",
        ),
        (LATE | {"around": {"device": "cuda"}}, "nvidia-smi shows whether the GPU is shared"),
        ({"speculative_ms": 16.0}, "the forecast may describe another machine; task=calibrate measures this one"),
        ({"plain_ms": 29.0, "speculative_ms": 14.0}, ""),
        (LATE | {"num_tokens": 8}, ""),
        ({"plain_ms": 7.0}, ""),
        ({}, ""),
        (LATE | {"forecast": Forecast()}, ""),
    ],
)
def test_a_late_run_has_a_reason_and_others_none(run: dict[str, Any], reason: str) -> None:
    found = said(**run)
    assert reason in found
    assert bool(reason) == bool(found)


@pytest.mark.parametrize(
    ("worked_s", "cpu_share", "device", "sentence"),
    [
        (0.29, 1.0, "cpu", ""),
        (
            0.4,
            1.0,
            "cpu",
            "the draft on rank 1 was late: 4 tokens took 4.00 ms, 4.0 times the forecast (1.00): the",
        ),
        (0.4, 0.3, "cpu", ": its process ran for 30 % of that time (other programs use its core, or stopped it)"),
        (0.4, 0.3, "cuda", "(1.00): other programs used 6.0 of"),
    ],
)
def test_a_draft_that_is_late_by_three_times_its_forecast_is_named_with_the_cause(
    worked_s: float, cpu_share: float, device: str, sentence: str
) -> None:
    activities = (
        RankActivity(rank=0, rounds_s=9.0, waited_s=0.0, num_rounds=100),
        RankActivity(rank=1, rounds_s=worked_s + 1, waited_s=1.0, num_rounds=100, draft_cpu_s=cpu_share * worked_s),
    )
    around = {"num_ranks": 2, "device": device, "others": 6.0 if device == "cuda" else 0.0}
    found = said(activities=activities, around=around)
    assert sentence in found
    assert bool(sentence) == bool(found)
    assert not said(activities=activities, around=around, num_tokens=8)


@pytest.mark.parametrize(
    ("around", "num_tokens", "sentence"),
    [
        ({"others": 2.5}, 64, "other programs used 2.5 of 8 cores"),
        ({"others": 1.9}, 64, None),
        ({"others": None}, 64, None),
        ({"others": 8.0}, 8, None),
        ({"others": 8.0, "device": "cuda"}, 64, None),
    ],
)
def test_a_run_on_cores_that_others_used_is_disturbed_even_if_it_was_in_time(
    around: dict[str, Any], num_tokens: int, sentence: str | None
) -> None:
    summary: Any = SimpleNamespace(num_new_tokens=num_tokens)
    assert disturbance(summary, replace(ALONE, **around)) == sentence
