"""The page's tables as Markdown: every table is there, and no text turns into markup."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from scene import ROUNDS, Scene, both_budgets, without_drawing

from ftis.view.layout import Section
from ftis.view.markdown import escaped, of_table, tables_of
from ftis.view.report import write_page
from ftis.view.views import ArmLabel, Cell, RowGroup, Table

ROWS = [[Cell(arm=ArmLabel("F-TIS", "blue")), Cell("+0.050", "[+0.040, +0.060]", strong=True), Cell()]]


def test_a_table_has_its_caption_above_and_its_intervals_in_the_cells() -> None:
    assert of_table(Table("Means", ["Arm", "Against alone", "p"], [RowGroup(None, ROWS)])).splitlines() == [
        "Means",
        "",
        "| Arm | Against alone | p |",
        "| --- | --- | --- |",
        "| F-TIS | **+0.050 [+0.040, +0.060]** |  |",
    ]


def test_the_title_of_a_group_is_the_first_cell_of_each_of_its_rows() -> None:
    groups = [RowGroup("small", ROWS), RowGroup(None, ROWS)]
    lines = of_table(Table("Means", ["Arm", "Against alone", "p"], groups)).splitlines()
    assert lines[2:4] == ["|  | Arm | Against alone | p |", "| --- | --- | --- | --- |"]
    assert [line.split(" | ")[0] for line in lines[4:]] == ["| small", "| "]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a|b", r"a\|b"),
        ("*bold* _slanted_ `code`", r"\*bold\* \_slanted\_ \`code\`"),
        ("<script></b><!--", r"\<script>\</b>\<!--"),
        ("<0.001", "<0.001"),
        ("~~~ &lt; $x$", r"\~\~\~ \&lt; \$x\$"),
        ("![x](http://y)", r"!\[x\](http://y)"),
        ("# one\n| two |", r"\# one \| two \|"),
        ("\\|", r"\\\|"),
        ("\u202eright to left", "⟨U+202E⟩right to left"),
    ],
)
def test_text_is_shown_as_it_is(text: str, shown: str) -> None:
    assert escaped(text) == shown
    table = Table(text, [text], [RowGroup(text, [[Cell(text, claimed=True)]])])
    assert of_table(table).splitlines() == [
        shown,
        "",
        f"|  | {shown} |",
        "| --- | --- |",
        f"| {shown} | “{shown}” |",
    ]


def test_sections_without_tables_are_left_out() -> None:
    table = Table("Means", ["Arm", "a", "b"], [RowGroup(None, ROWS)])
    sections = [Section("curves", "Learning curves", ["none"]), Section("accuracy", "Accuracy", [("in here", [table])])]
    assert tables_of("A *title*", sections) == f"# A \\*title\\*\n\n## Accuracy\n\n{of_table(table)}\n"


@pytest.fixture(autouse=True)
def no_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    without_drawing(monkeypatch)


def tables_of_scene(directory: Path) -> list[str]:
    return write_page(directory).with_name("tables.md").read_text(encoding="utf-8").splitlines()


def test_an_experiment_s_tables_lie_beside_its_page(tmp_path: Path) -> None:
    lines = tables_of_scene(both_budgets(tmp_path))
    means = lines.index("Mean over 2 peers on validation")
    assert lines[means + 2 : means + 8] == [
        "| Arm | Start | small | large | Mean | Against alone | Against alone-part |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| alone | 0.100 | 0.500 | 0.720 | 0.610 [0.598, 0.622] |  |  |",
        "| alone-part | 0.100 | 0.300 | 0.300 | 0.300 [0.285, 0.315] |  |  |",
        "| F-TIS | 0.100 | 0.600 | 0.720 | 0.660 [0.651, 0.669] | **+0.050 [+0.042, +0.058]** |"
        " **+0.360 [+0.345, +0.375]** |",
        "",
    ]
    captions = re.findall("<caption>(.*?)</caption>", (tmp_path / "report.html").read_text(encoding="utf-8"))
    assert len(captions) == len(set(captions)) > 0
    assert [line for line in lines if line in captions] == captions


@pytest.mark.parametrize(("peers", "columns"), [("abcdefgh", [*"abcdefgh"]), ("abcdefghi", [])])
def test_of_many_peers_the_means_table_has_no_columns(tmp_path: Path, peers: str, columns: list[str]) -> None:
    arms = ({"name": "alone", "collaborate": False}, {"name": "F-TIS"})
    settings = {"training": {"rounds": ROUNDS, "prompts_per_round": len(peers)}}
    lines = tables_of_scene(
        Scene(tmp_path, peers=tuple(peers), arms=arms, seeds=(0, 1), ood=False, settings=settings).write()
    )
    head = lines[lines.index(f"Mean over {len(peers)} peers on validation") + 2]
    assert head == f"| {' | '.join(['Arm', 'Start', *columns, 'Mean', 'Against alone'])} |"


def test_what_peers_took_from_each_other_is_told_arm_by_arm(tmp_path: Path) -> None:
    arms = (
        {"name": "alone", "collaborate": False},
        {"name": "NoIS", "set": {"objective.name": "NoIS"}},
        {"name": "F-TIS"},
    )
    lines = tables_of_scene(Scene(tmp_path, arms=arms, seeds=(0, 1), ood=False).write())
    told = [line for line in lines if line.endswith("rollouts a round, and their weights; means over rounds and seeds")]
    assert [line.partition(":")[0] for line in told] == ["NoIS", "F-TIS"]


def test_of_one_seed_means_have_no_interval(tmp_path: Path) -> None:
    text = "\n".join(tables_of_scene(Scene(tmp_path, seeds=(0,), ood=False).write()))
    assert "Mean over 2 peers on validation" in text
    assert "nan" not in text
    assert "nan" not in (tmp_path / "results.json").read_text(encoding="utf-8").lower()


def test_where_nothing_is_compared_there_is_no_table_of_means(tmp_path: Path) -> None:
    scene = Scene(tmp_path, arms=(), ood=False)
    lines = tables_of_scene(scene.write_run(tmp_path / "run", scene.recipe(), 3))
    assert "Accuracy on validation, 20 problems" in lines
    assert not [line for line in lines if line.startswith("Mean over")]
