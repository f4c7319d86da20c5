"""Progress of a long step: bars on a terminal, elsewhere a plain line at most once a minute, both to standard error.

rich's columns show how much of a step is done, its speed and the remaining time. Decoding estimates its own remaining
time (`Pace`): completions end seldom, the rows of a batch end together, and a comparison has two speeds, while rich
averages over the last seconds.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TextColumn
from rich.progress import TimeRemainingColumn as RemainingColumn

from llama_ssp.text.messages import lasting

_LINE_EVERY_S = 60.0
_FIRST_LINE_OF_LOADING_S = 10.0
_DRAW_EVERY_S = 0.2
_SPEED_OVER_S = 300.0
"""Long, because two updates of a large file on a slow disk are minutes apart."""


class ProgressView:
    """A live bar per label, which disappears at the end; without a terminal, lines with the same columns.

    Only updates draw, a few times a second; a drawing thread would disturb what is being timed. The first line comes
    after ten seconds, the others a minute apart. `amount` are columns for how much is done, and how fast.
    """

    def __init__(self, console: Console, *amount: ProgressColumn, clock: Callable[[], float] = time.monotonic) -> None:
        label = TextColumn("{task.description}", markup=False)
        self._columns = [label, *amount, RemainingColumn(compact=True), TextColumn("left")]
        # Standard output is not redirected: it may lead to a file, which must not end up on this console.
        self._progress = Progress(
            label,
            BarColumn(bar_width=None),
            *self._columns[1:],
            console=console,
            transient=True,
            expand=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            get_time=clock,
            speed_estimate_period=_SPEED_OVER_S,
        )
        self._is_live = console.is_terminal
        self._clock = clock
        self._next_s = clock() + (0 if self._is_live else _FIRST_LINE_OF_LOADING_S)
        self._tasks: dict[str, TaskID] = {}

    def update(self, label: str, done: int, total: int) -> None:
        """Report that `done` of `total` units of `label` are done."""
        if label not in self._tasks:
            self._tasks[label] = self._progress.add_task(label, total=total, completed=done)
        task = self._tasks[label]
        self._progress.update(task, completed=done, total=total)
        if self._is_live:
            self._progress.start()
        now_s = self._clock()
        if now_s < self._next_s and not (self._is_live and done == total):
            return
        self._next_s = now_s + (_DRAW_EVERY_S if self._is_live else _LINE_EVERY_S)
        if self._is_live:
            self._progress.refresh()
        else:
            shown = self._progress.tasks[task]
            self._progress.console.print(*(column(shown) for column in self._columns), soft_wrap=True)

    def hide(self) -> None:
        """Take the bars off the screen; the next update brings them back."""
        if self._is_live:
            self._progress.stop()


@dataclass(kw_only=True)
class Pace:
    """Progress of one mode of a run: first the completions of all its parts, then measurements of this part alone.

    Attributes:
        num_ended: number of ended completions.
        num_tokens, num_ended_tokens: new tokens, with and without open completions.
        ended_ms: sum over the ended completions of the time from first prefill to last token.
        busy_s: wall time.
    """

    num_total: int
    num_done: int = 0
    num_ended: int = 0
    num_tokens: int = 0
    num_ended_tokens: int = 0
    ended_ms: float = 0.0
    busy_s: float = 0.0

    def left_s(self, *, max_new_tokens: int, mean_s: float) -> float:
        """Estimate the time to come.

        Completions have the mean length of the ended ones, or `max_new_tokens`; the first token takes `mean_s`.
        """
        length = self.num_ended_tokens / self.num_ended if self.num_ended else max_new_tokens
        num_open = self.num_tokens - self.num_ended_tokens
        num_left = max(length * (self.num_total - self.num_done) - num_open, 0.0)
        return num_left * (self.busy_s / self.num_tokens if self.num_tokens else mean_s)


@dataclass(eq=False, repr=False)
class RunProgress:
    """Progress of decoding: a bar, or a line once every mode has ended a completion, and then one every minute.

    The first line comes after a minute at the latest; no line comes when all is done. `write` prints a line, `bars` are
    updated, each if given. `unit` names the completions of a mode, in the plural.
    """

    paces: Mapping[str, Pace]
    _: KW_ONLY
    max_new_tokens: int
    unit: str = "prompts"
    write: Callable[[str], None] | None = None
    bars: ProgressView | None = None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.restart_clock()
        self._next_line_s, self._has_reported = self._last_s + _LINE_EVERY_S, False

    def restart_clock(self) -> None:
        """Leave the time since the last call out of every mode's speed: a warm-up, a capture, a load."""
        self._last_s = self.clock()

    def advance(self, mode: str, num_tokens: int) -> None:
        """Count new tokens of a mode, and the time since the last call as this mode's."""
        now_s, pace = self.clock(), self.paces[mode]
        pace.busy_s += now_s - self._last_s
        pace.num_tokens += num_tokens
        self._last_s = now_s
        if now_s >= self._next_line_s:
            self._report()

    def end(self, mode: str, *, num_tokens: int, ms: float) -> None:
        """Count an ended completion, whose tokens have been counted; `ms` is from its prefill to its last token."""
        pace, paces = self.paces[mode], self.paces.values()
        pace.num_done += 1
        pace.num_ended += 1
        pace.num_ended_tokens += num_tokens
        pace.ended_ms += ms
        if self.bars:
            self.bars.update(self.unit, sum(pace.num_done for pace in paces), sum(pace.num_total for pace in paces))
        if not self._has_reported and all(pace.num_ended or pace.num_done == pace.num_total for pace in paces):
            self._report()

    def _report(self) -> None:
        """Write a line, unless all is done: then the results follow."""
        self._next_line_s, self._has_reported = self._last_s + _LINE_EVERY_S, True
        paces, modes, left = self.paces.values(), [], ""
        if not self.write or all(pace.num_done == pace.num_total for pace in paces):
            return
        for mode, pace in self.paces.items():
            rate = f" at {pace.ended_ms / pace.num_ended_tokens:.2f} ms/token" if pace.num_ended_tokens else ""
            modes.append(f"{mode}: {pace.num_done} of {pace.num_total} {self.unit}{rate}")
        num_tokens = sum(pace.num_tokens for pace in paces)
        if num_tokens:
            mean_s = sum(pace.busy_s for pace in paces) / num_tokens
            left_s = sum(pace.left_s(max_new_tokens=self.max_new_tokens, mean_s=mean_s) for pace in paces)
            left = f", {lasting(left_s)} left"
        self.write(f"{'; '.join(modes)}; {num_tokens} tokens{left}")
