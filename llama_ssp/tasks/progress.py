"""How far a long step has come: bars on a terminal, a plain line at most once a minute elsewhere.

Both write to standard error. What is being waited for, and how much of it there is, the caller says with each update;
in what unit, once.
"""

import time
from collections.abc import Callable
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.progress import TimeRemainingColumn as RemainingColumn
from rich.text import Text

_LINE_EVERY_S = 60.0
_DRAW_EVERY_S = 0.2


class Unit(Protocol):
    """Says how far a step has come, and how fast where that is known."""

    def __call__(self, done: float, total: float, per_s: float | None) -> str:
        """Write `done` of `total`, which grew by `per_s` a second."""
        ...


def prompts(done: float, total: float, per_s: float | None) -> str:  # noqa: ARG001 - the protocol's
    """Prompts are few: their rate is the business of the tables."""
    return f"{done:.0f} of {total:.0f} prompts"


def gigabytes(done: float, total: float, per_s: float | None) -> str:
    """Bytes, in GB and GB/s."""
    rate = "" if per_s is None else f", {per_s / 1e9:.2f} GB/s"
    return f"{done / 1e9:.2f} of {total / 1e9:.2f} GB{rate}"


class ProgressView(Protocol):
    """Shows progress until it is hidden; the next update brings it back."""

    def update(self, label: str, done: int, total: int) -> None:
        """Say that `done` of `total` units of `label` are behind us."""
        ...

    def hide(self) -> None:
        """Take it off the screen."""
        ...


class ProgressBars:
    """A live bar for each label, which disappears at the end.

    Bars are drawn by updates alone, a few times a second, and by no thread: it would run into what is being timed.
    """

    def __init__(self, console: Console, unit: Unit) -> None:
        columns: list[ProgressColumn] = [
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            _AmountColumn(unit),
            RemainingColumn(compact=True),
        ]
        # Standard output stays what it is: a file that it leads to must not end up on this console.
        self._progress = Progress(
            *columns, console=console, transient=True, expand=True, auto_refresh=False,
            redirect_stdout=False, redirect_stderr=False,
        )  # fmt: skip
        self._tasks: dict[str, TaskID] = {}
        self._drawn_s = 0.0

    def update(self, label: str, done: int, total: int) -> None:
        """Move the label's bar, which appears with its first update."""
        if label not in self._tasks:
            self._tasks[label] = self._progress.add_task(label, total=total)
        now_s = time.monotonic()
        is_due = done == total or now_s - self._drawn_s > _DRAW_EVERY_S
        self._drawn_s = now_s if is_due else self._drawn_s
        self._progress.update(self._tasks[label], completed=done, total=total, refresh=is_due)
        self._progress.start()

    def hide(self) -> None:
        """Take the bars off the screen."""
        self._progress.stop()


class ProgressLines:
    """A plain line at most once a minute, with the time that is left; nothing in the first minute."""

    def __init__(self, console: Console, unit: Unit, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._unit = unit
        self._clock = clock
        self._last_line_s = clock()
        self._begins: dict[str, tuple[float, int]] = {}

    def update(self, label: str, done: int, total: int) -> None:
        """Write a line if the last one is a minute old."""
        now_s = self._clock()
        begin_s, first = self._begins.setdefault(label, (now_s, done))
        if now_s - self._last_line_s < _LINE_EVERY_S:
            return
        self._last_line_s = now_s
        per_s = (done - first) / (now_s - begin_s) if done > first else None
        left = f", {_duration((total - done) / per_s)} left" if per_s else ""
        self._console.print(Text(f"{label}: {self._unit(done, total, per_s)}{left}"), soft_wrap=True)

    def hide(self) -> None:
        """Nothing stays on the screen."""


class _AmountColumn(ProgressColumn):
    def __init__(self, unit: Unit) -> None:
        super().__init__()
        self._unit = unit

    def render(self, task: Task) -> Text:
        return Text(self._unit(task.completed, task.total or 0, task.speed))


def _duration(seconds: float) -> str:
    if seconds < 90:  # noqa: PLR2004 - from here on minutes say it better
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"  # noqa: PLR2004
