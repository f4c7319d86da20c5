"""Draws charts with matplotlib, for pages, figure files and plans, in one style.

Import this module only to draw: matplotlib takes a second. Sizes are in points; a page shows a point as a CSS pixel.
The same charts give the same bytes.
"""

import io
import logging
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path

from llama_ssp.errors import ConfigError
from llama_ssp.reports.charts import GRID, INK, SHAPES, SOFT, Chart, Kind, Mark

try:
    import matplotlib.style as mpl_style
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Rectangle
except ImportError as error:
    raise ConfigError(f"drawing needs matplotlib: pip install matplotlib ({error})") from error

STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "llama-ssp", "text.parse_math": False, "font.size": 11,
    "font.sans-serif": ["DejaVu Sans"],
    "text.color": INK, "axes.labelcolor": SOFT, "axes.edgecolor": SOFT, "axes.linewidth": 1,
    "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False, "axes.axisbelow": True,
    "grid.color": GRID, "grid.linewidth": 1, "xtick.color": INK, "ytick.color": INK,
    "xtick.major.size": 0, "ytick.major.size": 0, "pdf.fonttype": 42,
    "legend.frameon": False, "legend.borderpad": 0, "legend.borderaxespad": 0, "legend.handlelength": 1.6,
}  # fmt: skip
"""Changes to matplotlib's defaults; the user's own matplotlibrc is ignored."""
WIDTH, HEIGHT = 440, 250
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 10, 40
_INNER_WIDTH, _INNER_HEIGHT = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
_EDGE = (12 - LEFT) / _INNER_WIDTH
"""Where titles and legends begin, in widths of the axes."""
_TITLE, _HEADLINE, _LEGEND_ROW = 22, 26, 17
_POINTS_PER_INCH, _SCREEN_DPI, _PAPER_DPI = 72, 150, 300
_HALF_WIDTH_NAME = 28
"""Longest name in a legend of two columns."""
_LONGEST_NAME = 60
_DASHES = (0, (2.5, 2))
"""A dash of five points and a gap of four, in line widths."""
_DOT_SIZES = dict(zip(SHAPES, (8, 7, 8.5, 6.5, 8.5), strict=True))
"""With these the shapes look equally large."""
_MOST_NAMES = 20
"""Most names under the x axis; of more, only every second or third is shown."""
_LEAST, _MOST = 1e-100, 1e100
"""Range of an axis: matplotlib's tick arithmetic fails far outside it."""
_GENERATED_ID = re.compile(r' id="[a-z0-9.]+_\d+"')
_MARK = re.compile(r'<g id="mark-(\d+)">')
logging.getLogger("matplotlib").setLevel(logging.ERROR)  # its notes on fonts and cache folders do not help our users


def picture(chart: Chart) -> str:
    """Draw one chart as an SVG element of a page, which shows the title; marks show their values under the pointer."""
    with _styled():
        file = io.StringIO()
        figure, says = _drawn([chart])
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    drawn = file.getvalue()  # without ids and metadata that differ between runs or clash on a page
    drawn = _GENERATED_ID.sub("", drawn[drawn.index("<svg") :])
    drawn = re.sub(r"\n(?=[^ <])", " ", drawn)  # a path is a line
    drawn = _MARK.sub(lambda found: f"<g><title>{escape(_printable(says[int(found[1])]))}</title>", drawn)
    return drawn.replace("<svg ", f'<svg role="img" aria-label="{escape(_printable(chart.alt))}" ', 1).rstrip()


def save(charts: Sequence[Chart], file: Path, *, headline: str = "") -> None:
    """Draw charts in a row under a headline or, without one, for a paper: without titles, at 300 dots per inch.

    Raises OSError or ValueError if the file or its suffix is unusable.
    """
    with _styled():
        figure, _ = _drawn(charts, headline=headline)
        undated = {".pdf": ("CreationDate",), ".svg": ("Date",)}.get(file.suffix, ())
        figure.savefig(file, dpi=_SCREEN_DPI if headline else _PAPER_DPI, metadata=dict.fromkeys(undated))


@contextmanager
def _styled() -> Iterator[None]:
    """Apply STYLE, without warnings about characters that matplotlib's font lacks, since viewers have others."""
    with mpl_style.context(STYLE, after_reset=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")
        yield


def _drawn(charts: Sequence[Chart], *, headline: str = "") -> tuple[Figure, list[str]]:
    """Draw charts in a row, with their titles if it has a headline; returns the figure and the texts of its marks."""
    above, says = _HEADLINE + _TITLE if headline else 0, list[str]()
    width, height = WIDTH * len(charts), above + max(map(_height, charts))
    figure = Figure(figsize=(width / _POINTS_PER_INCH, height / _POINTS_PER_INCH), dpi=_POINTS_PER_INCH)
    if headline:
        figure.suptitle(_printable(headline), fontsize=11, y=1 - 8 / height, va="top")
    for place, chart in enumerate(charts):
        corner = ((WIDTH * place + LEFT) / width, (height - (above + HEIGHT - BOTTOM)) / height)
        axes = figure.add_axes((*corner, _INNER_WIDTH / width, _INNER_HEIGHT / height))
        if headline:
            axes.set_title(chart.title, loc="left", x=_EDGE, fontsize=12, weight="bold")
        axes.set_xlim(0, _reach(chart.highest_x))
        axes.set_ylim(0, 1.05 * _reach(chart.highest_y))
        _label(axes, chart)
        for mark in chart.marks:
            if all(abs(number) < _MOST for point in mark.points for number in point):  # false for NaN
                artist = axes.add_artist(_artist(mark))
                if mark.says:
                    artist.set_gid(f"mark-{len(says)}")
                    says.append(mark.says)
    return figure, says


def _height(chart: Chart) -> int:
    return HEIGHT + _LEGEND_ROW * math.ceil(len(chart.legend) / _legend_columns(chart))


def _legend_columns(chart: Chart) -> int:
    return 1 if any(len(name) > _HALF_WIDTH_NAME for name in chart.legend) else 2


def _label(axes: Axes, chart: Chart) -> None:
    axes.set_xlabel(chart.x_label)
    if chart.y_label:
        axes.set_ylabel(chart.y_label)
        axes.grid(axis="y")
    else:
        axes.yaxis.set_visible(False)
    if chart.x_names is not None:
        names = list(chart.x_names.items())[:: math.ceil(len(chart.x_names) / _MOST_NAMES) or 1]
        axes.set_xticks([x for x, _ in names], [_shortened(name) for _, name in names])
    if chart.legend:
        axes.legend(
            [_handle(mark) for mark in chart.legend.values()], [_shortened(name) for name in chart.legend],
            loc="upper left", bbox_to_anchor=(_EDGE, -BOTTOM / _INNER_HEIGHT), ncols=_legend_columns(chart),
            fontsize=10.5,
        )  # fmt: skip


def _artist(mark: Mark) -> Artist:
    xs, ys = zip(*mark.points, strict=True)
    if mark.kind is Kind.bar:
        return Rectangle((xs[0], ys[0]), xs[1] - xs[0], ys[1] - ys[0], color=mark.colour, linewidth=0, clip_on=False)
    if mark.kind is Kind.dot:
        return Line2D(xs, ys, color=mark.colour, marker=mark.shape, markersize=_DOT_SIZES[mark.shape],
                      markeredgewidth=0, linestyle="none", clip_on=False)  # fmt: skip
    return Line2D(xs, ys, color=mark.colour, linewidth=2, linestyle=_DASHES if mark.dashed else "-")


def _handle(mark: Mark) -> Artist:
    """The mark as the legend shows it: a line has its dots there, which are marks of their own in the chart."""
    shown = _artist(mark)
    if mark.kind is Kind.line and mark.shape:
        shown.set(marker=mark.shape, markersize=_DOT_SIZES[mark.shape], markeredgewidth=0)
    return shown


def _reach(highest: float) -> float:
    """Where an axis ends, whatever number a record holds."""
    return highest if _LEAST < highest < _MOST else 1.0


def _shortened(name: str) -> str:
    shown = _printable(name)
    return shown if len(shown) <= _LONGEST_NAME else shown[: _LONGEST_NAME - 1] + "…"


def _printable(text: str) -> str:
    """Write out control characters, which SVG forbids."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
