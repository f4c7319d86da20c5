"""Ranks of scripts that use the library end with code 0, whatever torch's threads do while the interpreter ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.distributed(2), pytest.mark.seconds]
ROOT = Path(__file__).parents[2]

# The other rank is still ending when rank 0, with the store, has ended.
_SCRIPT = """
import builtins, sys, time
from llama_ssp.settings.schema import DeviceKind
from llama_ssp.ranks.world import start
from tests.helpers.gloo_threads import end_with_an_error_if_left

class EndsLate:
    def __init__(self, seconds):
        self.seconds = seconds
    def __del__(self):
        time.sleep(self.seconds)

end_with_an_error_if_left()
sys.setswitchinterval(100)
with start(device=DeviceKind.cpu, timeout_s=60) as world:
    pass
builtins.kept = EndsLate(2 * world.comm.rank)
"""


def test_no_thread_of_torch_aborts_a_rank_that_ends(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_SCRIPT)
    step = {
        "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2",
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "script.py")],
            env=os.environ | step | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    said = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert "Traceback" not in "".join(said), "torch may say that it had to wait for the other rank, on a busy machine"
