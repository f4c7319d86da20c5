"""The program `llama-ssp`: its commands, its version, and what it answers to words that are no command."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llama_ssp.ranks.process import STOP_SIGNALS, signals_kept
from llama_ssp.run.commands import program
from tests.helpers import in_process
from tests.helpers.in_process import Ended
from tests.helpers.lanes import heavy
from tests.helpers.repository import ROOT

pytestmark = pytest.mark.seconds


def call(*words: str) -> Ended:
    """Call the program in this process."""
    with signals_kept():
        return in_process.call(program.main, [*words])


def test_help_names_every_command_and_each_explains_itself() -> None:
    ended = call()
    assert (ended.code, ended.err) == (0, "")
    assert [name for name in program.COMMANDS if f"llama-ssp {name} " not in ended.out] == []
    for name in program.COMMANDS:
        ended = call(name, "--help")
        assert (ended.code, ended.err) == (0, "")
        assert (name if name == "calibrate" else f"llama-ssp {name}") in ended.out


@pytest.mark.parametrize("words", [["--version"], ["run", "--version"]])
def test_the_version_comes_with_those_that_decide_results(words: list[str]) -> None:
    ended = call(*words)
    assert (ended.code, ended.err) == (0, "")
    assert re.match(r"llama-ssp (\d+\.\d+\.\d+|unknown) \(python 3\.\d+\.\d+, torch 2\.", ended.out)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["rnu"], "unknown command 'rnu': there are calibrate, manifest, plan, report, run; did you mean run?"),
        (["model=30B"], "model=30B follows a command, such as llama-ssp run model=30B; the commands are calibrate, "),
        (["-m", "model=7B,13B"], "-m follows a command, such as llama-ssp run -m; the commands are calibrate, "),
        (["compare", "30B", "7B"], "'compare' is no command: write llama-ssp run task=compare model=30B draft=7B"),
        (["eval", "13B"], "'eval' is no command: write llama-ssp run task=evaluate suite=arithmetic model=13B"),
        (["30B"], "'30B' is no command: write llama-ssp run model=30B"),
        (["compare", "30B", "nosuch"], "unknown command 'compare': there are calibrate, "),
    ],
)  # fmt: skip
def test_a_word_that_is_no_command_is_answered_with_what_to_type(words: list[str], sentence: str) -> None:
    ended = call(*words)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(sentence)
    assert ended.err.count("\n") == 1


def test_commands_keep_their_exit_codes(tmp_path: Path) -> None:
    assert call("plan", "model=7B", "hardware=8xh100", "format=json").code == 0
    assert call("plan", "model=65B", "draft=7B", "hardware=g5_12xlarge").code == 3
    assert call("report", str(tmp_path)).code == 2
    assert call("manifest", str(tmp_path / "nothing")).code == 2
    assert call("run", "seed=abc").code == 2
    assert re.search(r"^task:\n  name: calibrate$", call("calibrate", "--cfg", "job").out, re.MULTILINE)


def signalled_in_an_import(number: signal.Signals, *before: str) -> tuple[int, str, str]:
    """The command's module is replaced by one that signals its own process, as Ctrl-C in an import."""
    words = "import sys, types, signal; module = types.ModuleType('llama_ssp.run.commands.plan'); "
    words += f"module.main = lambda words: signal.raise_signal({int(number)}) or 7; "
    words += "sys.modules[module.__name__] = module; from llama_ssp.run.commands.program import main; main(['plan'])"
    command = [*before, sys.executable, "-c", words]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize("number", [STOP_SIGNALS[0], *map(heavy, STOP_SIGNALS[1:])])
def test_a_signal_while_modules_are_imported_is_one_word(number: signal.Signals) -> None:
    assert signalled_in_an_import(number) == (4, "", "interrupted\n")


def test_a_hangup_that_nohup_ignores_is_ignored_while_modules_are_imported() -> None:
    assert signalled_in_an_import(signal.SIGHUP, "env", "--ignore-signal=HUP") == (7, "", "")


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
    ended = subprocess.run([sys.executable, "-m", "interrupted"], cwd=tmp_path, check=False)
    assert ended.returncode == 4


@pytest.mark.parametrize(
    "words", [["model=nosuch"], ["dry_run=true", "model=7B", "hardware=8xh100"], heavy(["--help"])]
)
def test_what_needs_no_model_is_answered_without_torch_on_any_number_of_ranks(words: list[str]) -> None:
    code = "import sys; from llama_ssp.run.commands.program import main\n"
    code += f"try: main(['run', 'ranks=2', *{words!r}])\n"
    code += "finally: print(*({'torch', 'transformers', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.stderr.splitlines()[-1] == "", ended.stderr
    assert "starting" not in ended.stderr
