"""The terminal shows texts as they are, tables and progress in their width, and stays under the user's control."""

import re
import sys
import threading
from contextlib import AbstractContextManager
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console, RenderableType
from rich.progress import DownloadColumn, TransferSpeedColumn

from llama_ssp.errors import SspError
from llama_ssp.reports.records import Evaluation, Forecast, PlainSummary, SpeculativeSummary
from llama_ssp.reports.tables import Cell, Table
from llama_ssp.terminal.progress import Pace, ProgressView, RunProgress
from llama_ssp.terminal.tables import closing_line, summary_table
from llama_ssp.terminal.terminal import Output, Terminal
from llama_ssp.terminal.unread import complain
from tests.helpers import runs
from tests.helpers.runs import CELL, FAST, PLAIN, summary
from tests.helpers.terminals import OnTerminal

GREEN, MAGENTA = "\x1b[32m", "\x1b[35m"
SUMMARY = summary(PLAIN, FAST)


def console(*, terminal: bool, width: int = 80) -> Output:
    return Output(
        file=StringIO(),
        force_terminal=terminal,
        color_system="standard" if terminal else None,
        width=width,
        highlight=False,
        legacy_windows=False,
        _environ={},
    )


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


def test_text_for_a_pipe_keeps_tabs_long_lines_and_trailing_blanks_and_ends_its_line_once(
    plain: tuple[Terminal, Output, Output],
) -> None:
    terminal, out, _ = plain
    texts = ("\tif x:  \n\n" + "long " * 60, "a\n", "b", "")
    for text in texts:
        terminal.stream([(text[:40], True), (text[40:], False)])
        terminal.end_of_text()
    assert written(out) == f"{texts[0]}\na\nb\n"


def test_the_legend_comes_once_and_only_with_colours(plain: tuple[Terminal, Output, Output]) -> None:
    coloured = console(terminal=True)
    for terminal in (Terminal(out=coloured, err=coloured), plain[0]):
        terminal.heading("plain", prompt=0, num_prompts=2)
        terminal.heading("speculative", prompt=0, num_prompts=None)
    assert written(coloured).count("accepted drafted tokens") == 1
    assert "accepted drafted" not in written(plain[1])
    assert "prompt 1 of 2, plain" in written(plain[1])
    assert "prompt 1, speculative" in written(plain[1])


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


def test_what_a_table_has_said_is_said_again_where_nobody_sees_the_table(tmp_path: Path) -> None:
    def said(out: str, err: str) -> str:
        with (tmp_path / out).open("w") as one, (tmp_path / err).open("a") as other:
            terminal = Terminal(out=Output(file=one), err=Output(file=other))
            terminal.say_again("other programs were busy")
        return (tmp_path / err).read_text()

    assert said("both", "both") == ""
    assert said("table", "sentences") == "other programs were busy\n"


def test_an_error_breaks_between_words_on_a_terminal() -> None:
    sentence = "no setting is called num_draft_tokens: did you mean speculation.num_draft_tokens or " + "x" * 50
    program = f"from llama_ssp.terminal.unread import complain; complain({sentence!r})"
    with OnTerminal([sys.executable, "-c", program], num_columns=40) as terminal:
        terminal.wait_for(lambda: terminal.process.poll() is not None and "x" * 50 in terminal.shown, at_most_s=60)
        shown = terminal.shown.splitlines()
    assert shown[:2] == ["no setting is called num_draft_tokens:", "did you mean"]
    assert " ".join(shown) == sentence


def test_the_heading_of_a_point_cuts_nothing_off(plain: tuple[Terminal, Output, Output]) -> None:
    settings = ", ".join(f"speculation.num_draft_tokens={number}" for number in range(2, 12))
    plain[0].point(f"point 1 of 6: {settings}", is_first=True)
    assert settings in " ".join(written(plain[1]).split())


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


BOTH = replace(
    runs.summary(PLAIN, FAST),
    model="llama2_70B",
    draft="tinyllama_1B",
    world_size=8,
    num_new_tokens=384,
    memory=[],
    plain=PlainSummary(ms_per_token=240.2, tokens_per_s=4.163, num_target_forwards=192),
    speedup=2.127,
    speculative=SpeculativeSummary(
        ms_per_token=112.931,
        tokens_per_s=8.86,
        num_rounds=62,
        num_target_forwards=65,
        tokens_per_round=3.049,
        acceptance_rate=0.714,
        accepted_histogram=[5, 6, 7, 8, 36],
        draft_s=0.18,
        verify_s=0.36,
        other_s=0.06,
    ),
    forecast=Forecast(plain_ms_per_token=251, speculative_ms_per_token=110.5, speedup=2.27),
)
ALONE = replace(BOTH, speculative=None, speedup=None, forecast=Forecast())


def shown(table: RenderableType) -> str:
    console = Console(width=80, file=StringIO(), record=True)
    console.print(table)
    return console.export_text()


def test_the_table_is_aligned_within_80_columns() -> None:
    assert [line.rstrip() for line in shown(summary_table(BOTH)).splitlines()] == [
        "",
        "llama2_70B with tinyllama_1B, K = 4: 1 prompt, 384 tokens, 8 ranks",
        "",
        "                                           tokens",
        "             ms/token  forecast  tokens/s  /round  accepted  speed-up  forecast",
        "───────────────────────────────────────────────────────────────────────────────",
        "plain          240.20    251.00       4.2       -         -         -         -",
        "speculative    112.93    110.50       8.9    3.05      71 %     2.13x     2.27x",
        "ms/token of a completion, prompt included; tokens/s over all rows and replicas",
        "",
        "a round:  draft 30 %  verify 60 %  other 10 %  ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━",
    ]


def test_a_tree_is_named_by_its_shape_and_not_by_a_number_of_tokens() -> None:
    text = shown(summary_table(replace(BOTH, tree="3x2x1")))
    assert "llama2_70B with tinyllama_1B, tree 3x2x1: 1 prompt" in text
    assert "K =" not in text


def test_a_mode_or_a_forecast_that_does_not_exist_has_no_line_or_a_dash() -> None:
    text = shown(summary_table(ALONE))
    assert re.search(r"plain +240\.20 +- +4\.2 ", text)
    assert "speculative" not in text
    assert "a round" not in text


def test_the_time_to_the_first_token_names_its_mode() -> None:
    plain, fast = replace(PLAIN, first_token_ms=3.7), replace(FAST, first_token_ms=4.6)
    both, alone = (shown(summary_table(runs.summary(*lines))) for lines in ((plain, fast), (PLAIN, fast)))
    assert "first token: plain after 3.7 ms, speculative after 4.6 ms\n" in both
    assert "first token: speculative after 4.6 ms\n" in alone


def test_the_closing_line_names_no_mode_where_there_was_one() -> None:
    rates = "112.93 ms/token, 8.9 tokens/s, 3.05 tokens/round"
    assert closing_line(BOTH).plain == f"384 tokens for 1 prompt: speculative {rates}"
    assert closing_line(ALONE).plain == "384 tokens for 1 prompt: 240.20 ms/token, 4.2 tokens/s"


class Written:
    """A progress, the seconds that a test lets pass, and the lines that it wrote with the time of each."""

    def __init__(self, *, max_new_tokens: int = 10, **paces: Pace) -> None:
        self.now_s = 0.0
        self.lines: list[tuple[float, str]] = []
        self.progress = RunProgress(
            paces,
            max_new_tokens=max_new_tokens,
            clock=lambda: self.now_s,
            write=lambda line: self.lines.append((self.now_s, line)),
        )

    def rounds(self, mode: str, number: int, *, seconds: float, num_tokens: int = 1) -> None:
        for _ in range(number):
            self.now_s += seconds
            self.progress.advance(mode, num_tokens)


def test_the_first_line_comes_with_the_first_completion_and_then_one_a_minute() -> None:
    written = Written(plain=Pace(num_total=100))
    for _ in range(15):
        written.rounds("plain", 10, seconds=1)
        written.progress.end("plain", num_tokens=10, ms=8_000)
    assert written.lines == [
        (10, "plain: 1 of 100 prompts at 800.00 ms/token; 10 tokens, 16 min left"),
        (70, "plain: 6 of 100 prompts at 800.00 ms/token; 70 tokens, 16 min left"),
        (130, "plain: 12 of 100 prompts at 800.00 ms/token; 130 tokens, 14 min left"),
    ]


def test_a_long_completion_has_a_line_after_a_minute() -> None:
    written = Written(plain=Pace(num_total=2), max_new_tokens=100)
    written.rounds("plain", 7, seconds=10)
    assert written.lines == [(60, "plain: 0 of 2 prompts; 6 tokens, 32 min left")]


def test_a_comparison_waits_for_both_modes_and_each_has_its_own_pace() -> None:
    written = Written(plain=Pace(num_total=11, num_done=5), speculative=Pace(num_total=11))
    written.rounds("plain", 10, seconds=2)
    written.progress.end("plain", num_tokens=10, ms=20_000)
    assert written.lines == []
    written.rounds("speculative", 5, seconds=2, num_tokens=2)
    written.progress.end("speculative", num_tokens=10, ms=10_000)
    both = "plain: 6 of 11 prompts at 2000.00 ms/token; speculative: 1 of 11 prompts at 1000.00 ms/token"
    assert written.lines == [(30, f"{both}; 20 tokens, 3 min left")]


def test_an_earlier_part_of_the_run_counts_as_done_and_not_as_speed() -> None:
    written = Written(plain=Pace(num_total=100, num_done=90), speculative=Pace(num_total=100, num_done=100))
    written.rounds("plain", 5, seconds=1)
    written.progress.end("plain", num_tokens=5, ms=5_000)
    done = "plain: 91 of 100 prompts at 1000.00 ms/token; speculative: 100 of 100 prompts"
    assert written.lines == [(5, f"{done}; 5 tokens, 45 s left")]


def test_open_rows_of_a_batch_count_towards_what_is_done() -> None:
    written = Written(plain=Pace(num_total=4))
    written.rounds("plain", 9, seconds=1, num_tokens=4)
    written.rounds("plain", 1, seconds=1, num_tokens=2)
    written.progress.end("plain", num_tokens=10, ms=10_000)
    assert written.lines[0][1].endswith("38 tokens, 1 s left"), "30 tokens are to come, 28 of them are there"


def test_when_all_is_done_the_table_says_more() -> None:
    written = Written(plain=Pace(num_total=1))
    written.rounds("plain", 10, seconds=1)
    written.progress.end("plain", num_tokens=10, ms=10_000)
    assert written.lines == []


def test_a_long_load_has_a_line_in_bytes_after_ten_seconds_and_every_minute() -> None:
    err, now_s = Console(file=StringIO(), width=80, record=True), 0
    view = ProgressView(err, DownloadColumn(), TransferSpeedColumn(), clock=lambda: now_s)
    for done_bytes in range(0, 11 * 10**10, 10**10):
        view.update("target", done_bytes, 13 * 10**10)
        now_s += 8
    view.hide()
    assert err.export_text().splitlines() == [
        "target 20.0/130.0 GB 1.2 GB/s 01:28 left",
        "target 100.0/130.0 GB 1.2 GB/s 00:24 left",
    ]


def test_a_sentence_for_a_closed_standard_error_is_lost_without_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = StringIO()
    closed.close()
    for stream in (None, closed):
        monkeypatch.setattr(sys, "stderr", stream)
        complain("Nobody hears this.")
