"""Budgets of arms, planned and spent, on both axes: rollouts trained on, and rollouts that a peer samples itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from statistics import fmean

from ftis.metric_keys import ADMITTED, TOKENS_SAMPLED, WAIT
from ftis.recipe.arms import Arm, rollouts_per_round
from ftis.records.reading import PeerRun, Study, own_seconds


@dataclass(frozen=True)
class RoundBudget:
    """The rollouts that an arm plans for each peer and round, and the number of rounds."""

    trained: int
    generated: int
    rounds: int


def round_budget(arm: Arm) -> RoundBudget:
    """The plan of one arm."""
    generated, trained = rollouts_per_round(arm.swarms[0])
    return RoundBudget(trained, generated, arm.swarms[0].training.rounds)


@dataclass(frozen=True)
class Matched:
    """The arms of one plan and a baseline.

    Attributes:
        equal: the budget that both share, in a few words.
        text: a sentence about both budgets.
    """

    baseline: str
    arms: Sequence[str]
    equal: str
    text: str


@dataclass(frozen=True)
class Spent:
    """Totals of a peer over all rounds, or means of them; ``seconds`` are its own work, without waiting."""

    rounds: float
    rollouts_trained: float
    rollouts_generated: float
    tokens_generated: float
    bytes_sent: float
    bytes_received: float
    seconds: float
    seconds_sampling: float
    seconds_exchange: float
    seconds_training: float
    seconds_waited: float


def matched(arms: Sequence[Arm], baselines: Sequence[str]) -> list[Matched]:
    """Compare the plans of arms with the plan of each baseline."""
    plans = {arm.name: round_budget(arm) for arm in arms}
    names_of: dict[RoundBudget, list[str]] = {}
    for name, plan in plans.items():
        if name not in baselines:
            names_of.setdefault(plan, []).append(name)
    found = []
    for baseline in baselines:
        for plan, names in names_of.items():
            text = f"{_in_words(', '.join(names), plan)}; {_in_words(baseline, plans[baseline])}."
            found.append(Matched(baseline, names, equal(plan, plans[baseline]), text))
    return found


def equal(one: RoundBudget, other: RoundBudget) -> str:
    """Name the budgets that two plans share."""
    same = ["rollouts trained on"] * (one.trained == other.trained)
    same += ["rollouts a peer samples itself"] * (one.generated == other.generated)
    text = f"equal in {' and in '.join(same)}" if same else "equal in neither budget"
    return text if one.rounds == other.rounds else f"{text} in a round, not in rounds"


def _in_words(names: str, budget: RoundBudget) -> str:
    each = f"a peer generates {budget.generated} rollouts and trains on {budget.trained}"
    return f"{names}: in each of {budget.rounds} rounds {each}"


def spent(study: Study, arm: Arm, peer: str) -> Spent:
    """Totals that one peer spent in one arm, means over seeds."""
    return mean_spent([_spent(arm, study.peer(seed, arm.name, peer)) for seed in study.seeds])


def mean_spent(rows: Iterable[Spent]) -> Spent:
    """The mean of each total over seeds or peers."""
    return Spent(*map(fmean, zip(*map(astuple, rows), strict=True)))


def _spent(arm: Arm, peer: PeerRun) -> Spent:
    planned, own = round_budget(arm), own_seconds(peer.rounds)
    generated, trained = (float(len(peer.rounds) * each) for each in (planned.generated, planned.trained))
    by_peer = (pair for row in peer.rounds for pair in row.by_peer.items())
    admitted = [(name, measures[ADMITTED]) for name, measures in by_peer if ADMITTED in measures]
    if arm.config.collaborate and admitted:  # some foreign ones may be missing, and shares may go by speed
        trained = float(sum(count for _, count in admitted))
        generated = float(sum(count for name, count in admitted if name == peer.name))
    return Spent(
        rounds=len(peer.rounds),
        rollouts_trained=trained,
        rollouts_generated=generated,
        tokens_generated=peer.rounds[-1].measures[TOKENS_SAMPLED],
        bytes_sent=peer.bytes_sent,
        bytes_received=peer.bytes_received,
        seconds=sum(own.values()),
        **{f"seconds_{part}": seconds for part, seconds in own.items()},
        seconds_waited=peer.total(WAIT),
    )
