"""The state of a peer in a run, from its last rounds: the facts for a sentence about it.

Everything here is counted from records, and nothing is put into words.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median

from ftis.diagnosis.sources import Source, source_of
from ftis.diagnosis.troubles import MEAN_OF, Decline, Trouble, decline_of, reward_means, rounds_without, trouble_of
from ftis.metric_keys import STEP_TIME, WAIT, WITHOUT_FOREIGN
from ftis.records.events import NetworkEvent
from ftis.records.reading import VALIDATION, ArmOfRun, EvaluationRow, PeerRun, RoundRow

WINDOW = 10
"""The number of last rounds that count as lately."""

NOTICE_SECONDS = 60.0
"""Seconds after which a peer's remark about the network is no longer news."""

NEWS = ("waiting", "alone", "aside", "mismatch", "behind", "regret")
"""The network events that explain why a peer does not go on, or goes on without others."""


@dataclass(frozen=True)
class Left:
    """A job's rounds that are left, and the seconds of one; None before any was measured."""

    arm: str
    rounds: int
    seconds: float | None


def seconds_left(jobs: Sequence[Left], at_a_time: int = 1) -> float | None:
    """Seconds until the last job ends, if ``at_a_time`` always run; None before any round was measured.

    A job that has not begun takes as long as the others of its arm, an arm without a round as long as the other arms.
    """
    measured: dict[str, list[float]] = {}
    for job in jobs:
        if job.seconds is not None:
            measured.setdefault(job.arm, []).append(job.seconds)
    if not measured or at_a_time < 1:
        return None
    of_arm = {arm: fmean(each) for arm, each in measured.items()}
    elsewhere = fmean(of_arm.values())
    left = [job.rounds * (of_arm.get(job.arm, elsewhere) if job.seconds is None else job.seconds) for job in jobs]
    return max(max(left), sum(left) / at_a_time)


@dataclass(frozen=True)
class Standing:
    """The state of one peer.

    Attributes:
        lately: the number of rounds that the counts cover: the last ones, and all of a run that has finished.
        reward: the mean reward of the last rounds.
        change: the difference of that mean from the one ``change_over`` rounds ago.
        best: the highest such mean over all known rounds.
        noise: the standard error of ``reward``, by the last rounds.
        others: the median reward of the other peers with records here; None without any.
        together: whether it learns together with others.
        trouble: the reason why it learns nothing or unlearns; None if it learns, as far as its rounds show.
        decline: of the accuracy on validation, up to its last evaluation; None without one.
        without_foreign: the number of rounds that used no foreign rollout: the last ones in a row or, if the run has
            finished, all.
        in_a_row: the last ones in a row.
        alone: the fate of the others' rollouts in these rounds.
        seconds_left: an estimate by its last rounds; None while there is none.
        silent_for: seconds since its records last changed; None if they are complete or absent.
        usual: seconds of a round, by its last ones.
        notice: its last remark about the network, if that concerns the present round.
        damage: the first line of its records that was rejected, with the reason; "" without one.
    """

    name: str
    rounds: int
    step: int = 0
    started: bool = False
    lately: int = 0
    reward: float | None = None
    change: float | None = None
    change_over: int = 0
    best: float | None = None
    noise: float = 0.0
    others: float | None = None
    together: bool = False
    sources: Sequence[Source] = ()
    trouble: Trouble | None = None
    decline: Decline | None = None
    without_foreign: int = 0
    in_a_row: int = 0
    alone: Sequence[Source] = ()
    seconds_left: float | None = None
    silent_for: float | None = None
    usual: float | None = None
    notice: str = ""
    damage: str = ""

    @property
    def finished(self) -> bool:
        return self.step >= self.rounds


def standings(arm: ArmOfRun, now: float | None = None) -> list[Standing]:
    """The state of each peer of an arm.

    Args:
        now: seconds since the epoch, to find silent peers; None for records that nobody writes any more.
    """
    found = []
    steps = {name: peer.step for name, peer in arm.peers.items()}
    for name, peer in arm.peers.items():
        silent = None if now is None or not peer.changed else now - peer.changed
        swarm = arm.arm.part_of(name).peers
        one = standing(name, arm.rounds, peer.rounds, swarm, steps, silent, peer.on(VALIDATION), whole=not peer.thinned)
        notice = "" if now is None or one.finished else _notice(peer, now)
        found.append(replace(one, notice=notice, damage=peer.damage))
    rewards = {one.name: one.reward for one in found if one.reward is not None}
    others = {one: [reward for other, reward in rewards.items() if other != one] for one in steps}
    return [replace(one, others=median(others[one.name]) if others[one.name] else None) for one in found]


def standing(
    name: str,
    rounds: int,
    rows: Sequence[RoundRow],
    swarm: Sequence[str] = (),
    steps: Mapping[str, int] | None = None,
    silent_for: float | None = None,
    evaluations: Sequence[EvaluationRow] = (),
    whole: bool = False,
) -> Standing:
    """The state of a peer by its rows. The last rows have no gaps.

    Args:
        swarm: the names of the peers that learn together, its own included.
        steps: the number of rounds that each of these peers has finished.
        evaluations: on validation, the untrained model's first.
        whole: whether the rows are all of its rounds, so that a finished run is judged as a whole.
    """
    together = len(swarm) > 1
    if not rows:
        return Standing(name, rounds, started=bool(evaluations), together=together, silent_for=silent_for)
    step, means, recent = rows[-1].step, reward_means(rows), rows[-WINDOW:]
    finished, usual, noise = step >= rounds, _usual(recent), _unrest(recent)
    without_foreign = in_a_row = rounds_without(rows, lambda row: not row.measures.get(WITHOUT_FOREIGN))
    lonely = rows[-min(without_foreign, WINDOW) :] if without_foreign else []
    if whole and finished:
        recent, lonely = rows, [row for row in rows if row.measures.get(WITHOUT_FOREIGN)]
        without_foreign = len(lonely)
    reward, change, over = _change(means)
    best = max((mean for _, mean in means), default=None)
    others = [other for other in swarm if other != name]
    return Standing(
        name=name,
        rounds=rounds,
        step=step,
        started=True,
        lately=len(recent),
        reward=reward,
        change=change,
        change_over=over,
        best=best,
        noise=noise,
        together=together,
        sources=[source_of(other, recent, max(0, step - (steps or {}).get(other, step))) for other in others],
        trouble=trouble_of(name, rows, best or 0.0, evaluations),
        decline=decline_of(evaluations),
        without_foreign=without_foreign,
        in_a_row=in_a_row,
        alone=[source_of(other, lonely) for other in others if lonely],
        seconds_left=None if finished or usual is None else usual * (rounds - step),
        silent_for=None if finished else silent_for,
        usual=usual,
    )


def _usual(rows: Sequence[RoundRow]) -> float | None:
    """Seconds of a round: the mean of the own work, and the median wait after the first round.

    In its first round, or the first after a return, a peer may wait for others that are started later.
    """
    timed = [row for row in rows if STEP_TIME in row.measures]
    if not timed:
        return None
    waits = [(row, row.measures.get(WAIT) or 0.0) for row in timed]
    later = [wait for row, wait in waits if row.step > 1]
    return fmean(row.measures[STEP_TIME] - wait for row, wait in waits) + (median(later) if later else 0.0)


def _unrest(rows: Sequence[RoundRow]) -> float:
    """The standard error of a mean of :data:`MEAN_OF` rewards, by the median step between rounds: a fall is no noise.

    The median size of the difference of two rewards with the standard deviation σ is .954 σ.
    """
    rewards = [row.measures["reward"] for row in rows if "reward" in row.measures]
    return median(abs(b - a) for a, b in pairwise(rewards)) / 0.954 / math.sqrt(MEAN_OF) if len(rewards) > 1 else 0.0


def _change(means: Sequence[tuple[int, float]]) -> tuple[float | None, float | None, int]:
    """The last mean, its change, and the number of rounds of that change: :data:`WINDOW`, or fewer in a short run."""
    if not means:
        return None, None, 0
    step, now = means[-1]
    first = means[MEAN_OF - 1] if len(means) >= MEAN_OF else None
    before = next((one for one in reversed(means) if one[0] <= step - WINDOW), first)
    if before is None or step - before[0] < MEAN_OF:
        return now, None, 0
    return now, now - before[1], step - before[0]


def _notice(peer: PeerRun, now: float) -> str:
    """The peer's last remark about the network; "" if a round has ended since, or if it is too old or no news."""
    heard = [row.event for row in peer.events if isinstance(row.event, NetworkEvent)][-1:]
    news = heard and peer.noticed and now - peer.noticed < NOTICE_SECONDS and heard[0].what in NEWS
    return heard[0].text if news else ""
