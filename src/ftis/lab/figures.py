"""Figures of accuracy: learning curves over rounds, own tokens and own seconds, and differences from a baseline.

A panel shows one peer, so that a page can set panels beside each other where there is room and below each other on a
phone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftis.lab.drawing import (
    INK,
    RULE,
    SOFT,
    Panel,
    Style,
    label_ends,
    round_axis,
    save_panel,
    say_instead,
    short,
    spent_axis,
)
from ftis.lab.reading import VALIDATION, read_run

MIN_SEEDS_OF_BAND = 3
"""The 95 % band of two seeds is 18 times as wide as they lie apart: a wash over the whole panel that says nothing."""


@dataclass(frozen=True)
class Over:
    """What a learning curve runs over: ``key`` is where a point of it has the values, "" for rounds."""

    key: str
    label: str
    unknown: str = ""

    def mean(self, point: Mapping[str, Any]) -> float:
        return float(point[self.key]["mean"] if self.key else point["step"])

    def of_seed(self, point: Mapping[str, Any], seed: str) -> float:
        return float(point[self.key]["per_seed"][seed] if self.key else point["step"])


ROUNDS = Over("", "round")
TOKENS = Over("tokens", "tokens that the peer sampled itself", "the tokens it sampled were not recorded")
SECONDS = Over("seconds", "seconds of its own work", "its own seconds are unknown: waiting was not told apart")


def learning(
    directory: Path,
    split: str,
    peer: str,
    curves: Mapping[str, Sequence[Mapping[str, Any]]],
    styles: Mapping[str, Style],
    limits: tuple[float, float],
    over: Over = ROUNDS,
) -> Panel:
    """Accuracy of one peer: an arm's mean over seeds with its 95 % band, and each seed as a thin line.

    Over tokens or seconds, means are drawn at the mean over seeds of what had been spent by that evaluation; points of
    which that is unknown are left out.
    """
    known = {arm: [p for p in points if not over.key or p[over.key]] for arm, points in curves.items()}

    def draw(axis: Any) -> None:
        ends: list[tuple[float, str, str]] = []
        for arm, points in known.items():
            # The untrained model alone is no curve, but where nothing else was measured it is all there is.
            if points and (len(points) > 1 or len(curves[arm]) == 1):
                _draw_arm(axis, points, styles[arm], over)
                ends.append((points[-1]["mean"], arm, styles[arm].colour))
        if not ends:
            say_instead(axis, over.unknown or "nothing was measured")
            return
        axis.set_ylim(*limits)
        if over.key:
            spent_axis(axis, over.label)
        else:
            round_axis(axis)
        label_ends(axis, ends)

    arms = ", ".join(f"{arm} {points[-1]['mean']:.3f}" for arm, points in curves.items() if points)
    alt = f"{peer}, {split}: greedy pass@1 over {over.key or 'rounds'}; at the end {arms}"
    name = f"learning-{split}-{peer}" + (f"-over-{over.key}" if over.key else "")
    return save_panel(directory, name, short(peer), f"{split}, greedy pass@1", alt, draw)


def _draw_arm(axis: Any, points: Sequence[Mapping[str, Any]], style: Style, over: Over) -> None:
    seeds = list(dict.fromkeys(seed for p in points for seed in p["per_seed"]))
    if len(seeds) >= MIN_SEEDS_OF_BAND:
        banded = [p for p in points if p["low"] is not None]
        axis.fill_between(
            [over.mean(p) for p in banded],
            [p["low"] for p in banded],
            [p["high"] for p in banded],
            color=style.colour,
            alpha=0.13,
            lw=0,
        )
    if len(seeds) > 1:
        for seed in seeds:
            of_seed = [(over.of_seed(p, seed), p["per_seed"][seed]) for p in points if seed in p["per_seed"]]
            axis.plot(*zip(*of_seed, strict=True), color=style.colour, lw=0.6, alpha=0.45)
    axis.plot(
        [over.mean(p) for p in points],
        [p["mean"] for p in points],
        color=style.colour,
        ls=style.line,
        lw=1.9,
        marker=style.marker,
        ms=3.6,
        zorder=3,
    )


def accuracy_limits(curves: Iterable[Sequence[Mapping[str, Any]]]) -> tuple[float, float]:
    """One axis for all panels of a split, from what was measured and not from bands, which few seeds make very wide."""
    values = [value for points in curves for point in points for value in point["per_seed"].values()]
    low, high = min(values, default=0.0), max(values, default=1.0)
    room = max(0.12 * (high - low), 0.02)
    return max(-0.02, low - room), min(1.02, high + room)


def differences(
    directory: Path, peer: str, comparisons: Sequence[Mapping[str, Any]], styles: Mapping[str, Style]
) -> Panel:
    """Final accuracy minus one baseline's, a row per arm and split: mean, 95 % interval, and a dot per seed."""
    baseline = comparisons[0]["baseline"]

    def draw(axis: Any) -> None:
        far = max(abs(v) for c in comparisons for v in (*c["per_seed"].values(), c["mean"]))
        ends = [abs(v) for c in comparisons for v in (c["low"], c["high"]) if v is not None]
        reach = max(0.02, min(max([far, *ends]), max(2.5 * far, 0.05))) * 1.12
        splits = list(dict.fromkeys(c["split"] for c in comparisons))
        ticks = []
        for row, c in enumerate(comparisons):
            y = -(row + 0.3 * splits.index(c["split"]))
            style, mean = styles[c["arm"]], c["mean"]
            ticks.append((y, f"{short(c['arm'])}\n{short(c['split'])}"))
            if c["low"] is not None:
                axis.plot([max(c["low"], -reach), min(c["high"], reach)], [y, y], color=style.colour, lw=2.2)
                for bound, edge, marker in ((c["low"], -reach, "<"), (c["high"], reach, ">")):
                    if abs(bound) > reach:
                        axis.plot(edge, y, marker=marker, ms=6, color=style.colour, clip_on=False)
            dots = list(c["per_seed"].values())
            axis.plot(dots, [y + 0.24] * len(dots), ls="", marker="o", ms=3.2, mew=0, color=style.colour, alpha=0.55)
            axis.plot(mean, y, marker=style.marker, ms=7, color=style.colour, mec="white", mew=1, zorder=3)
        axis.axvline(0, color=INK, lw=1)
        axis.set_xlim(-reach, reach)
        axis.set_ylim(ticks[-1][0] - 0.5, 0.6)
        axis.set_yticks([y for y, _ in ticks], [label for _, label in ticks])
        axis.tick_params(axis="y", length=0, pad=9)
        axis.grid(axis="x", color=RULE, lw=0.7)
        axis.spines["left"].set_visible(False)
        axis.set_xlabel(f"final − {short(baseline)}")
        for x, text, side in ((0, "← worse", "left"), (1, "better →", "right")):
            below = {"xycoords": "axes fraction", "textcoords": "offset points", "xytext": (0, -27)}
            axis.annotate(text, (x, 0), ha=side, color=SOFT, annotation_clip=False, **below)

    text = "; ".join(f"{c['arm']} on {c['split']} {c['mean']:+.3f}" for c in comparisons)
    splits = len({c["split"] for c in comparisons})
    height = 1.3 + 0.46 * (len(comparisons) + 0.3 * (splits - 1))
    alt = f"{peer}: final accuracy minus {baseline}: {text}"
    name, subtitle = f"difference-{peer}-from-{baseline}".replace(" ", "~"), f"difference from {short(baseline)}"
    return save_panel(directory, name, short(peer), subtitle, alt, draw, height)


def plot_learning_curves(directory: Path) -> Path:
    """Draw a run's accuracy over rounds as ``learning_curves.png``: a column per peer, validation above, OOD below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    run = read_run(directory)
    started = {key: peer for key, peer in run.peers.items() if peer.evaluations}
    arms, peers = (list(dict.fromkeys(key[i] for key in started)) for i in (0, 1))
    found = dict.fromkeys(split for peer in started.values() for split in peer.splits)
    splits = [VALIDATION, *(split for split in found if split != VALIDATION)]
    figure = Figure(figsize=(4.2 * len(peers) + 1.2, 3.1 * len(splits) + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(splits), len(peers), sharex=True, sharey=True, squeeze=False)
    for column, name in enumerate(peers):
        for row, split in enumerate(splits):
            axis = axes[row][column]
            for arm in arms:
                points = started[arm, name].on(split) if (arm, name) in started else ()
                axis.plot([p.step for p in points], [p.accuracy for p in points], marker="o", ms=3, label=arm)
            axis.set_ylim(-0.02, 1.02)
            axis.grid(alpha=0.3)
            axis.set_title(f"{name}: {split}", fontsize=10)
            if column == 0:
                axis.set_ylabel("greedy pass@1")
            if row == len(splits) - 1:
                axis.set_xlabel("round")
    axes[0][0].legend(fontsize=9)
    path = directory / "learning_curves.png"
    figure.savefig(path, dpi=120)
    return path
