"""The progress of a run's swarms: the steps at which they go on, and the rounds that they train again."""

from __future__ import annotations

from pathlib import Path

from ftis.config import Recipe, RunError
from ftis.directory.provenance import longest_unsaved
from ftis.records.files import METRICS, saved_steps
from ftis.records.reading import PeerRun


def is_finished(directory: Path, swarm: Recipe) -> bool:
    """Whether each peer of a swarm, whose arm's directory this is, has its last round's checkpoint and evaluations."""
    rounds, tasks = swarm.training.rounds, 1 + len(swarm.ood)
    peers = [directory / peer.name for peer in swarm.peers]
    return all(rounds in saved_steps(peer) and len(PeerRun(peer).evaluated(rounds)) >= tasks for peer in peers)


def resume_step(directory: Path, swarm: Recipe) -> int:
    """The newest step that every peer of a swarm, in its arm's directory, can go on from; 0 is the beginning."""
    common = set.intersection(*(set(saved_steps(directory / peer.name)) for peer in swarm.peers))
    return max(common, default=0)


def require_checkpoint(directory: Path, swarm: Recipe) -> None:
    """Refuse to start a swarm anew over records from after a first checkpoint. Somebody deleted the checkpoints."""
    first = longest_unsaved(directory.parent, directory.name, swarm.training.save_every)
    for peer in swarm.peers:
        path = directory / peer.name
        finished = len(PeerRun.read(path).rounds)  # a late peer begins with a later round
        if finished > first and not saved_steps(path):
            raise RunError(
                f"{path} has {finished} finished rounds and no checkpoint, so the arm would begin again and its "
                f"records be lost: put the checkpoint back, move the records of the whole swarm elsewhere, or start "
                f"the run again with --overwrite"
            )


def repeats(directory: Path, swarm: Recipe, step: int) -> str:
    """A line on rounds that a swarm trains again, since its checkpoint is older than its records, or on rounds whose
    records are lost; "" if there are none.

    Args:
        directory: of the arm in a run.
        step: the finished rounds that it goes on from.
    """
    names = [peer.name for peer in swarm.peers]
    finished = {name: PeerRun.read(directory / name).step for name in names}
    if (rounds := max(finished.values())) <= step:
        short = [f"{METRICS} of {name} ends with round {n}" for name, n in finished.items() if n < step]
        after = f", and the checkpoint is of round {step}: the rounds in between have no records"
        return ", ".join(short) + after if short else ""
    which = f"round {rounds}" if rounds == step + 1 else f"rounds {step + 1} to {rounds}"
    newest = f"the newest checkpoint{' of all' * (len(names) > 1)} is of round {step}"
    every = swarm.training.save_every
    why = f" (training.save_every = {every})" if step % every == 0 else ""  # the no-regret guard saves in between
    return f"{', '.join(names)}: {which} again, since {newest if step else 'there is no checkpoint yet'}{why}"
