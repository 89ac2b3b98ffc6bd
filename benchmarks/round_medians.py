"""Medians and ratios of benchmarks/round.py."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from round_swarm import HOST, adapters

SWARMS = ("TRL + ftis", "TRL + ftis, of two")
"""The sides within TRL."""
STAGES = ("round", "round_processor", "sampling", "log-probs", "update", "evaluation")


def row_of(results: Sequence[Mapping[str, Any]], in_swarm: bool) -> dict[str, Any]:
    """A side's medians over all rounds but the first of each run."""
    rest = {stage: [s for r in results for s in (r[stage][1:] or r[stage])] for stage in STAGES}
    rates = [t / s for r in results for t, s in zip(r["tokens"][1:], r["round_processor"][1:], strict=True)]
    row: dict[str, Any] = {
        **{stage: round(statistics.median(seconds), 4) for stage, seconds in rest.items()},
        "tokens_per_second": round(statistics.median(rates)),
        "mean_tokens": round(statistics.mean(t for r in results for t in r["tokens"])),
        "megabytes": round(max(r["megabytes"] for r in results)),
        "reward_first": [round(r["reward"][0], 3) for r in results],
        "reward_last_5": [round(statistics.mean(r["reward"][-5:]), 3) for r in results],
        "accuracy": [round(r["accuracy"], 3) for r in results],
    }
    spent = [of_round for r in results for of_round in r.get("spent", ())[1:]]
    if parts := sorted({part for of_round in spent for part in of_round} - {HOST}):
        row["parts"] = {
            part: round(statistics.median(of_round.get(part, [0.0])[0] for of_round in spent), 4) for part in parts
        }
    if in_swarm:
        row["adapter"], row["adapter_by_the_clock"] = (
            round(statistics.median(adapters(of_round, clock) for of_round in spent), 4) for clock in (0, 1)
        )
        row["foreign_admitted"], row["foreign_used"] = (
            round(statistics.mean(of_round[key] for r in results for of_round in r["foreign"])) for key in (0, 1)
        )
    return row


def compared(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """TRL's round over ours; a swarm's round, and what its adapter spends of it, over TRL's. Medians of the seeds'."""
    ratios: dict[str, Any] = {}
    if {"ours", "TRL"} <= set(runs):
        ratios["ratio"] = of_seeds(runs["TRL"], runs["ours"], of_round)
    for side in SWARMS:
        if {side, "TRL"} <= set(runs):
            ratios[f"round of {side}"] = of_seeds(runs[side], runs["TRL"], of_round)
            ratios[f"adapter of {side}"] = of_seeds(runs[side], runs["TRL"], of_adapter)
    return ratios


def of_round(run: Mapping[str, Any], clock: int) -> float:
    """The median of a run's rounds but the first; of the processor (0) or by the clock (1)."""
    return float(statistics.median(run[("round_processor", "round")[clock]][1:]))


def of_adapter(run: Mapping[str, Any], clock: int) -> float:
    return statistics.median(adapters(spent, clock) for spent in run["spent"][1:])


def of_seeds(
    these: Sequence[Mapping[str, Any]],
    those: Sequence[Mapping[str, Any]],
    measure: Callable[[Mapping[str, Any], int], float],
) -> dict[str, Any]:
    """A measure of one side over the round of another."""
    found: dict[str, Any] = {}
    for clock, name in enumerate(("processor", "clock")):
        ratios = [measure(this, clock) / of_round(that, clock) for this, that in zip(these, those, strict=True)]
        found[name] = round(statistics.median(ratios), 3)
        found[f"{name}_by_seed"] = [round(ratio, 3) for ratio in ratios]
    return found
