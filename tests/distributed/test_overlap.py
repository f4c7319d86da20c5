"""Drafting that overlaps verification on ranks of its own: a draft's rank that dies, and distributions."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.helpers.commands import command, run, started
from tests.helpers.disturbed import Cell, check_end, check_resumption, has_begun, lines, pid_of_rank, settings, wait_for

DRAFT_RANK = 1
OVERLAP = ("placement=own_gpu", "speculation.overlap=true")
CELL = Cell(signal.SIGKILL, DRAFT_RANK, "decoding")


@pytest.mark.distributed(2)
@pytest.mark.slow
def test_a_draft_rank_that_dies_ends_the_job_and_resumption_completes_it(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with started(command([*settings(CELL, run_dir), *OVERLAP], num_ranks=2)) as running:
        wait_for(lambda: has_begun(CELL, run_dir) or running.poll() is not None, at_most_s=120)
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
