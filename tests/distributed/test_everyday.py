"""What people type every day, started in four ways: the first line and the exit code, wherever it is typed."""

import os
import re
import shlex
import subprocess
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.helpers.commands import started
from tests.helpers.lanes import heavy, slow
from tests.helpers.repository import ROOT
from tests.helpers.starters import STARTERS, command_of, environment
from tests.helpers.terminals import OnTerminal

pytestmark = pytest.mark.distributed(2)


class Typed(NamedTuple):
    """A command line, as in a shell.

    Attributes:
        text: settings and options.
        first: pattern at the begin of the first line: of standard error after a failure, else of standard output.
        code: the exit code, which torchrun turns into 1.
        starts: whether ranks are started, which the program announces first.
    """

    text: str
    first: str
    code: int = 2
    starts: bool = False

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text)

    def __str__(self) -> str:
        return self.text


def _done(text: str, first: str) -> Typed:
    return Typed(text, first, code=0, starts=True)


def _shown(text: str, first: str, code: int = 0) -> Typed:
    return Typed(text, first, code=code)


TYPOS = [
    Typed("model=nosuch", r"unknown model 'nosuch': there are 13B, "),
    Typed("modle=7B", r"unknown setting 'modle': did you mean model\?"),
    Typed("model:7B", r"cannot read 'model:7B': settings are written name=value"),
    Typed("task=genrate", r"unknown task 'genrate': .*; did you mean generate\?"),
    Typed("sampling=gredy", r"unknown sampling 'gredy': .*; did you mean greedy\?"),
    Typed("hardware=nosuch dry_run=true", r"unknown hardware 'nosuch': there are 1xa100_80gb, "),
    Typed("--model 7B", r"unrecognized arguments: --model: settings are written name=value"),
    Typed("--draft=7B", r"unrecognized arguments: --draft=7B: settings are written name=value"),
    Typed("--help samplign", r"unknown topic 'samplign': there are all, .*; did you mean sampling\?"),
    Typed("--config-dir nosuch", r"--config-dir nosuch is no folder: name one that has files such as model/NAME\.yaml"),
]
FOREIGN = [
    Typed("temperature=0.5", r"unknown setting 'temperature': did you mean sampling\.temperature\?"),
    Typed("repetition_penalty=1.1", r"unknown setting .*: did you mean sampling\.repetition_penalty\?"),
    Typed("stop=END", r"""unknown setting 'stop': stop_strings='\["END"\]' ends a completion at a text"""),
    Typed("rule=block", r"unknown setting 'rule': verification=NAME is the rule"),
    Typed("top_logprobs=5", r"unknown setting 'top_logprobs': logprobs=5 gives log-probabilities"),
    Typed("min_tokens=5", r"unknown setting 'min_tokens': sampling\.min_new_tokens=8"),
    Typed("max_model_len=9", r"unknown setting 'max_model_len': a run allocates what"),
    Typed("gpu_memory_utilization=0.9", r"unknown setting 'gpu_memory_utilization': batch_size=8"),
    Typed("wandb=x", r"unknown setting 'wandb': trackers are not here"),
    Typed("max_tokens=64", r"unknown setting 'max_tokens': max_new_tokens=64 limits"),
    Typed("K=6", r"unknown setting 'K': speculation\.num_draft_tokens=4 is K"),
    Typed("tp=2", r"unknown setting 'tp': .* llama-ssp run ranks=N starts N ranks"),
    Typed("nproc_per_node=4", r"unknown setting 'nproc_per_node': llama-ssp run ranks=N starts N ranks"),
    Typed("nodes=2", r"unknown setting 'nodes': several nodes are started by sbatch"),
    Typed("target=7B", r"unknown setting 'target': model=NAME is the target"),
    Typed("assistant_model=7B", r"unknown setting 'assistant_model': draft=NAME is the draft"),
    Typed("load_in_8bit=true", r"unknown setting 'load_in_8bit': model\.quantization=int8"),
    Typed("compare 30B 7B", r"'compare 30B 7B' names no settings: write task=compare model=30B draft=7B"),
    Typed("latency 30B", r"'latency 30B' names no settings: write task=latency model=30B"),
    Typed("30B", r"'30B' names no settings: write model=30B"),
]
VALUES = [
    Typed("seed=abc", r"seed=abc: Value 'abc' of type 'str' could not be converted to Integer"),
    Typed("device=gpu", r"device=gpu: Invalid value 'gpu', expected one of \[auto, cpu, cuda\]"),
    Typed("model.dtype=fp8", r"model\.dtype=fp8: Invalid value 'fp8'"),
    Typed("sampling.temperature=-1", r"sampling\.temperature=-1\.0 must be 0 \(greedy\) or"),
    Typed("sampling.temperature=hot", r"sampling\.temperature=hot: Value 'hot'"),
    Typed("speculation.num_draft_tokens=0", r"speculation\.num_draft_tokens=0 must be at least 1"),
    Typed("max_new_tokens=0", r"max_new_tokens=0 must be at least 1, for example 64"),
    Typed("max_new_tokens=100000 task=generate prompt=x", r"max_new_tokens=100000 leaves no room for a prompt"),
    Typed("batch_size=0", r"batch_size=0 must be at least 1 sequence"),
    Typed("stop_strings=[2.]", r"stop_strings=\[2\.\]: quote items that are not plain words"),
    Typed("model=7B,13B", r"model=7B,13B gives several values: add -m"),
    Typed("draft=none", r"task=compare needs a draft, and model=tiny runs without one here"),
    Typed("model=7B draft=smollm2_135M", r"the draft must have the target's vocabulary: model=7B has 32000 tokens"),
    Typed("task=generate chat=true prompt=x", r"chat=true needs a model with a chat template"),
    Typed("model=local", r"2 problems in the configuration:"),
]
FILES = [
    Typed("prompts=nosuch.txt", r"prompts=nosuch\.txt does not exist"),
    Typed("prompt=x prompts=README.md", r"prompt= and prompts= exclude each other"),
    Typed("model=local model.path=nosuch draft=none task=generate prompt=x", r"nosuch does not exist"),
    Typed("model=local model.path=README.md draft=none task=generate prompt=x", r"README\.md does not exist"),
    Typed("task=generate prompt=x run_dir=/dev/null/x", r"cannot use /dev/null/x: not a directory", starts=True),
]
TELLING = [
    _shown("--help", r"llama-ssp: speculative sampling on models that are too large for one GPU\."),
    _shown("--help sampling", r"SAMPLING: sampling=default \| greedy \| nucleus"),
    _shown("--help top_p", r"SAMPLING: "),
    _shown("--help all", r"llama-ssp: speculative sampling"),
    _shown("--cfg job", r"task:$"),
    _shown("dry_run=true", r"\S"),
    _shown("model=30B draft=7B hardware=8xa100_80gb dry_run=true", r"\S"),
    _shown("-m speculation.num_draft_tokens=2,4 dry_run=true", r"\S"),
    _shown("model=65B draft=7B hardware=laptop_cpu dry_run=true", r"rank 0 needs [\d.]+ GiB \(target", code=3),
]
RUNS = [
    _done("task=generate max_new_tokens=4 'prompt=import os' run_dir={run}", r"\S"),
    _done("task=generate max_new_tokens=4 draft=none prompt=x run_dir={run}", r"\S"),
    _done("task=generate max_new_tokens=4 format=jsonl 'prompt=$5, \"or\" ${{more}}' run_dir={run}", r'\{"index": 0'),
    _done("task=generate max_new_tokens=4 format=jsonl prompts=- run_dir={run}", r'\{"index": 0.*import os'),
    _done("max_new_tokens=4 'prompt=def f' run_dir={run}", r"\S"),
    _done("-m task=generate format=jsonl max_new_tokens=4 prompt=x seed=0,1 run_dir={run}", r'\{"index": 0'),
]
EVERYDAY = [*TYPOS, *FOREIGN, *VALUES, *FILES, *TELLING, *RUNS]


OWN = {"ranks=1": "starting 1 rank…", "ranks=2": "starting 2 ranks…"}
# Each way to start once; test_copies.py has torchrun.
HEAVY = {("ranks=1", TELLING[-1]), ("ranks=2", TYPOS[1]), ("launch/run.py", TELLING[-1])}
LONG = ["task=generate", "format=jsonl", "max_new_tokens=64", "num_samples=400", "prompt=def f(x):"]
PRINTED = ["task=generate", "max_new_tokens=40", "num_samples=3", "prompt=def f(x):"]


def typed(starter: str, words: Sequence[str], *, stdin: str = "import os\n", **more: str) -> tuple[int, str, str]:
    """Type a command; returns the exit code, standard output and standard error."""
    ended = subprocess.run(
        command_of(starter, words),
        cwd=ROOT,
        env=environment(more),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
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
    with started(command_of(starter, words), env=environment()) as running:
        assert running.stdout
        assert running.stderr
        assert running.stdout.readline().startswith('{"index": 0')
        running.stdout.close()
        complaint = running.stderr.read()
        running.wait()
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
