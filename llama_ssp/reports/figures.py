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

MOST_BARS = 40
_LOOKS = {
    PLAIN: (GREY, SHAPES[0]), SPECULATIVE: (COLOURS[0], SHAPES[1]), "generate": (COLOURS[1], SHAPES[2]),
    "assisted": (COLOURS[2], SHAPES[3]),
}  # fmt: skip
_APART = 0.16
"""Vertical distance of two modes of a bar, of which the next one is 1 below."""
_BAR_INCHES, _FRAME_INCHES = 0.5, 1.0
_LONGEST_NAME, _MARGIN = 40, 1.06


class Bar(NamedTuple):
    """One run or cell: measured ms/token and forecasts, by mode."""

    name: str
    measured: dict[str, Estimate]
    forecast: dict[str, float | None]


def bars_of(run: Run, measured: RunMeasures, name: str) -> list[Bar]:
    """The bars of a run: one, or one for each cell of a benchmark."""
    if run.summary.cells:
        return [
            Bar(
                cell.name, {mode: Estimate(ms) for mode, ms in cell.ms_per_token.items()},
                {**cell.forecast_ms_per_token},
            )
            for cell in run.summary.cells
        ]  # fmt: skip
    expected = run.summary.forecast
    forecasts = {PLAIN: expected.plain_ms_per_token, SPECULATIVE: expected.speculative_ms_per_token}
    return [Bar(name, {mode: found.ms_per_token for mode, found in measured.modes.items()}, forecasts)]


def time_per_token(bars: Sequence[Bar]) -> "Figure | None":
    """Draw the median of each mode with its interval, and a bar at its forecast; None if nothing was measured."""
    bars, num_bars = bars[:MOST_BARS], len(bars)
    if not any(bar.measured for bar in bars):
        return None
    title = "Time per token" + (f", the first {MOST_BARS} of {num_bars}" if num_bars > MOST_BARS else "")
    figure, (axes,) = panels(title)
    figure.set_figheight(_FRAME_INCHES + _BAR_INCHES * len(bars))
    modes = [mode for mode in _LOOKS if any(mode in bar.measured for bar in bars)]
    for number, mode in enumerate(modes):
        colour, shape = _LOOKS[mode]
        offset = _APART * (number - (len(modes) - 1) / 2)
        for place, bar in enumerate(bars):
            if found := bar.measured.get(mode):
                axes.plot(found.value, place + offset, shape, color=colour, label=mode)
                if found.low is not None and found.high is not None:
                    axes.hlines(place + offset, found.low, found.high, color=colour)
                if (expected := bar.forecast.get(mode)) is not None:
                    axes.plot(expected, place + offset, "|", color=INK, markersize=10, label="forecast")
    figures = [figure for bar in bars for found in bar.measured.values() for figure in found if figure is not None]
    figures += [ms for bar in bars for mode, ms in bar.forecast.items() if ms is not None and mode in bar.measured]
    names = [visible(textwrap.shorten(bar.name, _LONGEST_NAME, placeholder="…")) for bar in bars]
    axes.set_yticks(range(len(bars)), names if len(bars) > 1 else [""])
    axes.set(xlabel="ms/token, median over prompts", xlim=(0, _MARGIN * max(figures)), ylim=(len(bars) - 0.5, -0.5))
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    return figure
