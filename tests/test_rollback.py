"""Going back to an earlier checkpoint: what is undone, what stays, who stays accused, and kills in between."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import ftis, trained
from run_files import differences, records_of, weights, without_times

from ftis.config import FtisError
from ftis.records.files import InUseError, locked, read_jsonl
from ftis.run import accusations, checkpoint
from ftis.run.provenance import read_provenance
from ftis.run.rollback import roll_back
from ftis.run.runs import swarm_lock
from recipes import recipe_of, write_recipe

RUN = Path("runs") / "tiny-seed0"
LIARS = """
from ftis.lab.attacks import LIE, after, constant, in_all

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
    files = (p for p in sorted(directory.rglob("*")) if p.is_file())
    return {
        str(p.relative_to(directory)): p.read_bytes()
        for p in files
        if p.name != "provenance.json" and ".lock" not in p.name
    }


def rows(run: Path, peer: str, arm: str = "F-TIS") -> list[dict[str, Any]]:
    return read_jsonl(run / arm / peer / "metrics.jsonl")


def assert_same_weights(one: Path, other: Path) -> None:
    expected, got = weights(one), weights(other)
    assert all(torch.equal(expected[name], got[name]) for name in expected)


# --- rounds are undone ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 2, 4])
def test_a_run_that_went_back_ends_as_if_it_never_had(step: int, honest: Path, enter: Callable[[Path], Path]) -> None:
    run = enter(honest)
    (run / "tables.md").write_text("of rounds that are undone")
    assert ftis("rollback", str(run), "--to", str(step), "--arm", "F-TIS") == 0
    assert not (run / "tables.md").exists()
    for peer in "ab":
        place = run / "F-TIS" / peer
        assert checkpoint.steps(place) == [2, 4, 6][: step // 2]
        assert [row["step"] for row in rows(run, peer)] == list(range(1, step + 1))
        assert len(list((place / "rollouts").iterdir())) == step
        assert max(row["step"] for row in read_jsonl(place / "evaluations.jsonl")) == step
    assert checkpoint.steps(run / "alone" / "a") == [2, 4, 6]
    assert not (run / "summary.json").exists()
    assert not (run / "learning_curves.png").exists()
    assert ftis("train", "recipe.toml", "--resume") == 0
    assert differences(records_of(run), records_of(honest / RUN)) == []
    assert_same_weights(honest / RUN / "F-TIS" / "a" / "checkpoint-6", run / "F-TIS" / "a" / "checkpoint-6")
    assert (run / "summary.json").exists()


def test_all_arms_go_back_unless_one_is_named_and_peers_that_train_alone_go_apart(
    honest: Path, enter: Callable[[Path], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run = enter(honest)
    assert ftis("rollback", str(run), "--to", "4", "--arm", "alone", "--peer", "b") == 0
    steps = {(arm, peer): len(rows(run, peer, arm)) for arm in ("alone", "F-TIS") for peer in "ab"}
    assert steps == {("alone", "a"): 6, ("alone", "b"): 4, ("F-TIS", "a"): 6, ("F-TIS", "b"): 6}
    assert ftis("rollback", str(run), "--to", "2") == 0
    assert {len(rows(run, peer, arm)) for arm in ("alone", "F-TIS") for peer in "ab"} == {2}
    said = capsys.readouterr().out
    assert "alone, b: from step 6 to step 4" in said
    assert "alone, b: from step 4 to step 2" in said
    assert "F-TIS, a: from step 6 to step 2" in said
    assert "--resume goes on" in said
    notes = read_provenance(run)["rollbacks"]
    assert [(note["to"], len(note["peers"])) for note in notes] == [(4, 1), (2, 4)]
    assert notes[0]["peers"] == [{"arm": "alone", "peer": "b", "from": 6, "accused": {}}]


def test_messages_of_undone_rounds_are_deleted_and_those_of_others_stay(
    honest: Path, enter: Callable[[Path], Path]
) -> None:
    run = enter(honest)
    for name in ("a/000002-a", "a/000003-b", "c/000003-c"):
        message = run / "F-TIS" / f".exchange@{name}.ftis"
        message.parent.mkdir(exist_ok=True)
        message.touch()
    roll_back(run, 2, ["F-TIS"])
    assert [path.name for path in (run / "F-TIS").glob(".exchange@*/*")] == ["000003-c.ftis"]


def test_going_back_to_where_it_is_changes_nothing(honest: Path, enter: Callable[[Path], Path]) -> None:
    run = enter(honest)
    before = files_of(run)
    rollback = roll_back(run, 6)
    assert {peer.finished for peer in rollback.peers} == {6}
    assert files_of(run) == before
    assert "rollbacks" not in read_provenance(run)


def test_a_dry_run_lists_what_going_back_deletes_and_deletes_nothing(
    honest: Path, enter: Callable[[Path], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run = enter(honest)
    before = files_of(run)
    assert ftis("rollback", str(run), "--to", "4", "--arm", "F-TIS", "--dry-run") == 0
    assert files_of(run) == before
    would = [line.removeprefix("would delete ") for line in capsys.readouterr().out.splitlines() if "would" in line]
    roll_back(run, 4, ["F-TIS"])
    gone = {path for path in before if path not in files_of(run)}
    listed = {str(Path(line).relative_to(run)) for line in would if "lines of" not in line}
    assert {path for path in gone if not any(path == one or path.startswith(f"{one}/") for one in listed)} == set()
    assert all(not (run / one).exists() for one in listed)
    assert f"2 of 6 lines of {run / 'F-TIS' / 'a' / 'metrics.jsonl'}" in would


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--to", "3"], "no checkpoint-3 of a: go back to 0, 2, 4, 6 (0 is the beginning)"),
        (["--to", "3"], "training.save_total_limit"),
        (["--to", "2", "--arm", "F-TIS", "--peer", "a"], "go back together: name b with --peer too"),
        (["--to", "2", "--peer", "a"], "choose another --arm"),
        (["--to", "2", "--peer", "c"], "no records of a peer 'c': it has those of a, b"),
        (["--to", "2", "--arm", "x"], "no arm 'x' in the recipe: it has alone, F-TIS"),
    ],
)
def test_what_cannot_be_undone_is_refused_in_a_line_and_nothing_is_deleted(
    arguments: list[str], says: str, honest: Path, enter: Callable[[Path], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run = enter(honest)
    before = files_of(run)
    assert ftis("rollback", str(run), *arguments) == 1
    said = capsys.readouterr().err
    assert says in said
    assert said.startswith("error: ")
    assert files_of(run) == before


def test_a_directory_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(FtisError, match="give the directory that ftis train or ftis join named"):
        roll_back(tmp_path, 0)
    (tmp_path / "recipe.json").write_text(recipe_of("a", "b").model_dump_json())
    with pytest.raises(FtisError, match="has no records of any arm"):
        roll_back(tmp_path, 0)


def test_a_run_that_is_being_trained_is_left_alone(honest: Path, enter: Callable[[Path], Path]) -> None:
    run = enter(honest)
    with (
        locked(swarm_lock(run / "F-TIS", recipe_of("a", "b")), 0),
        pytest.raises(InUseError, match="in use by another process"),
    ):
        roll_back(run, 2, ["F-TIS"])
    assert len(rows(run, "a")) == 6
    assert len(roll_back(run, 2, ["F-TIS"], dry_run=True).peers) == 2


def test_a_damaged_checkpoint_is_noticed_before_the_newer_ones_are_deleted(
    honest: Path, enter: Callable[[Path], Path]
) -> None:
    run = enter(honest)
    (run / "F-TIS" / "b" / "checkpoint-2" / "model.safetensors").write_bytes(b"half")
    with pytest.raises(FtisError, match=r"checkpoint-2 cannot be resumed \(model.safetensors is damaged\)"):
        roll_back(run, 2)
    assert checkpoint.steps(run / "alone" / "a") == checkpoint.steps(run / "F-TIS" / "a") == [2, 4, 6]


# --- who lied stays accused -------------------------------------------------------------------------------------------


def test_the_liar_is_found_after_the_checkpoint(lied_to: Path) -> None:
    """Else the tests below show nothing."""
    assert [row["peer/b/honesty/quarantined"] for row in rows(lied_to / RUN, "a")][:2] == [False, False]
    assert rows(lied_to / RUN, "a")[-1]["peer/b/honesty/quarantined"]
    assert checkpoint.selections(lied_to / RUN / "F-TIS" / "a", 2)["honesty"]["b"]["found"] is None


@pytest.mark.parametrize("step", [0, 2])
def test_who_lied_stays_in_quarantine_from_the_first_round_on(
    step: int, lied_to: Path, enter: Callable[[Path], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run = enter(lied_to)
    last = rows(run, "a")[-1]
    found = last["peer/b/honesty/found_in_round"]
    assert ftis("rollback", str(run), "--to", str(step)) == 0
    assert f"F-TIS, a: b, found in round {found}, stays in quarantine" in capsys.readouterr().out
    noted = {peer["peer"]: peer["accused"] for peer in read_provenance(run)["rollbacks"][0]["peers"]}
    assert noted["a"]["b"]["honesty/passages"] == last["peer/b/honesty/passages"]
    assert noted["b"] == {}
    assert ftis("train", "recipe.toml", "--resume") == (0 if step else 3)  # 3: a never learned from anybody
    assert "does not draw its tokens" not in capsys.readouterr().out  # it is no news
    again = rows(run, "a")
    assert [row["step"] for row in again] == list(range(1, 7))
    for row in again[step:]:
        assert row["peer/b/admitted"] == row["peer/b/kept"] == 0
        assert row["peer/b/honesty/quarantined"]
        assert row["peer/b/honesty/found_in_round"] == found
        assert row["peer/b/honesty/passages"] == last["peer/b/honesty/passages"]
    assert without_times(again[:step]) == without_times(rows(lied_to / RUN, "a")[:step])
    states = checkpoint.selections(run / "F-TIS" / "a", 6)["honesty"]
    assert states["b"]["found"] == found - 1
    # Going back once more, by way of checkpoints that know it, forgets nobody.
    assert roll_back(run, 0).peers[0].accused["b"]["found"] == found - 1


def test_rounds_from_before_and_after_going_back_are_replayed_bit_for_bit(
    lied_to: Path, enter: Callable[[Path], Path]
) -> None:
    run = enter(lied_to)
    assert ftis("rollback", str(run), "--to", "2") == 0
    assert ftis("train", "recipe.toml", "--resume") == 0
    for step in (0, 2):
        assert ftis("replay", str(run), "--peer", "a", "--from-step", str(step), "--output", f"from-{step}") == 0
        assert_same_weights(run / "F-TIS" / "a" / "checkpoint-6", Path(f"from-{step}") / "a" / "checkpoint-6")


def test_an_accusation_that_only_the_records_know_stays(lied_to: Path, enter: Callable[[Path], Path]) -> None:
    run = enter(lied_to)
    found = rows(run, "a")[-1]["peer/b/honesty/found_in_round"]
    for peer in "ab":
        for step in (4, 6):
            shutil.rmtree(run / "F-TIS" / peer / f"checkpoint-{step}")
    roll_back(run, 2)
    assert accusations.read(run / "F-TIS" / "a", 2)["b"]["found"] == found - 1
    assert accusations.read(run / "F-TIS" / "a", 0) == {}
    assert accusations.read(run / "F-TIS" / "b", 2) == {}


def test_where_the_recipe_only_warns_it_is_said_what_to_resume_with(
    lied_to: Path, enter: Callable[[Path], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run = enter(lied_to)
    recipe = json.loads((run / "recipe.json").read_text())
    recipe["honesty"]["action"] = "warn"
    (run / "recipe.json").write_text(json.dumps(recipe))
    assert ftis("rollback", str(run), "--to", "2") == 0
    assert "resume with --set honesty.action=quarantine" in capsys.readouterr().out
    assert ftis("train", "recipe.toml", "--resume", "--set", "honesty.action=quarantine") == 0
    assert [row["peer/b/admitted"] for row in rows(run, "a")] == [8, 8, 0, 0, 0, 0]


def test_an_accusation_holds_from_the_earliest_step_that_was_gone_back_to(tmp_path: Path) -> None:
    found = {"b": {"found": 35, "found_after": 512, "passages": []}}
    for step in (30, 20, 40):
        accusations.write(tmp_path / "a", step, found)
    assert accusations.read(tmp_path / "a", 20) == found
    assert accusations.read(tmp_path / "a", 19) == {}


def test_what_a_killed_peers_records_accuse_behind_its_checkpoint_is_kept(tmp_path: Path) -> None:
    peer, earlier = tmp_path / "a", {"c": {"found": 1, "found_after": 9, "passages": [[7]]}}
    accusations.keep_undone(peer, 0)  # without records
    assert accusations.read(peer, 99) == {}
    measured = {f"peer/b/honesty/{key}": value for key, value in (("found_in_round", 5), ("found_after_tokens", 512))}
    peer.mkdir()
    (peer / "metrics.jsonl").write_text(json.dumps({"step": 4}) + "\n" + json.dumps({"step": 5, **measured}) + "\n")
    accusations.write(peer, 2, earlier)
    accusations.keep_undone(peer, 5)  # the checkpoint knows it
    assert accusations.read(peer, 99) == earlier
    accusations.keep_undone(peer, 4)
    assert accusations.read(peer, 4) == earlier | {"b": {"found": 4, "found_after": 512, "passages": []}}


def test_damaged_accusations_are_not_passed_over(tmp_path: Path) -> None:
    accusations.path_of(tmp_path / "a").write_text("{")
    with pytest.raises(FtisError, match=r"a\.accused\.json is damaged .* restore it"):
        accusations.read(tmp_path / "a", 0)


# --- kills ------------------------------------------------------------------------------------------------------------


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
        steps = [set(checkpoint.steps(run / "F-TIS" / peer)) for peer in "ab"]
        goes_on = max(set.intersection(*steps))
        seen.add(goes_on)
        assert goes_on in (2, 6)
        for peer in "ab":
            assert len(rows(run, peer)) >= goes_on
            checkpoint.selections(run / "F-TIS" / peer, goes_on)
        if goes_on == 2:
            assert accusations.read(run / "F-TIS" / "a", 2)["b"]["found"] >= 2
        roll_back(run, 2)
        expected = files_of(whole)
        assert {k: v for k, v in files_of(run).items() if ".partial-" not in k} == expected
        point += 1
    assert point > 20
    assert seen == {2, 6}


def test_a_run_killed_while_it_went_back_can_be_resumed(
    lied_to: Path, enter: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = enter(lied_to)

    def killed(self: object, step: int) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("ftis.records.writing.Records.cut_back_to", killed)
        with pytest.raises(Killed):
            roll_back(run, 2)
    assert len(rows(run, "a")) == 6
    assert ftis("train", "recipe.toml", "--resume") == 0
    assert [row["peer/b/admitted"] for row in rows(run, "a")] == [8, 8, 0, 0, 0, 0]


# --- a joined run -----------------------------------------------------------------------------------------------------


def test_the_one_peer_of_a_joined_run_goes_back_by_itself(honest: Path, enter: Callable[[Path], Path]) -> None:
    run = enter(honest)
    shutil.rmtree(run / "F-TIS" / "b")
    (run / "F-TIS" / "a" / "events.jsonl").write_text('{"kind": "start", "step": 0}\n')
    with (
        locked(run / "F-TIS" / ".lock", 0),
        pytest.raises(InUseError, match="in use"),
    ):
        roll_back(run, 4, ["F-TIS"])
    roll_back(run, 4, ["F-TIS"])
    assert checkpoint.steps(run / "F-TIS" / "a") == [2, 4]
    assert len(rows(run, "a")) == 4
    assert read_jsonl(run / "F-TIS" / "a" / "events.jsonl") == [{"kind": "start", "step": 0}]
    with pytest.raises(FtisError, match="no records of a peer 'b': it has those of a"):
        roll_back(run, 2, ["F-TIS"], ["b"])
