"""A run that is much slower than its forecast says the likely reason, and what would help."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from llama_ssp.reports.lines import Forecast
from llama_ssp.tasks.slowness import Surroundings, slowness

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
            "or set it to 8), and other programs run about 3 threads on these 8 cores (end them)",
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


def test_a_run_without_a_forecast_says_nothing() -> None:
    found = summary(40.0)
    found.forecast = Forecast()
    assert slowness(found, ALONE) is None
