"""The summary of one run: ``summary.json``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ftis.config import Recipe, TrainingConfig
from ftis.metric_keys import FOREIGN_USED, TOKENS_SAMPLED, WAIT, WITHOUT_FOREIGN
from ftis.recipe.arms import arms_of
from ftis.records.files import write_json
from ftis.records.plan import SUMMARY
from ftis.records.reading import VALIDATION, EvaluationRow, PeerRun, Run, final_accuracy, own_seconds, read_run
from ftis.rewards.scoring import is_graded


@dataclass(frozen=True)
class Accuracies:
    """Accuracies on one split, shares in 0 … 1.

    Attributes:
        start: before training.
        final: by :func:`ftis.records.reading.final_accuracy`.
        last: the last evaluation alone.
    """

    start: float
    final: float
    last: float
    problems: int


@dataclass(frozen=True)
class PeerSummary:
    """One peer of an arm. The fields are the peer's keys in ``summary.json``, in order.

    Attributes:
        start, final, last, problems: as :class:`Accuracies`, on validation.
        ood: by out-of-distribution split.
        seconds: of the peer's own work, without evaluation and without waiting for the others.
        bytes_sent: the offers to each of the others.
    """

    start: float
    final: float
    last: float
    problems: int
    ood: Mapping[str, Accuracies]
    rounds: int
    best_step: int
    model_step: int
    seconds: float
    seconds_waited: float
    tokens_sampled: int
    bytes_sent: int
    bytes_received: int
    collaborated: bool
    foreign_used: int
    rounds_without_foreign: int


@dataclass(frozen=True)
class Summary:
    """A run by arm and peer: ``summary.json``."""

    name: str
    seed: int
    accuracy_is: str
    arms: dict[str, dict[str, PeerSummary]]


def summarise(run: str | Path | Run) -> Summary:
    """Summarise a run, read or in its directory, by arm and peer; also written there as ``summary.json``.

    Raises:
        RecordsError: no run is there.
    """
    run = run if isinstance(run, Run) else read_run(Path(run))
    recipe, arms = run.recipe, dict[str, dict[str, PeerSummary]]()
    for arm in arms_of(recipe):
        peers = {peer.name: run.peers[arm.name, peer.name] for peer in recipe.peers}
        started = {name: _of_peer(peer, arm.recipe.training) for name, peer in peers.items() if peer.evaluations}
        if started:
            arms[arm.name] = started
    summary = Summary(recipe.name, recipe.seed, accuracy_is(recipe), arms)
    write_json(run.directory / SUMMARY, asdict(summary))
    return summary


PASS_AT_1 = "greedy pass@1"


def accuracy_is(recipe: Recipe) -> str:
    """The name of a mean reward of greedy completions: pass@1 only if the built-in reward is 0 or 1."""
    binary = is_graded(recipe) and recipe.reward.format_weight is None and not recipe.reward.partial_credit
    return PASS_AT_1 if binary else "mean reward, greedy"


def somebody_learned_alone(runs: Iterable[Run]) -> bool:
    """Whether some peer of a collaborative arm used no foreign rollout in any round, though a round could have."""
    return any(peer.learned_alone for run in runs for peer in run.peers.values())


def _of_peer(peer: PeerRun, training: TrainingConfig) -> PeerSummary:
    last, best = peer.last, peer.best
    return PeerSummary(
        **vars(_accuracies(peer.on(VALIDATION))),
        ood={split: _accuracies(peer.on(split)) for split in peer.splits if split != VALIDATION},
        rounds=len(peer.rounds),
        best_step=best,
        model_step=best if best and training.load_best_model_at_end else peer.step,
        seconds=sum(own_seconds(peer.rounds).values()),
        seconds_waited=peer.total(WAIT),
        tokens_sampled=last.get(TOKENS_SAMPLED, 0),
        bytes_sent=peer.bytes_sent,
        bytes_received=peer.bytes_received,
        collaborated=FOREIGN_USED in last,
        foreign_used=int(peer.total(FOREIGN_USED)),
        rounds_without_foreign=int(peer.total(WITHOUT_FOREIGN)),
    )


def _accuracies(evaluations: Sequence[EvaluationRow]) -> Accuracies:
    last = evaluations[-1]
    return Accuracies(evaluations[0].accuracy, final_accuracy(evaluations), last.accuracy, last.problems)
