"""The page's first sections: a verdict per arm and peer, what to know before believing it, and learning curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ftis.config import PeerConfig
from ftis.lab import figures
from ftis.lab.drawing import Panel, Style
from ftis.lab.formatting import counted, number, true_minus
from ftis.lab.reading import LAST_EVALUATIONS, VALIDATION, Study
from ftis.lab.views import ArmLabel, PanelRow, split_heading

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
class Card:
    peer: str
    model: str
    verdicts: Sequence[VerdictRow]
    progress: Sequence[ProgressRow]
    figure: Panel | None


@dataclass(frozen=True)
class Verdicts:
    """The section; ``comparisons`` says how many there are on validation, "" if none."""

    baseline: str | None
    comparisons: str
    last_evaluations: int
    cards: Sequence[Card]
    cautions: Sequence[str]


@dataclass(frozen=True)
class SplitCurves:
    heading: str
    panels: PanelRow


@dataclass(frozen=True)
class Curves:
    intro: str
    splits: Sequence[SplitCurves]


def verdicts(study: Study, results: Mapping[str, Any], styles: Mapping[str, Style]) -> Verdicts:
    on_validation = sum(c["split"] == VALIDATION for c in results["comparisons"])
    return Verdicts(
        baseline=results["baseline"],
        comparisons=counted(on_validation, "comparison") if results["comparisons"] else "",
        last_evaluations=LAST_EVALUATIONS,
        cards=[_card(study, study.recipe.peer(peer), results, styles) for peer in study.peer_names],
        cautions=_cautions(study, results),
    )


def _card(study: Study, peer: PeerConfig, results: Mapping[str, Any], styles: Mapping[str, Style]) -> Card:
    compared = [c for c in results["comparisons"] if c["peer"] == peer.name]
    rows = []
    for c in compared:
        rows.append(
            VerdictRow(
                arm=ArmLabel(c["arm"], styles[c["arm"]].colour),
                split="" if c["split"] == VALIDATION else c["split"],
                kind=c["label"].split()[0],
                symbol=SYMBOLS[c["label"]],
                label=c["label"],
                text=true_minus(c["text"].removeprefix(c["label"])),
            )
        )
    return Card(
        peer=peer.name,
        model=model_in_words(peer),
        verdicts=rows,
        progress=[] if compared else _progress(results, peer.name, styles),
        figure=figures.differences(study.directory / "figures", peer.name, compared, styles) if compared else None,
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
            rows.append(ProgressRow(ArmLabel(arm, styles[arm].colour), text))
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
    elif results["baseline"] is None:
        baseline = study.recipe.experiment.baseline
        cautions.append(f"The baseline {baseline} is not among the arms: nothing is compared.")
    cautions += [matched["text"] for matched in results["matched"]]
    cautions += [note[0].upper() + note[1:] + "." for note in results["notes"]]
    return cautions


def curves(study: Study, results: Mapping[str, Any], styles: Mapping[str, Style]) -> Curves:
    n = len(study.seeds_shown)
    intro = "Greedy pass@1 on held-out problems. "
    if n == 1:
        intro += "One seed, so no band."
    elif n < figures.MIN_SEEDS_OF_BAND:
        intro += f"Bold: mean over {n} seeds; thin: each seed. A 95% band of two seeds would fill the panels: none is "
        intro += "drawn."
    else:
        intro += f"Bold: mean over {n} seeds; band: its 95% interval (Student’s t); thin: each seed."
    if not study.seeds:
        intro += " Unfinished seeds, as far as they are."
    splits = []
    for split in results["splits"]:
        by_arm = results["curves"][split]
        limits = figures.accuracy_limits(by_arm[arm][peer] for arm in results["arms"] for peer in results["peers"])
        panels = []
        for peer in results["peers"]:
            of_peer = {arm: by_arm[arm][peer] for arm in results["arms"]}
            panels.append(figures.learning(study.directory / "figures", split, peer, of_peer, styles, limits))
        splits.append(SplitCurves(split_heading(split), PanelRow.of(panels, len(results["peers"]))))
    return Curves(intro, splits)
