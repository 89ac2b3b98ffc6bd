"""Which learning rate serves an arm: the experiment that asks, its held-out problems, and what is said of it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from commands import ftis
from rich.console import Console
from scene import Scene

from ftis.config import Recipe, TaskConfig
from ftis.lab.arms import RunError, arms_of
from ftis.lab.rates import Tried, advice, held_out, read_trials, table, trials
from ftis.lab.recipes import load, parse
from ftis.tasks.problems import load_task
from recipes import write_recipe

ROOT = Path(__file__).parents[1]
PART: dict[str, Any] = {"name": "part", "collaborate": False, "budget": "generated"}
PEERS = [
    {"name": "small", "model": "starter:small", "learning_rate": 1e-3},
    {"name": "adapter", "model": "starter:small", "learning_rate": 4e-3},
    {"name": "large", "model": "starter:large", "learning_rate": 1e-3},
]


def recipe(*arms: dict[str, Any], **sections: Any) -> Recipe:
    task = {"name": "clock", "validation_size": 40, "train_size": 200}
    ood = [{"name": "clock", "options": {"operators": 4}}]
    document = {"name": "compared", "task": task, "ood": ood, "peers": PEERS, "arms": list(arms), **sections}
    return parse(document)


def rates_of(trial: Recipe, arm: str) -> dict[str, float]:
    (found,) = arms_of(trial, (arm,))
    return {peer.name: peer.learning_rate for peer in found.recipe.peers}


def test_each_arm_is_tried_at_each_multiple_of_what_its_peers_have() -> None:
    fast = {"name": "fast", "set": {"peers.small.learning_rate": 2e-3, "training.rounds": 5}}
    trial = trials(recipe(PART, fast), (), [2, 0.5, 2])
    names = ["part-rate-x0.5", "part-rate-x2", "fast-rate-x0.5", "fast-rate-x2"]
    assert [arm.name for arm in trial.arms] == names
    assert rates_of(trial, "part-rate-x0.5") == pytest.approx({"small": 5e-4, "adapter": 2e-3, "large": 5e-4})
    assert rates_of(trial, "fast-rate-x2") == pytest.approx({"small": 4e-3, "adapter": 8e-3, "large": 2e-3})
    (part, *_, other) = arms_of(trial)
    assert (len(part.swarms), len(other.swarms)) == (3, 1)
    assert (part.recipe.training.rounds, other.recipe.training.rounds) == (recipe(PART).training.rounds, 5)
    assert trial.experiment.baselines == (names[0],)


def test_rates_that_an_arm_gives_to_all_peers_are_multiplied_too() -> None:
    for given in ({"peers.*.learning_rate": 6e-4}, {"peers": {"small": {"learning_rate": 6e-4}}}):
        trial = trials(recipe(PART, {"name": "own", "set": given}), ("own",), [0.5])
        assert rates_of(trial, "own-rate-x0.5")["small"] == pytest.approx(3e-4)
    both = {"name": "own", "set": {"peers.small.learning_rate": 1.0, "peers.*.learning_rate": 6e-4}}
    assert rates_of(trials(recipe(both), (), [0.5]), "own-rate-x0.5")["small"] == pytest.approx(3e-4)


def test_a_recipe_without_arms_has_the_one_of_its_objective() -> None:
    assert [arm.name for arm in trials(recipe(), (), [1]).arms] == ["F-TIS-rate-x1"]


@pytest.mark.parametrize("times", [(), (1, 0), (1, -2)])
def test_multiples_are_above_nought(times: tuple[float, ...]) -> None:
    with pytest.raises(RunError, match="give multiples above 0"):
        trials(recipe(PART), (), times)


def test_an_unknown_arm_is_refused() -> None:
    with pytest.raises(RunError, match="no arm 'parts' in the recipe: it has part"):
        trials(recipe(PART), ("parts",), [1])


def test_what_a_comparison_reports_stays_unseen() -> None:
    """Validation comes out of training problems, which lose them; out of distribution nothing is evaluated."""
    compared = recipe(PART)
    trial = trials(compared, (), [1])
    reported, tried = load_task(compared.task), load_task(trial.task)
    assert trial.ood == ()
    assert len(tried.validation) == len(reported.validation) == 40
    training = {prompt.question: prompt.answer for prompt in reported.train}
    assert all(training[prompt.question] == prompt.answer for prompt in tried.validation)
    assert {p.question for p in tried.train} == training.keys() - {p.question for p in tried.validation}
    assert not {p.question for p in tried.validation} & {p.question for p in reported.validation}
    assert tried.answer_kind == reported.answer_kind


def test_columns_that_a_judge_reads_are_kept() -> None:
    pytest.importorskip("reasoning_gym")
    named = TaskConfig(name="reasoning_gym:chain_sum", train_size=20, validation_size=5)
    task = held_out(TaskConfig(name="ftis.lab.rates.held_out", validation_size=5, options=named.model_dump()))
    columns = {prompt.question: prompt.columns for prompt in load_task(named).train}
    assert columns[task.validation[0].question]  # the judge's entry
    assert all(prompt.columns == columns[prompt.question] for prompt in (*task.train, *task.validation))


def final(arm: str, peer: str, seed: int, split: str) -> float:
    multiple = float(arm.partition("-rate-x")[2])
    return {0.5: 0.3, 1: 0.5, 2: 0.4}[multiple] + (0.1 if peer == "adapter" else 0.0) + 0.02 * seed


def test_peers_of_one_rate_are_a_row(tmp_path: Path) -> None:
    compared, times = recipe(PART), (0.5, 1.0, 2.0)
    arms = [arm.model_dump() for arm in trials(compared, (), times).arms]
    scene = Scene(tmp_path, final, ("small", "adapter", "large"), tuple(arms), (0, 1), ood=False)
    found = read_trials(compared, (), times, scene.write())
    assert [(tried.arm, tried.rate, tried.peers, tried.best) for tried in found] == [
        ("part", 1e-3, ("small", "large"), 1.0),
        ("part", 4e-3, ("adapter",), 1.0),
    ]
    assert found[0].accuracy[0.5] == pytest.approx([0.3, 0.32])
    assert found[1].accuracy[1.0] == pytest.approx([0.6, 0.62])
    out = io.StringIO()
    Console(file=out, width=120).print(table(found))
    shown = out.getvalue()
    assert "part (2 peers)" in shown
    assert "part (one peer)" in shown
    assert "0.510 (0.500–0.520)" in shown
    assert "mean over 2 seeds, lowest and highest" in shown


def tried(*accuracies: float) -> Tried:
    return Tried("part", 1e-3, ("small",), {times: [a] for times, a in zip((0.5, 1.0, 2.0), accuracies, strict=True)})


def test_a_best_one_at_the_end_of_what_was_tried_is_no_answer() -> None:
    lowest, *rest = advice([tried(0.6, 0.5, 0.4)])
    assert lowest == "part: 0.0005 is best and the lowest tried; go on with --times 0.25,0.5,1,2"
    highest, *_ = advice([tried(0.2, 0.5, 0.6)])
    assert highest == "part: 0.002 is best and the highest tried; go on with --times 0.5,1,2,4"
    assert len(rest) == len(advice([tried(0.2, 0.5, 0.4)])) == 1


@pytest.fixture
def place(tmp_path: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a recipe of one small model, in which commands run."""
    task = {"validation_size": 6}
    peers = {"a": {"model": models["a"], "learning_rate": 1e-3}}
    write_recipe(tmp_path, peers, top={"output_dir": tmp_path / "runs", "threads": 1}, task=task)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_command_compares_rates_and_goes_on_with_more(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """More multiples are added to what was run."""
    asked = ["rates", "recipe.toml", "--seeds", "1", "--jobs", "1", "--set", "training.rounds=1"]
    asked += ["--set", "training.eval_every=1"]
    assert ftis(*asked, "--times", "1,2") == 0
    first = capsys.readouterr().out
    assert "2 jobs, 0 of them finished before" in first
    assert "set what serves an arm in it" in first
    rate = load(place / "recipe.toml").peers[0].learning_rate
    directory = place / "runs" / f"{load(place / 'recipe.toml').name}-rates"
    assert (directory / "report.html").exists()
    assert ftis(*asked, "--times", "1,2,4") == 0
    again = capsys.readouterr().out
    assert "3 jobs, 2 of them finished before" in again
    assert f"{rate:g}" in again
    assert "× 4" in again


def test_the_command_wants_numbers(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ftis("rates", "recipe.toml", "--times", "a,b") == 2
    assert "give numbers with commas between them" in capsys.readouterr().err
    assert ftis("rates", "recipe.toml", "--times", "0") == 1
    assert "give multiples above 0" in capsys.readouterr().err


def test_the_demos_arms_can_be_tried() -> None:
    trial = trials(load(ROOT / "recipes" / "demo.toml"), ("alone-part", "F-TIS"), [1])
    assert [arm.name for arm in arms_of(trial)] == ["alone-part-rate-x1", "F-TIS-rate-x1"]
