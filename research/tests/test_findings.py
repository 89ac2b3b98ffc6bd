"""The pages of the findings hold the tables of data/, can be followed, and fit on a page."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from scene import both_budgets

from ftis.comparison.results import compare
from ftis.comparison.stats import paired_difference
from research.findings.__main__ import FINDINGS, PLACE, Summary, is_shown, main, p_at_most, read, rendered, written

ROOT = FINDINGS.parents[1]
PAGES = [*sorted(FINDINGS.glob("*.md")), ROOT / "research" / "README.md"]
LONGEST = 450
"""Words of prose in a page."""


def table(**changes: Any) -> Summary:
    fields = {"command": "x", "commit": "c", "machine": "m", "seeds": range(5), "columns": ["a", "by"], "rows": []}
    return Summary.model_validate(fields | {"comparisons": 10, "differences": ["by"]} | changes)


def prose(text: str) -> list[str]:
    """The words of a page outside tables, code and the places of tables."""
    lines = PLACE.sub("", text).splitlines()
    return " ".join(line for line in lines if not line.startswith(("|", "    ", "<!--"))).split()


def test_every_page_holds_the_tables_of_its_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().out
    places = [name for page in PAGES for _, name in re.findall(r"(<!-- table: ([\w-]+) -->)", page.read_text("utf-8"))]
    assert sorted(places) == sorted(path.stem for path in FINDINGS.glob("data/*.json"))


def test_every_page_is_short_and_its_links_and_recipes_are_there() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert len(prose(text)) <= LONGEST, page
        for target in re.findall(r"\]\(([^)#\s]+)\)", text):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
        for recipe in re.findall(r"\s((?:research/)?recipes/[\w/-]+\.toml)", text):
            assert (ROOT / recipe).is_file(), f"{page.name}: {recipe}"


def test_a_page_that_differs_is_found_and_mended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(FINDINGS / "data", tmp_path / "data")
    page = tmp_path / "page.md"
    page.write_text("Before.\n<!-- table: demo -->\nold\n<!-- end -->\nAfter.\n", encoding="utf-8")
    assert main(["--check"], tmp_path) == 1
    assert "page.md" in capsys.readouterr().out
    assert main([], tmp_path) == 0
    assert main(["--check"], tmp_path) == 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith("Before.\n")
    assert rendered(read("demo", tmp_path)) in text
    assert text.endswith("<!-- end -->\nAfter.\n")


def test_cells_are_written_as_what_they_are() -> None:
    rows = [["x", 0.05], [None, [-0.0004, [-0.02, 0.02]]], [1200, [0.1, [0.09, 0.11]]], [0.5, [0.1, [0.09, 0.11], 0.9]]]
    lines = rendered(table(rows=rows)).splitlines()[2:6]
    assert lines == [
        "| x | +.050 |",
        "|  | +.000 (−.020 to +.020) |",
        "| 1,200 | **+.100 (+.090 to +.110)** |",
        "| .500 | +.100 (+.090 to +.110) |",
    ]
    assert "**" not in rendered(table(rows=rows, comparisons=0))
    for wrong in ({"rows": [["x"]]}, {"differences": ["no column"]}, {"rows": [["x", [0.1, [0.0, 0.2], 7]]]}):
        with pytest.raises(ValidationError):
            table(**wrong)


@given(st.lists(st.integers(-60, 300), min_size=3, max_size=12))
@settings(max_examples=200, deadline=None)
def test_p_of_a_rounded_interval_is_at_least_the_tests_own(problems: list[int]) -> None:
    found = paired_difference(np.array(problems) / 300, np.zeros(len(problems)))
    if not np.isnan(found.low):
        bound = p_at_most(round(found.mean, 3), round(found.low, 3), round(found.high, 3), found.n)
        assert found.p_value <= bound + 1e-12
        if found.high - found.low > 0.1:  # rounding then hardly matters
            assert bound <= found.p_value * 1.5 + 1e-6


def test_an_experiment_becomes_a_table(tmp_path: Path) -> None:
    results = compare(both_budgets(tmp_path / "runs"))
    (tmp_path / "data").mkdir()
    assert main(["add", str(tmp_path / "runs"), "mine"], tmp_path) == 0
    made = read("mine", tmp_path)
    assert written(made) == (tmp_path / "data" / "mine.json").read_text(encoding="utf-8")
    assert made.comparisons == len(results.comparisons) + len(results.together)
    arms = {row[0]: dict(zip(made.columns, row, strict=True)) for row in made.rows}
    assert list(arms) == ["before training", *results.arms]
    assert arms["F-TIS"]["small"] == pytest.approx(results.accuracy["validation"]["F-TIS"]["small"].final.mean)
    for c in results.together:
        if c.split == "validation":
            cell: Any = arms[c.arm][f"against {c.baseline}"]
            assert cell[0] == pytest.approx(c.mean, abs=5e-5)
            assert is_shown(cell, made) == (c.label != "no difference shown")
    assert json.loads(written(made))["seeds"] == [0, 1, 2, 3, 4]
    for arm, values in made.per_seed.items():
        assert np.mean(values) == pytest.approx(arms[arm]["mean"], abs=1e-4)
    assert made.per_seed.keys() == {*results.arms}
    fields = json.loads(written(made))
    for wrong in ([0.1] * 5, fields["per_seed"]["F-TIS"][:4]):
        with pytest.raises(ValidationError):
            Summary.model_validate(fields | {"per_seed": fields["per_seed"] | {"F-TIS": wrong}})
