"""The summary of one run: ``summary.json``, and cautions for the readers of its table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ftis.config import Recipe, RewardConfig
from ftis.metric_keys import by_peer
from ftis.recipe.arms import arm_configs
from ftis.records.files import write_json
from ftis.records.reading import VALIDATION, EvaluationRow, PeerRun, Run, final_accuracy, read_run


def summarise(run: str | Path) -> dict[str, Any]:
    """Summarise a run directory by arm and peer; also written there as ``summary.json``.

    Accuracies are shares in 0 … 1: ``start`` before training, ``final`` by :func:`ftis.records.reading.final_accuracy`,
    ``last`` the last evaluation alone; ``ood`` holds the same per out-of-distribution split. ``seconds`` count the
    peer's own work, without evaluation and without waiting for the others (``seconds_waited``).
    ``bytes_sent`` counts the offers to each of the others.

    Raises:
        RecordsError: no run is there.
    """
    return summarise_run(read_run(Path(run)))


def summarise_run(run: Run) -> dict[str, Any]:
    """The same, of a run that was read."""
    summary = summary_of(run)
    write_json(run.directory / "summary.json", summary)
    return summary


def summary_of(run: Run) -> dict[str, Any]:
    """The same, of a run that was read, written nowhere."""
    arms: dict[str, Any] = {}
    for arm in arm_configs(run.recipe):
        peers = {peer.name: run.peers[arm.name, peer.name] for peer in run.recipe.peers}
        started = {name: _of_peer(peer) for name, peer in peers.items() if peer.evaluations}
        if started:
            arms[arm.name] = started
    return {"name": run.recipe.name, "seed": run.recipe.seed, "accuracy_is": accuracy_is(run.recipe), "arms": arms}


PASS_AT_1 = "greedy pass@1"


def accuracy_is(recipe: Recipe) -> str:
    """The name of a mean reward of greedy completions: pass@1 only if the built-in reward is 0 or 1."""
    reward, built_in = recipe.reward, RewardConfig().function
    binary = reward.function == built_in and reward.format_weight is None and not reward.partial_credit
    return PASS_AT_1 if binary else "mean reward, greedy"


def warnings(summary: Mapping[str, Any]) -> list[str]:
    """Cautions: peers that used nothing of the others, and peers that never learned."""
    notes = []
    for arm, peers in summary["arms"].items():
        without = [
            f"{name} in {peer['rounds_without_foreign']} of {peer['rounds']} rounds"
            for name, peer in peers.items()
            if peer["collaborated"] and peer["rounds_without_foreign"]
        ]
        if without:
            why = sorted({reason for peer in peers.values() for reason in peer["why_without_foreign"]})
            notes.append(f"{arm}: no foreign rollout was used by {', '.join(without)} ({', '.join(why)})")
        for name, peer in peers.items():
            rounds = peer["rounds"]
            if rounds and peer["rounds_without_signal"] == rounds:
                notes.append(
                    f"{arm}/{name} never learned: in every group all rewards were equal "
                    f"(mean reward {peer['reward']:.3f})"
                )
    return notes


def somebody_learned_alone(summary: Mapping[str, Any]) -> bool:
    """Whether some peer of a collaborative arm used no foreign rollout in any round."""
    peers = [p for arm in summary["arms"].values() for p in arm.values() if p["collaborated"] and p["rounds"]]
    return any(p["rounds_without_foreign"] == p["rounds"] for p in peers)


def unused(own: str, metrics: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    """The reasons why a round of ``own`` used nothing of others: (name, reason, number of rollouts; 0: all)."""
    for name, measures in by_peer(metrics).items():
        if name == own:
            continue
        if measures.get("honesty/quarantined"):
            yield name, f"in quarantine since round {measures['honesty/found_in_round']}, for its log-probabilities", 0
            continue
        if not (measures.get("delivered") or measures.get("late")):
            yield name, "nothing came", 0
        elif not any(measures.get(key) for key in ("admitted", "rejected", "dropped", "passed_over")):
            yield name, "offered no groups", 0
        for measure, value in measures.items():
            kind, _, reason = measure.partition("/")
            if kind in ("rejected", "dropped") and reason and value:
                yield name, f"{kind} for {reason}", value
        if measures.get("passed_over"):
            yield name, "passed over by the limit", measures["passed_over"]
        if measures.get("admitted") and measures.get("zero_advantage") == measures["admitted"]:
            yield name, "in each of its groups all rewards are equal", 0


def _of_peer(peer: PeerRun) -> dict[str, Any]:
    last = peer.last
    without = [row.measures for row in peer.rounds if row.measures.get("without_foreign")]
    return {
        **_accuracies(peer.on(VALIDATION)),
        "ood": {split: _accuracies(peer.on(split)) for split in peer.splits if split != VALIDATION},
        "rounds": len(peer.rounds),
        "step": peer.step,
        "seconds": peer.own_seconds.total,
        "seconds_waited": peer.seconds_waited,
        "reward": last.get("reward", 0.0),
        "tokens_sampled": last.get("tokens_sampled", 0),
        "bytes_sent": peer.bytes_sent,
        "bytes_received": peer.bytes_received,
        "collaborated": "foreign_used" in last,
        "foreign_used": int(peer.total("foreign_used")),
        "rounds_without_foreign": len(without),
        "why_without_foreign": sorted({f"{name}: {why}" for row in without for name, why, _ in unused(peer.name, row)}),
        "rounds_without_signal": sum(row.measures["frac_reward_zero_std"] == 1 for row in peer.rounds),
    }


def _accuracies(evaluations: Sequence[EvaluationRow]) -> dict[str, Any]:
    return {
        "start": evaluations[0].accuracy,
        "final": final_accuracy(evaluations),
        "last": evaluations[-1].accuracy,
        "problems": evaluations[-1].problems,
    }
