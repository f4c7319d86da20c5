"""Completion of names in a shell, of the program and of its file, and what it cannot do is one sentence."""

import sys

import pytest

from llama_ssp.ranks.process import signals_kept
from llama_ssp.run.commands import program
from tests.helpers.in_process import call, launch

pytestmark = pytest.mark.seconds

INSTALL = "for the shell bash, zsh or fish, such as -sc install=bash"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_a_script_and_takes_it_back(shell: str) -> None:
    for command in ("install", "uninstall"):
        ended = launch("--shell-completion", f"{command}={shell}")
        assert (ended.code, ended.err) == (0, "")
        assert "hydra" in ended.out


@pytest.mark.parametrize(
    ("line", "candidates"),
    [
        ("((", ""),
        ("python launch/run.py sampling=gr", "sampling=greedy"),
        ("python launch/run.py task=generate task.for", "task.format="),
        ("python launch/run.py speculation=${run_id:} sampling=gr", "sampling=greedy"),
        ("python launch/run.py a[ sampling=gr", ""),
        ("python launch/run.py --no-such-option sam", ""),
        ("python launch/run.py seed.x", ""),
        ("python launch/run.py run_dir=/no/such", ""),
        ("/opt/bin/llama-ssp  run model=7B ranks=2 draft=tiny-", "draft=tiny-draft draft=tiny-eagle"),
        ("llama-ssp calibrate task.out", "task.output="),
        ("llama-ssp ru", "run"),
        ("llama-ssp ", " ".join(program.COMMANDS)),
        ("llama-ssp plan sampling=gr", ""),
    ],
)
def test_a_shell_asks_for_candidates(line: str, candidates: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script that `llama-ssp run -sc install=bash` prints calls the program so, whatever the command is."""
    monkeypatch.setattr(sys, "argv", ["llama-ssp"])
    monkeypatch.setenv("COMP_LINE", line)
    words = ["-sc", "query=bash"]
    with signals_kept():
        ended = call(program.main, words) if "llama-ssp" in line else launch(*words)
    assert (ended.code, ended.err, ended.out.strip()) == (0, "", candidates)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], INSTALL),
        (["install=tcsh"], INSTALL),
        (["install=bash", "query=bash"], INSTALL),
        (["query=bash"], "-sc query=bash is called by the shell itself, which sets COMP_LINE; "),
    ],
)
def test_a_mistake_is_one_sentence(words: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMP_LINE", raising=False)
    ended = launch("-sc", *words)
    assert (ended.code, ended.err.count("\n"), ended.out) == (2, 1, "")
    assert sentence in ended.err
