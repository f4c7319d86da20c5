"""Hydra's completion of names in a shell works, and what it cannot do is one sentence."""

import pytest

from tests.helpers.in_process import launch

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
        ("", ""),
        ("((", ""),
        (".venv/bin/python launch/run.py sam", ""),
        ("python launch/run.py sampling=gr", "sampling=greedy"),
        ("python launch/run.py task=generate task.for", "task.format="),
        ("python launch/run.py model=7B draft=tiny-", "draft=tiny-draft draft=tiny-eagle"),
        ("python launch/run.py speculation=${run_id:} sampling=gr", "sampling=greedy"),
        ("python launch/run.py a[ sampling=gr", ""),
        ('python launch/run.py "prompt=a b" sam', ""),
        ("python launch/run.py --no-such-option sam", ""),
        ("python launch/run.py seed.x", ""),
        ("python launch/run.py run_dir=/no/such", ""),
    ],
)
def test_a_shell_asks_for_candidates(line: str, candidates: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMP_LINE", line)
    ended = launch("-sc", "query=bash")
    assert (ended.code, ended.err, ended.out.strip()) == (0, "", candidates)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], INSTALL),
        (["install=tcsh"], INSTALL),
        (["install=[bash]"], INSTALL),
        (["install=bash", "query=bash"], INSTALL),
        (["query=bash"], "-sc query=bash is called by the shell itself, which sets COMP_LINE; "),
    ],
)
def test_a_mistake_is_one_sentence(words: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMP_LINE", raising=False)
    ended = launch("-sc", *words)
    assert ended.code == 2, ended.err
    assert sentence in ended.err
    assert (ended.err.count("\n"), ended.out) == (1, "")
