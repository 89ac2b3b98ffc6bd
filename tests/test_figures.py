"""What figures share: colours that can be told apart, and labels that do not overlap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations, pairwise

from ftis.lab import drawing
from ftis.lab.drawing import arm_styles, in_short, spread_out


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
    assert styles["alone"].colour == drawing.INK
    assert len({(style.colour, str(style.line)) for style in styles.values()}) == 23
    for colour in (*drawing.COLOURS, *drawing.BASELINE_COLOURS, drawing.THRESHOLD):
        assert 1.05 / (luminance(colour) + 0.05) >= 4.5, colour


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
        for colours in ((*drawing.COLOURS[:4], drawing.INK), (*drawing.COLOURS[:2], *drawing.BASELINE_COLOURS)):
            seen = [
                lab([sum(w * p for w, p in zip(row, linear(colour), strict=True)) for row in matrix])
                for colour in colours
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
