"""Every step of the first hour passes with tiny shapes; those that need more GPUs say so."""

from pathlib import Path

import pytest
import torch

from benchmarks.first_hour.__main__ import all_steps
from benchmarks.first_hour.runner import PASS, SKIP, Step, run

pytestmark = pytest.mark.gpu(1)
NUM_GPUS = torch.cuda.device_count()
STEPS = all_steps(is_small=True, num_gpus=NUM_GPUS)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_a_step_passes(step: Step, tmp_path: Path) -> None:
    [row] = run([step], tmp_path / "hour", num_gpus=NUM_GPUS)
    if row["result"] == SKIP:
        pytest.skip(row["reason"])
    assert (row["result"], row["reason"]) == (PASS, None)
