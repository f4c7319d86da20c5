"""Every step of the first hour passes with tiny shapes; those that need more GPUs say so, or two ranks share one."""

from pathlib import Path

import pytest
import torch

from benchmarks.first_hour.__main__ import all_steps
from benchmarks.first_hour.runner import PASS, SHARES, SKIP, Step, run

pytestmark = pytest.mark.gpu(1)
NUM_GPUS = torch.cuda.device_count()
STEPS = all_steps(is_small=True, num_gpus=NUM_GPUS)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_a_step_passes(step: Step, tmp_path: Path) -> None:
    [row] = run([step], tmp_path / "hour", num_gpus=NUM_GPUS)
    if row["result"] == SKIP:
        pytest.skip(row["reason"])
    assert (row["result"], row["reason"]) == (PASS, None)


@pytest.mark.parametrize("pattern", ["messages", "runs-text-sharded-of-2", "runs-sampled", "runs-rank-killed-generate"])
def test_a_step_passes_with_two_ranks_on_one_gpu(pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARES, "2")
    steps = [step for step in all_steps(is_small=True, num_gpus=2) if step.name == pattern]
    [row] = run(steps, tmp_path / "hour", num_gpus=2)
    assert (row["result"], row["reason"]) == (PASS, None)
