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
INNER_WIDTH, INNER_HEIGHT = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
EDGE = (12 - LEFT) / INNER_WIDTH
"""Where titles and legends begin, in widths of the axes."""
TITLE, HEADLINE, LEGEND_ROW = 22, 26, 17
POINTS_PER_INCH, SCREEN_DPI, PAPER_DPI = 72, 150, 300
HALF_WIDTH_NAME = 28
"""Longest name in a legend of two columns."""
LONGEST_NAME = 60
DASHES = (0, (2.5, 2))
"""A dash of five points and a gap of four, in line widths."""
DOT_SIZES = dict(zip(SHAPES, (8, 7, 8.5, 6.5, 8.5), strict=True))
"""With these the shapes look equally large."""
MOST_NAMES = 20
"""Most names under the x axis; of more, only every second or third is shown."""
LEAST, MOST = 1e-100, 1e100
"""Range of an axis: matplotlib's tick arithmetic fails far outside it."""
_GENERATED_ID = re.compile(r' id="[a-z0-9.]+_\d+"')
_MARK = re.compile(r'<g id="mark-(\d+)">')
logging.getLogger("matplotlib").setLevel(logging.ERROR)  # its notes on fonts and cache folders do not help our users


def picture(chart: Chart) -> str:
    """Draw one chart as an SVG element of a page, which shows the title; marks show their values under the pointer."""
    with _styled():
        return _svg(*_drawn([chart], num_columns=1, has_titles=False), alt=chart.alt)


def sheet(charts: Sequence[Chart], *, num_columns: int = 2) -> str:
    """Draw charts with their titles in columns, as an SVG file on white."""
    with _styled():
        return _svg(*_drawn(charts, num_columns=num_columns), alt="; ".join(chart.title for chart in charts)) + "\n"


def save(charts: Sequence[Chart], file: Path, *, headline: str = "") -> None:
    """Draw charts in a row under a headline or, without one, for a paper: without titles, at 300 dots per inch.

    Raises OSError or ValueError if the file or its suffix is unusable.
    """
    with _styled():
        figure, _ = _drawn(charts, num_columns=len(charts), headline=headline, has_titles=bool(headline))
        undated = {".pdf": ("CreationDate",), ".svg": ("Date",)}.get(file.suffix, ())
        figure.savefig(file, dpi=SCREEN_DPI if headline else PAPER_DPI, metadata=dict.fromkeys(undated))


@contextmanager
def _styled() -> Iterator[None]:
    """Apply STYLE, without warnings about characters that matplotlib's font lacks, since viewers have others."""
    with mpl_style.context(STYLE, after_reset=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")
        yield


def _drawn(
    charts: Sequence[Chart], *, num_columns: int, headline: str = "", has_titles: bool = True
) -> tuple[Figure, list[str]]:
    """Return the figure and the texts of its marks, in the order of their ids."""
    rows = [charts[first : first + num_columns] for first in range(0, len(charts), num_columns)]
    title = TITLE if has_titles else 0
    top, says = HEADLINE if headline else 0, list[str]()
    width, height = WIDTH * min(num_columns, len(charts)), top + sum(title + max(map(_height, row)) for row in rows)
    figure = Figure(figsize=(width / POINTS_PER_INCH, height / POINTS_PER_INCH), dpi=POINTS_PER_INCH)
    if headline:
        figure.suptitle(_printable(headline), fontsize=11, y=1 - 8 / height, va="top")
    for row in rows:
        for place, chart in enumerate(row):
            bottom = height - (top + title + HEIGHT - BOTTOM)
            corner = ((WIDTH * place + LEFT) / width, bottom / height)
            axes = figure.add_axes((*corner, INNER_WIDTH / width, INNER_HEIGHT / height))
            if title:
                axes.set_title(chart.title, loc="left", x=EDGE, fontsize=12, weight="bold")
            says += _draw(axes, chart, first=len(says))
        top += title + max(map(_height, row))
    return figure, says


def _height(chart: Chart) -> int:
    return HEIGHT + LEGEND_ROW * math.ceil(len(chart.legend) / _legend_columns(chart))


def _legend_columns(chart: Chart) -> int:
    return 1 if any(len(name) > HALF_WIDTH_NAME for name in chart.legend) else 2


def _draw(axes: Axes, chart: Chart, *, first: int) -> list[str]:
    axes.set_xlim(0, _reach(chart.highest_x))
    axes.set_ylim(0, 1.05 * _reach(chart.highest_y))
    _label(axes, chart)
    says: list[str] = []
    for mark in chart.marks:
        if all(abs(place) < MOST for point in mark.points for place in point):  # false for NaN
            artist = axes.add_artist(_artist(mark))
            if mark.says:
                artist.set_gid(f"mark-{first + len(says)}")
                says.append(mark.says)
    return says


def _label(axes: Axes, chart: Chart) -> None:
    axes.set_xlabel(chart.x_label)
    if chart.y_label:
        axes.set_ylabel(chart.y_label)
        axes.grid(axis="y")
    else:
        axes.yaxis.set_visible(False)
    if chart.x_names is not None:
        names = list(chart.x_names.items())[:: math.ceil(len(chart.x_names) / MOST_NAMES) or 1]
        axes.set_xticks([x for x, _ in names], [_shortened(name) for _, name in names])
    if chart.legend:
        axes.legend(
            [_handle(mark) for mark in chart.legend.values()], [_shortened(name) for name in chart.legend],
            loc="upper left", bbox_to_anchor=(EDGE, -BOTTOM / INNER_HEIGHT), ncols=_legend_columns(chart),
            fontsize=10.5,
        )  # fmt: skip


def _artist(mark: Mark) -> Artist:
    xs, ys = zip(*mark.points, strict=True)
    if mark.kind is Kind.bar:
        return Rectangle((xs[0], ys[0]), xs[1] - xs[0], ys[1] - ys[0], color=mark.colour, linewidth=0, clip_on=False)
    if mark.kind is Kind.dot:
        return Line2D(xs, ys, color=mark.colour, marker=mark.shape, markersize=DOT_SIZES[mark.shape],
                      markeredgewidth=0, linestyle="none", clip_on=False)  # fmt: skip
    return Line2D(xs, ys, color=mark.colour, linewidth=2, linestyle=DASHES if mark.dashed else "-")


def _handle(mark: Mark) -> Artist:
    """The mark as the legend shows it: a line has its dots there, which are marks of their own in the chart."""
    shown = _artist(mark)
    if mark.kind is Kind.line and mark.shape:
        shown.set(marker=mark.shape, markersize=DOT_SIZES[mark.shape], markeredgewidth=0)
    return shown


def _reach(highest: float) -> float:
    """Where an axis ends, whatever number a record holds."""
    return highest if LEAST < highest < MOST else 1.0


def _shortened(name: str) -> str:
    shown = _printable(name)
    return shown if len(shown) <= LONGEST_NAME else shown[: LONGEST_NAME - 1] + "…"


def _printable(text: str) -> str:
    """Write out control characters, which SVG forbids."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def _svg(figure: Figure, says: Sequence[str], *, alt: str) -> str:
    """The figure as an `svg` element, without ids and metadata that differ between runs or clash on a page."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    drawn = file.getvalue()
    drawn = _GENERATED_ID.sub("", drawn[drawn.index("<svg") :])
    drawn = re.sub(r"\n(?=[^ <])", " ", drawn)  # a path is a line
    drawn = _MARK.sub(lambda found: f"<g><title>{escape(_printable(says[int(found[1])]))}</title>", drawn)
    return drawn.replace("<svg ", f'<svg role="img" aria-label="{escape(_printable(alt))}" ', 1).rstrip()
