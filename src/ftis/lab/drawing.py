"""Panels on paper: axes, styles that can be told apart, and a panel saved as PNG, as SVG and for the page.

People who see red and green alike can tell the colours apart, and an arm has the same colour, line and marker in every
panel. The same numbers give the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WIDTH, HEIGHT = 4.8, 3.25
"""Inches. At 4.8 a panel's letters keep a readable size on a phone and don't shout in two columns on a desk."""

LONGEST_NAME = 18

INK, SOFT, RULE = "#1b1f24", "#5a6470", "#d9dee4"

BASELINE_COLOURS = (INK, "#6f6f6f")
COLOURS = ("#1f5fd0", "#c24a00", "#00805f", "#8a1f7a", "#8a6400", "#5a6470")
LINES: tuple[Any, ...] = ("solid", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (5, 1.2, 1.2, 1.2)))
MARKERS = ("o", "s", "^", "D", "v", "P")
THRESHOLD = "#8c2d3f"


@dataclass(frozen=True)
class Style:
    """An arm's colour, line and marker, the same in every panel."""

    colour: str
    line: Any
    marker: str


def arm_styles(arms: Sequence[str], baselines: Sequence[str]) -> dict[str, Style]:
    """A style for each arm; baselines are black or grey, and broken lines."""
    styles = {}
    others = [arm for arm in arms if arm not in baselines]
    for i, arm in enumerate(others):
        line = LINES[(i // len(COLOURS)) % len(LINES)]
        styles[arm] = Style(COLOURS[i % len(COLOURS)], line, MARKERS[i % len(MARKERS)])
    for i, arm in enumerate(baselines):
        colour, broken = BASELINE_COLOURS[i % len(BASELINE_COLOURS)], LINES[1:]
        styles[arm] = Style(colour, broken[i % len(broken)], MARKERS[i % len(MARKERS)])
    return {arm: styles[arm] for arm in arms}


@dataclass(frozen=True)
class Panel:
    """A figure that was saved: its file name without suffix, its SVG to put into a page, and what it shows in words."""

    name: str
    svg: str
    alt: str


def round_axis(axis: Any) -> None:
    _plain_axis(axis, "round", whole=True)


def spent_axis(axis: Any, what: str) -> None:
    """An axis from 0 for what was spent, large numbers in thousands or millions."""
    _plain_axis(axis, what, whole=False)
    axis.set_xlim(left=0)
    axis.xaxis.set_major_formatter(lambda value, _: in_short(value))


def in_short(value: float) -> str:
    """1.5M for 1,500,000, 20k for 20,000; smaller numbers as they are."""
    for unit, letter in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:g}{letter}"
    return f"{value:g}"


def _plain_axis(axis: Any, label: str, whole: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(integer=whole, nbins=6))
    axis.margins(x=0.02)
    axis.set_xlabel(label)
    axis.grid(axis="y", color=RULE, lw=0.7)


def plain_log_ticks(axis: Any) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.yaxis.set_major_locator(LogLocator(numticks=7))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.yaxis.set_minor_formatter(NullFormatter())


def label_ends(axis: Any, ends: Sequence[tuple[float, str, str]]) -> None:
    """Write each line's name beside its end, pushed apart where they would overlap."""
    to_fraction = axis.transAxes.inverted()
    wanted = [
        (float(to_fraction.transform(axis.transData.transform((0, y)))[1]), text, colour) for y, text, colour in ends
    ]
    for height, (_, text, colour) in zip(spread_out([h for h, _, _ in wanted], 0.085), wanted, strict=True):
        axis.annotate(
            "\n".join(short(line) for line in text.split("\n")),
            (1.0, height),
            xycoords="axes fraction",
            xytext=(5, 0),
            textcoords="offset points",
            color=colour,
            va="center",
            fontweight="bold",
            annotation_clip=False,
        )


def spread_out(heights: Sequence[float], gap: float) -> list[float]:
    """The heights moved as little as needed to lie ``gap`` apart and within 0 … 1, their order kept."""
    order = sorted(range(len(heights)), key=lambda i: (heights[i], -i))
    placed = [min(max(heights[i], 0.0), 1.0) for i in order]
    for k in range(1, len(placed)):
        placed[k] = max(placed[k], placed[k - 1] + gap)
    over = max(0.0, placed[-1] - 1.0) if placed else 0.0
    for k in range(len(placed) - 1, -1, -1):
        limit = 1.0 if k == len(placed) - 1 else placed[k + 1] - gap
        placed[k] = min(placed[k], limit) if over or k < len(placed) - 1 else placed[k]
    result = [0.0] * len(heights)
    for k, i in enumerate(order):
        result[i] = placed[k]
    return result


def short(name: str) -> str:
    """A name that leaves room for the figure; names may have 64 letters."""
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 6]}…{name[-5:]}"


def say_instead(axis: Any, why: str) -> None:
    axis.set_axis_off()
    axis.text(0.5, 0.5, why, ha="center", va="center", color=SOFT, transform=axis.transAxes)


def save_panel(
    directory: Path,
    name: str,
    title: str,
    subtitle: str,
    alt: str,
    draw: Callable[[Any], None],
    height: float = HEIGHT,
    legend: int = 0,
    columns: int = 1,
) -> Panel:
    """Draw on fresh axes (a list of them if ``columns`` > 1) and save; ``legend`` is its number of columns."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    settings: Any = {
        "text.parse_math": False,
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 9.5,
        "axes.edgecolor": SOFT,
        "axes.labelcolor": SOFT,
        "axes.linewidth": 0.8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "xtick.color": SOFT,
        "ytick.color": SOFT,
        "text.color": INK,
        "hatch.linewidth": 0.6,
        "svg.fonttype": "none",
        "svg.hashsalt": name,
    }
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(1, columns, sharey=True, squeeze=False)[0]
        axes[0].set_title(title, loc="left", fontsize=11, fontweight="bold", pad=20)
        axes[0].annotate(
            subtitle, (0, 1), xycoords="axes fraction", xytext=(0, 7), textcoords="offset points", color=SOFT
        )
        draw(axes if columns > 1 else axes[0])
        handles, labels = axes[0].get_legend_handles_labels()
        if legend and handles:
            small: Any = {"ncols": legend, "frameon": False, "fontsize": 8.5, "handlelength": 1.6}
            figure.legend(handles, labels, loc="outside lower center", **small)
        directory.mkdir(parents=True, exist_ok=True)
        figure.savefig(directory / f"{name}.png", dpi=144, metadata={"Software": None})
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(directory / f"{name}.svg", metadata=nothing)
    return Panel(name, inline_svg((directory / f"{name}.svg").read_text(encoding="utf-8"), name), alt)


def inline_svg(svg: str, name: str) -> str:
    """An SVG document as an element for an HTML page, its ids made unique to ``name``."""
    svg = svg[svg.index("<svg") :]
    head, _, body = svg.partition(">")
    view = re.search(r'viewBox="[^"]*"', head)
    assert view is not None
    prefix = re.sub(r"[^A-Za-z0-9_-]", "_", name)
    body = re.sub(r'\bid="([^"]*)"', rf'id="{prefix}-\1"', body)
    body = re.sub(r"url\(#([^)]*)\)", rf"url(#{prefix}-\1)", body)
    body = re.sub(r'xlink:href="#([^"]*)"', rf'href="#{prefix}-\1"', body)
    body = re.sub(r"<!--.*?-->\s*", "", body, flags=re.DOTALL)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {view.group()} aria-hidden="true">{body.strip()}'
