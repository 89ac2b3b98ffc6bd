"""Charts and tables: what can be told apart, where marks lie, and that every rendering shows the same text."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from io import StringIO
from itertools import combinations, pairwise
from xml.etree import ElementTree

from hypothesis import given, settings
from hypothesis import strategies as st
from markupsafe import escape
from rich.console import Console

from ftis.view import charts
from ftis.view.charts import (
    Area,
    Chart,
    Plot,
    Polyline,
    Series,
    Words,
    arm_styles,
    chart,
    in_short,
    powers_of_ten,
    spread_out,
)
from ftis.view.formatting import visible
from ftis.view.sections import (
    ArmLabel,
    Cell,
    RowGroup,
    Section,
    Table,
    asset,
    inks_by_day,
    on_terminal,
    render_figure,
    render_section,
)


def linear(colour: str) -> list[float]:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]


def luminance(colour: str) -> float:
    red, green, blue = linear(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def lab(linear: Sequence[float]) -> list[float]:
    """CIE L*a*b* of linear sRGB, in which distances are about what is seen."""
    matrix = ((0.4339, 0.3762, 0.1899), (0.2126, 0.7152, 0.0722), (0.0177, 0.1095, 0.8729))  # over the white point
    clipped = [min(max(part, 0.0), 1.0) for part in linear]
    x, y, z = (sum(w * part for w, part in zip(row, clipped, strict=True)) for row in matrix)
    f = [value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116 for value in (x, y, z)]
    return [116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])]


def test_arms_can_be_told_apart_and_read_by_day_and_in_the_dark() -> None:
    names, baselines = [f"arm{i}" for i in range(20)], ["alone", "alone-part", "NoIS"]
    styles = arm_styles([*names, *baselines], baselines)
    assert list(styles) == [*names, *baselines]
    assert len({(style.ink, style.dashes) for style in styles.values()}) == 23
    rules, _, dark = asset("page.css").partition("@media (prefers-color-scheme: dark)")
    by_day, by_night = inks_by_day(), dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6});", dark))
    for ink in (*charts.COLOURS, *charts.BASELINE_COLOURS, "bad", "soft"):
        assert 1.05 / (luminance(by_day[ink]) + 0.05) >= 4.5, ink
        assert (luminance(by_night[ink]) + 0.05) / (luminance(by_night["paper"]) + 0.05) >= 4.5, ink
        assert f".chart .{ink} {{ color: var(--{ink}); }}" in rules


def test_arms_can_be_told_apart_by_people_without_red_or_green_cones() -> None:
    seen_by = {  # Machado et al. 2009
        "all": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
        "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
        "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    }
    by_day = inks_by_day()
    for matrix in seen_by.values():
        # Of three baselines and more, and of the grey one beside three arms and more, the line tells which.
        for inks in ((*charts.COLOURS[:4], "ink"), (*charts.COLOURS[:2], *charts.BASELINE_COLOURS)):
            seen = [
                lab([sum(w * p for w, p in zip(row, linear(by_day[ink]), strict=True)) for row in matrix])
                for ink in inks
            ]
            assert min(math.dist(a, b) for a, b in combinations(seen, 2)) > 25


@given(st.lists(st.floats(-2, 2), max_size=8))
def test_labels_are_pushed_apart_within_the_axes_in_their_order(heights: list[float]) -> None:
    placed = spread_out(heights, 0.1)
    ordered = sorted(placed)
    assert all(b - a >= 0.1 - 1e-9 for a, b in pairwise(ordered))
    assert all(-1e-9 <= height <= 1 + 1e-9 for height in placed)
    assert all(placed[i] < placed[j] for i in range(len(placed)) for j in range(len(placed)) if heights[i] < heights[j])


def lines_of(drawn: Chart) -> list[Polyline]:
    return [mark for mark in drawn.marks if isinstance(mark, Polyline) and mark.ink != "rule"]


def names(drawn: Chart) -> list[Words]:
    return [mark for mark in drawn.marks if isinstance(mark, Words) and mark.strong]


def test_a_chart_puts_data_into_its_frame() -> None:
    plot = Plot((0, 10), (0, 1), "round")
    corner, other = plot.place(0, 0), plot.place(10, 1)
    assert list(corner) == [charts.LEFT, charts.HEIGHT - charts.BOTTOM]
    assert list(other) == [charts.WIDTH - charts.RIGHT, charts.TOP]
    assert plot.place(5, 0.5) == ((corner[0] + other[0]) / 2, (corner[1] + other[1]) / 2)
    assert plot.place(-3, 7) == (corner[0], other[1])
    ticks = powers_of_ten(0.05, 300)
    assert ticks == [0.1, 1, 10, 100]
    plot = Plot((0, 1), (0.1, 100), "round", logarithmic=True)
    heights = [plot.place(0, tick)[1] for tick in ticks]
    assert [round(b - a) for a, b in pairwise(heights)] == [round((heights[-1] - heights[0]) / 3)] * 3
    assert len(powers_of_ten(1e-9, 1e9)) <= 6
    assert [in_short(value) for value in (0, 0.5, 900, 20_000, 1_500_000)] == ["0", "0.5", "900", "20k", "1.5M"]


def test_ten_thousand_rounds_are_drawn_as_a_few_hundred_points_with_the_last() -> None:
    points = [(float(i), float(i == 10_000)) for i in range(10_001)]
    drawn = chart("Reward", "round", [Series("a", 0, points)])
    (line,) = lines_of(drawn)
    assert len(line.points) == charts.MOST_POINTS
    assert list(line.points[-1]) == [charts.WIDTH - charts.RIGHT, charts.TOP]
    plot = Plot((0, 10_000), (0, 1), "round")
    plot.band([(x, 0.2, y) for x, y in points], "ink")
    (band,) = (mark for mark in plot.chart("Reward", "").marks if isinstance(mark, Area))
    assert list(band.points[: charts.MOST_POINTS]) == list(line.points)


def test_a_chart_of_nothing_says_so_and_values_that_are_none_are_left_out() -> None:
    assert chart("Reward", "round", [Series("a", 0, [(1.0, math.nan)])]).empty
    (line,) = lines_of(chart("Reward", "round", [Series("a", 9, [(1.0, 0.5), (2.0, math.inf), (3.0, 0.7)])]))
    assert (len(line.points), line.ink, bool(line.dashes)) == (2, "line-1", True)


def test_names_of_lines_lie_apart_within_the_drawing_and_of_many_none_is_named() -> None:
    def of_lines(count: int, name: str = "p") -> Chart:
        return chart("Reward", "round", [Series(f"{name}{i}", i, [(0.0, i), (1.0, i)]) for i in range(count)])

    assert not names(of_lines(13))
    drawn = of_lines(12, "F-TIS-lifted-horizontal-")
    heights = sorted(words.y for words in names(drawn))
    assert min(high - low for low, high in pairwise(heights)) >= 11  # letters are 10 high
    assert heights[0] + 1 >= charts.TOP
    assert heights[-1] <= charts.HEIGHT
    assert all(words.x + 6.5 * len(words.text) <= drawn.width for words in names(drawn))


@settings(max_examples=30, deadline=None)
@given(st.text(st.characters(codec="utf-8"), max_size=12))
def test_a_sheet_of_charts_is_one_svg_with_their_words(text: str) -> None:
    shown = chart(text, "round", [Series(f"a&{text}", 0, [(0.0, 0.0), (1.0, 1.0)])])
    root = ElementTree.fromstring(render_figure([[shown, Chart("t", "", empty="nothing")], [shown]]))
    words = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert words.count("nothing") == 1
    assert words.count(visible(text).replace("\r", "\n")) >= 2
    moves = [g.attrib["transform"] for g in root.iter("{http://www.w3.org/2000/svg}g")]
    assert moves == [f"translate({x} {y})" for x, y in ((0, 38), (shown.width, 38), (0, 38 + 38 + shown.height))]


MARKUP = [
    "a|b",
    "*b* _s_ `c`",
    "<script></b><!--",
    "~~~ &lt; $x$",
    "![x](http://y)",
    "# one\n| two |",
    "\\|",
    "\u202er",
]
TEXTS = st.text(st.characters(codec="utf-8"), max_size=10) | st.sampled_from([*MARKUP, "[red]"])
CELLS = st.builds(
    Cell, TEXTS, st.just("[0, 1]") | st.just(""), st.booleans(), st.none() | st.builds(ArmLabel, TEXTS, st.just("ink"))
)
TABLES = st.builds(
    lambda caption, groups: Table(caption, ["One", "Two"], [RowGroup(title, rows) for title, rows in groups]),
    TEXTS,
    st.lists(st.tuples(st.none() | TEXTS, st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=2)), max_size=2),
)


@settings(max_examples=60, deadline=None)
@given(TABLES)
def test_each_rendering_of_a_table_has_each_cell_and_no_text_becomes_markup(table: Table) -> None:
    html = render_section(Section("honesty", "Honesty", table))
    out = StringIO()
    Console(file=out, width=400, legacy_windows=False).print(on_terminal(table))
    for cell in (cell for group in table.groups for row in group.rows for cell in row):
        assert str(escape(visible(cell.text))) in html
        for word in visible(cell.text).split():
            assert word in out.getvalue()
