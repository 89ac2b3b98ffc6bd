"""Line charts as values that ``templates/macros.html`` draws as SVG: light enough to be drawn after every round.

A page that is watched draws its curves here; figures on paper are figures.py's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ftis.lab.drawing import in_short, short, spread_out

WIDTH, HEIGHT = 360, 200
LEFT, RIGHT, TOP, BOTTOM = 40, 74, 10, 26
"""Room for the axes' numbers and for the lines' names at their ends, in units of the drawing."""

NAMED = 8
"""So many lines bear their names; of more, names would lie on each other."""

COLOURS = 8
"""page.css has so many colours of lines, ``--line-0`` and on."""

ROUND = "round"
"""The label of an axis of whole numbers."""

MOST_POINTS = 300
GAP = 0.075
"""Between two names, as a part of the height."""


@dataclass(frozen=True)
class Series:
    """A line's name, the number of its colour, and its points in the order of x."""

    name: str
    colour: int
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Tick:
    """A mark of an axis: where, and what it says."""

    at: float
    text: str


@dataclass(frozen=True)
class Stroke:
    """A line as it is drawn: SVG path, place of its name, and the number of its colour and dashes."""

    name: str
    path: str
    colour: int
    dashed: bool
    end_x: float
    end_y: float
    label_y: float


@dataclass(frozen=True)
class Chart:
    """A drawing of :data:`WIDTH` × :data:`HEIGHT`; ``empty`` says why there is none, "" where there is one."""

    title: str
    alt: str
    x_label: str
    strokes: Sequence[Stroke]
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    named: bool
    level: Tick | None
    empty: str = ""
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = WIDTH - RIGHT
    bottom: int = HEIGHT - BOTTOM


def chart(
    title: str,
    x_label: str,
    series: Sequence[Series],
    *,
    low: float | None = None,
    high: float | None = None,
    level: tuple[str, float] | None = None,
    empty: str = "nothing was measured yet",
) -> Chart:
    """A chart of some lines.

    Args:
        low, high: of the y axis; by default what the lines need.
        level: a horizontal line and its name.
        empty: what stands in place of a chart without points.
    """
    series = [replace(s, points=_finite(s.points)) for s in series]
    known = [s for s in series if s.points]
    if not known:
        return Chart(title, f"{title}: {empty}", x_label, [], [], [], False, None, empty)
    ys = [y for s in known for _, y in s.points] + ([level[1]] if level else [])
    low, high = min(ys) if low is None else low, max(ys) if high is None else high
    if high - low < 1e-9:
        low, high = low - 0.5, high + 0.5
    first, last = min(s.points[0][0] for s in known), max(s.points[-1][0] for s in known)
    if last <= first:
        first, last = first - 0.5, last + 0.5
    across, down = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        height = min(max((y - low) / (high - low), 0.0), 1.0)
        return round(LEFT + across * (x - first) / (last - first), 1), round(TOP + down * (1 - height), 1)

    named = len(known) <= NAMED
    ends = [place(*s.points[-1]) for s in known]
    heights = spread_out([(TOP + down - y) / down for _, y in ends], GAP) if named else [0.0] * len(ends)
    strokes = [
        Stroke(
            name=short(s.name),
            path=_path([place(x, y) for x, y in thinned(s.points)]),
            colour=s.colour % COLOURS,
            dashed=s.colour // COLOURS % 2 == 1,
            end_x=end[0],
            end_y=end[1],
            label_y=round(TOP + down * (1 - height), 1),
        )
        for s, end, height in zip(known, ends, heights, strict=True)
    ]
    said = ", ".join(f"{s.name} {s.points[-1][1]:.3g}" for s in known[:NAMED])
    return Chart(
        title=title,
        alt=f"{title} over {x_label}; at the end {said}" + ("" if named else f" and {len(known) - NAMED} more"),
        x_label=x_label,
        strokes=strokes,
        x_ticks=[
            Tick(place(x, low)[0], in_short(x)) for x in _round_numbers(first, last, 4, least=float(x_label == ROUND))
        ],
        y_ticks=[Tick(place(first, y)[1], f"{y:g}") for y in _round_numbers(low, high, 4)],
        named=named,
        level=None if level is None else Tick(place(first, level[1])[1], level[0]),
    )


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most so many points that a line shows, the last one among them."""
    if len(points) <= MOST_POINTS:
        return list(points)
    step = len(points) / (MOST_POINTS - 1)
    return [points[int(i * step)] for i in range(MOST_POINTS - 1)] + [points[-1]]


def _finite(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def _path(points: Sequence[tuple[float, float]]) -> str:
    """A polyline; one point is a short dash, which would else not be seen."""
    if len(points) == 1:
        (x, y) = points[0]
        return f"M{x - 3:g} {y:g}h6"
    start = f"M{points[0][0]:g} {points[0][1]:g}"
    return start + "".join(f"L{x:g} {y:g}" for before, (x, y) in pairwise(points) if (x, y) != before)


def _round_numbers(low: float, high: float, most: int, least: float = 0.0) -> list[float]:
    """Round numbers from ``low`` to ``high``, about so many, and at least ``least`` apart."""
    rough = max((high - low) / most, least)
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * times for times in (1, 2, 5, 10) if size * times >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    count = int((high - first * step) / step + 1e-9) + 1
    return [round((first + i) * step, 12) for i in range(count)]
