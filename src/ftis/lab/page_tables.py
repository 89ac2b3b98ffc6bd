"""The page's tables of numbers: accuracy with its tests, budgets and cost, probes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ftis.lab.drawing import Style
from ftis.lab.formatting import amount, counted, number, p_text, true_minus
from ftis.lab.reading import Probe
from ftis.lab.views import ArmLabel, Cell, Row, RowGroup, Table, split_heading, with_interval

NOTHING = Cell("–")


@dataclass(frozen=True)
class SplitAccuracy:
    heading: str
    table: Table


@dataclass(frozen=True)
class Accuracy:
    """A table per split; ``compared`` says whether they have tests, ``seeds`` has every seed's numbers."""

    compared: bool
    splits: Sequence[SplitAccuracy]
    seeds: Table


@dataclass(frozen=True)
class Cost:
    """What each peer spent; ``matched`` are sentences on what arms have as much of."""

    matched: Sequence[str]
    table: Table


@dataclass(frozen=True)
class Probes:
    probes: Sequence[Table]


def accuracy(results: Mapping[str, Any], styles: Mapping[str, Style]) -> Accuracy | None:
    """None while no seed is finished."""
    if not results["seeds"]:
        return None
    splits = [SplitAccuracy(split_heading(s), _accuracy_table(results, s, styles)) for s in results["splits"]]
    return Accuracy(bool(results["comparisons"]), splits, _seeds_table(results, styles))


def _accuracy_table(results: Mapping[str, Any], split: str, styles: Mapping[str, Style]) -> Table:
    baseline = results["baseline"]
    head = ["Arm", "Start", "Final"]
    if baseline:
        head += [f"− {baseline}", "p", "p, Holm", "p, sign flips", "Detectable", "Problems"]
    comparisons = {(c["peer"], c["arm"]): c for c in results["comparisons"] if c["split"] == split}
    groups = []
    for peer in results["peers"]:
        rows: list[Row] = []
        for arm in results["arms"]:
            measured = results["accuracy"][split][arm][peer]
            row = [_arm(arm, styles), Cell(number(measured["start"]["mean"])), with_interval(measured["final"])]
            if (peer, arm) in comparisons:
                row += _test_cells(comparisons[peer, arm])
            elif baseline:
                row += [Cell(interval="baseline"), *[Cell()] * 5]
            rows.append(row)
        groups.append(RowGroup(peer, rows))
    problems = max(of["problems"] for by_peer in results["accuracy"][split].values() for of in by_peer.values())
    return Table(f"Accuracy on {split}, {problems} problems", head, groups)


def _test_cells(comparison: Mapping[str, Any]) -> list[Cell]:
    shown = comparison["label"] in ("better", "worse")
    return [
        with_interval(comparison, "+", strong=shown),
        Cell(p_text(comparison["p_value"])),
        Cell(p_text(comparison["p_adjusted"]), strong=shown),
        Cell(p_text(comparison["bootstrap_p"])),
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
    baseline = results["baseline"]
    head = ["Arm", "Split", "Seed", "Start", "Final"]
    if baseline:
        head += [f"− {baseline}", "Only arm right", "Only baseline right", "p, Holm"]
    comparisons = {(c["split"], c["peer"], c["arm"]): c for c in results["comparisons"]}
    groups = []
    for peer in results["peers"]:
        rows: list[Row] = []
        for split in results["splits"]:
            for arm in results["arms"]:
                measured = results["accuracy"][split][arm][peer]
                comparison = comparisons.get((split, peer, arm))
                for seed, final in measured["final"]["per_seed"].items():
                    texts = [split, seed, number(measured["start"]["per_seed"][seed]), number(final)]
                    if baseline:
                        texts += _seed_texts(comparison, seed)
                    rows.append([_arm(arm, styles), *map(Cell, texts)])
        groups.append(RowGroup(peer, rows))
    return Table("Each seed", head, groups)


def _seed_texts(comparison: Mapping[str, Any] | None, seed: str) -> list[str]:
    """One seed's difference from the baseline, and McNemar's counts and p where its final models were paired."""
    if comparison is None:
        return [""] * 4
    difference = true_minus(number(comparison["per_seed"][seed], "+"))
    test = next((t for t in comparison["mcnemar"] if str(t["seed"]) == seed), None)
    if test is None:
        return [difference, "", "", ""]
    return [difference, str(test["only_arm"]), str(test["only_baseline"]), p_text(test["p_adjusted"])]


def cost(results: Mapping[str, Any], styles: Mapping[str, Style]) -> Cost | None:
    """None while no seed is finished."""
    if not results["seeds"]:
        return None
    head = ["Arm", "Rounds", "Trained on", "With gradient", "Generated", "Tokens trained on", "Tokens generated"]
    head += ["MB sent", "MB received", "Seconds"]
    groups = []
    for peer in results["peers"]:
        rows: list[Row] = []
        for arm in results["arms"]:
            spent = results["budget"][arm][peer]
            per_round = [spent[f"rollouts_{key}"] for key in ("trained", "with_gradient", "generated")]
            texts = [
                amount(spent["rounds"]),
                *(amount(total, spent["rounds"]) for total in per_round),
                *(amount(spent[f"tokens_{key}"]) for key in ("trained", "generated")),
                *(f"{spent[f'bytes_{way}'] / 1e6:.2f}" for way in ("sent", "received")),
                amount(spent["seconds"]),
            ]
            rows.append([_arm(arm, styles), *map(Cell, texts)])
        groups.append(RowGroup(peer, rows))
    table = Table("Means over seeds; rollouts per round, tokens over all rounds", head, groups)
    return Cost([matched["text"] for matched in results["matched"]], table)


def probes(found: Sequence[Probe]) -> Probes | None:
    """None where no probe was made."""
    return Probes([_probe_table(probe) for probe in found]) if found else None


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
    return Cell(arm=ArmLabel(name, styles[name].colour))
