"""What figures share: colours that can be told apart, and labels that do not overlap."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import combinations, pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

from ftis.view import drawing, figures, plots
from ftis.view.drawing import INKS, arm_styles, in_short, spread_out
from ftis.view.figure_files import write_figures
from ftis.view.layout import asset
from ftis.view.plots import (
    Chart,
    Panel,
    Plot,
    Polyline,
    Series,
    Words,
    both_sides_logarithmic,
    chart,
    empty,
    logarithmic,
    powers_of_ten,
)


def linear(colour: str) -> list[float]:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]


def luminance(colour: str) -> float:
    red, green, blue = linear(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_arms_can_be_told_apart_and_their_names_read_on_white() -> None:
    names = [f"arm{i}" for i in range(20)]
    baselines = ["alone", "alone-part", "NoIS"]
    styles = arm_styles([*names, *baselines], baselines)
    assert list(styles) == [*names, *baselines]
    assert INKS[styles["alone"].ink] == INKS["ink"]
    assert len({(style.ink, style.dashes) for style in styles.values()}) == 23
    for ink in (*drawing.COLOURS, *drawing.BASELINE_COLOURS, "bad", "soft"):
        assert 1.05 / (luminance(INKS[ink]) + 0.05) >= 4.5, ink


def test_the_page_has_the_same_inks_and_they_can_be_read_in_the_dark() -> None:
    rules, _, dark = asset("page.css").partition("@media (prefers-color-scheme: dark)")
    by_day = dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6});", rules))
    assert {ink: by_day[ink] for ink in INKS} == dict(INKS)
    by_night = dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6});", dark))
    for ink in (*drawing.COLOURS, *drawing.BASELINE_COLOURS, "bad", "soft"):
        assert (luminance(by_night[ink]) + 0.05) / (luminance(by_night["paper"]) + 0.05) >= 4.5, ink
        assert f".chart .{ink} {{ fill: var(--{ink}); }}" in rules


def lab(linear: Sequence[float]) -> list[float]:
    """CIE L*a*b* of linear sRGB, in which distances are about what is seen."""
    matrix = ((0.4339, 0.3762, 0.1899), (0.2126, 0.7152, 0.0722), (0.0177, 0.1095, 0.8729))  # over the white point
    clipped = [min(max(part, 0.0), 1.0) for part in linear]
    x, y, z = (sum(w * part for w, part in zip(row, clipped, strict=True)) for row in matrix)
    f = [value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116 for value in (x, y, z)]
    return [116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])]


def test_arms_can_be_told_apart_by_people_without_red_or_green_cones() -> None:
    seen_by = {  # Machado et al. 2009
        "all": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
        "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
        "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    }
    for matrix in seen_by.values():
        # Of three baselines and more, and of the grey one beside three arms and more, the line and marker tell which.
        for inks in ((*drawing.COLOURS[:4], "ink"), (*drawing.COLOURS[:2], *drawing.BASELINE_COLOURS)):
            seen = [
                lab([sum(w * p for w, p in zip(row, linear(INKS[ink]), strict=True)) for row in matrix]) for ink in inks
            ]
            assert min(math.dist(a, b) for a, b in combinations(seen, 2)) > 25


def test_labels_are_pushed_apart_within_the_axes() -> None:
    assert spread_out([], 0.1) == []
    assert spread_out([0.5], 0.1) == [0.5]
    assert spread_out([2.0, -1.0], 0.1) == [1.0, 0.0]
    for heights in ([0.5, 0.5, 0.5], [0.95, 1.0, 0.99, 0.2], [0.0, 0.01, 0.0]):
        placed = spread_out(heights, 0.1)
        ordered = sorted(placed)
        assert all(b - a >= 0.1 - 1e-9 for a, b in pairwise(ordered))
        assert ordered[0] >= -1e-9
        assert ordered[-1] <= 1 + 1e-9
    assert spread_out([0.3, 0.32], 0.1)[0] < spread_out([0.3, 0.32], 0.1)[1]


def test_large_numbers_on_an_axis_are_short() -> None:
    assert [in_short(value) for value in (0, 0.5, 900, 20_000, 1_500_000)] == ["0", "0.5", "900", "20k", "1.5M"]


def lines_of(chart: Chart) -> list[Polyline]:
    return [mark for mark in chart.marks if isinstance(mark, Polyline) and mark.ink != "rule"]


def test_a_chart_puts_data_into_its_frame() -> None:
    plot = Plot((0, 10), (0, 1), "round")
    corner, other = plot.place(0, 0), plot.place(10, 1)
    assert list(corner) == [plots.LEFT, plots.HEIGHT - plots.BOTTOM]
    assert list(other) == [plots.WIDTH - plots.RIGHT, plots.TOP]
    assert plot.place(5, 0.5) == ((corner[0] + other[0]) / 2, (corner[1] + other[1]) / 2)
    assert plot.place(-3, 7) == (corner[0], other[1])


def test_a_logarithmic_axis_has_its_powers_of_ten_equally_far_apart() -> None:
    ticks = powers_of_ten(0.05, 300)
    assert [tick.text for tick in ticks] == ["0.1", "1", "10", "100"]
    plot = Plot((0, 1), (0.1, 100), "round", y_scale=logarithmic, y_ticks=ticks)
    heights = [plot.place(0, tick.at)[1] for tick in ticks]
    assert [round(b - a) for a, b in pairwise(heights)] == [round((heights[-1] - heights[0]) / 3)] * 3
    assert len(powers_of_ten(1e-9, 1e9)) <= 6
    both = both_sides_logarithmic(2.0)
    assert both(-50.0) == -both(50.0)
    assert both(0.0) == 0


def test_ten_thousand_rounds_are_drawn_as_a_few_hundred_points_with_the_last() -> None:
    drawn = chart("Reward", "round", [Series("a", 0, [(float(i), i / 1e4) for i in range(10_001)])])
    (line,) = lines_of(drawn)
    assert len(line.points) == plots.MOST_POINTS
    assert list(line.points[-1]) == [plots.WIDTH - plots.RIGHT, plots.TOP]
    assert drawn.alt == "Reward over round; at the end a 1"


def test_a_band_is_thinned_as_the_line_in_it() -> None:
    plot = Plot((0, plots.MOST_POINTS), (0, 1), "round")
    plot.band([(float(i), 0.2, 0.8) for i in range(plots.MOST_POINTS + 1)], "ink")
    plot.line([(float(i), 0.8) for i in range(plots.MOST_POINTS + 1)], "ink")
    marks = plot.chart("Reward", "").marks
    (band,) = (mark for mark in marks if isinstance(mark, plots.Area))
    line = next(mark for mark in marks if isinstance(mark, plots.Polyline) and mark.ink == "ink")
    assert list(band.points[: plots.MOST_POINTS]) == list(line.points)


def test_a_chart_of_nothing_says_so_and_values_that_are_none_are_left_out() -> None:
    assert chart("Reward", "round", [Series("a", 0, [(1.0, math.nan)])]).empty == "nothing was measured yet"
    (line,) = lines_of(chart("Reward", "round", [Series("a", 9, [(1.0, 0.5), (2.0, math.inf), (3.0, 0.7)])]))
    assert len(line.points) == 2
    assert (line.ink, bool(line.dashes)) == ("line-1", True)


@pytest.mark.parametrize(
    "name", ["alone", "F-TIS-16-limited", "alone-with-all-of-it", "SmolLM2-MATH-LoRA", "F-TIS-lifted-2-horizontal"]
)
def test_a_line_s_name_is_within_the_drawing(name: str) -> None:
    """Measured in the letters of the PNG."""
    drawn = chart("Reward", "round", [Series(name, 0, [(0.0, 0.0), (1.0, 1.0)])])
    (words,) = names(drawn)
    assert words.text == name
    letters = FontProperties(family="DejaVu Sans", weight="bold", size=10)
    assert words.x + TextPath((0, 0), words.text, prop=letters).get_extents().x1 <= drawn.width
    assert (drawn.width == plots.WIDTH) == (len(name) < 8)


def of_lines(count: int) -> Chart:
    return chart("Reward", "round", [Series(f"p{i}", i, [(0.0, i), (1.0, i)]) for i in range(count)])


def names(drawn: Chart) -> list[Words]:
    return [mark for mark in drawn.marks if isinstance(mark, Words) and mark.strong]


def test_of_many_lines_none_is_named() -> None:
    many = of_lines(13)
    assert not names(many)
    assert many.alt.endswith("p11 11 and 1 more")


def test_the_names_of_twelve_lines_are_a_letter_s_height_apart_within_the_drawing() -> None:
    heights = sorted(words.y for words in names(of_lines(12)))
    assert len(heights) == 12
    assert min(high - low for low, high in pairwise(heights)) >= 11  # letters are 10 high
    assert heights[0] + 1 >= plots.TOP
    assert heights[-1] <= plots.HEIGHT


def test_a_figure_is_one_svg_and_one_png_with_the_same_words(tmp_path: Path) -> None:
    shown = chart("<b>Reward</b>", "round", [Series("a&b", 0, [(0.0, 0.0), (1.0, 1.0)])])
    panels = [Panel("one", shown), Panel("none", empty("t", "", "nothing"))]
    write_figures(tmp_path, panels)
    assert {path.name for path in tmp_path.iterdir()} == {"one.svg", "one.png"}
    root = ElementTree.fromstring((tmp_path / "one.svg").read_text())
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"<b>Reward</b>", "a&b", "round"} <= set(words)
    first = (tmp_path / "one.png").read_bytes()
    write_figures(tmp_path, panels)
    assert (tmp_path / "one.png").read_bytes() == first


def test_one_far_row_of_differences_does_not_flatten_the_others() -> None:
    arms = ["near", "nearer", "far"]
    means = dict(zip(arms, (-0.05, 0.03, -0.6), strict=True))
    rows = [
        {"arm": arm, "split": "v", "per_seed": {"0": mean}, "mean": mean, "low": mean - 0.02, "high": mean + 0.02}
        for arm, mean in means.items()
    ]
    rows = [{"baseline": "alone", **row} for row in rows]
    drawn = figures.differences("small", rows, arm_styles([*arms, "alone"], ["alone"])).chart
    (number,) = [mark for mark in drawn.marks if isinstance(mark, Words) and mark.text == "−0.60"]
    assert (number.x, number.anchor) == (110.0, "start")  # at the left edge
    alone = figures.differences("small", rows[2:], arm_styles([*arms, "alone"], ["alone"])).chart
    assert not [mark for mark in alone.marks if isinstance(mark, Words) and mark.text == "−0.60"]

    def lengths(chart: Chart) -> list[float]:
        intervals = [m.points for m in chart.marks if isinstance(m, Polyline) and m.width == 2.2]
        return [points[1][0] - points[0][0] for points in intervals]

    usual = 1.12 * 3 * 0.07  # three times as far as the median row, the first
    assert lengths(drawn) == pytest.approx([236 * 0.04 / (2 * usual)] * 2 + [0], abs=0.11)


def test_rows_of_differences_name_the_split_where_there_are_several() -> None:
    styles = arm_styles(["F-TIS", "NoIS", "alone"], ["alone"])

    def rows(*named: tuple[str, str]) -> list[str]:
        values = {"baseline": "alone", "per_seed": {"0": 0.1}, "mean": 0.1, "low": None, "high": None}
        drawn = figures.differences("small", [{**values, "arm": a, "split": s} for a, s in named], styles).chart
        words = [mark.text for mark in drawn.marks if isinstance(mark, Words)]
        return [text for text in words if text in ("F-TIS", "NoIS", "validation", "ood-clock")]

    assert rows(("F-TIS", "validation"), ("NoIS", "validation")) == ["F-TIS", "NoIS"]
    both = rows(("F-TIS", "validation"), ("F-TIS", "ood-clock"))
    assert both == ["F-TIS", "validation", "F-TIS", "ood-clock"]
