"""The results of an experiment or of a run with several arms: accuracies with verdicts, curves, budgets and cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from ftis.check.quantities import counted
from ftis.comparison.budgets import Spent, mean_spent
from ftis.comparison.values import Comparison, StudyResults
from ftis.config import PeerConfig
from ftis.records.reading import LAST_EVALUATIONS, VALIDATION, Study
from ftis.view import figures
from ftis.view.charts import Style, arm_styles
from ftis.view.formatting import amount, number, p_text, seconds_text
from ftis.view.sections import MOST_UNFOLDED, ArmLabel, Cell, ChartRow, Row, RowGroup, Section, Table, with_interval


def headlines(results: StudyResults) -> list[str]:
    """A sentence on each baseline's comparisons on validation, or on why there are none.

    A recipe's only arm has no sentence: lines before the run say why.
    """
    baselines = results.baselines
    if not results.seeds:
        unfinished = "; ".join(f"seed {seed}: {why}" for seed, why in results.left_out.items())
        return [f"Nothing can be compared yet: no seed is finished ({unfinished})."]
    if results.elsewhere:
        return [
            f"Nothing is compared: these are the records of {', '.join(results.peers)} alone, from a run that "
            f"{', '.join(results.elsewhere)} joined too. A comparison needs the records of all peers."
        ]
    if len(results.arms) == 1 and not results.not_run:
        return []
    if not baselines:
        return ['Nothing is compared: no baseline was run (experiment.baselines names them, by default ["alone"]).']
    if not results.comparisons:
        be = "is the only arm" if len(baselines) == 1 else "are the only arms"
        return [f"Nothing is compared: {' and '.join(baselines)} {be}."]
    return [_headline(results, baseline) for baseline in baselines]


def _headline(results: StudyResults, baseline: str) -> str:
    peers, means = (
        [c for c in compared if c.split == VALIDATION and c.baseline == baseline]
        for compared in (results.comparisons, results.together)
    )
    budgets, n = {c.equal for c in peers}, len(results.seeds)
    equally = f" ({budgets.pop()})" if len(budgets) == 1 else ""
    who = f", mean over {len(results.peers)} peers" if means else ""
    if n == 1:
        differences = ", ".join(f"{c.arm} {number(c.mean, '+')}" for c in means or peers)
        return (
            f"Against {baseline} on validation{equally}{who}: {differences}. One seed cannot tell a gain from luck; "
            f"--seeds trains several."
        )
    against = f"{baseline} on validation{equally}, over {counted(n, 'seed')}: "
    if not means:
        return f"Of {counted(len(peers), 'comparison')} with {against}{_by_label(peers)}."
    return f"The mean over peers against {against}{_by_label(means)}. Peer by peer: {_by_label(peers)}."


def _by_label(compared: Sequence[Comparison]) -> str:
    labels = [c.label for c in compared]
    counts = [f"{labels.count(label)} {label}" for label in ("better", "worse")]
    return f"{', '.join(counts)}, {labels.count('no difference shown')} with no difference shown"


@dataclass(frozen=True)
class SplitAccuracy:
    """The accuracy on one split, peer by peer, folded if they are many, and of their mean if that is compared."""

    heading: str
    means: Table | None
    table: Table
    folded: bool


@dataclass(frozen=True)
class Verdict:
    """The section of cautions, and of accuracies with tests; ``comparisons`` says how many p is corrected for."""

    baselines: str
    comparisons: str
    last_evaluations: int
    cautions: Sequence[str]
    splits: Sequence[SplitAccuracy]


@dataclass(frozen=True)
class SplitCurves:
    """The curves of one split, peer by peer, folded if they are many, and of their mean if that is compared."""

    heading: str
    mean: ChartRow | None
    panels: ChartRow
    peers: int
    folded: bool


@dataclass(frozen=True)
class Curves:
    intro: str
    splits: Sequence[SplitCurves]


def verdict(study: Study, results: StudyResults, styles: Mapping[str, Style]) -> Verdict:
    family = len(results.comparisons) + len(results.together)
    comparisons = counted(family, "comparison") if family else ""
    baselines, cautions = ", ".join(results.baselines), _cautions(study, results)
    return Verdict(baselines, comparisons, LAST_EVALUATIONS, cautions, accuracy(results, styles))


def model_in_words(peer: PeerConfig) -> str:
    """The model that a peer trains, and the part of it that is trained, in words."""
    how = f"LoRA, r = {peer.lora_r}" if peer.train == "lora" else "trained in full"
    return f"{peer.model}, {how}"


def _cautions(study: Study, results: StudyResults) -> list[str]:
    cautions = [f"Seed {seed} is left out: {why}." for seed, why in results.left_out.items()]
    cautions += [f"Arm {arm} was not run." for arm in results.not_run]
    if results.elsewhere:
        cautions.append(
            f"This peer learned together with {', '.join(results.elsewhere)}, whose records are on other machines: "
            f"the page shows what this peer measured."
        )
    else:
        wanted = study.recipe.experiment.baselines if len(study.arms) + len(study.not_run) > 1 else ()
        missing = [baseline for baseline in wanted if baseline not in results.baselines]
        consequence = "is not compared with" if results.baselines else "is not among the arms: nothing is compared"
        cautions += [f"The baseline {baseline} {consequence}." for baseline in missing]
    cautions += [matched.text for matched in results.matched]
    cautions += [note[0].upper() + note[1:] + "." for note in results.notes]
    return cautions


def curves(study: Study, results: StudyResults, styles: Mapping[str, Style]) -> Curves:
    n = len(study.seeds_shown)
    measure = results.accuracy_is
    intro = f"{measure[0].upper()}{measure[1:]}, on held-out problems; on validation over rounds, over the tokens that "
    intro += "the peer sampled itself, and over the seconds that it worked itself, waiting for the others left out. "
    if n == 1:
        intro += "One seed, so no band."
    elif n < figures.MIN_SEEDS_OF_BAND:
        intro += (
            f"Bold: mean over {n} seeds; thin: each seed. A 95% band of two seeds would fill the panels: none is drawn."
        )
    else:
        intro += f"Bold: mean over {n} seeds; band: its 95% interval (Student’s t); thin: each seed."
    if not study.seeds:
        intro += " Unfinished seeds, as far as they are."
    return Curves(intro, [_split_curves(results, split, styles) for split in results.splits])


def _split_curves(results: StudyResults, split: str, styles: Mapping[str, Style]) -> SplitCurves:
    """The curves of one split: validation over rounds, tokens and seconds; other splits over rounds.

    On validation each peer has a line of panels. If means over peers are compared, or if there are many peers, the mean
    comes first.
    """
    overs = (figures.ROUNDS, figures.TOKENS, figures.SECONDS) if split == VALIDATION else (figures.ROUNDS,)
    peers = len(results.peers)
    mean, folded = None, peers > MOST_UNFOLDED
    if folded or results.together:
        mean = ChartRow.of(figures.learning_curves(results, split, styles, overs, of_mean=True), len(overs))
    of_peers = figures.learning_curves(results, split, styles, overs)
    panels = ChartRow.of(of_peers, len(overs) if len(overs) > 1 else peers)
    return SplitCurves(_heading(split), mean, panels, peers, folded)


SHOWN = ("better", "worse")
"""The verdicts with which a difference counts as shown."""


SPENT: Mapping[str, Mapping[str, Callable[[Spent], str]]] = {
    "Rollouts per round, tokens over all rounds": {
        "Rounds": lambda spent: amount(spent.rounds),
        "Trained on": lambda spent: amount(spent.rollouts_trained, spent.rounds),
        "Generated": lambda spent: amount(spent.rollouts_generated, spent.rounds),
        "Tokens generated": lambda spent: amount(spent.tokens_generated),
    },
    "Seconds and bytes over all rounds": {
        "Sampling": lambda spent: seconds_text(spent.seconds_sampling),
        "Exchange": lambda spent: seconds_text(spent.seconds_exchange),
        "Training": lambda spent: seconds_text(spent.seconds_training),
        "Own seconds": lambda spent: seconds_text(spent.seconds),
        "Waited": lambda spent: seconds_text(spent.seconds_waited),
        "MB sent": lambda spent: f"{spent.bytes_sent / 1e6:.2f}",
        "MB received": lambda spent: f"{spent.bytes_received / 1e6:.2f}",
    },
}
"""Two tables of a peer's cost: for each column, its text."""


@dataclass(frozen=True)
class Cost:
    """The section of budgets and cost; with ``means`` over many peers, their own tables are folded.

    Attributes:
        collaborative: whether the peers of any arm learn together, so that joining can have saved something.
    """

    collaborative: bool
    means: Sequence[Table]
    rollouts: Table
    seconds: Table


def accuracy(results: StudyResults, styles: Mapping[str, Style]) -> list[SplitAccuracy]:
    """The tables of accuracy, by split; none while no seed is finished."""
    splits = []
    for s in results.splits if results.seeds else ():
        means = _means_table(results, s, styles)
        folded = means is not None and len(results.peers) > MOST_UNFOLDED
        splits.append(SplitAccuracy(_heading(s), means, _accuracy_table(results, s, styles), folded))
    return splits


def _means_table(results: StudyResults, split: str, styles: Mapping[str, Style]) -> Table | None:
    """A row per arm: the mean over peers, and its distance from each baseline."""
    compared = {(c.arm, c.baseline): c for c in results.together if c.split == split}
    if not compared:
        return None
    peers, baselines = results.peers, results.baselines
    rows: list[Row] = []
    for arm, measured in results.accuracy[split].items():
        start = Cell(number(fmean(measured[peer].start.mean for peer in peers)))
        final = with_interval(results.accuracy_of_mean[split][arm])
        differences = [_difference(compared.get((arm, baseline))) for baseline in baselines]
        rows.append([_arm(arm, styles), start, final, *differences])
    head = ["Arm", "Start", "Final", *(f"Against {baseline}" for baseline in baselines)]
    return Table(f"Mean over {len(peers)} peers on {split}", head, [RowGroup(None, rows)])


def _difference(comparison: Comparison | None) -> Cell:
    if comparison is None:
        return Cell()
    return with_interval(comparison, "+", strong=comparison.label in SHOWN)


def _accuracy_table(results: StudyResults, split: str, styles: Mapping[str, Style]) -> Table:
    """A row per arm and baseline; an arm's own accuracy stands in the first of its rows."""
    head = ["Arm", "Start", "Final"]
    if results.comparisons:
        head += ["Against", "Difference", "p", "p, Holm", "Verdict"]
    groups = []
    for peer in results.peers:
        rows: list[Row] = []
        for arm in results.arms:
            measured = results.accuracy[split][arm][peer]
            own = [Cell(number(measured.start.mean)), with_interval(measured.final)]
            compared = [c for c in results.comparisons if (c.split, c.peer, c.arm) == (split, peer, arm)]
            for c in compared:
                rows.append([_arm(arm, styles), *own, _arm(c.baseline, styles), *_test_cells(c)])
                own = [Cell(), Cell()]
            if not compared:
                rows.append([_arm(arm, styles), *own, *[Cell()] * (len(head) - 3)])
        groups.append(RowGroup(peer, rows))
    problems = max(entry.problems for by_peer in results.accuracy[split].values() for entry in by_peer.values())
    seeds = counted(len(results.seeds), "seed")
    return Table(f"{split}: {results.accuracy_is}, {seeds}, {problems} problems", head, groups)


def _test_cells(comparison: Comparison) -> list[Cell]:
    shown = comparison.label in SHOWN
    return [
        _difference(comparison),
        Cell(p_text(comparison.p_value)),
        Cell(p_text(comparison.p_adjusted), strong=shown),
        Cell(comparison.label if shown else "not shown", strong=shown),
    ]


def cost(study: Study, results: StudyResults, styles: Mapping[str, Style]) -> Cost | None:
    """The section of budgets and cost; None while no seed is finished."""
    if not results.seeds:
        return None
    budget, arms, peers = results.budget, results.arms, results.peers
    of_peers: dict[str | None, dict[str, Spent]] = {peer: {arm: budget[arm][peer] for arm in arms} for peer in peers}
    rollouts, seconds = _spent_tables("means over seeds", of_peers, styles)
    means: Sequence[Table] = []
    if len(peers) > MOST_UNFOLDED:
        of_mean = {arm: mean_spent(budget[arm].values()) for arm in arms}
        means = _spent_tables(f"means over seeds and {len(peers)} peers", {None: of_mean}, styles)
    together = any(arm.config.collaborate for arm in study.arms) and study.recipe.swarm_size > 1
    return Cost(together, means, rollouts, seconds)


def _spent_tables(
    means: str, spent: Mapping[str | None, Mapping[str, Spent]], styles: Mapping[str, Style]
) -> list[Table]:
    """Two tables, of rollouts, and of seconds and bytes: under each title a row per arm."""
    tables = []
    for caption, columns in SPENT.items():
        groups = []
        for title, by_arm in spent.items():
            rows = [[_arm(arm, styles), *(Cell(text(row)) for text in columns.values())] for arm, row in by_arm.items()]
            groups.append(RowGroup(title, rows))
        tables.append(Table(f"{caption}; {means}", ["Arm", *columns], groups))
    return tables


def _heading(split: str) -> str:
    return "Validation" if split == VALIDATION else f"Out of distribution: {split}"


def _arm(name: str, styles: Mapping[str, Style]) -> Cell:
    return Cell(arm=ArmLabel(name, styles[name].ink))


def sections(study: Study, results: StudyResults) -> list[Section]:
    """Accuracy with verdicts, curves over arms, budgets and cost; a section without content is left out."""
    styles = arm_styles(results.arms, results.baselines)
    found = [
        Section("verdict", "Verdict", verdict(study, results, styles)),
        Section("curves", "Learning curves", curves(study, results, styles)),
        Section("cost", "Budgets and cost", cost(study, results, styles)),
    ]
    return [section for section in found if section.view is not None]
