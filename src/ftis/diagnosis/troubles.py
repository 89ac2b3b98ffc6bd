"""The reason why a peer learns nothing or unlearns, as far as its last rounds and evaluations show."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from ftis import metric_keys as keys
from ftis.records.reading import EvaluationRow, RoundRow

MEAN_OF = 3
"""Rounds over which a reward is averaged before it is compared: the mean of a few dozen completions is noisy."""

FALLS = ((1, 0.3, 0.1), (2, 0.2, 0.25), (3, 0.1, 0.5))
"""The falls of a reward: after so many rounds in a row, from so high a best, to so small a fraction of it. One round
is a few dozen completions, so that it alone must show much."""

DECLINES = 3
"""Evaluations in a row, each below the one before, after which an accuracy may have declined."""

MOSTLY, HARDLY = 0.9, 0.05
"""Shares of completions above which nearly all do something, and below which nearly none do."""

SHORT = 1.5
"""The mean tokens of a completion that ends at once: the end is one of them."""

CAUSAL = (
    *("reward", "reward_std", keys.ZERO_STD, keys.OPTIMIZER_STEPS, keys.FORMAT_RIGHT, keys.ANSWER_RIGHT),
    *(keys.MEAN_LENGTH, keys.CLIPPED_RATIO, "learning_rate"),
)
"""The measures of a round by which a :class:`Trouble` is found."""


@dataclass(frozen=True)
class Trouble:
    """The reason why a peer learns nothing or unlearns, as far as its last rounds show.

    Attributes:
        kind: ``fallen`` of a reward, ``unlearned`` of an accuracy, or a reason of :func:`why_nothing`.
        rounds: the number of last rounds in a row that have it.
        since: the first of them.
        reward, before: of ``fallen`` the mean reward in them, and the best one of three rounds before; of ``unlearned``
            the last accuracy and the first; else 0.
        learning_rate: the highest rate up to a fall; 0 if no round recorded one.
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


def trouble_of(
    name: str, rows: Sequence[RoundRow], best: float, evaluations: Sequence[EvaluationRow]
) -> Trouble | None:
    """The trouble of the peer ``name`` by its rows; ``best`` is its best mean reward."""
    return _fall(name, rows, best) or _nothing_learned(rows) or _unlearned(evaluations, rows)


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
        m["reward_std"] / math.sqrt(n)
        for m in seen
        if "reward_std" in m and (n := m.get(keys.peer_key(name, keys.ADMITTED)))
    ]
    steps = [(b["reward"] - a["reward"]) ** 2 / 2 for a, b in pairwise(seen)]
    return max(fmean(within) if within else 0.0, math.sqrt(fmean(steps)) if steps else 0.0)


def _highest_rate(rows: Sequence[RoundRow]) -> float:
    return max((row.measures.get("learning_rate", 0.0) for row in rows), default=0.0)


def _unlearned(evaluations: Sequence[EvaluationRow], rows: Sequence[RoundRow]) -> Trouble | None:
    """The fall of the last accuracy below half of the first, if that is more than three standard errors."""
    first, last = (evaluations[0], evaluations[-1]) if evaluations else (None, None)
    if first is None or last is None or first.step or not last.step or first.accuracy < FALLS[-1][1]:
        return None
    fell = last.accuracy <= FALLS[-1][2] * first.accuracy and first.accuracy - last.accuracy > 3 * first.error
    return Trouble("unlearned", 1, last.step, last.accuracy, first.accuracy, _highest_rate(rows)) if fell else None


def decline_of(evaluations: Sequence[EvaluationRow]) -> Decline | None:
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
    rounds = rounds_without(rows, lambda row: not why_nothing(row.measures))
    if not rounds:
        return None
    streak = [row.measures for row in rows if row.step > rows[-1].step - rounds]
    mean = {key: fmean(m[key] for m in streak) for key in CAUSAL if all(key in m for m in streak)}
    kind, since = why_nothing(mean) or why_nothing(streak[-1]), rows[-1].step - rounds + 1
    if kind == "constant" and since > 1:  # it told completions apart before
        best = max((earned for step, earned in reward_means(rows) if step < since), default=math.inf)
        right = mean.get(keys.ANSWER_RIGHT)
        if right == 0:
            kind = "answer"
        elif mean["reward"] >= best and (right is None or right >= MOSTLY):
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
        if measures.get(keys.MEAN_LENGTH, math.inf) <= SHORT:
            return "at once"
        if measures.get(keys.CLIPPED_RATIO, 0.0) >= MOSTLY:
            return "endless"
        return "format" if measures.get(keys.FORMAT_RIGHT, 1.0) < HARDLY else "unrewarded"
    if measures.get(keys.ZERO_STD) == 1:
        if measures.get(keys.ANSWER_RIGHT, 0.0) >= MOSTLY:
            return "easy"
        return "equal" if spread else "constant"
    if measures.get(keys.OPTIMIZER_STEPS) == 0:
        return "dropped"
    return "answer" if measures.get(keys.ANSWER_RIGHT) == 0 else ""


def reward_means(rows: Sequence[RoundRow]) -> list[tuple[int, float]]:
    """The step of each row with a reward, and the mean reward of the last rows up to it, at most :data:`MEAN_OF`."""
    seen = [(row.step, float(row.measures["reward"])) for row in rows if row.measures.get("reward") is not None]
    last = [[reward for _, reward in seen[max(0, i - MEAN_OF) : i]] for i in range(1, len(seen) + 1)]
    return [(step, fmean(rewards)) for (step, _), rewards in zip(seen, last, strict=True)]


def rounds_without(rows: Sequence[RoundRow], seen: Callable[[RoundRow], bool]) -> int:
    """Rounds since the last row that ``seen`` accepts, by their steps: rows of a long run have gaps."""
    found = next((row for row in reversed(rows) if seen(row)), None)
    return rows[-1].step - (rows[0].step - 1 if found is None else found.step)
