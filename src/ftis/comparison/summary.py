"""The summary of one run: ``summary.json``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ftis.config import Recipe, TrainingConfig
from ftis.metric_keys import WAIT
from ftis.recipe.arms import arms_of
from ftis.records.files import write_json
from ftis.records.plan import SUMMARY
from ftis.records.reading import VALIDATION, EvaluationRow, PeerRun, Run, final_accuracy, own_seconds, read_run
from ftis.rewards.scoring import is_graded


def summarise(run: str | Path | Run) -> dict[str, Any]:
    """Summarise a run, read or in its directory, by arm and peer; also written there as ``summary.json``.

    Accuracies are shares in 0 … 1: ``start`` before training, ``final`` by :func:`ftis.records.reading.final_accuracy`,
    ``last`` the last evaluation alone; ``ood`` holds the same per out-of-distribution split. ``seconds`` count the
    peer's own work, without evaluation and without waiting for the others (``seconds_waited``).
    ``bytes_sent`` counts the offers to each of the others.

    Raises:
        RecordsError: no run is there.
    """
    run = run if isinstance(run, Run) else read_run(Path(run))
    recipe, arms = run.recipe, dict[str, Any]()
    for arm in arms_of(recipe):
        peers = {peer.name: run.peers[arm.name, peer.name] for peer in recipe.peers}
        started = {name: _of_peer(peer, arm.recipe.training) for name, peer in peers.items() if peer.evaluations}
        if started:
            arms[arm.name] = started
    summary = {"name": recipe.name, "seed": recipe.seed, "accuracy_is": accuracy_is(recipe), "arms": arms}
    write_json(run.directory / SUMMARY, summary)
    return summary


PASS_AT_1 = "greedy pass@1"


def accuracy_is(recipe: Recipe) -> str:
    """The name of a mean reward of greedy completions: pass@1 only if the built-in reward is 0 or 1."""
    binary = is_graded(recipe) and recipe.reward.format_weight is None and not recipe.reward.partial_credit
    return PASS_AT_1 if binary else "mean reward, greedy"


def somebody_learned_alone(runs: Iterable[Run]) -> bool:
    """Whether some peer of a collaborative arm used no foreign rollout in any round, though a round could have."""
    return any(peer.learned_alone for run in runs for peer in run.peers.values())


def _of_peer(peer: PeerRun, training: TrainingConfig) -> dict[str, Any]:
    last, best = peer.last, peer.best
    return {
        **_accuracies(peer.on(VALIDATION)),
        "ood": {split: _accuracies(peer.on(split)) for split in peer.splits if split != VALIDATION},
        "rounds": len(peer.rounds),
        "best_step": best,
        "model_step": best if best and training.load_best_model_at_end else peer.step,
        "seconds": sum(own_seconds(peer.rounds).values()),
        "seconds_waited": peer.total(WAIT),
        "tokens_sampled": last.get("tokens_sampled", 0),
        "bytes_sent": peer.bytes_sent,
        "bytes_received": peer.bytes_received,
        "collaborated": "foreign_used" in last,
        "foreign_used": int(peer.total("foreign_used")),
        "rounds_without_foreign": int(peer.total("without_foreign")),
    }


def _accuracies(evaluations: Sequence[EvaluationRow]) -> dict[str, Any]:
    return {
        "start": evaluations[0].accuracy,
        "final": final_accuracy(evaluations),
        "last": evaluations[-1].accuracy,
        "problems": evaluations[-1].problems,
    }
