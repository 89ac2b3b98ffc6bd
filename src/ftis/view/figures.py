"""The charts of the pages: accuracy, and the exchange between peers.

A chart shows one peer or one pair of peers. So a page can set charts side by side if there is room, and one below the
other on a phone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from ftis.comparison.values import Amount, CurvePoint, StudyResults
from ftis.metric_keys import K1, K3, RATIO
from ftis.records.files import write_whole
from ftis.records.plan import CURVES
from ftis.view.charts import ROUND, Chart, Plot, Style, arm_styles, short
from ftis.view.pairs import PairMeasures
from ftis.view.sections import render_figure

MOST_SIDE_BY_SIDE = 8
"""The most charts in a line of ``learning_curves.svg``."""

MEAN = "mean over peers"
"""The name of the mean in charts. No peer can have it, since a peer's name has no blanks."""

MIN_SEEDS_OF_BAND = 3
"""The fewest seeds with a band. The 95 % band of two seeds is 13 times as wide as their distance and says nothing."""


@dataclass(frozen=True)
class XAxis:
    """The x axis of a learning curve: its name, its label, and the x of a point, None if that is unknown."""

    name: str
    label: str
    of: Callable[[CurvePoint], Amount | None]


ROUNDS = XAxis("rounds", ROUND, lambda point: Amount(point.step, dict.fromkeys(point.per_seed, point.step)))
TOKENS = XAxis("tokens", "tokens that the peer sampled itself", lambda point: point.tokens)
SECONDS = XAxis("seconds", "seconds of its own work", lambda point: point.seconds)


def learning(
    split: str,
    peer: str,
    curves: Mapping[str, Sequence[CurvePoint]],
    styles: Mapping[str, Style],
    limits: tuple[float, float],
    over: XAxis,
    measure: str,
) -> Chart:
    """Accuracy of one peer: an arm's mean over seeds with its 95 % band, and each seed as a thin line.

    Over tokens or seconds, the x of a mean is the mean over seeds of the amount spent by that evaluation. Points with
    an unknown amount are left out.
    """
    known = {arm: [(x, p) for p in points if (x := over.of(p))] for arm, points in curves.items()}
    # The untrained model's point alone is drawn only if nothing else was measured.
    drawn = {arm: points for arm, points in known.items() if points and (len(points) > 1 or len(curves[arm]) == 1)}
    arms = ", ".join(f"{arm} {points[-1].mean:.3f}" for arm, points in curves.items() if points)
    alt = f"{peer}, {split}: {measure} over {over.name}; at the end {arms}"
    subtitle = f"{split}, {measure}"
    if not drawn:
        return Chart(short(peer), alt, subtitle=subtitle, empty="nothing was measured")
    ends: list[float] = []
    for points in drawn.values():
        for x, _ in points:
            ends += [x.mean, *x.per_seed.values()]
    plot = Plot((min(ends) if over is ROUNDS else 0.0, max(ends)), limits, over.label)
    for arm, points in drawn.items():
        _draw_arm(plot, arm, points, styles[arm])
    return plot.chart(short(peer), alt, subtitle)


def learning_curves(
    results: StudyResults,
    split: str,
    styles: Mapping[str, Style],
    overs: Sequence[XAxis] = (ROUNDS,),
    of_mean: bool = False,
) -> list[Chart]:
    """Learning curves of one split on one scale, of each peer or of the mean over peers, over each of ``overs``."""
    by_arm, measure = results.curves[split], results.accuracy_is
    named = {peer: {arm: by_arm[arm][peer] for arm in results.arms} for peer in results.peers}
    if of_mean:
        named = {MEAN: dict(results.curves_of_mean[split])}
    drawn = (point for curves in named.values() for points in curves.values() for point in points)
    limits = accuracy_limits([value for point in drawn for value in point.per_seed.values()])
    return [learning(split, peer, one, styles, limits, over, measure) for peer, one in named.items() for over in overs]


def _draw_arm(plot: Plot, arm: str, points: Sequence[tuple[Amount, CurvePoint]], style: Style) -> None:
    seeds = list(dict.fromkeys(seed for _, p in points for seed in p.per_seed))
    if len(seeds) >= MIN_SEEDS_OF_BAND:
        with_ends = [(x.mean, p.low, p.high) for x, p in points if p.low is not None and p.high is not None]
        plot.band(with_ends, style.ink)
    if len(seeds) > 1:
        for seed in seeds:
            of_seed = [(x.per_seed[seed], p.per_seed[seed]) for x, p in points if seed in p.per_seed]
            plot.line(of_seed, style.ink, width=0.6, opacity=0.45)
    means = [(x.mean, p.mean) for x, p in points]
    plot.line(means, style.ink, arm, width=1.9, dashes=style.dashes, dotted=True)


def accuracy_limits(values: Sequence[float]) -> tuple[float, float]:
    """The ends of one axis for all panels of a split, with room around the values; of shares at most 1.02.

    Bands do not count: those of few seeds are very wide.
    """
    low, high = min(values, default=0.0), max(values, default=1.0)
    room = max(0.12 * (high - low), 0.02)
    return max(-0.02, low - room) if low >= 0 else low - room, min(1.02, high + room) if high <= 1 else high + room


def write_learning_curves(directory: Path, results: StudyResults) -> Path:
    """Draw accuracy over rounds as ``learning_curves.svg``: a column per peer, a row per split.

    The mean over several peers comes first, on its own line and scale. Beyond :data:`MOST_SIDE_BY_SIDE`, peers stand on
    further lines.
    """
    styles = arm_styles(results.arms, results.baselines)
    rows: list[Sequence[Chart]] = []
    for split in results.splits:
        mean = learning_curves(results, split, styles, of_mean=True) if len(results.peers) > 1 else []
        for charts in (mean, learning_curves(results, split, styles)):
            rows += [charts[i : i + MOST_SIDE_BY_SIDE] for i in range(0, len(charts), MOST_SIDE_BY_SIDE)]
    path = directory / CURVES
    write_whole(path, render_figure(rows), sync=False)
    return path


SMALLEST_RATIO = 1e-4
"""The smallest ratio on the axis. Smaller ratios are drawn on the edge: their tokens weigh next to nothing."""

NOTHING = "no rollout of it was weighed"

OUTLIER = 30
"""The largest KL on the axis, in medians. A larger one is drawn on the edge."""


def _title(heard: PairMeasures) -> str:
    return f"{short(heard.learner)} ← {short(heard.source)}"


def weights(heard: PairMeasures, cap: float | None) -> Chart:
    """π_old/π_gen per token: the range of all tokens, of the middle 80 %, and the median.

    Args:
        cap: C, above which the objective truncates; None if it is not known.
    """
    rounds = list(heard.values(f"{RATIO}/p50"))

    def series(quantile: str, over_seeds: Any = median) -> list[float]:
        return [max(over_seeds(values), SMALLEST_RATIO) for values in heard.values(f"{RATIO}/{quantile}").values()]

    alt = f"{heard.arm}, {heard.learner}: π_old/π_gen of {heard.source}'s tokens over rounds"
    subtitle = "weight per token, before truncation"
    if not rounds:
        return Chart(_title(heard), alt, subtitle=subtitle, empty=NOTHING)
    least, most = series("min", min), series("max", max)
    low, high = min(least) / 1.5, 1.5 * max(2 * (cap or 1.0), *most)
    plot = Plot((rounds[0], rounds[-1]), (low, high), ROUND, logarithmic=True)
    plot.band(list(zip(rounds, least, most, strict=True)), "weights", 0.16)
    plot.band(list(zip(rounds, series("p10"), series("p90"), strict=True)), "weights", 0.5)
    plot.line(list(zip(rounds, series("p50"), strict=True)), "ink", width=1.3)
    if cap is not None:
        plot.level(cap, f"C = {cap:g}")
    for ink, text, opacity in (("weights", "all tokens", 0.16), ("weights", "10–90%", 0.5), ("ink", "median", 1.0)):
        plot.legend(ink, text, opacity)
    return plot.chart(_title(heard), f"{alt}; largest {max(most):.3g}", subtitle)


def divergence(heard: PairMeasures, reduction: str | None, threshold: tuple[str, float] | None) -> Chart:
    """Mean KL of the source's rollouts by both estimators, and the filter's threshold.

    Args:
        reduction: the filter's reduction over a completion's tokens; None if it is not known.
        threshold: the filter's estimator and its threshold g; None without a filter, or if they are not known.
    """
    drawn = {"k1": ("dropped", heard.values(K1)), "k3": ("kept", heard.values(K3))}
    unit = {"sum": "nats per completion", "mean": "nats per token", None: "nats"}[reduction]
    alt = f"{heard.arm}, {heard.learner}: mean KL of {heard.source}'s rollouts over rounds, {unit}"
    alt += f"; threshold {threshold[1]:g} on {threshold[0]}" if threshold else ""
    subtitle = f"KL, {unit}"
    rounds = sorted({step for _, at_round in drawn.values() for step in at_round})
    if not rounds:
        return Chart(_title(heard), alt, subtitle=subtitle, empty=NOTHING)
    heights = [value for _, at_round in drawn.values() for values in at_round.values() for value in values]
    middle = max(sorted(map(abs, heights))[len(heights) // 2], 1e-9)
    low, high = max(min(heights), -OUTLIER * middle), min(max(heights), OUTLIER * middle)
    high = max(high, threshold[1]) if threshold else high
    room = 0.08 * (high - low)
    plot = Plot((rounds[0], rounds[-1]), (low - room, high + room), ROUND)
    ends = []
    for name, (ink, at_round) in drawn.items():
        if at_round:
            plot.band([(step, min(values), max(values)) for step, values in at_round.items()], ink, 0.15)
            means = [(float(step), fmean(values)) for step, values in at_round.items()]
            ends.append(f"{name} {means[-1][1]:.2f}")
            plot.line(means, ink, ends[-1], width=1.8)
    if threshold:
        plot.level(threshold[1], f"g = {threshold[1]:g} ({threshold[0]})")
    return plot.chart(_title(heard), f"{alt}; at the end {', '.join(ends)}", subtitle)
