"""What arms may spend and what they spent, on both axes: rollouts trained on, and rollouts a peer generates itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ftis.config import ArmConfig, Recipe
from ftis.lab.reading import PeerRun, Study
from ftis.lab.recipes import with_arm


@dataclass(frozen=True)
class Plan:
    """What an arm means each peer to have: rollouts trained on and generated per round, and rounds."""

    trained: int
    generated: int
    rounds: int


def plan(recipe: Recipe, arm: ArmConfig) -> Plan:
    """The plan of one arm of ``recipe``."""
    as_run = with_arm(recipe, arm)
    peers, training = as_run.swarm_size, as_run.training
    rollouts = training.prompts_per_round * as_run.sampling.num_generations
    if arm.collaborate:
        return Plan(rollouts, rollouts // peers, training.rounds)
    if arm.budget == "generated":
        rollouts = training.prompts_per_round // peers * as_run.sampling.num_generations
    return Plan(rollouts, rollouts, training.rounds)


def matched(recipe: Recipe, arms: Sequence[ArmConfig], baselines: Sequence[str]) -> list[dict[str, Any]]:
    """On which of the two axes arms equal each baseline.

    An entry is about arms with one plan: ``baseline``, ``arms``, what is ``equal`` in a few words, and a sentence
    (``text``).
    """
    plans = {arm.name: plan(recipe, arm) for arm in arms}
    names_of: dict[Plan, list[str]] = {}
    for name, of_arm in plans.items():
        if name not in baselines:
            names_of.setdefault(of_arm, []).append(name)
    return [
        {
            "baseline": baseline,
            "arms": names,
            "equal": equal(of_arms, plans[baseline]),
            "text": _in_words(", ".join(names), of_arms, baseline, plans[baseline]),
        }
        for baseline in baselines
        for of_arms, names in names_of.items()
    ]


def equal(one: Plan, other: Plan) -> str:
    """Which budget two plans share, in a few words."""
    same = [
        what
        for what, mine, theirs in (
            ("rollouts trained on", one.trained, other.trained),
            ("rollouts a peer samples itself", one.generated, other.generated),
        )
        if mine == theirs
    ]
    text = f"equal in {' and in '.join(same)}" if same else "equal in neither budget"
    return text if one.rounds == other.rounds else f"{text} in a round, not in rounds"


def _in_words(names: str, arms: Plan, baseline: str, other: Plan) -> str:
    both, as_many = f"{names} and {baseline}", _times(arms.generated, other.generated)
    if arms.trained == other.trained and arms.generated == other.generated:
        text = (
            f"{both} are equal in both: a peer trains on {arms.trained} rollouts a round and generates {arms.generated}"
        )
    elif arms.trained == other.trained:
        text = (
            f"{both} are equal in rollouts trained on per update ({arms.trained}); a peer of {names} generates "
            f"{as_many} itself ({arms.generated} against {other.generated} a round)"
        )
    elif arms.generated == other.generated:
        text = (
            f"{both} are equal in rollouts generated per peer and round ({arms.generated}); a peer of {names} trains "
            f"on {_times(arms.trained, other.trained)} ({arms.trained} against {other.trained})"
        )
    else:
        text = (
            f"{both} are equal in neither: a peer of {names} trains on {_times(arms.trained, other.trained)} rollouts "
            f"a round ({arms.trained} against {other.trained}) and generates {as_many} ({arms.generated} against "
            f"{other.generated})"
        )
    return text + (f"; {arms.rounds} rounds against {other.rounds}." if arms.rounds != other.rounds else ".")


def _times(a: int, b: int) -> str:
    words = {0.5: "half as many", 1.0: "as many", 2.0: "twice as many"}
    if 3 * a == b:
        return "a third as many"
    return words.get(a / b, f"{a / b:.3g} times as many")


def spent(study: Study, arm: ArmConfig, peer: str) -> dict[str, Any]:
    """What one peer spent in one arm: totals over all rounds, means over seeds; None where it was not recorded."""
    per_seed = [_spent(study, arm, study.peer(seed, arm.name, peer)) for seed in study.seeds]
    means: dict[str, Any] = {}
    for key in per_seed[0]:
        known = [value for of_seed in per_seed if (value := of_seed[key]) is not None]
        means[key] = fmean(known) if len(known) == len(per_seed) else None
    return means


def _spent(study: Study, arm: ArmConfig, peer: PeerRun) -> dict[str, float | None]:
    planned, own = plan(study.recipe, arm), peer.own_seconds
    totals: dict[str, float | None] = {
        "rounds": len(peer.rounds),
        "optimizer_steps": peer.total("optimizer_steps"),
        "rollouts_trained": planned.rounds * planned.trained,
        "rollouts_with_gradient": None,
        "tokens_trained": None,
        "rollouts_generated": planned.rounds * planned.generated,
        "tokens_generated": peer.rounds[-1].measures["num_tokens"],
        "bytes_sent": peer.bytes_sent,
        "bytes_received": peer.bytes_received,
        "seconds": None if own is None else own.total,
        "seconds_sampling": None if own is None else own.sampling,
        "seconds_exchange": None if own is None else own.exchange,
        "seconds_training": None if own is None else own.training,
        "seconds_waited": peer.seconds_waited,
    }
    if arm.collaborate:  # some of the others' rollouts may not have come
        for key, measure in (("rollouts_trained", "admitted"), ("rollouts_with_gradient", "kept")):
            totals[key] = float(sum(m.get(measure, 0) for row in peer.rounds for m in row.by_peer.values()))
    recorded = peer.rollouts_kept_and_tokens()
    if recorded is not None:
        totals["rollouts_with_gradient"], totals["tokens_trained"] = map(float, recorded)
    return totals
