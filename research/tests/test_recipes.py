"""The recipes of the findings: what they compare, and that they run on tiny models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import ROOT, ftis, research

from ftis.recipe.arms import Arm, arms_of, rollouts_per_round
from ftis.recipe.parsing import load
from research.scaling import show_scaling

RECIPES = ROOT / "research" / "recipes"
FIGURES = sorted(path.stem for path in (RECIPES / "paper" / "starter").glob("*.toml"))
TOGETHER = ("F-TIS", "F-TIS-lifted")


def budget(arm: Arm) -> tuple[int, int]:
    """Rollouts that a peer of the arm samples and trains on in a round."""
    (found,) = {rollouts_per_round(swarm) for swarm in arm.swarms}
    return found


def test_there_is_a_recipe_for_every_figure_and_the_table_twice() -> None:
    assert [name.partition("_")[0] for name in FIGURES] == [*(f"fig{n:02d}" for n in range(1, 13)), "table2"]
    assert sorted(path.stem for path in (RECIPES / "paper" / "qwen").glob("*.toml")) == FIGURES


def test_the_scaling_recipe_samples_as_much_in_swarms_of_every_size() -> None:
    arms = {arm.name: arm for arm in arms_of(load(RECIPES / "scaling.toml"))}
    for arm in arms.values():
        for swarm in arm.swarms:
            small = [peer for peer in swarm.peers if peer.model.startswith("models/starters/small-")]
            assert len(swarm.peers) in (1, 2 * len(small)), "half of a swarm is small"
    for m in (2, 4, 8, 16):
        assert budget(arms[f"alone-x{m}"])[0] == 36 * m
        for way in ("F-TIS", *(f"{way}-{{}}-horizontal" for way in TOGETHER)):
            name = way.format(m) if "{}" in way else f"{way}-{m}"
            assert budget(arms[name]) == (36, 36 * m)
    for name in ("alone-part", "alone-part-wide", "alone-part-wider"):
        assert budget(arms[name]) == (36, 36)
    limited = [budget(arms[f"F-TIS-{m}-limited"]) for m in (8, 16)]
    assert limited == [budget(arms["F-TIS-4"])] * 2


def test_the_mixed_recipe_has_a_rate_for_either_kind_of_training() -> None:
    arms = {arm.name: arm for arm in arms_of(load(RECIPES / "scaling_mixed.toml"))}
    for name, arm in arms.items():
        many = {"8", "16", "x8", "x16"} & {*name.split("-")} and "limited" not in name
        rates = {(peer.train, peer.learning_rate) for peer in arm.recipe.peers}
        assert rates == {("full", 6e-4 if many else 3e-4), ("lora", 3e-3)}, name
    for m in (4, 8, 16):
        for way in ("F-TIS", "F-TIS-lifted", "TOPR"):
            assert budget(arms[f"{way}-{m}-horizontal"]) == (36, 36 * m)
    # A key from the command line stands above an arm's own.
    changed = load(RECIPES / "scaling_mixed.toml", ["arms.F-TIS-16.set.peers.*.learning_rate=1e-4"])
    (arm,) = arms_of(changed, ("F-TIS-16",))
    assert {peer.learning_rate for peer in arm.recipe.peers if peer.train == "full"} == {1e-4}


@pytest.mark.slow
def test_the_scaling_recipe_runs_on_tiny_models(tmp_path: Path, models: dict[str, Path]) -> None:
    settings = ["training.rounds=1", "training.eval_every=0", "training.prompts_per_round=16"]
    settings += ["training.steps_per_generation=1", "sampling.num_generations=4", "sampling.max_completion_length=6"]
    settings += ["task.validation_size=2", "ood.0.validation_size=2", f"output_dir={tmp_path}"]
    settings += [f"peers.*.model={models['a']}", f"peers.large20.model={models['b']}", "processes=inline", "seed=0"]
    settings += [f"arms.alone-x2.set.training.prompts_per_round={16 * 2}"]
    settings += [f"arms.F-TIS-{m}.set.training.prompts_per_round={m}" for m in (2, 4)]
    arms = [f"--arm={arm}" for arm in ("alone-part", "alone-x2", "F-TIS-2", "F-TIS-4")]
    assert ftis("train", str(RECIPES / "scaling.toml"), *arms, *(f"--set={key}" for key in settings)) == 0
    assert research(show_scaling, str(tmp_path / "scaling-seed0")) == 0
    found = json.loads((tmp_path / "scaling-seed0" / "scaling.json").read_text())
    assert [(alone["arm"], alone["sampled"]) for alone in found["ceilings"]] == [("alone-x2", 8)]
    (series,) = found["series"]
    assert [(size["size"], size["trained"]) for size in series["sizes"]] == [(1, 4), (2, 8), (4, 16)]


@pytest.mark.slow
def test_the_recipes_of_the_paper_run_on_tiny_models(tmp_path: Path, models: dict[str, Path]) -> None:
    for figure in FIGURES:
        recipe = RECIPES / "paper" / "starter" / f"{figure}.toml"
        loaded = load(recipe)
        settings = [f"peers.{p.name}.model={models['a' if p.train == 'lora' else 'b']}" for p in loaded.peers]
        settings += ["training.rounds=1", "training.eval_every=0", "training.prompts_per_round=2", "processes=inline"]
        settings += ["sampling.num_generations=2", "sampling.max_completion_length=8", f"output_dir={tmp_path}"]
        settings += ["task.validation_size=2", "ood.0.validation_size=2"]
        assert ftis("train", str(recipe), *(f"--set={key}" for key in settings)) == 0
        summary = json.loads((tmp_path / f"{loaded.name}-seed0" / "summary.json").read_text())
        assert [len(peers) for peers in summary["arms"].values()] == [len(loaded.peers)] * len(loaded.arms)
