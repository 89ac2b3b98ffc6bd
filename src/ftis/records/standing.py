"""The state of a peer in a run, from its last rounds: the facts for a sentence about it.

Everything here is counted from records, and nothing is put into words.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

from ftis.records.lines import RecordsError
from ftis.records.reading import ArmOfRun, PeerRun, RoundRow
from ftis.rewards.parts import right_formats

WINDOW = 10
"""The number of last rounds that count as lately."""

MEAN_OF = 3
"""Rounds over which a reward is averaged before it is compared: the mean of a few dozen completions is noisy."""

FALLEN, WORTH_FALLING = 0.5, 0.1
"""The fraction of the best reward below which a reward has fallen, and the smallest best reward that can fall."""

CLEARLY = 0.2
"""The distance of a mean reward below its best, or below the other peers', at which somebody should look."""

NOTICE_SECONDS = 60.0
"""Seconds after which a peer's remark about the network is no longer news."""

NEWS = ("waiting", "alone", "aside", "mismatch", "behind")
"""The network events that explain why a peer does not go on."""

REASONED = ("rejected/", "dropped/")
"""Prefixes of measures that count by reason."""


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
        missing: rounds in which nothing came.
        late: messages that came in a later round than their own.
        behind: rounds that the peer is behind the learner; 0 if that is not known.
        quarantined_since: the round, counted from 1, in which the honesty test found the peer; None if it did not.
        accused_only: whether the honesty test found the peer, but the learner still learns from it.
    """

    name: str
    offered: int = 0
    used: int = 0
    zero: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    rejected: Mapping[str, int] = field(default_factory=dict)
    first_rejection: str = ""
    missing: int = 0
    late: int = 0
    behind: int = 0
    quarantined_since: int | None = None
    accused_only: bool = False


@dataclass(frozen=True)
class Formats:
    """The number of the last own completions with the format that the reward asks for, and the number of all."""

    right: int
    of: int


@dataclass(frozen=True)
class Standing:
    """The state of one peer.

    Attributes:
        lately: the number of rounds that the counts cover.
        reward: the mean reward of the last rounds.
        change: the difference of that mean from the one ``change_over`` rounds ago.
        best: the highest such mean over all known rounds.
        others: the median reward of the other peers with records here; None without any.
        together: whether it learns together with others.
        unrewarded: the number of last rounds in a row without any reward.
        without_foreign: the number of last rounds in a row that used no foreign rollout.
        seconds_left: an estimate by its last rounds; None while there is none.
        silent_for: seconds since its records last changed; None if they are complete or absent.
        usual: mean seconds of its last rounds.
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
    others: float | None = None
    together: bool = False
    sources: Sequence[Source] = ()
    unrewarded: int = 0
    without_foreign: int = 0
    formats: Formats | None = None
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
        notice = "" if now is None else _notice(peer, now)
        one = standing(name, arm.rounds, peer.rounds, arm.swarm_of(name), steps, silent)
        started = one.started or bool(peer.evaluations)
        formats = _formats(arm, peer) if one.unrewarded else None
        notice = "" if one.finished else notice
        found.append(replace(one, started=started, notice=notice, formats=formats, damage=peer.damage))
    rewards = {one.name: one.reward for one in found if one.reward is not None}
    return [
        replace(one, others=median(others))
        if (others := [reward for name, reward in rewards.items() if name != one.name])
        else one
        for one in found
    ]


def standing(
    name: str,
    rounds: int,
    rows: Sequence[RoundRow],
    swarm: Sequence[str] = (),
    steps: Mapping[str, int] | None = None,
    silent_for: float | None = None,
) -> Standing:
    """The state of a peer by its rows. The last rows have no gaps.

    Args:
        swarm: the names of the peers that learn together, its own included.
        steps: the number of rounds that each of these peers has finished.
    """
    together = len(swarm) > 1
    if not rows:
        return Standing(name, rounds, together=together, silent_for=silent_for)
    recent = rows[-WINDOW:]
    step, means = recent[-1].step, reward_means(rows)
    reward, change, over = _change(means)
    each = [row.measures["step_time"] for row in recent if "step_time" in row.measures]
    usual = fmean(each) if each else None
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
        best=max((mean for _, mean in means), default=None),
        together=together,
        sources=[source_of(other, recent, max(0, step - (steps or {}).get(other, step))) for other in others],
        unrewarded=_last_without(rows, lambda row: row.measures.get("reward") != 0),
        without_foreign=_last_without(rows, lambda row: not row.measures.get("without_foreign")),
        seconds_left=None if usual is None or step >= rounds else usual * (rounds - step),
        silent_for=None if step >= rounds else silent_for,
        usual=usual,
    )


def has_fallen(reward: float, best: float) -> bool:
    """Whether a mean reward is so far below the best that the learning rate or the objective may be wrong."""
    return best >= WORTH_FALLING and reward < FALLEN * best


def reward_means(rows: Sequence[RoundRow]) -> list[tuple[int, float]]:
    """The step of each row with a reward, and the mean reward of the last rows up to it, at most :data:`MEAN_OF`."""
    last: deque[float] = deque(maxlen=MEAN_OF)
    means = []
    for row in rows:
        if (reward := row.measures.get("reward")) is not None:
            last.append(float(reward))
            means.append((row.step, sum(last) / len(last)))
    return means


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
    heard = [event for event in peer.events if event.get("kind") == "network"][-1:]
    news = heard and peer.noticed and now - peer.noticed < NOTICE_SECONDS and heard[0].get("what") in NEWS
    return str(heard[0].get("text", "")) if news else ""


def _formats(arm: ArmOfRun, peer: PeerRun) -> Formats | None:
    """The formats of a peer's last own completions under the built-in reward; None under another reward."""
    last = peer.last_recorded
    if last is None:
        return None
    try:
        own = [row for row in peer.rollouts(last) if row["source"] == peer.name]
    except RecordsError:
        return None
    right = right_formats(arm.arm.recipe, (str(row["completion"]) for row in own))
    return Formats(sum(right), len(own)) if right else None


def source_of(name: str, rounds: Sequence[RoundRow], behind: int = 0) -> Source:
    """The fate of a peer's rollouts in one or more of a learner's rounds."""
    measured = [row.by_peer.get(name, {}) for row in rounds]
    rejected: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    for measures in measured:
        for measure, value in measures.items():
            if value and measure.startswith(REASONED):
                kind, _, reason = measure.partition("/")
                (rejected if kind == "rejected" else dropped)[reason] += int(value)

    def total(measure: str) -> int:
        return int(sum(measures.get(measure, 0) for measures in measured))

    last: Mapping[str, Any] = measured[-1]
    found = last.get("honesty/found_in_round")
    return Source(
        name=name,
        offered=total("admitted") + total("passed_over"),
        used=total("kept"),
        zero=total("zero_advantage"),
        dropped=dict(dropped),
        rejected=dict(rejected),
        first_rejection=next((str(m["first_rejection"]) for m in reversed(measured) if m.get("first_rejection")), ""),
        missing=sum(not (measures.get("delivered") or measures.get("late")) for measures in measured),
        late=total("late"),
        behind=behind,
        quarantined_since=int(found) if found and last.get("honesty/quarantined") else None,
        accused_only=bool(found) and not last.get("honesty/quarantined"),
    )
