"""What a comparison says of run directories whose numbers are known, and the page that shows it."""

from __future__ import annotations

import html
import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from io import StringIO
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ftis.config import Recipe, parse
from ftis.lab import figures, page
from ftis.lab import results as report
from ftis.records import Records

ROUNDS = 4
G = 2
PROMPTS = 6  # divisible by two peers and by three
HOSTILE = "</div><script>alert('x')</script><img src=//evil.example/x onerror=alert(1)>\u202e\x00\u200b&amp;\ud800"

SMALL_FINAL = {"alone": (0.50, 0.52, 0.48, 0.51, 0.49), "F-TIS": (0.60, 0.63, 0.57, 0.62, 0.58)}
LARGE_FINAL = {"alone": (0.70, 0.71, 0.72, 0.73, 0.74), "F-TIS": (0.72, 0.69, 0.73, 0.72, 0.74)}


@dataclass
class Scene:
    """Writes the directory of an experiment as ``ftis experiment`` does, with accuracies as told.

    ``final(arm, peer, seed, split)`` is the mean of the last three evaluations.
    """

    directory: Path
    final: Callable[[str, str, int, str], float] = lambda arm, peer, seed, split: 0.5
    peers: tuple[str, ...] = ("small", "large")
    arms: tuple[Mapping[str, Any], ...] = ({"name": "alone", "collaborate": False}, {"name": "F-TIS"})
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    ood: bool = True
    text: str = "<think>1+1=2</think>"
    settings: Mapping[str, Any] = field(default_factory=dict)

    def recipe(self) -> Recipe:
        return parse(
            {
                "name": "scene",
                "task": {"name": "clock"},
                "ood": [{"name": "clock"}] if self.ood else [],
                "sampling": {"num_generations": G},
                "training": {"rounds": ROUNDS, "prompts_per_round": PROMPTS, "eval_every": 1},
                "objective": {"kl_estimator": "k3", "kl_threshold": 1.0},
                "peers": [{"name": name, "model": f"starter:{name}"} for name in self.peers],
                "arms": list(self.arms),
                **self.settings,
            }
        )

    def write(self) -> Path:
        """The whole experiment; every file through the same writer that a run uses."""
        recipe = self.recipe()
        for seed in self.seeds:
            self.write_run(self.directory / f"scene-seed{seed}", recipe, seed)
        document = {**FACTS, "seeds": list(self.seeds), "recipe": json.loads(recipe.model_dump_json())}
        (self.directory / "experiment.json").write_text(json.dumps(document))
        return self.directory

    def write_run(self, run: Path, recipe: Recipe, seed: int) -> Path:
        run.mkdir(parents=True)
        (run / "recipe.json").write_text(recipe.model_copy(update={"seed": seed}).model_dump_json())
        (run / "provenance.json").write_text(json.dumps(FACTS))
        for arm in recipe.arms or (report.ArmConfig(name=recipe.objective.name),):
            for peer in self.peers:
                self.write_peer(run / arm.name / peer, arm, seed, recipe.arm(arm).training.rounds)
        return run

    def write_peer(self, directory: Path, arm: Any, seed: int, rounds: int) -> None:
        records, peer = Records(directory), directory.name
        sources = self.peers if arm.collaborate else (peer,)
        for step in range(rounds + 1):
            for split in ("validation", "ood-clock")[: 1 + self.ood]:
                final = self.final(arm.name, peer, seed, split)
                # The last three lie around their mean; before them the untrained model and, if any, a bad one.
                offset = {rounds: 0.03, rounds - 1: -0.03, rounds - 2: 0.0}.get(step)
                accuracy = 0.1 if offset is None or step == 0 else final + offset
                summary = {"step": step, "split": split, "accuracy": accuracy, "problems": 20}
                records.evaluation(summary, answers(arm.name))
        share = PROMPTS * G // len(self.peers)
        for step in range(1, rounds + 1):
            records.metrics(metrics(step, peer, sources, share, PROMPTS * G))
            own = share if arm.collaborate else PROMPTS * G
            records.rollouts(step - 1, rollouts(step - 1, dict.fromkeys(sources, own), self.text))
        (directory / f"checkpoint-{rounds}").mkdir()
        shutil.copy(TOKENIZER, directory / f"checkpoint-{rounds}" / "tokenizer.json")


FACTS: dict[str, Any] = {
    "started": "2026-01-01T00:00:00Z",
    "commit": "0123456789abcdef",
    "versions": {"python": "3.11", "ftis": "0.1.0"},
    "machine": {"platform": "Linux", "cores": 2, "gpus": []},
}
TOKENIZER = Path()


def answers(arm: str) -> list[dict[str, Any]]:
    """20 problems: 8 both get right, 10 only the treated arm, 1 only the baseline, 1 neither."""
    right = range(18) if arm != "alone" else (*range(8), 18)
    return [{"question": f"q{i}", "reward": float(i in right)} for i in range(20)]


def metrics(step: int, peer: str, sources: Sequence[str], share: int, alone: int) -> dict[str, Any]:
    row: dict[str, Any] = {
        "step": step,
        "reward": 0.5,
        "frac_reward_zero_std": 0.0,
        "optimizer_steps": 2,
        "num_tokens": 100 * step,
        "step_time": 1.5,
        "sampling/sampling_logp_difference/max": 1e-6,
    }
    for source in sources if len(sources) > 1 else ():
        ratio = f"peer/{source}/sampling/importance_sampling_ratio"
        weight = f"peer/{source}/sampling/importance_sampling_weight"
        quantiles = {"min": 0.01, "p10": 0.5, "p50": 1.0, "p90": 1.8, "max": 8.0, "mean": 1.1}
        row |= {f"{ratio}/{key}": value for key, value in quantiles.items()}
        row |= {f"{weight}/{key}": min(value, 2.0) for key, value in quantiles.items()}
        row |= {
            f"peer/{source}/delivered": True,
            f"peer/{source}/admitted": share,
            f"peer/{source}/rejected": 0,
            f"peer/{source}/zero_advantage": 1,
            f"peer/{source}/kept": share - 3,
            f"peer/{source}/dropped": 2,
            f"peer/{source}/bytes": 1000,
            f"peer/{source}/kl/k1": 0.4 * step,
            f"peer/{source}/kl/k3": 0.5 * step,
            f"peer/{source}/sampling/truncated_fraction": 0.05,
            f"peer/{source}/sampling/effective_sample_size": 0.8,
        }
        row["foreign_used"] = (len(sources) - 1) * (share - 2)
    return row


def rollouts(round: int, counts: Mapping[str, int], text: str) -> dict[str, Any]:
    """Of each source: the first has Â = 0, the second is dropped, the third is cut, the others are plain."""
    rows = []
    for source, count in counts.items():
        for i in range(count):
            ids = [0, 1, 2, 3, 4]
            advantage = (0.0, -1.0, 0.5)[i] if i < 3 else 1.0 - 0.1 * i
            old: list[float] | None = [-0.5] * 5
            if i == 0:
                old = None
            if i == 2:
                old = [-0.5, 0.5, 1.0, -0.5, -3.5]  # ratios 1, e, e^1.5, 1, e^-3
            rows.append(
                {
                    "round": round,
                    "source": source,
                    "item": i // G,
                    "question": f"1+{i} {text}",
                    "completion": text,
                    "reward": float(i % 2),
                    "advantage": advantage,
                    "kept": None if i == 0 else i != 1,
                    "kl_k1": None if i == 0 else 0.1 * i,
                    "completion_ids": ids,
                    "gen_logp": [-0.5] * 5,
                    "old_logp": old,
                }
            )
    return {key: [row[key] for row in rows] for key in rows[0]}


@pytest.fixture(scope="module", autouse=True)
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Five tokens, one of them hostile."""
    from tokenizers import Tokenizer, decoders, models

    words = ["<think>", "1+1", "</think>", "<script>alert(1)</script>", "<eos>"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<eos>"))
    tokenizer.decoder = decoders.Fuse()
    global TOKENIZER
    TOKENIZER = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(TOKENIZER))


def final_of(arm: str, peer: str, seed: int, split: str) -> float:
    of_arm = SMALL_FINAL if peer == "small" else LARGE_FINAL
    return of_arm[arm][seed] - (0.2 if split != "validation" else 0.0)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    experiment = {"title": "Do sizes help each other?", "question": "Is it worth it to each?"}
    scene = Scene(tmp_path_factory.mktemp("study"), final_of, settings={"experiment": experiment})
    return scene.write()


@pytest.fixture(scope="module")
def results(study: Path) -> dict[str, Any]:
    return report.compare(study)


@pytest.fixture(scope="module")
def written(study: Path) -> Path:
    return page.write_page(study)


@pytest.fixture
def no_drawing(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Panels without matplotlib, for tests of what stands around them; their names as they are asked for."""
    asked: list[str] = []

    def panel(
        directory: Path, name: str, title: str, subtitle: str, alt: str, *rest: Any, **more: Any
    ) -> figures.Panel:
        asked.append(name)
        return figures.Panel(name, "<svg></svg>", alt)

    monkeypatch.setattr(figures, "_panel", panel)
    return asked


def of(results: Mapping[str, Any], peer: str, arm: str = "F-TIS", split: str = "validation") -> dict[str, Any]:
    (found,) = (c for c in results["comparisons"] if (c["peer"], c["arm"], c["split"]) == (peer, arm, split))
    return dict(found)


# --- the comparison -------------------------------------------------------------------------------------------------


def test_a_final_accuracy_is_the_mean_of_the_last_three_without_the_untrained_model() -> None:
    rows = [{"step": step, "accuracy": accuracy} for step, accuracy in ((0, 0.1), (5, 0.2), (10, 0.3), (15, 0.7))]
    assert report.final_accuracy(rows) == pytest.approx(0.4)
    assert report.final_accuracy(rows[:2]) == 0.2
    assert report.final_accuracy(rows[:1]) == 0.1


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
    small = of(results, "small")
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

    large = of(results, "large")  # d = 0.02, −0.02, 0.01, −0.01, 0
    assert large["mean"] == pytest.approx(0.0)
    assert large["p_value"] == pytest.approx(1.0)
    assert large["label"] == "no difference shown"


def test_p_values_are_corrected_for_all_comparisons_on_a_split(results: dict[str, Any]) -> None:
    assert len(results["comparisons"]) == 4  # two peers, one arm beside the baseline, two splits
    for split in ("validation", "ood-clock"):
        small = of(results, "small", split=split)
        assert small["p_adjusted"] == pytest.approx(2 * small["p_value"])
        assert of(results, "large", split=split)["p_adjusted"] == pytest.approx(1.0)


def test_final_models_are_compared_problem_by_problem(results: dict[str, Any]) -> None:
    rows = of(results, "small")["mcnemar"]
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
    budget = report.compare(tmp_path)["budget"]
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
    (matched,) = report.compare(scene.write())["matched"]
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
    results = report.compare(tmp_path)
    assert results["seeds"] == [0, 2]
    assert results["left_out"] == {"1": reason}
    assert list(of(results, "small")["per_seed"]) == ["0", "2"]
    assert list(results["curves"]["validation"]["alone"]["small"][0]["per_seed"]) == ["0", "2"]
    assert f"seed 1 is left out: {reason}" in printed(results)


def test_with_no_finished_seed_nothing_is_compared_but_the_page_shows_what_there_is(tmp_path: Path) -> None:
    scene = Scene(tmp_path, seeds=(0,), ood=False)
    scene.write()
    shutil.rmtree(tmp_path / "scene-seed0" / "F-TIS" / "large")
    cut(tmp_path / "scene-seed0" / "alone" / "small" / "metrics.jsonl", 1)
    results = report.compare(tmp_path)
    assert (results["seeds"], results["comparisons"], results["accuracy"]) == ([], [], {})
    assert "no seed is finished (seed 0: alone, small: 1 of 4 rounds)" in printed(results)
    text = page.write_page(tmp_path).read_text()
    assert "Unfinished seeds, as far as they are." in text
    check(text)


def test_one_seed_is_no_comparison(tmp_path: Path, no_drawing: list[str]) -> None:
    run = Scene(tmp_path, final_of, ood=False).write_run(tmp_path / "run", Scene(tmp_path, ood=False).recipe(), 0)
    results = report.compare(run)
    small = of(results, "small")
    assert small["mean"] == pytest.approx(0.1)
    assert (small["low"], small["high"], small["smallest_detectable"]) == (None, None, None)
    assert small["label"] == "no difference shown"
    assert "one seed cannot tell" in small["text"]
    assert results["splits"] == ["validation"]
    text = page.write_page(run).read_text()
    assert "one seed cannot tell" in text
    assert "Out of distribution" not in text
    check(text)


def test_an_arm_that_was_not_run_is_named_and_leaves_no_seed_out(tmp_path: Path) -> None:
    arms = ({"name": "alone", "collaborate": False}, {"name": "NoIS"}, {"name": "F-TIS"})
    scene = Scene(tmp_path, arms=arms, seeds=(0, 1), ood=False)
    scene.write()
    for seed in (0, 1):
        shutil.rmtree(tmp_path / f"scene-seed{seed}" / "NoIS")
    results = report.compare(tmp_path)
    assert (results["arms"], results["not_run"], results["seeds"]) == (["alone", "F-TIS"], ["NoIS"], [0, 1])


def test_without_a_baseline_accuracies_are_shown_and_nothing_is_compared(tmp_path: Path, no_drawing: list[str]) -> None:
    scene = Scene(tmp_path, arms=(), ood=False)
    run = scene.write_run(tmp_path / "run", scene.recipe(), 3)
    results = report.compare(run)
    assert (results["arms"], results["baseline"], results["comparisons"]) == (["F-TIS"], None, [])
    assert "no baseline" in printed(results)
    text = page.write_page(run).read_text()
    assert "The baseline alone is not among the arms: nothing is compared." in text
    assert "0.100 at the start, 0.530 after 4 rounds" in text
    check(text)


def test_three_peers_two_arms(tmp_path: Path, no_drawing: list[str]) -> None:
    arms = (
        {"name": "alone", "collaborate": False},
        {"name": "NoIS", "set": {"objective.name": "NoIS"}},
        {"name": "F-TIS"},
    )
    scene = Scene(tmp_path, peers=("a", "b", "c"), arms=arms, seeds=(0, 1, 2))
    results = report.compare(scene.write())
    assert len(results["comparisons"]) == 3 * 2 * 2
    assert results["budget"]["F-TIS"]["c"]["rollouts_generated"] == ROUNDS * PROMPTS * G / 3
    (matched,) = results["matched"]
    assert matched["arms"] == ["NoIS", "F-TIS"]
    assert "a peer of NoIS, F-TIS generates a third as many" in matched["text"]
    text = page.write_page(tmp_path).read_text()
    wanted = {f"participation-{arm}-{x}-from-{y}" for arm in ("NoIS", "F-TIS") for x in "abc" for y in "abc" if x != y}
    assert {name for name in no_drawing if name.startswith("participation")} == wanted
    # Rows of panels: each learner once in a row, in the order of the columns.
    took = [name.rsplit("-", 3)[1::2] for name in no_drawing if name.startswith("participation-F-TIS")]
    assert [learner for learner, _ in took] == ["a", "b", "c"] * 2
    assert "NoIS has no filter" in text
    assert "NoIS does not use it" in text
    check(text)


def test_peers_that_start_from_different_models_are_reported(tmp_path: Path) -> None:
    scene = Scene(tmp_path, seeds=(0, 1), ood=False)
    scene.write()
    path = tmp_path / "scene-seed1" / "F-TIS" / "large" / "evaluations.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0]["accuracy"] = 0.4
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (note,) = report.compare(tmp_path)["notes"]
    assert note.startswith(
        "seed 1: large did not start from one and the same starter:large in all arms (0.100 in alone"
    )


def test_what_cannot_be_reported_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(report.ReportError, match="give the directory that ftis train"):
        report.compare(tmp_path)
    scene = Scene(tmp_path / "x", seeds=(0,))
    scene.write()
    path = tmp_path / "x" / "scene-seed0" / "F-TIS" / "small" / "rollouts" / "round-000001.parquet"
    path.write_bytes(b"PAR1 no")
    with pytest.raises(report.ReportError, match=r"round-000001\.parquet cannot be read"):
        report.compare(tmp_path / "x")
    for arm in ("alone", "F-TIS"):
        shutil.rmtree(tmp_path / "x" / "scene-seed0" / arm)
    with pytest.raises(report.ReportError, match="nothing was recorded yet"):
        report.compare(tmp_path / "x")
    (tmp_path / "x" / "experiment.json").write_text("{")
    with pytest.raises(report.ReportError, match="is damaged"):
        report.compare(tmp_path / "x")


def cut(path: Path, lines: int) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:lines]))


def printed(results: Mapping[str, Any], width: int = 400) -> str:
    """The terminal's text, its line breaks undone."""
    return re.sub(r"\s+", " ", raw(results, width))


def raw(results: Mapping[str, Any], width: int) -> str:
    out = StringIO()
    report.print_comparison(results, Console(file=out, width=width, soft_wrap=True))
    return out.getvalue()


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
    long = report.compare(Scene(tmp_path, peers=(name, "m" * 64), arms=arms, seeds=(0, 1), ood=False).write())
    assert max(map(len, raw(long, 120).splitlines())) <= 100
    assert max(map(len, raw(long, 80).splitlines())) <= 80


# --- the page -------------------------------------------------------------------------------------------------------

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Reader(HTMLParser):
    """Checks that elements are closed in order, and collects what the page refers to."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.refers: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            assert not name.startswith("on"), (tag, name)
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href", "action", "srcset", "data", "poster"):
                self.refers.append(value or "")
            if name == "style" and "url(" in (value or ""):
                self.refers += re.findall(r"url\(([^)]*)\)", value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


def check(text: str) -> Reader:
    """A page that is whole, stands alone and runs nothing."""
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert not reader.open
    assert not {"script", "iframe", "object", "embed", "link", "img", "form"} & set(reader.tags)
    assert all(place.startswith("#") for place in reader.refers), [r for r in reader.refers if not r.startswith("#")]
    assert {place[1:] for place in reader.refers} <= set(reader.ids)
    assert len(reader.ids) == len(set(reader.ids))
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    assert "default-src 'none'" in text
    return reader


def test_the_page_is_whole_and_stands_alone(written: Path) -> None:
    reader = check(written.read_text(encoding="utf-8"))
    text = re.sub(r"\s+", " ", reader.text)
    assert "Do sizes help each other?" in text
    assert "Is it worth it to each?" in text
    assert "better than alone by +0.100 (95% interval +0.088 to +0.112, 5 seeds)" in text
    assert text.index("better than alone by +0.100") < text.index("Learning curves Greedy")
    for heading in (
        "Verdict",
        "Learning curves",
        "Accuracy",
        "What the peers took from each other",
        "Budgets and cost",
    ):
        assert heading in text
    assert "0123456789abcdef" in text
    assert "F-TIS and alone are equal in rollouts trained on per update (12)" in text
    assert "cannot give p below 0.0625" in text
    assert "Every message came, and nothing was refused." in text


def test_every_figure_lies_beside_the_page_as_png_and_svg(written: Path) -> None:
    names = {path.stem for path in (written.parent / "figures").glob("*.svg")}
    assert names == {path.stem for path in (written.parent / "figures").glob("*.png")}
    pair = "F-TIS-small-from-large"
    assert {f"{kind}-{pair}" for kind in ("participation", "weights", "shares", "kl")} <= names
    assert {"learning-validation-small", "learning-ood-clock-large", "difference-small"} <= names
    assert (written.parent / "figures" / f"kl-{pair}.png").read_bytes().startswith(b"\x89PNG")
    assert "g = 1 (k3)" in (written.parent / "figures" / f"kl-{pair}.svg").read_text()
    assert written.read_text().count("<svg") == len(names)


def test_written_twice_it_has_the_same_bytes(written: Path) -> None:
    before = {path: path.read_bytes() for path in [written, *sorted((written.parent / "figures").iterdir())]}
    page.write_page(written.parent)
    assert {path: path.read_bytes() for path in before} == before


def test_hostile_text_is_shown_and_never_interpreted(tmp_path: Path, no_drawing: list[str]) -> None:
    experiment = {"title": "<b onclick=alert(1)>T", "question": "<script>q</script>"}
    safe = HOSTILE.replace("\ud800", "")  # Parquet holds no lone surrogate, JSON does
    scene = Scene(tmp_path, seeds=(0,), text=safe, settings={"experiment": experiment})
    scene.write()
    path = tmp_path / "scene-seed0" / "F-TIS" / "small" / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[1] |= {"peer/large/rejected/<script>": 2, "peer/large/first_rejection": HOSTILE}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = page.write_page(tmp_path).read_text(encoding="utf-8")
    reader = check(text)
    assert "alert('x')" in reader.text
    assert "⟨U+202E⟩" in reader.text
    assert "⟨U+200B⟩" in reader.text
    assert "⟨U+D800⟩" in reader.text
    assert "␀" in reader.text
    assert "\u202e" not in text
    assert "<script>: 2" in reader.text
    assert "<script>alert(1)</script>" in reader.text  # a token of the vocabulary
    assert "<script" not in text


def test_samples_are_the_best_the_worst_a_filtered_and_a_truncated_one(study: Path) -> None:
    directory = study / "scene-seed0" / "F-TIS" / "small"
    samples = {sample.kind: sample.row for sample in page.choose_samples(directory, "small", cap=2.0)}
    assert list(samples) == ["best", "worst", "filtered", "truncated"]
    assert {row["source"] for row in samples.values()} == {"large"}
    assert {kind: row["round"] for kind, row in samples.items()} == {
        "best": 3,
        "worst": 3,
        "filtered": 2,  # the last round's only dropped one is shown as the worst
        "truncated": 3,
    }
    assert samples["best"]["advantage"] == pytest.approx(0.7)
    assert samples["worst"]["advantage"] == -1
    assert samples["filtered"]["kept"] is False
    assert samples["truncated"]["advantage"] == 0.5
    alone = page.choose_samples(study / "scene-seed0" / "alone" / "small", "small", cap=2.0)
    assert {sample.row["source"] for sample in alone} == {"small"}
    assert page.choose_samples(study / "nowhere", "small", cap=2.0) == []


def test_tokens_are_coloured_by_their_weight(written: Path) -> None:
    text = written.read_text(encoding="utf-8")
    # Ratios 1, e, e^1.5, 1, e^−3 of the truncated sample, C = 2.
    assert (
        '&lt;think&gt;<span class="w6" title="2.72">1+1</span><span class="w6" title="4.48">&lt;/think&gt;</span>'
        '&lt;script&gt;alert(1)&lt;/script&gt;<span class="w1" title="0.0498">&lt;eos&gt;</span>'
    ) in text
    assert "2 of 5 tokens above C" in text


def test_tokens_are_spelled_with_the_newest_checkpoint_s_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    assert page.Tokens(tmp_path).pieces([5, 17]) == ["5 ", "17 "]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    (tmp_path / "checkpoint-9").mkdir()
    (tmp_path / "checkpoint-10").mkdir()
    (tmp_path / "checkpoint-9" / "tokenizer.json").write_text("{}")
    (tmp_path / "checkpoint-10" / "tokenizer.json").write_text("no JSON")
    assert page.Tokens(tmp_path).pieces([5]) == ["5 "]
    tokenizer.save(str(tmp_path / "checkpoint-10" / "tokenizer.json"))
    ids = tokenizer.encode("a π b").ids
    pieces = page.Tokens(tmp_path).pieces(ids)
    assert pieces == ["a", " ", "", "π", " ", "b"]  # π takes two tokens of a byte each
    assert page.Tokens(tmp_path).pieces([]) == []


def test_probes_are_shown_where_there_are_any(tmp_path: Path, no_drawing: list[str]) -> None:
    run = Scene(tmp_path, ood=False).write_run(tmp_path / "run", Scene(tmp_path, ood=False).recipe(), 0)
    assert "Bias of the update" not in page.write_page(run).read_text()
    result = {
        "arm": "F-TIS",
        "peer": "small",
        "step": 3,
        "foreign": {"rollouts": 6, "sources": ["large"]},
        "ceiling": {"cosine": {"value": 0.5, "low": 0.4, "high": 0.6}},
        "objectives": {
            "TIS": {"cosine": {"value": -0.25, "low": None, "high": None}, "kept_share": 1.0},
            "NoIS": {"cosine": {"value": None, "low": None, "high": None}, "kept_share": None},
        },
    }
    (run / "probe").mkdir()
    (run / "probe" / "F-TIS-small-3.json").write_text(json.dumps(result))
    (run / "probe-odd.json").write_text(json.dumps({"objectives": 3}))
    (run / "probe-cut.json").write_text("{")
    reader = check(page.write_page(run).read_text())
    assert "Bias of the update" in reader.text
    assert "F-TIS, small, after 3 rounds: 6 rollouts of large" in reader.text
    assert "own batch (ceiling)0.500 [0.400, 0.600]" in reader.text
    assert "TIS−0.2501.000" in reader.text


# --- figures --------------------------------------------------------------------------------------------------------


def linear(colour: str) -> list[float]:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]


def luminance(colour: str) -> float:
    red, green, blue = linear(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_arms_can_be_told_apart_and_their_names_read_on_white() -> None:
    names = [f"arm{i}" for i in range(20)]
    looks = figures.styles([*names, "alone"], "alone")
    assert list(looks) == [*names, "alone"]
    assert looks["alone"].colour == figures.BASELINE_COLOUR
    assert len({(look.colour, str(look.line)) for look in looks.values()}) == 21
    for colour in (*figures.COLOURS, figures.BASELINE_COLOUR, figures.SOFT, figures.THRESHOLD):
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
        seen = []
        for colour in (*figures.COLOURS[:4], figures.BASELINE_COLOUR):
            seen.append(lab([sum(w * p for w, p in zip(row, linear(colour), strict=True)) for row in matrix]))
        assert min(math.dist(a, b) for a, b in combinations(seen, 2)) > 25


def test_labels_are_pushed_apart_within_the_axes() -> None:
    assert figures.spread_out([], 0.1) == []
    assert figures.spread_out([0.5], 0.1) == [0.5]
    assert figures.spread_out([2.0, -1.0], 0.1) == [1.0, 0.0]
    for heights in ([0.5, 0.5, 0.5], [0.95, 1.0, 0.99, 0.2], [0.0, 0.01, 0.0]):
        placed = figures.spread_out(heights, 0.1)
        ordered = sorted(placed)
        assert all(b - a >= 0.1 - 1e-9 for a, b in pairwise(ordered))
        assert ordered[0] >= -1e-9
        assert ordered[-1] <= 1 + 1e-9
    assert figures.spread_out([0.3, 0.32], 0.1)[0] < figures.spread_out([0.3, 0.32], 0.1)[1]


# --- in a browser ---------------------------------------------------------------------------------------------------

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
]


def chromium(file: Path, profile: Path, *arguments: str) -> str:
    assert CHROMIUM
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", *arguments, file.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: the page is not looked at in a browser")
@pytest.mark.parametrize("width", [1280, 375])
def test_a_browser_shows_the_page_without_sideways_scrolling(written: Path, tmp_path: Path, width: int) -> None:
    from PIL import Image

    # The page runs no script, so one around it measures what the browser laid out in a frame of that width.
    text = written.read_text(encoding="utf-8")
    frame = tmp_path / "frame.html"
    measure = (
        "const page = document.querySelector('iframe').contentDocument; document.title = "
        "[page.documentElement.clientWidth, page.documentElement.scrollWidth, page.body.scrollHeight, "
        "page.body.innerText.includes('than alone by +0.100')]"
    )
    frame.write_text(
        f'<!doctype html><title></title><iframe style="width:{width}px;height:900px;border:0" '
        f'srcdoc="{html.escape(text)}"></iframe><script>onload = () => {{ {measure} }}</script>',
        encoding="utf-8",
    )
    dom = chromium(frame, tmp_path / "profile", "--window-size=1400,1000", "--dump-dom")
    found = re.search(r"<title>(\d+),(\d+),(\d+),(true|false)</title>", dom)
    assert found, "the page was not laid out"
    client, scroll, height = map(int, found.groups()[:3])
    assert client == scroll == width
    assert height > 2000
    assert found.group(4) == "true"

    picture = tmp_path / "page.png"
    chromium(written, tmp_path / "profile", f"--window-size={width},1400", f"--screenshot={picture}")
    with Image.open(picture) as image:
        assert image.width == width
        colours = image.convert("RGB").getcolors(maxcolors=1 << 20)
        assert colours is None or len(colours) > 50  # text and lines, not a blank sheet
