"""An experiment: every arm of a recipe under several seeds, a run directory per seed, jobs packed on the cores.

    <output_dir>/<name>/
        experiment.json               recipe, seeds, versions and machine
        <name>-seed<seed>/            a run each, see :mod:`ftis.experiment.runs`

A job is one swarm of one arm under one seed: a peer that trains alone is a job of its own. Its peers take turns on one
thread. The longest jobs begin first, so that no long one is left over at the end.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from ftis.config import FtisError, Recipe, RunError
from ftis.directory.claiming import claim
from ftis.directory.provenance import provenance
from ftis.directory.resuming import is_finished, resume_step
from ftis.experiment.runs import run
from ftis.experiment.workers import Job, Stop, run_jobs
from ftis.models.durations import guess_seconds
from ftis.models.sizes import known_parameters
from ftis.preparing.checks import Checked, check_to_train
from ftis.recipe.arms import Arm, arms_of, check_baselines, experiment_directory, run_directory
from ftis.records.events import JobEnded, JobsKnown, Say, placed, unheard
from ftis.records.plan import experiment_before, write_experiment


@dataclass(frozen=True)
class SwarmJob:
    """One swarm of one arm to be trained under one seed.

    Attributes:
        recipe: under this seed, with all arms.
        part: the swarm, as a part of its arm.
        rounds_left: of all its peers together.
        finished: no round is left, and no evaluation.
        guess: seconds of one round of one peer.
    """

    recipe: Recipe
    part: Arm
    rounds_left: int
    finished: bool
    guess: float

    @property
    def label(self) -> str:
        """Its name in messages: ``seed 0 F-TIS``, and which of the arm's swarms if there are several."""
        whole = len(self.part.peers) == len(self.recipe.peers)
        more = len(self.part.peers) - 1
        which = "" if whole else f" {self.part.peers[0]}" + (f" and {more} more" if more else "")
        return f"seed {self.recipe.seed} {self.part.name}{which}"


def run_experiment(
    recipe: Recipe, seeds: Sequence[int], jobs: int, say: Say = unheard, *, checked: Checked | None = None
) -> bool:
    """Run every arm of ``recipe`` under every seed. Returns False if Ctrl-C stopped it.

    Finished jobs are skipped and killed ones go on from their checkpoints, so an experiment that is started again ends
    with the same tables. The numbers do not depend on ``jobs`` or on the order of the jobs.

    Args:
        jobs: how many run at a time; :func:`ftis.check.estimate.fitting_jobs` finds how many memory allows.
        checked: of :func:`ftis.preparing.checks.check`, if the caller has called it.

    Raises:
        RunError: a job failed, or the directory holds an experiment of another recipe.
    """
    directory = experiment_directory(recipe)
    stop = threading.Event()
    check_baselines(recipe)
    tasks = (checked or check_to_train(arms_of(recipe))).tasks
    before = experiment_before(directory)
    every = {*(before.seeds if before else ()), *seeds}  # earlier seeds are of this recipe too
    for seeded in _runs(recipe, sorted(every)):
        claim(run_directory(seeded), True, seeded, trains=False, tasks=tasks)
    write_experiment(directory, recipe, sorted(every), provenance(recipe))
    all_jobs = jobs_of(recipe, seeds)
    todo = [job for job in all_jobs if not job.finished]
    left = {job.label: (job.part.name, job.rounds_left // len(job.part.peers)) for job in todo}
    say(JobsKnown(len(all_jobs), len(all_jobs) - len(todo), left, jobs))
    in_processes = [Job(job.label, run_swarm_process, (job,)) for job in todo]
    run_jobs(in_processes, jobs, say, stop, "start the experiment again to go on with it")
    return not stop.is_set()


def _runs(recipe: Recipe, seeds: Sequence[int]) -> list[Recipe]:
    """The recipe under each seed, as its run has it."""
    threads = recipe.threads or 1  # whatever the number of jobs: sums over threads differ in their last bits
    settings = {"output_dir": str(experiment_directory(recipe)), "processes": "inline", "threads": threads}
    return [recipe.model_copy(update={"seed": seed, **settings}) for seed in seeds]


def jobs_of(recipe: Recipe, seeds: Sequence[int]) -> list[SwarmJob]:
    """All jobs of an experiment, finished ones too, the longest first."""
    arms = arms_of(recipe)
    parameters = known_parameters(recipe, arms)
    found = []
    for seeded in _runs(recipe, seeds):
        for part in (part for arm in arms for part in arm.parts()):
            place = run_directory(seeded) / part.name
            left = (part.recipe.training.rounds - resume_step(place, part.recipe)) * len(part.peers)
            seconds = guess_seconds(part.recipe, parameters)
            found.append(SwarmJob(seeded, part, left, is_finished(place, part.recipe), seconds))
    return sorted(found, key=lambda job: -job.rounds_left * job.guess)


def run_swarm_process(job: SwarmJob, say: Say, stop: Stop) -> None:
    """Run one swarm of one arm of an experiment under one seed."""
    say_where, part = placed(say, job=job.label), job.part
    try:
        finished = run(job.recipe, resume=True, only=(part.name,), peer=part.peers[0], say=say_where, stop=stop)
    except FtisError as error:
        raise RunError(f"{job.label}: {error}") from error
    if finished:
        say_where(JobEnded())
