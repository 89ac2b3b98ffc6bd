"""Whether a run may begin or go on in a directory, and the locks of those who train in it."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ftis.config import Recipe, RunError, excerpt
from ftis.directory.provenance import (
    LOCK,
    LOCK_SECONDS,
    Tasks,
    beginning,
    check_problems,
    note_continuation,
    recorded_problems,
)
from ftis.recipe.arms import Arm, arm_configs, arms_of
from ftis.records.files import EVALUATIONS, METRICS, PARTIAL, InUseError, locked, saved_steps
from ftis.records.plan import PROVENANCE, RECIPE, read_plan, read_provenance, recipe_text, recorded_recipe, write_run

FREE_ON_RESUME = (
    *("output_dir", "processes", "threads", "offload", "report_to", "experiment", "network", "honesty"),
    *("peers.*.cuda_graphs", "peers.*.gradient_checkpointing", "peers.*.tokens_per_microbatch"),
    *("training.rounds", "training.eval_every", "training.save_every", "training.save_total_limit"),
    *("training.load_best_model_at_end", "training.record_rollouts"),
)
"""Keys that may differ when a run is resumed, in arms too; docs/own-models.md lists them. ``rounds`` ends schedules and
sets the honesty test's threshold, and ``threads`` and ``tokens_per_microbatch`` change last bits; no other changes the
numbers of honest peers."""
BEGUN = (EVALUATIONS, METRICS)
"""Records of a run that has begun; a TRL script lacks evaluations. A run without records has nothing to lose."""
NOTED = ("training.", "honesty.", "experiment.", "threads", "peers.")
"""Beginnings of the keys on which a run's decisions and pages depend. Their changes are recorded, and the run's recipe
is written again."""

Differences = dict[str, tuple[Any, Any]]
"""The dotted keys at which two recipes differ, with both values."""


def claim(
    directory: Path,
    resume: bool,
    recipe: Recipe,
    *,
    trains: bool = True,
    tasks: Tasks = MappingProxyType({}),
    joined: str | None = None,
    held: Collection[Path] = (),
) -> str:
    """Make the run directory, or check that an earlier run of the same recipe can go on in it.

    The recipe may have arms that the earlier run had not: they are added to the run.

    Returns:
        the line that tells that an earlier run goes on, and what differs; "" for a new run. Another value of a key in
        :data:`NOTED` is written to the run's recipe and provenance.

    Args:
        trains: whether rounds follow. Then other code or another machine than before is noted.
        tasks: of the arms that train; their problems must be those that each began with.
        joined: the one peer that trains here, if the others are on their own machines.
        held: locks in the directory that the caller holds.

    Raises:
        RunError: as :func:`may_claim`.
        InUseError: another recipe trains there without records yet, or this one with other arms or values of
            :data:`NOTED`.
    """
    differences = may_claim(directory, resume, recipe, tasks=tasks)
    if differences is None:
        shutil.rmtree(_deleted(directory), ignore_errors=True)
        directory.mkdir(parents=True, exist_ok=True)
        about = beginning(recipe, tasks, joined)
        with locked(directory / LOCK, patience=LOCK_SECONDS), contextlib.ExitStack() as locks:
            if (directory / RECIPE).exists():
                same = recorded_recipe(directory) == recipe_text(recipe).encode()
                before = read_provenance(directory)
                problems = {**recorded_problems(before), **about["problems"]}
                if same and before | {"started": about["started"]} == about | {"problems": problems}:
                    return ""
                try:
                    locks.enter_context(_unused(directory, held))
                except InUseError:
                    if not same:
                        raise
                    about = {**before, "problems": problems}  # another swarm of this run trains already
            write_run(directory, about, recipe)
        return ""
    (added, changed), now = differences, beginning(recipe, tasks, joined)
    # A process that trains there has the earlier arms and values.
    with _unused(directory, held) if added or changed else contextlib.nullcontext():
        others = note_continuation(directory, recipe, now, added, changed) if trains or added or changed else []
    longer = f"; {_shown(changed)}" if changed else ""
    since = f"; changed since: {', '.join(others)} (see {PROVENANCE})" if others else ""
    return f"goes on in {directory}{longer}{since}"


def may_claim(
    directory: Path,
    resume: bool,
    recipe: Recipe,
    *,
    tasks: Tasks = MappingProxyType({}),
    back_to: int | None = None,
    only: Sequence[str] = (),
) -> tuple[list[str], Differences] | None:
    """Refuse as :func:`claim` does, and write nothing. The arguments are the same.

    Args:
        back_to, only: the run is about to go back to this step, in these arms or in all.

    Returns:
        the arms that the run has not yet, and the keys of :data:`NOTED` that differ; None if no run is there.

    Raises:
        RunError: a run is there and ``resume`` is false, or its recipe or problems are not today's, or an arm
            has finished more rounds than it would have.
    """
    begun = any(any(directory.glob(f"*/*/{records}")) for records in BEGUN)
    if not begun:
        return None
    if not (directory / RECIPE).exists():
        raise RunError(f"{directory} holds records of a run without its {RECIPE}: put it back, or delete the directory")
    if not resume:
        raise RunError(
            f"{directory} already holds a run: add --resume to go on with it, --overwrite to start it anew "
            f"(from Python resume=True, overwrite=True), or --set output_dir=… for another place"
        )
    differences = _require_same_recipe(directory, recipe)
    _check_rounds(directory, recipe, back_to, only)
    check_problems(directory, tasks)
    return differences


def _check_rounds(directory: Path, recipe: Recipe, back_to: int | None, only: Sequence[str]) -> None:
    """Refuse fewer rounds than an arm has finished, or than it keeps if it goes back to ``back_to``."""
    for arm in arms_of(recipe):
        finished = max((step for peer in (directory / arm.name).glob("*/") for step in saved_steps(peer)), default=0)
        if back_to is not None and (not only or arm.name in only):
            finished = min(finished, back_to)
        if finished > (rounds := arm.recipe.training.rounds):
            raise RunError(
                f"training.rounds = {rounds}, but arm {arm.name} in {directory} has finished {finished} rounds: give "
                f"at least {finished}, or go back first by --resume {rounds}"
            )


def delete_run(directory: Path) -> None:
    """Remove an earlier run, unless something still trains in it.

    Raises:
        InUseError: something does.
    """
    gone = _deleted(directory)
    with _unused(directory, peers=True):
        shutil.rmtree(gone, ignore_errors=True)
        if not (directory / RECIPE).exists():
            return
        directory.replace(gone)  # so that it is whole or gone
    shutil.rmtree(gone)


def _deleted(directory: Path) -> Path:
    """The place of a run while it is deleted; a deletion that is interrupted leaves a part of the run there."""
    return directory.with_name(f"{PARTIAL}{directory.name}")


def peer_lock(directory: Path) -> Path:
    """The lock of a peer's own process while it trains the peer of this directory."""
    return directory.with_name(f".{directory.name}{LOCK}")


def swarm_locks(directory: Path, arm: Arm) -> list[Path]:
    """The locks of an arm, or of a part of it: one per swarm, so that others can be run meanwhile."""
    return [swarm_lock(directory / arm.name, swarm) for swarm in arm.swarms]


def swarm_lock(directory: Path, swarm: Recipe) -> Path:
    """The lock, in its arm's directory, that a process holds while it trains a swarm. No peer's name holds an @."""
    return directory / f"{LOCK}@{swarm.peers[0].name}"


def require_free(locks: Iterable[Path]) -> None:
    """Refuse if another process holds one of the locks. No directory is made for a lock that is not there.

    Raises:
        InUseError: another process holds one.
    """
    with locked(*filter(Path.exists, locks)):
        pass


def _unused(
    directory: Path, held: Collection[Path] = (), peers: bool = False
) -> contextlib.AbstractContextManager[None]:
    """Hold the locks of all swarms of a run, except the ``held`` ones.

    Args:
        peers: hold peers' locks too. A peer's process may outlive a kill; a resumed run waits for it later.

    Raises:
        InUseError: another process trains a swarm or a peer.
    """
    locks = {*directory.glob(f"*/{LOCK}*"), *(directory.glob(f"*/.*{LOCK}") if peers else ())}
    return locked(*locks.difference(held), remedy="wait for it, stop it, or take another name or output_dir")


def _require_same_recipe(directory: Path, recipe: Recipe) -> tuple[list[str], Differences]:
    """Refuse a recipe other than the one of a directory's run, except for added arms and :data:`FREE_ON_RESUME`.

    Returns:
        the names of the added arms, and the keys of :data:`NOTED` that differ.
    """
    before = read_plan(directory).recipe
    if recipe.arms and not before.arms:  # its only arm has the objective's name
        before = before.model_copy(update={"arms": tuple(arm_configs(before))})
    had, has = {arm.name for arm in before.arms}, {arm.name for arm in recipe.arms}
    added = [arm.name for arm in recipe.arms if arm.name not in had]
    differing, free = _differing(before, _without(recipe, added))
    fewer = sorted(had - has)
    if fewer and has and not _differing(_without(before, fewer), _without(recipe, added))[0]:
        raise RunError(
            f"{directory} holds the arms {', '.join(fewer)} besides, which the recipe lacks now: put them back (an "
            f"arm with a new name is another arm), or take another name or output_dir"
        )
    if differing:
        raise RunError(
            f"{directory} holds a run of another recipe (they differ in: {_shown(differing)}): resume with the recipe "
            f"it was started with, add arms only or change one of {', '.join(FREE_ON_RESUME)}, choose another "
            f"output_dir (--output-dir of ftis demo), or delete it"
        )
    return added, {key: values for key, values in free.items() if _of_arm(key).startswith(NOTED)}


def _shown(differing: Differences) -> str:
    return ", ".join(f"{key} ({excerpt(one)} before, {excerpt(now)} now)" for key, (one, now) in differing.items())


def _without(recipe: Recipe, arms: Sequence[str]) -> Recipe:
    return recipe.model_copy(update={"arms": tuple(arm for arm in recipe.arms if arm.name not in arms)})


def _differing(before: Recipe, now: Recipe) -> tuple[Differences, Differences]:
    """The keys at which two recipes differ: those that a run may not change, and the others."""
    one, other = _values(before.model_dump(mode="json")), _values(now.model_dump(mode="json"))
    fixed, free = Differences(), Differences()
    for key in sorted(one.keys() | other.keys()):
        if one.get(key) != other.get(key):
            may = any(fnmatchcase(_of_arm(key) + ".", f"{allowed}.*") for allowed in FREE_ON_RESUME)
            found = free if may else fixed
            found[key] = one.get(key), other.get(key)
    return fixed, free


def _of_arm(key: str) -> str:
    """The key that ``arms.<name>.set.<key>`` replaces; another key as it is."""
    return key.partition(".set.")[2] if key.startswith("arms.") and ".set." in key else key


def _values(table: Any, place: str = "") -> dict[str, Any]:
    """The values of a recipe by dotted key. Keys have the names of peers and arms, whose places are values, too."""
    if isinstance(table, list) and table and isinstance(table[0], dict):
        named = place in ("peers", "arms")
        table = {row["name"] if named else str(i): {**row, "place": i} for i, row in enumerate(table)}
    if not isinstance(table, dict):
        return {place: table}
    values = dict[str, Any]()
    for name, row in table.items():
        values |= _values(row, f"{place}.{name}" if place else name)
    return values
