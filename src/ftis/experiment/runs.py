"""A run: arms × peers in one directory, in one process or one process per peer.

    <output_dir>/<name>-seed<seed>/
        recipe.json, provenance.json      what was run, with what, where
        summary.json, learning_curves.svg its results
        <arm>/<peer>/                     records and checkpoints of one peer in one arm

``resume=True`` continues a run that was stopped or killed: finished arms are skipped, the others go on from the newest
step at which all peers of a swarm have a checkpoint.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch

from ftis.admission import Collected
from ftis.config import PeerConfig, Recipe, RunError
from ftis.directory.claiming import claim, delete_run, may_claim, peer_lock, require_free, swarm_locks
from ftis.directory.provenance import LOCK_SECONDS
from ftis.directory.resuming import is_finished, repeats, require_checkpoint, resume_step
from ftis.engines.offload import Offload
from ftis.experiment.processes import (
    computing_at_a_time,
    frozen_base,
    offloads,
    runs_in_parallel,
    shared_bases,
)
from ftis.experiment.workers import Job, Stop, interrupts, run_jobs
from ftis.machine.resources import cores, return_freed_memory, with_threads
from ftis.member import Outgoing
from ftis.models.sizes import is_large
from ftis.preparing.checks import Checked, check_to_train
from ftis.recipe.arms import Arm, arms_of, run_directory, threads_of
from ftis.recipe.own_code import error_of_own_code
from ftis.records.events import ArmBegun, Event, Planned, RoundEnded, Say, placed, unheard
from ftis.records.files import checkpoint_path, locked, saved_steps
from ftis.run import checkpoint
from ftis.run.assembly import assemble
from ftis.run.together import Turns, TurnTaking, in_turns
from ftis.run.training import Trainer

LOCK_PATIENCE = 1.0
"""Seconds for which a lock is tried: a command that is refused may hold it for a moment."""


@dataclass(frozen=True)
class PeerJob:
    """One peer of one arm to be trained: everything its process needs, picklable.

    Attributes:
        recipe: with exactly the peers of its swarm.
        resume_step: the step it goes on from; 0 is the beginning.
        threads: CPU threads.
    """

    arm: str
    recipe: Recipe
    peer: str
    directory: Path
    resume_step: int
    threads: int


def run(
    recipe: Recipe,
    *,
    resume: bool = False,
    overwrite: bool = False,
    only: tuple[str, ...] = (),
    peer: str = "",
    say: Say = unheard,
    stop: Stop | None = None,
    checked: Checked | None = None,
) -> bool:
    """Run all arms of a recipe (or only those named). Returns False if it was stopped before the end.

    Args:
        checked: of :func:`ftis.preparing.checks.check`, if the caller has called it; its arms are run.
        peer: run only the swarm that this peer is in. Swarms of one arm can be run side by side.
        overwrite: delete an earlier run in the same directory, once this one has been found to be sound.
        stop: set by somebody else to end the run after the rounds its peers are in; Ctrl-C sets it too.

    Raises:
        RunError: the run directory is in use, or holds another run.
        FtisError: any other error of a peer; once it is mended the run can be resumed.
    """
    if resume and overwrite:
        raise RunError("resume=True, overwrite=True: one goes on with an earlier run, the other deletes it; choose one")
    directory = run_directory(recipe)
    stop = stop or threading.Event()
    if checked is None:
        arms = arms_of(recipe, only)
        checked = check_to_train([arm.part_of(peer) for arm in arms] if peer else arms, prompts=not peer)
    arms, tasks, _ = checked
    try:
        if overwrite:
            delete_run(directory)
        elif not resume:
            # "Under way" tells more than "exists".
            require_free(lock for arm in arms for lock in swarm_locks(directory, arm))
        may_claim(directory, resume, recipe, tasks=tasks)  # refuses before a lock makes a directory
        for arm in arms:
            locks = swarm_locks(directory, arm)
            with locked(*locks, patience=LOCK_PATIENCE):
                if arm is arms[0]:  # under its lock, so that no other recipe takes the directory
                    goes_on = claim(directory, resume, recipe, tasks=tasks, held=locks)
                    if not peer:  # an experiment has said it for all its jobs
                        say(Planned((goes_on or f"a new run in {directory}",)))
                if not _run_arm(directory, arm, placed(say, arm=arm.name), stop):
                    return False
    except OSError as error:
        if own := error_of_own_code(error):
            raise RunError(own) from error
        raise RunError(
            f"{directory}: {error}; free space, or name another output_dir and move the run there if it has begun; "
            f"then run the same command again, ftis train and join with a bare --resume"
        ) from error
    return True


def _run_arm(directory: Path, arm: Arm, say: Say, stop: Stop) -> bool:
    rounds = arm.recipe.training.rounds
    place = directory / arm.name
    unfinished = [(swarm, resume_step(place, swarm)) for swarm in arm.swarms if not is_finished(place, swarm)]
    for swarm, step in unfinished:
        if not step:
            require_checkpoint(place, swarm)
        if again := repeats(place, swarm, step):
            say(Planned((again,)))
    if not unfinished:
        return True
    text = any(swarm.exchange == "text" and len(swarm.peers) > 1 for swarm, _ in unfinished)
    say(ArmBegun(tuple(peer.name for swarm, _ in unfinished for peer in swarm.peers), rounds, text))
    # As many peers at a time as one swarm has: the memory that the collaborating arms take anyway.
    at_a_time = arm.recipe.swarm_size // len(arm.swarms[0].peers)
    for first in range(0, len(unfinished), at_a_time):
        # A peer that is ahead of its swarm, even at its end, goes back with it: the others need its messages.
        wave = unfinished[first : first + at_a_time]
        members = [(swarm, step, peer) for swarm, step in wave for peer in swarm.peers]
        jobs = [
            PeerJob(
                arm=arm.name,
                recipe=_on_device(swarm, peer, arm.first + arm.peers.index(peer.name)),
                peer=peer.name,
                directory=place / peer.name,
                resume_step=step,
                threads=threads_of(arm.recipe, cores()),
            )
            for swarm, step, peer in members
        ]
        if len(jobs) > 1 and runs_in_parallel(arm.recipe):
            _run_in_processes(jobs, computing_at_a_time(arm.recipe), say, stop)
        else:
            _run_in_turns(jobs, say, stop)
        if not all(is_finished(place, swarm) for swarm, _ in wave):
            return False
    return True


def open_peer(job: PeerJob) -> Trainer:
    """The peer of a job, ready to train, with nothing in its directory from after the step that it goes on from."""
    recipe = job.recipe
    if not job.resume_step:
        shutil.rmtree(job.directory, ignore_errors=True)
    job.directory.mkdir(parents=True, exist_ok=True)
    for step in saved_steps(job.directory):
        if step > job.resume_step:  # further than the other peers can go on from
            checkpoint.delete(checkpoint_path(job.directory, step))
    run_name = f"{run_directory(recipe).name}-{job.arm}-{job.peer}"
    return assemble(recipe, job.peer, job.directory, resume_step=job.resume_step, tracked_as=run_name)


def _by_swarm(jobs: Sequence[PeerJob]) -> list[list[PeerJob]]:
    return [list(members) for _, members in groupby(jobs, key=lambda job: job.recipe.peers[0].name)]


def _run_in_turns(jobs: Sequence[PeerJob], say: Say, stop: Stop) -> None:
    """Train peers in this process, one at a time; swarms one after the other."""
    # Else the process keeps the memory of a large model's sampling and updates while the next one takes as much.
    large = any(is_large(job.recipe.peer(job.peer).model) for job in jobs)
    after_turn = return_freed_memory if large else lambda: None
    with with_threads(jobs[0].threads), interrupts(say, stop):
        for members in _by_swarm(jobs):
            if stop.is_set():
                return
            offload, rounds = Offload(), dict[str, TurnTaking]()
            peers = [job.recipe.peer(job.peer) for job in members]
            leave, shared = offloads(members[0].recipe, peers), shared_bases(peers)
            with ExitStack() as opened:
                for job, peer in zip(members, peers, strict=True):
                    offload.clear()
                    trainer = opened.enter_context(open_peer(job))
                    if leave:
                        keeps_base, parts = frozen_base(peer) in shared, trainer.peer
                        offload.add(peer.name, parts.policy, keeps_base, parts.reference_copy)
                    rounds[peer.name] = trainer.train(
                        _heard(placed(say, peer=peer.name), offload, peer.name), stop.is_set
                    )
                    after_turn()  # loading has drawn completions
                in_turns(rounds, offload.take_turn, after_turn)


def _heard(say: Say, offload: Offload, peer: str) -> Say:
    """``say``, which also begins to copy weights to main memory once a round has changed them."""

    def heard(event: Event) -> None:
        if isinstance(event, RoundEnded):
            offload.copy_out(peer)
        say(event)

    return heard


def _run_in_processes(jobs: Sequence[PeerJob], computing: int, say: Say, stop: Stop) -> None:
    """Train each peer in a process of its own. This process carries their messages, and says who computes.

    Args:
        computing: how many compute at a time.
    """
    swarms = _by_swarm(jobs)
    turns = Turns([[job.peer for job in members] for members in swarms], computing)
    in_processes = [Job(job.peer, run_peer_process, (job,), asks=True) for job in jobs]
    run_jobs(in_processes, len(jobs), say, stop, remedy="run again with a bare --resume", turns=turns)


def run_peer_process(job: PeerJob, say: Say, stop: Stop, ask: Callable[[Outgoing | None], Collected | None]) -> None:
    """Train one peer in this process; the parent carries its messages."""
    torch.set_num_threads(job.threads)
    large = is_large(job.recipe.peer(job.peer).model)
    with locked(peer_lock(job.directory), patience=LOCK_SECONDS):  # a process that a kill did not reach may hold it
        reply = ask(None)
        if stop.is_set():
            return
        with open_peer(job) as trainer:
            rounds = trainer.train(placed(say, peer=job.peer), stop.is_set)
            with suppress(StopIteration):
                while True:
                    outgoing = rounds.send(reply)
                    if large:  # so that an update takes the memory that sampling freed
                        return_freed_memory()
                    reply = ask(outgoing)


def _on_device(recipe: Recipe, peer: PeerConfig, index: int) -> Recipe:
    """The recipe with ``device = "auto"`` of this peer, the arm's ``index``-th, spread over the GPUs there are."""
    count = torch.cuda.device_count()
    if peer.device != "auto" or count < 2:
        return recipe
    on_gpu = peer.model_copy(update={"device": f"cuda:{index % count}"})
    return recipe.model_copy(update={"peers": tuple(on_gpu if p.name == peer.name else p for p in recipe.peers)})
