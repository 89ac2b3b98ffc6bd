"""Charts as values: the places of their lines, areas, dots and words. They are cheap enough to draw after every round.

:class:`Plot` puts data into the frame of a chart; ``templates/chart.svg`` draws a :class:`Chart`, in a page and in a
file. There is no other way to draw.

People who see red and green alike can tell the colours apart, and an arm has the same colour and line in every chart.
An ink is a name: ``page.css`` has its colours in light and dark mode. A file has the one of light mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from ftis.config import cut
from ftis.view.formatting import true_minus

LONGEST_NAME = 18
LONGEST_BESIDE = 26
"""The most letters of a name beside a line; the chart grows by its length."""

LINES = 8
"""The number of inks ``line-0``, ``line-1``, … for lines without a style of their own."""

COLOURS = ("line-0", "line-1", "line-2", "line-3", "line-4", "line-6")
BASELINE_COLOURS = ("line-5", "line-7")
DASHES: tuple[tuple[float, ...], ...] = ((), (7, 2.5), (2.5, 2), (7, 2, 2, 2))


@dataclass(frozen=True)
class Style:
    """An arm's ink and the dashes of its line, the same in every chart."""

    ink: str
    dashes: tuple[float, ...]


def arm_styles(arms: Sequence[str], baselines: Sequence[str]) -> dict[str, Style]:
    """A style for each arm; baselines have broken lines in black or grey."""
    styles, broken = {}, DASHES[1:]
    for i, arm in enumerate(arm for arm in arms if arm not in baselines):
        styles[arm] = Style(COLOURS[i % len(COLOURS)], DASHES[(i // len(COLOURS)) % len(DASHES)])
    for i, arm in enumerate(baselines):
        styles[arm] = Style(BASELINE_COLOURS[i % len(BASELINE_COLOURS)], broken[i % len(broken)])
    return {arm: styles[arm] for arm in arms}


def in_short(value: float) -> str:
    """A number in short: 1.5M for 1,500,000, 20k for 20,000; smaller numbers stay as they are."""
    for unit, letter in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:g}{letter}"
    return f"{value:g}"


def spread_out(heights: Sequence[float], gap: float) -> list[float]:
    """Move heights as little as needed, so that they lie ``gap`` apart and within 0 … 1, in the same order."""
    order = sorted(range(len(heights)), key=lambda i: (heights[i], -i))
    placed, least, most = [0.0] * len(heights), 0.0, 1.0
    for i in order:
        placed[i] = max(min(heights[i], 1.0), least)
        least = placed[i] + gap
    for i in reversed(order):
        placed[i] = min(placed[i], most)
        most = placed[i] - gap
    return placed


def short(name: str, longest: int = LONGEST_NAME) -> str:
    """Cut a name to ``longest`` letters, so that it leaves room for the chart; names may have 64."""
    return cut(name, longest, 5)


WIDTH, HEIGHT = 360, 200
LEFT, RIGHT, TOP, BOTTOM = 40, 84, 10, 26
"""Room for the axes' numbers and for the lines' names at their ends, in units of the drawing."""
LAST, LOWEST = WIDTH - RIGHT, HEIGHT - BOTTOM
"""The right and the lower end of the frame."""

LETTER = 7
"""The approximate width of a letter in a label. A chart with long labels is wider than others."""
NAMED = 12
"""The most lines with labels; the labels of more would overlap."""

ROUND = "round"
"""The label of an axis of whole numbers."""

MOST_POINTS = 300
GAP = 0.075
"""The least distance between two names, as a part of the height."""

LEGEND_ROW = 14

Point = tuple[float, float]
AnyPoint = TypeVar("AnyPoint", bound=tuple[float, ...])


@dataclass(frozen=True)
class Polyline:
    """A polyline in units of the drawing."""

    points: Sequence[Point]
    ink: str
    width: float
    dashes: tuple[float, ...] = ()
    opacity: float = 1.0

    @property
    def path(self) -> str:
        return _path(self.points)


@dataclass(frozen=True)
class Area:
    """A filled polygon."""

    points: Sequence[Point]
    ink: str
    opacity: float = 1.0

    @property
    def path(self) -> str:
        return _path(self.points) + "Z"


@dataclass(frozen=True)
class Dot:
    x: float
    y: float
    radius: float
    ink: str
    opacity: float = 1.0


@dataclass(frozen=True)
class Words:
    """A text centred vertically at ``y``; ``anchor`` is "start", "middle" or "end"."""

    x: float
    y: float
    text: str
    ink: str = "soft"
    anchor: str = "start"
    strong: bool = False


Mark = Polyline | Area | Dot | Words


@dataclass(frozen=True)
class Chart:
    """A drawing with its title; ``empty`` is the reason why there is no drawing, or ""."""

    title: str
    alt: str
    marks: Sequence[Mark] = ()
    subtitle: str = ""
    empty: str = ""
    width: int = WIDTH
    height: int = HEIGHT


class Plot:
    """A frame, and marks in units of the data.

    Args:
        x, y: the ends of the axes.
        logarithmic: whether the y axis is, with powers of ten as its marks.
    """

    def __init__(
        self, x: tuple[float, float], y: tuple[float, float], x_label: str, *, logarithmic: bool = False
    ) -> None:
        self._x, self._y = _apart(*x), _apart(*y)
        self._scale: Callable[[float], float] = math.log10 if logarithmic else float
        self._names: list[tuple[float, str, str]] = []
        self._legend: list[tuple[str, str, float]] = []
        self._marks: list[Mark] = []
        for number in powers_of_ten(*self._y) if logarithmic else _round_numbers(*self._y, 5):
            self._across(number, "rule", 0.7)
            self._marks.append(
                Words(LEFT - 6, self.place(self._x[0], number)[1], true_minus(f"{number:g}"), anchor="end")
            )
        for number in _round_numbers(*self._x, 4, least=float(x_label == ROUND)):
            at = self.place(number, self._y[0])[0]
            self._marks.append(Words(at, LOWEST + 9, true_minus(in_short(number)), anchor="middle"))
        self._marks.append(Words(LAST, HEIGHT - 7, x_label, anchor="end"))

    def place(self, x: float, y: float) -> Point:
        """The place of a value in the drawing; a value beyond the frame is put on its edge."""

        def part(value: float, low: float, high: float) -> float:
            return min(max((value - low) / (high - low), 0.0), 1.0)

        across, up = part(x, *self._x), part(*map(self._scale, (y, *self._y)))
        return round(LEFT + (LAST - LEFT) * across, 1), round(LOWEST - (LOWEST - TOP) * up, 1)

    def _across(self, y: float, ink: str, width: float, dashes: tuple[float, ...] = ()) -> None:
        at = self.place(self._x[0], y)[1]
        self._marks.append(Polyline(((LEFT, at), (LAST, at)), ink, width, dashes))

    def line(
        self,
        points: Sequence[Point],
        ink: str,
        name: str = "",
        *,
        width: float = 1.7,
        dashes: tuple[float, ...] = (),
        dotted: bool = False,
        opacity: float = 1.0,
    ) -> None:
        """Draw a line, with its name at its end if it has one; ``dotted``: with its points, unless they are many."""
        points = thinned(points)
        placed = [self.place(x, y) for x, y in points]
        if placed and (len(placed) > 1 or not dotted):
            self._marks.append(Polyline(placed, ink, width, dashes, opacity))
        if dotted and len(placed) < MOST_POINTS / 3:
            self._marks += [Dot(*at, 2.3, ink) for at in placed]
        if name and points:
            self._names.append((points[-1][1], name, ink))

    def band(self, points: Sequence[tuple[float, float, float]], ink: str, opacity: float = 0.14) -> None:
        """Draw an area between two heights at each x."""
        points = thinned(points)
        edge = [self.place(x, high) for x, _, high in points] + [self.place(x, low) for x, low, _ in reversed(points)]
        if len(points) > 1:
            self._marks.append(Area(edge, ink, opacity))
        elif points:
            self._marks.append(Polyline(edge, ink, 3, opacity=opacity))

    def level(self, y: float, name: str) -> None:
        """Draw a line across the frame, with its name."""
        self._across(y, "bad", 1, (2, 2))
        self._names.append((y, name, "bad"))

    def dot(self, x: float, y: float, ink: str) -> None:
        """Draw a single point."""
        self._marks.append(Dot(*self.place(x, y), 2.3, ink))

    def legend(self, ink: str, text: str, opacity: float) -> None:
        """Add a line below the frame with the meaning of an ink."""
        self._legend.append((ink, text, opacity))

    def chart(self, title: str, alt: str, subtitle: str = "") -> Chart:
        """The finished chart. Names of lines that would overlap are pushed apart."""
        marks, width, high = list(self._marks), WIDTH, LOWEST - TOP
        if len(self._names) <= NAMED:
            names = [(short(text, LONGEST_BESIDE), ink) for _, text, ink in self._names]
            width = max([WIDTH, *(LAST + 8 + LETTER * len(name) for name, _ in names)])
            ends = [self.place(self._x[0], y)[1] for y, _, _ in self._names]
            heights = spread_out([(LOWEST - y) / high for y in ends], GAP)
            for (name, ink), height in zip(names, heights, strict=True):
                marks.append(Words(LAST + 6, round(LOWEST - high * height, 1), name, ink, strong=True))
        for i, (ink, text, opacity) in enumerate(self._legend):
            x, y = LEFT + 150 * (i % 2), HEIGHT + 8 + LEGEND_ROW * (i // 2)
            marks += [
                Area([(x, y - 4), (x + 9, y - 4), (x + 9, y + 4), (x, y + 4)], ink, opacity),
                Words(x + 14, y, text),
            ]
        rows = -(-len(self._legend) // 2)
        return Chart(title, alt, marks, subtitle, "", width, HEIGHT + LEGEND_ROW * rows + 4 * bool(rows))


@dataclass(frozen=True)
class Series:
    """A line's name, the number of its ink, and its points in the order of x."""

    name: str
    number: int
    points: Sequence[Point]


def chart(title: str, x_label: str, series: Sequence[Series]) -> Chart:
    """A chart of plain lines."""
    known = [(s, points) for s in series if (points := [p for p in s.points if all(map(math.isfinite, p))])]
    if not known:
        why = "nothing was measured yet"
        return Chart(title, f"{title}: {why}", empty=why)
    ys = [y for _, points in known for _, y in points]
    xs = [x for _, points in known for x, _ in (points[0], points[-1])]
    plot = Plot((min(xs), max(xs)), (min(ys), max(ys)), x_label)
    for s, points in known:
        dashes = (4.0, 2.0) if s.number // LINES % 2 else ()
        plot.line(points, f"line-{s.number % LINES}", s.name, dashes=dashes)
        plot.dot(*points[-1], f"line-{s.number % LINES}")
    ends = ", ".join(f"{s.name} {points[-1][1]:.3g}" for s, points in known[:NAMED])
    more = "" if len(known) <= NAMED else f" and {len(known) - NAMED} more"
    return plot.chart(title, f"{title} over {x_label}; at the end {ends}{more}")


def thinned(points: Sequence[AnyPoint]) -> list[AnyPoint]:
    """Thin out points to at most :data:`MOST_POINTS`; the last one stays."""
    if len(points) <= MOST_POINTS:
        return list(points)
    step = len(points) / (MOST_POINTS - 1)
    return [points[int(i * step)] for i in range(MOST_POINTS - 1)] + [points[-1]]


def powers_of_ten(low: float, high: float) -> list[float]:
    """At most six powers of ten from ``low`` to ``high``."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    step = max(1, -(-(last - first + 1) // 6))
    return [10.0**power for power in range(first, last + 1, step)]


def _path(points: Sequence[Point]) -> str:
    """A polyline as an SVG path; a single point becomes a short dash, since it would be invisible otherwise."""
    if len(points) == 1:
        (x, y) = points[0]
        return f"M{x - 3:g} {y:g}h6"
    start = f"M{points[0][0]:g} {points[0][1]:g}"
    return start + "".join(f"L{x:g} {y:g}" for before, (x, y) in pairwise(points) if (x, y) != before)


def _apart(low: float, high: float) -> tuple[float, float]:
    """The ends of an axis, moved apart if they are equal."""
    return (low, high) if high - low >= 1e-9 else (low - 0.5, high + 0.5)


def _round_numbers(low: float, high: float, most: int, least: float = 0.0) -> list[float]:
    """Round numbers from ``low`` to ``high``, about ``most`` of them, and at least ``least`` apart."""
    rough = max((high - low) / most, least)
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * times for times in (1, 2, 5, 10) if size * times >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    count = int((high - first * step) / step + 1e-9) + 1
    return [round((first + i) * step, 12) for i in range(count)]
