"""Ranks that do not connect end within seconds, in a sentence; ranks of scripts end with code 0."""

import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from subprocess import DEVNULL

import pytest

from tests.helpers.commands import started
from tests.helpers.gpu_faults import steps
from tests.helpers.lanes import heavy, slow
from tests.helpers.repository import ROOT

pytestmark = pytest.mark.distributed(2)

AT_MOST_S = 45.0
"""Of which importing torch is most on a busy machine; the time limit of a start is half an hour."""
SENTENCE = (
    "NCCL: Error while creating shared memory segment /dev/shm/nccl-8Gkxpz (size 9637888), error: No space left on "
    "device (28); a container needs more shared memory: docker run --shm-size=8g, or --ipc=host; NCCL_DEBUG=INFO in "
    "the environment shows more"
)


def step(*words: str, at_most_s: float) -> tuple[list[int | None], list[str]]:
    """Run the two processes of a SLURM step without SLURM, which nobody ends; their codes and what they said."""
    with ExitStack() as kept:
        ranks = [
            kept.enter_context(
                started([sys.executable, *words], env=os.environ | own | {"PYTHONPATH": str(ROOT)}, stdout=DEVNULL)
            )
            for own in steps()
        ]
        said = [rank.communicate(timeout=at_most_s)[1] for rank in ranks]
    return [rank.returncode for rank in ranks], said


@pytest.mark.parametrize("faulty", [slow(0), heavy(1)])
def test_a_start_of_nccl_that_fails_ends_all_ranks_with_the_reason_and_the_remedy(faulty: int, tmp_path: Path) -> None:
    settings = ["task=generate", "device=cpu", "prompt=x", f"run_dir={tmp_path}/run"]
    began = time.monotonic()
    words = ["-m", "tests.distributed.faulty_start", str(faulty), *settings]
    codes, said = step(*words, at_most_s=2 * AT_MOST_S)
    assert time.monotonic() - began < AT_MOST_S
    assert codes == [1, 1], said
    sentence = f"rank {faulty} failed while connecting: {SENTENCE}"
    assert "".join(said).count(sentence) == 1, said
    assert "Traceback" not in "".join(said)
    assert (tmp_path / "run" / "status").read_text() == f"1: {sentence}\n"
    assert sentence in (tmp_path / "run" / "run.log").read_text()


# To free a tensor, a thread of gloo that is left at the very end would abort the process; what is registered first is
# called last. The other rank is still ending when rank 0, with the store, has ended.
_SCRIPT = """
import atexit, builtins, os, sys, time
from pathlib import Path
from llama_ssp.settings.schema import DeviceKind
from llama_ssp.ranks.world import start

def look():
    threads = [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]
    if left := [name for name in threads if "gloo" in name]:
        print("threads of gloo are left:", left, file=sys.stderr, flush=True)
        os._exit(1)

class EndsLate:
    def __init__(self, seconds):
        self.seconds = seconds
    def __del__(self):
        time.sleep(self.seconds)

atexit.register(look)
sys.setswitchinterval(100)
with start(device=DeviceKind.cpu, timeout_s=60) as world:
    pass
builtins.kept = EndsLate(2 * world.comm.rank)
"""


@pytest.mark.heavy
def test_no_thread_of_torch_aborts_a_rank_that_ends(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_SCRIPT)
    codes, said = step(str(tmp_path / "script.py"), at_most_s=60)
    assert codes == [0, 0], said
    assert "Traceback" not in "".join(said), "torch may say that it had to wait for the other rank, on a busy machine"
