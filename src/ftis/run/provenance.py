"""A run's provenance: everything beside the recipe on which its numbers depend, and whether a run may go on from it.

provenance.json stands beside recipe.json in a run directory: when the run was started, seed, commit, starters, the
objectives' numbers, digests of problems and of modules of one's own, versions, machine. (A *manifest* is something
else: what a peer signs, see :mod:`ftis.swarm.manifest`.)
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import platform
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from ftis.config import PeerConfig, Recipe, RecipeError
from ftis.engines.machine import cores
from ftis.models import starters
from ftis.objectives import resolve
from ftis.prompts import Task
from ftis.recipe.arms import PROVENANCE, RunError, arms_of
from ftis.recipe.parsing import parse, with_arm
from ftis.records.files import locked, read_jsonl, write_json, write_whole
from ftis.run import checkpoint
from ftis.tasks.problems import excerpt
from ftis.version import VERSION, commit

LOCK_SECONDS = 30.0
OF_ITS_TIME = ("started", "commit", "modules", "versions", "machine")
"""The parts that may differ for an arm that was added later, and for rounds after a resume."""

LONGER = (
    "; for more rounds let a peer of a new run begin where one ended, with that checkpoint's directory as its model"
)

FREE_TO_CHANGE = ("output_dir", "processes", "offload", "report_to", "experiment", "network", "honesty")
"""Keys that may differ when a run is resumed: they do not change the numbers of honest peers."""
FREE_OF_PEERS = ("cuda_graphs",)
"""The same, of a peer: nothing on a CPU, and last bits on a GPU."""


def provenance(recipe: Recipe) -> dict[str, Any]:
    """The provenance of a run that starts now."""
    packages = ["torch", "transformers", "peft", "numpy"]
    if any(peer.optim != "adamw" or peer.frozen_dtype == "nf4" for peer in _peers(recipe)):
        packages.append("bitsandbytes")
    return {
        "started": _now(),
        "seed": recipe.seed,
        "commit": commit(),
        "starters": _starter_names(recipe),
        "objectives": {arm.name: _numbers(arm.recipe) for arm in arms_of(recipe)},
        "modules": _own_modules(recipe),
        "versions": {
            "python": platform.python_version(),
            "ftis": VERSION,
            **{package: importlib.metadata.version(package) for package in packages},
        },
        "machine": {
            "platform": platform.platform(),
            "cores": cores(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        },
    }


def _numbers(recipe: Recipe) -> dict[str, Any]:
    """The numbers that an objective learns with: its own, and those that the recipe sets."""
    objective = resolve(recipe.objective)
    numbers = {f.name: getattr(objective, f.name) for f in fields(objective)}
    kept = {key: v for key, v in numbers.items() if v is None or isinstance(v, bool | int | float | str)}
    return {"name": recipe.objective.name, **kept}


def _own_modules(recipe: Recipe) -> dict[str, str]:
    """The sha256 of each module outside ftis that the recipe names by dotted path, as it is now."""
    named: set[str] = set()
    for r in (recipe, *(arm.recipe for arm in arms_of(recipe))):
        named |= {r.objective.name, r.reward.function, r.sampling.sampler, *r.report_to}
        for task in (r.task, *r.ood):
            named |= {task.name, *([str(task.options.get("name"))] if task.name == "held_out" else [])}
        named |= {*r.training.selections, *(peer.attack for peer in r.peers if peer.attack)}
    modules = {name.rpartition(".")[0] for name in named if "." in name} - {""}
    digests = {}
    for module in sorted(m for m in modules if m.partition(".")[0] != "ftis"):
        found = importlib.util.find_spec(module)
        if found is not None and found.origin is not None and Path(found.origin).is_file():
            digests[module] = hashlib.sha256(Path(found.origin).read_bytes()).hexdigest()
    return digests


def read_provenance(run: Path) -> dict[str, Any]:
    """The provenance of the run in a directory.

    Raises:
        RunError: it is not there, or is damaged.
    """
    path = run / PROVENANCE
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(
            f"{run} is no run directory ({PROVENANCE} is not there): give the one that ftis train printed, as in "
            f"runs/demo-seed0"
        ) from None
    except json.JSONDecodeError as error:
        raise RunError(f"{path} is damaged ({error}): restore it") from None
    return document


def claim(
    directory: Path,
    resume: bool,
    recipe: Recipe,
    records: str = "*/*/evaluations.jsonl",
    *,
    trains: bool = True,
    tasks: Sequence[Task] = (),
) -> str:
    """Make the run directory, or check that an earlier run of the same recipe can go on in it.

    The recipe may have arms that the earlier run had not: they are added to the run.

    Returns:
        a line that an earlier run goes on, with the differences from before; "" for a new one.

    Args:
        records: the files of a run that has begun; without any there is nothing to lose.
        trains: whether rounds follow. Then other code or another machine than before is noted.
        tasks: of the recipe, whose problems must be those that the run began with.

    Raises:
        RunError: a run is there and ``resume`` is false, or its recipe, problems or starters are not today's.
    """
    known = directory / "recipe.json"
    if known.exists() and any(directory.glob(records)):
        if not resume:
            raise RunError(
                f"{directory} already holds a run: add --resume to go on with it, --overwrite to start it anew "
                f"(from Python resume=True, overwrite=True), or --set output_dir=… for another place"
            )
        added = require_same_recipe(directory, recipe)
        if made := made_otherwise(directory, _starter_names(recipe)):
            raise RunError(
                f"{directory} was started with other starters ({', '.join(made.values())}): those made now differ, "
                f"since ftis or what they are made with has changed. Start anew, or go on with the version in "
                f"{PROVENANCE}"
            )
        _check_problems(directory, tasks)
        if added:
            now = provenance(recipe)
            later = {key: now[key] for key in OF_ITS_TIME}
            with locked(directory / ".lock", LOCK_SECONDS):
                document = read_provenance(directory)
                document["objectives"] = {**now["objectives"], **document["objectives"]}
                document["added"] = {**document.get("added", {}), **dict.fromkeys(added, later)}
                write_json(directory / PROVENANCE, document)
                write_whole(known, recipe.model_dump_json(indent=1) + "\n")
        others = _note_continuation(directory, recipe) if trains and not added else []
        changed = f"; changed since: {', '.join(others)} (see {PROVENANCE})" if others else ""
        lost = _lost_records(directory) if trains else []
        holes = f"; metrics.jsonl lacks rounds that a checkpoint has: {', '.join(lost)}" if lost else ""
        return f"goes on in {directory}{changed}{holes}"
    directory.mkdir(parents=True, exist_ok=True)
    with locked(directory / ".lock", LOCK_SECONDS):
        write_json(directory / PROVENANCE, {**provenance(recipe), "problems": _problems(tasks)})
        write_whole(known, recipe.model_dump_json(indent=1) + "\n")
    return ""


def _lost_records(directory: Path) -> list[str]:
    """The peers whose records lack rounds before their newest checkpoint, as after a crash of the machine."""
    found = []
    for peer in sorted({path.parent for path in directory.glob("*/*/checkpoint-*")}):
        path, newest = peer / "metrics.jsonl", max(checkpoint.steps(peer), default=0)
        recorded = {row["step"] for row in read_jsonl(path)} if path.exists() else set()
        if missing := sorted(set(range(1, newest + 1)) - recorded):
            found.append(f"{peer.relative_to(directory)} {missing[0]} to {missing[-1]}")
    return found


def _problems(tasks: Iterable[Task]) -> list[str]:
    """The sha256 of each task's questions and answers, those to validate with among them."""
    pairs = ([task.digest, *([p.question, p.answer] for p in task.validation)] for task in tasks)
    return [hashlib.sha256(json.dumps(of_one).encode()).hexdigest() for of_one in pairs]


def _check_problems(directory: Path, tasks: Sequence[Task]) -> None:
    """Refuse to go on with other problems than a run began with, for example after an edit of a file."""
    began = read_provenance(directory).get("problems", ())  # older runs do not say
    if changed := [task.name for task, was, now in zip(tasks, began, _problems(tasks), strict=False) if was != now]:
        raise RunError(
            f"the problems of task {changed[0]!r} are not those that the run in {directory} began with: put back the "
            f"file or the code that they come from, or start anew with --overwrite or another name"
        )


def made_otherwise(run: Path, models: Iterable[str]) -> dict[str, str]:
    """The starters that are made otherwise now than when the run began, each with its directory's name then."""
    began = read_provenance(run).get("starters", {})
    now = {model: starters.path_of(model).name for model in models}
    return {model: began[model] for model, name in now.items() if began.get(model, name) != name}


def delete_run(directory: Path) -> None:
    """Remove an earlier run, unless something still trains in it.

    Raises:
        InUseError: something does.
    """
    if not (directory / "recipe.json").exists():
        return
    with contextlib.ExitStack() as held:
        for lock in directory.glob("*/.lock*"):
            held.enter_context(locked(lock, 0))
        shutil.rmtree(directory)


def _note_continuation(directory: Path, recipe: Recipe) -> list[str]:
    """Add an entry to the run's ``continued`` if it goes on with other code or on another machine.

    Returns:
        the parts that differ from the last time.
    """
    now = provenance(recipe)
    with locked(directory / ".lock", LOCK_SECONDS):
        known = read_provenance(directory)
        before = [known, *known.get("added", {}).values(), *known.get("continued", ())]
        if not any(all(of[key] == now[key] for key in OF_ITS_TIME if key != "started") for of in before):
            known["continued"] = [*known.get("continued", ()), {key: now[key] for key in OF_ITS_TIME}]
            write_json(directory / PROVENANCE, known)
            return [key for key in OF_ITS_TIME if key != "started" and before[-1].get(key) != now[key]]
        return []


def note_rollback(directory: Path, entry: Mapping[str, Any]) -> None:
    """Append ``entry`` to the run's ``rollbacks``: its numbers do not follow from its recipe alone any more.

    Raises:
        RunError: the provenance is not there or is damaged.
    """
    with locked(directory / ".lock", LOCK_SECONDS):
        document = read_provenance(directory)
        rollbacks = [*document.get("rollbacks", []), {"time": _now(), **entry}]
        write_json(directory / PROVENANCE, {**document, "rollbacks": rollbacks})


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def require_same_recipe(directory: Path, recipe: Recipe) -> list[str]:
    """Refuse another recipe than that of the run in a directory, except for arms that are added.

    Returns:
        the names of those arms.

    Raises:
        RunError: they differ elsewhere, or there is no run.
    """
    try:
        before = json.loads((directory / "recipe.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"there is no run in {directory}: leave --resume out to begin one") from None
    now = json.loads(recipe.model_dump_json())
    with contextlib.suppress(RecipeError):
        before = json.loads(parse(before).model_dump_json())  # with the keys that its older version lacked
    had = {arm["name"] for arm in before["arms"]}
    added = [arm["name"] for arm in now["arms"] if had and arm["name"] not in had]
    now["arms"] = [arm for arm in now["arms"] if arm["name"] not in added]
    differing = _that_matter(before, now)
    fewer = had - {arm["name"] for arm in now["arms"]}
    others = {**before, "arms": [arm for arm in before["arms"] if arm["name"] not in fewer]}
    if fewer and recipe.arms and not _that_matter(others, now):
        raise RunError(
            f"{directory} holds the arms {', '.join(sorted(fewer))} besides: leave --arm out, or name them too; "
            f"what is finished is skipped"
        )
    if differing:
        shown = ", ".join(f"{key}{_values(*values)}" for key, values in differing.items())
        raise RunError(
            f"{directory} holds a run of another recipe (they differ in: {shown}): resume with the recipe it was "
            f"started with, add arms only, choose another output_dir (--output-dir of ftis demo), or delete "
            f"it{LONGER if list(differing) == ['training.rounds'] else ''}"
        )
    return added


def _that_matter(before: Any, now: Any) -> dict[str, tuple[Any, Any]]:
    """The keys at which two recipes differ and a run may not."""
    in_seconds = any(arm["budget"] == "seconds" for arm in before["arms"])
    return {
        key: values
        for key, values in _differing(before, now).items()
        if (key.partition(".")[0] not in FREE_TO_CHANGE and key.rpartition(".")[2] not in FREE_OF_PEERS)
        or (in_seconds and key == "experiment.sampling_cost")  # how many prompts those arms have follows from it
    }


def _differing(before: Any, now: Any, place: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted keys at which two recipes differ, and both values. Tables in a list, as peers, are called by their names
    where these are in the same order, or not the same names."""
    if before == now:
        return {}
    names, other_names = _names(before), _names(now)
    if names and other_names and (names == other_names or set(names) != set(other_names)):
        before = dict(zip(names, before, strict=True))
        now = dict(zip(other_names, now, strict=True))
    if isinstance(before, dict) and isinstance(now, dict):
        pairs = {key: (before.get(key), now.get(key)) for key in sorted(before.keys() | now.keys())}
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        pairs = {str(i): pair for i, pair in enumerate(zip(before, now, strict=True))}
    else:
        return {place: (before, now)}
    found: dict[str, tuple[Any, Any]] = {}
    for key, (one, other) in pairs.items():
        found |= _differing(one, other, f"{place}.{key}".lstrip("."))
    return found


def _names(values: Any) -> list[str]:
    """The names of the tables in a list; none where it is no such list, or two have the same."""
    if not isinstance(values, list) or not all(isinstance(value, dict) and "name" in value for value in values):
        return []
    names = [str(value["name"]) for value in values]
    return names if len(set(names)) == len(names) else []


def _values(before: Any, now: Any) -> str:
    """Both values in brackets; "" for lists and tables."""
    if any(isinstance(value, (list, dict)) for value in (before, now)):
        return ""
    one, other = ("not set" if value is None else excerpt(value) for value in (before, now))
    return f" ({one} before, {other} now)"


def _peers(recipe: Recipe) -> list[PeerConfig]:
    """The peers, as the recipe has them and as its arms do."""
    return [*recipe.peers, *(peer for arm in recipe.arms for peer in with_arm(recipe, arm).peers)]


def _starter_names(recipe: Recipe) -> dict[str, str]:
    """The digest-carrying directory name of each starter in the recipe: other contents have another name."""
    named = sorted({peer.model for peer in _peers(recipe) if starters.is_starter(peer.model)})
    return {model: starters.path_of(model).name for model in named}
