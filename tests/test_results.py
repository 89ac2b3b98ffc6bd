"""What a comparison and a summary say of run directories whose numbers are known."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from scene import (
    BOTH_BUDGETS,
    PART_FINAL,
    PROMPTS,
    ROUNDS,
    SMALL_FINAL,
    G,
    Scene,
    both_budgets,
    comparison,
    cut,
    final_of,
    five_seeds,
    joined,
    printed,
    raw,
    without_waiting,
)

from ftis.comparison.results import compare, headlines
from ftis.comparison.summary import summarise
from ftis.records.reading import EvaluationRow, ReportError, final_accuracy, read_run
from ftis.view.figures import accuracy_limits, plot_learning_curves
from ftis.view.report import write_page
from ftis.view.tables import closing_table, print_comparison, whereabouts


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return five_seeds(tmp_path_factory.mktemp("study"))


@pytest.fixture(scope="module")
def results(study: Path) -> dict[str, Any]:
    return compare(study)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of a study with two baselines."""
    return compare(both_budgets(tmp_path_factory.mktemp("two")))


def table(summary: dict[str, Any]) -> str:
    """A run's closing table as text."""
    out = StringIO()
    Console(file=out, width=200).print(closing_table(summary))
    return out.getvalue()


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


def test_the_mean_over_peers_is_compared_seed_for_seed_in_a_family_of_its_own(two: dict[str, Any]) -> None:
    together = [c for c in two["together"] if c["split"] == "validation"]
    assert [(c["arm"], c["baseline"]) for c in together] == [("F-TIS", "alone"), ("F-TIS", "alone-part")]
    for c in together:
        of_peers = [
            other["per_seed"]
            for other in two["comparisons"]
            if (other["split"], other["arm"], other["baseline"]) == (c["split"], c["arm"], c["baseline"])
        ]
        assert len(of_peers) == 2
        for seed, difference in c["per_seed"].items():
            assert difference == pytest.approx(sum(of_peer[seed] for of_peer in of_peers) / 2)
    first, second = sorted(c["p_value"] for c in together)
    assert sorted(c["p_adjusted"] for c in together) == pytest.approx(sorted([2 * first, max(2 * first, second)]))


def test_arms_are_compared_seed_for_seed_with_the_baseline(results: dict[str, Any]) -> None:
    small = comparison(results, "small")
    # d = 0.10, 0.11, 0.09, 0.11, 0.09: mean 0.1, s = 0.01, t = 0.1·√5 / 0.01 = 22.36, p(4) = 2.36·10⁻⁵
    assert small["per_seed"] == pytest.approx({"0": 0.10, "1": 0.11, "2": 0.09, "3": 0.11, "4": 0.09})
    assert small["mean"] == pytest.approx(0.1)
    half = 2.7764 * 0.01 / math.sqrt(5)
    assert (small["low"], small["high"]) == pytest.approx((0.1 - half, 0.1 + half), abs=1e-6)
    assert small["p_value"] == pytest.approx(2.36e-5, rel=0.01)
    assert small["flips_p"] == 2 / 2**5
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
    alone = results["budget"]["alone"]["small"]
    assert alone["rollouts_trained"] == alone["rollouts_generated"] == ROUNDS * PROMPTS * G
    assert (alone["bytes_sent"], alone["bytes_received"]) == (0, 0)


def test_seconds_are_a_peer_s_own_work(two: dict[str, Any]) -> None:
    # s = 0.5 to sample a share, t = 0.375 to train on it, 0.125 to exchange it, two peers, four rounds.
    own = {arm: by_peer["small"] for arm, by_peer in two["budget"].items()}
    assert own["alone"]["seconds"] == ROUNDS * 2 * (0.5 + 0.375)
    assert own["alone-part"]["seconds"] == ROUNDS * (0.5 + 0.375)
    assert own["F-TIS"]["seconds"] == ROUNDS * (0.5 + 0.125 + 2 * 0.375)
    parts = [own["F-TIS"][f"seconds_{part}"] for part in ("sampling", "exchange", "training", "waited")]
    assert parts == [ROUNDS * 0.5, ROUNDS * 0.125, ROUNDS * 0.75, ROUNDS * 3.0]
    assert own["alone"]["seconds_waited"] == 0


def test_the_own_seconds_of_older_records_are_unknown(tmp_path: Path) -> None:
    scene = Scene(tmp_path, seeds=(0, 1), ood=False)
    scene.write()
    run = tmp_path / "scene-seed1"
    without_waiting(run / "F-TIS" / "small" / "metrics.jsonl")
    results = compare(tmp_path)
    small, large = results["budget"]["F-TIS"]["small"], results["budget"]["F-TIS"]["large"]
    assert {small[key] for key in small if key.startswith("seconds")} == {None}
    assert large["seconds"] == ROUNDS * (0.5 + 0.125 + 2 * 0.375)
    (note,) = results["notes"]
    assert note.startswith("own seconds are unknown")
    point = results["curves"]["validation"]["F-TIS"]["small"][-1]
    assert (point["seconds"], point["tokens"]["mean"]) == (None, 100 * ROUNDS)
    summary = summarise(run)
    peers = summary["arms"]["F-TIS"]
    assert (peers["small"]["seconds"], peers["small"]["seconds_waited"]) == (None, None)
    assert (peers["large"]["seconds"], peers["large"]["seconds_waited"]) == (large["seconds"], ROUNDS * 3.0)
    assert "–" in table(summary)
    assert "5.5" in table(summary)


def test_the_curve_of_the_mean_is_the_mean_over_peers_seed_by_seed(two: dict[str, Any]) -> None:
    of_peers = two["curves"]["validation"]["F-TIS"]
    mean = two["curves_of_mean"]["validation"]["F-TIS"]
    assert [point["step"] for point in mean] == [0, 1, 2, 3, 4]
    for point, small, large in zip(mean, of_peers["small"], of_peers["large"], strict=True):
        for seed, value in point["per_seed"].items():
            assert value == pytest.approx((small["per_seed"][seed] + large["per_seed"][seed]) / 2)
        assert point["mean"] == pytest.approx((small["mean"] + large["mean"]) / 2)
        assert point["tokens"]["mean"] == pytest.approx((small["tokens"]["mean"] + large["tokens"]["mean"]) / 2)


def test_a_step_that_a_peer_was_not_evaluated_after_is_not_of_the_mean(tmp_path: Path) -> None:
    directory = Scene(tmp_path, seeds=(0, 1), ood=False).write()
    path = directory / "scene-seed1" / "F-TIS" / "large" / "evaluations.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows if row["step"] != 2))
    mean = {point["step"]: point for point in compare(directory)["curves_of_mean"]["validation"]["F-TIS"]}
    assert list(mean[1]["per_seed"]) == ["0", "1"]
    assert list(mean[2]["per_seed"]) == ["0"]


def test_curves_tell_what_the_peer_had_spent_itself(two: dict[str, Any]) -> None:
    curves = {arm: by_peer["large"] for arm, by_peer in two["curves"]["validation"].items()}
    assert [point["step"] for point in curves["F-TIS"]] == [0, 1, 2, 3, 4]
    tokens = {arm: [point["tokens"]["mean"] for point in points] for arm, points in curves.items()}
    assert tokens == {
        "alone": [0, 200, 400, 600, 800],
        "alone-part": [0, 100, 200, 300, 400],
        "F-TIS": [0, 100, 200, 300, 400],
    }
    seconds = {arm: [point["seconds"]["mean"] for point in points] for arm, points in curves.items()}
    assert seconds == {
        "alone": [0, 1.75, 3.5, 5.25, 7.0],
        "alone-part": [0, 0.875, 1.75, 2.625, 3.5],
        "F-TIS": [0, 1.375, 2.75, 4.125, 5.5],
    }
    assert curves["alone"][1]["tokens"]["per_seed"] == dict.fromkeys("01234", 200)


def test_what_was_spent_is_a_mean_over_seeds_and_unknown_where_a_round_is_not_recorded(tmp_path: Path) -> None:
    Scene(tmp_path, seeds=(0, 1), ood=False).write()
    lines = tmp_path / "scene-seed1" / "F-TIS" / "small" / "metrics.jsonl"
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    rows[1] |= {"tokens_sampled": 260, "time/sample": 1.5}
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    points = compare(tmp_path)["curves"]["validation"]["F-TIS"]["small"]
    assert points[2]["tokens"] == {"mean": 230, "per_seed": {"0": 200, "1": 260}}
    assert points[2]["seconds"] == {"mean": 3.25, "per_seed": {"0": 2.75, "1": 3.75}}
    # A peer that came late has no record of the rounds before; what it spent then is nothing.
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows[2:]))
    peer = read_run(tmp_path / "scene-seed1").peers["F-TIS", "small"]
    assert [peer.tokens_after(step) for step in range(5)] == [0, None, None, 300, 400]
    assert [peer.seconds_after(step) for step in range(5)] == [0, None, None, 1.375, 2.75]


def test_an_arm_is_compared_with_every_baseline(two: dict[str, Any]) -> None:
    assert two["baselines"] == ["alone", "alone-part"]
    assert len(two["comparisons"]) == 2 * 2 * 2  # splits, baselines, peers; F-TIS is the only arm beside them
    assert {c["arm"] for c in two["comparisons"]} == {"F-TIS"}
    trained, generated = (comparison(two, "small", baseline=baseline) for baseline in two["baselines"])
    assert trained["mean"] == pytest.approx(0.1)
    assert trained["equal"] == "equal in rollouts trained on"
    differences = [t - c for t, c in zip(SMALL_FINAL["F-TIS"], PART_FINAL, strict=True)]
    assert generated["per_seed"] == pytest.approx(dict(zip("01234", differences, strict=True)))
    assert generated["mean"] == pytest.approx(0.3)
    assert generated["equal"] == "equal in rollouts a peer samples itself"
    assert generated["text"].startswith("better than alone-part by +0.300")
    # Holm over the four comparisons of the split: p_(1) · 4, p_(2) · 3, …, each at least the one before.
    compared = sorted((c for c in two["comparisons"] if c["split"] == "validation"), key=lambda c: c["p_value"])
    adjusted = [min(1.0, (4 - i) * c["p_value"]) for i, c in enumerate(compared)]
    assert [c["p_adjusted"] for c in compared] == pytest.approx([max(adjusted[: i + 1]) for i in range(4)])
    assert [(m["baseline"], m["arms"], m["equal"]) for m in two["matched"]] == [
        ("alone", ["F-TIS"], "equal in rollouts trained on"),
        ("alone-part", ["F-TIS"], "equal in rollouts a peer samples itself"),
    ]
    assert headlines(two) == [
        "The mean over peers against alone on validation (equal in rollouts trained on), over 5 seeds: 1 better, 0 "
        "worse, 0 with no difference shown. Peer by peer: 1 better, 0 worse, 1 with no difference shown.",
        "The mean over peers against alone-part on validation (equal in rollouts a peer samples itself), over 5 seeds: "
        "1 better, 0 worse, 0 with no difference shown. Peer by peer: 2 better, 0 worse, 0 with no difference shown.",
    ]
    text = printed(two)
    assert "against alone-part, equal in rollouts a peer samples itself F-TIS, validation: better than" in text
    assert max(map(len, raw(two, 120).splitlines())) <= 100


def test_a_baseline_that_was_not_run_is_compared_with_nothing(tmp_path: Path) -> None:
    settings = {"experiment": {"baselines": ["alone", "alone-part"]}}
    Scene(tmp_path, arms=BOTH_BUDGETS, seeds=(0, 1), ood=False, settings=settings).write()
    for seed in (0, 1):
        shutil.rmtree(tmp_path / f"scene-seed{seed}" / "alone-part")
    results = compare(tmp_path)
    assert (results["baselines"], results["not_run"]) == (["alone"], ["alone-part"])
    assert {c["baseline"] for c in results["comparisons"]} == {"alone"}
    for seed in (0, 1):
        shutil.rmtree(tmp_path / f"scene-seed{seed}" / "F-TIS")
    assert headlines(compare(tmp_path)) == ["Nothing is compared: alone is the only arm."]


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
    ("arm", "words", "equal"),
    [
        (
            {"collaborate": False},
            "equal in rollouts trained on per update (12); a peer of x generates twice as many",
            "equal in rollouts trained on",
        ),
        (
            {"collaborate": False, "budget": "generated"},
            "equal in rollouts generated per peer and round (6)",
            "equal in rollouts a peer samples itself",
        ),
        (
            {},
            "equal in both: a peer trains on 12 rollouts a round and generates 6.",
            "equal in rollouts trained on and in rollouts a peer samples itself",
        ),
        (
            {"set": {"training.mode": "horizontal"}},
            "equal in both",
            "equal in rollouts trained on and in rollouts a peer samples itself",
        ),
        (
            {"set": {"sampling.num_generations": 6}},
            "equal in neither: a peer of x trains on 3 times as many",
            "equal in neither budget",
        ),
        (
            {"set": {"training.rounds": 9}},
            "equal in both: a peer trains on 12 rollouts a round and generates 6; 9 rounds",
            "equal in rollouts trained on and in rollouts a peer samples itself in a round, not in rounds",
        ),
    ],
)
def test_what_an_arm_is_matched_on_is_said(tmp_path: Path, arm: dict[str, Any], words: str, equal: str) -> None:
    arms = ({"name": "together"}, {"name": "x", **arm})
    scene = Scene(tmp_path, arms=arms, seeds=(0,), ood=False, settings={"experiment": {"baselines": ["together"]}})
    (matched,) = compare(scene.write())["matched"]
    assert (matched["baseline"], matched["equal"]) == ("together", equal)
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


def without_round(run: Path, peer: str, step: int) -> None:
    """As if the peer had been away in that round: it joined again at a later one."""
    path = run / "F-TIS" / peer / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(line for line in lines if json.loads(line)["step"] != step), encoding="utf-8")


def test_a_peer_that_was_away_for_a_round_finishes_with_the_last(tmp_path: Path) -> None:
    Scene(tmp_path, seeds=(0, 1), ood=False).write()
    run = tmp_path / "scene-seed0"
    without_round(run, "small", 2)
    results = compare(tmp_path)
    assert (results["seeds"], results["left_out"]) == ([0, 1], {})
    assert f"checkpoint-{ROUNDS};" in whereabouts(run, summarise(run))


def test_one_peer_in_an_arm_that_collaborates_trains_on_its_own(tmp_path: Path) -> None:
    Scene(tmp_path, peers=("small",), arms=({"name": "alone", "collaborate": False}, {"name": "F-TIS"})).write()
    budget = compare(tmp_path)["budget"]
    assert budget["F-TIS"]["small"]["rollouts_trained"] == budget["alone"]["small"]["rollouts_trained"] > 0


def test_groups_that_took_others_places_are_of_the_arms_own_size(tmp_path: Path) -> None:
    filled = {"name": "filled", "set": {"training.resample": "fill", "sampling.num_generations": 3 * G}}
    Scene(tmp_path, seeds=(0,), ood=False, arms=({"name": "alone", "collaborate": False}, filled)).write()
    path = tmp_path / "scene-seed0" / "filled" / "small" / "metrics.jsonl"
    rows = [json.loads(line) | {"resample/groups": 7} for line in path.read_text(encoding="utf-8").splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (tmp_path / "scene-seed0" / "filled" / "large" / "metrics.jsonl").write_text(
        path.read_text(encoding="utf-8").replace("peer/small", "peer/x"), encoding="utf-8"
    )
    budget = compare(tmp_path)["budget"]["filled"]["small"]
    assert budget["rollouts_generated"] == ROUNDS * 7 * 3 * G


@pytest.mark.parametrize("level", [3.0, -2.0, 1.2, -0.4])
def test_rewards_of_any_size_have_pages_and_pictures(level: float, tmp_path: Path) -> None:
    final = {"alone": level, "F-TIS": level + 0.5}
    directory = Scene(tmp_path, lambda arm, peer, seed, split: final[arm], seeds=(0, 1)).write()
    assert f"{level + 0.5:.3f}".replace("-", "−") in write_page(directory).read_text(encoding="utf-8").replace("-", "−")
    assert plot_learning_curves(tmp_path / "scene-seed0").exists()


@pytest.mark.parametrize(
    ("values", "limits"),
    [
        ([0.0, 1.0], (-0.02, 1.02)),
        ([0.4, 0.6], (0.376, 0.624)),
        ([-1.0, 0.0], (-1.12, 0.12)),
        ([0.0, 10.0], (-0.02, 11.2)),
        ([3.0, 3.0], (2.98, 3.02)),
    ],
)
def test_an_axis_of_shares_ends_at_one(values: list[float], limits: tuple[float, float]) -> None:
    points = [[{"per_seed": {"0": value}}] for value in values]
    assert accuracy_limits(points) == pytest.approx(limits)


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


def rewritten(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the recipe of an experiment and of its runs."""
    for path in (directory / "experiment.json", *directory.glob("*/recipe.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        change(document.get("recipe", document))
        path.write_text(json.dumps(document), encoding="utf-8")


def test_arms_with_another_reward_are_not_compared_without_a_word(tmp_path: Path) -> None:
    directory = Scene(tmp_path, seeds=(0, 1), ood=False).write()

    def own_reward(recipe: dict[str, Any]) -> None:
        recipe["arms"][-1]["set"] = {"reward": {"answer": "exact"}}

    assert not compare(directory)["notes"]
    rewritten(directory, own_reward)
    results = compare(directory)
    *others, last = results["arms"]
    assert results["notes"] == [
        f"arms differ in [reward] ({', '.join(others)} | {last}): an accuracy in one group is not what it is in another"
    ]


@pytest.mark.parametrize(
    ("section", "settings"), [("prompt", {"system_prompt": "Think."}), ("sampling", {"max_completion_length": 7})]
)
def test_arms_that_ask_otherwise_start_otherwise_from_one_model(
    section: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    directory = Scene(tmp_path, seeds=(0,), ood=False).write()

    def ask_otherwise(recipe: dict[str, Any]) -> None:
        recipe["arms"][-1]["set"] = {f"{section}.{key}": value for key, value in settings.items()}

    rewritten(directory, ask_otherwise)
    last = compare(directory)["arms"][-1]
    for path in directory.glob(f"*/{last}/*/evaluations.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows[0]["accuracy"] += 0.3
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (note,) = compare(directory)["notes"]
    assert note.startswith(f"arms differ in [{section}]")


@pytest.mark.parametrize("reward", [{"format_weight": 0.2}, {"function": "my.rewards.length"}])
def test_a_mean_reward_is_not_called_pass_at_1(reward: dict[str, Any], tmp_path: Path) -> None:
    directory = Scene(tmp_path, seeds=(0, 1), ood=False).write()
    assert compare(directory)["accuracy_is"] == "greedy pass@1"
    rewritten(directory, lambda recipe: recipe["reward"].update(reward))
    results = compare(directory)
    assert results["accuracy_is"] == "mean reward, greedy"
    (note,) = results["notes"]
    assert note.endswith("accuracies are the mean reward of greedy completions")
    page = write_page(directory).read_text(encoding="utf-8")
    assert "validation, mean reward, greedy" in page
    assert "Mean reward, greedy, on held-out problems" in page
    assert "pass@1" not in page.lower()
    out = StringIO()
    print_comparison(results, Console(file=out, width=200))
    assert "validation: mean reward, greedy, 2 seeds" in out.getvalue()
    Console(file=out, width=200).print(closing_table(summarise(directory / "scene-seed0")))
    assert "seed 0: mean reward, greedy" in out.getvalue()


def test_what_cannot_be_reported_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="give the directory that ftis train"):
        compare(tmp_path)
    scene = Scene(tmp_path / "x", seeds=(0,))
    scene.write()
    path = tmp_path / "x" / "scene-seed0" / "F-TIS" / "small" / "rollouts" / "round-000001.parquet"
    path.write_bytes(b"PAR1 no")
    with pytest.raises(ReportError, match=r"round-000001\.parquet cannot be read"):
        compare(tmp_path / "x")
    for name, line in (("metrics.jsonl", "{"), ("metrics.jsonl", "3"), ("evaluations.jsonl", '{"step": 1}')):
        file = tmp_path / "x" / "scene-seed0" / "F-TIS" / "small" / name
        whole = file.read_text()
        file.write_text(f"{line}\n{whole}")
        with pytest.raises(ReportError, match="is damaged"):
            compare(tmp_path / "x")
        file.write_text(whole)
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
        "The mean over peers against alone on validation (equal in rollouts trained on), over 5 seeds: 1 better" in text
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
