"""The program `llama-ssp`: its commands, help and completion, other words, and output that nobody reads."""

import os
import re
import signal
import subprocess
import sys
from itertools import product, starmap
from pathlib import Path
from types import SimpleNamespace

import pytest

from llama_ssp import load
from llama_ssp.errors import ConfigError
from llama_ssp.ranks import process
from llama_ssp.ranks.process import STOP_SIGNALS, signals_kept
from llama_ssp.run.commands import program
from llama_ssp.settings.commands import COMMANDS
from tests.helpers import in_process
from tests.helpers.commands import command
from tests.helpers.disturbed import wait_for
from tests.helpers.extensions import need
from tests.helpers.in_process import Ended, launch
from tests.helpers.lanes import heavy
from tests.helpers.repository import ROOT
from tests.helpers.terminals import OnTerminal


def call(*words: str) -> Ended:
    """Call the program in this process."""
    with signals_kept():
        return in_process.call(program.main, [*words])


def python(*words: str, before: tuple[str, ...] = (), **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run Python in a process of its own."""
    command, more = [*before, sys.executable, *words], {**os.environ, **environment}
    return subprocess.run(command, cwd=ROOT, env=more, capture_output=True, text=True, timeout=240, check=False)


def test_help_names_every_command_and_each_explains_itself() -> None:
    ended = call()
    assert (ended.code, ended.err) == (0, "")
    assert [name for name in COMMANDS.all() if f"llama-ssp {name} " not in ended.out] == []
    for name, record in COMMANDS.all().items():
        ended = call(name, "--help").well()
        assert ended.err == ""
        assert (f"task={name}" if record.task else f"llama-ssp {name}") in ended.out
        others = set(re.findall("task=([a-z]+)", ended.out)) - {record.task}
        assert not (record.task and others), "that of other tasks is elsewhere"


@pytest.mark.parametrize("words", [["--version"], ["run", "--version"]])
def test_the_version_comes_with_those_that_decide_results(words: list[str]) -> None:
    ended = call(*words)
    assert (ended.code, ended.err) == (0, "")
    assert re.match(r"llama-ssp (\d+\.\d+\.\d+|unknown) \(python 3\.\d+\.\d+, torch 2\.", ended.out)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["rnu"], "unknown command 'rnu': there are {names}; did you mean run?"),
        (["model=30B"], "model=30B follows a command, such as llama-ssp run model=30B; the commands are {names}"),
        (["-m", "model=7B,13B"], "-m follows a command, such as llama-ssp run -m; the commands are {names}"),
        (["compare", "30B", "7B"], "'compare' is no command: write llama-ssp run task=compare model=30B draft=7B"),
        (["30B"], "'30B' is no command: write llama-ssp run model=30B"),
        (["compare", "30B", "nosuch"], "unknown command 'compare': there are {names}"),
    ],
)
def test_a_word_that_is_no_command_is_answered_with_what_to_type(words: list[str], sentence: str) -> None:
    ended = call(*words)
    ended.check_refusal(sentence.format(names=", ".join(sorted(COMMANDS.all()))))
    assert ended.out == ""


@pytest.mark.seconds
def test_commands_keep_their_exit_codes(tmp_path: Path) -> None:
    assert call("plan", "model=7B", "hardware=8xh100", "format=json").code == 0
    assert call("plan", "model=65B", "draft=7B", "hardware=g5_12xlarge").code == 3
    assert call("report", str(tmp_path)).code == 2
    assert call("report", str(tmp_path / "nothing")).code == 2
    assert call("run", "seed=abc").code == 2
    for name, record in COMMANDS.all().items():
        if record.task:
            assert re.search(rf"^task:\n  name: {record.task}$", call(name, "--cfg", "job").out, re.MULTILINE)


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("number", "before", "ended"),
    [
        *((number, (), (4, "", "interrupted\n")) for number in STOP_SIGNALS[:1]),
        *(heavy(number, (), (4, "", "interrupted\n")) for number in STOP_SIGNALS[1:]),
        (signal.SIGHUP, ("env", "--ignore-signal=HUP"), (7, "", "")),  # as nohup does
    ],
)
def test_a_signal_while_modules_are_imported_is_one_word(
    number: signal.Signals, before: tuple[str, ...], ended: tuple[int, str, str]
) -> None:
    """The command's module is replaced by one that signals its own process, as Ctrl-C in an import."""
    words = "import sys, types, signal; module = types.ModuleType('llama_ssp.run.commands.plan'); "
    words += f"module.main = lambda words: signal.raise_signal({int(number)}) or 7; "
    words += "sys.modules[module.__name__] = module; from llama_ssp.run.commands.program import main; main(['plan'])"
    found = python("-c", words, before=before)
    assert (found.returncode, found.stdout, found.stderr) == ended


def test_an_interrupt_that_passed_through_exec_ends_with_code_4_too(tmp_path: Path) -> None:
    """Python remembers it, and would end a module that was started by `-m` by SIGINT."""
    (tmp_path / "interrupted.py").write_text("""
import contextlib, sys, types
from llama_ssp.run.commands.program import main

def plan(words):
    with contextlib.suppress(KeyboardInterrupt):
        exec("raise KeyboardInterrupt")
    return 4

sys.modules["llama_ssp.run.commands.plan"] = module = types.ModuleType("plan")
module.main = plan
main(["plan"])
""")
    assert python("-m", "interrupted", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}").returncode == 4


@pytest.mark.seconds
@pytest.mark.parametrize(
    "words", [["model=nosuch"], ["dry_run=true", "model=7B", "hardware=8xh100"], heavy(["--help"])]
)
def test_what_needs_no_model_is_answered_without_torch_on_any_number_of_ranks(words: list[str]) -> None:
    code = "import sys; from llama_ssp.run.commands.program import main\n"
    code += f"try: main(['run', 'ranks=2', *{words!r}])\n"
    code += "finally: print(*({'torch', 'transformers', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    ended = python("-c", code)
    assert ended.stderr.splitlines()[-1] == "", ended.stderr
    assert "starting" not in ended.stderr


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["launch/run.py", "run_dir={}"], 2, "Python removes docstrings (PYTHONOPTIMIZE=2, or python -OO), and tran"),
        heavy(["-m", "llama_ssp", "run", "ranks=2", "run_dir={}"], 2, "leave it out, or use PYTHONOPTIMIZE=1\n"),
        (["launch/plan.py", "model=7B", "draft=none", "hardware=p4d_24xlarge"], 0, "ms/token"),
        heavy(["launch/run.py", "dry_run=true"], 0, "per round"),
        heavy(["-m", "llama_ssp", "--help"], 0, "llama-ssp plan"),
    ],
)
def test_a_run_without_docstrings_is_refused_and_planning_and_help_need_none(
    words: list[str], code: int, said: str, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    ended = python(*(word.format(run_dir) for word in words), PYTHONOPTIMIZE="2", PYTHONDONTWRITEBYTECODE="1")
    assert (ended.returncode, run_dir.exists()) == (code, False)
    assert said in (ended.stderr if code else ended.stdout)
    assert (ended.stdout, ended.stderr.count("\n")) == ("", 1) or not code


def test_the_library_without_docstrings_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "sys", SimpleNamespace(flags=SimpleNamespace(optimize=2)))
    with pytest.raises(ConfigError, match=r"Python removes docstrings \(PYTHONOPTIMIZE=2"):
        load("tiny")


def helped(*words: str) -> str:
    ended = launch("--help", *words)
    assert (ended.code, ended.err) == (0, "")
    return ended.out


def test_the_overview_fits_a_terminal_and_names_every_topic() -> None:
    overview, everything = helped(), helped("all")
    topics = [line.partition(":")[0] for line in everything.splitlines() if line.partition(":")[0].isupper()]
    assert len(topics) > 10
    assert len(overview.splitlines()) < 60 < len(everything.splitlines())
    assert [topic for topic in topics if topic not in overview and f"  {topic.lower()} " not in overview] == []


@pytest.mark.seconds
def test_a_word_after_help_finds_its_topics_in_the_order_of_the_help() -> None:
    for word, topic in (("temperature", "SAMPLING"), ("stop_strings=", "LENGTH"), ("tp_size", "PLACEMENT")):
        shown = helped(word)
        assert shown.startswith(f"{topic}: ")
        assert word.rstrip("=") in shown
    shown = helped("sampling", "models")
    assert shown.startswith("MODELS: ")
    assert "\n\nSAMPLING: " in shown
    ended = launch("--help", "samplign")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("unknown topic 'samplign': there are all, examples, ")
    assert ended.err.endswith("did you mean sampling?; the name of a setting finds its topic too\n")


@pytest.mark.parametrize(
    ("line", "candidates"),
    [
        ("((", ""),
        ("python launch/run.py task=generate task.for", "task.format="),
        ("python launch/run.py a[ sampling=gr", ""),
        ("/opt/bin/llama-ssp  run model=7B draft=tiny-", "draft=tiny-draft draft=tiny-eagle"),
    ],
)
def test_a_shell_asks_for_candidates(line: str, candidates: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script that `llama-ssp run -sc install=bash` prints calls the program so, without the command."""
    if "tiny-eagle" in candidates:
        need("heads")
    monkeypatch.setattr(sys, "argv", ["llama-ssp"])
    monkeypatch.setenv("COMP_LINE", line)
    ended = call("-sc", "query=bash") if "llama-ssp" in line else launch("-sc", "query=bash")
    assert (ended.code, ended.err, ended.out.strip()) == (0, "", candidates)


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("words", "stderr", "code", "said"),
    [
        ("run.py model=nosuch", subprocess.STDOUT, 2, None),
        heavy("plan.py model=nosuch", subprocess.STDOUT, 2, None),
        ("run.py --cfg job", subprocess.PIPE, 0, b""),
        heavy("run.py model=7B dry_run=true", subprocess.PIPE, 0, b""),
        ("plan.py model=7B", subprocess.PIPE, 0, b""),
        heavy("plan.py model=7B format=json", subprocess.PIPE, 0, b""),
        heavy("plan.py --help", subprocess.PIPE, 0, b""),
    ],
)
def test_a_program_of_which_nobody_reads_a_word_ends_in_silence_and_keeps_its_code(
    words: str, stderr: int, code: int, said: bytes | None
) -> None:
    """Where it fails, its standard error has gone the same way."""
    command = [sys.executable, *f"launch/{words}".split()]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr) as running:
        assert running.stdout
        running.stdout.close()
        assert (running.stderr.read() if running.stderr else None) == said
    assert running.returncode == code


@pytest.mark.seconds
def test_standard_output_may_be_closed_from_the_start() -> None:
    command = f"exec {sys.executable} launch/plan.py --help >&-"
    ended = subprocess.run(["bash", "-c", command], cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, "Traceback" in ended.stderr) == (0, False)


@pytest.mark.seconds
def test_a_mistake_keeps_its_code_where_the_terminal_has_hung_up() -> None:
    words = 'trap "" HUP; kill -STOP $$; "$@"; exit $(($? + 40))'
    with OnTerminal(["bash", "-c", words, "bash", *command(["model=nosuch"])]) as shell:
        wait_for(lambda: " T " in Path(f"/proc/{shell.process.pid}/stat").read_text(), at_most_s=60)
        shell.hang_up()
        shell.process.send_signal(signal.SIGCONT)
        assert shell.process.wait(timeout=240) == 42


CLOSED = ["2>&-", ">&-", "<&-", "<&- >&- 2>&-"]


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("closed", "words", "code"),
    [
        *product(CLOSED, ["plan model=tiny hardware=laptop_cpu"], [0]),
        *product(CLOSED, ["report nowhere"], [2]),
        *product(CLOSED[::3], ["run speculation.num_draft_tokens=0", "run task=nosuch ranks=2"], [2]),
        ("<&-", "run task=generate prompts=- device=cpu", 2),
        *starmap(heavy, product(CLOSED, [f"run prompt=a max_new_tokens=2 device=cpu ranks={n}" for n in (1, 2)], [0])),
    ],
)
def test_a_stream_that_is_closed_before_the_start_changes_neither_run_nor_exit_code(
    closed: str, words: str, code: int, tmp_path: Path
) -> None:
    folder = [f"run_dir={tmp_path}/run"] if words.startswith("run ") else []
    before = ("bash", "-c", f'exec "$@" {closed}', "bash")
    ended = python("-m", "llama_ssp", *words.split(), *folder, before=before)
    assert (ended.returncode, "Traceback" in ended.stderr) == (code, False), ended.stderr
    if folder and not code:
        assert (tmp_path / "run/status").read_text() == "done\n"


def test_no_file_of_the_process_gets_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    """Libraries, and the programs that they start, write to the number."""
    code = (
        "from llama_ssp.terminal.unread import open_closed; open_closed(); import os, sys; "
        f"file = open({str(tmp_path / 'file')!r}, 'w'); os.system('echo lost; echo lost >&2'); sys.stdout.write('lost')"
        "; os.write(2, b'lost'); file.write(f'{file.fileno()}')"
    )
    assert python("-c", code, before=("bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash")).returncode == 0
    assert (tmp_path / "file").read_text() == "3"


@pytest.mark.seconds
@pytest.mark.parametrize("words", ["plan model=tiny", "run prompt=a", "report nowhere"])
def test_a_removed_working_folder_is_one_sentence(words: str, tmp_path: Path) -> None:
    gone = (
        "bash",
        "-c",
        f'mkdir "{tmp_path}/gone" && cd "{tmp_path}/gone" && rmdir "{tmp_path}/gone" && exec "$@"',
        "",
    )
    ended = python("-m", "llama_ssp", *words.split(), before=gone, PYTHONPATH=str(ROOT))
    sentence = "the working folder is gone (no such file or directory): change to a folder that exists\n"
    assert (ended.returncode, ended.stderr) == (2, sentence)
