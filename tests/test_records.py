"""A peer's records: whole lines, whole files, and no round twice."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from ftis.config import RecipeError
from ftis.measures import RoundRecord
from ftis.recipe.parsing import load
from ftis.records.files import read_jsonl
from ftis.records.reading import EVERY, SHOWN
from ftis.records.rollouts import ROLLOUTS, read_rollouts, rollouts_path
from ftis.records.trackers import TrackerError, open_trackers
from ftis.records.writing import Records
from ftis.run.assembly import assemble
from recipes import write_recipe

SENT = {"text": "né".encode(), "size_S": [1, 2, 0], "gen_logp_S": [-0.5, -1.0, -0.25], "tokens_U": [2, 1], "ends": [1]}


def rollouts(n: int, *, scored: bool = True) -> dict[str, Any]:
    """Columns as a peer hands them over; the odd rows carry no gradient, nor does any unless ``scored``."""
    null = [i % 2 == 1 or not scored for i in range(n)]
    lengths = [i % 3 + 1 for i in range(n)]
    return {
        "round": np.full(n, 4, np.int64),
        "source": [f"peer-{i % 2}" for i in range(n)],
        "item": np.arange(n, dtype=np.int64),
        "question": [f"«{i}»\n+ 1" for i in range(n)],
        "completion": ["" if i == 0 else f"<think>\u2028{i}</think>" for i in range(n)],
        "reward": np.linspace(0, 1, n),
        "advantage": np.array([0.0 if z else 1.5 - i for i, z in enumerate(null)], np.float32),
        "kept": [None if z else i % 4 == 0 for i, z in enumerate(null)],
        "kl_k1": [None if z else 0.1 * i for i, z in enumerate(null)],
        "completion_ids": [np.arange(length, dtype=np.int32) for length in lengths],
        "observed": [[{"at": 1, "ids": [i, 7]}] if i % 3 == 1 else None for i in range(n)],
        "gen_logp": [-np.arange(length, dtype=np.float32) / 3 for length in lengths],
        "old_logp": [None if z else -np.arange(k, dtype=np.float32) / 7 for z, k in zip(null, lengths, strict=True)],
        "unit": [np.arange(length, dtype=np.int32) // 2 if i == 2 else None for i, length in enumerate(lengths)],
        "sent": [{**SENT, "fault": "" if i else "too long"} if i % 3 == 0 else None for i in range(n)],
    }


def record(step: int, columns: Mapping[str, Any] | None = None, **metrics: Any) -> RoundRecord:
    """Of the round that ends with ``step``."""
    return RoundRecord({"step": step, "reward": step / 10, **metrics}, columns or rollouts(1))


def fill(directory: Path, steps: int) -> Records:
    """What a peer leaves that evaluated at 0 and after every second of its rounds."""
    records = Records(directory)
    for step in range(steps + 1):
        if step:
            records.round(record(step, rollouts(2)))
        if step % 2 == 0:
            for split in ("validation", "ood-clock-2"):
                records.evaluation({"step": step, "split": split, "accuracy": 0.5}, [{"item": 0, "step": step}])
    return records


def state(directory: Path) -> dict[str, Any]:
    return {
        "metrics": [row["step"] for row in read_jsonl(directory / "metrics.jsonl")],
        "evaluations": [(row["step"], row["split"]) for row in read_jsonl(directory / "evaluations.jsonl")],
        "problems": sorted(p.name for p in (directory / "evaluations").iterdir()),
        "rollouts": sorted(p.name for p in (directory / "rollouts").iterdir()),
    }


def test_cutting_back_leaves_what_was_there_at_that_step(tmp_path: Path) -> None:
    for step in (0, 1, 2, 6, 9):
        long, short = tmp_path / f"long-{step}", tmp_path / f"short-{step}"
        fill(long, 6).cut_back_to(step)
        fill(short, min(step, 6))
        if step == 0:  # no metrics yet, so no file of them
            (short / "metrics.jsonl").touch()
        assert state(long) == state(short), step
    Records(tmp_path / "empty").cut_back_to(7)
    assert sorted(p.name for p in (tmp_path / "empty").iterdir()) == ["evaluations", "rollouts"]


def test_files_of_others_beside_the_records_stay(tmp_path: Path) -> None:
    records = fill(tmp_path, 4)
    others = [tmp_path / "evaluations" / name for name in ("validation-4 (copy).jsonl", "notes.jsonl", "._x.jsonl")]
    for path in others:
        path.touch()
    records.cut_back_to(2)
    assert all(path.exists() for path in others)
    assert not (tmp_path / "evaluations" / "validation-4.jsonl").exists()


def test_a_line_that_a_kill_cut_short_is_gone_after_cutting_back(tmp_path: Path) -> None:
    records = fill(tmp_path, 4)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')
    records.cut_back_to(4)
    records.round(record(5, reward=0.25))
    assert read_jsonl(tmp_path / "metrics.jsonl")[3:] == [{"step": 4, "reward": 0.4}, {"step": 5, "reward": 0.25}]


def test_a_split_is_written_one_line_a_problem_and_replaced_when_repeated(tmp_path: Path) -> None:
    records = Records(tmp_path)
    for n in (3, 2):
        problems = [{"item": i, "completion": "\n"} for i in range(n)]
        records.evaluation({"split": "validation", "step": 10, "accuracy": 1 / n}, problems)
    assert read_jsonl(tmp_path / "evaluations" / "validation-10.jsonl") == problems
    assert [row["accuracy"] for row in read_jsonl(tmp_path / "evaluations.jsonl")] == [1 / 3, 1 / 2]


def test_rollouts_are_read_back_row_by_row(tmp_path: Path) -> None:
    columns = rollouts(7)
    Records(tmp_path).round(record(5, columns))
    assert pq.read_table(rollouts_path(tmp_path, 4)).schema.remove_metadata() == ROLLOUTS
    assert {*EVERY} < {*SHOWN} < {*ROLLOUTS.names} == {*columns}
    rows = read_rollouts(tmp_path, 4)
    assert len(rows) == 7
    for i, row in enumerate(rows):
        assert row.keys() == columns.keys()
        for name, value in row.items():
            if name == "observed":
                value = value and [{**answer, "ids": list(answer["ids"])} for answer in value]
            np.testing.assert_array_equal(value, columns[name][i])
    assert (rows[0]["completion_ids"].dtype, rows[0]["gen_logp"].dtype) == (np.int32, np.float32)
    assert rows[1]["old_logp"] is rows[1]["kept"] is None
    with pytest.raises(KeyError, match="surprise"):
        Records(tmp_path).round(record(1, {**columns, "surprise": [1] * 7}))


def test_all_rounds_can_be_read_as_one_table_even_those_without_any_gradient(tmp_path: Path) -> None:
    for first in (False, True):
        records = Records(tmp_path / str(first))
        for round in range(3):
            records.round(record(round + 1, rollouts(4, scored=(round == 0) != first)))
        table = ds.dataset(records.directory / "rollouts").to_table()
        assert (table.num_rows, table.column("kept").null_count) == (12, 2 + 8 if not first else 4 + 4)


def test_rollouts_of_a_round_replace_earlier_ones_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = Records(tmp_path)
    records.round(record(1, rollouts(3)))
    before = rollouts_path(tmp_path, 0).read_bytes()

    def killed(self: Path, target: Path) -> Path:
        self.write_bytes(self.read_bytes()[:100])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        records.round(record(1, rollouts(5)))
    monkeypatch.undo()
    assert rollouts_path(tmp_path, 0).read_bytes() == before
    records.round(record(1, rollouts(5)))
    assert pq.read_table(rollouts_path(tmp_path, 0)).num_rows == 5
    assert len(list((tmp_path / "rollouts").iterdir())) == 1


def report(records: Records) -> None:
    """Two rounds and an evaluation."""
    for step in (1, 2):
        records.report({"step": step, "reward": step / 4, "peer/b/first_rejection": "text", "peer/b/admitted": 12})
    records.evaluation({"step": 2, "split": "validation", "accuracy": 0.75}, [])
    records.close()


def test_tensorboard_gets_every_number(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    report(Records(tmp_path, open_trackers(["tensorboard"], "project", "run", tmp_path)))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    scalars = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert scalars == {
        "step": [(1, 1.0), (2, 2.0)],
        "reward": [(1, 0.25), (2, 0.5)],
        "peer/b/admitted": [(1, 12.0), (2, 12.0)],
        "eval/validation/accuracy": [(2, 0.75)],
    }


class FakeRun:
    """A run of wandb or trackio. The package's own log and finish are of whichever run began last."""

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def log(self, values: dict[str, float], step: int) -> None:
        self.calls.append((values, step))

    def finish(self) -> None:
        self.calls.append("finish")


@pytest.mark.parametrize("kind", ["wandb", "trackio"])
def test_other_trackers_are_started_fed_and_finished(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def init(**settings: Any) -> FakeRun:
        calls.append((settings["project"], settings["name"]))
        return FakeRun(calls)

    monkeypatch.setitem(sys.modules, kind, SimpleNamespace(init=init))
    report(Records(tmp_path, open_trackers([kind], "project", "run", tmp_path)))
    rounds = [({"step": step, "reward": step / 4, "peer/b/admitted": 12}, step) for step in (1, 2)]
    assert calls == [("project", "run"), *rounds, ({"eval/validation/accuracy": 0.75}, 2), "finish"]


def test_no_tracker_stays_open_if_another_one_or_the_peer_cannot_be_opened(
    tmp_path: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def init(**settings: Any) -> FakeRun:
        calls.append(settings["name"])
        return FakeRun(calls)

    def refuse(**settings: Any) -> FakeRun:
        raise ConnectionError("nobody there")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=refuse))
    with pytest.raises(TrackerError, match="report_to: trackio raised ConnectionError: nobody there"):
        open_trackers(["wandb", "trackio"], "project", "first", tmp_path)
    assert calls == ["first", "finish"]

    peers = {name: {"model": models[name], "attack": "tiny_rewards.no_such_attack"} for name in "ab"}
    recipe = load(write_recipe(tmp_path, peers, top={"report_to": ["wandb"]}))
    with pytest.raises(RecipeError):
        assemble(recipe, "a", tmp_path / "a", tracked_as="second")
    plain = recipe.model_copy(update={"peers": [peer.model_copy(update={"attack": None}) for peer in recipe.peers]})
    assemble(plain, "a", tmp_path / "a", tracked_as="third").close()
    assert calls == ["first", "finish", "third", "finish"]
    monkeypatch.setattr(FakeRun, "finish", Mock(side_effect=ValueError("never begun")))
    with pytest.raises(KeyError, match="the run's own"), assemble(plain, "a", tmp_path / "a", tracked_as="x"):
        raise KeyError("the run's own")
    with pytest.raises(TrackerError, match="never begun"):
        assemble(plain, "a", tmp_path / "a", tracked_as="y").close()


def test_a_longer_run_takes_messages_of_the_shorter_one(tmp_path: Path, models: dict[str, Path]) -> None:
    recipe = write_recipe(tmp_path, {name: {"model": models[name]} for name in "ab"})
    headers = []
    for rounds in (4, 40):
        with assemble(load(recipe, [f"training.rounds={rounds}"]), "a", tmp_path / "a") as trainer:
            headers.append(trainer.peer.member.header)
    with assemble(load(recipe, ["seed=1"]), "a", tmp_path / "a") as trainer:
        assert headers[0] == headers[1] != trainer.peer.member.header


def test_a_tracker_that_raises_is_named_and_what_it_was_told_of_is_recorded(tmp_path: Path) -> None:
    class Broken:
        def log(self, values: Mapping[str, float], step: int) -> None:
            raise ConnectionError("nobody there")

        def finish(self) -> None:
            raise ValueError("never begun")

    other = Mock()
    records = Records(tmp_path, [Broken(), other])
    records.round(record(1, reward=0.5))
    with pytest.raises(TrackerError, match="report_to: Broken raised ConnectionError: nobody there; mend"):
        records.report({"step": 1, "reward": 0.5})
    with pytest.raises(TrackerError, match="Broken raised ValueError: never begun"):
        records.close()
    other.finish.assert_called_once_with()
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1]


def test_a_tracker_that_is_not_installed_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, module in (("wandb", "wandb"), ("trackio", "trackio"), ("tensorboard", "torch.utils.tensorboard")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(RecipeError, match=rf"{kind} is not installed; run pip install"):
            open_trackers([kind], "project", "run", tmp_path)
