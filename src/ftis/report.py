"""Reads run directories and says what came of them: summary.json, the closing table, learning curves.

Nothing here trains or loads a model; whatever is shown can be made again from the files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from ftis.records import read_jsonl

LAST_EVALUATIONS = 3
"""A final accuracy is the mean of so many last evaluations: a single one of a few hundred problems swings."""


def summarise(run: Path) -> dict[str, Any]:
    """What a run directory shows per arm and peer; also written there as ``summary.json``.

    Accuracies are shares in 0 … 1: ``start`` before training, ``final`` the mean of the last three evaluations,
    ``last`` the last one alone; ``ood`` holds the same per out-of-distribution split. ``seconds`` are the rounds',
    without evaluation; ``bytes_sent`` is what the peer offered to each of the others.
    """
    recipe = json.loads((run / "recipe.json").read_text(encoding="utf-8"))
    arms: dict[str, Any] = {}
    names = [arm["name"] for arm in recipe["arms"]] or [recipe["objective"]["name"]]
    for arm in names:
        peers = {p["name"]: _peer_summary(run / arm / p["name"]) for p in recipe["peers"]}
        if any(peers.values()):
            arms[arm] = {name: peer for name, peer in peers.items() if peer}
    summary = {"name": recipe["name"], "seed": recipe["seed"], "arms": arms}
    partial = run / "summary.json.partial"
    partial.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    partial.replace(run / "summary.json")
    return summary


def closing_table(summary: Mapping[str, Any]) -> Table:
    """The comparison of arms, a row for each arm and peer."""
    title = f"{summary['name']}, seed {summary['seed']}: greedy pass@1"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for heading in ("arm", "peer"):
        table.add_column(heading, no_wrap=True)
    for heading in (
        "start",
        "final",
        "OOD\nstart",
        "OOD\nfinal",
        "rounds",
        "sec-\nonds",
        "tokens",
        "MB\nsent",
        "foreign\nused",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for arm, peers in summary["arms"].items():
        for name, peer in peers.items():
            ood = list(peer["ood"].values())
            table.add_row(
                arm,
                name,
                f"{peer['start']:.3f}",
                f"{peer['final']:.3f}",
                f"{fmean(o['start'] for o in ood):.3f}" if ood else "–",
                f"{fmean(o['final'] for o in ood):.3f}" if ood else "–",
                str(peer["rounds"]),
                f"{peer['seconds']:.0f}",
                f"{peer['tokens_sampled']:,}",
                f"{peer['bytes_sent'] / 1e6:.2f}",
                f"{peer['foreign_used']:,}" if peer["collaborated"] else "–",
            )
        table.add_section()
    table.caption = f"final: mean of the last {LAST_EVALUATIONS} evaluations; seconds: rounds without evaluation"
    table.caption_justify = "left"
    return table


def warnings(summary: Mapping[str, Any]) -> list[str]:
    """What a reader of the table must know before believing it."""
    said = []
    for arm, peers in summary["arms"].items():
        for name, peer in peers.items():
            lonely, rounds = peer["rounds_without_foreign"], peer["rounds"]
            if peer["collaborated"] and lonely:
                said.append(
                    f"{arm}/{name} used no foreign rollout in {lonely} of {rounds} rounds: "
                    f"see peer/* in its metrics.jsonl"
                )
            if rounds and peer["rounds_without_signal"] == rounds:
                said.append(
                    f"{arm}/{name} never learned: in every group all rewards were equal "
                    f"(mean reward {peer['reward']:.3f})"
                )
    return said


def nobody_collaborated(summary: Mapping[str, Any]) -> bool:
    """Whether some peer of a collaborative arm used no foreign rollout in any round at all."""
    peers = [p for arm in summary["arms"].values() for p in arm.values() if p["collaborated"] and p["rounds"]]
    return any(p["rounds_without_foreign"] == p["rounds"] for p in peers)


def plot_learning_curves(run: Path, summary: Mapping[str, Any]) -> Path:
    """Accuracy over rounds as ``learning_curves.png``: a column per peer, validation above, OOD below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    arms = summary["arms"]
    peers = list(dict.fromkeys(name for of_arm in arms.values() for name in of_arm))
    splits = ["validation", *dict.fromkeys(s for a in arms.values() for p in a.values() for s in p["ood"])]
    figure = Figure(figsize=(4.2 * len(peers) + 1.2, 3.1 * len(splits) + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(splits), len(peers), sharex=True, sharey=True, squeeze=False)
    for column, peer in enumerate(peers):
        for row, split in enumerate(splits):
            axis = axes[row][column]
            for arm in arms:
                points = _evaluations(run / arm / peer, split) if peer in arms[arm] else []
                axis.plot([p["step"] for p in points], [p["accuracy"] for p in points], marker="o", ms=3, label=arm)
            axis.set_ylim(-0.02, 1.02)
            axis.grid(alpha=0.3)
            axis.set_title(f"{peer}: {split}", fontsize=10)
            if column == 0:
                axis.set_ylabel("greedy pass@1")
            if row == len(splits) - 1:
                axis.set_xlabel("round")
    axes[0][0].legend(fontsize=9)
    path = run / "learning_curves.png"
    figure.savefig(path, dpi=120)
    return path


def _peer_summary(directory: Path) -> dict[str, Any] | None:
    if not (directory / "evaluations.jsonl").exists():
        return None
    metrics = read_jsonl(directory / "metrics.jsonl") if (directory / "metrics.jsonl").exists() else []
    validation = _evaluations(directory, "validation")
    splits = dict.fromkeys(row["split"] for row in read_jsonl(directory / "evaluations.jsonl"))
    last: Mapping[str, Any] = metrics[-1] if metrics else {}
    own = directory.name
    return {
        **_start_and_final(validation),
        "ood": {s: _start_and_final(_evaluations(directory, s)) for s in splits if s != "validation"},
        "rounds": len(metrics),
        "seconds": sum(row["step_time"] for row in metrics),
        "reward": last.get("reward", 0.0),
        "tokens_sampled": last.get("num_tokens", 0),
        "bytes_sent": sum(row.get(f"peer/{own}/bytes", 0) for row in metrics),
        "bytes_received": sum(
            v for row in metrics for k, v in row.items() if k.endswith("/bytes") and k != f"peer/{own}/bytes"
        ),
        "collaborated": "foreign_used" in last,
        "foreign_used": int(sum(row.get("foreign_used", 0) for row in metrics)),
        "rounds_without_foreign": sum(row.get("foreign_used") == 0 for row in metrics),
        "rounds_without_signal": sum(row["frac_reward_zero_std"] == 1 for row in metrics),
    }


def _start_and_final(evaluations: list[dict[str, Any]]) -> dict[str, Any]:
    tail = evaluations[-LAST_EVALUATIONS:]
    return {
        "start": evaluations[0]["accuracy"],
        "final": fmean(e["accuracy"] for e in tail),
        "last": evaluations[-1]["accuracy"],
        "problems": evaluations[-1]["problems"],
    }


def _evaluations(directory: Path, split: str) -> list[dict[str, Any]]:
    return [row for row in read_jsonl(directory / "evaluations.jsonl") if row["split"] == split]
