"""Going back to an earlier checkpoint: what is undone, what stays, who stays accused, and kills in between."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import ftis, trained
from run_files import differences, records_of, same, weights, without_times

from ftis.config import FtisError
from ftis.directory.claiming import swarm_lock
from ftis.directory.rollback import roll_back
from ftis.honesty.selection import Accusation, HonestyTest
from ftis.records.files import InUseError, locked, read_jsonl, saved_steps
from ftis.records.plan import read_provenance, write_run
from ftis.run import accusations, checkpoint
from recipes import recipe_of, write_recipe

RUN = Path("runs") / "tiny-seed0"
LIARS = """
from research.attacks import LIE, after, constant, in_all

late = after(2, in_all(constant(LIE)))
"""
"""A peer that is honest for two rounds, then writes one answer to everything and reports it as improbable."""
TRAINING = {"rounds": 6, "save_every": 2, "save_total_limit": 3}


def write_place(place: Path, models: dict[str, Path], **changes: Any) -> Path:
    (place / "liars.py").write_text(LIARS)
    peers: dict[str, dict[str, Any]] = {name: {"model": models[name], "learning_rate": 1e-3} for name in "ab"}
    peers["b"] |= changes.pop("b", {})
    settings: dict[str, Any] = {"top": {"threads": 1, "processes": "inline"}, "training": TRAINING}
    write_recipe(place, peers, objective={"kl_threshold": 1e9}, **{**settings, **changes})
    return place


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Path:
    """A place where two honest peers were trained to the end, alone as well."""
    arms = [{"name": "alone", "collaborate": False}, {"name": "F-TIS"}]
    return trained(write_place(tmp_path_factory.mktemp("honest"), models, arms=arms))


@pytest.fixture(scope="module")
def lied_to(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Path:
    """A place where a was trained to the end with b, who lies from its third round on."""
    return trained(write_place(tmp_path_factory.mktemp("lied"), models, b={"attack": "liars.late"}))


@pytest.fixture
def enter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Path]:
    """Copies a place and works there. Returns the run directory."""

    def copied(place: Path) -> Path:
        shutil.copytree(place, tmp_path / "place")
        monkeypatch.chdir(tmp_path / "place")
        monkeypatch.syspath_prepend(str(tmp_path / "place"))
        return RUN

    return copied


def files_of(directory: Path) -> dict[str, bytes]:
    """All files but locks and the provenance, where a rollback is noted with its time."""
    files = (p for p in sorted(directory.rglob("*")) if p.is_file() and ".lock" not in p.name)
    return {str(p.relative_to(directory)): p.read_bytes() for p in files if p.name != "provenance.json"}


def rows(run: Path, peer: str, arm: str = "F-TIS") -> list[dict[str, Any]]:
    return read_jsonl(run / arm / peer / "metrics.jsonl")


@pytest.mark.parametrize("step", [0, 4])
def test_a_run_that_went_back_ends_as_if_it_never_had(
    step: int, honest: Path, enter: Callable[[Path], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run = enter(honest)
    before = files_of(run)
    arguments = ("train", "recipe.toml", "--arm", "F-TIS", "--resume", str(step))
    assert ftis(*arguments, "--dry-run") == 0
    assert files_of(run) == before
    would = {line.removeprefix("would delete ") for line in capsys.readouterr().out.splitlines() if "would" in line}
    left = 6 - step
    assert f"{left} of 6 lines of {run / 'F-TIS' / 'a' / 'metrics.jsonl'}" in would
    roll_back(run, step, ["F-TIS"])
    assert all(not Path(line).exists() for line in would if " lines of " not in line)
    assert not {"summary.json", "learning_curves.svg"} & {path.name for path in run.iterdir()}
    for peer in "ab":
        place = run / "F-TIS" / peer
        assert saved_steps(place) == [2, 4, 6][: step // 2]
        assert [row["step"] for row in rows(run, peer)] == list(range(1, step + 1))
        assert len(list((place / "rollouts").iterdir())) == step
        assert max(row["step"] for row in read_jsonl(place / "evaluations.jsonl")) == step
        assert saved_steps(run / "alone" / peer) == [2, 4, 6]
    at_rest = files_of(run)
    assert {peer.finished for peer in roll_back(run, step, ["F-TIS"]).peers} == {step}
    assert files_of(run) == at_rest  # going back to where it is changes nothing
    (note,) = read_provenance(run)["rollbacks"]
    assert note["peers"] == [{"arm": "F-TIS", "peer": peer, "from": 6, "accused": {}} for peer in "ab"]
    assert ftis("train", "recipe.toml", "--resume", str(step)) == 0
    assert "alone, b: from step 6 to step" in capsys.readouterr().out
    assert differences(records_of(run), records_of(honest / RUN)) == []
    assert same(*(weights(of / "F-TIS" / "a" / "checkpoint-6") for of in (honest / RUN, run)))
    assert (run / "summary.json").exists()


@pytest.mark.parametrize(
    ("arguments", "how"),
    [
        ([], "the same command with a bare --resume goes on with"),
        (["--resume"], "the same command goes on with"),
        (["--resume", "4"], "the same command with a bare --resume goes on with"),  # else it would go back again
        (["--overwrite"], "the same command with a bare --resume instead of --overwrite goes on with"),
    ],
)
def test_a_stopped_run_says_which_command_goes_on_with_it(
    arguments: list[str],
    how: str,
    honest: Path,
    enter: Callable[[Path], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = enter(honest)
    monkeypatch.setattr("ftis.library.train", lambda *_, **__: SimpleNamespace(finished=False, directory=run))
    assert ftis("train", "recipe.toml", *arguments) == 130
    assert f"stopped; {how} {run}" in capsys.readouterr().out


def test_what_cannot_be_undone_is_refused_in_a_line_and_nothing_is_deleted(
    honest: Path, enter: Callable[[Path], Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = enter(honest)
    before = files_of(run)
    for arguments, code, words in (
        (["--resume", "3"], 1, ["0, 2, 4, 6", "save_total_limit"]),
        (["--resume", "2", "--arm", "x"], 1, ["'x'", "alone, F-TIS"]),
        (["--resume", "2", "--set=seed=3"], 1, ["neither a run"]),
        (["--resume", "2", "--set=sampling.temperature=0.5"], 1, ["sampling.temperature"]),
        (["--resume", "2", "--set=training.rounds=1"], 1, ["training.rounds = 1"]),
        (["--resume", "2", "--set=training.rounds=2", "--arm", "alone"], 1, ["arm F-TIS"]),
        (["--resume", "2", "--set=task.seed=3"], 1, ["task.seed"]),
        (["--resume=x"], 2, ["'x'"]),
        (["--resume", "2", "--overwrite"], 2, ["--overwrite"]),
        (["--resume", "2", "--seeds", "2"], 2, ["recipe.json"]),
    ):
        assert ftis("train", "recipe.toml", *arguments) == code, arguments
        said = capsys.readouterr().err
        assert all(word in said for word in words), said
    recorded = read_provenance(run)
    write_run(run, {**recorded, "problems": {"F-TIS": ["0" * 64]}})
    assert ftis("train", "recipe.toml", "--resume", "2") == 1
    write_run(run, recorded)
    assert files_of(run) == before
    with locked(swarm_lock(run / "F-TIS", recipe_of("a", "b"))):
        with pytest.raises(InUseError):
            roll_back(run, 2, ["F-TIS"])
        assert len(roll_back(run, 2, ["F-TIS"], dry_run=True).peers) == 2
    file = run / "F-TIS" / "b" / "checkpoint-2" / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(b"half")
    with pytest.raises(FtisError, match=r"model\.safetensors"):
        roll_back(run, 2)
    file.write_bytes(whole)
    assert files_of(run) == before
    with pytest.raises(FtisError, match="ftis train"):
        roll_back(tmp_path, 0)
    (tmp_path / "recipe.json").write_text(recipe_of("a", "b").model_dump_json())
    with pytest.raises(FtisError, match="no records"):
        roll_back(tmp_path, 0)


@pytest.mark.parametrize("step", [0, 2])
def test_who_lied_stays_in_quarantine_from_the_first_round_on(
    step: int, lied_to: Path, enter: Callable[[Path], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert [row["peer/b/honesty/quarantined"] for row in rows(lied_to / RUN, "a")][:2] == [False, False]
    assert not HonestyTest.found_in(checkpoint.selections(lied_to / RUN / "F-TIS" / "a", 2)["honesty"])
    run = enter(lied_to)
    last = rows(run, "a")[-1]
    assert last["peer/b/honesty/quarantined"]
    found = last["peer/b/honesty/found_in_round"]
    assert ftis("train", "recipe.toml", "--resume", str(step)) == (0 if step else 3)  # 3: a learned from nobody
    said = capsys.readouterr().out
    assert f"F-TIS, a: b, found in round {found}, stays in quarantine" in said
    noted = {peer["peer"]: peer["accused"] for peer in read_provenance(run)["rollbacks"][0]["peers"]}
    assert noted["a"]["b"]["honesty/passages"] == last["peer/b/honesty/passages"]
    assert noted["b"] == {}
    again = rows(run, "a")
    assert [row["step"] for row in again] == list(range(1, 7))
    for row in again[step:]:
        assert row["peer/b/admitted"] == row["peer/b/kept"] == 0
        assert row["peer/b/honesty/quarantined"]
        assert row["peer/b/honesty/found_in_round"] == found
        assert row["peer/b/honesty/passages"] == last["peer/b/honesty/passages"]
    assert without_times(again[:step]) == without_times(rows(lied_to / RUN, "a")[:step])
    states = HonestyTest.found_in(checkpoint.selections(run / "F-TIS" / "a", 6)["honesty"])
    assert states["b"].found == found - 1
    # Going back once more, by way of checkpoints that know it, forgets nobody.
    assert roll_back(run, 0).peers[0].accused["b"].found == found - 1


def test_a_recipe_that_only_warns_learns_from_a_liar_until_it_is_told_otherwise(
    lied_to: Path, enter: Callable[[Path], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run = enter(lied_to)
    recipe = json.loads((run / "recipe.json").read_text())
    recipe["honesty"]["action"] = "warn"
    (run / "recipe.json").write_text(json.dumps(recipe))
    assert ftis("train", "recipe.toml", "--resume", "2", "--set=honesty.action=quarantine") == 0
    assert "--set honesty.action=quarantine" in capsys.readouterr().out
    assert [row["peer/b/admitted"] for row in rows(run, "a")] == [8, 8, 0, 0, 0, 0]
    # Without the later checkpoints, the records alone know who lied.
    found = rows(run, "a")[-1]["peer/b/honesty/found_in_round"]
    accusations.path_of(run / "F-TIS" / "a").unlink()
    for peer in "ab":
        for step in (4, 6):
            shutil.rmtree(run / "F-TIS" / peer / f"checkpoint-{step}")
    roll_back(run, 2)
    assert accusations.read(run / "F-TIS" / "a", 2)["b"].found == found - 1
    assert accusations.read(run / "F-TIS" / "a", 0) == accusations.read(run / "F-TIS" / "b", 2) == {}


def test_accusations_are_kept_by_step(tmp_path: Path) -> None:
    peer, found = tmp_path / "a", {"b": Accusation(35, 512, [])}
    for step in (30, 20, 40):
        accusations.write(peer, step, found)
    assert accusations.read(peer, 20) == found
    assert accusations.read(peer, 19) == {}
    for damage in ("{", '{"step": 1, "senders": {"b": {"found": 3}}}', '{"step": 1, "senders": []}'):
        accusations.path_of(peer).write_text(damage)
        with pytest.raises(FtisError, match="restore"):
            accusations.read(peer, 0)
    # Behind a checkpoint, the records of a killed peer accuse too.
    peer, earlier = tmp_path / "c", {"c": Accusation(1, 9, [[7]])}
    accusations.keep_undone(peer, 0)  # without records
    assert accusations.read(peer, 99) == {}
    measured = {f"peer/b/honesty/{key}": value for key, value in (("found_in_round", 5), ("found_after_tokens", 512))}
    peer.mkdir()
    (peer / "metrics.jsonl").write_text(json.dumps({"step": 4}) + "\n" + json.dumps({"step": 5, **measured}) + "\n")
    accusations.write(peer, 2, earlier)
    accusations.keep_undone(peer, 5)  # the checkpoint knows it
    assert accusations.read(peer, 99) == earlier
    accusations.keep_undone(peer, 4)
    assert accusations.read(peer, 4) == earlier | {"b": Accusation(4, 512, [])}


class Killed(BaseException):
    """The process ends here."""


def killed_at(point: int, monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> bool:
    """Act, and end at the ``point``-th change of a file or directory. Whether that point was reached."""
    left = point
    reached = False

    def deadly(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any, **options: Any) -> Any:
            nonlocal left, reached
            reached = reached or left == 0
            if reached:
                raise Killed
            left -= 1
            return function(*arguments, **options)

        return wrapper

    with monkeypatch.context() as patch:
        for name in ("replace", "unlink"):
            patch.setattr(Path, name, deadly(getattr(Path, name)))
        patch.setattr(shutil, "rmtree", deadly(shutil.rmtree))
        try:
            act()
        except Killed:
            return True
    return reached


def test_a_kill_at_any_point_leaves_a_run_that_goes_on_from_before_or_after(
    lied_to: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the same command again ends as if nothing had happened."""
    whole = tmp_path / "whole"
    shutil.copytree(lied_to / RUN, whole)
    roll_back(whole, 2)
    point, seen = 0, set()
    while True:
        run = tmp_path / str(point)
        shutil.copytree(lied_to / RUN, run)
        if not killed_at(point, monkeypatch, lambda run=run: roll_back(run, 2)):  # type: ignore[misc]
            break
        steps = [set(saved_steps(run / "F-TIS" / peer)) for peer in "ab"]
        goes_on = max(set.intersection(*steps))
        seen.add(goes_on)
        assert goes_on in (2, 6)
        for peer in "ab":
            assert len(rows(run, peer)) >= goes_on
            checkpoint.require_whole(run / "F-TIS" / peer, goes_on)
        if goes_on == 2:
            assert accusations.read(run / "F-TIS" / "a", 2)["b"].found >= 2
        roll_back(run, 2)
        expected = files_of(whole)
        assert {k: v for k, v in files_of(run).items() if ".partial-" not in k} == expected
        point += 1
    assert point > 20
    assert seen == {2, 6}


def test_the_one_peer_of_a_joined_run_goes_back_by_itself(honest: Path, enter: Callable[[Path], Path]) -> None:
    run = enter(honest)
    shutil.rmtree(run / "F-TIS" / "b")
    (run / "F-TIS" / "a" / "events.jsonl").write_text('{"kind": "start", "step": 0}\n')
    write_run(run, {**read_provenance(run), "joined": "a"})
    with locked(swarm_lock(run / "F-TIS", recipe_of("a", "b"))), pytest.raises(InUseError, match="in use"):
        roll_back(run, 4, ["F-TIS"])
    roll_back(run, 4, ["F-TIS"])
    assert saved_steps(run / "F-TIS" / "a") == [2, 4]
    assert len(rows(run, "a")) == 4
    assert read_jsonl(run / "F-TIS" / "a" / "events.jsonl") == [{"kind": "start", "step": 0}]
