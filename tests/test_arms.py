"""Swarms of many sizes as arms of one recipe: who learns with whom, who samples how much, and what is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from conftest import TinyModelDir
from transformers import AutoModelForCausalLM

from ftis.check.estimate import disk_of
from ftis.check.plan import of_jobs, problems
from ftis.check.quantities import in_bytes
from ftis.cli import seeds_of
from ftis.comparison.budgets import matched
from ftis.config import RecipeError, RunError
from ftis.experiment.seeds import jobs_of, run_experiment
from ftis.joining.join import choose_arm
from ftis.objectives import resolve
from ftis.preparing import checks
from ftis.preparing.checks import check
from ftis.prompts import TaskError
from ftis.recipe.arms import arms_of, keep_arms, rollouts_per_round, threads_of
from ftis.recipe.parsing import load, parse, set_key, with_arm
from ftis.records.lines import RecordsError
from ftis.selection import selections_of
from ftis.tasks.problems import load_task
from recipes import recipe_of, write_recipe

ROOT = Path(__file__).parents[1]
ALONE = {"name": "alone-part", "collaborate": False, "budget": "generated"}
SIZES = [{"name": f"F-TIS-{m}", "set": {"training": {"swarm_size": m, "prompts_per_round": 3 * m}}} for m in (2, 4)]


def document(peers: str = "abcd", **keys: Any) -> dict[str, Any]:
    """A recipe of peers named by letters, with 3 prompts each; keys as in ``training__rounds=3``."""
    made: dict[str, Any] = {
        "name": "sizes",
        "task": {"name": "clock"},
        "sampling": {"num_generations": 4, "max_completion_length": 40},
        "training": {"prompts_per_round": 12},
        "peers": [{"name": name, "model": "starter:small"} for name in peers],
        "arms": [ALONE, *SIZES],
    }
    for key, value in keys.items():
        set_key(made, key.replace("__", "."), value)
    return made


def test_some_arms_are_compared_with_the_baselines_among_them() -> None:
    recipe = parse(document(experiment={"baselines": ["F-TIS-4", "alone-part"]}))
    assert keep_arms(recipe, ()) is recipe
    some = keep_arms(recipe, ("F-TIS-2", "alone-part"))
    assert [arm.name for arm in some.arms] == ["alone-part", "F-TIS-2"]
    assert some.experiment.baselines == ("alone-part",)
    with pytest.raises(RunError, match="add --arm F-TIS-4 or --arm alone-part"):
        keep_arms(recipe, ("F-TIS-2",))
    with pytest.raises(RunError, match=r"'F-TIS' .* alone-part, F-TIS-2, F-TIS-4"):
        keep_arms(recipe, ("F-TIS", "alone-part"))
    name, swarm = choose_arm(recipe, "a", "F-TIS-4")  # of which one peer joins the network
    assert (name, swarm.training.foreign_failures) == ("F-TIS-4", False)
    trusting = parse(document(training__foreign_failures=True))
    assert choose_arm(trusting, "a", "F-TIS-4")[1].training.foreign_failures is True
    for arm in ("alone-part", None):
        with pytest.raises(RecipeError, match="F-TIS-2, F-TIS-4; name one"):
            choose_arm(recipe, "a", arm)


def test_a_peer_alone_can_have_any_number_of_prompts() -> None:
    alone = {"name": "alone", "collaborate": False, "set": {"training": {"swarm_size": 1, "prompts_per_round": 5}}}
    recipe = parse(document(arms=[alone, SIZES[1]]))
    assert [rollouts_per_round(swarm) for swarm in arms_of(recipe)[0].swarms] == [(20, 20)] * 4


def test_a_peer_alone_trains_on_as_many_rollouts_as_one_whose_foreign_rollouts_are_limited() -> None:
    arms = [{"name": "alone", "collaborate": False}, {"name": "F-TIS"}]
    recipe = parse(document(arms=arms, training__max_foreign_rollouts=14))
    alone, together = arms_of(recipe)
    assert [swarm.training.prompts_per_round for swarm in alone.swarms] == [6] * 4  # 12 own and 12 foreign, in 4s
    assert rollouts_per_round(together.swarms[0]) == (12, 12 + 12)  # whole groups
    (pair,) = matched(arms_of(recipe), ["alone"])
    assert pair.equal == "equal in rollouts trained on"


def test_a_swarm_size_puts_neighbours_together() -> None:
    pairs, all_four = (arms_of(parse(document()), (f"F-TIS-{m}",))[0] for m in (2, 4))
    assert [[p.name for p in swarm.peers] for swarm in pairs.swarms] == [["a", "b"], ["c", "d"]]
    assert [[p.name for p in swarm.peers] for swarm in all_four.swarms] == [["a", "b", "c", "d"]]
    assert [part.peers for part in pairs.parts()] == [("a", "b"), ("c", "d")]
    assert [part.first for part in pairs.parts()] == [0, 2]
    assert pairs.part_of("d").peers == ("c", "d")
    with pytest.raises(RecipeError, match="no peer 'e'"):
        pairs.part_of("e")


def test_own_sampling_is_the_same_in_every_size() -> None:
    recipe = parse(document())
    assert recipe.training.prompts_per_round == 12
    sampled = {arm.name: [rollouts_per_round(swarm) for swarm in arm.swarms] for arm in arms_of(recipe)}
    assert sampled == {"alone-part": [(12, 12)] * 4, "F-TIS-2": [(12, 24)] * 2, "F-TIS-4": [(12, 48)]}
    assert [arm.recipe.training.prompts_per_round for arm in arms_of(recipe)[1:]] == [6, 12]


def test_the_written_recipe_is_read_back() -> None:
    given = document(training__max_foreign_rollouts=4)
    given["arms"].append({"name": "alone", "collaborate": False})
    recipe = parse(given)
    for written in (recipe, *(with_arm(recipe, arm) for arm in recipe.arms)):
        assert parse(json.loads(written.model_dump_json())) == written
    for arm in arms_of(recipe):
        for swarm in arm.swarms:  # as ftis join writes it
            assert parse(json.loads(swarm.model_dump_json())) == swarm
            assert swarm.training.max_foreign_rollouts == (4 if len(swarm.peers) > 1 else 0)


def test_what_does_not_fit_is_refused() -> None:
    cases: list[Any] = [
        (document(arms=[{"name": "x", "budget": "generated"}]), "collaborate = false"),
        (document(peers="abcdef"), "arm 'F-TIS-4'", "swarm_size = 4", "2 or 3"),
        (document(peers="abc", arms=[SIZES[0]]), "take 3"),
        (document(training__swarm_size=0), "training.swarm_size = 0"),
        (document(training__swarms=[["a", "b"], ["c", "d"]]), "training.swarms is gone", "training.swarm_size"),
        (document(arms=[{"name": "x", "swarm_size": 2}]), "arms.x.swarm_size is gone", "training.swarm_size"),
        (document(arms=[{"name": "x", "budget": "seconds"}]), "arms.x.budget = 'seconds' is gone", "swarm_size = 1"),
    ]
    for given, *words in cases:
        with pytest.raises(RecipeError) as caught:
            arms_of(parse(given))
        assert all(word in str(caught.value) for word in words), caught.value


def test_without_arms_there_is_one_named_after_the_objective() -> None:
    for objective, arm in [
        ("F-TIS", "F-TIS"),
        ("_mine.OBJ", "mine.OBJ"),
        ("m" * 70 + ".X", "m" * 62 + ".X"),
        ("", "objective"),
    ]:
        recipe = parse(document(arms=[], objective__name=objective))
        assert [one.name for one in arms_of(recipe)] == [arm]


def test_a_part_alone_has_a_prompt_where_its_share_of_the_rollouts_is_less() -> None:
    one = {"mode": "horizontal", "prompts_per_round": 1}
    recipe = parse(document("ab", arms=[ALONE, {"name": "F-TIS"}], training=one, experiment__baselines=["alone-part"]))
    assert [arm.swarms[0].training.prompts_per_round for arm in arms_of(recipe)] == [1, 1]


def test_a_task_without_problems_to_validate_with_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load_task(parse(document()).task)
    monkeypatch.setattr(checks, "load_task", lambda config: replace(whole, validation=()))
    with pytest.raises(TaskError, match="task 'clock' has no problems to validate with"):
        check(arms_of(parse(document())))


def test_a_task_for_evaluation_alone_is_not_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load_task(parse(document()).task)
    monkeypatch.setattr(checks, "load_task", lambda config: replace(whole, train=()))
    with pytest.raises(RunError, match=r"has no problems to train on: put it under \[\[ood\]\]"):
        check(arms_of(parse(document())))


def test_the_problems_of_an_arm_are_told_if_they_are_not_the_firsts() -> None:
    arms = [ALONE, {"name": "F-TIS"}, {"name": "few", "set": {"task.train_size": 60}}]
    first, few = [line for line in problems(check(arms_of(parse(document(arms=arms))))) if "to train on" in line]
    assert first.startswith("task clock: ")
    assert few.startswith("few: task clock: 60 problems")


def test_the_threads_of_a_peer_are_those_of_its_arm() -> None:
    recipe = parse(document())
    by_name = {arm.name: arm.recipe for arm in arms_of(recipe)}
    assert {name: threads_of(of, 8) for name, of in by_name.items()} == {"alone-part": 2, "F-TIS-2": 4, "F-TIS-4": 2}
    assert threads_of(by_name["F-TIS-2"], 1) == 1
    assert threads_of(recipe.model_copy(update={"threads": 3}), 8) == 3


def test_a_plan_names_every_arm_and_guesses_the_time(tmp_path: Path) -> None:
    recipe = parse(document(output_dir=str(tmp_path / "runs")))
    first, *arms, _ = of_jobs(recipe, jobs_of(recipe, range(3)), 2)
    assert first.startswith("21 jobs, 0 of them")
    for arm, jobs, trained in (("alone-part", "12 jobs", 12), ("F-TIS-4", "3 jobs of 4", 48)):
        assert any(
            line.startswith(f"{arm}: {jobs}") and f"12 rollouts and trains on {trained};" in line for line in arms
        )


def test_seeds_are_a_number_of_them_or_the_first_and_the_last() -> None:
    for text, seeds in [("1", [0]), ("3", [0, 1, 2]), ("5-7", [5, 6, 7]), ("4-4", [4])]:
        assert list(seeds_of(text)) == seeds
    for text in ["", "0", "x", "5-", "-5", "7-5", "1-2-3", "1.5", "²"]:
        with pytest.raises(typer.BadParameter, match=f"^'{re.escape(text)}' .*: give "):
            seeds_of(text)


def test_seeds_of_another_recipe_do_not_join_an_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftis.experiment.seeds.run_jobs", lambda *rest: None)
    base: dict[str, Any] = {"output_dir": str(tmp_path), "experiment__baselines": ["alone-part"]}
    recipe = parse(document(**base))
    assert run_experiment(recipe, [0], 1)
    place = tmp_path / recipe.name
    evaluated = place / f"{recipe.name}-seed0" / "F-TIS-2" / recipe.peers[0].name / "evaluations.jsonl"
    evaluated.parent.mkdir(parents=True)
    evaluated.write_text("{}\n")
    changed = parse(document(**base, sampling__temperature=0.5))
    with pytest.raises(RunError, match=r"sampling\.temperature"):
        run_experiment(changed, [4, 5], 1)
    assert json.loads((place / "experiment.json").read_text())["seeds"] == [0]
    assert run_experiment(recipe, [4, 5], 1)
    assert json.loads((place / "experiment.json").read_text())["seeds"] == [0, 4, 5]
    (place / "experiment.json").write_text("{")
    with pytest.raises(RecordsError, match=r"experiment\.json is damaged"):
        run_experiment(recipe, [4], 1)


def test_a_plan_counts_the_disk_of_all_seeds_and_says_where_there_is_too_little(
    tmp_path: Path, tiny_model_dir: TinyModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tiny_model_dir())
    peers: dict[str, dict[str, Any]] = {"a": {"model": path}, "b": {"model": path, "train": "lora", "lora_r": 2}}
    arms: list[dict[str, Any]] = [{"name": "alone", "collaborate": False}, {"name": "F-TIS"}]
    recipe = load(
        write_recipe(tmp_path, peers, arms=arms, training={"rounds": 4, "save_every": 2, "prompts_per_round": 8})
    )
    model = AutoModelForCausalLM.from_pretrained(path)
    targets = recipe.peers[1].lora_target_modules
    adapted = [m for name, m in model.named_modules() if name.rpartition(".")[2] in targets]
    trained = [sum(p.numel() for p in model.parameters()), sum(2 * (m.in_features + m.out_features) for m in adapted)]
    total = 12 * sum(trained) * 2 * 2 * 3  # float32 and AdamW's two moments; two checkpoints, two arms, three seeds
    assert disk_of([s for arm in arms_of(recipe) for s in arm.swarms] * 3) == (total, [])
    assert disk_of([recipe_of("a", "b")]) == (0, ["none"])
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=total))
    for free, enough in ((total, True), (total - 1, False)):
        monkeypatch.setattr("shutil.disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        line = of_jobs(recipe, jobs_of(recipe, range(3)), 1)[-2]
        assert line.startswith(f"disk: {in_bytes(total)} in all")
        assert ("output_dir" not in line) == enough


def test_every_arm_of_every_recipe_names_what_there_is() -> None:
    for path in sorted(
        str(p.relative_to(ROOT)) for place in ("recipes", "research") for p in (ROOT / place).rglob("*.toml")
    ):
        recipe = load(ROOT / path)
        for arm in arms_of(recipe):
            for swarm in arm.swarms:
                objective = resolve(swarm.objective)
                for peer in swarm.peers:
                    assert selections_of(swarm, peer.name, objective)
        named = {arm.name for arm in arms_of(recipe)}
        assert not recipe.experiment or set(recipe.experiment.baselines) <= named


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").rglob("*.toml")), ids=lambda path: path.stem)
def test_each_recipe_compares_with_three_baselines_of_equal_sampling(path: Path) -> None:
    recipe = load(path)
    baselines = ("alone-spread", "alone-reuse", "imitation")
    assert recipe.experiment.baselines[:3] == baselines
    arms = {arm.name: arm.swarms[0] for arm in arms_of(recipe)}
    sampled = {arm: arms[arm].prompts_per_peer * arms[arm].rollouts_per_group for arm in (*baselines, "F-TIS")}
    assert len(set(sampled.values())) == 1, sampled
    assert (arms["alone-reuse"].training.num_iterations, arms["imitation"].objective.name) == (2, "imitation")
