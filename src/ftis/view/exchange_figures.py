"""Charts of what one peer took from another: participation, importance weights, shares, divergence.

Means are over seeds; what is shaded around a line is the range of seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, median

from ftis.view.arm_rounds import PairMeasures
from ftis.view.plots import (
    ROUND,
    Panel,
    Plot,
    Scale,
    Tick,
    both_sides_logarithmic,
    empty,
    linear,
    logarithmic,
    powers_of_ten,
)

PARTICIPATION = {
    "kept": ("kept", "kept"),
    "zero": ("zero advantage", "zero"),
    "dropped": ("dropped by the filter", "dropped"),
    "refused": ("refused or missing", "bad"),
}
"""What became of rollouts: its name and ink."""

SMALLEST_RATIO = 1e-4
"""Ratios below are drawn there: a token that the learner would never have written weighs nothing anyway."""

NOTHING = "no rollout of it was weighed"

MOST_BARS = 60

EFFECTIVE = "sampling/effective_sample_size"
RATIO, WEIGHT = "sampling/importance_sampling_ratio/", "sampling/importance_sampling_weight/"


def participation(heard: PairMeasures, expected: int) -> Panel:
    """What became of the source's rollouts, round by round; ``expected`` is how many it offers in a round."""
    counted = {"kept": "kept", "zero": "zero_advantage", "dropped": "dropped"}
    counts = {name: [fmean(of) for of in heard.values(measure, 0).values()] for name, measure in counted.items()}
    came = heard.values("admitted", 0)
    counts["refused"] = [fmean(max(0, expected - admitted) for admitted in of) for of in came.values()]
    total = sum(sum(of) for of in counts.values()) or 1
    parts = ", ".join(f"{PARTICIPATION[name][0]} {sum(of) / total:.0%}" for name, of in counts.items())
    alt = f"{heard.arm}, {heard.learner}: rollouts of {heard.source} per round; over all rounds {parts}"
    name, subtitle, rounds = heard.name("participation"), "rollouts per round", list(came)
    if not rounds:
        return Panel(name, empty(heard.title, alt, "no round was recorded", subtitle))
    most = max([expected, *(sum(of) for of in zip(*counts.values(), strict=True))])
    plot = Plot((rounds[0] - 0.5, rounds[-1] + 0.5), (0.0, most * 1.02), ROUND, right=14)
    floor = [0.0] * len(rounds)
    for kind, (label, ink) in PARTICIPATION.items():
        top = [low + count for low, count in zip(floor, counts[kind], strict=True)]
        _bars(plot, rounds, floor, top, ink)
        plot.legend(ink, label)
        floor = top
    return Panel(name, plot.chart(heard.title, alt, subtitle))


def _bars(plot: Plot, rounds: Sequence[int], floor: Sequence[float], top: Sequence[float], ink: str) -> None:
    """A bar per round; of many rounds, one area."""
    if len(rounds) <= MOST_BARS:
        for round, low, high in zip(rounds, floor, top, strict=True):
            plot.box((round - 0.43, round + 0.43), (low, high), ink)
    else:
        plot.band(list(zip(rounds, floor, top, strict=True)), ink, opacity=1.0)


def weights(heard: PairMeasures, cap: float) -> list[Panel]:
    """π_old/π_gen per token before and after truncation at C: all tokens, 10 % to 90 % of them, and the median."""
    kinds = {"before": RATIO, "after": WEIGHT}
    rounds = list(heard.values(f"{RATIO}p50"))

    def series(measure: str, over_seeds: Callable[[Iterable[float]], float] = median) -> list[float]:
        return [max(over_seeds(values), SMALLEST_RATIO) for values in heard.values(measure).values()]

    panels = []
    for when, key in kinds.items():
        alt = f"{heard.arm}, {heard.learner}: importance weights of {heard.source}'s tokens over rounds, "
        alt += f"{when} truncation at {cap:g}"
        name, subtitle = f"{heard.name('weights')}-{when}", f"weight per token, {when} truncation"
        if not rounds:
            panels.append(Panel(name, empty(heard.title, alt, NOTHING, subtitle)))
            continue
        alt += f"; largest {max(series(f'{key}max', max)):.3g}"
        low = min(series(f"{RATIO}min", min)) / 1.5
        high = 1.5 * max(2 * cap, *series(f"{RATIO}max", max))
        ticks = powers_of_ten(low, high)
        plot = Plot((rounds[0], rounds[-1]), (low, high), ROUND, y_scale=logarithmic, y_ticks=ticks)
        ends = [series(f"{key}{q}", of) for q, of in (("min", min), ("max", max))]
        plot.band(list(zip(rounds, *ends, strict=True)), "weights", 0.16)
        plot.band(list(zip(rounds, series(f"{key}p10"), series(f"{key}p90"), strict=True)), "weights", 0.5)
        plot.line(list(zip(rounds, series(f"{key}p50"), strict=True)), "ink", width=1.3)
        plot.level(cap, f"C = {cap:g}")
        for ink, text, opacity in (("weights", "all tokens", 0.16), ("weights", "10–90%", 0.5), ("ink", "median", 1.0)):
            plot.legend(ink, text, opacity)
        panels.append(Panel(name, plot.chart(heard.title, alt, subtitle)))
    return panels


def shares(heard: PairMeasures) -> Panel:
    """The truncated share of tokens and the effective sample size over rounds."""
    drawn = {
        "truncated": ("weights", heard.values("sampling/truncated_fraction")),
        "effective": ("kept", heard.values(EFFECTIVE)),
    }
    alt = f"{heard.arm}, {heard.learner}: share of {heard.source}'s tokens whose weight is truncated, "
    alt += "and effective sample size, over rounds"
    name, subtitle = heard.name("shares"), "share of tokens"
    rounds = _rounds(drawn)
    if not rounds:
        return Panel(name, empty(heard.title, alt, NOTHING, subtitle))
    ticks = [Tick(part / 4, f"{part / 4:.0%}") for part in range(5)]
    plot = Plot((rounds[0], rounds[-1]), (-0.02, 1.02), ROUND, y_ticks=ticks)
    ends = _lines_over_seeds(plot, drawn, "{label} {last:.0%}")
    return Panel(name, plot.chart(heard.title, f"{alt}; at the end {ends}", subtitle))


def divergence(heard: PairMeasures, reduction: str | None, threshold: tuple[str, float] | None = None) -> Panel:
    """Mean KL of the source's rollouts by both estimators, and the filter's threshold.

    Args:
        reduction: over a completion's tokens; None where it is not known.
        threshold: the estimator that the filter applies it to, and g; None without a filter.
    """
    drawn = {"k1": ("dropped", heard.values("kl/k1")), "k3": ("kept", heard.values("kl/k3"))}
    unit = {"sum": "nats per completion", "mean": "nats per token", None: "nats"}[reduction]
    alt = f"{heard.arm}, {heard.learner}: mean KL of {heard.source}'s rollouts over rounds, {unit}"
    alt += f"; threshold {threshold[1]:g} on {threshold[0]}" if threshold else ""
    name, subtitle = heard.name("kl"), f"KL, {unit}"
    rounds = _rounds(drawn)
    if not rounds:
        return Panel(name, empty(heard.title, alt, NOTHING, subtitle))
    heights = [value for _, at_round in drawn.values() for values in at_round.values() for value in values]
    middle = max(sorted(map(abs, heights))[len(heights) // 2], 1e-9)
    low, high = min(heights), max([*heights, *([threshold[1]] if threshold else [])])
    scale: Scale = linear
    ticks: list[Tick] | None = None
    if max(-low, high) > 30 * middle:
        inner = max(middle, 1e-3)
        scale = both_sides_logarithmic(inner)
        above = [tick for tick in powers_of_ten(inner, max(high, 10 * inner)) if tick.at <= high]
        below = [Tick(-tick.at, f"−{tick.text}") for tick in powers_of_ten(inner, max(-low, 10 * inner))]
        ticks = [Tick(0.0, "0"), *above, *(tick for tick in below if tick.at >= low)]
    room = 0.08 * (high - low)
    plot = Plot((rounds[0], rounds[-1]), (low - room, high + room), ROUND, y_scale=scale, y_ticks=ticks)
    ends = _lines_over_seeds(plot, drawn, "{label} {last:.2f}")
    if threshold:
        plot.level(threshold[1], f"g = {threshold[1]:g} ({threshold[0]})")
    return Panel(name, plot.chart(heard.title, f"{alt}; at the end {ends}", subtitle))


Drawn = Mapping[str, tuple[str, Mapping[int, Sequence[float]]]]
"""Lines by name: their ink, and values by finished rounds."""


def _rounds(drawn: Drawn) -> list[int]:
    return sorted({step for _, at_round in drawn.values() for step in at_round})


def _lines_over_seeds(plot: Plot, drawn: Drawn, label: str) -> str:
    """Draw each line's mean over seeds and the range of seeds around it; returns what they are at the end."""
    ends = []
    for name, (ink, at_round) in drawn.items():
        if at_round:
            plot.band([(step, min(values), max(values)) for step, values in at_round.items()], ink, 0.15)
            means = [(float(step), fmean(values)) for step, values in at_round.items()]
            ends.append(label.format(label=name, last=means[-1][1]))
            plot.line(means, ink, ends[-1], width=1.8)
    return ", ".join(ends)
