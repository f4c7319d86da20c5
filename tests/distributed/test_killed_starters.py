"""Ranks end soon after their starter is killed at any moment: also before they can know who started them."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.helpers.disturbed import is_alive, wait_for
from tests.helpers.lanes import heavy, slow
from tests.helpers.repository import ROOT
from tests.helpers.sockets import family_of
from tests.helpers.starters import command_of, environment

pytestmark = pytest.mark.distributed(2)

LONG = ["task=generate", "device=cpu", "max_new_tokens=32", "num_samples=500", "prompt=def f(x):"]
AT_MOST_S = 15


@pytest.mark.parametrize(
    ("starter", "delay_s"),
    [
        heavy("torchrun", 0.0), heavy("ranks=2", 0.1), slow("torchrun", 0.1), slow("torchrun", 0.2),
        slow("torchrun", 1.0), slow("torchrun", 3.0), slow("ranks=2", 0.0), slow("ranks=2", 1.0), slow("ranks=2", 3.0),
    ],
)  # fmt: skip
def test_no_rank_outlives_a_starter_that_is_killed_so_long_after_their_start(
    starter: str, delay_s: float, tmp_path: Path
) -> None:
    process = subprocess.Popen(
        command_of(starter, [*LONG, f"run_dir={tmp_path}/run"]), cwd=ROOT, env=environment(),
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    ranks: list[int] = []
    try:
        wait_for(lambda: len(family_of(process.pid)) == 1 + 2, at_most_s=120)
        time.sleep(delay_s)
        ranks = family_of(process.pid)[1:]
        assert len(ranks) == 2
        process.kill()
        process.wait()
        wait_for(lambda: not any(map(is_alive, ranks)), at_most_s=AT_MOST_S)
    finally:
        process.kill()
        process.wait()
        for pid in filter(is_alive, ranks):
            os.kill(pid, signal.SIGKILL)
