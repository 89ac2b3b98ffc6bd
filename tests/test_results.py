"""Comparisons and summaries of run directories whose numbers are known."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from io import StringIO
from pathlib import Path
from statistics import fmean
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
)

from ftis.comparison.results import compare
from ftis.comparison.stats import ALPHA, holm
from ftis.comparison.summary import somebody_learned_alone, summarise
from ftis.comparison.values import Amount, CurvePoint, StudyResults
from ftis.records.files import write_jsonl
from ftis.records.lines import RecordsError
from ftis.records.reading import EvaluationRow, PeerRun, Run, final_accuracy, read_run, read_study
from ftis.view.charts import arm_styles
from ftis.view.comparison import headlines, verdict
from ftis.view.figures import accuracy_limits, write_learning_curves
from ftis.view.report import write_page
from ftis.view.tables import closing_table, whereabouts


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return five_seeds(tmp_path_factory.mktemp("study"))


@pytest.fixture(scope="module")
def results(study: Path) -> StudyResults:
    return compare(study)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> StudyResults:
    """The results of a study with two baselines."""
    return compare(both_budgets(tmp_path_factory.mktemp("two")))


def spent(point: CurvePoint) -> tuple[float, float]:
    assert point.tokens
    assert point.seconds
    return point.tokens.mean, point.seconds.mean


def lines_of(path: Path, change: Callable[[list[dict[str, Any]]], Any]) -> None:
    """Change a file of JSON lines in place; ``change`` may return other lines."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    changed = change(rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in (rows if changed is None else changed)), encoding="utf-8")


def recipe_of(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the recipe of an experiment and of its runs."""
    for path in (directory / "experiment.json", *directory.glob("*/recipe.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        change(document.get("recipe", document))
        path.write_text(json.dumps(document), encoding="utf-8")


def set_last_arm(other: dict[str, Any], recipe: dict[str, Any]) -> None:
    recipe["arms"][-1]["set"] = other


def test_accuracies_have_means_and_intervals_over_seeds(study: Path, results: StudyResults) -> None:
    measured = ((0, 0.1), (5, 0.2), (10, 0.3), (15, 0.7))
    rows = [EvaluationRow(step, "validation", accuracy, 20) for step, accuracy in measured]
    assert [final_accuracy(rows[:n]) for n in (4, 2, 1)] == pytest.approx([0.4, 0.2, 0.1])
    final = results.accuracy["validation"]["F-TIS"]["small"].final
    assert final.per_seed == pytest.approx(dict(enumerate(SMALL_FINAL["F-TIS"])))
    # s² = (0 + 9 + 9 + 4 + 4)·10⁻⁴ / 4 = 6.5·10⁻⁴; t(4) = 2.7764
    half = 2.7764 * math.sqrt(6.5e-4 / 5)
    assert (final.mean, final.low, final.high) == pytest.approx((0.6, 0.6 - half, 0.6 + half), abs=1e-6)
    start = results.accuracy["validation"]["F-TIS"]["small"].start
    assert (start.mean, start.low, start.high) == (0.1, 0.1, 0.1)
    assert results.accuracy["ood-clock"]["alone"]["large"].final.mean == pytest.approx(0.52)


def test_the_file_has_its_keys_in_their_order(study: Path, results: StudyResults) -> None:
    text = (study / "results.json").read_text()
    assert "NaN" not in text
    file, value = json.loads(text), ["mean", "low", "high", "per_seed"]
    (of_peer, *_), (of_mean, *_) = file["comparisons"], file["together"]
    of_arms, found = ["split", "arm", "baseline", "equal"], ["mean", "low", "high", "p_value", "n", "per_seed"]
    found += ["p_adjusted", "label"]
    assert (list(of_peer), list(of_mean)) == ([*of_arms, "peer", *found], [*of_arms, *found])
    points, by_peer = (file[key]["validation"]["F-TIS"] for key in ("curves", "accuracy"))
    assert list(points["small"][0]) == ["step", *value, "tokens", "seconds"]
    assert [list(points["small"][0][key]) for key in ("tokens", "seconds")] == [["mean", "per_seed"]] * 2
    assert (list(by_peer["small"]), list(by_peer["small"]["start"])) == (["problems", "start", "final"], value)
    (mean,) = file["accuracy_of_mean"]["validation"]["F-TIS"].items()
    assert mean == ("final", {**mean[1], "mean": results.accuracy_of_mean["validation"]["F-TIS"].mean})
    assert list(mean[1]["per_seed"]) == list("01234")


def test_arms_are_compared_seed_for_seed(results: StudyResults, two: StudyResults) -> None:
    small, large = comparison(results, "small"), comparison(results, "large")
    # d = 0.10, 0.11, 0.09, 0.11, 0.09: mean 0.1, s = 0.01, t = 0.1·√5 / 0.01 = 22.36, p(4) = 2.36·10⁻⁵
    assert small.per_seed == pytest.approx(dict(enumerate((0.10, 0.11, 0.09, 0.11, 0.09))))
    half = 2.7764 * 0.01 / math.sqrt(5)
    assert (small.mean, small.low, small.high) == pytest.approx((0.1, 0.1 - half, 0.1 + half), abs=1e-6)
    assert small.p_value == pytest.approx(2.36e-5, rel=0.01)
    assert (small.label, large.label) == ("better", "no difference shown")
    part = comparison(two, "small", baseline="alone-part")
    differences = [t - c for t, c in zip(SMALL_FINAL["F-TIS"], PART_FINAL, strict=True)]
    assert part.per_seed == pytest.approx(dict(enumerate(differences)))


def test_all_comparisons_of_a_report_are_one_family(two: StudyResults) -> None:
    family = [*two.comparisons, *two.together]
    assert len(family) == 2 * 2 * 3  # splits, baselines, two peers and their mean; F-TIS is the only arm beside them
    assert [c.p_adjusted for c in family] == holm([c.p_value for c in family])
    assert all((c.label == "no difference shown") == (c.p_adjusted >= ALPHA) for c in family)


def test_means_over_peers_are_means_seed_by_seed(two: StudyResults) -> None:
    for c in two.together:
        same = [o for o in two.comparisons if (o.split, o.arm, o.baseline) == (c.split, c.arm, c.baseline)]
        for seed, of_mean in c.per_seed.items():
            assert of_mean == pytest.approx(fmean(of_peer.per_seed[seed] for of_peer in same))
    of_peers, mean = two.curves["validation"]["F-TIS"], two.curves_of_mean["validation"]["F-TIS"]
    for point, *peers in zip(mean, of_peers["small"], of_peers["large"], strict=True):
        assert point.per_seed == pytest.approx(
            {seed: fmean(peer.per_seed[seed] for peer in peers) for seed in point.per_seed}
        )
        assert spent(point)[0] == pytest.approx(fmean(spent(peer)[0] for peer in peers))


def test_budgets_and_what_they_share(two: StudyResults) -> None:
    own = {arm: by_peer["small"] for arm, by_peer in two.budget.items()}
    whole, half = ROUNDS * PROMPTS * G, ROUNDS * PROMPTS * G / 2
    together, alone = own["F-TIS"], own["alone"]
    assert (together.rollouts_trained, together.rollouts_generated) == (whole, half)
    assert together.tokens_generated == 100 * ROUNDS
    assert (together.bytes_sent, together.bytes_received) == (1000 * ROUNDS, 1000 * ROUNDS)
    assert (alone.rollouts_trained, alone.rollouts_generated, alone.bytes_sent) == (whole, whole, 0)
    # s = 0.5 to sample a share, t = 0.375 to train on it, 0.125 to exchange it, two peers, four rounds.
    assert alone.seconds == ROUNDS * 2 * (0.5 + 0.375)
    assert own["alone-part"].seconds == ROUNDS * (0.5 + 0.375)
    parts = [together.seconds_sampling, together.seconds_exchange, together.seconds_training]
    assert parts == [ROUNDS * 0.5, ROUNDS * 0.125, ROUNDS * 0.75]
    assert (together.seconds, together.seconds_waited) == (sum(parts), ROUNDS * 3.0)
    assert {m.baseline: m.equal for m in two.matched} == {
        "alone": "equal in rollouts trained on",
        "alone-part": "equal in rollouts a peer samples itself",
    }


def test_curves_carry_what_the_peer_had_spent(two: StudyResults, tmp_path: Path) -> None:
    points = {arm: by_peer["large"] for arm, by_peer in two.curves["validation"].items()}
    for arm, tokens, seconds in (("alone", 200, 1.75), ("alone-part", 100, 0.875), ("F-TIS", 100, 1.375)):
        assert [spent(point) for point in points[arm]] == [(tokens * step, seconds * step) for step in range(5)]

    Scene(tmp_path, seeds=(0, 1), ood=False).write()
    peer = tmp_path / "scene-seed1" / "F-TIS" / "small"
    lines_of(peer / "metrics.jsonl", lambda rows: rows[1].update({"tokens_sampled": 260, "time/sample": 1.5}))
    lines_of(peer / "evaluations.jsonl", lambda rows: [row for row in rows if row["step"] != 3])
    results = compare(tmp_path)
    second = results.curves["validation"]["F-TIS"]["small"][2]
    assert second.tokens == Amount(230, {0: 200, 1: 260})
    assert second.seconds == Amount(3.25, {0: 2.75, 1: 3.75})
    mean = [list(point.per_seed) for point in results.curves_of_mean["validation"]["F-TIS"]]
    assert mean[2:4] == [[0, 1], [0]]
    # A peer that came late has no record of the rounds before, so what it spent by then is unknown.
    lines_of(peer / "metrics.jsonl", lambda rows: rows[2:])
    late = read_run(tmp_path / "scene-seed1").peers["F-TIS", "small"]
    assert [late.spent_by(step) for step in range(5)] == [(0, 0), *[(None, None)] * 2, (300, 1.375), (400, 2.75)]
    unknown = compare(tmp_path)
    own, whole = unknown.budget["F-TIS"]["small"], ROUNDS * PROMPTS * G  # of two seeds, one with half of the rounds
    assert (own.rollouts_trained, own.rollouts_generated) == (0.75 * whole, 0.375 * whole)
    curves = (unknown.curves["validation"]["F-TIS"]["small"], unknown.curves_of_mean["validation"]["F-TIS"])
    assert [curve[1].tokens for curve in curves] == [None, None]


def test_arms_are_compared_without_their_rollouts(tmp_path: Path) -> None:
    Scene(tmp_path, seeds=(0, 1), ood=False).write()
    run = tmp_path / "scene-seed1"
    for arm in ("F-TIS", "alone"):
        shutil.rmtree(run / arm / "small" / "rollouts")
    results, summary = compare(tmp_path), summarise(run)
    assert results.budget["F-TIS"]["small"] == (large := results.budget["F-TIS"]["large"])
    assert large.seconds == summary.arms["F-TIS"]["large"].seconds == ROUNDS * (0.5 + 0.125 + 2 * 0.375)


def test_arms_that_were_not_run_are_compared_with_nothing(tmp_path: Path) -> None:
    settings = {"experiment": {"baselines": ["alone", "alone-part"]}}
    Scene(tmp_path, arms=BOTH_BUDGETS, seeds=(0, 1), ood=False, settings=settings).write()
    for arm, baselines in (("alone-part", {"alone"}), ("F-TIS", set())):
        for seed in (0, 1):
            shutil.rmtree(tmp_path / f"scene-seed{seed}" / arm)
        results = compare(tmp_path)
        assert arm in results.not_run
        assert (results.baselines, results.seeds) == (("alone",), (0, 1))
        assert {c.baseline for c in results.comparisons} == baselines
        assert len(headlines(results)) == 1


@pytest.mark.parametrize("seeds", [(0,), (0, 1)])
def test_the_only_arm_lacks_no_baseline(seeds: tuple[int, ...], tmp_path: Path) -> None:
    Scene(tmp_path, arms=({"name": "together"},), seeds=seeds, ood=False).write()
    results = compare(tmp_path)
    assert ([*results.arms], [*results.not_run], headlines(results)) == (["together"], [], [])
    assert verdict(read_study(tmp_path), results, arm_styles(results.arms, [])).cautions == []


def test_budgets_are_compared_in_words(tmp_path: Path) -> None:
    both = "equal in rollouts trained on and in rollouts a peer samples itself"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"set": {"training.mode": "horizontal"}}, both),
        ({"set": {"training.rounds": 9}}, f"{both} in a round, not in rounds"),
        ({"set": {"sampling.num_generations": 6}}, "equal in neither budget"),
        ({"collaborate": False}, "equal in rollouts trained on"),
        ({"collaborate": False, "budget": "generated"}, "equal in rollouts a peer samples itself"),
    ]
    settings = {"experiment": {"baselines": ["together"]}}
    for number, (arm, equal) in enumerate(cases):
        arms = ({"name": "together"}, {"name": "x", **arm})
        scene = Scene(tmp_path / str(number), arms=arms, seeds=(0,), ood=False, settings=settings)
        (matched,) = compare(scene.write()).matched
        assert (matched.baseline, matched.arms, matched.equal) == ("together", ["x"], equal)


def test_incomplete_seeds_are_left_out_and_named(tmp_path: Path) -> None:
    directory = Scene(tmp_path, final_of, seeds=(0, 1, 2)).write()
    damaged = directory / "scene-seed1"
    damages: list[tuple[Callable[[], None], str]] = [
        (lambda: cut(damaged / "F-TIS" / "large" / "metrics.jsonl", 2), "F-TIS, large"),
        (lambda: shutil.rmtree(damaged / "F-TIS" / "large"), "F-TIS, large"),
        (lambda: cut(damaged / "alone" / "small" / "evaluations.jsonl", 6), "alone, small"),
    ]
    for damage, where in damages:
        damage()
        results = compare(directory)
        assert results.seeds == (0, 2)
        assert results.left_out[1].startswith(where)
        assert list(comparison(results, "small").per_seed) == [0, 2]
        assert results.left_out[1] in printed(results)
    run = directory / "scene-seed0"  # a peer that was away for a round finishes with the last
    lines_of(run / "F-TIS" / "small" / "metrics.jsonl", lambda rows: [row for row in rows if row["step"] != 2])
    assert compare(directory).seeds == (0, 2)
    named = whereabouts(run, summarise(run))
    assert all(f"{peer}/checkpoint-{ROUNDS}" in named for peer in ("small", "large"))
    for arm in summarise(run).arms:  # all have checkpoints of the same rounds
        assert named.count(arm) == 1


def test_rewards_of_any_size_have_pages_and_pictures(tmp_path: Path) -> None:
    for level in (3.0, -2.0, -0.4):
        final = {"alone": level, "F-TIS": level + 0.5}
        scene = Scene(tmp_path / str(level), lambda arm, *_, of=final: of[arm], seeds=(0, 1))
        page = write_page(scene.write()).read_text(encoding="utf-8").replace("−", "-")
        assert f"{level + 0.5:.3f}" in page
        assert write_learning_curves(tmp_path, compare(scene.directory / "scene-seed0")).exists()
    for values, limits in (([0.4, 0.6], (0.376, 0.624)), ([-1, 0], (-1.12, 0.12)), ([0, 10], (-0.02, 11.2))):
        assert accuracy_limits(values) == pytest.approx(limits)
    assert accuracy_limits([1.0, 0.0]) == pytest.approx((-0.02, 1.02))


@pytest.mark.parametrize(
    ("rounds", "alone"),  # of each round the foreign rollouts used, and whether it could have used some but did not
    [
        ([(0, True), (0, True)], True),
        ([(0, True), (0, False)], True),  # in its second round nobody had anything to teach
        ([(0, True), (3, False)], False),
        ([(0, False), (0, False)], False),
        ([], False),
    ],
)
def test_who_never_used_a_foreign_rollout_though_it_could_learned_alone(
    rounds: list[tuple[int, bool]], alone: bool, tmp_path: Path
) -> None:
    rows = ({"step": i, "foreign_used": n, "without_foreign": none} for i, (n, none) in enumerate(rounds, 1))
    write_jsonl(tmp_path / "metrics.jsonl", rows)
    peers = {("F-TIS", "a"): PeerRun.read(tmp_path), ("alone", "a"): PeerRun(tmp_path / "nowhere")}
    assert somebody_learned_alone([Run(tmp_path, Scene(tmp_path).recipe(), peers)]) == alone


def test_arms_that_measure_something_else_are_noted(tmp_path: Path) -> None:
    directory = Scene(tmp_path, seeds=(0, 1), ood=False).write()
    assert not compare(directory).notes

    def start(where: str) -> None:
        for path in directory.glob(f"{where}/evaluations.jsonl"):
            lines_of(path, lambda rows: rows[0].update(accuracy=0.4))

    start("scene-seed1/F-TIS/large")
    (note,) = compare(directory).notes
    assert "large did not start from one and the same starter:large" in note
    start("*/F-TIS/*")  # another measure gives another start
    others: list[dict[str, Any]] = [
        {"reward.answer": "exact"},
        {"prompt.system_prompt": ""},
        {"sampling.max_completion_length": 7},
    ]
    recipe_of(directory, partial(set_last_arm, {"peers.*.dtype": "bfloat16"}))
    assert not compare(directory).notes
    for other in others:
        recipe_of(directory, partial(set_last_arm, other))
        (note,) = compare(directory).notes
        assert f"[{next(iter(other)).partition('.')[0]}]" in note


@pytest.mark.parametrize("reward", [{"format_weight": 0.2}, {"function": "my.rewards.length"}])
def test_a_mean_reward_is_not_called_pass_at_1(reward: dict[str, Any], tmp_path: Path) -> None:
    directory = Scene(tmp_path, seeds=(0, 1), ood=False).write()
    assert compare(directory).accuracy_is == "greedy pass@1"
    recipe_of(directory, lambda recipe: recipe["reward"].update(reward))
    results = compare(directory)
    assert (results.accuracy_is, len(results.notes)) == ("mean reward, greedy", 1)
    closing = Console(file=StringIO(), width=200, record=True)
    closing.print(closing_table(summarise(directory / "scene-seed0")))
    page = write_page(directory).read_text(encoding="utf-8")
    for text in (page.lower(), raw(results, 200), closing.export_text()):
        assert ("pass@1" in text, "mean reward, greedy" in text) == (False, True)


def test_what_cannot_be_reported_is_an_error_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(RecordsError, match="holds neither a run nor an experiment"):
        compare(tmp_path)
    with pytest.raises(RecordsError, match=r"recipe\.json"):
        read_run(tmp_path)
    directory = Scene(tmp_path / "x", seeds=(0,)).write()
    run = directory / "scene-seed0"
    peer = run / "F-TIS" / "small"
    damages = {peer / "metrics.jsonl": b"3\n", peer / "evaluations.jsonl": b'{"step": 1}\n{}\n'}
    for path, damage in {**damages, directory / "experiment.json": b"{"}.items():
        whole = path.read_bytes()
        path.write_bytes(damage + (whole if path.suffix == ".jsonl" else b""))
        with pytest.raises(RecordsError, match=r"cannot be read|is damaged"):
            compare(directory)
        path.write_bytes(whole)
    for arm in ("alone", "F-TIS"):
        shutil.rmtree(run / arm)
    with pytest.raises(RecordsError, match="nothing was recorded"):
        compare(directory)


def test_the_terminal_has_every_verdict_within_its_width(
    results: StudyResults, two: StudyResults, tmp_path: Path
) -> None:
    for found in (results, two):
        text = printed(found)
        assert all(sentence in text for sentence in headlines(found))
        assert "p, Holm" not in text
        for c in (*found.comparisons, *found.together):
            ends = f"{c.mean:+z.3f} [{c.low:+z.3f}, {c.high:+z.3f}]".replace("-", "−")
            label = c.label if c.label in ("better", "worse") else "not shown"
            assert (f"{ends} {label}" if c.peer else ends) in text, c
    arms = ({"name": "alone", "collaborate": False}, {"name": "a" * 64})
    long = compare(Scene(tmp_path, peers=("n" * 64, "m" * 64), arms=arms, seeds=(0, 1), ood=False).write())
    for found in (results, two, long):
        for width in (120, 80):
            assert max(map(len, raw(found, width).splitlines())) <= min(width, 100)


def test_a_joined_run_is_about_the_peers_that_are_here(tmp_path: Path) -> None:
    run = joined(tmp_path, Scene(tmp_path, arms=({"name": "F-TIS"},)))
    summary = summarise(run)
    assert json.loads((run / "summary.json").read_text()) == asdict(summary)
    assert (summary.name, summary.seed, list(summary.arms["F-TIS"])) == ("scene", 0, ["small"])
    small = summary.arms["F-TIS"]["small"]
    assert (small.start, small.last, small.problems) == (0.1, 0.53, 20)
    assert (small.rounds, small.bytes_sent, small.bytes_received) == (ROUNDS, 1000 * ROUNDS, 1000 * ROUNDS)
    assert small.ood["ood-clock"].final == pytest.approx(0.5)
    (run / "provenance.json").unlink()  # then it is an unfinished run of one machine
    assert compare(run).left_out == {0: "F-TIS, large: not started"}
