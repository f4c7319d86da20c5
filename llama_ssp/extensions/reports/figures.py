"""The figure of a report, time per token of every run or of each of its results, and the style of all figures.

`plan_figures` draws in the same style. Import this module only to draw: matplotlib takes a second. The same figures
give the same bytes.
"""

import io
import logging
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from llama_ssp.errors import ConfigError
from llama_ssp.reports.measures import Estimate, RunMeasures, measure, over_runs
from llama_ssp.reports.records import DISTURBED, NOT_LOSSLESS, PLAIN, SPECULATIVE, PointOverK
from llama_ssp.reports.runs import SEED, Run, drifts_of, varying_settings
from llama_ssp.reports.tables import speedup_of
from llama_ssp.text.messages import visible

try:
    import matplotlib.style as mpl_style
    from matplotlib.figure import Figure
except ImportError as error:
    raise ConfigError(f"drawing needs matplotlib: pip install matplotlib ({error})") from error

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, SOFT, GRID, GREY = "#1b1f23", "#5f6b76", "#dfe3e6", "#8a939b"
COLOURS = ("#2563a8", "#c2571a", "#2e7d4f", "#7b4ba0", "#a3303c", "#cf5aa0", "#0f8b8d", "#9a7b0a")
SHAPES = ("o", "s", "^", "D", "v")
_PAGE_COLOURS = {INK: "ink", SOFT: "soft", GRID: "line", "#ffffff": "paper"}
"""Variables of the page, which has a dark mode."""
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "llama-ssp",
    "pdf.fonttype": 42,
    "text.parse_math": False,
    "savefig.bbox": "tight",
    "font.size": 11,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "text.color": INK,
    "axes.labelcolor": SOFT,
    "axes.edgecolor": SOFT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.linewidth": 2,
    "legend.frameon": False,
    "legend.handlelength": 3,
}
"""Changes to matplotlib's defaults; the user's own matplotlibrc is ignored."""
_WIDTH, _HEIGHT = 6.1, 3.5
"""Size of one panel in inches, without its legend."""
_PAGE_WIDTH = 11.5
"""Width of a figure that fills a page of a report."""
_SUFFIXES = ".png", ".svg", ".pdf"
_DPI = 150
_LEGEND_SHARE = 0.75
"""Room of legends between two rows of panels, of the height of one."""
_LEGEND_INCHES = 0.5
"""The distance from the axis down to its legend, past the numbers and the label."""
_HALF_WIDTH_NAME, _LONGEST_NAME = 28, 40
"""Longest name in a legend of two columns, and in any."""
_GENERATED_ID = re.compile(r' id="[a-z0-9.]+_\d+"')
logging.getLogger("matplotlib").setLevel(logging.ERROR)  # its notes on fonts and cache folders do not help our users
MOST_BARS = 40
_APART = 0.16
"""Vertical distance of two modes of a bar; the next bar is 1 below."""
_BAR_INCHES, _FRAME_INCHES = 0.5, 1.0
_MARGIN = 1.06


@contextmanager
def styled() -> Iterator[None]:
    """Apply STYLE, without warnings about characters that matplotlib's font lacks.

    Programs that show the figures bring fonts of their own, which have these characters.
    """
    with mpl_style.context(STYLE, after_reset=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")
        yield


def panels(*titles: str, num_rows: int = 1) -> "tuple[Figure, list[Axes]]":
    """Return a new figure, and an empty panel for each title, row by row."""
    num_columns, share = -(-len(titles) // num_rows), _LEGEND_SHARE * (num_rows - 1)
    figure = Figure(figsize=(_WIDTH * num_columns, _HEIGHT * (num_rows + share)))
    figure.subplots_adjust(hspace=_LEGEND_SHARE)
    found = [figure.add_subplot(num_rows, num_columns, number) for number in range(1, len(titles) + 1)]
    for axes, title in zip(found, titles, strict=True):
        axes.set_title(visible(title))
    return figure, found


def look(number: int) -> dict[str, Any]:
    """Return the look of a line; neighbours differ in colour and shape, for paper without colours."""
    return {"color": COLOURS[number % len(COLOURS)], "marker": SHAPES[number % len(SHAPES)]}


def picture(figure: Figure) -> str:
    """Return a figure as an SVG element of a page, without ids and metadata that differ between runs."""
    file = io.StringIO()
    with styled():
        _add_legends(figure)
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    drawn = file.getvalue()
    for colour, variable in _PAGE_COLOURS.items():
        drawn = drawn.replace(colour, f"var(--{variable})")
    return _GENERATED_ID.sub("", drawn[drawn.index("<svg") :]).rstrip()


def save(figure: Figure, file: Path) -> None:
    """Save a figure; raises ConfigError if the file or its suffix is unusable."""
    if file.suffix not in _SUFFIXES:
        raise ConfigError(f"figure={file} cannot be written: its name must end in {' or '.join(_SUFFIXES)}")
    undated = {".pdf": ("CreationDate",), ".svg": ("Date",)}.get(file.suffix, ())
    with styled():
        _add_legends(figure)
        try:
            figure.savefig(file, dpi=_DPI, metadata=dict.fromkeys(undated))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"figure={file} cannot be written: {reason}") from error


def _add_legends(figure: Figure) -> None:
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        entries = {label: handle for handle, label in zip(handles, labels, strict=True)}
        if entries:
            axes.legend(
                entries.values(),
                [visible(name)[:_LONGEST_NAME] for name in entries],
                loc="upper left",
                bbox_to_anchor=(-0.02, -_LEGEND_INCHES * figure.dpi / axes.bbox.height),
                ncols=2 if max(map(len, entries)) <= _HALF_WIDTH_NAME else 1,
            )


_MEASURES: dict[str, Callable[[RunMeasures], Estimate | None]] = {
    "Speculative, ms/token": lambda found: found.ms_per_token(SPECULATIVE),
    "Speed-up": lambda found: found.speedup,
    "Share of drafted tokens accepted": lambda found: found.acceptance,
}


def draw_over_k(runs: Sequence[Run], file: Path) -> None:
    """Draw `over_k` into a file, or the points of results that have some; raises as `save`."""
    found = (getattr(cell, "point", None) for run in runs for cell in run.summary.cells)
    points = [point for point in found if point]
    with styled():
        figure = of_points(points) if points else over_k(runs)
    save(figure, file)


def of_points(points: Sequence[PointOverK]) -> Figure:
    """Draw the values of results over K, with their intervals, in panels with a line for each kind."""
    figure, drawn = panels(*dict.fromkeys(point.panel for point in points))
    names = [*dict.fromkeys(point.line for point in points)]
    for panel, axes in zip(dict.fromkeys(point.panel for point in points), drawn, strict=True):
        own = [point for point in points if point.panel == panel]
        for number, name in enumerate(names):
            if line := [point[2:] for point in own if point.line == name]:
                ks, values, lows, highs = zip(*line, strict=True)
                axes.plot(ks, values, label=name, **look(number))
                axes.vlines(ks, lows, highs, color=look(number)["color"], linewidth=1)
        axes.set(xlabel="K, drafted tokens of a round", xticks=sorted({point.num_draft_tokens for point in own}))
    return figure


def over_k(runs: Sequence[Run]) -> Figure:
    """Draw time, speed-up and acceptance over K, a line for each other setting that varies and each kind of prompts.

    Runs that differ in their seed are one point, with the interval over seeds.
    """
    varying, drifts = varying_settings(runs), drifts_of(runs)
    settings = [one for one in varying if one.key not in {SEED, "speculation.num_draft_tokens"}]
    seeds = next((one.texts for one in varying if one.key == SEED), [""] * len(runs))
    lines: dict[str, dict[int, dict[str, RunMeasures]]] = {}
    for place, (run, seed) in enumerate(zip(runs, seeds, strict=True)):
        own = [f"{setting.name}={setting.texts[place]}" for setting in settings]
        for kind in sorted({line.category or "" for line in run.lines}):
            name = ", ".join(filter(None, [*own, kind])) or run.pair
            found = measure([line for line in run.lines if (line.category or "") == kind])
            found = found._replace(speedup=speedup_of(run, found.speedup, drifts))
            lines.setdefault(name, {}).setdefault(run.num_draft_tokens, {})[seed] = found
    figure, drawn = panels(*_MEASURES)
    for axes, value_of in zip(drawn, _MEASURES.values(), strict=True):
        for number, (name, by_k) in enumerate(lines.items()):
            points = {
                k: value
                for k, by_seed in sorted(by_k.items())
                if (value := over_runs([*map(value_of, by_seed.values())]))
            }
            if points:
                axes.plot([*points], [value.value for value in points.values()], label=name, **look(number))
            for k, value in points.items():
                if value.low is not None and value.high is not None:
                    axes.vlines(k, value.low, value.high, color=look(number)["color"], linewidth=1)
        axes.set(xlabel="K, drafted tokens of a round", xticks=sorted({run.num_draft_tokens for run in runs}))
    for axes in drawn[1:]:
        for line in axes.lines:
            line.set_label("_")  # one legend for all panels
    return figure


class Bar(NamedTuple):
    """One run or cell: measured ms/token and forecasts, by mode."""

    name: str
    measured: dict[str, Estimate]
    forecast: dict[str, float | None]


def bars_of(run: Run, name: str) -> list[Bar]:
    """The bars of a run: one, or one for each result of its task."""
    if run.summary.cells:
        return [
            Bar(
                f"{found.name}{run.summary.marks}",
                {mode: Estimate(ms) for mode, ms in found.measured.items()},
                {**found.forecast},
            )
            for found in (cell.figures for cell in run.summary.cells)
        ]
    expected = run.summary.forecast
    forecasts = {PLAIN: expected.plain_ms_per_token, SPECULATIVE: expected.speculative_ms_per_token}
    return [Bar(name, {mode: found.ms_per_token for mode, found in run.measures.modes.items()}, forecasts)]


def time_per_token(bars: Sequence[Bar]) -> Figure | None:
    """Draw the median of each mode with its interval, and a bar at its forecast; None if nothing was measured."""
    bars, num_bars = bars[:MOST_BARS], len(bars)
    if not any(bar.measured for bar in bars):
        return None
    title = "Time per token" + (f", the first {MOST_BARS} of {num_bars}" if num_bars > MOST_BARS else "")
    figure, (axes,) = panels(title)
    names = ["\n".join(textwrap.wrap(visible(bar.name), _LONGEST_NAME)) for bar in bars]
    num_lines = sum(max(name.count("\n"), 1) for name in names)
    figure.set_size_inches(_PAGE_WIDTH, _FRAME_INCHES + _BAR_INCHES * max(num_lines, len(bars)))
    known = [*dict.fromkeys((PLAIN, SPECULATIVE, *(mode for bar in bars for mode in bar.measured)))]
    modes = [mode for mode in known if any(mode in bar.measured for bar in bars)]
    for number, mode in enumerate(modes):
        rank = known.index(mode)
        colour, shape = (GREY, *COLOURS)[rank % len(COLOURS)], SHAPES[rank % len(SHAPES)]
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
    axes.set_yticks(range(len(bars)), names if len(bars) > 1 or {DISTURBED, NOT_LOSSLESS} & {*names[0]} else [""])
    axes.set(xlabel="ms/token, median over prompts", xlim=(0, _MARGIN * max(figures)), ylim=(len(bars) - 0.5, -0.5))
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    return figure
