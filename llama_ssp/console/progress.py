"""How far a long step has come: bars on a terminal, a plain line at most once a minute elsewhere.

Both write to standard error. rich's columns say how much of a step is done, how fast it goes, and how long it will
take. The time that decoding takes is estimated here (`Pace`): completions end seldom and rows of a batch together, and
a comparison has two speeds, of which rich's one average over the last seconds knows nothing.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TextColumn
from rich.progress import TimeRemainingColumn as RemainingColumn

_LINE_EVERY_S = 60.0
_FIRST_LINE_OF_LOADING_S = 10.0
_DRAW_EVERY_S = 0.2
_SPEED_OVER_S = 300.0
"""A large file is minutes apart from the next on slow disks."""


class ProgressView:
    """A live bar for each label, which disappears at the end; where there is no terminal, lines with the same columns.

    Updates alone draw, a few times a second, and no thread does: it would run into what is being timed. The first line
    comes after ten seconds and each other one a minute later.

    Args:
        console: of a terminal, or of a file.
        amount: columns that say how much is done, and how fast.
        clock: seconds.
    """

    def __init__(self, console: Console, *amount: ProgressColumn, clock: Callable[[], float] = time.monotonic) -> None:
        label = TextColumn("{task.description}", markup=False)
        self._columns = [label, *amount, RemainingColumn(compact=True), TextColumn("left")]
        # Standard output stays what it is: a file that it leads to must not end up on this console.
        self._progress = Progress(
            label, BarColumn(bar_width=None), *self._columns[1:], console=console, transient=True, expand=True,
            auto_refresh=False, redirect_stdout=False, redirect_stderr=False, get_time=clock,
            speed_estimate_period=_SPEED_OVER_S,
        )  # fmt: skip
        self._is_live = console.is_terminal
        self._clock = clock
        self._next_s = clock() + (0 if self._is_live else _FIRST_LINE_OF_LOADING_S)
        self._tasks: dict[str, TaskID] = {}

    def update(self, label: str, done: int, total: int) -> None:
        """Say that `done` of `total` units of `label` are behind us."""
        if label not in self._tasks:
            self._tasks[label] = self._progress.add_task(label, total=total, completed=done)
        task = self._tasks[label]
        self._progress.update(task, completed=done, total=total)
        now_s = self._clock()
        is_due = now_s >= self._next_s or (self._is_live and done == total)
        if is_due:
            self._next_s = now_s + (_DRAW_EVERY_S if self._is_live else _LINE_EVERY_S)
        if self._is_live:
            self._progress.start()
            if is_due:
                self._progress.refresh()
        elif is_due:
            shown = self._progress.tasks[task]
            self._progress.console.print(*(column(shown) for column in self._columns), soft_wrap=True)

    def hide(self) -> None:
        """Take the bars off the screen; the next update brings them back."""
        if self._is_live:
            self._progress.stop()


@dataclass(kw_only=True)
class Pace:
    """How far one mode of a run has come.

    Attributes:
        num_wanted: completions, those of earlier parts of a resumed run included.
        num_done: of those; the other counts are of this part alone.
        num_ended: completions.
        num_tokens: new ones, those of completions that are still open included.
        num_ended_tokens: those of the others.
        ended_ms: between the first prefill and the last token of each completion that has ended, summed up.
        busy_s: wall time.
    """

    num_wanted: int
    num_done: int = 0
    num_ended: int = 0
    num_tokens: int = 0
    num_ended_tokens: int = 0
    ended_ms: float = 0.0
    busy_s: float = 0.0

    def num_tokens_left(self, max_new_tokens: int) -> float:
        """How many are to come, if the others become as long as those that have ended; none ended: as long as they may.

        Args:
            max_new_tokens: of a completion.
        """
        length = self.num_ended_tokens / self.num_ended if self.num_ended else max_new_tokens
        num_open = self.num_tokens - self.num_ended_tokens
        return max(length * (self.num_wanted - self.num_done) - num_open, 0.0)


class RunProgress:
    """How far decoding has come: a bar, or a line as soon as every mode has ended a completion and then every minute.

    The first line comes after a minute at the latest, and no line when all is done.

    Args:
        paces: what is to be done in each mode.
        max_new_tokens: of a completion.
        unit: what a mode counts, in the plural.
        write: takes a line; None writes none.
        bars: are moved; None where there are none.
        clock: seconds.
    """

    def __init__(
        self,
        paces: Mapping[str, Pace],
        *,
        max_new_tokens: int,
        unit: str = "prompts",
        write: Callable[[str], None] | None = None,
        bars: ProgressView | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._paces = dict(paces)
        self._max_new_tokens = max_new_tokens
        self._unit = unit
        self._write = write
        self._bars = bars
        self._clock = clock
        self._last_s = clock()
        self._next_line_s = self._last_s + _LINE_EVERY_S
        self._has_told = False

    def advance(self, mode: str, num_tokens: int) -> None:
        """Count new tokens of a mode; the time since the last call is this mode's."""
        now_s, pace = self._clock(), self._paces[mode]
        pace.busy_s += now_s - self._last_s
        pace.num_tokens += num_tokens
        self._last_s = now_s
        if now_s >= self._next_line_s:
            self._tell()

    def end(self, mode: str, *, num_tokens: int, ms: float) -> None:
        """Count a completion that has ended, whose tokens have all been counted.

        Args:
            mode: its mode.
            num_tokens: its new tokens.
            ms: between the start of its prefill and its last token.
        """
        pace = self._paces[mode]
        pace.num_done += 1
        pace.num_ended += 1
        pace.num_ended_tokens += num_tokens
        pace.ended_ms += ms
        if self._bars:
            num_done, num_wanted = self._num_done()
            self._bars.update(self._unit, num_done, num_wanted)
        unknown = [each for each in self._paces.values() if each.num_done < each.num_wanted and not each.num_ended]
        if not self._has_told and not unknown:
            self._tell()

    def _num_done(self) -> tuple[int, int]:
        paces = self._paces.values()
        return sum(pace.num_done for pace in paces), sum(pace.num_wanted for pace in paces)

    def _tell(self) -> None:
        """Write a line, unless all is done: then the results say more."""
        self._next_line_s = self._last_s + _LINE_EVERY_S
        self._has_told = True
        num_done, num_wanted = self._num_done()
        if self._write and num_done < num_wanted:
            self._write(self._line())

    def _line(self) -> str:
        modes = []
        for mode, pace in self._paces.items():
            rate = f" at {pace.ended_ms / pace.num_ended_tokens:.2f} ms/token" if pace.num_ended_tokens else ""
            modes.append(f"{mode}: {pace.num_done} of {pace.num_wanted} {self._unit}{rate}")
        num_tokens = sum(pace.num_tokens for pace in self._paces.values())
        return f"{'; '.join(modes)}; {num_tokens} tokens{self._left()}"

    def _left(self) -> str:
        """The time that is left, each mode at its own speed where it has one."""
        num_tokens = sum(pace.num_tokens for pace in self._paces.values())
        if not num_tokens:
            return ""
        mean_s = sum(pace.busy_s for pace in self._paces.values()) / num_tokens
        seconds = 0.0
        for pace in self._paces.values():
            token_s = pace.busy_s / pace.num_tokens if pace.num_tokens else mean_s
            seconds += token_s * pace.num_tokens_left(self._max_new_tokens)
        return f", {_duration(seconds)} left"


def _duration(seconds: float) -> str:
    if seconds < 90:  # noqa: PLR2004 - from here on minutes say it better
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"  # noqa: PLR2004
