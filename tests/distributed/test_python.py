"""Python scripts on two ranks: the text of one rank, and ends as those of `llama-ssp run`."""

import os
import re
import signal
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from llama_ssp import load
from tests.helpers.commands import TORCHRUN, Popen, started
from tests.helpers.disturbed import is_alive
from tests.helpers.forks import check_forks
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


def study(folder: Path, starter: str, word: str) -> AbstractContextManager[Popen]:
    """Start the script, which may be elsewhere than the program's folder."""
    (folder / "study.py").write_text(_SCRIPT)
    return started([*STARTERS[starter], "study.py", word], cwd=folder, env=environment())


@pytest.mark.slow
@pytest.mark.parametrize("starter", STARTERS)
def test_a_script_has_the_text_of_one_rank_on_each_and_its_own_exit_code(tmp_path: Path, starter: str) -> None:
    with study(tmp_path, starter, "7" if starter == "--script" else "0") as script:
        out, err = script.communicate(timeout=120)
    assert script.returncode == (7 if starter == "--script" else 0), err
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
    with study(tmp_path, starter, "long") as script:
        assert script.stdout
        pids = dict(line.split()[:2] for line in (script.stdout.readline(), script.stdout.readline()) if line.strip())
        family = family_of(script.pid)
        if number is signal.SIGKILL:
            os.kill(int(pids["1"]), signal.SIGKILL)
        else:
            script.send_signal(number)
        _, err = script.communicate(timeout=60)
    if number is signal.SIGKILL:
        assert script.returncode == 1
        assert len(re.findall("rank 1 is missing while decoding .*; load the pair again", err)) == 1, err
    elif starter == "--script":
        assert (script.returncode, err) == (4, "starting 2 ranks…\ninterrupted\n")
    else:
        assert "KeyboardInterrupt" in err
    assert not [pid for pid in family if is_alive(pid)]


@pytest.mark.slow
def test_a_pair_belongs_to_the_process_that_loaded_it(tmp_path: Path) -> None:
    check_forks(1, folder=tmp_path)
