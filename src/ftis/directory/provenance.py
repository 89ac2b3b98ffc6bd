"""A run's provenance: everything beside the recipe on which its numbers depend, and its changes as the run goes on.

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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from ftis.config import Recipe, RunError
from ftis.machine.resources import cores
from ftis.models import starters
from ftis.objectives import resolve
from ftis.prompts import Task
from ftis.recipe.arms import arms_of
from ftis.recipe.parsing import names_in
from ftis.records.files import locked, timestamp
from ftis.records.plan import Provenance, provenances, read_provenance, write_run
from ftis.version import VERSION, commit

LOCK, LOCK_SECONDS = ".lock", 30.0
"""The file that a process holds while it writes a run's documents, and the seconds for which others wait."""
Tasks = Mapping[str, Sequence[Task]]
"""Of each arm, its task and those out of distribution."""
OF_ITS_TIME = ("started", "commit", "modules", "versions", "machine")
"""The parts that may differ for an arm that was added later, and for rounds after a resume."""


def provenance(recipe: Recipe) -> Provenance:
    """The provenance of a run that starts now."""
    arms, packages = arms_of(recipe), ["torch", "transformers", "peft", "numpy"]
    peers = [*recipe.peers, *(peer for arm in arms for peer in arm.recipe.peers)]
    made = sorted({peer.model for peer in peers if starters.is_starter(peer.model)})
    if any(peer.optim != "adamw" or peer.frozen_dtype == "nf4" for peer in peers):
        packages.append("bitsandbytes")
    return {
        "started": timestamp(),
        "seed": recipe.seed,
        "commit": commit(),
        "starters": {model: starters.path_of(model).name for model in made},
        "objectives": {arm.name: _numbers(arm.recipe) for arm in arms},
        "modules": _own_modules([recipe, *(arm.recipe for arm in arms)]),
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


def beginning(recipe: Recipe, tasks: Tasks, joined: str | None) -> Provenance:
    """The provenance with which a run's directory begins; ``joined`` is the one peer that trains there."""
    return {**provenance(recipe), "problems": _problems(tasks), **({"joined": joined} if joined else {})}


def _numbers(recipe: Recipe) -> dict[str, Any]:
    """The numbers that an objective learns with: its own, and those that the recipe sets."""
    objective = resolve(recipe.objective)
    numbers = {f.name: getattr(objective, f.name) for f in fields(objective)}
    kept = {key: v for key, v in numbers.items() if v is None or isinstance(v, bool | int | float | str)}
    return {"name": recipe.objective.name, **kept}


def _own_modules(recipes: Sequence[Recipe]) -> dict[str, str]:
    """The sha256 of each module outside ftis that the recipes name by dotted path, as it is now."""
    return module_digests(name for recipe in recipes for name in names_in(recipe))


def module_digests(named: Iterable[str]) -> dict[str, str]:
    """The sha256 of each module outside ftis that one of these dotted paths leads to."""
    modules = {name.rpartition(".")[0] for name in named if "." in name} - {""}
    digests = {}
    for module in sorted(m for m in modules if m.partition(".")[0] not in ("ftis", "given")):
        with contextlib.suppress(ModuleNotFoundError):  # no such package: a TRL script needs no reward of the recipe
            found = importlib.util.find_spec(module)
            if found is not None and found.origin is not None and Path(found.origin).is_file():
                digests[module] = hashlib.sha256(Path(found.origin).read_bytes()).hexdigest()
    return digests


def _problems(tasks: Tasks) -> dict[str, list[str]]:
    """Of each arm, the sha256 of each task's questions and answers, those to validate with among them."""
    return {arm: [_digest(task) for task in of_arm] for arm, of_arm in tasks.items()}


def _digest(task: Task) -> str:
    pairs = [task.digest, *([p.question, p.answer] for p in task.validation)]
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()


def recorded_problems(known: Provenance) -> dict[str, list[str]]:
    """The digests of a provenance by arm. An earlier version had those of the first arm alone."""
    problems: Any = known.get("problems", {})
    return problems if isinstance(problems, dict) else {next(iter(known.get("objectives", ())), ""): problems}


def check_problems(directory: Path, tasks: Tasks) -> None:
    """Refuse to go on with other problems than an arm began with, for example after an edit of a file."""
    began = recorded_problems(read_provenance(directory))
    for arm, of_arm in tasks.items():
        for task, was in zip(of_arm, began.get(arm, ()), strict=False):
            if was != _digest(task):
                raise RunError(
                    f"the problems of task {task.name!r} are not those that the run in {directory} began with: put "
                    f"back the file or the code that they come from, or start anew with --overwrite or another name"
                )


def note_continuation(
    directory: Path,
    recipe: Recipe,
    now: Provenance,
    added: Sequence[str],
    changed: Mapping[str, tuple[Any, Any]],
) -> list[str]:
    """Add an entry to the run's ``continued`` if it goes on with more arms or rounds, other code or another machine.

    Digests of problems are added for an arm that has none yet.

    Returns:
        the parts that differ from the last time.
    """
    with locked(directory / LOCK, patience=LOCK_SECONDS):
        known, before = read_provenance(directory), provenances(directory)
        seen = any(all(one.get(key) == now.get(key) for key in OF_ITS_TIME[1:]) for one in before)
        document = {**known, "problems": {**now["problems"], **recorded_problems(known)}}
        if added or changed or not seen:
            more = {**({"arms": added} if added else {}), **({"changed": changed} if changed else {})}
            entry = {**{key: now.get(key) for key in OF_ITS_TIME}, **more}
            objectives = {**now["objectives"], **known.get("objectives", {})}
            document |= {"objectives": objectives, "continued": [*before[1:], entry]}
        if document != known:
            write_run(directory, document, recipe if added or changed else None)
        return [] if seen else [key for key in OF_ITS_TIME[1:] if before[-1].get(key) != now.get(key)]


def longest_unsaved(directory: Path, arm: str, save_every: int) -> int:
    """The most rounds that an arm of a run has had between two checkpoints: ``save_every``, now or earlier."""
    keys = ("training.save_every", f"arms.{arm}.set.training.save_every")
    changes = [later.get("changed", {}) for later in provenances(directory)]
    before = [n for change in changes for key in keys for n in change.get(key, ()) if isinstance(n, int)]
    return max([save_every, *before])


def note_rollback(directory: Path, entry: Mapping[str, Any]) -> None:
    """Append ``entry`` to the run's ``rollbacks``: its numbers do not follow from its recipe alone any more.

    Raises:
        RecordsError: the provenance is damaged.
    """
    with locked(directory / LOCK, patience=LOCK_SECONDS):
        known = read_provenance(directory)
        write_run(directory, {**known, "rollbacks": [*known.get("rollbacks", ()), {"time": timestamp(), **entry}]})
