"""A section of a page on an experiment's arms and seeds: the progress of each, and the time left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from ftis.check.formatting import counted
from ftis.recipe.arms import Arm
from ftis.records.following import Directory, Progress
from ftis.run.outlook import in_time
from ftis.view.sentences import share

RECENT = 60.0
"""Seconds without a record after which a job counts as silent, unless three of its rounds take longer."""


@dataclass(frozen=True)
class GridCell:
    """One arm under one seed: ``state`` is waiting, working, silent or done; ``text`` says how far it is.

    Attributes:
        part: the share of its rounds that are finished, 0 to 1.
        address: the address of its own page, if there is one.
    """

    state: str
    text: str
    words: str
    seed: int
    arm: str
    part: float
    address: str = ""


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


def jobs(directory: Directory, now: float) -> Jobs:
    """The grid of every arm under every seed.

    Args:
        now: seconds since the epoch; math.inf if nobody writes the records any more, so that no job is at work.
    """
    swarms = [
        (seed, arm, [directory.progress(seed, arm, peer.name) for peer in swarm.peers])
        for arm in directory.plan.arms
        for seed in directory.plan.seeds
        for swarm in arm.swarms
    ]
    by_job: dict[tuple[int, str], list[Progress]] = {}
    for seed, arm, peers in swarms:
        by_job.setdefault((seed, arm.name), []).extend(peers)
    rows = [
        ArmJobs(arm.name, [_job(seed, arm.name, by_job[seed, arm.name], now) for seed in directory.plan.seeds])
        for arm in directory.plan.arms
    ]
    # The sentence counts swarms as jobs, as the terminal does; a cell of the grid has all swarms of its arm.
    states = [_job(seed, arm.name, peers, now).state for seed, arm, peers in swarms]
    done, at_work, total = states.count("done"), states.count("working"), len(states)
    sentence = f"{done} of {counted(total, 'job')} finished"
    left = None if done == total else seconds_left(swarms, now)
    if done < total:
        sentence += f", {at_work} at work" + (f", about {in_time(left)} left" if left is not None else "")
    return Jobs(sentence, directory.plan.seeds, rows)


def _job(seed: int, arm: str, peers: Sequence[Progress], now: float) -> GridCell:
    step, rounds = sum(p.step for p in peers), sum(p.rounds for p in peers)
    accuracies = [p.accuracy for p in peers if p.accuracy is not None]
    accuracy = f"{fmean(accuracies):.3f}" if len(accuracies) == len(peers) else ""
    if all(p.finished for p in peers):
        state, text, words = (
            "done",
            accuracy or "done",
            "finished" + (f", mean accuracy {accuracy}" if accuracy else ""),
        )
    elif not any(p.started for p in peers):
        state, text, words = "waiting", "·", "not started"
    else:
        state = "working" if any(_at_work(p, now) for p in peers) else "silent"
        text = f"{step / rounds:.0%}"
        rewards = [p.reward for p in peers if p.reward is not None]
        words = f"{step} of {rounds} rounds" + (f", reward {share(fmean(rewards))}" if rewards else "")
        words += "" if state == "working" else ", nothing new lately"
    return GridCell(state, text, words, seed, arm, step / rounds)


def _at_work(peer: Progress, now: float) -> bool:
    return peer.started and not peer.finished and now - peer.changed < max(RECENT, 3 * peer.step_time)


def seconds_left(swarms: Sequence[tuple[int, Arm, Sequence[Progress]]], now: float) -> float | None:
    """Seconds until the last swarm is done, if as many swarms are always at work as now.

    The result is None while no swarm is at work or no round was measured. A swarm's round takes as long as the slowest
    of its peers' last rounds. A swarm that has not begun takes as long as the other swarms of its arm. An arm without a
    round takes as long as the mean of the other arms.
    """
    measured: dict[str, list[float]] = {}
    for _, arm, peers in swarms:
        if all(peer.step for peer in peers):
            measured.setdefault(arm.name, []).append(max(peer.step_time for peer in peers))
    at_work = sum(any(_at_work(peer, now) for peer in peers) for _, _, peers in swarms)
    if not measured or not at_work:
        return None
    elsewhere = fmean(fmean(each) for each in measured.values())
    left = [
        max(peer.rounds - peer.step for peer in peers) * fmean(measured.get(arm.name, [elsewhere]))
        for _, arm, peers in swarms
    ]
    return max(max(left), sum(left) / at_work)
