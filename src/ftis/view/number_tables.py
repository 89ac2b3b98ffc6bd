"""The page's tables of numbers: accuracy with its tests, budgets and cost, probes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ftis.check.formatting import amount, counted, number, p_text, seconds_text, true_minus
from ftis.comparison.budgets import mean_spent
from ftis.records.reading import Probe, Study
from ftis.view.drawing import Style
from ftis.view.views import MOST_UNFOLDED, ArmLabel, Cell, Row, RowGroup, Table, split_heading, with_interval

NOTHING = Cell("–")
SHOWN = ("better", "worse")
"""The verdicts that a difference is shown."""

MOST_PEER_COLUMNS = 8
"""More peers would make the table of means wider than a page."""


OF_ROLLOUTS = ("Rounds", "Trained on", "With gradient", "Generated", "Tokens trained on", "Tokens generated")
OF_TIME = ("Sampling", "Exchange", "Training", "Own seconds", "Waited", "MB sent", "MB received")
"""Headings of what a peer spent."""


@dataclass(frozen=True)
class SplitAccuracy:
    """The accuracy on one split.

    Attributes:
        means: of the mean over peers; None where there is one peer, or nothing is compared.
        folded: whether the peers' own table is shown on request only, as they are many.
    """

    heading: str
    means: Table | None
    table: Table
    folded: bool


@dataclass(frozen=True)
class Accuracy:
    """A table per split; ``compared`` says whether they have tests, ``seeds`` has every seed's numbers."""

    compared: bool
    splits: Sequence[SplitAccuracy]
    seeds: Table


@dataclass(frozen=True)
class Cost:
    """What each peer spent; ``matched`` are sentences on what arms have as much of.

    Attributes:
        collaborative: whether an arm's peers learn together, so that joining can have saved something.
        means: of rollouts, and of seconds and bytes, over many peers, whose own tables are shown on request only; empty
            where they are few.
    """

    matched: Sequence[str]
    collaborative: bool
    means: Sequence[Table]
    rollouts: Table
    seconds: Table


def accuracy(results: Mapping[str, Any], styles: Mapping[str, Style]) -> Accuracy | None:
    """None while no seed is finished."""
    if not results["seeds"]:
        return None
    splits = []
    for s in results["splits"]:
        means = _means_table(results, s, styles)
        folded = means is not None and len(results["peers"]) > MOST_UNFOLDED
        splits.append(SplitAccuracy(split_heading(s), means, _accuracy_table(results, s, styles), folded))
    return Accuracy(bool(results["comparisons"]), splits, _seeds_table(results, styles))


def _means_table(results: Mapping[str, Any], split: str, styles: Mapping[str, Style]) -> Table | None:
    """A row per arm: each peer's final accuracy where they are few, their mean, and its distance from each baseline."""
    compared = {(c["arm"], c["baseline"]): c for c in results["together"] if c["split"] == split}
    if not compared:
        return None
    peers, baselines = results["peers"], results["baselines"]
    shown = peers if len(peers) <= MOST_PEER_COLUMNS else []
    rows: list[Row] = []
    for arm, measured in results["accuracy"][split].items():
        start = fmean(measured[peer]["start"]["mean"] for peer in peers)
        rows.append(
            [
                _arm(arm, styles),
                Cell(number(start)),
                *(Cell(number(measured[peer]["final"]["mean"])) for peer in shown),
                with_interval(results["accuracy_of_mean"][split][arm]["final"]),
                *(_difference(compared.get((arm, baseline))) for baseline in baselines),
            ]
        )
    head = ["Arm", "Start", *shown, "Mean", *(f"Against {baseline}" for baseline in baselines)]
    return Table(f"Mean over {len(peers)} peers on {split}", head, [RowGroup(None, rows)])


def _difference(comparison: Mapping[str, Any] | None) -> Cell:
    if comparison is None:
        return Cell()
    return with_interval(comparison, "+", strong=comparison["label"] in SHOWN)


def _accuracy_table(results: Mapping[str, Any], split: str, styles: Mapping[str, Style]) -> Table:
    """A row per arm and baseline; an arm's own accuracy stands in the first of its rows."""
    head = ["Arm", "Start", "Final"]
    if results["comparisons"]:
        head += ["Against", "Difference", "p", "p, Holm", "p, flips", "Detectable", "Problems"]
    groups = []
    for peer in results["peers"]:
        rows: list[Row] = []
        for arm in results["arms"]:
            measured = results["accuracy"][split][arm][peer]
            own = [Cell(number(measured["start"]["mean"])), with_interval(measured["final"])]
            compared = [c for c in results["comparisons"] if (c["split"], c["peer"], c["arm"]) == (split, peer, arm)]
            for c in compared:
                rows.append([_arm(arm, styles), *own, _arm(c["baseline"], styles), *_test_cells(c)])
                own = [Cell(), Cell()]
            if not compared:
                rows.append([_arm(arm, styles), *own, *[Cell()] * (len(head) - 3)])
        groups.append(RowGroup(peer, rows))
    problems = max(of["problems"] for by_peer in results["accuracy"][split].values() for of in by_peer.values())
    return Table(f"Accuracy on {split}, {problems} problems", head, groups)


def _test_cells(comparison: Mapping[str, Any]) -> list[Cell]:
    shown = comparison["label"] in SHOWN
    return [
        _difference(comparison),
        Cell(p_text(comparison["p_value"])),
        Cell(p_text(comparison["p_adjusted"]), strong=shown),
        Cell(p_text(comparison["flips_p"])),
        Cell(number(comparison["smallest_detectable"])),
        Cell(_mcnemar(comparison["mcnemar"])),
    ]


def _mcnemar(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return "–"
    up = sum(r["p_adjusted"] < 0.05 and r["only_arm"] > r["only_baseline"] for r in rows)
    down = sum(r["p_adjusted"] < 0.05 and r["only_arm"] < r["only_baseline"] for r in rows)
    return f"{up} ↑ {down} ↓ of {len(rows)}"


def _seeds_table(results: Mapping[str, Any], styles: Mapping[str, Style]) -> Table:
    head = ["Arm", "Split", "Seed", "Start", "Final"]
    if results["comparisons"]:
        head += ["Against", "Difference", "Only arm right", "Only the other right", "p, Holm"]
    groups = []
    for peer in results["peers"]:
        rows: list[Row] = []
        for split in results["splits"]:
            for arm in results["arms"]:
                measured = results["accuracy"][split][arm][peer]
                compared = [
                    c for c in results["comparisons"] if (c["split"], c["peer"], c["arm"]) == (split, peer, arm)
                ]
                for seed, final in measured["final"]["per_seed"].items():
                    own = [split, seed, number(measured["start"]["per_seed"][seed]), number(final)]
                    for c in compared:
                        cells = [_arm(c["baseline"], styles), *map(Cell, _seed_texts(c, seed))]
                        rows.append([_arm(arm, styles), *map(Cell, own), *cells])
                    if not compared:
                        rows.append([_arm(arm, styles), *map(Cell, own), *[Cell()] * (len(head) - 5)])
        groups.append(RowGroup(peer, rows))
    return Table("Each seed", head, groups)


def _seed_texts(comparison: Mapping[str, Any], seed: str) -> list[str]:
    """One seed's difference from a baseline, and McNemar's counts and p where its final models were paired."""
    difference = true_minus(number(comparison["per_seed"][seed], "+"))
    test = next((t for t in comparison["mcnemar"] if str(t["seed"]) == seed), None)
    if test is None:
        return [difference, "", "", ""]
    return [difference, str(test["only_arm"]), str(test["only_baseline"]), p_text(test["p_adjusted"])]


def cost(study: Study, results: Mapping[str, Any], styles: Mapping[str, Style]) -> Cost | None:
    """None while no seed is finished."""
    if not results["seeds"]:
        return None
    budget, arms, peers = results["budget"], results["arms"], results["peers"]
    of_peers = {peer: {arm: budget[arm][peer] for arm in arms} for peer in peers}
    rollouts, seconds = _spent_tables("means over seeds", of_peers, styles)
    means: Sequence[Table] = []
    if len(peers) > MOST_UNFOLDED:
        of_mean: dict[str | None, Any] = {None: {arm: mean_spent(list(budget[arm].values())) for arm in arms}}
        means = _spent_tables(f"means over seeds and {len(peers)} peers", of_mean, styles)
    together = any(arm.collaborate for arm in study.arms) and study.recipe.swarm_size > 1
    return Cost([matched["text"] for matched in results["matched"]], together, means, rollouts, seconds)


def _spent_tables(
    means: str, spent: Mapping[str | None, Mapping[str, Mapping[str, Any]]], styles: Mapping[str, Style]
) -> list[Table]:
    """What was spent of rollouts, and of seconds and bytes: under each title a row per arm."""
    captions = {"Rollouts per round, tokens over all rounds": OF_ROLLOUTS, "Seconds and bytes over all rounds": OF_TIME}
    tables = []
    for caption, columns in captions.items():
        groups = []
        for title, by_arm in spent.items():
            rows = []
            for arm, of_arm in by_arm.items():
                texts = _spent_texts(of_arm)
                rows.append([_arm(arm, styles), *(Cell(texts[name]) for name in columns)])
            groups.append(RowGroup(title, rows))
        tables.append(Table(f"{caption}; {means}", ["Arm", *columns], groups))
    return tables


def _spent_texts(spent: Mapping[str, Any]) -> dict[str, str]:
    """What a peer spent, by the heading of its column."""
    return {
        "Rounds": amount(spent["rounds"]),
        "Trained on": amount(spent["rollouts_trained"], spent["rounds"]),
        "With gradient": amount(spent["rollouts_with_gradient"], spent["rounds"]),
        "Generated": amount(spent["rollouts_generated"], spent["rounds"]),
        "Tokens trained on": amount(spent["tokens_trained"]),
        "Tokens generated": amount(spent["tokens_generated"]),
        "Sampling": seconds_text(spent["seconds_sampling"]),
        "Exchange": seconds_text(spent["seconds_exchange"]),
        "Training": seconds_text(spent["seconds_training"]),
        "Own seconds": seconds_text(spent["seconds"]),
        "Waited": seconds_text(spent["seconds_waited"]),
        "MB sent": f"{spent['bytes_sent'] / 1e6:.2f}",
        "MB received": f"{spent['bytes_received'] / 1e6:.2f}",
    }


def probes(found: Sequence[Probe]) -> list[Table] | None:
    """A table of each; None where no probe was made."""
    return [_probe_table(probe) for probe in found] or None


def _probe_table(probe: Probe) -> Table:
    """A row per objective below the ceiling."""
    measures = list(dict.fromkeys(measure for values in probe.objectives.values() for measure in values))
    named = [("own batch (ceiling)", probe.ceiling), *probe.objectives.items()]
    rows = [[Cell(name), *(_estimate(values.get(measure)) for measure in measures)] for name, values in named]
    title = f"{probe.arm}, {probe.peer}, after {counted(probe.step, 'round')}"
    if probe.sources:
        title += f": {probe.rollouts} rollouts of {', '.join(probe.sources)}"
    head = ["Objective", *(measure.replace("_", " ").capitalize() for measure in measures)]
    return Table(title, head, [RowGroup(None, rows)])


def _estimate(value: Mapping[str, float | None] | float | None) -> Cell:
    if value is None:
        return NOTHING
    if isinstance(value, Mapping):
        if value["value"] is None:
            return NOTHING
        return with_interval({"mean": value["value"], "low": value.get("low"), "high": value.get("high")})
    return Cell(true_minus(number(value)) if isinstance(value, float) else str(value))


def _arm(name: str, styles: Mapping[str, Style]) -> Cell:
    return Cell(arm=ArmLabel(name, styles[name].ink))
