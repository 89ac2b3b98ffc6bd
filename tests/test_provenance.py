"""Which recipes a run directory may be gone on with, and what is written down then."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from ftis.config import Recipe, RunError
from ftis.directory.claiming import claim, delete_run, peer_lock
from ftis.directory.resuming import require_checkpoint
from ftis.prompts import Task
from ftis.recipe.arms import arms_of
from ftis.recipe.parsing import parse
from ftis.records.files import InUseError, locked
from ftis.records.plan import read_plan, read_provenance, write_run
from ftis.tasks.problems import make_task

ALONE, TOGETHER = {"name": "alone", "collaborate": False}, {"name": "F-TIS"}
GSPO = {"name": "GSPO", "set": {"objective.name": "GSPO"}}


def recipe(*arms: dict[str, Any], rounds: int = 3) -> Recipe:
    return parse(
        {
            "name": "claimed",
            "task": {"name": "clock"},
            "training": {"rounds": rounds},
            "peers": [{"name": name, "model": "starter:small"} for name in "ab"],
            "arms": arms,
        }
    )


def begin(directory: Path, recipe: Recipe, tasks: Mapping[str, Sequence[Task]] = MappingProxyType({})) -> Path:
    """Claim a directory, and let a peer have records in it."""
    claim(directory, False, recipe, tasks=tasks)
    peer = directory / arms_of(recipe)[0].name / "a"
    peer.mkdir(parents=True)
    (peer / "evaluations.jsonl").write_text("{}\n", encoding="utf-8")
    return directory


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """A run of two arms that has records."""
    return begin(tmp_path / "run", recipe(ALONE, TOGETHER))


@pytest.mark.parametrize(
    ("section", "keys", "noted"),
    [
        ("peers", {"cuda_graphs": False, "gradient_checkpointing": True, "tokens_per_microbatch": 64}, True),
        ("", {"threads": 3}, True),  # another machine's cores
        ("network", {"deadline": 1.0}, False),
        ("training", {"rounds": 4}, True),
        ("honesty", {"action": "warn"}, True),
        ("experiment", {"baselines": ["F-TIS"]}, True),
        ("training", {"rounds": 2, "eval_every": 1, "save_every": 7, "save_total_limit": 3}, True),
        ("training", {"record_rollouts": False}, True),
        ("arms", {"set": {"training.rounds": 4}}, True),
    ],
)
def test_some_keys_may_change_and_those_that_a_run_goes_by_are_noted(
    section: str, keys: dict[str, Any], noted: bool, begun: Path
) -> None:
    document, recorded = json.loads(recipe(ALONE, TOGETHER).model_dump_json()), read_provenance(begun)
    place = document[section] if section else document
    for table in place if isinstance(place, list) else [place]:
        table |= keys
    said = claim(begun, True, parse(document))
    assert not noted or all(key in said for key in keys)
    now = read_provenance(begun)
    changed = [len(later["changed"]) for later in now.pop("continued", [])]
    assert changed == ([len(keys) * (2 if section in ("arms", "peers") else 1)] if noted else [])
    assert now == recorded
    assert read_plan(begun).recipe == (parse(document) if noted else recipe(ALONE, TOGETHER))
    assert claim(begun, True, parse(document)) == f"goes on in {begun}"


@pytest.mark.parametrize("finished", [7, 10, 11])
def test_rounds_before_a_first_checkpoint_are_counted_by_the_longest_save_every(finished: int, begun: Path) -> None:
    rows = "".join(f'{{"step": {step}}}\n' for step in range(1, finished + 1))
    (begun / "alone" / "a" / "evaluations.jsonl").write_text("", encoding="utf-8")
    (begun / "alone" / "a" / "metrics.jsonl").write_text(rows, encoding="utf-8")
    for keys in ({"training": {"save_every": 1}}, {"arms": [ALONE | {"set": {"training.save_every": 2}}, TOGETHER]}):
        changed = parse({**json.loads(recipe(ALONE, TOGETHER).model_dump_json()), **keys})
        claim(begun, True, changed)
        swarm = arms_of(changed)[0].swarms[0]
        with pytest.raises(RunError, match="11 finished rounds") if finished > 10 else nullcontext():
            require_checkpoint(begun / "alone", swarm)


def test_no_arm_goes_on_with_other_problems_than_its_own(tmp_path: Path) -> None:
    def problems(arm: str, last: str) -> dict[str, list[Task]]:
        validation: list[Any] = [("1+1=", "2", {}), ("2+2=", last, {})]
        return {arm: [make_task("mine", [("3+3=", "6", {})], validation, "exact")]}

    both = recipe(ALONE, TOGETHER)
    claim(tmp_path / "run", True, both, tasks=problems("alone", "3"))  # nothing is trained, so it counts for nothing
    run = begin(tmp_path / "run", both, problems("alone", "4"))
    for tasks in (
        problems("alone", "4"),
        problems("F-TIS", "5"),
    ):
        for _ in range(2):
            assert claim(run, True, both, tasks=tasks)
        (arm,) = tasks
        with pytest.raises(RunError, match="the problems of task 'mine' are not those that the run in"):
            claim(run, True, both, tasks=problems(arm, "6"))
    assert "continued" not in read_provenance(run)


def test_arms_that_begin_side_by_side_all_have_their_problems_recorded(tmp_path: Path) -> None:
    task = {"mine": [make_task("mine", [("3+3=", "6", {})], [("1+1=", "2", {})], "exact")]}
    run, both = tmp_path / "run", recipe(ALONE, TOGETHER)
    claim(run, True, both, tasks={"alone": task["mine"]})
    with locked(run / "alone" / ".lock@a"):  # it trains, and has no records yet
        claim(run, True, both, tasks={"F-TIS": task["mine"]})
    assert read_provenance(run)["problems"].keys() == {"alone", "F-TIS"}


def test_a_deletion_that_is_interrupted_leaves_no_weights_to_go_on_from(
    begun: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            (path / "recipe.json").unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("shutil.rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            delete_run(begun)
    assert not begun.exists()
    assert list(begun.parent.iterdir())
    delete_run(begun)
    assert not list(begun.parent.iterdir())


def test_a_run_that_begins_takes_away_what_an_interrupted_deletion_left(tmp_path: Path) -> None:
    (tmp_path / ".partial-run" / "alone").mkdir(parents=True)
    claim(tmp_path / "run", False, recipe(ALONE))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_problems_of_an_earlier_version_are_the_first_arms(tmp_path: Path) -> None:
    problems = make_task("mine", [("3+3=", "6", {})], [("1+1=", "2", {})], "exact")
    run = begin(tmp_path / "run", recipe(ALONE, TOGETHER), {"alone": [problems]})
    known: Any = read_provenance(run)
    write_run(run, {**known, "problems": known["problems"]["alone"]})
    changed = make_task("mine", [("3+3=", "7", {})], [("1+1=", "2", {})], "exact")
    with pytest.raises(RunError, match="the problems of task 'mine'"):
        claim(run, True, recipe(ALONE, TOGETHER), tasks={"alone": [changed]})
    assert claim(run, True, recipe(ALONE, TOGETHER), tasks={"alone": [problems], "F-TIS": [changed]})


def test_records_without_their_recipe_are_refused_and_stay(begun: Path) -> None:
    (begun / "recipe.json").unlink()
    for resume in (False, True):
        with pytest.raises(RunError, match=r"without its recipe\.json"):
            claim(begun, resume, recipe(ALONE))
    delete_run(begun)
    assert (begun / "alone" / "a" / "evaluations.jsonl").exists()


def test_a_run_is_deleted_unless_something_trains_in_it(begun: Path) -> None:
    for lock in (begun / "alone" / ".lock@a", peer_lock(begun / "alone" / "a")):
        with locked(lock), pytest.raises(InUseError, match="in use by another process"):
            delete_run(begun)
        assert (begun / "recipe.json").exists()
    delete_run(begun)
    assert not begun.exists()
    begun.mkdir()
    delete_run(begun)  # no run: what somebody else keeps there stays
    assert begun.exists()


def test_another_recipe_takes_no_directory_in_which_one_trains(begun: Path, tmp_path: Path) -> None:
    fresh = tmp_path / "fresh"
    claim(fresh, False, recipe(ALONE))
    for run, other in ((fresh, recipe(TOGETHER)), (begun, recipe(ALONE, TOGETHER, rounds=9))):
        before, lock = (run / "recipe.json").read_bytes(), run / "alone" / ".lock@a"
        with locked(lock):
            for resume in (run == begun, True):
                with pytest.raises(InUseError, match="another name"):
                    claim(run, resume, other)
            claim(run, True, read_plan(run).recipe)  # another swarm of the same run
            assert (run / "recipe.json").read_bytes() == before
            claim(run, True, other, held=[lock])
        assert read_plan(run).recipe == other


def test_a_run_takes_new_arms_and_says_when_they_came(begun: Path) -> None:
    first = read_provenance(begun)
    claim(begun, True, recipe(ALONE, GSPO, TOGETHER))
    known = json.loads((begun / "recipe.json").read_text(encoding="utf-8"))
    assert [arm["name"] for arm in known["arms"]] == ["alone", "GSPO", "F-TIS"]
    now = read_provenance(begun)
    (later,) = now["continued"]
    assert set(later) == {"arms", "started", "commit", "modules", "versions", "machine"}
    assert later["arms"] == ["GSPO"]
    assert now["objectives"].pop("GSPO")["name"] == "GSPO"
    assert {key: now.get(key) for key in first} == first
    before = read_provenance(begun)
    claim(begun, True, recipe(ALONE, GSPO, TOGETHER))  # goes on, with nothing to add
    assert read_provenance(begun) == before


def test_a_recipe_without_arms_takes_some_as_the_one_named_after_its_objective(tmp_path: Path) -> None:
    run, objective = begin(tmp_path / "run", recipe()), {"name": recipe().objective.name}
    with pytest.raises(RunError, match=r"holds the arms .* besides"):
        claim(run, True, recipe(ALONE))
    claim(run, True, recipe(objective, ALONE))
    assert read_provenance(run)["continued"][0]["arms"] == ["alone"]


def test_a_run_without_its_provenance_goes_on_and_gets_one(begun: Path) -> None:
    objectives = read_provenance(begun)["objectives"]
    (begun / "provenance.json").unlink()
    assert claim(begun, True, recipe(ALONE, TOGETHER)).startswith(f"goes on in {begun}")
    assert read_provenance(begun)["objectives"] == objectives


def test_a_run_that_goes_on_with_other_code_says_so_once(begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = read_provenance(begun)
    monkeypatch.setattr("ftis.directory.provenance.commit", lambda: "another")
    claim(begun, True, recipe(ALONE, TOGETHER), trains=False)
    assert read_provenance(begun) == first
    said = [claim(begun, True, recipe(ALONE, TOGETHER)) for _ in range(2)]
    goes_on = f"goes on in {begun}"
    assert said == [f"{goes_on}; changed since: commit (see provenance.json)", goes_on]
    now = read_provenance(begun)
    (continued,) = now.pop("continued")
    assert now == first
    assert set(continued) == {"started", "commit", "modules", "versions", "machine"}
    assert continued["commit"] == "another"
    monkeypatch.setattr("ftis.directory.provenance.commit", lambda: first["commit"])
    claim(begun, True, recipe(ALONE, TOGETHER))  # it was known before
    assert len(read_provenance(begun)["continued"]) == 1


def test_a_run_of_another_version_takes_an_arm_and_keeps_what_is_recorded_of_its_own(begun: Path) -> None:
    """A number that they learned with is another one today, and a key of their peers is new."""
    recorded, known = read_provenance(begun), json.loads((begun / "recipe.json").read_text(encoding="utf-8"))
    recorded["objectives"]["F-TIS"]["epsilon"] = 0.1
    for peer in known["peers"]:
        del peer["cuda_graphs"]
    for name, document in (("provenance.json", recorded), ("recipe.json", known)):
        (begun / name).write_text(json.dumps(document), encoding="utf-8")
    claim(begun, True, recipe(ALONE, TOGETHER, GSPO))
    now = read_provenance(begun)
    assert now["objectives"]["F-TIS"]["epsilon"] == 0.1
    assert [later["arms"] for later in now["continued"]] == [["GSPO"]]


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        (recipe(ALONE), "holds the arms F-TIS besides, which the recipe lacks now"),
        (recipe(GSPO), "holds the arms F-TIS, alone besides, which the recipe lacks now: put them back"),
        (
            recipe(ALONE, {"name": "F-TIS", "set": {"objective.name": "TIS"}}),
            r"differ in: arms.F-TIS.set.objective.name \(None before, 'TIS' now\).*add arms only",
        ),
        (recipe(), "differ in: arms.*add arms only"),
    ],
    ids=["an arm less", "another arm alone", "an arm changed", "no arms"],
)
def test_anything_else_is_another_recipe(begun: Path, other: Recipe, differs: str) -> None:
    before = (begun / "recipe.json").read_bytes()
    with pytest.raises(RunError, match=differs):
        claim(begun, True, other)
    assert (begun / "recipe.json").read_bytes() == before


@pytest.mark.parametrize(
    ("sections", "differs"),
    [
        (lambda d: {"peers": d["peers"][::-1]}, r"peers\.a\.place \(0 before, 1 now\)"),  # order assigns prompts
        (lambda d: {"peers": [d["peers"][0], d["peers"][1] | {"lora_r": 4}]}, r"peers\.b\.lora_r \(128 bef.* 4 now\)"),
        (lambda d: {"ood": [d["ood"][0] | {"validation_size": 9}, d["ood"][1]]}, r"ood\.0\.validation_size"),
        (lambda d: {"prompt": {"system_prompt": "x" * 999}}, r"prompt\.system_prompt \('Think\.' bef.*'x{60,90}… now"),
    ],
    ids=["the peers' order", "a peer", "one of two with a name", "a long text"],
)
def test_what_differs_is_named_with_both_values(
    sections: Callable[[dict[str, Any]], dict[str, Any]], differs: str, tmp_path: Path
) -> None:
    document: dict[str, Any] = {
        "name": "claimed",
        "task": {"name": "clock"},
        "ood": [{"name": "clock", "validation_size": n} for n in (5, 7)],
        "prompt": {"system_prompt": "Think."},
        "peers": [{"name": name, "model": "starter:small"} for name in "ab"],
    }
    run = begin(tmp_path / "run", parse(document))
    with pytest.raises(RunError, match=rf"they differ in: {differs}"):
        claim(run, True, parse(document | sections(document)))


def test_a_run_cannot_have_fewer_rounds_than_it_has_finished(begun: Path) -> None:
    (begun / "alone" / "a" / "checkpoint-3").mkdir()
    with pytest.raises(RunError, match=r"training.rounds = 2, but arm alone .* finished 3 .*--resume 2"):
        claim(begun, True, recipe(ALONE, TOGETHER, rounds=2), trains=False)
    assert claim(begun, True, recipe(ALONE, TOGETHER, rounds=5), trains=False)
    assert claim(begun, True, recipe(ALONE, TOGETHER, rounds=3), trains=False)
    changes = [later["changed"] for later in read_provenance(begun)["continued"]]
    assert changes == [{"training.rounds": [3, 5]}, {"training.rounds": [5, 3]}]
