"""One rank of two that runs out of memory: both end soon, and say which rank it was and why.

The system's own limit on a process's address space is lowered on the running rank, so that nothing is made up inside
the program; blocks of some size are asked of the system each time, rather than taken from what was freed before. Ranks
start as plain `srun` starts them: nobody ends them but themselves.
"""

import resource
import signal
from pathlib import Path

import pytest

from tests.distributed.test_kill_matrix import AT_MOST_S, started
from tests.helpers.disturbed import Cell, check_resumption, has_begun, is_alive, lines, pid_of_rank, wait_for

pytestmark = [pytest.mark.distributed(2), pytest.mark.slow]


@pytest.mark.parametrize("phase", ["loading", "prefill"])
def test_a_rank_out_of_memory_ends_the_job_with_rank_and_cause_in_a_sentence(
    phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    cell, run_dir = Cell(signal.SIGTERM, 1, phase), tmp_path / "run"
    running = started("srun", cell, run_dir, more=("timeouts.load_s=600", "timeouts.decode_s=600"))
    try:
        wait_for(lambda: has_begun(cell, run_dir) or any(one.poll() is not None for one in running), at_most_s=120)
        ranks = [pid_of_rank(run_dir, rank) for rank in (0, 1)]
        resource.prlimit(ranks[1], resource.RLIMIT_AS, (1 << 20, resource.RLIM_INFINITY))
        errors = [process.communicate(timeout=AT_MOST_S["srun"])[1] for process in running]
    finally:
        for process in running:
            process.kill()
            process.communicate()
    assert [process.returncode for process in running] == [3, 3], errors
    assert not any(is_alive(pid) for pid in ranks)
    said = [line for text in errors for line in text.splitlines() if "out of memory" in line]
    assert len(said) == 1, errors
    assert said[0].endswith("(rank 1)") or said[0].startswith("rank 1 failed while "), errors
    assert (run_dir / "status").read_text() == f"3: {said[0]}\n"
    assert "Traceback" not in "".join(errors)
    check_resumption(cell, run_dir, lines(run_dir))
