"""The terminal shows texts as they are, tells origins apart, and stays under the user's control."""

import re
import sys
import threading
from contextlib import AbstractContextManager
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest

from llama_ssp.errors import SspError
from llama_ssp.reports.records import Evaluation
from llama_ssp.reports.tables import Cell, Table
from llama_ssp.terminal.progress import Pace, RunProgress
from llama_ssp.terminal.terminal import Output, Terminal
from tests.helpers.runs import CELL, FAST, PLAIN, summary
from tests.helpers.terminals import OnTerminal

GREEN, MAGENTA = "\x1b[32m", "\x1b[35m"
SUMMARY = summary(PLAIN, FAST)


def console(*, terminal: bool, width: int = 80) -> Output:
    return Output(
        file=StringIO(), force_terminal=terminal, color_system="standard" if terminal else None, width=width,
        highlight=False, legacy_windows=False, _environ={},
    )  # fmt: skip


def written(console: Output) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def decoding(terminal: Terminal, *, shows_texts: bool = False) -> AbstractContextManager[RunProgress]:
    return terminal.decoding({"plain": Pace(num_total=2)}, max_new_tokens=9, unit="prompts", shows_texts=shows_texts)


@pytest.fixture
def plain() -> tuple[Terminal, Output, Output]:
    out, err = console(terminal=False), console(terminal=False)
    return Terminal(out=out, err=err), out, err


def test_accepted_and_own_tokens_have_two_colours_on_a_terminal() -> None:
    out = console(terminal=True)
    terminal = Terminal(out=out, err=console(terminal=True))
    terminal.stream([("ab", True), ("cd", False)])
    terminal.end_of_text()
    assert written(out) == f"{GREEN}ab\x1b[0m{MAGENTA}cd\x1b[0m\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_the_table_of_a_sweep_is_folded_on_a_terminal_alone(terminal: bool) -> None:
    out, names = console(terminal=terminal), [f"a long name {number}" for number in range(8)]
    Terminal(out=out, err=console(terminal=terminal)).sweep(Table(names, [[Cell("x", "1 to 2")] * 8]))
    assert ("  ".join(names) in written(out)) is not terminal


@pytest.mark.parametrize("terminal", [True, False])
def test_a_text_is_not_read_as_markup_and_cannot_drive_the_terminal(terminal: bool) -> None:
    out = console(terminal=terminal)
    shown = Terminal(out=out, err=console(terminal=terminal))
    shown.prompt("[bold]p[/bold] :smile: ")
    shown.stream([("\x1b", True), ("[2J\r\x07\x9b1m\u202e\ud800", False)])
    shown.end_of_text()
    plain_text = re.sub(r"\x1b\[\d+m", "", written(out))
    assert plain_text == "[bold]p[/bold] :smile: \\x1b[2J\\r\\x07\\x9b1m\\u202e\\ud800\n"


def test_text_for_a_pipe_keeps_tabs_long_lines_and_trailing_blanks(plain: tuple[Terminal, Output, Output]) -> None:
    terminal, out, _ = plain
    text = "\tif x:  \n\n" + "long " * 60
    terminal.stream([(text[:40], True), (text[40:], False)])
    terminal.end_of_text()
    assert written(out) == text + "\n"


def test_a_text_that_ends_its_line_is_not_followed_by_an_empty_one(plain: tuple[Terminal, Output, Output]) -> None:
    terminal, out, _ = plain
    for text in ("a\n", "b", ""):
        terminal.stream([(text, False)])
        terminal.end_of_text()
    assert written(out) == "a\nb\n"


def test_the_legend_comes_once_and_only_with_colours(plain: tuple[Terminal, Output, Output]) -> None:
    coloured = console(terminal=True)
    for terminal in (Terminal(out=coloured, err=coloured), plain[0]):
        terminal.heading("plain", prompt=0, num_prompts=2)
        terminal.heading("speculative", prompt=0, num_prompts=None)
    assert written(coloured).count("accepted drafted tokens") == 1
    assert "accepted drafted" not in written(plain[1])
    assert "prompt 1 of 2, plain" in written(plain[1])
    assert "prompt 1, speculative" in written(plain[1])


def test_a_line_for_programs_is_not_touched(plain: tuple[Terminal, Output, Output]) -> None:
    terminal, out, _ = plain
    record = '{"text": "[red]\\u001b' + "x" * 200 + '"}'
    terminal.line(record)
    assert written(out) == record + "\n"


def test_tables_go_to_standard_output_and_sentences_to_standard_error(plain: tuple[Terminal, Output, Output]) -> None:
    terminal, out, err = plain
    terminal.stream([("half a li", False)])
    judged = replace(SUMMARY, cells=[CELL], evaluation=Evaluation(suite="s", passed=True, reason="[red]", measures=[]))
    terminal.results(judged, run_dir=Path("runs/[red]"))
    terminal.say("note [red] \x1b[2J")
    tables = ["half a li\n", "assis-", "big with small", "suite=s passed: [red]"]
    places = [written(out).index(table) for table in tables]
    assert places == sorted(places)
    assert written(err) == "1 cell measured; records in runs/[red]\nnote [red] \\x1b[2J\n"


def test_sentences_break_between_words_on_a_terminal_and_stay_whole_in_a_file() -> None:
    sentence = "plain decoding took 3.4 times its forecast: " + "unset-the-threads " * 10 + "and again"
    out, screen, file = console(terminal=True), console(terminal=True, width=50), console(terminal=False, width=50)
    for err in (screen, file):
        Terminal(out=out, err=err).say(sentence)
    shown = written(screen).splitlines()
    assert max(map(len, shown)) <= 50
    assert " ".join(line.strip() for line in shown) == sentence
    assert written(file) == sentence + "\n"


def test_an_error_breaks_between_words_on_a_terminal() -> None:
    sentence = "no setting is called num_draft_tokens: did you mean speculation.num_draft_tokens or " + "x" * 50
    program = f"from llama_ssp.terminal.unread import complain; complain({sentence!r})"
    with OnTerminal([sys.executable, "-c", program], num_columns=40) as terminal:
        terminal.wait_for(lambda: terminal.process.poll() is not None and "x" * 50 in terminal.shown, at_most_s=60)
        shown = terminal.shown.splitlines()
    assert shown[:2] == ["no setting is called num_draft_tokens:", "did you mean"]
    assert " ".join(shown) == sentence


def test_ranks_above_0_are_silent(capfd: pytest.CaptureFixture[str], plain: tuple[Terminal, Output, Output]) -> None:
    def speak(terminal: Terminal) -> None:
        terminal.heading("plain", prompt=0, num_prompts=None)
        terminal.stream([("text", False)])
        terminal.end_of_text()
        terminal.line("line")
        terminal.results(SUMMARY, run_dir=Path())
        terminal.say("sentence")
        with terminal.loading() as progress:
            progress("target", 1, 2)

    speak(Terminal.of_rank(3))
    assert capfd.readouterr() == ("", "")
    speak(plain[0])
    assert written(plain[1])
    assert written(plain[2])


def test_the_picture_shows_what_was_shown_with_long_lines_wrapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    terminal = Terminal(out=console(terminal=True, width=200), err=console(terminal=True))
    terminal.heading("speculative", prompt=0, num_prompts=None)
    terminal.stream([("first " * 14, True), ("last", False)])
    terminal.end_of_text()
    terminal.results(SUMMARY, run_dir=tmp_path)
    terminal.save_svg(tmp_path / "picture.svg", title="launch/run.py")
    drawn = (tmp_path / "picture.svg").read_text().replace("&#160;", " ")
    assert re.search(r"<text [^>]*>first first[^<]*</text>", drawn)
    assert re.search(r"<text [^>]*x=\"0\"[^>]*>first </text><text [^>]*>last</text>", drawn)
    assert "launch/run.py" in drawn
    assert "2.50x" in drawn
    assert "@font-face" not in drawn, "which a viewer would fetch from elsewhere"


def test_a_picture_that_cannot_be_written_is_a_sentence(tmp_path: Path, plain: tuple[Terminal, Output, Output]) -> None:
    with pytest.raises(SspError, match=r"cannot write the picture .*no/p\.svg: No such file"):
        plain[0].save_svg(tmp_path / "no" / "p.svg", title="t")


def test_bars_leave_nothing_behind_but_showed_how_far_it_was() -> None:
    out, err = console(terminal=True), console(terminal=True)
    with Terminal(out=out, err=err).loading() as progress:
        progress("target", 3 * 10**9, 75 * 10**9)
        progress("target", 75 * 10**9, 75 * 10**9)
    assert "75.0/75.0 GB" in written(err)
    assert written(out) == ""


def test_no_thread_draws_bars_while_models_compute() -> None:
    num_threads = threading.active_count()
    terminal = Terminal(out=console(terminal=True), err=console(terminal=True))
    with decoding(terminal) as progress:
        progress.end("plain", num_tokens=1, ms=1)
        assert threading.active_count() == num_threads


def test_a_bar_does_not_swallow_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    with decoding(Terminal(out=console(terminal=False), err=console(terminal=True))) as progress:
        progress.end("plain", num_tokens=1, ms=1)
        sys.stdout.write("result\n")
    assert capsys.readouterr().out == "result\n"


def test_a_line_and_a_bar_share_a_screen() -> None:
    screen = console(terminal=True)
    terminal = Terminal(out=screen, err=screen)
    with decoding(terminal) as progress:
        progress.end("plain", num_tokens=1, ms=1)
        terminal.line("record")
        progress.end("plain", num_tokens=1, ms=1)
    before, _, after = written(screen).partition("record\n")
    assert before.endswith("\x1b[2K")
    assert "prompts" in before
    assert "1/2" in before
    assert "2/2" in after


@pytest.mark.parametrize(
    ("out", "err", "shows_texts", "bar", "lines"),
    [
        (True, True, False, True, False),
        (True, True, True, False, False),
        (False, True, True, True, False),
        (True, False, True, False, True),
        (False, False, False, False, True),
    ],
)
def test_bars_are_for_terminals_without_texts_and_lines_for_log_files(
    out: bool, err: bool, shows_texts: bool, bar: bool, lines: bool
) -> None:
    said = console(terminal=err)
    with decoding(Terminal(out=console(terminal=out), err=said), shows_texts=shows_texts) as progress:
        progress.advance("plain", 3)
        progress.end("plain", num_tokens=3, ms=6)
    assert ("━" in written(said)) == bar
    assert ("plain: 1 of 2 prompts at 2.00 ms/token; 3 tokens" in written(said)) == lines
