"""The cluster of the tests leaves nothing, whatever ends the tests."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.disturbed import is_alive, wait_for
from tests.helpers.repository import ROOT

pytestmark = pytest.mark.slurm

TESTS = """
import sys, time
from pathlib import Path
from tests.helpers.slurm import Cluster
with Cluster(Path(sys.argv[1])) as cluster:
    cluster.run("sbatch", "--wrap", "sleep 100", cwd=cluster.folder)
    print(*(daemon.pid for daemon in cluster._daemons), cluster._run, flush=True)
    time.sleep(100)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.heavy)])
def test_no_daemon_outlives_tests_that_a_signal_ends(number: signal.Signals, tmp_path: Path) -> None:
    words = [sys.executable, "-c", TESTS, str(tmp_path / "cluster")]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout
        *pids, folder = tests.stdout.readline().split()
        tests.send_signal(number)
        wait_for(lambda: not any(is_alive(int(pid)) for pid in pids), at_most_s=30)
        wait_for(lambda: not Path(folder).exists(), at_most_s=15)
    assert len(pids) == 4
