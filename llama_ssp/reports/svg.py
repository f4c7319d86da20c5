"""A small chart as SVG: bars, lines and dots over two linear axes, with a legend. Needs no package.

What is drawn, and from what, is the business of `figures`. Positions are in units of the data; sizes are in pixels of a
view box that the page scales.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 34, 44
COLOURS = ("#2563a8", "#c2571a", "#2e7d4f", "#7b4ba0", "#a3303c", "#5f6b76", "#0f8b8d", "#9a7b0a")
GREY = "#8a939b"
NUM_TICKS = 5
MOST_NAMES = 20
"""Names under the x axis; of more, only every second or third is shown."""

STYLE = """svg text { font-size: 12px; fill: #1b1f23; } svg .title { font-size: 14px; font-weight: 600; }
svg .end { text-anchor: end; } svg .middle { text-anchor: middle; } svg .label { fill: #5f6b76; }
svg .grid { stroke: #dfe3e6; } svg .axis { stroke: #5f6b76; }"""


def nice_ticks(highest: float) -> list[float]:
    """Round numbers from 0 to the first that is not below `highest`, about five of them."""
    if not (highest > 0 and math.isfinite(highest)):
        return [0.0, 1.0]
    rough = highest / NUM_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [place * step for place in range(math.ceil(highest / step - 1e-9) + 1)]


class Chart:
    """One chart.

    Args:
        title: also read out where the picture cannot be seen.
        x_label: name of the x axis with its unit.
        y_label: name of the y axis with its unit; without a name the axis is not drawn.
        highest_x: what the x axis must reach; it begins at 0.
        highest_y: what the y axis must reach; it begins at 0.
        x_names: names for places on the x axis, instead of numbers.
    """

    def __init__(
        self,
        title: str,
        *,
        x_label: str,
        y_label: str,
        highest_x: float,
        highest_y: float,
        x_names: Mapping[float, str] | None = None,
    ) -> None:
        self._title, self._x_label, self._y_label = title, x_label, y_label
        self._x_names = x_names
        self._y_ticks = nice_ticks(highest_y)
        self._x_ticks = nice_ticks(highest_x) if x_names is None else []
        self._most_x = highest_x if x_names is not None else self._x_ticks[-1]
        self._marks: list[str] = []
        self._legend: list[tuple[str, str, bool]] = []

    def bar(self, left: float, right: float, height: float, colour: str, *, says: str) -> None:
        """A bar from 0; `says` is shown under the pointer."""
        x, y = self._x(left), self._y(height)
        size = f'width="{self._x(right) - x:.1f}" height="{max(self._y(0) - y, 0):.1f}"'
        self._mark(f'<rect x="{x:.1f}" y="{y:.1f}" {size} fill="{colour}" rx="1.5"', "rect", says)

    def line(self, points: list[tuple[float, float]], colour: str, *, dashed: bool = False) -> None:
        """Straight lines through all points."""
        path = " ".join(f"{self._x(x):.1f},{self._y(y):.1f}" for x, y in points)
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self._marks.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>')

    def dot(self, x: float, y: float, colour: str, *, says: str) -> None:
        """A dot; `says` is shown under the pointer."""
        self._mark(f'<circle cx="{self._x(x):.1f}" cy="{self._y(y):.1f}" r="4.5" fill="{colour}"', "circle", says)

    def legend(self, name: str, colour: str, *, dashed: bool = False) -> None:
        """Explain a colour, once."""
        if (name, colour, dashed) not in self._legend:
            self._legend.append((name, colour, dashed))

    def svg(self) -> str:
        """The whole picture as an element of a page."""
        head = f'<svg viewBox="0 0 {WIDTH} {self.height}" role="img" aria-label="{escape(self._title)}">'
        return "\n".join([head, self.content(), "</svg>"])

    def content(self) -> str:
        """What is inside of the picture."""
        return "\n".join([*self._axes(), *self._marks, *self._legend_rows()])

    @property
    def height(self) -> int:
        """Of the view box, the legend included."""
        return HEIGHT + 18 * math.ceil(len(self._legend) / 2)

    def _x(self, x: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * x / self._most_x

    def _y(self, y: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * y / self._y_ticks[-1]

    def _mark(self, opened: str, element: str, says: str) -> None:
        self._marks.append(f"{opened}><title>{escape(says)}</title></{element}>")

    def _axes(self) -> list[str]:
        floor, right = self._y(0), WIDTH - RIGHT
        parts = [_text(LEFT - 46, 18, self._title, "title")]
        for tick in self._y_ticks if self._y_label else []:
            y = self._y(tick)
            parts.append(f'<line x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
            parts.append(_text(LEFT - 7, y + 4, f"{tick:g}", "end"))
        names = list((self._x_names or {tick: f"{tick:g}" for tick in self._x_ticks}).items())
        every = math.ceil(len(names) / MOST_NAMES)
        parts += [_text(self._x(x), floor + 17, name, "middle") for x, name in names[::every]]
        parts.append(f'<line x1="{LEFT}" x2="{right}" y1="{floor:.1f}" y2="{floor:.1f}" class="axis"/>')
        parts.append(_text((LEFT + right) / 2, HEIGHT - 8, self._x_label, "middle label"))
        middle = (TOP + floor) / 2
        turned = f'transform="rotate(-90 14 {middle:.0f})"'
        parts.append(_text(14, middle, self._y_label, "middle label", turned))
        return parts

    def _legend_rows(self) -> list[str]:
        parts = []
        for place, (name, colour, dashed) in enumerate(self._legend):
            x, y = LEFT + (WIDTH - LEFT) / 2 * (place % 2), HEIGHT + 10 + 18 * (place // 2)
            dashes = ' stroke-dasharray="5 4"' if dashed else ""
            width = 2 if dashed else 8
            ends = f'x1="{x}" x2="{x + 18}" y1="{y - 4}" y2="{y - 4}"'
            parts.append(f'<line {ends} stroke="{colour}" stroke-width="{width}"{dashes}/>')
            parts.append(_text(x + 25, y, name, ""))
        return parts


def sheet(charts: Sequence[Chart], *, num_columns: int = 2) -> str:
    """Charts side by side as a file of its own, which brings its style and a white ground."""
    rows = [charts[first : first + num_columns] for first in range(0, len(charts), num_columns)]
    width, top, parts = WIDTH * min(num_columns, len(charts)), 0, []
    for row in rows:
        parts += [
            f'<g transform="translate({WIDTH * place} {top})">\n{chart.content()}\n</g>'
            for place, chart in enumerate(row)
        ]
        top += max(chart.height for chart in row)
    names = f'xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top}" viewBox="0 0 {width} {top}"'
    style = f"<style>svg {{ font-family: system-ui, sans-serif; }}\n{STYLE}</style>"
    ground = f'<rect width="{width}" height="{top}" fill="#fff"/>'
    return "\n".join([f"<svg {names}>", style, ground, *parts, "</svg>", ""])


def _text(x: float, y: float, text: str, kind: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" {more}>{escape(text)}</text>'
