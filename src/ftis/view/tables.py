"""What the terminal shows: a run's closing table, a comparison of arms, and what a preflight found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ftis.check.advice import BELOW, advice, easy_formats, verdict
from ftis.check.estimate import checkpoints_kept
from ftis.check.formatting import counted, in_bytes, interval_text, number, p_text, seconds_text, visible
from ftis.check.plan import rate_advice
from ftis.check.preflight import Sounding
from ftis.comparison.results import by_budget
from ftis.config import Recipe
from ftis.engines.machine import cores
from ftis.prompts import AnswerKind
from ftis.records.reading import LAST_EVALUATIONS, VALIDATION
from ftis.run.outlook import in_time
from ftis.run.processes import runs_in_parallel

TABLE_WIDTH = 100


def closing_table(summary: Mapping[str, Any]) -> Table:
    """The comparison of arms: a row for each arm and peer, and one for an arm's mean over several peers."""
    title = f"{summary['name']}, seed {summary['seed']}: {summary['accuracy_is']}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for heading in ("arm", "peer"):
        table.add_column(heading, no_wrap=True)
    for heading in ("start", "final", "OOD\nstart", "OOD\nfinal", "rounds", "secs", "tokens", "sent", "foreign\nused"):
        table.add_column(heading, justify="right", no_wrap=True)
    for arm, peers in summary["arms"].items():
        for name, peer in peers.items():
            table.add_row(
                arm,
                name,
                *_accuracies([peer]),
                str(peer["rounds"]),
                seconds_text(peer["seconds"]),
                f"{peer['tokens_sampled']:,}",
                in_bytes(peer["bytes_sent"]) if peer["collaborated"] else "–",
                f"{peer['foreign_used']:,}" if peer["collaborated"] else "–",
            )
        if len(peers) > 1:
            table.add_row(arm, "mean", *_accuracies(list(peers.values())))
        table.add_section()
    table.caption = (
        f"final: mean of the last evaluations, at most {LAST_EVALUATIONS}; secs: the peer's own work, without "
        f"evaluation and without waiting for the others"
    )
    table.caption_justify = "left"
    return table


def whereabouts(directory: Path, summary: Mapping[str, Any]) -> str:
    """What a run has left where, by the first peer of its last arm, and what makes a page of it."""
    arm, peers = next(reversed(summary["arms"].items()))
    name, peer = next(iter(peers.items()))
    model = directory / arm / name / f"checkpoint-{peer['step']}"
    return (
        f"records, summary.json, results.json and learning_curves.png in {directory}; trained models as in {model}; "
        f"ftis report {directory} makes a page"
    )


def _accuracies(peers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Means over peers at the start and at the end, in distribution and out of it."""
    means = [f"{fmean(peer[end] for peer in peers):.3f}" for end in ("start", "final")]
    ood = [[fmean(o[end] for o in peer["ood"].values()) for peer in peers if peer["ood"]] for end in ("start", "final")]
    return means + [f"{fmean(of_peers):.3f}" if of_peers else "–" for of_peers in ood]


def headlines(results: Mapping[str, Any]) -> list[str]:
    """A sentence for each baseline on the comparisons with it on validation, or one on why nothing is compared."""
    baselines = results["baselines"]
    if not results["seeds"]:
        unfinished = "; ".join(f"seed {seed}: {why}" for seed, why in results["left_out"].items())
        return [f"Nothing can be compared yet: no seed is finished ({unfinished})."]
    if results["elsewhere"]:
        return [
            f"Nothing is compared: these are the records of {', '.join(results['peers'])} alone, from a run that "
            f"{', '.join(results['elsewhere'])} joined too. A comparison needs the records of all peers."
        ]
    if not baselines:
        return ['Nothing is compared: no baseline was run (experiment.baselines names them, by default ["alone"]).']
    if not results["comparisons"]:
        be = "is the only arm" if len(baselines) == 1 else "are the only arms"
        return [f"Nothing is compared: {' and '.join(baselines)} {be}."]
    return [_headline(results, baseline) for baseline in baselines]


def _headline(results: Mapping[str, Any], baseline: str) -> str:
    peers, means = (
        [c for c in results[key] if c["split"] == VALIDATION and c["baseline"] == baseline]
        for key in ("comparisons", "together")
    )
    budgets, n = {c["equal"] for c in peers}, len(results["seeds"])
    equally = f" ({budgets.pop()})" if len(budgets) == 1 else ""
    who = f", mean over {len(results['peers'])} peers" if means else ""
    if n == 1:
        differences = ", ".join(f"{c['arm']} {number(c['mean'], '+')}" for c in means or peers)
        return (
            f"Against {baseline} on validation{equally}{who}: {differences}. One seed cannot tell a gain from luck; "
            f"--seeds trains several."
        )
    against = f"{baseline} on validation{equally}, over {counted(n, 'seed')}: "
    if not means:
        return f"Of {counted(len(peers), 'comparison')} with {against}{_by_label(peers)}."
    return f"The mean over peers against {against}{_by_label(means)}. Peer by peer: {_by_label(peers)}."


def _by_label(compared: Sequence[Mapping[str, Any]]) -> str:
    labels = [c["label"] for c in compared]
    counts = [f"{labels.count(label)} {label}" for label in ("better", "worse")]
    return f"{', '.join(counts)}, {labels.count('no difference shown')} with no difference shown"


def print_comparison(results: Mapping[str, Any], console: Console) -> None:
    """The comparison for a terminal: a table per split, a verdict per peer and arm, budgets, notes."""
    width = min(TABLE_WIDTH, console.width)
    for split in results["splits"] if results["seeds"] else ():
        console.print(_comparison_table(results, split), width=width, soft_wrap=False)

    def line(text: str, indent: int = 0) -> None:
        console.print(Padding(Text(text), (0, 0, 0, indent)), width=width, soft_wrap=False)

    for sentence in headlines(results):
        line(sentence)
    of_peers = {peer: [c for c in results["comparisons"] if c["peer"] == peer] for peer in results["peers"]}
    for name, compared in {f"mean over {len(of_peers)} peers": results["together"], **of_peers}.items():
        if compared:
            line(name)
        for (baseline, equal), group in by_budget(compared).items():
            line(f"against {baseline}, {equal}", 2)
            for c in group:
                line(f"{c['arm']}, {c['split']}: {c['text']}", 4)
    for matched in results["matched"]:
        line(matched["text"])
    for seed, why in results["left_out"].items():
        line(f"seed {seed} is left out: {why}")
    for note in results["notes"]:
        line(f"note: {note}")


def _comparison_table(results: Mapping[str, Any], split: str) -> Table:
    n = len(results["seeds"])
    title = f"{results['name']}, {split}: {results['accuracy_is']}, {n} seed{'s' if n > 1 else ''}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1), collapse_padding=True)
    table.add_column("peer", overflow="fold", max_width=16)
    table.add_column("arm", overflow="fold", max_width=16)
    for heading in ("start", "final", "95% interval"):
        table.add_column(heading, justify="right", no_wrap=True)
    compared = [c for c in results["comparisons"] if c["split"] == split]
    if compared:
        table.add_column("against", overflow="fold", max_width=16)
        for heading in ("by", "95% interval", "p, Holm"):
            table.add_column(heading, justify="right", no_wrap=True)
    for peer in results["peers"]:
        for arm in results["arms"]:
            accuracy = results["accuracy"][split][arm][peer]
            cells = [peer, arm, number(accuracy["start"]["mean"]), number(accuracy["final"]["mean"])]
            cells.append(interval_text(accuracy["final"]))
            for c in [c for c in compared if (c["peer"], c["arm"]) == (peer, arm)]:
                table.add_row(
                    *cells, c["baseline"], number(c["mean"], "+"), interval_text(c, "+"), p_text(c["p_adjusted"])
                )
                cells = [""] * 5
            if any(cells):
                table.add_row(*cells)
        table.add_section()
    table.caption = f"final: mean of the last evaluations, at most {LAST_EVALUATIONS}; interval: Student's t over seeds"
    if compared:
        table.caption += "; by: final minus that of the arm beside it"
    table.caption_justify = "left"
    return table


COMPARED: dict[AnswerKind, str] = {
    "number": "as numbers",
    "math": "as mathematics",
    "exact": "as text, so only the task's own spelling is right",
    "reasoning_gym": "by the data set's own score_answer",
}

FEW = 8
"""Groups below which a sounding says that they are few."""
LONG = 4 * 3600.0
"""Seconds of all peers' rounds above which preflight says what shortens them."""
SHORTER = (
    "a run is shorter with fewer training.rounds, training.prompts_per_round and sampling.num_generations; a lower "
    "sampling.max_completion_length; or smaller models"
)


def print_soundings(soundings: Sequence[Sounding], recipe: Recipe, console: Console) -> None:
    """A row for each peer, some of its completions, and what to change."""
    table = Table(title=f"{recipe.name}: before the first round", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("peer", no_wrap=True)
    for heading in (
        "completions",
        "reward",
        "format\nright",
        "answer\nright",
        "groups with\nsignal",
        "tokens/s",
        "s a\nround",
        "peak\nmemory",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in soundings:
        table.add_row(
            one.peer,
            str(one.completions),
            f"{one.reward:.2f}",
            "–" if one.formats is None else f"{one.formats / one.completions:.0%}",
            "–" if one.answers is None else f"{one.answers / one.completions:.0%}",
            f"{one.signal:.0%}",
            f"{one.tokens_per_second:,.0f}",
            seconds_text(one.seconds_per_round),
            in_bytes(one.peak_bytes) if one.peak_bytes else "–",
        )
    table.caption = (
        "peak memory is that of some of these groups; a round samples and learns from more: what that takes stands "
        "below, and by peer in ftis train RECIPE --dry-run. Seconds are one peer's own work, extrapolated from these "
        "groups"
    )
    if (groups := min((len(one.rewards) for one in soundings), default=FEW)) < FEW:
        say = "says" if groups == 1 else "say"
        table.caption += f". {counted(groups, 'group').capitalize()} {say} little"
        more = min(2 * FEW, recipe.training.prompts_per_round)
        table.caption += f": --groups {more} narrows it" if more > groups else ", and a round has no more prompts"
    table.caption_justify = "left"
    console.print(table)
    kept, rounds = counted(checkpoints_kept(recipe.training), "checkpoint"), recipe.training.rounds
    for one in soundings:
        console.print(
            f"{one.peer}: {kept} of {in_bytes(one.checkpoint_bytes)}; offers {in_bytes(one.message_bytes)} "
            f"a round; {rounds} rounds take {in_time(one.seconds_per_round * rounds)} without evaluations and waiting; "
            f"sampling a rollout takes {one.sampling_cost:.2g} times as long as training on one",
            highlight=False,
        )
    each = [rounds * one.seconds_per_round for one in soundings]
    seconds, how = sum(each), "in turns, all peers' seconds"
    if runs_in_parallel(recipe):
        slowest, on_cores = max(each, default=0.0), sum(each) / cores()
        seconds = max(slowest, on_cores)
        how = f"at the same time on {cores()} cores"
        if seconds == slowest:
            how = "at the same time, the slowest peer's seconds"
    if len(soundings) > 1:
        console.print(f"{rounds} rounds of all peers, {how}: {in_time(seconds)}", highlight=False)
    if seconds > LONG:
        console.print(SHORTER, highlight=False)
    if soundings and (compared := soundings[0].compared):  # the peers have one task
        console.print(f"answers are compared {COMPARED[compared]}", highlight=False)
    for one in soundings:
        for question, completion, reward in one.samples:
            shown = Text(f"{one.peer}, reward {reward:g}: ", style="bold")
            console.print(shown.append(f"{shortened(question)} → {shortened(completion)}", style="default"))
    advised: list[Sounding] = []
    said: dict[str, list[str]] = {}
    for one in soundings:
        changes = advice(one, recipe.reward, recipe.sampling.stop, recipe.prompt)
        advised += [one] if any(line.endswith(BELOW) for line in changes) else []
        if one.idle_filter is not None:
            changes.append(
                f"completions of {one.mean_length:.0f} tokens hardly come to {one.idle_filter:g} nats of KL, so the "
                f'filter drops nothing; with short ones objective.kl_estimator = "k3" and kl_threshold = 0.5 do filter'
            )
        for line in [verdict(one), *changes, *rate_advice(recipe.peer(one.peer), one.parameters)]:
            said.setdefault(line, []).append(one.peer)
    for line, peers in said.items():
        console.print(f"{', '.join(peers)}: {line}", highlight=False, markup=False)
    for part in easy_formats(advised, recipe.prompt, recipe.reward):
        console.print(part, end="", highlight=False, markup=False)


def shortened(text: str) -> str:
    """A text on one line, its invisible characters spelled out, cut in its middle."""
    line = visible(text.replace("\n", "⏎"))
    return line if len(line) <= 160 else f"{line[:80]} … {line[-80:]}"
