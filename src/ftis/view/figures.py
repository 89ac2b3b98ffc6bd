"""Charts of accuracy: learning curves over rounds, own tokens and own seconds, and differences from a baseline.

A chart shows one peer, so that a page can set charts beside each other where there is room and below each other on a
phone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ftis.check.formatting import true_minus
from ftis.comparison.summary import accuracy_is
from ftis.records.reading import VALIDATION, PeerRun, read_run
from ftis.view.drawing import Style, arm_styles, short
from ftis.view.figure_files import write_sheet
from ftis.view.plots import BOTTOM, ROUND, TOP, Chart, Panel, Plot, Tick, empty

MOST_SIDE_BY_SIDE = 8
"""Panels in a line of ``learning_curves.png``."""

MOST_OF_USUAL = 3.0
"""How many times as far as the median row of a chart of differences reaches its axis goes at most."""

MEAN = "mean over peers"
"""No peer can be called so: a name has no blanks."""

MIN_SEEDS_OF_BAND = 3
"""The 95 % band of two seeds is 18 times as wide as they lie apart: a wash over the whole chart that says nothing."""


@dataclass(frozen=True)
class XAxis:
    """What a learning curve runs over: ``key`` is where a point of it has the values, "" for rounds."""

    key: str
    label: str
    unknown: str = ""

    def mean(self, point: Mapping[str, Any]) -> float:
        return float(point[self.key]["mean"] if self.key else point["step"])

    def of_seed(self, point: Mapping[str, Any], seed: str) -> float:
        return float(point[self.key]["per_seed"][seed] if self.key else point["step"])


ROUNDS = XAxis("", ROUND)
TOKENS = XAxis("tokens", "tokens that the peer sampled itself", "the tokens it sampled were not recorded")
SECONDS = XAxis("seconds", "seconds of its own work", "its own seconds are unknown: waiting was not told apart")


def learning(
    split: str,
    peer: str,
    curves: Mapping[str, Sequence[Mapping[str, Any]]],
    styles: Mapping[str, Style],
    limits: tuple[float, float],
    over: XAxis,
    measure: str,
) -> Panel:
    """Accuracy of one peer: an arm's mean over seeds with its 95 % band, and each seed as a thin line.

    Over tokens or seconds, means are drawn at the mean over seeds of what had been spent by that evaluation; points of
    which that is unknown are left out.
    """
    known = {arm: [p for p in points if not over.key or p[over.key]] for arm, points in curves.items()}
    # The untrained model alone is no curve, but where nothing else was measured it is all there is.
    drawn = {arm: points for arm, points in known.items() if points and (len(points) > 1 or len(curves[arm]) == 1)}
    arms = ", ".join(f"{arm} {points[-1]['mean']:.3f}" for arm, points in curves.items() if points)
    alt = f"{peer}, {split}: {measure} over {over.key or 'rounds'}; at the end {arms}"
    name = (f"learning-{split}-{peer}" + (f"-over-{over.key}" if over.key else "")).replace(" ", "~")
    subtitle = f"{split}, {measure}"
    if not drawn:
        return Panel(name, empty(short(peer), alt, over.unknown or "nothing was measured", subtitle))
    ends = [over.mean(p) for points in drawn.values() for p in points]
    plot = Plot((0.0 if over.key else min(ends), max(ends)), limits, over.label)
    for arm, points in drawn.items():
        _draw_arm(plot, arm, points, styles[arm], over)
    return Panel(name, plot.chart(short(peer), alt, subtitle))


def of_split(
    results: Mapping[str, Any], split: str, styles: Mapping[str, Style], overs: Sequence[XAxis] = (ROUNDS,)
) -> list[Panel]:
    """Learning curves of one split on the same scale: peer by peer, each over all of ``overs``."""
    by_arm, arms, peers = results["curves"][split], results["arms"], results["peers"]
    limits = accuracy_limits(by_arm[arm][peer] for arm in arms for peer in peers)
    of_peers = [(peer, {arm: by_arm[arm][peer] for arm in arms}) for peer in peers]
    measure = results["accuracy_is"]
    return [learning(split, peer, curves, styles, limits, over, measure) for peer, curves in of_peers for over in overs]


def of_mean(
    results: Mapping[str, Any], split: str, styles: Mapping[str, Style], overs: Sequence[XAxis] = (ROUNDS,)
) -> list[Panel]:
    """Learning curves of the mean over peers on one split, over all of ``overs``."""
    curves, measure = results["curves_of_mean"][split], results["accuracy_is"]
    limits = accuracy_limits(curves.values())
    return [learning(split, MEAN, curves, styles, limits, over, measure) for over in overs]


def _draw_arm(plot: Plot, arm: str, points: Sequence[Mapping[str, Any]], style: Style, over: XAxis) -> None:
    seeds = list(dict.fromkeys(seed for p in points for seed in p["per_seed"]))
    if len(seeds) >= MIN_SEEDS_OF_BAND:
        plot.band([(over.mean(p), p["low"], p["high"]) for p in points if p["low"] is not None], style.ink)
    if len(seeds) > 1:
        for seed in seeds:
            of_seed = [(over.of_seed(p, seed), p["per_seed"][seed]) for p in points if seed in p["per_seed"]]
            plot.line(of_seed, style.ink, width=0.6, opacity=0.45)
    means = [(over.mean(p), p["mean"]) for p in points]
    plot.line(means, style.ink, arm, width=1.9, dashes=style.dashes, marker=style.marker)


def accuracy_limits(curves: Iterable[Sequence[Mapping[str, Any]]]) -> tuple[float, float]:
    """One axis for all panels of a split, from what was measured and not from bands, which few seeds make very wide."""
    values = [value for points in curves for point in points for value in point["per_seed"].values()]
    low, high = min(values, default=0.0), max(values, default=1.0)
    return with_room(low, high)


def with_room(low: float, high: float) -> tuple[float, float]:
    """An axis for values from ``low`` to ``high``; shares of 1 stay within it."""
    room = max(0.12 * (high - low), 0.02)
    return max(-0.02, low - room) if low >= 0 else low - room, min(1.02, high + room) if high <= 1 else high + room


def differences(peer: str, comparisons: Sequence[Mapping[str, Any]], styles: Mapping[str, Style]) -> Panel:
    """Final accuracy minus one baseline's, a row per arm and split: mean, 95 % interval, and a dot per seed.

    What lies beyond the axis stands as an arrow on its edge, a mean with its number.
    """
    baseline = comparisons[0]["baseline"]
    reach = _reach(comparisons)

    def shown(x: float, marker: str) -> str:
        return marker if abs(x) <= reach else "<" if x < 0 else ">"

    splits = list(dict.fromkeys(c["split"] for c in comparisons))
    rows = [-(i + 0.3 * splits.index(c["split"])) for i, c in enumerate(comparisons)]
    labels = [short(c["arm"]) + (f"\n{short(c['split'])}" if len(splits) > 1 else "") for c in comparisons]
    plot = Plot(
        (-reach, reach),
        (rows[-1] - 0.5, 0.6),
        f"final − {short(baseline)}",
        y_ticks=[Tick(y, label) for y, label in zip(rows, labels, strict=True)],
        left=110,
        right=14,
        height=TOP + BOTTOM + 14 + round(36 * (len(comparisons) + 0.3 * (len(splits) - 1))),
        upright=True,
    )
    plot.upright(0.0)
    for y, c in zip(rows, comparisons, strict=True):
        style = styles[c["arm"]]
        if c["low"] is not None:
            plot.line([(c["low"], y), (c["high"], y)], style.ink, width=2.2)
            for bound in (c["low"], c["high"]):
                if abs(bound) > reach:
                    plot.mark(bound, y, shown(bound, ""), style.ink, 3.5)
        for value in c["per_seed"].values():
            plot.mark(value, y + 0.24, shown(value, "o"), style.ink, 1.9, opacity=0.55)
        plot.mark(c["mean"], y, shown(c["mean"], style.marker), style.ink, 4)
        if abs(c["mean"]) > reach:
            at, height = plot.place(c["mean"], y - 0.3)
            plot.words(at, height, true_minus(f"{c['mean']:+.2f}"), "start" if c["mean"] < 0 else "end")
    plot.words(110, 7, "← worse")
    plot.words(346, 7, "better →", "end")
    text = "; ".join(f"{c['arm']} on {c['split']} {c['mean']:+.3f}" for c in comparisons)
    alt = f"{peer}: final accuracy minus {baseline}: {text}"
    name = f"difference-{peer}-from-{baseline}".replace(" ", "~")
    return Panel(name, plot.chart(short(peer), alt, f"difference from {short(baseline)}"))


def _reach(comparisons: Sequence[Mapping[str, Any]]) -> float:
    """How far an axis of differences goes to both sides: neither a single far row nor a wide interval sets it."""
    measured = [max(abs(v) for v in (*c["per_seed"].values(), c["mean"])) for c in comparisons]
    bounds = [[abs(v) for v in (c["low"], c["high"]) if v is not None] for c in comparisons]
    rows = [max([own, *ends]) for own, ends in zip(measured, bounds, strict=True)]
    most: float = min(max(rows), max(2.5 * max(measured), 0.05), MOST_OF_USUAL * median(rows))
    return 1.12 * max(0.02, most)


def plot_learning_curves(directory: Path) -> Path:
    """Draw a run's accuracy over rounds as ``learning_curves.png``: a column per peer, validation above, OOD below.

    Of more than :data:`MOST_SIDE_BY_SIDE` peers the others stand on further lines.
    """
    run = read_run(directory)
    started = {key: peer for key, peer in run.peers.items() if peer.evaluations}
    arms, peers = (list(dict.fromkeys(key[i] for key in started)) for i in (0, 1))
    found = dict.fromkeys(split for peer in started.values() for split in peer.splits)
    styles, measure = arm_styles(arms, []), accuracy_is(run.recipe)
    rows: list[Sequence[Chart]] = []
    for split in [VALIDATION, *(split for split in found if split != VALIDATION)]:
        rows += _in_lines(
            [
                _of_run(split, name, {a: started[a, name] for a in arms if (a, name) in started}, styles, measure)
                for name in peers
            ]
        )
    path = directory / "learning_curves.png"
    write_sheet(path, rows)
    return path


def plot_experiment(directory: Path, results: Mapping[str, Any]) -> Path:
    """Draw an experiment's accuracy over rounds as ``learning_curves.png``, with bands.

    The mean over several peers comes first, on a line and a scale of its own.
    """
    styles = arm_styles(results["arms"], results["baselines"])
    rows: list[Sequence[Chart]] = []
    for split in results["splits"]:
        mean = of_mean(results, split, styles) if len(results["peers"]) > 1 else []
        rows += _in_lines([panel.chart for panel in mean])
        rows += _in_lines([panel.chart for panel in of_split(results, split, styles)])
    path = directory / "learning_curves.png"
    write_sheet(path, rows)
    return path


def _in_lines(charts: Sequence[Chart]) -> list[Sequence[Chart]]:
    return [charts[i : i + MOST_SIDE_BY_SIDE] for i in range(0, len(charts), MOST_SIDE_BY_SIDE)]


def _of_run(split: str, peer: str, runs: Mapping[str, PeerRun], styles: Mapping[str, Style], measure: str) -> Chart:
    curves = {arm: [(float(p.step), p.accuracy) for p in run.on(split)] for arm, run in runs.items()}
    steps = [step for points in curves.values() for step, _ in points]
    if not steps:
        return empty(short(peer), "", "nothing was measured", f"{split}, {measure}")
    values = [accuracy for points in curves.values() for _, accuracy in points]
    shares = min(values) >= 0 and max(values) <= 1
    limits = (0.0, 1.0) if shares else with_room(min(values), max(values))
    plot = Plot((min(steps), max(steps)), limits, ROUND)
    for arm, points in curves.items():
        plot.line(points, styles[arm].ink, arm, dashes=styles[arm].dashes, marker=styles[arm].marker)
    return plot.chart(short(peer), "", f"{split}, {measure}")
