"""Figures of what one peer took from another: participation, importance weights, shares, divergence.

Means are over seeds; what is shaded around a line is the range of seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from ftis.lab.drawing import (
    INK,
    LINES,
    SOFT,
    THRESHOLD,
    Panel,
    label_ends,
    plain_log_ticks,
    round_axis,
    save_panel,
    say_instead,
    short,
)
from ftis.lab.reading import RoundRow

PARTICIPATION = {
    "kept": ("kept", "#2b6777", ""),
    "zero": ("zero advantage", "#d5dbe1", ""),
    "dropped": ("dropped by the filter", "#e8a33d", "////"),
    "refused": ("refused or missing", "#8c2d3f", "xxxx"),
}
WEIGHTS = "#6a3d9a"
SMALLEST_RATIO = 1e-4
"""Ratios below are drawn there: a token that the learner would never have written weighs nothing anyway."""

RATIO, WEIGHT = "sampling/importance_sampling_ratio/", "sampling/importance_sampling_weight/"


@dataclass(frozen=True)
class Heard:
    """What one learner measured of one source's rollouts.

    Attributes:
        at_step: by finished rounds, the source's measures of that round, a mapping per seed.
    """

    arm: str
    learner: str
    source: str
    at_step: Mapping[int, Sequence[Mapping[str, Any]]]

    @staticmethod
    def of(arm: str, learner: str, source: str, runs: Iterable[Iterable[RoundRow]]) -> Heard:
        """From the learner's rounds under each seed."""
        at_step: dict[int, list[Mapping[str, Any]]] = {}
        for rounds in runs:
            for row in rounds:
                at_step.setdefault(row.step, []).append(row.by_peer.get(source, {}))
        return Heard(arm, learner, source, dict(sorted(at_step.items())))

    @property
    def title(self) -> str:
        return f"{short(self.learner)} ← {short(self.source)}"

    def name(self, kind: str) -> str:
        return f"{kind}-{self.arm}-{self.learner}-from-{self.source}"

    def values(self, measure: str) -> dict[int, list[float]]:
        """A measure's values by step, one per seed that has it; steps without any are left out."""
        found = {step: [m[measure] for m in by_seed if measure in m] for step, by_seed in self.at_step.items()}
        return {step: values for step, values in found.items() if values}


def participation(directory: Path, heard: Heard, expected: int) -> Panel:
    """What became of the source's rollouts, round by round; ``expected`` is how many it offers in a round."""
    rounds = list(heard.at_step)
    counts: dict[str, list[float]] = {name: [] for name in PARTICIPATION}
    for by_seed in heard.at_step.values():
        counts["kept"].append(fmean(measures.get("kept", 0) for measures in by_seed))
        counts["zero"].append(fmean(measures.get("zero_advantage", 0) for measures in by_seed))
        counts["dropped"].append(fmean(measures.get("dropped", 0) for measures in by_seed))
        counts["refused"].append(fmean(max(0, expected - measures.get("admitted", 0)) for measures in by_seed))

    def draw(axis: Any) -> None:
        floor = [0.0] * len(rounds)
        for name, (label, colour, hatch) in PARTICIPATION.items():
            top = [low + count for low, count in zip(floor, counts[name], strict=True)]
            axis.bar(
                rounds,
                counts[name],
                bottom=floor,
                width=1.0 if len(rounds) > 40 else 0.86,
                color=colour,
                hatch=hatch,
                edgecolor="white",
                lw=0,
                label=label,
            )
            floor = top
        axis.set_ylim(0, max([expected, *floor]) * 1.02)
        round_axis(axis)
        axis.grid(axis="y", color="white", lw=0.6, alpha=0.6)

    total = sum(sum(of) for of in counts.values()) or 1
    parts = ", ".join(f"{PARTICIPATION[name][0]} {sum(of) / total:.0%}" for name, of in counts.items())
    alt = f"{heard.arm}, {heard.learner}: rollouts of {heard.source} per round; over all rounds {parts}"
    name = heard.name("participation")
    return save_panel(directory, name, heard.title, "rollouts per round", alt, draw, legend=2)


def weights(directory: Path, heard: Heard, cap: float) -> Panel:
    """π_old/π_gen per token before and after truncation at C: all tokens, 10 % to 90 % of them, and the median."""
    kinds = {"before": RATIO, "after": WEIGHT}
    rounds = list(heard.values(f"{RATIO}p50"))

    def series(measure: str, over_seeds: Callable[[Iterable[float]], float] = median) -> list[float]:
        return [max(over_seeds(values), SMALLEST_RATIO) for values in heard.values(measure).values()]

    def draw(axes: Any) -> None:
        if not rounds:
            say_instead(axes[0], "no rollout of it was weighed")
            axes[1].set_axis_off()
            return
        for axis, (when, key) in zip(axes, kinds.items(), strict=True):
            axis.fill_between(
                rounds,
                series(f"{key}min", min),
                series(f"{key}max", max),
                color=WEIGHTS,
                alpha=0.16,
                lw=0,
                label="all tokens",
            )
            axis.fill_between(
                rounds, series(f"{key}p10"), series(f"{key}p90"), color=WEIGHTS, alpha=0.5, lw=0, label="10–90%"
            )
            axis.plot(rounds, series(f"{key}p50"), color=INK, lw=1.3, label="median")
            axis.axhline(cap, color=THRESHOLD, lw=1, ls=(0, (1.5, 1.5)), label=f"C = {cap:g}")
            axis.text(0.04, 0.965, when, transform=axis.transAxes, va="top", color=SOFT)
            axis.set_yscale("log")
            round_axis(axis)
        low = min(series(f"{RATIO}min", min))
        high = max(2 * cap, *series(f"{RATIO}max", max))
        axes[0].set_ylim(low / 1.5, high * 6)
        plain_log_ticks(axes[0])

    alt = f"{heard.arm}, {heard.learner}: importance weights of {heard.source}'s tokens over rounds, "
    alt += f"before and after truncation at {cap:g}"
    if rounds:
        alt += f"; largest before {max(series(f'{RATIO}max', max)):.3g}"
    return save_panel(directory, heard.name("weights"), heard.title, "weight per token", alt, draw, legend=4, columns=2)


def shares(directory: Path, heard: Heard) -> Panel:
    """The truncated share of tokens and the effective sample size over rounds."""
    lines = {
        "truncated": ("sampling/truncated_fraction", WEIGHTS, LINES[0]),
        "effective\nsample size": ("sampling/effective_sample_size", "#2b6777", LINES[1]),
    }

    def draw(axis: Any) -> None:
        ends = _lines_over_seeds(axis, heard, lines, "{label} {last:.1%}")
        if not ends:
            say_instead(axis, "no rollout of it was weighed")
            return
        axis.set_ylim(-0.02, 1.02)
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        label_ends(axis, ends)
        round_axis(axis)

    alt = f"{heard.arm}, {heard.learner}: share of {heard.source}'s tokens whose weight is truncated, "
    alt += "and effective sample size, over rounds"
    return save_panel(directory, heard.name("shares"), heard.title, "share of tokens", alt, draw)


def divergence(directory: Path, heard: Heard, reduction: str, threshold: tuple[str, float] | None) -> Panel:
    """Mean KL of the source's rollouts by both estimators, and the filter's threshold.

    Args:
        threshold: the estimator that the filter applies it to, and g; None without a filter.
    """
    lines = {"k1": ("kl/k1", "#a0671a", LINES[1]), "k3": ("kl/k3", "#2b6777", LINES[0])}

    def draw(axis: Any) -> None:
        ends = _lines_over_seeds(axis, heard, lines, "{label} {last:.2f}")
        if not ends:
            say_instead(axis, "no rollout of it was weighed")
            return
        drawn = [value for key, _, _ in lines.values() for values in heard.values(key).values() for value in values]
        heights = sorted(map(abs, drawn))
        middle = heights[len(heights) // 2]
        largest = max(heights[-1], threshold[1] if threshold else 0.0)
        if largest > 30 * max(middle, 1e-9):
            axis.set_yscale("symlog", linthresh=max(middle, 1e-3))
            axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        if threshold:
            axis.axhline(threshold[1], color=THRESHOLD, lw=1, ls=(0, (1.5, 1.5)))
            ends.append((threshold[1], f"g = {threshold[1]:g} ({threshold[0]})", THRESHOLD))
        axis.margins(y=0.1)
        label_ends(axis, ends)
        round_axis(axis)

    unit = "nats per completion" if reduction == "sum" else "nats per token"
    alt = f"{heard.arm}, {heard.learner}: mean KL of {heard.source}'s rollouts over rounds, {unit}"
    alt += f"; threshold {threshold[1]:g} on {threshold[0]}" if threshold else "; no threshold in this arm"
    return save_panel(directory, heard.name("kl"), heard.title, f"KL, {unit}", alt, draw)


def _lines_over_seeds(
    axis: Any, heard: Heard, lines: Mapping[str, tuple[str, str, Any]], label: str
) -> list[tuple[float, str, str]]:
    """Draw each measure's mean over seeds and the range of seeds around it; return where the lines end."""
    ends = []
    for name, (key, colour, line) in lines.items():
        at_round = heard.values(key)
        if not at_round:
            continue
        rounds, means = list(at_round), [fmean(values) for values in at_round.values()]
        axis.fill_between(
            rounds,
            [min(v) for v in at_round.values()],
            [max(v) for v in at_round.values()],
            color=colour,
            alpha=0.15,
            lw=0,
        )
        axis.plot(rounds, means, color=colour, ls=line, lw=1.8)
        ends.append((means[-1], label.format(label=name, last=means[-1]), colour))
    return ends
