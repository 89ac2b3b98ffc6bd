"""What a comparison and a summary say of run directories whose numbers are known."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scene import PROMPTS, ROUNDS, SMALL_FINAL, G, Scene, comparison, cut, final_of, five_seeds, joined, printed, raw

from ftis.lab.reading import EvaluationRow, ReportError, final_accuracy, read_run
from ftis.lab.results import compare
from ftis.lab.summary import summarise


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return five_seeds(tmp_path_factory.mktemp("study"))


@pytest.fixture(scope="module")
def results(study: Path) -> dict[str, Any]:
    return compare(study)


def test_a_final_accuracy_is_the_mean_of_the_last_three_without_the_untrained_model() -> None:
    measured = ((0, 0.1), (5, 0.2), (10, 0.3), (15, 0.7))
    rows = [EvaluationRow(step, "validation", accuracy, 20) for step, accuracy in measured]
    assert final_accuracy(rows) == pytest.approx(0.4)
    assert final_accuracy(rows[:2]) == 0.2
    assert final_accuracy(rows[:1]) == 0.1


def test_means_and_intervals_over_seeds(results: dict[str, Any]) -> None:
    final = results["accuracy"]["validation"]["F-TIS"]["small"]["final"]
    assert final["per_seed"] == pytest.approx(dict(zip("01234", SMALL_FINAL["F-TIS"], strict=True)))
    assert final["mean"] == pytest.approx(0.6)
    # s² = (0 + 9 + 9 + 4 + 4)·10⁻⁴ / 4 = 6.5·10⁻⁴; t(4) = 2.7764
    half = 2.7764 * math.sqrt(6.5e-4 / 5)
    assert (final["low"], final["high"]) == pytest.approx((0.6 - half, 0.6 + half), abs=1e-6)
    start = results["accuracy"]["validation"]["F-TIS"]["small"]["start"]
    assert (start["mean"], start["low"], start["high"]) == (0.1, 0.1, 0.1)
    assert results["accuracy"]["ood-clock"]["alone"]["large"]["final"]["mean"] == pytest.approx(0.52)


def test_arms_are_compared_seed_for_seed_with_the_baseline(results: dict[str, Any]) -> None:
    small = comparison(results, "small")
    # d = 0.10, 0.11, 0.09, 0.11, 0.09: mean 0.1, s = 0.01, t = 0.1·√5 / 0.01 = 22.36, p(4) = 2.36·10⁻⁵
    assert small["per_seed"] == pytest.approx({"0": 0.10, "1": 0.11, "2": 0.09, "3": 0.11, "4": 0.09})
    assert small["mean"] == pytest.approx(0.1)
    half = 2.7764 * 0.01 / math.sqrt(5)
    assert (small["low"], small["high"]) == pytest.approx((0.1 - half, 0.1 + half), abs=1e-6)
    assert small["p_value"] == pytest.approx(2.36e-5, rel=0.01)
    assert small["bootstrap_p"] == 2 / 2**5
    assert small["label"] == "better"
    assert small["text"].startswith("better than alone by +0.100")
    assert 0 < small["smallest_detectable"] < 0.03

    large = comparison(results, "large")  # d = 0.02, −0.02, 0.01, −0.01, 0
    assert large["mean"] == pytest.approx(0.0)
    assert large["p_value"] == pytest.approx(1.0)
    assert large["label"] == "no difference shown"


def test_p_values_are_corrected_for_all_comparisons_on_a_split(results: dict[str, Any]) -> None:
    assert len(results["comparisons"]) == 4  # two peers, one arm beside the baseline, two splits
    for split in ("validation", "ood-clock"):
        small = comparison(results, "small", split=split)
        assert small["p_adjusted"] == pytest.approx(2 * small["p_value"])
        assert comparison(results, "large", split=split)["p_adjusted"] == pytest.approx(1.0)


def test_final_models_are_compared_problem_by_problem(results: dict[str, Any]) -> None:
    rows = comparison(results, "small")["mcnemar"]
    assert [row["seed"] for row in rows] == [0, 1, 2, 3, 4]
    for row in rows:
        assert (row["problems"], row["only_arm"], row["only_baseline"]) == (20, 10, 1)
        assert row["p_value"] == pytest.approx(2 * (1 + 11) / 2**11)
        assert row["p_adjusted"] == pytest.approx(5 * 2 * 12 / 2**11)


def test_budgets_on_both_axes(results: dict[str, Any]) -> None:
    spent = results["budget"]["F-TIS"]["small"]
    assert spent["rounds"] == ROUNDS
    assert spent["rollouts_trained"] == ROUNDS * PROMPTS * G
    assert spent["rollouts_generated"] == ROUNDS * PROMPTS * G / 2
    assert spent["rollouts_with_gradient"] == ROUNDS * (PROMPTS * G - 2 * 2)  # of each source one is 0, one dropped
    assert spent["tokens_trained"] == ROUNDS * PROMPTS * G * 5
    assert spent["tokens_generated"] == 100 * ROUNDS
    assert (spent["bytes_sent"], spent["bytes_received"]) == (1000 * ROUNDS, 1000 * ROUNDS)
    assert spent["seconds"] == 1.5 * ROUNDS
    alone = results["budget"]["alone"]["small"]
    assert alone["rollouts_trained"] == alone["rollouts_generated"] == ROUNDS * PROMPTS * G
    assert (alone["bytes_sent"], alone["bytes_received"]) == (0, 0)


def test_without_recorded_rollouts_budgets_come_from_the_metrics(tmp_path: Path) -> None:
    scene = Scene(tmp_path, seeds=(0,))
    scene.write()
    shutil.rmtree(tmp_path / "scene-seed0" / "F-TIS" / "small" / "rollouts")
    shutil.rmtree(tmp_path / "scene-seed0" / "alone" / "small" / "rollouts")
    budget = compare(tmp_path)["budget"]
    assert budget["F-TIS"]["small"]["rollouts_trained"] == ROUNDS * PROMPTS * G
    assert budget["F-TIS"]["small"]["rollouts_with_gradient"] == ROUNDS * 2 * (PROMPTS * G // 2 - 3)
    assert budget["F-TIS"]["small"]["tokens_trained"] is None
    assert budget["alone"]["small"]["rollouts_with_gradient"] is None


@pytest.mark.parametrize(
    ("arm", "words"),
    [
        ({"collaborate": False}, "equal in rollouts trained on per update (12); a peer of x generates twice as many"),
        ({"collaborate": False, "budget": "generated"}, "equal in rollouts generated per peer and round (6)"),
        ({}, "equal in both: a peer trains on 12 rollouts a round and generates 6."),
        ({"set": {"training.mode": "horizontal"}}, "equal in both"),
        ({"set": {"sampling.num_generations": 6}}, "equal in neither: a peer of x trains on 3 times as many"),
        (
            {"set": {"training.rounds": 9}},
            "equal in both: a peer trains on 12 rollouts a round and generates 6; 9 rounds",
        ),
    ],
)
def test_what_an_arm_is_matched_on_is_said(tmp_path: Path, arm: dict[str, Any], words: str) -> None:
    arms = ({"name": "together"}, {"name": "x", **arm})
    scene = Scene(tmp_path, arms=arms, seeds=(0,), ood=False, settings={"experiment": {"baseline": "together"}})
    (matched,) = compare(scene.write())["matched"]
    assert matched["arms"] == ["x"]
    assert matched["text"].startswith("x and together are ")
    assert words in matched["text"]


def test_results_json_holds_what_compare_returns_and_no_nan(study: Path, results: dict[str, Any]) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    assert json.loads((study / "results.json").read_text(), parse_constant=refuse) == results


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda run: shutil.rmtree(run / "F-TIS" / "large"), "F-TIS, large: not started"),
        (lambda run: cut(run / "F-TIS" / "large" / "metrics.jsonl", 2), "F-TIS, large: 2 of 4 rounds"),
        (
            lambda run: cut(run / "alone" / "small" / "evaluations.jsonl", 6),
            "alone, small: not evaluated after its last round",
        ),
    ],
)
def test_incomplete_seeds_are_left_out_and_named(tmp_path: Path, damage: Callable[[Path], None], reason: str) -> None:
    scene = Scene(tmp_path, final_of, seeds=(0, 1, 2))
    scene.write()
    damage(tmp_path / "scene-seed1")
    results = compare(tmp_path)
    assert results["seeds"] == [0, 2]
    assert results["left_out"] == {"1": reason}
    assert list(comparison(results, "small")["per_seed"]) == ["0", "2"]
    assert list(results["curves"]["validation"]["alone"]["small"][0]["per_seed"]) == ["0", "2"]
    assert f"seed 1 is left out: {reason}" in printed(results)


def test_an_arm_that_was_not_run_is_named_and_leaves_no_seed_out(tmp_path: Path) -> None:
    arms = ({"name": "alone", "collaborate": False}, {"name": "NoIS"}, {"name": "F-TIS"})
    scene = Scene(tmp_path, arms=arms, seeds=(0, 1), ood=False)
    scene.write()
    for seed in (0, 1):
        shutil.rmtree(tmp_path / f"scene-seed{seed}" / "NoIS")
    results = compare(tmp_path)
    assert (results["arms"], results["not_run"], results["seeds"]) == (["alone", "F-TIS"], ["NoIS"], [0, 1])


def test_peers_that_start_from_different_models_are_reported(tmp_path: Path) -> None:
    scene = Scene(tmp_path, seeds=(0, 1), ood=False)
    scene.write()
    path = tmp_path / "scene-seed1" / "F-TIS" / "large" / "evaluations.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0]["accuracy"] = 0.4
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (note,) = compare(tmp_path)["notes"]
    assert note.startswith(
        "seed 1: large did not start from one and the same starter:large in all arms (0.100 in alone"
    )


def test_what_cannot_be_reported_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="give the directory that ftis train"):
        compare(tmp_path)
    scene = Scene(tmp_path / "x", seeds=(0,))
    scene.write()
    path = tmp_path / "x" / "scene-seed0" / "F-TIS" / "small" / "rollouts" / "round-000001.parquet"
    path.write_bytes(b"PAR1 no")
    with pytest.raises(ReportError, match=r"round-000001\.parquet cannot be read"):
        compare(tmp_path / "x")
    for arm in ("alone", "F-TIS"):
        shutil.rmtree(tmp_path / "x" / "scene-seed0" / arm)
    with pytest.raises(ReportError, match="nothing was recorded yet"):
        compare(tmp_path / "x")
    (tmp_path / "x" / "experiment.json").write_text("{")
    with pytest.raises(ReportError, match="is damaged"):
        compare(tmp_path / "x")


def test_the_terminal_tables_fit_100_columns(results: dict[str, Any], tmp_path: Path) -> None:
    assert max(map(len, raw(results, 120).splitlines())) <= 100
    text = printed(results)
    assert "F-TIS, validation: better than alone by +0.100" in text
    assert (
        "Of 2 comparisons with alone on validation, over 5 seeds: 1 better, 0 worse, 1 with no difference shown" in text
    )
    assert "F-TIS and alone are equal in rollouts trained on per update (12)" in text

    name = "n" * 64
    arms = ({"name": "alone", "collaborate": False}, {"name": "a" * 64})
    long = compare(Scene(tmp_path, peers=(name, "m" * 64), arms=arms, seeds=(0, 1), ood=False).write())
    assert max(map(len, raw(long, 120).splitlines())) <= 100
    assert max(map(len, raw(long, 80).splitlines())) <= 80


def test_an_unfinished_run_on_one_machine_is_no_joined_one(tmp_path: Path) -> None:
    run = joined(tmp_path, Scene(tmp_path, arms=({"name": "F-TIS"},), ood=False))
    (run / "F-TIS" / "small" / "events.jsonl").unlink()
    assert compare(run)["left_out"] == {"0": "F-TIS, large: not started"}


def test_a_summary_is_about_the_peers_that_are_here(tmp_path: Path) -> None:
    run = joined(tmp_path, Scene(tmp_path, arms=({"name": "F-TIS"},)))
    summary = summarise(run)
    assert json.loads((run / "summary.json").read_text()) == summary
    assert (summary["name"], summary["seed"], list(summary["arms"]["F-TIS"])) == ("scene", 0, ["small"])
    small = summary["arms"]["F-TIS"]["small"]
    assert (small["start"], small["last"], small["problems"]) == (0.1, 0.53, 20)
    assert (small["rounds"], small["bytes_sent"], small["bytes_received"]) == (ROUNDS, 1000 * ROUNDS, 1000 * ROUNDS)
    assert small["ood"]["ood-clock"]["final"] == pytest.approx(0.5)


def test_a_directory_without_a_run_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"holds no run \(no recipe\.json\): give the directory"):
        read_run(tmp_path)
