"""A run: arms × peers in one directory, in one process or one process per peer; an experiment: a run per seed.

    <output_dir>/<name>-seed<seed>/
        recipe.json, provenance.json      what was run, with what, where
        summary.json, learning_curves.png what came of it (results.py)
        <arm>/<peer>/                     records and checkpoints of one peer in one arm

``resume=True`` continues a run that was stopped or killed: finished arms are skipped, the others go on from the newest
step at which all peers of a swarm have a checkpoint.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ftis import checkpoint
from ftis.config import FtisError, PeerConfig, Recipe, run_directory
from ftis.events import ArmBegun, JobEnded, JobsKnown, Say, Stopping, placed, unheard
from ftis.exchange import AloneExchange, Exchange, Stopped
from ftis.files import locked, write_json
from ftis.lab.arms import Arm, RunError, arms_of, experiment_directory
from ftis.lab.assembly import assemble
from ftis.lab.local import DirectoryExchange, Hub
from ftis.lab.prepare import check, prepare_models
from ftis.lab.provenance import LOCK_SECONDS, claim, provenance
from ftis.lab.workers import POLL_SECONDS, Job, Stop, cores, interrupts, run_jobs
from ftis.peer import run_peer
from ftis.records import Records, open_trackers


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
    exchange_directory: Path
    model_path: str
    resume_step: int
    threads: int

    @property
    def finished(self) -> bool:
        return self.recipe.training.rounds in checkpoint.steps(self.directory)


def run(
    recipe: Recipe,
    *,
    resume: bool = False,
    overwrite: bool = False,
    only: tuple[str, ...] = (),
    say: Say = unheard,
    stop: Stop | None = None,
) -> bool:
    """Run all arms of a recipe (or only those named). Returns False if it was stopped before the end.

    Args:
        overwrite: delete an earlier run in the same directory, once this one has been found to be sound.
        stop: set by somebody else to end the run after the rounds its peers are in; Ctrl-C sets it too.

    Raises:
        RunError: the run directory is in use, or holds another run.
        FtisError: whatever else a peer met; once that is mended the run can be resumed.
    """
    directory = run_directory(recipe)
    stop = stop or threading.Event()
    arms = arms_of(recipe, only)
    check(arms)
    try:
        if overwrite:
            _delete_run(directory)
        claim(directory, resume, recipe)
        models = prepare_models(arms, say, stop)
        for arm in arms:
            with locked(directory / arm.name / ".lock", 0):
                if not _run_arm(directory, arm, models, placed(say, arm=arm.name), stop):
                    return False
    except Stopped:
        return False
    except OSError as error:
        raise RunError(
            f"{directory}: {error}; free space or change output_dir, then run again with --resume"
        ) from error
    return True


def _run_arm(directory: Path, arm: Arm, models: dict[str, str], say: Say, stop: Stop) -> bool:
    rounds = arm.recipe.training.rounds
    unfinished = [(swarm, _resume_step(directory / arm.name, swarm)) for swarm in arm.swarms]
    unfinished = [(swarm, step) for swarm, step in unfinished if step < rounds]
    if not unfinished:
        return True
    say(ArmBegun(tuple(peer.name for swarm, _ in unfinished for peer in swarm.peers), rounds))
    # As many peers at a time as one swarm has: the memory that the collaborating arms take anyway.
    at_a_time = arm.recipe.swarm_size // len(arm.swarms[0].peers)
    for first in range(0, len(unfinished), at_a_time):
        # A peer that is ahead of its swarm, even at its end, goes back with it: the others need its messages.
        wave = unfinished[first : first + at_a_time]
        members = [(swarm, step, peer) for swarm, step in wave for peer in swarm.peers]
        jobs = [
            PeerJob(
                arm=arm.name,
                recipe=_on_device(swarm, peer, index),
                peer=peer.name,
                directory=directory / arm.name / peer.name,
                exchange_directory=directory / arm.name / ".exchange",
                model_path=models.get(peer.model, peer.model),
                resume_step=step,
                threads=arm.recipe.threads or max(1, cores() // arm.recipe.swarm_size),
            )
            for index, (swarm, step, peer) in enumerate(members)
        ]
        in_parallel = len(jobs) > 1 and runs_in_parallel(arm.recipe)
        if not (_run_in_processes if in_parallel else _run_in_turns)(jobs, say, stop):
            return False
    shutil.rmtree(directory / arm.name / ".exchange", ignore_errors=True)
    return True


def runs_in_parallel(recipe: Recipe) -> bool:
    """Whether every peer gets a process of its own. The numbers are the same either way, see :class:`Recipe`."""
    if recipe.processes != "auto":
        return recipe.processes == "parallel"
    on_gpu = torch.cuda.is_available() and any(p.device != "cpu" for p in recipe.peers)
    return (torch.cuda.device_count() if on_gpu else cores()) >= recipe.swarm_size


def run_peer_job(job: PeerJob, exchange: Exchange, should_stop: Callable[[], bool], say: Say) -> bool:
    """Train one peer to the last round. Returns False if it was stopped before."""
    recipe = job.recipe
    if not job.resume_step:
        shutil.rmtree(job.directory, ignore_errors=True)
    job.directory.mkdir(parents=True, exist_ok=True)
    for step in checkpoint.steps(job.directory):
        if step > job.resume_step:  # ahead of what the other peers can go on from
            checkpoint.delete(job.directory / f"checkpoint-{step}")
    run_name = f"{recipe.name}-seed{recipe.seed}-{job.arm}-{job.peer}"
    trackers = open_trackers(recipe.report_to, recipe.name, run_name, job.directory)
    records = Records(job.directory, trackers, recipe.training.record_rollouts)
    peer = assemble(
        recipe,
        job.peer,
        job.directory,
        exchange,
        model_path=job.model_path,
        resume_step=job.resume_step,
        should_stop=should_stop,
        records=records,
    )
    run_peer(peer, job.directory, placed(say, peer=job.peer))
    peer.close()
    return peer.cursor.step == recipe.training.rounds


def _run_in_turns(jobs: Sequence[PeerJob], say: Say, stop: Stop) -> bool:
    """Train the peers of a swarm in threads that take turns; Ctrl-C stops them after the round they are in."""
    hub = Hub(tuple(p.name for p in jobs[0].recipe.peers), stop.is_set)
    ended = {job.peer: threading.Event() for job in jobs}
    alone = len(jobs[0].recipe.peers) == 1
    failures: list[BaseException] = []
    finished: list[bool] = []
    threads_before = torch.get_num_threads()

    def work(job: PeerJob) -> None:
        with hub.turn:
            try:
                if failures or stop.is_set():
                    finished.append(False)
                    return
                exchange = AloneExchange() if alone else hub.endpoint(job.peer)
                finished.append(run_peer_job(job, exchange, stop.is_set, say))
            except BaseException as error:  # carried over to the main thread, which raises it
                failures.append(error)
                hub.fail()
            finally:
                ended[job.peer].set()

    torch.set_num_threads(jobs[0].threads)
    try:
        with interrupts() as interrupted:
            for job in jobs:
                # A second Ctrl-C ends the program at once: it does not wait for the threads.
                threading.Thread(target=work, args=(job,), name=job.peer, daemon=True).start()
            for has_ended in ended.values():
                # Not Thread.join: interrupted by Ctrl-C, Python 3.11 takes a thread that still runs for ended.
                while not has_ended.wait(POLL_SECONDS):
                    if interrupted() and not stop.is_set():
                        say(Stopping())
                        stop.set()
    finally:
        torch.set_num_threads(threads_before)
    if failures:
        raise failures[0]
    return len(finished) == len(jobs) and all(finished)


def _run_in_processes(jobs: Sequence[PeerJob], say: Say, stop: Stop) -> bool:
    """Train each peer in a process of its own. A peer that fails stops the others, and its error is raised here."""
    in_processes = [Job(f"peer {job.peer!r}", run_peer_process, (job,)) for job in jobs]
    run_jobs(in_processes, len(jobs), say, stop, remedy="run again with --resume")
    return all(job.finished for job in jobs)


def run_peer_process(job: PeerJob, say: Say, stop: Stop) -> None:
    """Train one peer in this process; it meets the others of its swarm in a directory."""
    torch.set_num_threads(job.threads)
    members = tuple(p.name for p in job.recipe.peers)
    exchange: Exchange = AloneExchange()
    if len(members) > 1:
        exchange = DirectoryExchange(job.exchange_directory, job.peer, members, stop.is_set)
    with locked(job.directory.parent / f".{job.peer}.lock", LOCK_SECONDS):
        run_peer_job(job, exchange, stop.is_set, say)


def _resume_step(directory: Path, swarm: Recipe) -> int:
    """The newest step that every peer of the swarm can go on from; 0 is the beginning."""
    common = set.intersection(*(set(checkpoint.steps(directory / peer.name)) for peer in swarm.peers))
    return max(common, default=0)


def _on_device(recipe: Recipe, peer: PeerConfig, index: int) -> Recipe:
    """The recipe with ``device = "auto"`` of this peer spread over the GPUs there are."""
    if peer.device != "auto" or torch.cuda.device_count() < 2:
        return recipe
    on_gpu = peer.model_copy(update={"device": f"cuda:{index % torch.cuda.device_count()}"})
    return recipe.model_copy(update={"peers": tuple(on_gpu if p.name == peer.name else p for p in recipe.peers)})


def _delete_run(directory: Path) -> None:
    """Remove an earlier run, unless something still trains in it."""
    if not (directory / "recipe.json").exists():
        return
    for lock in directory.glob("*/.lock"):
        with locked(lock, 0):
            pass
    shutil.rmtree(directory)


def run_experiment(
    recipe: Recipe, seeds: Sequence[int], jobs: int, say: Say = unheard, stop: Stop | None = None
) -> bool:
    """Run every arm of ``recipe`` under every seed, ``jobs`` of them at a time. Returns False if it was stopped.

    A job is one arm under one seed, its peers taking turns on one thread. Run directories are those of :func:`run`,
    side by side under ``<output_dir>/<name>/``. Finished jobs are skipped and killed ones go on from their
    checkpoints, so an experiment that is started again ends with the same tables.

    Raises:
        RunError: a job failed, or the directory holds an experiment of another recipe.
    """
    directory = experiment_directory(recipe)
    stop = stop or threading.Event()
    arms = arms_of(recipe)
    unknown = set(recipe.experiment.baselines) - {arm.name for arm in arms}
    if unknown:
        raise RunError(
            f"experiment.baselines: {sorted(unknown)[0]!r} is none of the arms "
            f"({', '.join(arm.name for arm in arms)}): name those to compare with"
        )
    check(arms)
    threads = recipe.threads or 1  # whatever the number of jobs: sums over threads differ in their last bits
    settings = {"output_dir": str(directory), "processes": "inline", "threads": threads}
    runs = [recipe.model_copy(update={"seed": seed, **settings}) for seed in seeds]
    for seeded in runs:
        claim(run_directory(seeded), True, seeded)
    _write_experiment(directory, recipe, seeds)
    try:
        prepare_models(arms, say, stop)
    except Stopped:
        return False
    todo = [(seeded, arm.name) for seeded in runs for arm in arms if not arm_finished(run_directory(seeded), arm)]
    say(JobsKnown(jobs=len(runs) * len(arms), done=len(runs) * len(arms) - len(todo)))
    in_processes = [Job(_label(seeded, arm), run_arm_process, (seeded, arm)) for seeded, arm in todo]
    run_jobs(in_processes, jobs, say, stop, remedy="start the experiment again to go on with it")
    return not stop.is_set()


def arm_finished(run: Path, arm: Arm) -> bool:
    """Whether every peer of the arm has its last checkpoint."""
    return all(arm.recipe.training.rounds in checkpoint.steps(run / arm.name / peer.name) for peer in arm.recipe.peers)


def run_arm_process(recipe: Recipe, arm: str, say: Say, stop: Stop) -> None:
    """Run one arm of an experiment under one seed."""
    label = _label(recipe, arm)
    say_where = placed(say, job=label)
    try:
        finished = run(recipe, resume=True, only=(arm,), say=say_where, stop=stop)
    except FtisError as error:
        raise RunError(f"{label}: {error}") from error
    if finished:
        say_where(JobEnded())


def _label(recipe: Recipe, arm: str) -> str:
    return f"seed {recipe.seed} {arm}"


def _write_experiment(directory: Path, recipe: Recipe, seeds: Sequence[int]) -> None:
    """experiment.json: the recipe, every seed asked for so far, versions and machine."""
    known = directory / "experiment.json"
    before = json.loads(known.read_text(encoding="utf-8")) if known.exists() else {"seeds": []}
    document = {
        **provenance(recipe),
        "recipe": json.loads(recipe.model_dump_json()),
        "seeds": sorted({*before["seeds"], *seeds}),
    }
    write_json(known, document)
