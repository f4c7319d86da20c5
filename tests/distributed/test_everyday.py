"""What people type every day, started in four ways: the first line and the exit code, wherever it is typed."""

import os
import re
import subprocess
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest

from tests.helpers.everyday import EVERYDAY, TELLING, TYPOS, Typed
from tests.helpers.lanes import heavy, slow
from tests.helpers.repository import ROOT
from tests.helpers.starters import STARTERS, command_of, environment
from tests.helpers.terminals import OnTerminal

pytestmark = pytest.mark.distributed(2)

OWN = {"ranks=1": "starting 1 rank…", "ranks=2": "starting 2 ranks…"}
# Each way to start once; test_copies.py has torchrun.
HEAVY = {("ranks=1", TELLING[-1]), ("ranks=2", TYPOS[1]), ("launch/run.py", TELLING[-1])}
LONG = ["task=generate", "format=jsonl", "max_new_tokens=64", "num_samples=400", "prompt=def f(x):"]
PRINTED = ["task=generate", "max_new_tokens=40", "num_samples=3", "prompt=def f(x):"]


def typed(starter: str, words: Sequence[str], *, stdin: str = "import os\n", **more: str) -> tuple[int, str, str]:
    """Type a command; returns the exit code, standard output and standard error."""
    ended = subprocess.run(
        command_of(starter, words), cwd=ROOT, env=environment(more), input=stdin,
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize(
    ("starter", "row"), [(heavy if pair in HEAVY else slow)(*pair) for pair in product(STARTERS, EVERYDAY)], ids=str
)
def test_the_first_line_and_the_exit_code_are_as_expected(starter: str, row: Typed, tmp_path: Path) -> None:
    words = [word.format(run=tmp_path / "run") if "{run}" in word or "{{" in word else word for word in row.words]
    code, out, err = typed(starter, words)
    assert code == (1 if row.code and starter == "torchrun" else row.code), err
    said = err.splitlines()
    if row.starts and starter in OWN:
        assert said.pop(0) == OWN[starter]
    first = said[0] if row.code else next(line for line in out.splitlines() if line.strip())
    assert re.match(row.first, first), (first, err)
    if starter != "torchrun":
        assert "Traceback" not in err
    if row.code and not row.first.endswith(":"):
        assert len(said) == 1 or starter == "torchrun", err


@pytest.mark.parametrize("starter", [heavy(STARTERS[0]), *map(slow, STARTERS[1:])])
def test_the_output_may_end_after_its_first_line(starter: str, tmp_path: Path) -> None:
    """As behind `| head -n 1`."""
    words = [*PRINTED, "format=jsonl", "num_samples=400", f"run_dir={tmp_path}/run"]
    with subprocess.Popen(
        command_of(starter, words), cwd=ROOT, env=environment(), text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as running:  # fmt: skip
        assert running.stdout
        assert running.stderr
        assert running.stdout.readline().startswith('{"index": 0')
        running.stdout.close()
        complaint = running.stderr.read()
    assert running.returncode == (1 if starter == "torchrun" else 4), complaint
    assert sum(line.startswith("interrupted") for line in complaint.splitlines()) == 1
    assert "BrokenPipe" not in complaint


@pytest.mark.parametrize("no_color", [False, True])
@pytest.mark.parametrize("starter", [*map(slow, STARTERS)])
def test_a_narrow_terminal_shows_whole_lines_in_colours_if_wanted(starter: str, no_color: bool, tmp_path: Path) -> None:
    more = environment({"NO_COLOR": "1"} if no_color else {"TERM": "xterm-256color"})
    more.pop("COLUMNS", None)  # of the terminal that the tests run on
    words = ["max_new_tokens=8", "prompt=def f", f"run_dir={tmp_path}/run"]
    with OnTerminal(command_of(starter, words), num_columns=60, more=more) as terminal:
        terminal.wait_for(lambda: terminal.process.poll() is not None, at_most_s=240)
        terminal.read()
        assert terminal.process.returncode == 0, terminal.shown
    assert ("\x1b[3" in terminal.shown) is not no_color, "colours"
    lines = terminal.shown.replace("\x1b[2K", "\n")  # a bar is drawn again where it stands
    plain = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", lines)
    table = [line for line in plain.splitlines() if re.search("[─━┃│]", line)]
    assert max(map(len, table), default=0) <= 60, table
    assert "speed-up" in plain


@pytest.mark.parametrize("starter", [*map(slow, STARTERS)])
def test_a_folder_that_cannot_be_written_is_one_sentence(starter: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    if os.access(tmp_path, os.W_OK):
        pytest.skip("this user may write everywhere")
    code, _, err = typed(starter, [*PRINTED, f"run_dir={tmp_path}/run"])
    assert code == (1 if starter == "torchrun" else 2)
    assert err.splitlines()[starter in OWN].startswith(f"cannot use {tmp_path}/run: permission denied; ")


@pytest.mark.parametrize("delay_s", [0.1, 0.5, 2.0, 5.0])
@pytest.mark.parametrize("starter", [*map(slow, STARTERS)])
def test_ctrl_c_once_ends_it_whenever_it_is_pressed(starter: str, delay_s: float, tmp_path: Path) -> None:
    """After 0.1 s Python itself may still be starting, and answers as it likes."""
    with OnTerminal(command_of(starter, [*LONG, f"run_dir={tmp_path}/run"]), more=environment()) as terminal:
        time.sleep(delay_s)
        terminal.enter("\x03")
        terminal.wait_for(lambda: terminal.process.poll() is not None, at_most_s=90)
        terminal.read()
        code = terminal.process.returncode
    if starter == "torchrun":
        assert code != 0
    elif delay_s > 0.1 or code == 4:
        assert code == 4, terminal.shown
        assert len(re.findall(r"^(?:\^C)?interrupted", terminal.shown, re.MULTILINE)) == 1, terminal.shown
        assert "Traceback" not in terminal.shown
