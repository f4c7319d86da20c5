"""The figure of a report: the time per token of every run, or of every cell of a benchmark, by mode."""

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from llama_ssp.reports.measures import Estimate, RunMeasures
from llama_ssp.reports.plots import COLOURS, GREY, INK, SHAPES, panels
from llama_ssp.reports.records import PLAIN, SPECULATIVE
from llama_ssp.reports.runs import Run
from llama_ssp.words import visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_ROWS = 40
_LOOKS = {
    PLAIN: (GREY, SHAPES[0]), SPECULATIVE: (COLOURS[0], SHAPES[1]), "generate": (COLOURS[1], SHAPES[2]),
    "assisted": (COLOURS[2], SHAPES[3]),
}  # fmt: skip
_APART = 0.16
"""Vertical distance of two modes of a row, of which the next one is 1 below."""
_ROW_INCHES, _FRAME_INCHES = 0.5, 1.0
_LONGEST_NAME, _MARGIN = 40, 1.06


class Row(NamedTuple):
    """One run or cell: measured ms/token and forecasts, by mode."""

    name: str
    measured: dict[str, Estimate]
    forecast: dict[str, float | None]


def rows_of(run: Run, measured: RunMeasures, name: str) -> list[Row]:
    """The rows of a run: one, or one for each cell of a benchmark."""
    if run.summary.cells:
        return [
            Row(
                cell.name, {mode: Estimate(ms) for mode, ms in cell.ms_per_token.items()},
                {**cell.forecast_ms_per_token},
            )
            for cell in run.summary.cells
        ]  # fmt: skip
    expected = run.summary.forecast
    forecasts = {PLAIN: expected.plain_ms_per_token, SPECULATIVE: expected.speculative_ms_per_token}
    return [Row(name, {mode: found.ms_per_token for mode, found in measured.modes.items()}, forecasts)]


def time_per_token(rows: Sequence[Row]) -> "Figure | None":
    """Draw the median of each mode with its interval, and a bar at its forecast; None if nothing was measured."""
    rows, num_rows = rows[:MOST_ROWS], len(rows)
    if not any(row.measured for row in rows):
        return None
    title = "Time per token" + (f", the first {MOST_ROWS} of {num_rows}" if num_rows > MOST_ROWS else "")
    figure, (axes,) = panels(title)
    figure.set_figheight(_FRAME_INCHES + _ROW_INCHES * len(rows))
    modes = [mode for mode in _LOOKS if any(mode in row.measured for row in rows)]
    for number, mode in enumerate(modes):
        colour, shape = _LOOKS[mode]
        offset = _APART * (number - (len(modes) - 1) / 2)
        for place, row in enumerate(rows):
            if found := row.measured.get(mode):
                axes.plot(found.value, place + offset, shape, color=colour, label=mode)
                if found.low is not None and found.high is not None:
                    axes.hlines(place + offset, found.low, found.high, color=colour)
                if (expected := row.forecast.get(mode)) is not None:
                    axes.plot(expected, place + offset, "|", color=INK, markersize=10, label="forecast")
    figures = [figure for row in rows for found in row.measured.values() for figure in found if figure is not None]
    figures += [ms for row in rows for mode, ms in row.forecast.items() if ms is not None and mode in row.measured]
    names = [visible(textwrap.shorten(row.name, _LONGEST_NAME, placeholder="…")) for row in rows]
    axes.set_yticks(range(len(rows)), names if len(rows) > 1 else [""])
    axes.set(xlabel="ms/token, median over prompts", xlim=(0, _MARGIN * max(figures)), ylim=(len(rows) - 0.5, -0.5))
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    return figure
