"""The state of a peer in a run, from its last rounds: the facts for a sentence about it.

Everything here is counted from records, and nothing is put into words.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from ftis.metric_keys import DROPPED, REJECTED, WAIT, peer_key
from ftis.records.events import NetworkEvent
from ftis.records.reading import VALIDATION, ArmOfRun, EvaluationRow, PeerRun, RoundRow

WINDOW = 10
"""The number of last rounds that count as lately."""

MEAN_OF = 3
"""Rounds over which a reward is averaged before it is compared: the mean of a few dozen completions is noisy."""

FALLS = ((1, 0.3, 0.1), (2, 0.2, 0.25), (3, 0.1, 0.5))
"""When a reward has fallen: after so many rounds in a row, from so high a best, to so small a fraction of it. One round
is a few dozen completions, so that it alone must show much."""

DECLINES = 3
"""Evaluations in a row, each below the one before, after which an accuracy may have declined."""

MOSTLY, HARDLY = 0.9, 0.05
"""Shares of completions above which nearly all do something, and below which nearly none do."""

SHORT = 1.5
"""The mean tokens of a completion that ends at once: the end is one of them."""

CLEARLY = 0.2
"""The distance of a mean reward below its best, or below the other peers', at which somebody should look."""

NOTICE_SECONDS = 60.0
"""Seconds after which a peer's remark about the network is no longer news."""

NEWS = ("waiting", "alone", "aside", "mismatch", "behind", "regret")
"""The network events that explain why a peer does not go on, or goes on without others."""

CAUSAL = (
    *("reward", "reward_std", "frac_reward_zero_std", "optimizer_steps", "format_right", "answer_right"),
    *("completions/mean_length", "completions/clipped_ratio", "learning_rate"),
)
"""The measures of a round by which a :class:`Trouble` is found."""


@dataclass(frozen=True)
class Source:
    """The fate of another peer's rollouts in some of the learner's rounds.

    Attributes:
        name: the peer that sampled the rollouts.
        offered: rollouts that came, whether they were used or not.
        used: rollouts that the learner learned from.
        zero: rollouts in groups with equal rewards.
        dropped: rollouts that a selection dropped, by reason.
        rejected: groups, messages or offers that were rejected, by reason.
        first_rejection: the first rejection in words, with the text that the sender wrote.
        rounds: the number of rounds that the counts cover.
        missing: rounds in which nothing came.
        late: messages that came in a later round than their own.
        behind: rounds that the peer is behind the learner; 0 if that is not known.
        quarantined_since: the round, counted from 1, in which the honesty test found the peer; None if it did not.
        accused_only: whether the honesty test found the peer, but the learner still learns from it.
        evidence, needed: of the honesty test on that peer, in nats, and the evidence that suffices.
        harmful_since: the step at which the no-regret guard found that learning from it did harm; None if it did not.
        set_aside: whether the guard has the learner do without it for some rounds.
    """

    name: str
    offered: int = 0
    used: int = 0
    zero: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    rejected: Mapping[str, int] = field(default_factory=dict)
    first_rejection: str = ""
    rounds: int = 0
    missing: int = 0
    late: int = 0
    behind: int = 0
    quarantined_since: int | None = None
    accused_only: bool = False
    evidence: float = 0.0
    needed: float = 0.0
    harmful_since: int | None = None
    set_aside: bool = False


@dataclass(frozen=True)
class Trouble:
    """The reason why a peer learns nothing or unlearns, as far as its last rounds show.

    Attributes:
        kind: ``fallen`` of a reward, ``unlearned`` of an accuracy, or a reason of :func:`why_nothing`.
        rounds: the number of last rounds in a row that have it.
        since: the first of them.
        reward, before: of ``fallen`` the mean reward in them, and the best one of three rounds before; of ``unlearned``
            the last accuracy and the first; else 0.
        learning_rate: the highest up to a fall; 0 if no round recorded one.
    """

    kind: str
    rounds: int
    since: int
    reward: float = 0.0
    before: float = 0.0
    learning_rate: float = 0.0


@dataclass(frozen=True)
class Decline:
    """A validation accuracy that fell in several evaluations in a row.

    Attributes:
        evaluations: their number.
        step: the round of the last evaluation before them.
        before, now: the accuracies then, and at the last evaluation.
    """

    evaluations: int
    step: int
    before: float
    now: float


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
    without_foreign = _last_without(rows, lambda row: not row.measures.get("without_foreign"))
    lonely = rows[-min(without_foreign, WINDOW) :] if without_foreign else []
    if whole and finished:
        recent, lonely = rows, [row for row in rows if row.measures.get("without_foreign")]
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
        trouble=_fall(name, rows, best or 0.0) or _nothing_learned(rows) or _unlearned(evaluations, rows),
        decline=_decline(evaluations),
        without_foreign=without_foreign,
        alone=[source_of(other, lonely) for other in others if lonely],
        seconds_left=None if finished or usual is None else usual * (rounds - step),
        silent_for=None if finished else silent_for,
        usual=usual,
    )


def _usual(rows: Sequence[RoundRow]) -> float | None:
    """Seconds of a round: the mean of the own work, and the median wait after the first round.

    In its first round, or the first after a return, a peer may wait for others that are started later.
    """
    timed = [row for row in rows if "step_time" in row.measures]
    if not timed:
        return None
    waits = [(row, row.measures.get(WAIT) or 0.0) for row in timed]
    later = [wait for row, wait in waits if row.step > 1]
    return fmean(row.measures["step_time"] - wait for row, wait in waits) + (median(later) if later else 0.0)


def _fall(name: str, rows: Sequence[RoundRow], best: float) -> Trouble | None:
    """The fall of a reward from its best mean so far, by :data:`FALLS`, if no noise explains it."""
    rows = [row for row in rows if "reward" in row.measures]
    rewards = [row.measures["reward"] for row in rows]
    for least, high, fraction in FALLS[::-1]:
        first = next((i for i in reversed(range(len(rows))) if rewards[i] > fraction * best), -1) + 1
        if best >= high and 0 < first <= len(rows) - least:
            now, since = fmean(rewards[first:]), rows[first].step
            if best - now > 3 * _noise(name, rows[:first]) / math.sqrt(min(first, MEAN_OF)):
                rate = _highest_rate(rows[: first + 1])
                return Trouble("fallen", rows[-1].step - since + 1, since, now, best, rate)
    return None


def _noise(name: str, rows: Sequence[RoundRow]) -> float:
    """The standard error of a round's mean reward: from its completions, or from one round to the next if that is more.

    The second knows that completions of one prompt earn alike. A trend adds little to it.
    """
    seen = [row.measures for row in rows if "reward" in row.measures]
    within = [
        m["reward_std"] / math.sqrt(n) for m in seen if "reward_std" in m and (n := m.get(peer_key(name, "admitted")))
    ]
    steps = [(b["reward"] - a["reward"]) ** 2 / 2 for a, b in pairwise(seen)]
    return max(fmean(within) if within else 0.0, math.sqrt(fmean(steps)) if steps else 0.0)


def _unrest(rows: Sequence[RoundRow]) -> float:
    """The standard error of a mean of :data:`MEAN_OF` rewards, by the median step between rounds: a fall is no noise.

    The median size of the difference of two rewards with the standard deviation σ is .954 σ.
    """
    rewards = [row.measures["reward"] for row in rows if "reward" in row.measures]
    return median(abs(b - a) for a, b in pairwise(rewards)) / 0.954 / math.sqrt(MEAN_OF) if len(rewards) > 1 else 0.0


def _highest_rate(rows: Sequence[RoundRow]) -> float:
    return max((row.measures.get("learning_rate", 0.0) for row in rows), default=0.0)


def _unlearned(evaluations: Sequence[EvaluationRow], rows: Sequence[RoundRow]) -> Trouble | None:
    """The fall of the last accuracy below half of the first, if that is more than three standard errors."""
    first, last = (evaluations[0], evaluations[-1]) if evaluations else (None, None)
    if first is None or last is None or first.step or not last.step or first.accuracy < FALLS[-1][1]:
        return None
    fell = last.accuracy <= FALLS[-1][2] * first.accuracy and first.accuracy - last.accuracy > 3 * first.error
    return Trouble("unlearned", 1, last.step, last.accuracy, first.accuracy, _highest_rate(rows)) if fell else None


def _decline(evaluations: Sequence[EvaluationRow]) -> Decline | None:
    """The fall of the accuracy over the last evaluations, each below the one before, if no noise explains it.

    There are :data:`DECLINES` of them at least, and the fall exceeds three standard errors of a difference, √(a² + b²).
    An evaluation is compared with one other alone. With new problems each time and a model that stays as it is, one in
    a thousand declines; the same problems vary less.
    """
    falls = 0
    for later, earlier in pairwise(evaluations[::-1]):
        if later.accuracy >= earlier.accuracy:
            break
        falls += 1
    if falls < DECLINES:
        return None
    first, last = evaluations[-1 - falls], evaluations[-1]
    if first.accuracy - last.accuracy <= 3 * math.hypot(first.error, last.error):
        return None
    return Decline(falls, first.step, first.accuracy, last.accuracy)


def _nothing_learned(rows: Sequence[RoundRow]) -> Trouble | None:
    """The reason why the last rounds taught nothing; None if the last one did."""
    rounds = _last_without(rows, lambda row: not why_nothing(row.measures))
    if not rounds:
        return None
    streak = [row.measures for row in rows if row.step > rows[-1].step - rounds]
    mean = {key: fmean(m[key] for m in streak) for key in CAUSAL if all(key in m for m in streak)}
    kind, since = why_nothing(mean) or why_nothing(streak[-1]), rows[-1].step - rounds + 1
    if kind == "constant" and since > 1:  # it told completions apart before
        kind = "easy"
    return Trouble(kind, rounds, since)


def why_nothing(measures: Mapping[str, Any]) -> str:
    """The reason why a round with these measures taught nothing of worth, or "".

    In this order: completions end ``at once`` or are ``endless``, their ``format`` is wrong, or they are ``unrewarded``
    for another reason; rewards are equal, since all answers are right (``easy``), since the reward is ``constant``, or
    ``equal`` in each group; the selections ``dropped`` everything; no ``answer`` is right, so that only the format
    is learned.
    """
    reward, spread = measures.get("reward"), measures.get("reward_std", 0.0)
    if reward == 0 and not spread:
        if measures.get("completions/mean_length", math.inf) <= SHORT:
            return "at once"
        if measures.get("completions/clipped_ratio", 0.0) >= MOSTLY:
            return "endless"
        return "format" if measures.get("format_right", 1.0) < HARDLY else "unrewarded"
    if measures.get("frac_reward_zero_std") == 1:
        if measures.get("answer_right", 0.0) >= MOSTLY:
            return "easy"
        return "equal" if spread else "constant"
    if measures.get("optimizer_steps") == 0:
        return "dropped"
    return "answer" if measures.get("answer_right") == 0 else ""


def reward_means(rows: Sequence[RoundRow]) -> list[tuple[int, float]]:
    """The step of each row with a reward, and the mean reward of the last rows up to it, at most :data:`MEAN_OF`."""
    seen = [(row.step, float(row.measures["reward"])) for row in rows if row.measures.get("reward") is not None]
    last = [[reward for _, reward in seen[max(0, i - MEAN_OF) : i]] for i in range(1, len(seen) + 1)]
    return [(step, fmean(rewards)) for (step, _), rewards in zip(seen, last, strict=True)]


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


def _last_without(rows: Sequence[RoundRow], seen: Callable[[RoundRow], bool]) -> int:
    """Rounds since the last row that ``seen`` accepts, by their steps: rows of a long run have gaps."""
    found = next((row for row in reversed(rows) if seen(row)), None)
    return rows[-1].step - (rows[0].step - 1 if found is None else found.step)


def _notice(peer: PeerRun, now: float) -> str:
    """The peer's last remark about the network; "" if a round has ended since, or if it is too old or no news."""
    heard = [event for event in peer.events if event.get("kind") == NetworkEvent.kind][-1:]
    news = heard and peer.noticed and now - peer.noticed < NOTICE_SECONDS and heard[0].get("what") in NEWS
    return str(heard[0].get("text", "")) if news else ""


def source_of(name: str, rounds: Sequence[RoundRow], behind: int = 0) -> Source:
    """The fate of a peer's rollouts in one or more of a learner's rounds."""
    measured = [row.by_peer.get(name, {}) for row in rounds]

    def by_reason(prefix: str) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for measure, value in (pair for measures in measured for pair in measures.items()):
            if value and measure.startswith(prefix):
                counts[measure.removeprefix(prefix)] += int(value)
        return dict(counts)

    def total(measure: str) -> int:
        return int(sum(measures.get(measure, 0) for measures in measured))

    last: Mapping[str, Any] = measured[-1]
    found = last.get("honesty/found_in_round")
    return Source(
        name=name,
        offered=total("admitted") + total("passed_over"),
        used=total("kept"),
        zero=total("zero_advantage"),
        dropped=by_reason(DROPPED),
        rejected=by_reason(REJECTED),
        first_rejection=next((str(m["first_rejection"]) for m in reversed(measured) if m.get("first_rejection")), ""),
        rounds=len(measured),
        missing=sum(not (measures.get("delivered") or measures.get("late")) for measures in measured),
        late=total("late"),
        behind=behind,
        quarantined_since=int(found) if found and last.get("honesty/quarantined") else None,
        accused_only=bool(found) and not last.get("honesty/quarantined"),
        evidence=last.get("honesty/evidence", 0.0),
        needed=last.get("honesty/threshold", 0.0),
        harmful_since=last.get("regret/harmful_since"),
        set_aside=bool(last.get("regret/set_aside")),
    )
