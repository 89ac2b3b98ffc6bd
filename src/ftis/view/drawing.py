"""What all charts share: inks, styles of arms that can be told apart, names and numbers that fit.

People who see red and green alike can tell the colours apart, and an arm has the same colour, line and marker in every
chart. An ink is a name: ``page.css`` has its colour by day and in the dark, :data:`INKS` its colour on paper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LONGEST_NAME = 18
LONGEST_BESIDE = 26
"""Of a name beside a line, where the chart grows by it."""

INKS: Mapping[str, str] = {
    "line-0": "#1f5fd0",
    "line-1": "#b04300",
    "line-2": "#00745a",
    "line-3": "#8a1f7a",
    "line-4": "#7d5b00",
    "line-5": "#1b1f24",
    "line-6": "#b3204d",
    "line-7": "#5a6470",
    "ink": "#1b1f24",
    "soft": "#525c67",
    "rule": "#d9dee4",
    "bad": "#862237",
    "kept": "#2b6777",
    "zero": "#c6ced6",
    "dropped": "#e8a33d",
    "weights": "#6a3d9a",
}
"""The inks, as they are on paper and by day."""

LINES = 8
"""The number of inks ``line-0``, ``line-1``, … for lines without a style of their own."""

COLOURS = ("line-0", "line-1", "line-2", "line-3", "line-4", "line-6")
BASELINE_COLOURS = ("line-5", "line-7")
DASHES: tuple[tuple[float, ...], ...] = ((), (7, 2.5), (2.5, 2), (7, 2, 2, 2))
MARKERS = "osADvP"
"""Circle, square, triangle up, diamond, triangle down, upright bar: of the points of an arm's line."""


@dataclass(frozen=True)
class Style:
    """An arm's ink, the dashes of its line and its marker, the same in every chart."""

    ink: str
    dashes: tuple[float, ...]
    marker: str


def arm_styles(arms: Sequence[str], baselines: Sequence[str]) -> dict[str, Style]:
    """A style for each arm; baselines are black or grey, and broken lines."""
    styles = {}
    others = [arm for arm in arms if arm not in baselines]
    for i, arm in enumerate(others):
        dashes = DASHES[(i // len(COLOURS)) % len(DASHES)]
        styles[arm] = Style(COLOURS[i % len(COLOURS)], dashes, MARKERS[i % len(MARKERS)])
    for i, arm in enumerate(baselines):
        ink, broken = BASELINE_COLOURS[i % len(BASELINE_COLOURS)], DASHES[1:]
        styles[arm] = Style(ink, broken[i % len(broken)], MARKERS[i % len(MARKERS)])
    return {arm: styles[arm] for arm in arms}


def in_short(value: float) -> str:
    """1.5M for 1,500,000, 20k for 20,000; smaller numbers as they are."""
    for unit, letter in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:g}{letter}"
    return f"{value:g}"


def spread_out(heights: Sequence[float], gap: float) -> list[float]:
    """The heights moved as little as needed to lie ``gap`` apart and within 0 … 1, their order kept."""
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
    """A name of at most ``longest`` letters, that leaves room for the chart; names may have 64."""
    return name if len(name) <= longest else f"{name[: longest - 6]}…{name[-5:]}"
