"""docs/extending.md: every example is taken from the page, put into a file outside the package, and trained with."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import ftis as ftis_command

import ftis
from ftis.config import FtisError, ObjectiveConfig
from ftis.metric_keys import by_peer
from ftis.objectives import Objective, policy_loss, resolve
from ftis.recipe.parsing import parse
from ftis.records.files import read_jsonl
from ftis.records.plan import read_provenance
from ftis.records.rollouts import read_rollouts
from recipes import SECTIONS, pair_of, write_recipe

PAGE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text(encoding="utf-8")
MODULES = dict(re.findall(r"```python\n# (my_\w+)\.py\n(.*?)```", PAGE, flags=re.S))
SETTINGS = [tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", PAGE, flags=re.S)]
ROUNDS = 4


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with the page's modules, on the path."""
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def train(outside: Path, models: dict[str, Path]) -> Callable[..., dict[str, list[dict[str, Any]]]]:
    """Train two tiny peers with what the page sets; the metrics of each peer."""

    def run(name: str = "") -> dict[str, list[dict[str, Any]]]:
        settings = next((dict(s) for s in SETTINGS if name and name in repr(s)), {})
        of_peers = {of["name"]: of for of in settings.pop("peers", ())}
        sections = {
            "reward": {"function": "recipes.evenness"},
            "sampling": {"num_generations": 4, "max_completion_length": 8},
            "training": {"rounds": ROUNDS, "prompts_per_round": 4, "eval_every": 0},
        }
        document = pair_of(models, outside / "runs", 1e-3, **sections)
        for key, value in settings.items():
            document[key] = {**document.get(key, {}), **value} if isinstance(value, dict) else value
        document["peers"] = [{**peer, **of_peers.get(peer["name"], {})} for peer in document["peers"]]
        if name == "my_tasks":
            document["task"] = {**settings["task"], "validation_size": None}
        assert ftis.train(parse(document), overwrite=True)
        directory = outside / "runs" / "tiny-seed0" / settings.get("objective", {}).get("name", "F-TIS")
        return {n: read_jsonl(directory / n / "metrics.jsonl") for n in "ab"}

    return run


def test_every_example_is_short_and_every_seam_has_one() -> None:
    assert set(MODULES) == {
        "my_objectives", "my_selections", "my_defences", "my_samplers", "my_tasks", "my_rewards", "my_trackers",
        "my_attacks", "my_swarm",
    }  # fmt: skip
    lengths = {name: sum(bool(line.strip()) for line in text.splitlines()) for name, text in MODULES.items()}
    assert max(lengths.values()) <= 20, lengths


def test_the_objective(outside: Path, train: Any) -> None:
    objective = importlib.import_module("my_objectives").SMOOTH_TIS
    assert isinstance(objective, Objective)
    logp = torch.full((1, 2), -1.0)
    gen, one = torch.tensor([[-1.0, -3.0]]), torch.ones(1)
    loss, _ = policy_loss(objective, logp, logp, gen, one, torch.ones(1, 2, dtype=torch.bool))
    weights = [2 * (1 - np.exp(-raw / 2)) for raw in (1.0, np.exp(2.0))]
    assert loss.item() == pytest.approx(-sum(weights) / 2)
    plain, smooth = train(), train("my_objectives")
    assert plain["a"][0]["loss"] != smooth["a"][0]["loss"]
    assert all(row["foreign_used"] for row in smooth["a"])
    document = read_provenance(outside / "runs" / "tiny-seed0")
    (numbers,) = document["objectives"].values()
    assert numbers["importance_sampling_clip_max"] == 3.0, "the recipe's"
    assert (numbers["kl_threshold"], numbers["kl_estimator"], numbers["epsilon"]) == (0.5, "k3", 0.2), "the objective's"
    digest = hashlib.sha256((outside / "my_objectives.py").read_bytes()).hexdigest()
    assert document["modules"]["my_objectives"] == digest


def test_the_selection_that_is_a_function(train: Any) -> None:
    plain, halved = train(), train("my_selections")
    assert halved["a"][0]["reward"] == plain["a"][0]["reward"]
    assert halved["a"][0]["foreign_used"] == plain["a"][0]["foreign_used"], "half is not dropped"
    assert halved["a"][0]["grad_norm"] != plain["a"][0]["grad_norm"]


def test_the_selection_that_remembers(train: Any, outside: Path) -> None:
    rows = train("my_defences")["a"]
    dropped = [by_peer(row)["b"].get("dropped/probation", 0) for row in rows]
    assert [bool(n) for n in dropped] == [True, True, False, False]
    assert [row["without_foreign"] for row in rows] == [True, True, False, False]
    states = [path.read_text() for path in outside.rglob("selections.json")]
    assert all('"probation"' in state for state in states)
    assert states


def test_the_sampler(train: Any, capsys: pytest.CaptureFixture[str]) -> None:
    rows = train("my_samplers")["a"]
    said = re.findall(r"(\d+) tokens drawn", capsys.readouterr().out)
    assert len(said) == 2 * ROUNDS, "told after each of two peers' updates"
    assert [row["reward"] for row in rows] == [row["reward"] for row in train()["a"]]


def test_the_task(train: Any, outside: Path) -> None:
    train("my_tasks")
    (peer,) = outside.glob("runs/tiny-seed0/*/a")
    questions = {row["question"] for row in read_rollouts(peer, 0)}
    assert len(questions) == 4
    assert all(re.fullmatch(r"(\d+)\*\1=", question) for question in questions)


def test_the_reward(train: Any, outside: Path) -> None:
    train("my_rewards")
    (peer,) = outside.glob("runs/tiny-seed0/*/a")
    assert all(row["reward"] == 1 / len(row["completion_ids"]) for row in read_rollouts(peer, 0))


def test_the_tracker(train: Any, outside: Path) -> None:
    rows = train("my_trackers")["a"]
    (peer,) = outside.glob("runs/tiny-seed0/*/a")
    assert (peer / "lines.txt").read_text().splitlines() == [
        f"round {row['step']}: reward {row['reward']:.3f}" for row in rows
    ]


def test_the_attack(train: Any) -> None:
    honest, attacked = train(), train("my_attacks")
    weight = "sampling/importance_sampling_weight/max"
    ratio = "sampling/importance_sampling_ratio/mean"
    assert by_peer(attacked["a"][0])["b"][weight] == 2.0, "C"
    assert by_peer(attacked["a"][0])["b"][ratio] > 50 * by_peer(honest["a"][0])["b"][ratio]
    own = [by_peer(of["b"][0])["b"][ratio] for of in (honest, attacked)]
    assert own == [1.0, 1.0], "the attacker learns from its own groups as they were"


def test_messages_are_carried_by_ones_own_loop(outside: Path, models: dict[str, Path]) -> None:
    peers = [{"name": name, "model": str(models[name]), "learning_rate": 1e-3} for name in "ab"]
    recipe = parse({"name": "lossy", **SECTIONS, "reward": {"function": "recipes.evenness"}, "peers": peers})
    importlib.import_module("my_swarm").train(recipe, str(outside / "lossy"), ROUNDS)
    for name, other in ("ab", "ba"):
        rows = read_jsonl(outside / "lossy" / name / "metrics.jsonl")
        assert [row[f"peer/{other}/delivered"] for row in rows] == [True, True, False, True]


def test_what_fails_in_a_part_of_ones_own_is_named_with_its_place(
    outside: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And it loses no finished round."""
    (outside / "failing.py").write_text(
        "def third(judged):\n    if judged.batch.rollouts and ROUNDS.pop():\n        raise OSError('no such thing')\n"
        "    return [1.0] * len(judged.rows)\n\nROUNDS = [False] * 100\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(outside)
    keys = {"training.save_every": 100, "training.selections": ["failing.third"], "processes": "inline"}
    write_recipe(outside, {"a": {"model": models["a"], "learning_rate": 1e-3}}, top={"output_dir": outside / "runs"})
    importlib.import_module("failing").ROUNDS[-3] = True  # the third round of the one peer
    sets = [f"--set={key}={json.dumps(value)}" for key, value in keys.items()]
    assert ftis_command("train", "recipe.toml", *sets) == 1
    said = capsys.readouterr().err
    assert "failing.py, line 3, in third: OSError: no such thing; mend it there" in said
    assert "free space" not in said
    assert [path.name for path in (outside / "runs").rglob("checkpoint-*")] == ["checkpoint-2"]
    assert ftis_command("train", "recipe.toml", *sets, "--resume") == 0
    sys.modules.pop("failing")


def test_a_measure_that_is_no_number_is_refused_before_it_is_recorded(
    train: Any, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probation = importlib.import_module("my_defences").Probation
    monkeypatch.setattr(probation, "about", lambda *_: {"probation/state": "waits"})
    with pytest.raises(FtisError, match="give numbers"):
        train("my_defences")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"objective": {"name": "my_objectives.SMOOTH"}}, "did you mean 'SMOOTH_TIS'"),
        ({"training": {"selections": ["my_selections"]}}, "training.selections = 'my_selections': write a dotted path"),
        ({"sampling": {"sampler": "bultin"}}, "did you mean 'builtin'"),
        ({"task": {"name": "clok"}}, "did you mean 'clock'"),
        ({"report_to": ["tensorbord"]}, "did you mean 'tensorboard'"),
        ({"attack": "my_attacks.lie"}, "has no 'lie'"),
        ({"reward": {"function": "my_reward.f"}}, "there is no module 'my_reward'"),
    ],
)
def test_a_name_that_leads_nowhere_is_said_before_anything_is_trained(
    change: dict[str, Any], message: str, outside: Path, models: dict[str, Path]
) -> None:
    document = pair_of(models, outside / "runs", 1e-3, **change)
    if "attack" in document:
        document["peers"][0]["attack"] = document.pop("attack")
    with pytest.raises(FtisError, match=re.escape(message)):
        ftis.train(parse(document))
    assert not (outside / "runs").exists()


def test_a_module_that_cannot_be_imported_is_named(outside: Path) -> None:
    (outside / "my_broken.py").write_text("print(undefined)\n")
    with pytest.raises(FtisError, match=r"objective.name = 'my_broken.X': importing 'my_broken' failed: NameError"):
        resolve(ObjectiveConfig(name="my_broken.X"))
