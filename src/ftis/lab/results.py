"""Reads run directories and says what came of them: summary.json and results.json, tables for people, curves.

Nothing here trains or loads a model; whatever is shown can be made again from the files. :func:`summarise` is about
one run, :func:`compare` about arms over the seeds of an experiment; page.py shows the latter with figures.

    ReportError: a directory that holds no run or experiment, or records that do not fit together
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ftis.config import ArmConfig, FtisError, Recipe, parse
from ftis.lab import stats
from ftis.records import read_jsonl

LAST_EVALUATIONS = 3
"""A final accuracy is the mean of so many last evaluations: a single one of a few hundred problems swings."""

VALIDATION = "validation"
TABLE_WIDTH = 100


class ReportError(FtisError):
    """A directory that nothing can be reported from."""


def summarise(run: Path) -> dict[str, Any]:
    """What a run directory shows per arm and peer; also written there as ``summary.json``.

    Accuracies are shares in 0 … 1: ``start`` before training, ``final`` that of :func:`final_accuracy`, ``last`` the
    last evaluation alone; ``ood`` holds the same per out-of-distribution split. ``seconds`` are the rounds', without
    evaluation; ``bytes_sent`` is what the peer offered to each of the others.
    """
    summary = _summary(run)
    _write_json(run / "summary.json", summary)
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
        "secs",
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
    table.caption = (
        f"final: mean of the last evaluations, at most {LAST_EVALUATIONS}; seconds: rounds without evaluation"
    )
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


@dataclass(frozen=True)
class PeerRun:
    """The records of one peer, in one arm, under one seed."""

    directory: Path
    evaluations: tuple[dict[str, Any], ...]
    metrics: tuple[dict[str, Any], ...]

    @staticmethod
    def read(directory: Path) -> PeerRun:
        files = (directory / "evaluations.jsonl", directory / "metrics.jsonl")
        return PeerRun(directory, *(tuple(read_jsonl(file)) if file.exists() else () for file in files))

    def of_split(self, split: str) -> list[dict[str, Any]]:
        return [row for row in self.evaluations if row["split"] == split]


@dataclass(frozen=True)
class Study:
    """What a directory holds: one run, or the runs of an experiment, a seed each.

    Attributes:
        runs: the run directory of each seed.
        arms: those that were started under some seed.
        not_run: those that were not.
        seeds: complete ones, every arm and peer trained and evaluated to its last round. Only they are compared.
        left_out: why each other seed is not.
        peers: records by seed, arm and peer.
        facts: of its provenance: versions, commit, machine.
    """

    directory: Path
    recipe: Recipe
    runs: dict[int, Path]
    arms: tuple[ArmConfig, ...]
    not_run: tuple[str, ...]
    seeds: tuple[int, ...]
    left_out: dict[int, str]
    peers: dict[tuple[int, str, str], PeerRun]
    facts: dict[str, Any]

    @property
    def peer_names(self) -> tuple[str, ...]:
        return tuple(peer.name for peer in self.recipe.peers)

    @property
    def seeds_shown(self) -> tuple[int, ...]:
        """The complete seeds; while there is none, those that were started."""
        return self.seeds or tuple(self.runs)

    @property
    def splits(self) -> tuple[str, ...]:
        found = dict.fromkeys(row["split"] for peer in self.peers.values() for row in peer.evaluations)
        return (VALIDATION, *(split for split in found if split != VALIDATION))

    @property
    def baseline(self) -> str | None:
        name = self.recipe.experiment.baseline
        return name if name in {arm.name for arm in self.arms} else None


def read_study(directory: Path) -> Study:
    """Read the records under an experiment's or a run's directory.

    Raises:
        ReportError: it holds neither, or nothing was recorded yet.
        RecipeError: its recipe is of another version of ftis.
    """
    try:
        if (directory / "experiment.json").exists():
            facts = json.loads((directory / "experiment.json").read_text(encoding="utf-8"))
            recipe = parse(facts.pop("recipe"), where=str(directory / "experiment.json"))
            runs = {seed: directory / f"{recipe.name}-seed{seed}" for seed in facts.pop("seeds")}
        elif (directory / "recipe.json").exists():
            document = json.loads((directory / "recipe.json").read_text(encoding="utf-8"))
            recipe = parse(document, where=str(directory / "recipe.json"))
            known = directory / "provenance.json"
            facts = json.loads(known.read_text(encoding="utf-8")) if known.exists() else {}
            runs = {recipe.seed: directory}
        else:
            raise ReportError(
                f"{directory} holds neither a run nor an experiment (no recipe.json, no experiment.json): give the "
                f"directory that ftis train or ftis experiment named"
            )
    except (json.JSONDecodeError, KeyError) as error:
        raise ReportError(
            f"{directory}: recipe.json, provenance.json or experiment.json is damaged ({error})"
        ) from None
    configs = recipe.arms or (ArmConfig(name=recipe.objective.name),)
    peers = {
        (seed, arm.name, peer.name): PeerRun.read(run / arm.name / peer.name)
        for seed, run in runs.items()
        for arm in configs
        for peer in recipe.peers
    }
    started = {arm for (_, arm, _), peer in peers.items() if peer.evaluations}
    if not started:
        raise ReportError(f"{directory}: nothing was recorded yet; report again after the first evaluation")
    arms = tuple(arm for arm in configs if arm.name in started)
    peers = {key: peer for key, peer in peers.items() if key[1] in started}
    rounds = {arm.name: recipe.arm(arm).training.rounds for arm in arms}
    left_out: dict[int, str] = {}
    for (seed, arm_name, name), peer in peers.items():
        unfinished = _unfinished(peer, rounds[arm_name])
        if unfinished and seed not in left_out:
            left_out[seed] = f"{arm_name}, {name}: {unfinished}"
    return Study(
        directory=directory,
        recipe=recipe,
        runs=runs,
        arms=arms,
        not_run=tuple(arm.name for arm in configs if arm.name not in started),
        seeds=tuple(seed for seed in runs if seed not in left_out),
        left_out=left_out,
        peers=peers,
        facts=facts,
    )


def _unfinished(peer: PeerRun, rounds: int) -> str | None:
    """What is missing of a peer's run, in words."""
    if not peer.evaluations:
        return "not started"
    done = len(peer.metrics)
    if done < rounds:
        return f"{done} of {rounds} rounds"
    splits = {row["split"] for row in peer.evaluations}
    if any(peer.of_split(split)[-1]["step"] < rounds for split in splits):
        return "not evaluated after its last round"
    return None


def compare(directory: Path) -> dict[str, Any]:
    """Compare the arms of an experiment (or of a single run) with its baseline; also written as ``results.json``.

    Accuracies are shares in 0 … 1; intervals are Student's t over seeds at 95 %; null is what cannot be known, as an
    interval from one seed.

    ==================  ===================================================================================
    seeds, left_out     the complete seeds, and why each other one is left out
    not_run             arms of the recipe that were not started
    curves              by split, arm and peer: per evaluated step the mean over seeds, interval, values
    accuracy            by split, arm and peer: ``start`` and ``final`` (:func:`final_accuracy`), each with
                        mean, interval and value per seed
    comparisons         per split, peer and arm other than the baseline: ``difference`` seed for seed with
                        interval, p of t-test (``p_value``) and of sign flips (``bootstrap_p``), ``p_adjusted``
                        by Holm's method over all comparisons on that split, the smallest difference that
                        would probably have shown, a verdict (``label``, ``text``), and ``mcnemar``: per seed
                        the problems only one of the two final models got right, p adjusted over seeds
    budget              by arm and peer: means over seeds of totals
    matched             arms and a sentence on what they have as much of as the baseline
    notes               what to know before believing it
    ==================  ===================================================================================
    """
    return compare_study(read_study(directory))


def compare_study(study: Study) -> dict[str, Any]:
    recipe, baseline = study.recipe, study.baseline
    notes = [
        f"seed {seed}: {note}" if len(study.runs) > 1 else note
        for seed in study.seeds
        for note in (*warnings(_summary(study.runs[seed])), *_unequal_starts(study, seed))
    ]
    results: dict[str, Any] = {
        "name": recipe.name,
        "title": recipe.experiment.title or recipe.name,
        "question": recipe.experiment.question,
        "baseline": baseline,
        "arms": [arm.name for arm in study.arms],
        "peers": list(study.peer_names),
        "splits": list(study.splits),
        "seeds": list(study.seeds),
        "left_out": {str(seed): why for seed, why in study.left_out.items()},
        "not_run": list(study.not_run),
        "curves": _by_split_arm_peer(study, _curve),
        "accuracy": _by_split_arm_peer(study, _accuracy) if study.seeds else {},
        "comparisons": [c for split in study.splits for c in _comparisons(study, split)],
        "budget": {arm.name: {peer: _budget(study, arm, peer) for peer in study.peer_names} for arm in study.arms}
        if study.seeds
        else {},
        "matched": _matched(recipe, study.arms, baseline) if baseline else [],
        "notes": notes,
    }
    results = _without_nan(results)
    _write_json(study.directory / "results.json", results)
    return results


SAME_START = 0.02
"""One model answers alike in every arm, up to rounding of its arithmetic: accuracies may differ by so much."""


def _unequal_starts(study: Study, seed: int) -> list[str]:
    """Peers that did not start from one model in all arms although the recipe says so: nothing pairs them."""
    said = []
    for peer in study.peer_names:
        starts: dict[str, dict[str, float]] = {}
        for arm in study.arms:
            model = study.recipe.arm(arm).peer(peer).model
            starts.setdefault(model, {})[arm.name] = study.peers[seed, arm.name, peer].of_split(VALIDATION)[0][
                "accuracy"
            ]
        for model, of_arm in starts.items():
            if max(of_arm.values()) - min(of_arm.values()) > SAME_START:
                each = ", ".join(f"{accuracy:.3f} in {arm}" for arm, accuracy in of_arm.items())
                said.append(
                    f"{peer} did not start from one and the same {model} in all arms ({each}): its arms are no pairs; "
                    f"train them again"
                )
    return said


def headline(results: Mapping[str, Any]) -> str:
    """The comparisons on validation in one sentence."""
    if not results["seeds"]:
        unfinished = "; ".join(f"seed {seed}: {why}" for seed, why in results["left_out"].items())
        return f"Nothing can be compared yet: no seed is finished ({unfinished})."
    if results["baseline"] is None:
        return "Nothing is compared: there is no baseline arm."
    labels = [c["label"] for c in results["comparisons"] if c["split"] == VALIDATION]
    if not labels:
        return f"Nothing is compared: {results['baseline']} is the only arm."
    n = len(results["seeds"])
    counts = [f"{labels.count(label)} {label}" for label in ("better", "worse")]
    total = "one comparison" if len(labels) == 1 else f"{len(labels)} comparisons"
    seeds = "one seed" if n == 1 else f"{n} seeds"
    return (
        f"Of {total} with {results['baseline']} on validation, over {seeds}: {', '.join(counts)}, "
        f"{labels.count('no difference shown')} with no difference shown."
    )


def print_comparison(results: Mapping[str, Any], console: Console) -> None:
    """The comparison for a terminal: a table per split, a verdict per peer and arm, budgets, notes."""
    width = min(TABLE_WIDTH, console.width)
    for split in results["splits"] if results["seeds"] else ():
        console.print(_comparison_table(results, split), width=width, soft_wrap=False)

    def line(text: str, indent: int = 0) -> None:
        console.print(Padding(Text(text), (0, 0, 0, indent)), width=width, soft_wrap=False)

    line(headline(results))
    for peer in results["peers"]:
        of_peer = [c for c in results["comparisons"] if c["peer"] == peer]
        if of_peer:
            line(peer)
        for c in of_peer:
            line(f"{c['arm']}, {c['split']}: {c['text']}", 2)
    for matched in results["matched"]:
        line(matched["text"])
    for seed, why in results["left_out"].items():
        line(f"seed {seed} is left out: {why}")
    for note in results["notes"]:
        line(f"note: {note}")


def _comparison_table(results: Mapping[str, Any], split: str) -> Table:
    n, baseline = len(results["seeds"]), results["baseline"]
    title = f"{results['name']}, {split}: greedy pass@1, {n} seed{'s' if n > 1 else ''}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1))
    table.add_column("peer", overflow="fold", max_width=16)
    table.add_column("arm", overflow="fold", max_width=16)
    for heading in ("start", "final", "95% interval"):
        table.add_column(heading, justify="right", no_wrap=True)
    if baseline:
        table.add_column(f"− {baseline}", justify="right", overflow="fold", max_width=12)
        for heading in ("95% interval", "p, Holm"):
            table.add_column(heading, justify="right", no_wrap=True)
    by_arm = {(c["peer"], c["arm"]): c for c in results["comparisons"] if c["split"] == split}
    for peer in results["peers"]:
        for arm in results["arms"]:
            accuracy, c = results["accuracy"][split][arm][peer], by_arm.get((peer, arm))
            cells = [peer, arm, number(accuracy["start"]["mean"]), number(accuracy["final"]["mean"])]
            cells.append(span(accuracy["final"]))
            if c:
                cells += [number(c["mean"], "+"), span(c, "+"), p_text(c["p_adjusted"])]
            table.add_row(*cells)
        table.add_section()
    table.caption = f"final: mean of the last evaluations, at most {LAST_EVALUATIONS}; interval: Student's t over seeds"
    table.caption_justify = "left"
    return table


def number(value: float | None, sign: str = "") -> str:
    return "–" if value is None else f"{value:{sign}z.3f}"


def span(interval: Mapping[str, Any], sign: str = "") -> str:
    if interval["low"] is None:
        return "–"
    return f"{number(interval['low'], sign)} … {number(interval['high'], sign)}"


def p_text(p: float | None) -> str:
    return "–" if p is None else ("<0.001" if p < 0.001 else f"{p:.3f}")


def _by_split_arm_peer(study: Study, of: Any) -> dict[str, Any]:
    return {
        split: {arm.name: {peer: of(study, split, arm.name, peer) for peer in study.peer_names} for arm in study.arms}
        for split in study.splits
    }


def _curve(study: Study, split: str, arm: str, peer: str) -> list[dict[str, Any]]:
    at_step: dict[int, dict[str, float]] = {}
    for seed in study.seeds_shown:
        for row in study.peers[seed, arm, peer].of_split(split):
            at_step.setdefault(row["step"], {})[str(seed)] = row["accuracy"]
    return [{"step": step, **_over_seeds(values)} for step, values in sorted(at_step.items())]


def _accuracy(study: Study, split: str, arm: str, peer: str) -> dict[str, Any]:
    rows = {str(seed): study.peers[seed, arm, peer].of_split(split) for seed in study.seeds}
    return {
        "problems": max(of_seed[-1]["problems"] for of_seed in rows.values()),
        "start": _over_seeds({seed: of_seed[0]["accuracy"] for seed, of_seed in rows.items()}),
        "final": _over_seeds({seed: final_accuracy(of_seed) for seed, of_seed in rows.items()}),
    }


def _over_seeds(per_seed: dict[str, float]) -> dict[str, Any]:
    interval = stats.mean_interval(list(per_seed.values()))
    return {"mean": interval.mean, "low": interval.low, "high": interval.high, "per_seed": per_seed}


def _comparisons(study: Study, split: str) -> list[dict[str, Any]]:
    """Every arm against the baseline on one split, corrected for there being so many."""
    baseline = study.baseline
    if baseline is None or not study.seeds:
        return []
    pairs = [(peer, arm.name) for peer in study.peer_names for arm in study.arms if arm.name != baseline]
    differences = []
    for peer, arm in pairs:
        finals = (
            [final_accuracy(study.peers[seed, of, peer].of_split(split)) for seed in study.seeds]
            for of in (arm, baseline)
        )
        treatment, control = finals
        per_seed = {str(s): t - c for s, t, c in zip(study.seeds, treatment, control, strict=True)}
        differences.append((stats.paired_difference(treatment, control), per_seed))
    adjusted = stats.holm([difference.p_value for difference, _ in differences])
    comparisons = []
    for (peer, arm), (difference, per_seed), p in zip(pairs, differences, adjusted, strict=True):
        verdict = stats.verdict(difference, p, baseline=baseline)
        comparisons.append(
            {
                "split": split,
                "peer": peer,
                "arm": arm,
                "baseline": baseline,
                **asdict(difference),
                "per_seed": per_seed,
                "p_adjusted": p,
                "label": verdict.label,
                "text": verdict.text,
                "mcnemar": _mcnemar(study, split, arm, baseline, peer),
            }
        )
    return comparisons


def _mcnemar(study: Study, split: str, arm: str, baseline: str, peer: str) -> list[dict[str, Any]]:
    """The final models of both arms on the same problems, seed by seed; seeds that cannot be paired are passed over."""
    rows = []
    for seed in study.seeds:
        first, second = (_last_answers(study.peers[seed, of, peer], split) for of in (arm, baseline))
        same_problems = [a["question"] for a in first] == [a["question"] for a in second]
        if not first or not same_problems or any(a["reward"] not in (0, 1) for a in (*first, *second)):
            continue
        test = stats.mcnemar([a["reward"] == 1 for a in first], [a["reward"] == 1 for a in second])
        rows.append(
            {
                "seed": seed,
                "problems": len(first),
                "only_arm": test.only_first,
                "only_baseline": test.only_second,
                "p_value": test.p_value,
            }
        )
    adjusted = stats.holm([row["p_value"] for row in rows])
    return [{**row, "p_adjusted": p} for row, p in zip(rows, adjusted, strict=True)]


def _last_answers(peer: PeerRun, split: str) -> list[dict[str, Any]]:
    """The final model's answers, problem by problem; none if they were deleted."""
    file = peer.directory / "evaluations" / f"{split}-{peer.of_split(split)[-1]['step']}.jsonl"
    return read_jsonl(file) if file.exists() else []


def plan(recipe: Recipe, arm: ArmConfig) -> tuple[int, int, int]:
    """What an arm means each peer to have: rollouts trained on and generated per round, and rounds."""
    of_arm = recipe.arm(arm)
    m, per_prompt, prompts = of_arm.swarm_size, of_arm.sampling.num_generations, of_arm.training.prompts_per_round
    if arm.collaborate:
        return prompts * per_prompt, prompts * per_prompt // m, of_arm.training.rounds
    if arm.budget == "generated":
        prompts //= m
    return prompts * per_prompt, prompts * per_prompt, of_arm.training.rounds


def _matched(recipe: Recipe, arms: Sequence[ArmConfig], baseline: str) -> list[dict[str, Any]]:
    """On which of the two axes, rollouts trained on and rollouts generated, arms equal the baseline, in words."""
    plans = {arm.name: plan(recipe, arm) for arm in arms}
    there = plans.pop(baseline)
    alike: dict[tuple[int, int, int], list[str]] = {}
    for name, of_arm in plans.items():
        alike.setdefault(of_arm, []).append(name)
    return [{"arms": names, "text": _in_words(", ".join(names), p, baseline, there)} for p, names in alike.items()]


def _in_words(names: str, here: tuple[int, int, int], baseline: str, there: tuple[int, int, int]) -> str:
    (trained, generated, rounds), (trained_there, generated_there, rounds_there) = here, there
    both, as_many = f"{names} and {baseline}", _times(generated, generated_there)
    if trained == trained_there and generated == generated_there:
        text = f"{both} are equal in both: a peer trains on {trained} rollouts a round and generates {generated}"
    elif trained == trained_there:
        text = (
            f"{both} are equal in rollouts trained on per update ({trained}); a peer of {names} generates {as_many} "
            f"itself ({generated} against {generated_there} a round)"
        )
    elif generated == generated_there:
        text = (
            f"{both} are equal in rollouts generated per peer and round ({generated}); a peer of {names} trains on "
            f"{_times(trained, trained_there)} ({trained} against {trained_there})"
        )
    else:
        text = (
            f"{both} are equal in neither: a peer of {names} trains on {_times(trained, trained_there)} rollouts a "
            f"round ({trained} against {trained_there}) and generates {as_many} ({generated} against {generated_there})"
        )
    return text + (f"; {rounds} rounds against {rounds_there}." if rounds != rounds_there else ".")


def _times(a: int, b: int) -> str:
    words = {0.5: "half as many", 1.0: "as many", 2.0: "twice as many"}
    if 3 * a == b:
        return "a third as many"
    return words.get(a / b, f"{a / b:.3g} times as many")


def _budget(study: Study, arm: ArmConfig, peer: str) -> dict[str, Any]:
    """What one peer of one arm took, totals over all rounds, means over seeds; None where it was not recorded."""
    per_seed = [_spent(study, arm, study.peers[seed, arm.name, peer]) for seed in study.seeds]
    means: dict[str, Any] = {}
    for key in per_seed[0]:
        known = [value for of_seed in per_seed if (value := of_seed[key]) is not None]
        means[key] = fmean(known) if len(known) == len(per_seed) else None
    return means


def _spent(study: Study, arm: ArmConfig, peer: PeerRun) -> dict[str, float | None]:
    metrics, own = peer.metrics, peer.directory.name
    trained, generated, rounds = plan(study.recipe, arm)
    spent: dict[str, float | None] = {
        "rounds": len(metrics),
        "optimizer_steps": sum(row["optimizer_steps"] for row in metrics),
        "rollouts_trained": rounds * trained,
        "rollouts_with_gradient": None,
        "tokens_trained": None,
        "rollouts_generated": rounds * generated,
        "tokens_generated": metrics[-1]["num_tokens"],
        "bytes_sent": sum(row.get(f"peer/{own}/bytes", 0) for row in metrics),
        "bytes_received": sum(
            v for row in metrics for k, v in row.items() if k.endswith("/bytes") and k != f"peer/{own}/bytes"
        ),
        "seconds": sum(row["step_time"] for row in metrics),
    }
    if arm.collaborate:  # some of the others' may not have come
        for key, measure in (("rollouts_trained", "admitted"), ("rollouts_with_gradient", "kept")):
            sources = (name for name in study.peer_names if f"peer/{name}/{measure}" in metrics[-1])
            spent[key] = float(sum(row[f"peer/{name}/{measure}"] for name in sources for row in metrics))
    files = sorted((peer.directory / "rollouts").glob("round-*.parquet"))
    if len(files) == len(metrics):
        kept = tokens = 0
        for file in files:
            try:
                table = pq.read_table(file, columns=["kept", "completion_ids"])
            except (OSError, ValueError) as error:
                raise ReportError(f"{file} cannot be read ({error}): delete the directory it is in") from error
            kept += pc.sum(table["kept"]).as_py() or 0
            tokens += pc.sum(pc.list_value_length(table["completion_ids"])).as_py() or 0
        spent["rollouts_with_gradient"], spent["tokens_trained"] = kept, tokens
    return spent


def _without_nan(value: Any) -> Any:
    """The same with None for nan, which JSON does not know."""
    if isinstance(value, dict):
        return {key: _without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_nan(inner) for inner in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _write_json(path: Path, value: Any) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(path)


def _summary(run: Path) -> dict[str, Any]:
    recipe = json.loads((run / "recipe.json").read_text(encoding="utf-8"))
    arms: dict[str, Any] = {}
    names = [arm["name"] for arm in recipe["arms"]] or [recipe["objective"]["name"]]
    for arm in names:
        peers = {p["name"]: _peer_summary(run / arm / p["name"]) for p in recipe["peers"]}
        if any(peers.values()):
            arms[arm] = {name: peer for name, peer in peers.items() if peer}
    return {"name": recipe["name"], "seed": recipe["seed"], "arms": arms}


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
        "rounds_without_foreign": sum(bool(row.get("without_foreign")) for row in metrics),
        "rounds_without_signal": sum(row["frac_reward_zero_std"] == 1 for row in metrics),
    }


def _start_and_final(evaluations: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "start": evaluations[0]["accuracy"],
        "final": final_accuracy(evaluations),
        "last": evaluations[-1]["accuracy"],
        "problems": evaluations[-1]["problems"],
    }


def final_accuracy(evaluations: Sequence[Mapping[str, Any]]) -> float:
    """The mean of the last three evaluations, that of the untrained model not counted if there is another."""
    trained = [e for e in evaluations if e["step"]] or evaluations
    return fmean(e["accuracy"] for e in trained[-LAST_EVALUATIONS:])


def _evaluations(directory: Path, split: str) -> list[dict[str, Any]]:
    return [row for row in read_jsonl(directory / "evaluations.jsonl") if row["split"] == split]
