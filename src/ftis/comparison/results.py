"""Compare the arms of an experiment, or of one run, with each of its baselines: ``results.json``.

A difference is *shown*, in every document, table and page, by one rule: p < .05 after Holm's correction for all
comparisons of the report. A report compares each peer and the mean over peers, on every split, with every baseline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from ftis.comparison import stats
from ftis.comparison.budgets import matched, spent
from ftis.comparison.summary import PASS_AT_1, accuracy_is
from ftis.recipe.arms import Arm
from ftis.records.files import read_json, write_json
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


def compare(records: str | Path | Study, notes: Sequence[str] = ()) -> dict[str, Any]:
    """Compare the arms of an experiment (or of a single run) with each baseline; also written as ``results.json``.

    Accuracies are shares in 0 … 1; intervals are Student's t over seeds at 95 %; null stands for an unknown, such as
    the interval of one seed.

    ==================  ===================================================================================
    seeds, left_out     the complete seeds, and why each other one is left out
    not_run             arms of the recipe that were not started
    elsewhere           peers of a joined run whose records are on their own machines
    curves              by split, arm and peer: per evaluated step the mean over seeds, interval, values, and what
                        the peer had spent itself by then: ``tokens`` sampled and ``seconds`` worked, each with mean
                        and value per seed, or null
    curves_of_mean      the same by split and arm, of the mean over peers
    accuracy_is         the measure: pass@1, or a mean reward
    accuracy            by split, arm and peer: ``start`` and ``final`` (the mean of the last evaluations),
                        each with mean, interval and value per seed
    accuracy_of_mean    by split and arm: ``final`` of the mean over peers, if there are several
    comparisons         per split, baseline, peer and arm that is no baseline: the ``equal`` budget in words; ``mean``
                        of differences by seed with interval, p of the t-test (``p_value``), ``p_adjusted`` by Holm's
                        method over ``comparisons`` and ``together``, and the verdict (``label``)
    together            the same of the mean over peers
    budget              by arm and peer: means over seeds of totals; ``seconds`` are the peer's own work
    matched             per baseline and arms: the ``equal`` budget, and a sentence about both budgets
    notes               cautions
    ==================  ===================================================================================

    Args:
        records: a directory, or the records read from one.
        notes: more cautions.

    Raises:
        RecordsError: neither an experiment nor a run is there, nothing was recorded yet, or a file is damaged.
    """
    study = records if isinstance(records, Study) else read_study(Path(records))
    results = compared(study)
    results["notes"] += notes
    write_json(study.directory / RESULTS, results)
    return results


def read_results(directory: Path) -> dict[str, Any]:
    """The results that :func:`compare` wrote.

    Raises:
        RecordsError: the file is absent or damaged.
    """
    return read_json(directory / RESULTS)


def compared(study: Study) -> dict[str, Any]:
    """The results of :func:`compare`, not written to a file."""

    def of_means(split: str, arm: str) -> dict[str, Any]:
        return over_seeds(dict(zip(map(str, study.seeds), mean_finals(study, split, arm), strict=True)))

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
    comparisons, together = _comparisons(study, equal)
    of_peers = _by_split_arm_peer(study, _curve)
    results: dict[str, Any] = {
        "name": recipe.name,
        "accuracy_is": measure,
        "title": recipe.experiment.title or recipe.name,
        "question": recipe.experiment.question,
        "baselines": list(baselines),
        "arms": [arm.name for arm in study.arms],
        "peers": list(study.peer_names),
        "elsewhere": list(study.elsewhere),
        "splits": list(study.splits),
        "seeds": list(study.seeds),
        "left_out": {str(seed): why for seed, why in study.left_out.items()},
        "not_run": list(study.not_run),
        "curves": of_peers,
        "curves_of_mean": {
            split: {arm: _mean_curve(list(by_peer.values())) for arm, by_peer in by_arm.items()}
            for split, by_arm in of_peers.items()
        },
        "accuracy": _by_split_arm_peer(study, _accuracy) if study.seeds else {},
        "accuracy_of_mean": {
            split: {arm.name: {"final": of_means(split, arm.name)} for arm in complete}
            for split in (study.splits if complete and len(study.peer_names) > 1 else ())
        },
        "comparisons": comparisons,
        "together": together,
        "budget": {arm.name: {peer: spent(study, arm, peer) for peer in study.peer_names} for arm in complete},
        "matched": equal,
        "notes": notes,
    }
    return dict(without_nan(results))


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
            measured = arm.recipe.peer(peer).model, arm.recipe.model_dump_json(include=MEASURED_BY)
            starts.setdefault(measured, {})[arm.name] = untrained.accuracy
        for (model, _), by_arm in starts.items():
            if max(by_arm.values()) - min(by_arm.values()) > SAME_START:
                each = ", ".join(f"{accuracy:.3f} in {arm}" for arm, accuracy in by_arm.items())
                notes.append(
                    f"{peer} did not start from one and the same {model} in all arms ({each}): its arms are no pairs; "
                    f"train them again"
                )
    return notes


def _by_split_arm_peer(study: Study, value_of: Any) -> dict[str, Any]:
    found: dict[str, Any] = {split: {arm.name: {} for arm in study.arms} for split in study.splits}
    for split, arm, peer in product(study.splits, study.arms, study.peer_names):
        found[split][arm.name][peer] = value_of(study, split, arm.name, peer)
    return found


def _curve(study: Study, split: str, arm: str, peer: str) -> list[dict[str, Any]]:
    runs = {str(seed): study.peer(seed, arm, peer) for seed in study.seeds_shown}
    at_step: dict[int, dict[str, float]] = {}
    for seed, run in runs.items():
        for row in run.on(split):
            at_step.setdefault(row.step, {})[seed] = row.accuracy
    return [
        {
            "step": step,
            **over_seeds(values),
            "tokens": _mean_of({seed: runs[seed].spent_by(step)[0] for seed in values}),
            "seconds": _mean_of({seed: runs[seed].spent_by(step)[1] for seed in values}),
        }
        for step, values in sorted(at_step.items())
    ]


def _mean_curve(curves: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The mean over peers, at the steps and seeds at which all were evaluated."""
    points = []
    for step in sorted(set.intersection(*({point["step"] for point in curve} for curve in curves))):
        at_step = [next(point for point in curve if point["step"] == step) for curve in curves]
        seeds = [seed for seed in at_step[0]["per_seed"] if all(seed in point["per_seed"] for point in at_step)]

        def means(values: Sequence[Mapping[str, Any]], seeds: Sequence[str] = seeds) -> dict[str, float]:
            return {seed: fmean(point["per_seed"][seed] for point in values) for seed in seeds}

        if seeds:
            found = {"step": step, **over_seeds(means(at_step))}
            for key in ("tokens", "seconds"):
                spent = [point[key] for point in at_step]
                found[key] = _mean_of(means(spent)) if all(spent) else None
            points.append(found)
    return points


def _mean_of(per_seed: Mapping[str, float | None]) -> dict[str, Any] | None:
    """The mean and the value of each seed; None if a seed lacks one."""
    known = {seed: value for seed, value in per_seed.items() if value is not None}
    return {"mean": fmean(known.values()), "per_seed": known} if len(known) == len(per_seed) else None


def _accuracy(study: Study, split: str, arm: str, peer: str) -> dict[str, Any]:
    rows = {str(seed): study.peer(seed, arm, peer).on(split) for seed in study.seeds}
    return {
        "problems": max(of_seed[-1].problems for of_seed in rows.values()),
        "start": over_seeds({seed: of_seed[0].accuracy for seed, of_seed in rows.items()}),
        "final": over_seeds({seed: final_accuracy(of_seed) for seed, of_seed in rows.items()}),
    }


def over_seeds(per_seed: dict[str, float]) -> dict[str, Any]:
    """A value for each seed, with their mean and its interval."""
    interval = stats.mean_interval(list(per_seed.values()))
    return {"mean": interval.mean, "low": interval.low, "high": interval.high, "per_seed": per_seed}


def _comparisons(study: Study, equal: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Every arm that is no baseline against each baseline, of each peer and of their mean; all are one family."""
    if not study.seeds:
        return [], []
    planned = [
        {"split": split, "arm": arm, "baseline": plan["baseline"], "equal": plan["equal"]}
        for split in study.splits
        for plan in equal
        for arm in plan["arms"]
    ]
    of_peers = [{**c, "peer": peer} for c in planned for peer in study.peer_names]
    of_means = planned if len(study.peer_names) > 1 and not study.elsewhere else []

    def values(c: Mapping[str, Any], arm: str) -> Sequence[float]:
        return finals(study, c["split"], arm, c["peer"]) if "peer" in c else mean_finals(study, c["split"], arm)

    tested = differences_of(study, [*of_peers, *of_means], values)
    return tested[: len(of_peers)], tested[len(of_peers) :]


def differences_of(
    study: Study, compared: Sequence[Mapping[str, Any]], values_of: Callable[[Mapping[str, Any], str], Sequence[float]]
) -> list[dict[str, Any]]:
    """Each comparison with the difference of its ``arm`` from its ``baseline`` and a verdict, as one family.

    Args:
        values_of: (comparison, arm) → the arm's values there, seed by seed.
    """
    found, differences = [], []
    for c in compared:
        treatment, control = values_of(c, c["arm"]), values_of(c, c["baseline"])
        differences.append(stats.paired_difference(treatment, control))
        per_seed = {str(seed): t - b for seed, t, b in zip(study.seeds, treatment, control, strict=True)}
        found.append({**c, **asdict(differences[-1]), "per_seed": per_seed})
    for c, difference, p in zip(found, differences, stats.holm([d.p_value for d in differences]), strict=True):
        c |= {"p_adjusted": p, "label": stats.verdict(difference, p)}
    return found


def finals(study: Study, split: str, arm: str, peer: str) -> list[float]:
    """A peer's final accuracies, seed by seed."""
    return [final_accuracy(study.peer(seed, arm, peer).on(split)) for seed in study.seeds]


def mean_finals(study: Study, split: str, arm: str) -> list[float]:
    """The mean over peers of their final accuracies, seed by seed."""
    of_peers = [finals(study, split, arm, peer) for peer in study.peer_names]
    return list(map(fmean, zip(*of_peers, strict=True)))


def without_nan(value: Any) -> Any:
    """``value`` with None for nan, which JSON does not know."""
    if isinstance(value, dict):
        return {key: without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [without_nan(inner) for inner in value]
    return None if isinstance(value, float) and math.isnan(value) else value
