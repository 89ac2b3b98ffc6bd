"""A run's provenance: everything beside the recipe on which its numbers depend.

provenance.json stands beside recipe.json in a run directory: when the run was started, seed, commit, starters, the
objectives' numbers, digests of problems and of modules of one's own, versions, machine. (A *manifest* is something
else: what a peer signs, see :mod:`ftis.swarm.manifest`.)
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import platform
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from ftis.config import Recipe, TaskConfig
from ftis.engines.machine import cores
from ftis.models import starters
from ftis.objectives import resolve
from ftis.recipe.arms import arms_of
from ftis.records.files import timestamp
from ftis.version import VERSION, commit


def provenance(recipe: Recipe) -> dict[str, Any]:
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


def _numbers(recipe: Recipe) -> dict[str, Any]:
    """The numbers that an objective learns with: its own, and those that the recipe sets."""
    objective = resolve(recipe.objective)
    numbers = {f.name: getattr(objective, f.name) for f in fields(objective)}
    kept = {key: v for key, v in numbers.items() if v is None or isinstance(v, bool | int | float | str)}
    return {"name": recipe.objective.name, **kept}


def _own_modules(recipes: Sequence[Recipe]) -> dict[str, str]:
    """The sha256 of each module outside ftis that the recipes name by dotted path, as it is now."""
    named: set[str] = set()
    for r in recipes:
        named |= {r.objective.name, *r.reward.function, r.sampling.sampler, *r.report_to}
        named |= {name for task in (r.task, *r.ood) for name in _names_of(task)}
        named |= {*r.training.selections, *(peer.attack for peer in r.peers if peer.attack)}
    return _digests(named)


def agreed_modules(recipe: Recipe) -> dict[str, dict[str, str]]:
    """The digests of the user's own reward and task modules, by which peers see that they score and ask alike.

    Modules that these import are not among them.
    """
    found = {"reward_modules": _digests(recipe.reward.function), "task_modules": _digests(_names_of(recipe.task))}
    return {key: digests for key, digests in found.items() if digests}


def _names_of(task: TaskConfig) -> list[str]:
    return [task.name, *([task.environment] if task.environment else [])]


def _digests(named: Iterable[str]) -> dict[str, str]:
    """The sha256 of each module outside ftis that one of these dotted paths leads to."""
    modules = {name.rpartition(".")[0] for name in named if "." in name} - {""}
    digests = {}
    for module in sorted(m for m in modules if m.partition(".")[0] not in ("ftis", "given")):
        with contextlib.suppress(ModuleNotFoundError):  # its package; a TRL script needs none of the recipe's rewards
            found = importlib.util.find_spec(module)
            if found is not None and found.origin is not None and Path(found.origin).is_file():
                digests[module] = hashlib.sha256(Path(found.origin).read_bytes()).hexdigest()
    return digests
