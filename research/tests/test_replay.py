"""Recorded rollouts learned from again: the same weights under the same objective, bit for bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from commands import research, trained
from run_files import weights, without_times

from ftis.config import RunError
from ftis.guards.regret import NoRegret
from ftis.records.files import read_jsonl
from ftis.records.rollouts import read_rollouts
from recipes import write_recipe
from research.replay import recordings, replay_run


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Any) -> Path:
    """The directory in which a run of three arms was recorded."""
    place = tmp_path_factory.mktemp("recorded")
    a, b = tiny_model_dir(hidden_size=16), tiny_model_dir(hidden_size=24)
    write_recipe(
        place,
        {
            "a": {"model": a, "learning_rate": 1e-2, "tokens_per_microbatch": 100},
            "b": {"model": b, "learning_rate": 1e-2, "train": "lora", "lora_r": 4},
        },
        top={"processes": "inline"},
        training={"num_iterations": 2},
        arms=[
            {"name": "F-TIS"},
            {"name": "alone", "collaborate": False, "set": {"sampling.top_k": 8, "training.rounds": 2}},
            {
                "name": "ahead",
                "set": {"training.overlap": 1, "training.rounds": 3, "task.environment": "toys_of_turns.Dice"},
            },
        ],
    )
    return trained(place)


@pytest.fixture
def run(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run, to work on from its parent directory."""
    shutil.copytree(recorded, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return Path("runs/tiny-seed0")


def same(one: Path, other: Path) -> bool:
    left, right = weights(one), weights(other)
    assert left.keys() == right.keys()
    return all(torch.equal(left[name], right[name]) for name in left)


def test_a_replay_goes_back_where_the_run_did(
    tmp_path: Path, tiny_model_dir: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rate that destroys the model. Windows have one round, and any evidence is an alarm."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ftis.guards.falls.LEAST_GROUPS", 1)
    monkeypatch.setattr("ftis.guards.falls.LEAST_ROUNDS", 1)
    monkeypatch.setattr(NoRegret, "threshold", property(lambda guard: -1e3))
    peers = {name: {"model": tiny_model_dir(), "learning_rate": 3.0} for name in "ab"}
    training = {"no_regret": 0.1, "rounds": 7, "eval_every": 7}
    write_recipe(tmp_path, peers, top={"processes": "inline"}, training=training, arms=[{"name": "F-TIS"}])
    trained(tmp_path)
    run = Path("runs/tiny-seed0")
    assert research(replay_run, str(run), "--peer", "b") == 0
    both = run / "replay" / "F-TIS-on-F-TIS" / "b", run / "F-TIS" / "b"
    alarms = [[row["peer/b/regret/alarms"] for row in read_jsonl(of / "metrics.jsonl")] for of in both]
    assert alarms[0] == alarms[1]
    assert alarms[0][-1] > 0
    assert same(*(of / "checkpoint-7" for of in both))


@pytest.mark.parametrize(("arm", "last"), [("F-TIS", 4), ("alone", 2), ("ahead", 3)])
def test_under_its_own_objective_a_replay_repeats_the_run_bit_for_bit(arm: str, last: int, run: Path) -> None:
    torch.rand(3)  # what was drawn before must not matter
    assert research(replay_run, str(run), "--arm", arm, "--objective", "F-TIS") == 0
    for peer in "ab":
        both = run / "replay" / f"F-TIS-on-{arm}" / peer, run / arm / peer
        assert same(*(directory / f"checkpoint-{last}" for directory in both))
        file = f"checkpoint-{last}/trainer_state/optimizer.pt"
        states = [torch.load(directory / file, weights_only=True)["state"].values() for directory in both]
        for state, expected in zip(*states, strict=True):
            assert all(torch.equal(state[name], expected[name]) for name in expected)
        for name in ("metrics.jsonl", "evaluations.jsonl"):
            again, before = (without_times(read_jsonl(directory / name)) for directory in both)
            assert again == before
        for round in range(last):
            tables = [pq.read_table(directory / f"rollouts/round-{round:06d}.parquet") for directory in both]
            assert tables[0].equals(tables[1])
    # Otherwise nothing was put to the test.
    metrics = read_jsonl(run / "F-TIS" / "a" / "metrics.jsonl")
    assert all(row["optimizer_steps"] == 4 for row in metrics)
    assert sum(row["peer/b/dropped"] for row in metrics) > 0


def test_a_part_of_the_rounds_is_replayed(run: Path) -> None:
    """From a checkpoint, though the peer was away before; or only the first rounds, one peer after the other."""
    path = run / "F-TIS" / "a" / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(lines[1:]), encoding="utf-8")
    assert research(replay_run, str(run), "--arm", "F-TIS", "--from-step", "2") == 0
    for peer in "ab":
        again = run / "replay" / "F-TIS-on-F-TIS-from-2" / peer
        assert same(again / "checkpoint-4", run / "F-TIS" / peer / "checkpoint-4")
        expected = [row for row in read_jsonl(run / "F-TIS" / peer / "metrics.jsonl") if row["step"] > 2]
        assert without_times(read_jsonl(again / "metrics.jsonl")) == without_times(expected)
    path.write_text("".join(lines), encoding="utf-8")
    one = (str(run), "--arm", "F-TIS", "--output", "out", "--peer")
    assert research(replay_run, *one, "a", "--rounds", "2") == research(replay_run, *one, "b", "--rounds", "1") == 0
    assert same(Path("out/a/checkpoint-2"), run / "F-TIS" / "a" / "checkpoint-2")
    assert json.loads(Path("out/replay.json").read_text(encoding="utf-8"))["rounds"] == {"a": 2, "b": 1}
    shutil.rmtree("out/b")
    assert research(replay_run, *one, "b", "--objective", "NoIS") == 1, "another replay is there"
    assert not Path("out/b").exists()


def test_a_replay_that_could_not_begin_does_not_stand_in_the_way(run: Path) -> None:
    checkpoint = run / "F-TIS" / "a" / "checkpoint-2"
    checkpoint.rename("kept")
    replay = (str(run), "--arm", "F-TIS", "--peer", "a", "--from-step", "2", "--output", "out")
    assert research(replay_run, *replay) == 1
    Path("kept").rename(checkpoint)
    assert research(replay_run, *replay) == 0


def test_another_starter_than_then_is_not_replayed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = recordings(run, "F-TIS", ("a",))[0]
    peers = tuple(peer.model_copy(update={"model": "starter:small"}) for peer in recording.recipe.peers)
    recording = replace(recording, recipe=recording.recipe.model_copy(update={"peers": peers}))
    file = run / "provenance.json"
    document = json.loads(file.read_text())
    file.write_text(json.dumps(document | {"starters": {"starter:small": "small-0123456789ab"}}))
    with pytest.raises(RunError, match="began with starter:small as small-0123456789ab, which is small-"):
        recording.load(0)


def test_other_ways_of_learning_lead_elsewhere(run: Path) -> None:
    trained = run / "F-TIS" / "a" / "checkpoint-4"
    ways = {
        "NoIS": ["--objective", "NoIS"],
        "capped": ["--set", "objective.importance_sampling_clip_max=0.5"],
        "one-step": ["--set", "training.steps_per_generation=1", "--set", "training.num_iterations=1"],
    }
    for way, arguments in ways.items():
        base = [str(run), "--arm", "F-TIS", "--peer", "a", "--output", way]
        assert research(replay_run, *base, *arguments) == 0
        assert not same(Path(way) / "a" / "checkpoint-4", trained)
        rows = read_rollouts(Path(way) / "a", 3), read_rollouts(run / "F-TIS" / "a", 3)
        for row, expected in zip(*rows, strict=True):  # the very rollouts
            assert (row["completion_ids"] == expected["completion_ids"]).all()
            assert (row["gen_logp"] == expected["gen_logp"]).all()
            assert row["reward"] == expected["reward"]
            assert row["advantage"] == expected["advantage"]
    facts = json.loads(Path("NoIS/replay.json").read_text())
    assert facts["objective"]["name"] == "NoIS"
    assert facts["rounds"] == {"a": 4}
    assert [row["optimizer_steps"] for row in read_jsonl(Path("one-step/a/metrics.jsonl"))] == [1, 1, 1, 1]
    assert sum(row["peer/b/dropped"] for row in read_jsonl(Path("NoIS/a/metrics.jsonl"))) == 0


def _other_question(path: Path) -> None:
    table = pq.ParquetFile(path).read()
    place = table.column_names.index("question")
    pq.write_table(table.set_column(place, "question", pa.array(["9+9"] * len(table))), path)


def _unrecorded(run: Path) -> None:
    shutil.rmtree(run / "F-TIS" / "a" / "rollouts")
    recipe = json.loads((run / "recipe.json").read_text())
    recipe["training"]["record_rollouts"] = False
    (run / "recipe.json").write_text(json.dumps(recipe))


FIRST = "F-TIS/a/rollouts/round-000000.parquet"
SPOILED: dict[str, Callable[[Path], object]] = {
    "no recipe.json": lambda run: (run / "recipe.json").unlink(),
    "provenance.json": lambda run: (run / "provenance.json").unlink(),
    "the first being round 3": lambda run: (run / "F-TIS/a/rollouts/round-000002.parquet").unlink(),
    "training.record_rollouts was false": _unrecorded,
    "cannot be read": lambda run: (run / FIRST).write_bytes((run / FIRST).read_bytes()[:-100]),
    "reads '9+9'": lambda run: _other_question(run / FIRST),
    "train that arm first": lambda run: (run / "F-TIS/a/metrics.jsonl").unlink(),
    "exists": lambda run: (run / "replay/F-TIS-on-F-TIS/a").mkdir(parents=True),
}
ASKED = {
    "has 4 finished rounds": ("--rounds", "5"),
    "no checkpoint-3 (there: 2, 4)": ("--from-step", "3"),
    "objective.*": ("--set", "sampling.temperature=2"),
    "did you mean 'epsilon'": ("--set", "objective.epsilonn=0.1"),
    "objective.name = 'PPO'": ("--objective", "PPO"),
    "no peer 'c'": ("--peer", "c"),
    "no arm 'solo'": ("--arm", "solo"),
    "--arm (F-TIS, alone, ahead)": ("--arm", ""),
}
"""What a message says, and what leads to it: a run that was spoiled, or options."""


def test_a_mistake_is_one_line_with_its_remedy(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(recorded))

    def refusal(run: Path, *arguments: str) -> str:
        assert research(replay_run, str(run), "--arm", "F-TIS", "--peer", "a", *arguments) == 1
        error = capsys.readouterr().err.strip()
        assert error.startswith("error: ")
        assert "\n" not in error
        return error

    for i, (says, spoil) in enumerate(SPOILED.items()):
        shutil.copytree(recorded / "runs" / "tiny-seed0", tmp_path / str(i))
        spoil(tmp_path / str(i))
        assert says in refusal(tmp_path / str(i))
    for says, arguments in ASKED.items():
        assert says in refusal(recorded / "runs" / "tiny-seed0", *arguments)
