"""Python scripts on two ranks: the text of one rank, and ends as those of `llama-ssp run`."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from llama_ssp import load
from tests.helpers.commands import TORCHRUN, Popen
from tests.helpers.disturbed import is_alive
from tests.helpers.lanes import heavy, slow
from tests.helpers.sockets import family_of
from tests.helpers.starters import PROGRAM, environment

pytestmark = pytest.mark.distributed(2)

# Nothing stands under `if __name__ == "__main__"`.
_SCRIPT = """
import os, sys
from llama_ssp import load
pair = load("tiny", "tiny-draft")
[found] = pair.generate("import os\\n", max_new_tokens=12, seed=1)
print(f"{pair.rank} {os.getpid()} {found.token_ids}\\n", end="", flush=True)
if sys.argv[1] == "long":
    pair.generate(["def f(x):"] * 32, max_new_tokens=1500, num_samples=30)
sys.exit(int(sys.argv[1]))
"""
STARTERS = {"torchrun": [*TORCHRUN, "2"], "--script": [*PROGRAM, "run", "ranks=2", "--script"]}


def start(folder: Path, starter: str, *words: str) -> Popen:
    """Start the script, which may be elsewhere than the program's folder."""
    (folder / "study.py").write_text(_SCRIPT)
    return subprocess.Popen(
        [*STARTERS[starter], "study.py", *words], cwd=folder, env=environment(),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.parametrize("starter", [heavy("--script"), slow("torchrun")])
def test_a_script_has_the_text_of_one_rank_on_each_and_its_own_exit_code(tmp_path: Path, starter: str) -> None:
    started = start(tmp_path, starter, "7" if starter == "--script" else "0")
    out, err = started.communicate(timeout=120)
    assert started.returncode == (7 if starter == "--script" else 0), err
    [wanted] = load("tiny", "tiny-draft").generate("import os\n", max_new_tokens=12, seed=1)
    found = sorted(re.findall(r"^(\d) \d+ (.*)$", out, re.MULTILINE))
    assert found == [("0", str(wanted.token_ids)), ("1", str(wanted.token_ids))], err
    assert err == ("starting 2 ranks…\n" if starter == "--script" else "")


@pytest.mark.slow
@pytest.mark.parametrize("starter", STARTERS)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_lost_rank_and_a_signal_end_a_script_in_a_sentence(
    tmp_path: Path, starter: str, number: signal.Signals
) -> None:
    started = start(tmp_path, starter, "long")
    assert started.stdout
    assert started.stderr
    pids = dict(line.split()[:2] for line in (started.stdout.readline(), started.stdout.readline()) if line.strip())
    family = family_of(started.pid)
    if number is signal.SIGKILL:
        os.kill(int(pids["1"]), signal.SIGKILL)
    else:
        started.send_signal(number)
    _, err = started.communicate(timeout=60)
    if number is signal.SIGKILL:
        assert started.returncode == 1
        assert len(re.findall("rank 1 is missing while decoding .*; load the pair again", err)) == 1, err
    elif starter == "--script":
        assert (started.returncode, err) == (4, "starting 2 ranks…\ninterrupted\n")
    else:
        assert "KeyboardInterrupt" in err
    assert not [pid for pid in family if is_alive(pid)]
