"""Prompts typed at a terminal: several lines make one prompt, and a later run has the history."""

import sys
from io import StringIO
from pathlib import Path

import pytest

from llama_ssp.terminal.typed import history_file, typed_prompts
from tests.helpers.terminals import OnTerminal

PROGRAM = "from llama_ssp.terminal.typed import typed_prompts\nfor text in typed_prompts(): print(repr(text))"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own for the history."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "llama-ssp" / "history"


def test_a_line_that_ends_with_a_backslash_goes_on_in_the_next(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", StringIO("def f(x):\\\n    return x\n\nsecond\nopen\\\n"))
    assert list(typed_prompts()) == ["def f(x):\n    return x", "second", "open"]
    shown = capsys.readouterr()
    assert shown.err == "> . > > > . "
    assert not shown.out, "what is no terminal gets no prompts"


def test_the_history_lies_where_the_xdg_specification_says(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert history_file() == state
    monkeypatch.setenv("HOME", "/somebody")
    monkeypatch.delenv("XDG_STATE_HOME")
    assert history_file() == Path("/somebody/.local/state/llama-ssp/history")


def type_into(keys: str, *, wanted: str) -> None:
    """Start the program on a terminal of its own, type, wait for what it must print, and end it.

    Ctrl-D ends it only while line editing waits for keys; the prompt sign shows when it does.
    """
    with OnTerminal([sys.executable, "-c", PROGRAM]) as terminal:
        terminal.wait_for(lambda: "> " in terminal.shown, at_most_s=60)
        terminal.enter(keys)
        terminal.wait_for(lambda: "> " in terminal.shown.partition(wanted)[2], at_most_s=60)
        terminal.enter("\x04")
        terminal.wait_for(lambda: terminal.process.poll() is not None, at_most_s=60)


@pytest.mark.seconds
def test_text_that_is_pasted_is_one_prompt_and_a_later_run_has_it_in_its_history(state: Path) -> None:
    pytest.importorskip("readline")
    type_into("\x1b[200~import os\nimport re\x1b[201~\r", wanted="'import os\\nimport re'")
    assert state.read_text() == "import os\nimport re\n"
    type_into("\x1b[A\r", wanted="'import re'")


@pytest.mark.heavy
@pytest.mark.seconds
def test_without_a_folder_for_the_history_prompts_are_read_all_the_same(state: Path) -> None:
    state.parent.parent.mkdir()
    state.parent.touch()
    type_into("import os\r", wanted="'import os'")
