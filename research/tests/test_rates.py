"""The learning rate that serves an arm: the experiment that finds it, its held-out problems, and the advice."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import research
from rich.console import Console
from scene import Scene

from ftis.comparison.results import compare
from ftis.config import Recipe, RecipeError, RunError, TaskConfig
from ftis.prompts import Task, TaskError
from ftis.recipe.arms import arms_of
from ftis.recipe.parsing import load, parse
from ftis.tasks.problems import load_task
from recipes import write_recipe
from research.rates import TriedRate, advice, compare_rates, multiples, read_trials, table, trials

ROOT = Path(__file__).parents[2]
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
    trial = trials(recipe(PART, fast), (), [0.5, 2])
    names = ["part-rate-x0.5", "part-rate-x2", "fast-rate-x0.5", "fast-rate-x2"]
    assert [arm.name for arm in trial.arms] == names
    assert rates_of(trial, "part-rate-x0.5") == pytest.approx({"small": 5e-4, "adapter": 2e-3, "large": 5e-4})
    assert rates_of(trial, "fast-rate-x2") == pytest.approx({"small": 4e-3, "adapter": 8e-3, "large": 2e-3})
    (part, *_, other) = arms_of(trial)
    assert (len(part.swarms), len(other.swarms)) == (3, 1)
    assert (part.recipe.training.rounds, other.recipe.training.rounds) == (recipe(PART).training.rounds, 5)
    assert trial.experiment.baselines == tuple(names)  # so that none is compared with another
    trial = trials(recipe(PART), (), [0.1, 1e-5, 1e6])
    assert rates_of(trial, "part-rate-x0.1")["adapter"] == 4e-4, "without noise in its last digits"
    assert [arm.name for arm in trial.arms][1:] == ["part-rate-x0.00001", "part-rate-x1000000"]


def test_multiples_that_were_tried_before_count() -> None:
    """An arm's best may be among them, and the table names the best."""
    compared = recipe(PART, {"name": "fast"})
    earlier, now = trials(compared, (), [0.5, 1]), trials(compared, ("part",), [2.25], ("adapter",))
    both = now.model_copy(update={"arms": (*earlier.arms, *now.arms)})
    assert multiples(compared, ("part",), both, ("adapter",)) == [1, 2.25]
    assert multiples(compared, ("part",), both) == multiples(compared, (), both) == [0.5, 1]


def test_rates_that_an_arm_gives_to_all_peers_are_multiplied_too() -> None:
    for given in ({"peers.*.learning_rate": 6e-4}, {"peers": {"small": {"learning_rate": 6e-4}}}):
        trial = trials(recipe(PART, {"name": "own", "set": given}), ("own",), [0.5])
        assert rates_of(trial, "own-rate-x0.5")["small"] == pytest.approx(3e-4)
    both = {"name": "own", "set": {"peers.small.learning_rate": 1.0, "peers.*.learning_rate": 6e-4}}
    assert rates_of(trials(recipe(both), (), [0.5]), "own-rate-x0.5")["small"] == pytest.approx(3e-4)


def test_of_named_peers_the_rates_alone_are_multiplied() -> None:
    """At their own rates it is the arm that all peers are tried with, so what ran as that serves here too."""
    compared = recipe(PART)
    trial = trials(compared, (), [1, 2], ("adapter",))
    assert [arm.name for arm in trial.arms] == ["part-rate-x1", "part-rate-x2-of-adapter"]
    assert rates_of(trial, "part-rate-x2-of-adapter") == pytest.approx({"small": 1e-3, "adapter": 8e-3, "large": 1e-3})
    assert trial.arms[0] == trials(compared, (), [1]).arms[0]
    both = trials(compared, (), [2], ("adapter", "small"))
    assert [arm.name for arm in both.arms] == ["part-rate-x2-of-small-adapter"]
    assert trials(compared, (), [2], ("small", "adapter", "small")) == both
    assert trials(compared, (), [2], ("large", "adapter", "small")) == trials(compared, (), [2])
    assert trials(compared, (), [2], ("ada*",)) == trials(compared, (), [2], ("adapter",))
    assert trials(compared, (), [2], ("s*", "adapter")) == both
    with pytest.raises(RunError, match=r"at most 64 letters: shorten the arm's, or the peers'$"):
        trials(recipe({"name": "a" * 50}), (), [2], ("adapter",))
    with pytest.raises(RecipeError, match=r"no peer 'adaptor' in the recipe \(did you mean 'adapter'\?\)$"):
        trials(compared, (), [1], ("adapter", "adaptor"))


def test_arms_that_cannot_be_tried_are_refused() -> None:
    for key in ({"task.seed": 5}, {"task": {"seed": 5}}):
        with pytest.raises(RunError, match=r"arm 'other' sets task, and .*: name the other arms with --arm"):
            trials(recipe(PART, {"name": "other", "set": key}), (), [1])
    assert len(trials(recipe(PART, {"name": "other", "set": {"task.seed": 5}}), ("part",), [1]).arms) == 1


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


def held_out(size: int | None = None, **options: Any) -> Task:
    return load_task(TaskConfig(name="research.held_out.load", validation_size=size, options=options))


def test_a_fifth_at_most_is_held_out_and_something_is_left_to_train_on() -> None:
    assert len(held_out(name="clock", train_size=2000).validation) == 300  # clock's own number
    assert len(held_out(7, name="clock", train_size=2000).validation) == 7
    assert len(held_out(name="clock", train_size=100).validation) == 20
    refused: list[tuple[dict[str, Any], str]] = [
        ({"name": "clock", "train_size": 4}, r"task 'clock' has 4 different problems .*; set task.train_size"),
        ({"name": "clock", "nam": 1}, r"task.options.nam of 'research.held_out.load': .*; give a task's own keys"),
        ({}, r"task.options.name of 'research.held_out.load': "),
    ]
    for options, said in refused:
        with pytest.raises(TaskError, match=said):
            held_out(**options)


def final(arm: str, peer: str, seed: int, split: str) -> float:
    multiple = float(arm.partition("-rate-x")[2].partition("-of-")[0])
    return {0.5: 0.3, 1: 0.5, 2: 0.4}[multiple] + (0.1 if peer == "adapter" else 0.0) + 0.02 * seed


def read(directory: Path, times: Sequence[float], peers: Sequence[str] = ()) -> list[TriedRate]:
    """What became of the arm ``PART`` at these multiples of its peers' rates."""
    trial = trials(recipe(PART), (), times, peers)
    arms, settings = tuple(arm.model_dump() for arm in trial.arms), {"experiment": trial.experiment.model_dump()}
    scene = Scene(directory, final, ("small", "adapter", "large"), arms, (0, 1), ood=False, settings=settings)
    return read_trials(recipe(PART), (), times, scene.write(), peers)


def test_peers_of_one_rate_are_a_row_and_a_named_peer_has_its_own(tmp_path: Path) -> None:
    found = read(tmp_path / "all", (0.5, 1.0, 2.0))
    assert [(tried.arm, tried.rate, tried.peers, tried.best) for tried in found] == [
        ("part", 1e-3, ("small", "large"), 1.0),
        ("part", 4e-3, ("adapter",), 1.0),
    ]
    assert found[0].accuracy[0.5] == pytest.approx([0.3, 0.32])
    assert found[1].accuracy[1.0] == pytest.approx([0.6, 0.62])
    assert found[0].start == pytest.approx(0.1)  # of every model in a scene
    out = io.StringIO()
    Console(file=out, width=120).print(table(found, recipe(PART)))
    for shown in ("part (small, large)", "part (adapter)", "0.510 (0.500–0.520)", "peers and 2 seeds (the lowest and "):
        assert shown in out.getvalue()
    assert advice(found)[0].startswith("an arm's rates were multiplied together")
    results = compare(tmp_path / "all")  # it comes without verdicts: rates are chosen, not compared
    assert (results.comparisons, results.together) == ([], [])

    (one,) = read(tmp_path / "one", (0.5, 1.0), ("adapter",))
    assert (one.peers, one.rate, one.whole, one.together) == (("adapter",), 4e-3, False, False)
    assert one.accuracy == {0.5: pytest.approx([0.4, 0.42]), 1.0: pytest.approx([0.6, 0.62])}
    assert not any("multiplied together" in line for line in advice([one]))


def tried(*accuracies: float) -> TriedRate:
    return TriedRate("part", 1e-3, ("small",), 0.1, {t: [a] for t, a in zip((0.5, 1.0, 2.0), accuracies, strict=False)})


def test_a_best_one_at_the_end_of_what_was_tried_is_no_answer() -> None:
    lowest, *_ = advice([tried(0.6, 0.5, 0.4)])
    assert lowest == "part: 0.0005 is best and the lowest that was tried: try --times 0.25,0.5,1,2 too"
    highest, *_ = advice([tried(0.2, 0.5, 0.6)])
    assert highest == "part: 0.002 is best and the highest that was tried: try --times 0.5,1,2,4 too"
    of_two = [replace(one, whole=False, together=True) for one in (tried(0.2, 0.5, 0.6), tried(0.2, 0.5, 0.4))]
    assert advice(of_two)[0].startswith("part (small at 0.001): 0.002 is best")
    assert advice(of_two)[1].startswith("an arm's rates were multiplied together")
    assert len(advice([tried(0.2, 0.5, 0.4)])) == len(advice([tried(0.2)])) == 1
    assert advice([tried(0.0, 0.0, 0.0)])[0] == "part: the same at each rate, so none is shown to serve it"
    assert (tried(0.5, 0.5, 0.1).best, tried(0.5, 0.1, 0.5).best, tried(0.1, 0.5, 0.5).best) == (1.0, 0.5, 1.0)


def test_the_command_compares_rates_and_goes_on_with_others(
    tmp_path: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Existing arms stay, whichever multiples are asked for."""
    top = {"output_dir": tmp_path / "runs", "threads": 1}
    peers = {"a": {"model": models["a"], "learning_rate": 1e-3}}
    write_recipe(tmp_path, peers, top=top, task={"validation_size": 6})
    monkeypatch.chdir(tmp_path)
    for times in ("a,b", "0", "1,-2", "nan", "inf", ""):
        assert research(compare_rates, "recipe.toml", "--times", times) == 2
    asked = ["recipe.toml", "--seeds", "1", "--jobs", "1", "--set", "training.rounds=1"]
    asked += ["--set", "training.eval_every=1"]
    assert research(compare_rates, *asked, "--times", "2,1", "--dry-run") == 0
    assert "2 jobs, 0 of them finished before" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()
    assert research(compare_rates, *asked, "--times", "2,1") == 0
    first = capsys.readouterr().out
    assert "2 jobs, 0 of them finished before" in first
    assert "set what serves all arms in" in first
    (directory,) = (tmp_path / "runs").iterdir()
    assert directory.name == f"{load(tmp_path / 'recipe.toml').name}-rates"
    assert research(compare_rates, *asked, "--times", "1,4") == 0
    again = capsys.readouterr().out
    assert "3 jobs, 2 of them finished before" in again
    assert "× 4" in again
    assert "× 2" in again  # tried before, and it may be the best
    assert research(compare_rates, *asked, "--times", "1", "--peer", "b") == 1
    assert "no peer 'b' in the recipe; known: a" in capsys.readouterr().err
    assert research(compare_rates, *asked, "--times", "1,2", "--peer", "a", "--dry-run") == 0
    assert "3 jobs, 3 of them finished before" in capsys.readouterr().out
    assert research(compare_rates, *asked, "--times", "1", "--set", "peers.a.learning_rate=0.1") == 1
    assert "they differ in: arms.F-TIS-rate-x1.set.peers.a.learning_rate (" in capsys.readouterr().err
