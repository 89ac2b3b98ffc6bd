"""Charts as files for papers and documents: SVG by the page's own template, PNG by matplotlib. The same charts give the
same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftis.view.drawing import INKS
from ftis.view.layout import figure_svg
from ftis.view.plots import Area, Chart, Dot, Panel, Polyline, Words

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ABOVE = 38
"""Room for title and subtitle, in units of the drawing."""

DPI, UNITS_PER_INCH = 144, 75.0
POINTS = 72 / UNITS_PER_INCH
"""Of a letter's height or a line's width, for each unit of the drawing."""

ANCHORS = {"start": "left", "middle": "center", "end": "right"}


def write_figures(directory: Path, panels: Sequence[Panel]) -> None:
    """Write each panel that shows something as ``<name>.svg`` and ``<name>.png``."""
    directory.mkdir(parents=True, exist_ok=True)
    for panel in panels:
        if not panel.chart.empty:
            (directory / f"{panel.name}.svg").write_text(figure_svg(panel.chart), encoding="utf-8")
            write_sheet(directory / f"{panel.name}.png", [[panel.chart]])


def write_sheet(path: Path, rows: Sequence[Sequence[Chart]]) -> None:
    """Write charts in rows and columns as one PNG."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    wide = max(sum(chart.width for chart in row) for row in rows)
    heights = [max(chart.height for chart in row) + ABOVE for row in rows]
    settings: Any = {"text.parse_math": False, "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"]}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(wide / UNITS_PER_INCH, sum(heights) / UNITS_PER_INCH))
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.set_xlim(0, wide)
        axes.set_ylim(sum(heights), 0)
        for i, row in enumerate(rows):
            across = 0
            for chart in row:
                _draw(axes, chart, across, sum(heights[:i]) + ABOVE)
                across += chart.width
        figure.savefig(path, dpi=DPI, metadata={"Software": None})


def _draw(axes: Axes, chart: Chart, x: float, y: float) -> None:
    """Draw a chart whose frame's corner is at (x, y)."""
    marks = [
        Words(4, -24, chart.title, "ink", strong=True),
        Words(4, -11, chart.subtitle),
        *chart.marks,
        *([Words(chart.width / 2, chart.height / 2, chart.empty, anchor="middle")] if chart.empty else ()),
    ]
    for mark in marks:
        colour: Any = {"color": INKS[mark.ink], "clip_on": False}
        match mark:
            case Polyline():
                style: Any = (0, [part / mark.width for part in mark.dashes]) if mark.dashes else "solid"
                xs, ys = ([p[i] + by for p in mark.points] for i, by in ((0, x), (1, y)))
                axes.plot(xs, ys, lw=mark.width * POINTS, ls=style, alpha=mark.opacity, **colour)
            case Area():
                xs, ys = ([p[i] + by for p in mark.points] for i, by in ((0, x), (1, y)))
                axes.fill(xs, ys, lw=0, alpha=mark.opacity, **colour)
            case Dot():
                size = 2 * mark.radius * POINTS
                axes.plot(mark.x + x, mark.y + y, marker="o", ms=size, mew=0, alpha=mark.opacity, **colour)
            case Words():
                weight, side = "bold" if mark.strong else "normal", ANCHORS[mark.anchor]
                size = 10 * POINTS
                axes.text(mark.x + x, mark.y + y, mark.text, size=size, weight=weight, ha=side, va="center", **colour)
