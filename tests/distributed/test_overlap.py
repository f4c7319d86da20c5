"""Drafting that overlaps verification on ranks of its own: a draft's rank that dies, and distributions."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.commands import Popen, run, start
from tests.helpers.disturbed import Cell, check_end, check_resumption, has_begun, lines, pid_of_rank, settings, wait_for
from tests.helpers.repository import ROOT

DRAFT_RANK = 1
OVERLAP = ("placement=own_gpu", "speculation.overlap=true")
CELL = Cell(signal.SIGKILL, DRAFT_RANK, "decoding")


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Popen]:
    """A run that decodes."""
    process = start([*settings(CELL, tmp_path / "run"), *OVERLAP], num_ranks=2)
    wait_for(lambda: has_begun(CELL, tmp_path / "run") or process.poll() is not None, at_most_s=120)
    yield process
    process.kill()
    process.communicate()


@pytest.mark.distributed(2)
@pytest.mark.slow
def test_a_draft_rank_that_dies_ends_the_job_and_resumption_completes_it(running: Popen, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    os.kill(pid_of_rank(run_dir, DRAFT_RANK), signal.SIGKILL)
    _, errors = running.communicate(timeout=60)
    assert running.returncode != 0
    check_end(CELL, run_dir, [errors])
    before = lines(run_dir)
    assert before
    check_resumption(CELL, run_dir, before, more=OVERLAP, num_ranks=2)
    whole = run([*settings(CELL, tmp_path / "whole"), *OVERLAP], num_ranks=2)
    assert whole.returncode == 0, whole.stderr
    ids = [[line["token_ids"] for line in lines(folder)] for folder in (run_dir, tmp_path / "whole")]
    assert ids[0] == ids[1]
    overlap = json.loads((run_dir / "summary.json").read_text())["overlap"]
    assert overlap["num_dropped_tokens"] > 0
    assert len(overlap["ranks"]) == 2


@pytest.mark.distributed(2)
@pytest.mark.slow
@pytest.mark.parametrize("is_faulty", [True, False])
def test_the_samples_of_both_modes_have_one_distribution_unless_the_rule_is_wrong(
    is_faulty: bool, tmp_path: Path
) -> None:
    """See docs/guides/evaluate.md on the probabilities of errors; a third of its samples shows this fault."""
    settings = ["task=evaluate", "suite=distribution", "evaluate.gate=true", "num_samples=80", *OVERLAP]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        *(["-m", "tests.distributed.faulty_run"] if is_faulty else ["launch/run.py"]), *settings, f"run_dir={tmp_path}",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode == 0) is not is_faulty, done.stderr[-3000:]
    assert json.loads((tmp_path / "summary.json").read_text())["evaluation"]["passed"] is not is_faulty
