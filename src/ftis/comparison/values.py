"""The results of a comparison, as values and as ``results.json``.

Accuracies are shares in 0 … 1; intervals are Student's t over seeds at 95 %; None stands for an unknown, such as the
interval of one seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ftis.comparison.budgets import Matched, Spent

if TYPE_CHECKING:  # it loads scipy
    from ftis.comparison.stats import Label


@dataclass(frozen=True)
class Value:
    """A mean over seeds, its interval, and the value of each seed."""

    mean: float
    low: float | None
    high: float | None
    per_seed: Mapping[int, float]


@dataclass(frozen=True)
class Amount:
    """An amount spent: its mean over seeds, and each seed's value."""

    mean: float
    per_seed: Mapping[int, float]


@dataclass(frozen=True)
class CurvePoint:
    """A :class:`Value` at an evaluated step, and the tokens and seconds of the peer's own work until then."""

    step: int
    mean: float
    low: float | None
    high: float | None
    per_seed: Mapping[int, float]
    tokens: Amount | None
    seconds: Amount | None


@dataclass(frozen=True)
class Accuracy:
    """A peer's accuracy before training and at the end (the mean of the last evaluations)."""

    problems: int
    start: Value
    final: Value


@dataclass(frozen=True)
class Comparison:
    """The differences by seed of an arm from a baseline: their mean, its interval and a verdict.

    Attributes:
        equal: the budgets that both share, in words.
        peer: None for the mean over peers.
        p_value: of the t-test.
        p_adjusted: by Holm's method over ``comparisons`` and ``together``.
        label: the verdict.
    """

    split: str
    arm: str
    baseline: str
    equal: str
    peer: str | None
    mean: float
    low: float | None
    high: float | None
    p_value: float
    n: int
    per_seed: Mapping[int, float]
    p_adjusted: float
    label: Label


@dataclass(frozen=True)
class StudyResults:
    """The results of an experiment or of a run. The fields are the keys of ``results.json``, in its order.

    Attributes:
        accuracy_is: the measure: pass@1, or a mean reward.
        elsewhere: peers of a joined run whose records are on their own machines.
        seeds, left_out: the complete seeds, and why each other one is left out.
        not_run: arms of the recipe that were not started.
        curves: by split, arm and peer, a point per evaluated step.
        curves_of_mean: the same by split and arm, of the mean over peers.
        accuracy: by split, arm and peer.
        accuracy_of_mean: by split and arm, the final accuracy's mean over peers, if there are several.
        comparisons: per split, baseline, peer and arm that is no baseline.
        together: the same of the mean over peers.
        budget: by arm and peer, means over seeds.
        matched: per baseline and arms of one plan.
        notes: cautions.
    """

    name: str
    accuracy_is: str
    title: str
    question: str
    baselines: Sequence[str]
    arms: Sequence[str]
    peers: Sequence[str]
    elsewhere: Sequence[str]
    splits: Sequence[str]
    seeds: Sequence[int]
    left_out: Mapping[int, str]
    not_run: Sequence[str]
    curves: Mapping[str, Mapping[str, Mapping[str, Sequence[CurvePoint]]]]
    curves_of_mean: Mapping[str, Mapping[str, Sequence[CurvePoint]]]
    accuracy: Mapping[str, Mapping[str, Mapping[str, Accuracy]]]
    accuracy_of_mean: Mapping[str, Mapping[str, Value]]
    comparisons: Sequence[Comparison]
    together: Sequence[Comparison]
    budget: Mapping[str, Mapping[str, Spent]]
    matched: Sequence[Matched]
    notes: Sequence[str]

    def as_json(self) -> dict[str, Any]:
        """The content of ``results.json``."""
        found = asdict(self)
        for of_mean in found["together"]:
            del of_mean["peer"]
        for by_arm in found["accuracy_of_mean"].values():
            by_arm |= {arm: {"final": final} for arm, final in by_arm.items()}
        return found
