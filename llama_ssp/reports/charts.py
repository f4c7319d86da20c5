"""Charts as data: bars, lines and dots over two linear axes. `plots` draws them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

INK, SOFT, GRID, GREY = "#1b1f23", "#5f6b76", "#dfe3e6", "#8a939b"
COLOURS = ("#2563a8", "#c2571a", "#2e7d4f", "#7b4ba0", "#a3303c", "#cf5aa0", "#0f8b8d", "#9a7b0a")
SHAPES = ("o", "s", "^", "D", "v")
"""Of dots, by matplotlib's names."""
MOST_LINES = 12
"""Most lines of a chart, each with its own look."""
_MOST_SAID = 12
"""Most marks whose values the alternative text names."""
Point = tuple[float, float]
Kind = Enum("Kind", ["bar", "line", "dot"])


class Look(NamedTuple):
    """The look of a line and of its dots."""

    colour: str
    shape: str = SHAPES[0]


def look(number: int) -> Look:
    """Return the look of a chart's line; neighbours differ in both, so that paper without colours shows them apart."""
    return Look(COLOURS[number % len(COLOURS)], SHAPES[number % len(SHAPES)])


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A bar given by its lower left and upper right corners, a line through points, or a dot at one point.

    `shape` is that of a dot, or of a line's dots, which the legend shows on the line.
    """

    kind: Kind
    points: Sequence[Point]
    colour: str
    says: str = ""
    dashed: bool = False
    shape: str = ""


@dataclass(kw_only=True)
class Chart:
    """One chart; its axes run from 0 to at least `highest_x` and `highest_y`.

    Attributes:
        x_label, y_label: names of the axes with units; without a name the y axis is hidden.
        x_names: names for places on the x axis, instead of numbers.
        marks: in drawing order; later ones cover earlier ones.
        legend: the mark shown for each name.
    """

    title: str
    x_label: str
    y_label: str
    highest_x: float
    highest_y: float
    x_names: Mapping[float, str] | None = None
    marks: list[Mark] = field(default_factory=list)
    legend: dict[str, Mark] = field(default_factory=dict)

    def bar(
        self, left: float, right: float, top: float, colour: str, *, says: str, name: str = "", bottom: float = 0.0
    ) -> None:
        """Add a bar, which shows `says` under the pointer; a `name` goes into the legend."""
        self._add(name, Mark(kind=Kind.bar, points=[(left, bottom), (right, top)], colour=colour, says=says))

    def line(
        self, points: Sequence[Point], colour: str, *, name: str = "", dashed: bool = False, shape: str = ""
    ) -> None:
        """Add straight lines through all points; `shape` is that of their dots."""
        self._add(name, Mark(kind=Kind.line, points=points, colour=colour, dashed=dashed, shape=shape))

    def curve(self, points: Sequence[Point], seen: Look, *, says: Sequence[str], name: str) -> None:
        """Add a line through all points, with a dot at each of them that shows its text under the pointer."""
        self.line(points, seen.colour, name=name, shape=seen.shape)
        for (x, y), text in zip(points, says, strict=True):
            self.dot(x, y, seen.colour, says=text, shape=seen.shape)

    def dot(self, x: float, y: float, colour: str, *, says: str, name: str = "", shape: str = SHAPES[0]) -> None:
        """Add a dot, which shows `says` under the pointer."""
        self._add(name, Mark(kind=Kind.dot, points=[(x, y)], colour=colour, says=says, shape=shape))

    @property
    def alt(self) -> str:
        """Alternative text: the title and the values."""
        texts = [mark.says for mark in self.marks if mark.says]
        more = [f"and {len(texts) - _MOST_SAID} more"] if len(texts) > _MOST_SAID else []
        return f"{self.title}: {'; '.join([*texts[:_MOST_SAID], *more])}"

    def _add(self, name: str, mark: Mark) -> None:
        self.marks.append(mark)
        if name:
            self.legend.setdefault(name, mark)
