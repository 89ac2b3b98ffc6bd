"""Honest swarms: each testbed really learns from foreign rollouts, and the table counts what runs kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from research.findings.__main__ import read
from research.honest import SMALL, Outcome, cost, main, run

QUICKLY = ("training.prompts_per_round=8", "task.validation_size=4")


QUICK = ("tokenizers", "late")
"""Testbeds whose exchange is not the usual one."""


@pytest.mark.parametrize(
    "testbed", [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in SMALL]
)
def test_peers_of_a_testbed_learn_from_each_other(testbed: str, tmp_path: Path) -> None:
    found = run(testbed, 0, 2, tmp_path, QUICKLY)
    assert (found.accusations, found.alarms, found.texts) == (0, 0, 0)
    assert found.foreign > 0
    assert len(found.accuracies) == (4 if testbed in ("four", "shared") else 2)


def test_the_table_sums_what_was_kept_and_leaves_out_what_was_not_run(tmp_path: Path) -> None:
    findings = tmp_path / "findings"
    (findings / "data").mkdir(parents=True)
    for seed, accusations in enumerate((0, 3)):
        of = Outcome(accusations=accusations, alarms=seed, texts=0, foreign=10 * seed, accuracies={"a": 0.5, "b": 1.0})
        (tmp_path / f"pair.{seed}.json").write_text(of.model_dump_json())
    main(["--to", str(tmp_path), "--seeds", "0", "--write", "abc"], findings)
    table = read("honest", findings)
    assert table.rows == (("`pair`", 2, 3, 1, 0, 5.0, 0.75),)
    assert table.seeds == (0, 1)


def test_the_cost_is_over_seeds_that_were_run_both_ways(tmp_path: Path) -> None:
    def keep(name: str, small: float, large: float) -> None:
        of = Outcome(accusations=0, alarms=0, texts=0, foreign=1, accuracies={"small": small, "large": large})
        (tmp_path / name).write_text(of.model_dump_json())

    for seed, (small, large) in enumerate(((0.8, 0.6), (0.8, 0.5), (0.0, 0.0))):
        keep(f"pair.{seed}.json", small, large)
    for seed, (small, large) in enumerate(((0.8, 0.7), (0.9, 0.6))):
        keep(f"pair.before.{seed}.json", small, large)
    (row,) = cost(tmp_path, "abc").rows
    assert row[:3] == ("`pair`", 2, 0.75)
    assert [cell[0] for cell in row[3:] if isinstance(cell, tuple)] == pytest.approx([-0.075, -0.05])
