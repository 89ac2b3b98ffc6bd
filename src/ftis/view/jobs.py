"""A section of a page on an experiment's arms and seeds: the progress of each, and the time left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from ftis.check.quantities import counted, in_time
from ftis.diagnosis.standing import Left, seconds_left
from ftis.metric_keys import STEP_TIME
from ftis.recipe.arms import Arm
from ftis.records.following import Directory
from ftis.records.reading import VALIDATION, PeerRun, Study
from ftis.view.sentences import share

RECENT = 60.0
"""Seconds without a record after which a job counts as silent, unless three of its rounds take longer."""


@dataclass(frozen=True)
class GridCell:
    """One arm under one seed: ``state`` is waiting, working, silent or done; ``text`` says how far it is.

    Attributes:
        part: the share of its rounds that are finished, 0 to 1.
        address: the address of its own page; "" without one.
    """

    state: str
    text: str
    words: str
    seed: int
    arm: str
    part: float
    address: str


@dataclass(frozen=True)
class ArmJobs:
    arm: str
    jobs: Sequence[GridCell]


@dataclass(frozen=True)
class Jobs:
    """The grid of arms and seeds; ``sentence`` says how many jobs are done and how long the rest takes."""

    sentence: str
    seeds: Sequence[int]
    arms: Sequence[ArmJobs]


def jobs(records: Directory | Study, now: float, link: Callable[[int, str], str] = lambda seed, arm: "") -> Jobs:
    """The grid of every arm under every seed.

    Args:
        now: seconds since the epoch; math.inf if nobody writes the records any more, so that no job is at work.
        link: (seed, arm) → the address of their page.
    """
    swarms = [
        (seed, arm, [records.peer(seed, arm.name, peer.name) for peer in swarm.peers])
        for arm in records.plan.arms
        for seed in records.plan.seeds
        for swarm in arm.swarms
    ]
    by_job: dict[tuple[int, str], list[PeerRun]] = {}
    for seed, arm, peers in swarms:
        by_job.setdefault((seed, arm.name), []).extend(peers)
    rows = [
        ArmJobs(arm.name, [_job(seed, arm, by_job[seed, arm.name], now, link) for seed in records.plan.seeds])
        for arm in records.plan.arms
    ]
    # The sentence counts swarms as jobs, as the terminal does; a cell of the grid has all swarms of its arm.
    states = [_job(seed, arm, peers, now, link).state for seed, arm, peers in swarms]
    done, at_work, total = states.count("done"), states.count("working"), len(states)
    sentence = f"{done} of {counted(total, 'job')} finished"
    if done < total:
        left = _left(swarms, at_work)
        sentence += f", {at_work} at work" + (f", about {in_time(left)} left" if left is not None else "")
    return Jobs(sentence, records.plan.seeds, rows)


def _job(seed: int, arm: Arm, peers: Sequence[PeerRun], now: float, link: Callable[[int, str], str]) -> GridCell:
    of_each = arm.recipe.training.rounds
    step, rounds = sum(p.step for p in peers), of_each * len(peers)
    accuracies = [p.on(VALIDATION)[-1].accuracy for p in peers if p.on(VALIDATION)]
    accuracy = f"{fmean(accuracies):.3f}" if len(accuracies) == len(peers) else ""
    if all(p.missing(of_each) is None for p in peers):
        state, text = "done", accuracy or "done"
        words = "finished" + (f", mean accuracy {accuracy}" if accuracy else "")
    elif not any(p.changed for p in peers):
        state, text, words = "waiting", "·", "not started"
    else:
        state = "working" if any(_at_work(p, of_each, now) for p in peers) else "silent"
        text = f"{step / rounds:.0%}"
        rewards = [p.last["reward"] for p in peers if "reward" in p.last]
        words = f"{step} of {rounds} rounds" + (f", reward {share(fmean(rewards))}" if rewards else "")
        words += "" if state == "working" else ", nothing new lately"
    return GridCell(state, text, words, seed, arm.name, step / rounds, link(seed, arm.name))


def _at_work(peer: PeerRun, rounds: int, now: float) -> bool:
    begun = peer.changed > 0 and peer.missing(rounds) is not None
    return begun and now - peer.changed < max(RECENT, 3 * peer.last.get(STEP_TIME, 0.0))


def _left(swarms: Sequence[tuple[int, Arm, Sequence[PeerRun]]], at_work: int) -> float | None:
    """Seconds until the last swarm is done, if as many are always at work as now. The slowest peer sets its pace."""
    left = []
    for _, arm, peers in swarms:
        rounds = max(arm.recipe.training.rounds - peer.step for peer in peers)
        pace = max(peer.last.get(STEP_TIME, 0.0) for peer in peers)
        left.append(Left(arm.name, rounds, pace if all(peer.step for peer in peers) else None))
    return seconds_left(left, at_work)
