"""Every signal, to every rank, in every phase of a plain `srun` step: it ends soon, says why, and can be resumed."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.helpers.commands import command
from tests.helpers.disturbed import (
    CELLS,
    Cell,
    check_end,
    check_resumption,
    has_begun,
    is_alive,
    lines,
    pid_of_rank,
    settings,
    wait_for,
)
from tests.helpers.repository import ROOT
from tests.helpers.slurm import Cluster

pytestmark = pytest.mark.slurm

AT_MOST_S = 15


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_disturbed_rank_ends_its_step_and_nothing_is_lost(cluster: Cluster, cell: Cell, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    step = subprocess.Popen(
        ["srun", "--ntasks=2", "--nodes=1", "--kill-on-bad-exit=1", *command(settings(cell, run_dir))],
        cwd=ROOT, env=cluster.environment, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        wait_for(lambda: has_begun(cell, run_dir) or step.poll() is not None, at_most_s=120)
        ranks = [pid_of_rank(run_dir, rank) for rank in (0, 1)]
        os.kill(ranks[cell.rank], cell.number)
        errors = step.communicate(timeout=AT_MOST_S)[1]
    finally:
        step.kill()
        step.communicate()
    assert step.returncode
    wait_for(lambda: not any(is_alive(pid) for pid in ranks), at_most_s=2)
    check_end(cell, run_dir, [errors])
    assert "Traceback" not in errors
    check_resumption(cell, run_dir, lines(run_dir))
