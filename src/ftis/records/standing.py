"""How a peer stands in a run, from its last rounds: the facts that a sentence about it is made of.

Everything here is counted from records; nothing is read and nothing is put into words.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from ftis.records.reading import RoundRow

WINDOW = 10
"""Rounds that "lately" means."""

MEAN_OF = 3
"""Rounds over which a reward is averaged before it is compared: one of a few dozen completions swings."""

FALLEN, WORTH_FALLING = 0.5, 0.1
"""The part of the best reward below which a reward has fallen, and the least best reward of which that is said."""


REASONED = ("rejected/", "dropped/")
"""Beginnings of measures that count by reason."""


@dataclass(frozen=True)
class Source:
    """What became of another peer's rollouts in some of the learner's rounds.

    Attributes:
        name: of the peer that sampled them.
        offered: rollouts that came, whatever became of them.
        used: those learned from.
        zero, dropped: those in groups whose rewards are all equal; those that a selection dropped, by reason.
        rejected: groups, messages or offers that were rejected, by reason.
        first_rejection: the first of them in words, with whatever the sender wrote.
        missing: rounds in which nothing came.
        late: messages that came in a later round than their own.
        behind: rounds that it is behind the learner; 0 where that is not known.
        quarantined_since: the round, counted from 1, in which the honesty test found it; None if it did not.
        accused_only: whether it was found, but is still learned from.
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
    """How many of the last own completions have the format that the reward asks for."""

    right: int
    of: int


@dataclass(frozen=True)
class Standing:
    """Where one peer is.

    Attributes:
        lately: rounds that the counts are about.
        reward, change: the mean reward of the last rounds, and by how much it is above that ``change_over`` rounds ago.
        best: the highest such mean of all rounds that are known.
        together: whether it learns together with others.
        unrewarded: the last rounds without any reward, one after the other.
        without_foreign: the same, without a foreign rollout learned from.
        seconds_left: by its last rounds; None while it is not known.
        silent_for: seconds since its records last changed; None of a peer whose records are complete or not there.
        usual: seconds of one of its last rounds.
        notice: the last thing that it said about the network, if it is about the present round.
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
    together: bool = False
    sources: Sequence[Source] = ()
    unrewarded: int = 0
    without_foreign: int = 0
    formats: Formats | None = None
    seconds_left: float | None = None
    silent_for: float | None = None
    usual: float | None = None
    notice: str = ""

    @property
    def finished(self) -> bool:
        return self.step >= self.rounds


def standing(
    name: str,
    rounds: int,
    rows: Sequence[Mapping[str, Any]],
    recent: Sequence[RoundRow],
    means: Sequence[tuple[int, float]],
    *,
    swarm: Sequence[str] = (),
    steps: Mapping[str, int] | None = None,
    started: bool = False,
    seconds_per_round: float | None = None,
    silent_for: float | None = None,
    notice: str = "",
) -> Standing:
    """How a peer stands.

    Args:
        rows: its lines of metrics.jsonl; between the last ones there are no gaps.
        recent: the last of them as rounds, :data:`WINDOW` or more.
        means: what :class:`RewardMeans` makes of the rows.
        swarm: the names of those who learn together, its own too.
        steps: rounds that each of them has finished.
        started: whether anything else was recorded of it, as the untrained model's evaluation.
        seconds_per_round: as a watcher saw them pass; else they are told from the rounds' own seconds.
    """
    if not rows:
        return Standing(name, rounds, started=started, together=len(swarm) > 1, silent_for=silent_for, notice=notice)
    recent = recent[-WINDOW:]
    step = recent[-1].step
    reward, change, over = _change(means)
    each = [row.measures["step_time"] for row in recent if "step_time" in row.measures]
    usual = seconds_per_round or (fmean(each) if each else None)
    finished = step >= rounds
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
        together=len(swarm) > 1,
        sources=[
            source_of(other, recent, max(0, step - (steps or {}).get(other, step))) for other in swarm if other != name
        ],
        unrewarded=_last_without(rows, lambda row: row.get("reward") != 0),
        without_foreign=_last_without(rows, lambda row: not row.get("without_foreign")),
        seconds_left=None if usual is None or finished else usual * (rounds - step),
        silent_for=None if finished else silent_for,
        usual=usual,
        notice="" if finished else notice,
    )


def has_fallen(reward: float, best: float) -> bool:
    """Whether a mean reward has fallen so far below the best that a rate or an objective may be wrong."""
    return best >= WORTH_FALLING and reward < FALLEN * best


class RewardMeans:
    """Mean rewards of rows that become more and more: only what was added is averaged."""

    def __init__(self) -> None:
        self._rows: Sequence[Mapping[str, Any]] = ()
        self._taken = 0
        self._last: deque[float] = deque(maxlen=MEAN_OF)
        self._means: list[tuple[int, float]] = []

    def of(self, rows: Sequence[Mapping[str, Any]]) -> Sequence[tuple[int, float]]:
        """The step of each row, and the mean reward of the rows up to it, :data:`MEAN_OF` at most.

        ``rows`` is the list of the call before, to which some may have been added, or another one.
        """
        if rows is not self._rows or len(rows) < self._taken:
            self._rows, self._taken, self._means = rows, 0, []
            self._last.clear()
        for row in itertools.islice(rows, self._taken, None):
            reward = row.get("reward")
            if isinstance(reward, (int, float)):
                self._last.append(float(reward))
                self._means.append((int(row["step"]), sum(self._last) / len(self._last)))
        self._taken = len(rows)
        return self._means


def _change(means: Sequence[tuple[int, float]]) -> tuple[float | None, float | None, int]:
    """The last mean, its change and over how many rounds: :data:`WINDOW`, or as many as there are beyond the mean's."""
    if not means:
        return None, None, 0
    step, now = means[-1]
    first = means[MEAN_OF - 1] if len(means) >= MEAN_OF else None
    before = next((one for one in reversed(means) if one[0] <= step - WINDOW), first)
    if before is None or step - before[0] < MEAN_OF:
        return now, None, 0
    return now, now - before[1], step - before[0]


def _last_without(rows: Sequence[Mapping[str, Any]], seen: Any) -> int:
    """Rounds since the last row with something, by their steps: rows of a long run have gaps."""
    found = next((row for row in reversed(rows) if seen(row)), None)
    before = int(rows[0]["step"]) - 1 if found is None else int(found["step"])
    return int(rows[-1]["step"]) - before


def source_of(name: str, rounds: Sequence[RoundRow], behind: int = 0) -> Source:
    """What became of a peer's rollouts in some of a learner's rounds, of which there is one at least."""
    measured = [row.by_peer.get(name, {}) for row in rounds]
    rejected: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    for of_round in measured:
        for measure, value in of_round.items():
            if value and measure.startswith(REASONED):
                kind, _, reason = measure.partition("/")
                (rejected if kind == "rejected" else dropped)[reason] += int(value)

    def total(measure: str) -> int:
        return int(sum(of_round.get(measure, 0) for of_round in measured))

    last = measured[-1]
    found = last.get("honesty/found_in_round")
    return Source(
        name=name,
        offered=total("admitted") + total("passed_over"),
        used=total("kept"),
        zero=total("zero_advantage"),
        dropped=dict(dropped),
        rejected=dict(rejected),
        first_rejection=next((str(m["first_rejection"]) for m in reversed(measured) if m.get("first_rejection")), ""),
        missing=sum(not (of_round.get("delivered") or of_round.get("late")) for of_round in measured),
        late=total("late"),
        behind=behind,
        quarantined_since=int(found) if found and last.get("honesty/quarantined") else None,
        accused_only=bool(found) and not last.get("honesty/quarantined"),
    )
