"""Compare the arms of an experiment, or of one run, with each of its baselines: ``results.json``.

A difference is *shown*, in every document, table and page, by one rule: p < .05 after Holm's correction for all
comparisons of the report. A report compares each peer and the mean over peers, on every split, with every baseline.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from ftis.comparison import stats
from ftis.comparison.budgets import Matched, matched, spent
from ftis.comparison.summary import PASS_AT_1, accuracy_is
from ftis.comparison.values import Accuracy, Amount, Comparison, CurvePoint, StudyResults, Value
from ftis.recipe.arms import Arm
from ftis.records.files import write_json
from ftis.records.plan import RESULTS
from ftis.records.reading import VALIDATION, Study, final_accuracy, read_study

SAME_START = 0.02
"""The untrained model's accuracy may differ between arms by this much, by rounding alone."""

MEASURED_BY: Any = {
    "task": True,
    "prompt": True,
    "reward": True,
    "sampling": {"max_completion_length", "stop", "end_tokens"},
}
"""The keys that decide an untrained model's accuracy."""


def compare(records: str | Path | Study, notes: Sequence[str] = ()) -> StudyResults:
    """Compare the arms of an experiment (or of a single run) with each baseline; also written as ``results.json``.

    Args:
        records: a directory, or the records read from one.
        notes: more cautions.

    Raises:
        RecordsError: neither an experiment nor a run is there, nothing was recorded yet, or a file is damaged.
    """
    study = records if isinstance(records, Study) else read_study(Path(records))
    results = compared(study, notes)
    write_json(study.directory / RESULTS, results.as_json())
    return results


def compared(study: Study, more_notes: Sequence[str] = ()) -> StudyResults:
    """The results of :func:`compare`, not written to a file."""
    recipe, baselines = study.recipe, study.baselines
    equal = matched(study.arms, baselines)
    notes = [
        f"seed {seed}: {note}" if len(study.runs) > 1 else note
        for seed in study.seeds
        for note in _unequal_starts(study, seed)
    ]
    complete = study.arms if study.seeds else ()
    if (measure := accuracy_is(recipe)) != PASS_AT_1:
        notes.append(
            "by reward.function, reward.format_weight or reward.partial_credit a reward may be other than 0 and 1: "
            "accuracies are the mean reward of greedy completions"
        )
    notes += _other_measures(study.arms)
    comparisons = _comparisons(study, equal)
    arms, peers = [arm.name for arm in study.arms], study.peer_names
    curves = {s: {arm: {peer: _curve(study, s, arm, peer) for peer in peers} for arm in arms} for s in study.splits}
    return StudyResults(
        name=recipe.name,
        accuracy_is=measure,
        title=recipe.experiment.title or recipe.name,
        question=recipe.experiment.question,
        baselines=baselines,
        arms=arms,
        peers=peers,
        elsewhere=study.elsewhere,
        splits=study.splits,
        seeds=study.seeds,
        left_out=study.left_out,
        not_run=study.not_run,
        curves=curves,
        curves_of_mean={
            split: {arm: _mean_curve(list(by_peer.values())) for arm, by_peer in by_arm.items()}
            for split, by_arm in curves.items()
        },
        accuracy={
            split: {arm: {peer: _accuracy(study, split, arm, peer) for peer in peers} for arm in arms}
            for split in (study.splits if study.seeds else ())
        },
        accuracy_of_mean={
            split: {arm.name: over_seeds(finals(study, split, arm.name)) for arm in complete}
            for split in (study.splits if complete and len(peers) > 1 else ())
        },
        comparisons=[c for c in comparisons if c.peer is not None],
        together=[c for c in comparisons if c.peer is None],
        budget={arm.name: {peer: spent(study, arm, peer) for peer in peers} for arm in complete},
        matched=equal,
        notes=[*notes, *more_notes],
    )


def _other_measures(arms: Sequence[Arm]) -> list[str]:
    """A note for each section with a key of :data:`MEASURED_BY` that arms set: their accuracies differ in kind."""
    notes = []
    for key, measured in MEASURED_BY.items():
        by_value: dict[str, list[str]] = {}
        for arm in arms:
            by_value.setdefault(arm.recipe.model_dump_json(include={key: measured}), []).append(arm.name)
        if len(by_value) > 1:
            alike = " | ".join(", ".join(names) for names in by_value.values())
            notes.append(f"arms differ in [{key}] ({alike}): accuracies are comparable within a group only")
    return notes


def _unequal_starts(study: Study, seed: int) -> list[str]:
    """A note for each peer whose arms began with different models although the recipe names one."""
    notes = []
    for peer in study.peer_names:
        starts: dict[tuple[str, str], dict[str, float]] = {}
        for arm in study.arms:
            untrained = study.peer(seed, arm.name, peer).on(VALIDATION)[0]
            of_peer = arm.recipe.peer(peer)
            loaded = of_peer.model_dump_json(include={"dtype", "frozen_dtype"})
            measured = of_peer.model, loaded + arm.recipe.model_dump_json(include=MEASURED_BY)
            starts.setdefault(measured, {})[arm.name] = untrained.accuracy
        for (model, _), by_arm in starts.items():
            if max(by_arm.values()) - min(by_arm.values()) > SAME_START:
                each = ", ".join(f"{accuracy:.3f} in {arm}" for arm, accuracy in by_arm.items())
                notes.append(
                    f"{peer} did not start from one and the same {model} in all arms ({each}): its arms are no pairs; "
                    f"train them again"
                )
    return notes


def _curve(study: Study, split: str, arm: str, peer: str) -> list[CurvePoint]:
    runs = {seed: study.peer(seed, arm, peer) for seed in study.seeds_shown}
    at_step: dict[int, dict[int, float]] = {}
    for seed, run in runs.items():
        for row in run.on(split):
            at_step.setdefault(row.step, {})[seed] = row.accuracy
    return [
        CurvePoint(
            step,
            **vars(over_seeds(values)),
            tokens=_mean_of({seed: runs[seed].spent_by(step)[0] for seed in values}),
            seconds=_mean_of({seed: runs[seed].spent_by(step)[1] for seed in values}),
        )
        for step, values in sorted(at_step.items())
    ]


def _mean_curve(curves: Sequence[Sequence[CurvePoint]]) -> list[CurvePoint]:
    """The mean over peers, at the steps and seeds at which all were evaluated."""
    points = []
    for step in sorted(set.intersection(*({point.step for point in curve} for curve in curves))):
        at_step = [next(point for point in curve if point.step == step) for curve in curves]
        seeds = [seed for seed in at_step[0].per_seed if all(seed in point.per_seed for point in at_step)]
        if seeds:
            accuracy = over_seeds(_over_peers(at_step, seeds))
            tokens, seconds = (
                _mean_of(_over_peers(amounts, seeds)) if all(amounts) else None
                for amounts in ([point.tokens for point in at_step], [point.seconds for point in at_step])
            )
            points.append(CurvePoint(step, **vars(accuracy), tokens=tokens, seconds=seconds))
    return points


def _over_peers(of_peers: Sequence[CurvePoint | Amount | None], seeds: Sequence[int]) -> dict[int, float]:
    """The mean over peers, by seed."""
    return {seed: fmean(one.per_seed[seed] for one in of_peers if one) for seed in seeds}


def _mean_of(per_seed: Mapping[int, float | None]) -> Amount | None:
    """The mean and the value of each seed; None if a seed lacks one."""
    known = {seed: value for seed, value in per_seed.items() if value is not None}
    return Amount(fmean(known.values()), known) if len(known) == len(per_seed) else None


def _accuracy(study: Study, split: str, arm: str, peer: str) -> Accuracy:
    rows = {seed: study.peer(seed, arm, peer).on(split) for seed in study.seeds}
    return Accuracy(
        problems=max(of_seed[-1].problems for of_seed in rows.values()),
        start=over_seeds({seed: of_seed[0].accuracy for seed, of_seed in rows.items()}),
        final=over_seeds(finals(study, split, arm, peer)),
    )


def over_seeds(per_seed: Mapping[int, float]) -> Value:
    """A value for each seed, with their mean and its interval."""
    return Value(**without_nan(vars(stats.mean_interval(list(per_seed.values())))), per_seed=per_seed)


def _comparisons(study: Study, equal: Sequence[Matched]) -> list[Comparison]:
    """Every arm that is no baseline against each baseline, of each peer and of their mean; all are one family."""
    peers: list[str | None] = [*study.peer_names]
    if len(peers) > 1 and not study.elsewhere:
        peers.append(None)
    planned = [
        (split, arm, plan.baseline, plan.equal, peer)
        for split, plan in product(study.splits if study.seeds else (), equal)
        for arm, peer in product(plan.arms, peers)
    ]
    pairs = []
    for split, arm, baseline, _, peer in planned:
        of = () if peer is None else (peer,)
        pairs.append((finals(study, split, arm, *of), finals(study, split, baseline, *of)))
    return [Comparison(*one, **found) for one, found in zip(planned, differences(pairs), strict=True)]


def differences(pairs: Sequence[tuple[Mapping[int, float], Mapping[int, float]]]) -> list[dict[str, Any]]:
    """The fields of a :class:`Comparison` from ``mean`` on, for each pair; all pairs are one family of tests.

    Args:
        pairs: an arm's values by seed, and a baseline's.
    """
    found = [
        (stats.paired_difference(list(arm.values()), list(baseline.values())), {s: arm[s] - baseline[s] for s in arm})
        for arm, baseline in pairs
    ]
    adjusted = stats.holm([difference.p_value for difference, _ in found])
    return [
        without_nan(vars(difference)) | {"per_seed": per_seed, "p_adjusted": p, "label": stats.verdict(difference, p)}
        for (difference, per_seed), p in zip(found, adjusted, strict=True)
    ]


def finals(study: Study, split: str, arm: str, *peers: str) -> dict[int, float]:
    """The final accuracy by seed: the mean over these peers, or over all."""
    names = peers or study.peer_names
    each = {seed: [study.peer(seed, arm, peer).on(split) for peer in names] for seed in study.seeds}
    return {seed: fmean(map(final_accuracy, of_peers)) for seed, of_peers in each.items()}


def without_nan(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with None for nan, which JSON does not know."""
    return {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in values.items()}
