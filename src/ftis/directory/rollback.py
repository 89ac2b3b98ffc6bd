"""Going back: a run's peers go on from an earlier checkpoint, and senders that the honesty test accused stay accused.

A kill in the middle leaves the run at its old step or at its new one::

    check all → keep accusations → note → delete derived files → delete newer checkpoints → cut records

Checkpoints are deleted from the oldest on. So a run goes on from its newest one until that is gone, and resuming itself
cuts the records back to its checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftis.config import Recipe, RunError
from ftis.directory.claiming import peer_lock, swarm_lock
from ftis.directory.provenance import note_rollback
from ftis.honesty.selection import Accusation, HonestyTest
from ftis.metric_keys import HONESTY
from ftis.recipe.arms import arms_of
from ftis.records.files import EVALUATIONS, METRICS, checkpoint_path, locked, saved_steps
from ftis.records.plan import CURVES, EXPERIMENT, REPORT, RESULTS, SUMMARY, read_plan
from ftis.records.reading import PeerRun
from ftis.records.writing import Records, written_after
from ftis.run import accusations, checkpoint

DERIVED = (SUMMARY, RESULTS, CURVES, REPORT)
"""Files made from a run's or an experiment's records. Its end or ``ftis report`` makes them again."""


@dataclass(frozen=True)
class SwarmDirectory:
    """Peers of one arm that go back together.

    Attributes:
        directory: of the arm in the run.
        recipe: of all peers of the swarm.
        peers: the names of the peers with records here; in a joined run there is one.
        locks: of a process that trains one of these peers.
    """

    directory: Path
    recipe: Recipe
    peers: tuple[str, ...]
    locks: list[Path]


@dataclass(frozen=True)
class Undone:
    """The rounds that one peer of one arm goes back over.

    Attributes:
        finished: rounds it had finished.
        step: rounds that stay.
        accused: by sender, the findings of its honesty test.
        evidence: by accused sender, the honesty test's measures in the last record, with passages as text.
        action: the recipe's ``honesty.action``.
    """

    arm: str
    records: PeerRun
    finished: int
    step: int
    accused: dict[str, Accusation]
    evidence: dict[str, dict[str, Any]]
    action: str

    @property
    def checkpoints(self) -> list[int]:
        """The steps of the checkpoints to delete, ascending."""
        return [step for step in saved_steps(self.records.directory) if step > self.step]

    def removed(self) -> Iterator[str]:
        """The files to delete, in lines for people."""
        directory = self.records.directory
        yield from (str(checkpoint_path(directory, step)) for step in self.checkpoints)
        for name, rows in ((METRICS, self.records.rounds), (EVALUATIONS, self.records.evaluations)):
            lines = sum(row.step > self.step for row in rows)
            if lines:
                yield f"{lines} of {len(rows)} lines of {directory / name}"
        yield from map(str, written_after(directory, self.step))

    def lines(self) -> Iterator[str]:
        """The step that the peer goes back to and the senders that stay accused, in lines for people."""
        place = f"{self.arm}, {self.records.name}"
        yield f"{place}: from step {self.finished} to step {self.step}"
        for sender, accusation in self.accused.items():
            found = f"{place}: {sender}, found in round {accusation.found + 1},"
            if self.action == "quarantine":
                yield f"{found} stays in quarantine"
            else:
                yield (
                    f'{found} is learned from all the same, since honesty.action = "{self.action}": resume with '
                    f"--set honesty.action=quarantine to learn nothing of it"
                )


@dataclass(frozen=True)
class Rollback:
    """The changes of going back.

    Attributes:
        stale: files that are made from the records of undone rounds.
    """

    peers: list[Undone]
    stale: list[Path]

    def lines(self, with_files: bool) -> Iterator[str]:
        """The changes in lines for people, perhaps with the files to delete."""
        for peer in self.peers:
            yield from peer.lines()
        if with_files:
            for files in (map(str, self.stale), *(peer.removed() for peer in self.peers)):
                yield from (f"would delete {file}" for file in files)


def roll_back(directory: Path, step: int, arms: Sequence[str] = (), dry_run: bool = False) -> Rollback:
    """Go back to ``checkpoint-<step>`` with each peer of a run; 0 is the beginning.

    Args:
        directory: of the run.
        arms: by default all that were begun.
        dry_run: change nothing.

    Raises:
        RunError: there is no such arm or checkpoint.
        CheckpointError: a checkpoint to go on from is damaged.
        InUseError: a peer is being trained.
    """
    swarms = _begun(directory, arms)
    with locked(*(lock for swarm in swarms for lock in swarm.locks if not dry_run)):
        for swarm in swarms:
            _check_step(swarm, step)
        undone = [_undone(swarm, name, step) for swarm in swarms for name in swarm.peers]
        rollback = Rollback(undone, _derived(directory) if any(peer.finished > step for peer in undone) else [])
        if not dry_run:
            _carry_out(directory, step, rollback)
    return rollback


def _begun(directory: Path, arms: Sequence[str]) -> list[SwarmDirectory]:
    """The swarms that have records here, in the recipe's order."""
    begun = []
    plan = read_plan(directory)
    for arm in arms_of(plan.recipe, tuple(arms)):
        place = directory / arm.name
        for recipe in arm.swarms:
            if here := tuple(name for name in plan.here([p.name for p in recipe.peers]) if (place / name).is_dir()):
                locks = [swarm_lock(place, recipe), *(peer_lock(place / name) for name in here)]
                begun.append(SwarmDirectory(place, recipe, here, locks))
    if not begun:
        raise RunError(f"{directory} has no records of {', '.join(arms) or 'any arm'}: there is nothing to undo")
    return begun


def _check_step(swarm: SwarmDirectory, step: int) -> None:
    """Refuse a step at which a peer of the swarm has no checkpoint, or a damaged one."""
    if not step:
        return
    kept = set.intersection(*(set(saved_steps(swarm.directory / name)) for name in swarm.peers))
    if step not in kept:
        raise RunError(
            f"{swarm.directory}: no checkpoint-{step} of {', '.join(swarm.peers)}: go back to "
            f"{', '.join(map(str, [0, *sorted(kept)]))} (0 is the beginning) or choose another --arm; "
            f"training.save_every and training.save_total_limit say which are kept"
        )
    for name in swarm.peers:
        checkpoint.require_whole(swarm.directory / name, step)


def _undone(swarm: SwarmDirectory, name: str, step: int) -> Undone:
    records = PeerRun.read(swarm.directory / name)
    newest = max(saved_steps(records.directory), default=0)
    of_last = records.rounds[-1].by_peer if records.rounds else {}
    by_last = HonestyTest.found_by(of_last)
    accused = by_last | accusations.read(records.directory, math.inf)
    if newest:  # a checkpoint has token ids, too
        accused |= HonestyTest.found_in(checkpoint.selections(records.directory, newest).get("honesty", {}))
    return Undone(
        arm=swarm.directory.name,
        records=records,
        finished=max(newest, records.rounds[-1].step if records.rounds else 0, step),
        step=step,
        accused=accused,
        evidence={sender: {k: v for k, v in of_last[sender].items() if k.startswith(HONESTY)} for sender in by_last},
        action=swarm.recipe.honesty.action,
    )


def _derived(directory: Path) -> list[Path]:
    """Files that were made from the records of the run, and from those of the experiment it belongs to."""
    places = [directory, *([directory.parent] if (directory.parent / EXPERIMENT).exists() else [])]
    return [path for place in places for name in DERIVED if (path := place / name).exists()]


def _carry_out(directory: Path, step: int, rollback: Rollback) -> None:
    undone = rollback.peers
    for peer in undone:
        if peer.accused:
            accusations.write(peer.records.directory, step, peer.accused)
    if any(peer.finished > step for peer in undone):
        about = [
            {"arm": peer.arm, "peer": peer.records.name, "from": peer.finished, "accused": peer.evidence}
            for peer in undone
        ]
        note_rollback(directory, {"to": step, "peers": about})
    for path in rollback.stale:
        path.unlink(missing_ok=True)
    newer = sorted((newer, place) for place, peer in enumerate(undone) for newer in peer.checkpoints)
    for of_step, place in newer:
        checkpoint.delete(checkpoint_path(undone[place].records.directory, of_step))
    for peer in undone:
        Records(peer.records.directory).cut_back_to(step)
