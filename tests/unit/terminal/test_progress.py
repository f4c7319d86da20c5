"""Progress of a run in log files: lines that are seldom enough, with an estimate of the time left."""

from io import StringIO

from rich.console import Console
from rich.progress import DownloadColumn, TransferSpeedColumn

from llama_ssp.terminal.progress import Pace, ProgressView, RunProgress


class Written:
    """A progress, the seconds that a test lets pass, and the lines that it wrote with the time of each."""

    def __init__(self, *, max_new_tokens: int = 10, **paces: Pace) -> None:
        self.now_s = 0.0
        self.lines: list[tuple[float, str]] = []
        self.progress = RunProgress(
            paces, max_new_tokens=max_new_tokens, clock=lambda: self.now_s,
            write=lambda line: self.lines.append((self.now_s, line)),
        )  # fmt: skip

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
