"""The page's first sections: verdicts per peer and baseline, what to know before believing them, and curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ftis.check.formatting import counted, number, true_minus
from ftis.comparison.results import by_budget
from ftis.config import PeerConfig
from ftis.records.reading import LAST_EVALUATIONS, VALIDATION, Study
from ftis.view import figures
from ftis.view.drawing import Style
from ftis.view.plots import Panel
from ftis.view.views import MOST_UNFOLDED, ArmLabel, PanelRow, split_heading

SYMBOLS = {"better": "▲", "worse": "▼", "no difference shown": "○"}


@dataclass(frozen=True)
class VerdictRow:
    """An arm's verdict on one split; ``split`` is "" for validation, ``kind`` is "better", "worse" or "no"."""

    arm: ArmLabel
    split: str
    kind: str
    symbol: str
    label: str
    text: str


@dataclass(frozen=True)
class ProgressRow:
    """An arm's way from start to end, where nothing is compared."""

    arm: ArmLabel
    text: str


@dataclass(frozen=True)
class VerdictGroup:
    """The verdicts against one baseline; ``equal`` says in words which budget is the same."""

    baseline: ArmLabel
    equal: str
    verdicts: Sequence[VerdictRow]
    figure: Panel


@dataclass(frozen=True)
class Card:
    """The verdicts on one peer, or on the mean over all; ``model`` says which model it trains."""

    peer: str
    model: str
    groups: Sequence[VerdictGroup]
    progress: Sequence[ProgressRow]


@dataclass(frozen=True)
class Verdicts:
    """The section.

    Attributes:
        comparisons: the number of those that p is corrected for, in words; "" if none.
        mean: the mean over peers; None where there is one peer, or nothing is compared.
        folded: whether the cards are shown on request only, as there are many.
    """

    baselines: str
    comparisons: str
    last_evaluations: int
    mean: Card | None
    cards: Sequence[Card]
    folded: bool
    cautions: Sequence[str]


@dataclass(frozen=True)
class SplitCurves:
    """The curves of one split.

    Attributes:
        mean: of the mean over peers, where it is compared or there are many peers; else None.
        folded: whether those of the peers lie under a line that opens, as there are many.
    """

    heading: str
    mean: PanelRow | None
    panels: PanelRow
    peers: int
    folded: bool


@dataclass(frozen=True)
class Curves:
    intro: str
    splits: Sequence[SplitCurves]


def verdicts(study: Study, results: Mapping[str, Any], styles: Mapping[str, Style]) -> Verdicts:
    family = len(results["comparisons"]) + len(results["together"])
    return Verdicts(
        baselines=", ".join(results["baselines"]),
        comparisons=counted(family, "comparison") if family else "",
        last_evaluations=LAST_EVALUATIONS,
        mean=_mean_card(study, results, styles) if results["together"] else None,
        cards=[_card(study, study.recipe.peer(peer), results, styles) for peer in study.peer_names],
        folded=len(study.peer_names) > MOST_UNFOLDED and bool(results["together"]),
        cautions=_cautions(study, results),
    )


def _card(study: Study, peer: PeerConfig, results: Mapping[str, Any], styles: Mapping[str, Style]) -> Card:
    compared = [c for c in results["comparisons"] if c["peer"] == peer.name]
    progress = [] if compared else _progress(results, peer.name, styles)
    return Card(peer.name, model_in_words(peer), _groups(peer.name, compared, styles), progress)


def _mean_card(study: Study, results: Mapping[str, Any], styles: Mapping[str, Style]) -> Card:
    n = len(study.peer_names)
    return Card("The mean over peers", f"{n} peers", _groups(figures.MEAN, results["together"], styles), [])


def _groups(name: str, compared: Sequence[Mapping[str, Any]], styles: Mapping[str, Style]) -> list[VerdictGroup]:
    """Comparisons by baseline and budget; ``name`` is the peer's, or that of the mean."""
    return [
        VerdictGroup(
            baseline=ArmLabel(baseline, styles[baseline].ink),
            equal=equal,
            verdicts=[_verdict(c, styles) for c in group],
            figure=figures.differences(name, group, styles),
        )
        for (baseline, equal), group in by_budget(compared).items()
    ]


def _verdict(comparison: Mapping[str, Any], styles: Mapping[str, Style]) -> VerdictRow:
    arm, label = comparison["arm"], comparison["label"]
    return VerdictRow(
        arm=ArmLabel(arm, styles[arm].ink),
        split="" if comparison["split"] == VALIDATION else comparison["split"],
        kind=label.split()[0],
        symbol=SYMBOLS[label],
        label=label,
        text=true_minus(comparison["text"].removeprefix(label)),
    )


def model_in_words(peer: PeerConfig) -> str:
    """Which model a peer trains, and what of it."""
    how = {"full": "trained in full", "lora": f"LoRA, r = {peer.lora_r}", "subset": "a subset trained"}[peer.train]
    return f"{peer.model}, {how}"


def _progress(results: Mapping[str, Any], peer: str, styles: Mapping[str, Style]) -> list[ProgressRow]:
    rows = []
    for arm in results["arms"]:
        points = results["curves"][VALIDATION][arm][peer]
        if points:
            first, last = points[0], points[-1]
            text = f"{number(first['mean'])} at the start, {number(last['mean'])} after {last['step']} rounds"
            rows.append(ProgressRow(ArmLabel(arm, styles[arm].ink), text))
    return rows


def _cautions(study: Study, results: Mapping[str, Any]) -> list[str]:
    n = len(results["seeds"])
    cautions = [f"Seed {seed} is left out: {why}." for seed, why in results["left_out"].items()]
    cautions += [f"Arm {arm} was not run." for arm in results["not_run"]]
    if results["comparisons"] and n == 1:
        cautions.append("One seed cannot tell a difference from luck.")
    elif results["comparisons"] and n < 6:
        cautions.append(
            f"With {n} seeds the test without assumptions, sign flips, cannot give p below {2 / 2**n:.3g}; the t-test "
            f"can, but trusts that differences are spread normally."
        )
    if results["elsewhere"]:
        cautions.append(
            f"This peer learned together with {', '.join(results['elsewhere'])}, whose records are on other machines: "
            f"the page shows what this peer measured."
        )
    else:
        wanted = study.recipe.experiment.baselines
        missing = [baseline for baseline in wanted if baseline not in results["baselines"]]
        consequence = "is not compared with" if results["baselines"] else "is not among the arms: nothing is compared"
        cautions += [f"The baseline {baseline} {consequence}." for baseline in missing]
    cautions += [matched["text"] for matched in results["matched"]]
    cautions += [note[0].upper() + note[1:] + "." for note in results["notes"]]
    return cautions


def curves(study: Study, results: Mapping[str, Any], styles: Mapping[str, Style]) -> Curves:
    n = len(study.seeds_shown)
    measure = results["accuracy_is"]
    intro = f"{measure[0].upper()}{measure[1:]}, on held-out problems; on validation over rounds, over the tokens that "
    intro += "the peer sampled itself, and over the seconds that it worked itself, waiting for the others left out. "
    if n == 1:
        intro += "One seed, so no band."
    elif n < figures.MIN_SEEDS_OF_BAND:
        intro += f"Bold: mean over {n} seeds; thin: each seed. A 95% band of two seeds would fill the panels: none is "
        intro += "drawn."
    else:
        intro += f"Bold: mean over {n} seeds; band: its 95% interval (Student’s t); thin: each seed."
    if not study.seeds:
        intro += " Unfinished seeds, as far as they are."
    return Curves(intro, [_split_curves(results, split, styles) for split in results["splits"]])


def _split_curves(results: Mapping[str, Any], split: str, styles: Mapping[str, Style]) -> SplitCurves:
    """Validation over rounds, tokens and seconds, a line of panels per peer; the other splits over rounds.

    Where means over peers are compared, or of many peers, the mean comes first.
    """
    overs = (figures.ROUNDS, figures.TOKENS, figures.SECONDS) if split == VALIDATION else (figures.ROUNDS,)
    peers = len(results["peers"])
    mean, folded = None, peers > MOST_UNFOLDED
    if folded or results["together"]:
        mean = PanelRow.of(figures.of_mean(results, split, styles, overs), len(overs))
    panels = PanelRow.of(figures.of_split(results, split, styles, overs), len(overs) if len(overs) > 1 else peers)
    return SplitCurves(split_heading(split), mean, panels, peers, folded)
