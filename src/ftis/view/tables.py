"""Tables for the terminal: a run's arms, a comparison, the results of a preflight, the peers of a swarm."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

import rich.table
from rich.console import Console
from rich.text import Text

from ftis.check.estimate import checkpoints_kept
from ftis.check.preflight import Sounding, duration
from ftis.check.quantities import counted, in_bytes, in_time
from ftis.comparison.summary import PeerSummary, Summary
from ftis.comparison.values import StudyResults
from ftis.config import Recipe, cut
from ftis.prompts import AnswerKind
from ftis.records.files import checkpoint_path
from ftis.records.plan import CURVES, RESULTS, SUMMARY
from ftis.records.reading import LAST_EVALUATIONS
from ftis.swarm.status import COUNTS, Stated
from ftis.view.charts import arm_styles
from ftis.view.comparison import accuracy, headlines
from ftis.view.formatting import number, seconds_text, visible
from ftis.view.sections import Cell, RowGroup, Table, on_terminal
from ftis.view.sentences import of_its_time

WIDTH = 100


def closing_table(summary: Summary) -> rich.table.Table:
    """A table of a run's arms: a row for each peer, and one for the mean if an arm has several peers."""
    head = ["Peer", "Start", "Final", "OOD start", "OOD final", "Rounds", "Seconds", "Tokens", "Sent", "Foreign used"]
    groups = []
    for arm, peers in summary.arms.items():
        rows = []
        for name, peer in peers.items():
            of_swarm = [in_bytes(peer.bytes_sent), f"{peer.foreign_used:,}"] if peer.collaborated else ["–", "–"]
            spent = [str(peer.rounds), seconds_text(peer.seconds), f"{peer.tokens_sampled:,}"]
            rows.append([name, *_accuracies([peer]), *spent, *of_swarm])
        if len(peers) > 1:
            rows.append(["mean", *_accuracies(list(peers.values())), *[""] * 5])
        groups.append(RowGroup(arm, [[Cell(text) for text in row] for row in rows]))
    note = (
        f"final: mean of the last evaluations, at most {LAST_EVALUATIONS}; seconds: the peer's own work, without "
        f"evaluation and without waiting for the others"
    )
    caption = f"{summary.name}, seed {summary.seed}: {summary.accuracy_is}"
    return on_terminal(Table(caption, head, groups, note))


def whereabouts(directory: Path, summary: Summary) -> str:
    """A text that names a run's files, its models, and the command that makes a page."""
    arms_of: dict[str, list[str]] = {}
    for arm, peers in summary.arms.items():
        models = ", ".join(str(checkpoint_path(Path(name), peer.model_step)) for name, peer in peers.items())
        arms_of.setdefault(models, []).append(arm)
    trained = [
        f"trained models in {directory / (arms[0] if len(arms) == 1 else '{' + ','.join(arms) + '}')}: {models}"
        for models, arms in arms_of.items()
    ]
    return (
        f"records, {SUMMARY}, {RESULTS} and {CURVES} in {directory}; {'; '.join(trained)}; ftis export makes one ready "
        f"for use; ftis report {directory} makes a page"
    )


def _accuracies(peers: Sequence[PeerSummary]) -> list[str]:
    """Mean accuracies over peers at the start and at the end, in distribution and out of distribution."""
    ood = [peer.ood.values() for peer in peers if peer.ood]
    start = fmean(fmean(split.start for split in of_peer) for of_peer in ood) if ood else None
    final = fmean(fmean(split.final for split in of_peer) for of_peer in ood) if ood else None
    return list(map(number, (fmean(peer.start for peer in peers), fmean(peer.final for peer in peers), start, final)))


def print_comparison(results: StudyResults, console: Console) -> None:
    """Print the comparison: tables with the verdicts for each split, headlines, budgets and notes."""
    width = min(WIDTH, console.width)
    for split in accuracy(results, arm_styles(results.arms, results.baselines)):
        for table in filter(None, (split.means, split.table)):
            console.print(on_terminal(table, leaves_out=("p", "p, Holm")), width=width, soft_wrap=False)
    lines = [*headlines(results), *(matched.text for matched in results.matched)]
    lines += [f"seed {seed} is left out: {why}" for seed, why in results.left_out.items()]
    for line in [*lines, *(f"note: {note}" for note in results.notes)]:
        console.print(Text(line), width=width, soft_wrap=False)


COMPARED: dict[AnswerKind, str] = {
    "number": "as numbers",
    "math": "as mathematics",
    "exact": "as text, so only the task's own spelling is right",
    "reasoning_gym": "by the data set's own score_answer",
}

FEW = 8
"""A sounding of fewer groups says that they are few."""


def print_soundings(soundings: Sequence[Sounding], recipe: Recipe, console: Console) -> None:
    """Print a row for each peer, some of its completions, and changes to make."""

    say = partial(console.print, highlight=False, markup=False)
    console.print(_soundings_table(soundings, recipe))
    kept, rounds = counted(checkpoints_kept(recipe.training), "checkpoint"), recipe.training.rounds
    for one in soundings:
        say(
            f"{one.peer}: {kept} of {in_bytes(one.checkpoint_bytes)}; offers {in_bytes(one.message_bytes)} "
            f"a round; {rounds} rounds take {in_time(one.seconds_per_round * rounds)} without evaluations and waiting; "
            f"sampling a rollout takes {one.sampling_cost:.2g} times as long as training on one"
        )
    for line in duration(soundings, recipe):
        say(line)
    if soundings and (compared := soundings[0].compared):  # all peers have the same task
        say(f"answers are compared {COMPARED[compared]}")
    for one in soundings:
        for question, completion, reward in one.samples:
            shown = Text(f"{one.peer}, reward {reward:g}: ", style="bold")
            console.print(shown.append(f"{shortened(question)} → {shortened(completion)}", style="default"))
    peers_of: dict[str, list[str]] = {}
    for one in soundings:
        for line in one.advice:
            peers_of.setdefault(line, []).append(one.peer)
    for line, peers in peers_of.items():
        say(f"{', '.join(peers)}: {line}")
    say(next((one.recipe_part for one in soundings if one.recipe_part), ""), end="")  # all peers have the same task


def _soundings_table(soundings: Sequence[Sounding], recipe: Recipe) -> rich.table.Table:
    head = ["Peer", "Completions", "Reward", "Format right", "Answer right", "Groups with signal"]
    head += ["Tokens/s", "s a round", "Peak memory"]
    rows = [
        [
            one.peer,
            str(one.completions),
            f"{one.reward:.2f}",
            "–" if one.formats is None else f"{one.formats / one.completions:.0%}",
            "–" if one.answers is None else f"{one.answers / one.completions:.0%}",
            f"{one.signal:.0%}",
            f"{one.tokens_per_second:,.0f}",
            seconds_text(one.seconds_per_round),
            in_bytes(one.peak_bytes) if one.peak_bytes else "–",
        ]
        for one in soundings
    ]
    note = (
        "peak memory is that of some of these groups. A round samples and learns from more: its memory stands below, "
        "and for each peer in ftis train RECIPE --dry-run. Seconds are one peer's own work, extrapolated from these "
        "groups"
    )
    if few := [one for one in soundings if len(one.rewards) < FEW]:
        groups = min(len(one.rewards) for one in few)
        whose = f" of {', '.join(one.peer for one in few)}" if len(few) < len(soundings) else ""
        say = "says" if groups == 1 else "say"
        note += f". {counted(groups, 'group').capitalize()}{whose} {say} little"
        more = min(2 * FEW, recipe.training.prompts_per_round)
        note += f": --groups {more} narrows it" if more > groups else ", and a round has no more prompts"
    return on_terminal(Table.of(f"{recipe.name}: before the first round", head, rows, note))


def shortened(text: str) -> str:
    """A text on one line, with invisible characters spelled out and a long middle cut."""
    return cut(visible(text.replace("\n", "⏎")), 160, 80)


def status_table(peers: Sequence[Stated]) -> rich.table.Table:
    """A table of the peers that answered, of any swarm: their round, the peers they see, and rollouts they took.

    Args:
        peers: of :func:`ftis.swarm.session.ask_status`.
    """
    head = ["Run", "Peer", "Round", "Behind", "Doing", "Reward", "Sees", "Admitted", "Rejected", "Late", "MB in"]
    head += ["Quarantined", "Its time"]
    newest: dict[str, int] = {}
    for peer in peers:
        newest[peer.run or ""] = max(newest.get(peer.run or "", 0), peer.round or 0)
    rows = []
    for peer in peers:
        run, round = peer.run or "", peer.round or 0
        totals = {name: one for name, one in (peer.sources or {}).items() if name != peer.peer}
        sums = [sum(one.get(key, 0) for one in totals.values()) for key in COUNTS]
        rows.append(
            [
                visible(f"{(peer.name or '')[:32]} {run[:6]}"),
                visible(peer.peer or ""),
                f"{round + 1}/{peer.rounds}" if peer.rounds else "–",
                str(newest[run] - round),
                visible((peer.state or "")[:16]),
                "" if peer.reward is None else number(peer.reward),
                ", ".join(peer.live or ()),
                *map(str, sums[:3]),
                f"{sums[3] / 1e6:.2f}",
                ", ".join(name for name, one in totals.items() if one.get("quarantined")),
                of_its_time(peer.seconds or {}),
            ]
        )
    return on_terminal(Table.of("" if peers else "no peer answered", head, rows))
