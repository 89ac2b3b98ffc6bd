"""The figures of a comparison: one small panel each, drawn with matplotlib, saved as PNG and SVG.

A panel shows one peer, so that a page can set panels beside each other where there is room and below each other on a
phone. Colours can be told apart by people who see red and green alike, and an arm has the same colour, line and
marker in every panel. The same numbers give the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

WIDTH, HEIGHT = 4.8, 3.25
"""Inches. At 4.8 a panel's letters keep a readable size on a phone and don't shout in two columns on a desk."""

MIN_SEEDS_OF_BAND = 3
"""The 95 % band of two seeds is 18 times as wide as they lie apart: a wash over the whole panel that says nothing."""

LONGEST_NAME = 18

INK, SOFT, RULE = "#1b1f24", "#5a6470", "#d9dee4"

BASELINE_COLOUR = INK
COLOURS = ("#1f5fd0", "#c24a00", "#00805f", "#8a1f7a", "#8a6400", "#5a6470")
LINES: tuple[Any, ...] = ("solid", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (5, 1.2, 1.2, 1.2)))
MARKERS = ("o", "s", "^", "D", "v", "P")

PARTICIPATION = {
    "kept": ("kept", "#2b6777", ""),
    "zero": ("zero advantage", "#d5dbe1", ""),
    "dropped": ("dropped by the filter", "#e8a33d", "////"),
    "refused": ("refused or missing", "#8c2d3f", "xxxx"),
}
WEIGHTS = "#6a3d9a"
THRESHOLD = "#8c2d3f"
SMALLEST_RATIO = 1e-4
"""Ratios below are drawn there: a token that the learner would never have written weighs nothing anyway."""


@dataclass(frozen=True)
class Style:
    """How an arm looks everywhere."""

    colour: str
    line: Any
    marker: str


def styles(arms: Sequence[str], baseline: str | None) -> dict[str, Style]:
    """A look for each arm; the baseline is black and dashed."""
    looks = {}
    others = [arm for arm in arms if arm != baseline]
    for i, arm in enumerate(others):
        line = LINES[(i // len(COLOURS)) % len(LINES)]
        looks[arm] = Style(COLOURS[i % len(COLOURS)], line, MARKERS[i % len(MARKERS)])
    if baseline in arms:
        looks[str(baseline)] = Style(BASELINE_COLOUR, LINES[1], "o")
    return {arm: looks[arm] for arm in arms}


@dataclass(frozen=True)
class Panel:
    """A figure that was saved: its file name without suffix, its SVG to put into a page, and what it shows in words."""

    name: str
    svg: str
    alt: str


def learning(
    directory: Path,
    split: str,
    peer: str,
    curves: Mapping[str, Sequence[Mapping[str, Any]]],
    looks: Mapping[str, Style],
    limits: tuple[float, float],
) -> Panel:
    """Accuracy over rounds of one peer: an arm's mean over seeds with its 95 % band, and each seed as a thin line."""

    def draw(axis: Any) -> None:
        ends: list[tuple[float, str, str]] = []
        for arm, points in curves.items():
            if not points:
                continue
            look, steps = looks[arm], [p["step"] for p in points]
            seeds = list(dict.fromkeys(seed for p in points for seed in p["per_seed"]))
            if len(seeds) >= MIN_SEEDS_OF_BAND:
                banded = [p for p in points if p["low"] is not None]
                axis.fill_between(
                    [p["step"] for p in banded],
                    [p["low"] for p in banded],
                    [p["high"] for p in banded],
                    color=look.colour,
                    alpha=0.13,
                    lw=0,
                )
            if len(seeds) > 1:
                for seed in seeds:
                    of_seed = [(p["step"], p["per_seed"][seed]) for p in points if seed in p["per_seed"]]
                    axis.plot(*zip(*of_seed, strict=True), color=look.colour, lw=0.6, alpha=0.45)
            means = [p["mean"] for p in points]
            axis.plot(steps, means, color=look.colour, ls=look.line, lw=1.9, marker=look.marker, ms=3.6, zorder=3)
            ends.append((means[-1], arm, look.colour))
        axis.set_ylim(*limits)
        _label_ends(axis, ends)
        _round_axis(axis)

    arms = ", ".join(f"{arm} {points[-1]['mean']:.3f}" for arm, points in curves.items() if points)
    alt = f"{peer}, {split}: greedy pass@1 over rounds; at the end {arms}"
    return _panel(directory, f"learning-{split}-{peer}", short(peer), f"{split}, greedy pass@1", alt, draw)


def accuracy_limits(curves: Iterable[Sequence[Mapping[str, Any]]]) -> tuple[float, float]:
    """One axis for all panels of a split, from what was measured and not from bands, which few seeds make very wide."""
    values = [value for points in curves for point in points for value in point["per_seed"].values()]
    low, high = min(values, default=0.0), max(values, default=1.0)
    room = max(0.12 * (high - low), 0.02)
    return max(-0.02, low - room), min(1.02, high + room)


def differences(
    directory: Path, peer: str, comparisons: Sequence[Mapping[str, Any]], looks: Mapping[str, Style]
) -> Panel:
    """Final accuracy minus the baseline's, a row per arm and split: mean, 95 % interval, and a dot per seed."""
    baseline = comparisons[0]["baseline"]

    def draw(axis: Any) -> None:
        far = max(abs(v) for c in comparisons for v in (*c["per_seed"].values(), c["mean"]))
        ends = [abs(v) for c in comparisons for v in (c["low"], c["high"]) if v is not None]
        reach = max(0.02, min(max([far, *ends]), max(2.5 * far, 0.05))) * 1.12
        splits = list(dict.fromkeys(c["split"] for c in comparisons))
        ticks = []
        for row, c in enumerate(comparisons):
            y = -(row + 0.3 * splits.index(c["split"]))
            look, mean = looks[c["arm"]], c["mean"]
            ticks.append((y, f"{short(c['arm'])}\n{short(c['split'])}"))
            if c["low"] is not None:
                axis.plot([max(c["low"], -reach), min(c["high"], reach)], [y, y], color=look.colour, lw=2.2)
                for bound, edge, marker in ((c["low"], -reach, "<"), (c["high"], reach, ">")):
                    if abs(bound) > reach:
                        axis.plot(edge, y, marker=marker, ms=6, color=look.colour, clip_on=False)
            dots = list(c["per_seed"].values())
            axis.plot(dots, [y + 0.24] * len(dots), ls="", marker="o", ms=3.2, mew=0, color=look.colour, alpha=0.55)
            axis.plot(mean, y, marker=look.marker, ms=7, color=look.colour, mec="white", mew=1, zorder=3)
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
    return _panel(directory, f"difference-{peer}", short(peer), f"difference from {short(baseline)}", alt, draw, height)


def participation(
    directory: Path, arm: str, peer: str, source: str, runs: Sequence[Sequence[Mapping[str, Any]]], expected: int
) -> Panel:
    """What became of another peer's rollouts, round by round, mean over seeds; ``expected`` is its share of a round."""
    at_round = _by_round(runs)
    rounds = sorted(at_round)
    key = f"peer/{source}/"
    counts: dict[str, list[float]] = {name: [] for name in PARTICIPATION}
    for round in rounds:
        rows = at_round[round]
        counts["kept"].append(fmean(row.get(f"{key}kept", 0) for row in rows))
        counts["zero"].append(fmean(row.get(f"{key}zero_advantage", 0) for row in rows))
        counts["dropped"].append(fmean(row.get(f"{key}dropped", 0) for row in rows))
        counts["refused"].append(fmean(max(0, expected - row.get(f"{key}admitted", 0)) for row in rows))

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
        _round_axis(axis)
        axis.grid(axis="y", color="white", lw=0.6, alpha=0.6)

    total = sum(sum(of) for of in counts.values()) or 1
    parts = ", ".join(f"{PARTICIPATION[name][0]} {sum(of) / total:.0%}" for name, of in counts.items())
    alt = f"{arm}, {peer}: rollouts of {source} per round; over all rounds {parts}"
    title, subtitle = f"{short(peer)} ← {short(source)}", "rollouts per round"
    return _panel(directory, f"participation-{arm}-{peer}-from-{source}", title, subtitle, alt, draw, legend=2)


def weights(
    directory: Path, arm: str, peer: str, source: str, runs: Sequence[Sequence[Mapping[str, Any]]], cap: float
) -> Panel:
    """π_old/π_gen per token before and after truncation at C: all tokens, 10 % to 90 % of them, and the median."""
    kinds = {"before": f"peer/{source}/sampling/importance_sampling_ratio/"}
    kinds["after"] = f"peer/{source}/sampling/importance_sampling_weight/"
    at_round = {
        round: weighed
        for round, rows in sorted(_by_round(runs).items())
        if (weighed := [row for row in rows if f"{kinds['before']}p50" in row])
    }
    rounds = list(at_round)

    def series(key: str, of: Callable[[Iterable[float]], float] = median) -> list[float]:
        return [max(of([row[key] for row in rows]), SMALLEST_RATIO) for rows in at_round.values()]

    def draw(axes: Any) -> None:
        if not rounds:
            _say_nothing(axes[0], "no rollout of it was weighed")
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
            _round_axis(axis)
        low = min(series(f"{kinds['before']}min", min))
        high = max(2 * cap, *series(f"{kinds['before']}max", max))
        axes[0].set_ylim(low / 1.5, high * 6)
        _plain_log_ticks(axes[0])

    alt = f"{arm}, {peer}: importance weights of {source}'s tokens over rounds, before and after truncation at {cap:g}"
    if rounds:
        alt += f"; largest before {max(series(kinds['before'] + 'max', max)):.3g}"
    title, subtitle = f"{short(peer)} ← {short(source)}", "weight per token"
    name = f"weights-{arm}-{peer}-from-{source}"
    return _panel(directory, name, title, subtitle, alt, draw, legend=4, columns=2)


def shares(directory: Path, arm: str, peer: str, source: str, runs: Sequence[Sequence[Mapping[str, Any]]]) -> Panel:
    """The truncated share of tokens and the effective sample size over rounds."""
    key = f"peer/{source}/sampling/"
    lines = {
        "truncated": (f"{key}truncated_fraction", WEIGHTS, LINES[0]),
        "effective\nsample size": (f"{key}effective_sample_size", "#2b6777", LINES[1]),
    }

    def draw(axis: Any) -> None:
        ends = _lines_over_seeds(axis, runs, lines, "{label} {last:.1%}")
        if not ends:
            _say_nothing(axis, "no rollout of it was weighed")
            return
        axis.set_ylim(-0.02, 1.02)
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        _label_ends(axis, ends)
        _round_axis(axis)

    alt = f"{arm}, {peer}: share of {source}'s tokens whose weight is truncated, and effective sample size, over rounds"
    title, subtitle = f"{short(peer)} ← {short(source)}", "share of tokens"
    return _panel(directory, f"shares-{arm}-{peer}-from-{source}", title, subtitle, alt, draw)


def divergence(
    directory: Path,
    arm: str,
    peer: str,
    source: str,
    runs: Sequence[Sequence[Mapping[str, Any]]],
    reduction: str,
    threshold: tuple[str, float] | None,
) -> Panel:
    """Mean KL of another peer's rollouts, both estimators, and the filter's threshold with the one it is applied to."""
    key = f"peer/{source}/kl/"
    lines = {"k1": (f"{key}k1", "#a0671a", LINES[1]), "k3": (f"{key}k3", "#2b6777", LINES[0])}

    def draw(axis: Any) -> None:
        ends = _lines_over_seeds(axis, runs, lines, "{label} {last:.2f}")
        if not ends:
            _say_nothing(axis, "no rollout of it was weighed")
            return
        heights = sorted(abs(row[k]) for rows in runs for row in rows for k, _, _ in lines.values() if k in row)
        middle = heights[len(heights) // 2]
        largest = max(heights[-1], threshold[1] if threshold else 0.0)
        if largest > 30 * max(middle, 1e-9):
            axis.set_yscale("symlog", linthresh=max(middle, 1e-3))
            axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        if threshold:
            axis.axhline(threshold[1], color=THRESHOLD, lw=1, ls=(0, (1.5, 1.5)))
            ends.append((threshold[1], f"g = {threshold[1]:g} ({threshold[0]})", THRESHOLD))
        axis.margins(y=0.1)
        _label_ends(axis, ends)
        _round_axis(axis)

    unit = "nats per completion" if reduction == "sum" else "nats per token"
    alt = f"{arm}, {peer}: mean KL of {source}'s rollouts over rounds, {unit}"
    alt += f"; threshold {threshold[1]:g} on {threshold[0]}" if threshold else "; no filter in this arm"
    return _panel(
        directory, f"kl-{arm}-{peer}-from-{source}", f"{short(peer)} ← {short(source)}", f"KL, {unit}", alt, draw
    )


def _lines_over_seeds(
    axis: Any, runs: Sequence[Sequence[Mapping[str, Any]]], lines: Mapping[str, tuple[str, str, Any]], label: str
) -> list[tuple[float, str, str]]:
    """Draw the mean over seeds of each measure with the range of seeds around it; where the lines end."""
    ends = []
    for name, (key, colour, line) in lines.items():
        at_round = {
            round: values
            for round, rows in sorted(_by_round(runs).items())
            if (values := [row[key] for row in rows if key in row])
        }
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


def _by_round(runs: Sequence[Sequence[Mapping[str, Any]]]) -> dict[int, list[Mapping[str, Any]]]:
    at_round: dict[int, list[Mapping[str, Any]]] = {}
    for rows in runs:
        for row in rows:
            at_round.setdefault(row["step"], []).append(row)
    return at_round


def _round_axis(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axis.margins(x=0.02)
    axis.set_xlabel("round")
    axis.grid(axis="y", color=RULE, lw=0.7)


def _plain_log_ticks(axis: Any) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.yaxis.set_major_locator(LogLocator(numticks=7))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.yaxis.set_minor_formatter(NullFormatter())


def _label_ends(axis: Any, ends: Sequence[tuple[float, str, str]]) -> None:
    """Write each line's name beside its end, pushed apart where they would overlap."""
    to_fraction = axis.transAxes.inverted()
    wanted = [
        (float(to_fraction.transform(axis.transData.transform((0, y)))[1]), text, colour) for y, text, colour in ends
    ]
    for height, (_, text, colour) in zip(spread_out([h for h, _, _ in wanted], 0.085), wanted, strict=True):
        axis.annotate(
            "\n".join(short(line) for line in text.split("\n")),
            (1.0, height),
            xycoords="axes fraction",
            xytext=(5, 0),
            textcoords="offset points",
            color=colour,
            va="center",
            fontweight="bold",
            annotation_clip=False,
        )


def spread_out(heights: Sequence[float], gap: float) -> list[float]:
    """The heights moved as little as needed to lie ``gap`` apart and within 0 … 1, their order kept."""
    order = sorted(range(len(heights)), key=lambda i: (heights[i], -i))
    placed = [min(max(heights[i], 0.0), 1.0) for i in order]
    for k in range(1, len(placed)):
        placed[k] = max(placed[k], placed[k - 1] + gap)
    over = max(0.0, placed[-1] - 1.0) if placed else 0.0
    for k in range(len(placed) - 1, -1, -1):
        limit = 1.0 if k == len(placed) - 1 else placed[k + 1] - gap
        placed[k] = min(placed[k], limit) if over or k < len(placed) - 1 else placed[k]
    result = [0.0] * len(heights)
    for k, i in enumerate(order):
        result[i] = placed[k]
    return result


def short(name: str) -> str:
    """A name that leaves room for the figure; names may have 64 letters."""
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 6]}…{name[-5:]}"


def _say_nothing(axis: Any, why: str) -> None:
    axis.set_axis_off()
    axis.text(0.5, 0.5, why, ha="center", va="center", color=SOFT, transform=axis.transAxes)


def _panel(
    directory: Path,
    name: str,
    title: str,
    subtitle: str,
    alt: str,
    draw: Callable[[Any], None],
    height: float = HEIGHT,
    legend: int = 0,
    columns: int = 1,
) -> Panel:
    """Draw on fresh axes (a list of them if ``columns`` > 1) and save; ``legend`` is its number of columns."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    settings: Any = {
        "text.parse_math": False,
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 9.5,
        "axes.edgecolor": SOFT,
        "axes.labelcolor": SOFT,
        "axes.linewidth": 0.8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "xtick.color": SOFT,
        "ytick.color": SOFT,
        "text.color": INK,
        "hatch.linewidth": 0.6,
        "svg.fonttype": "none",
        "svg.hashsalt": name,
    }
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(1, columns, sharey=True, squeeze=False)[0]
        axes[0].set_title(title, loc="left", fontsize=11, fontweight="bold", pad=20)
        axes[0].annotate(
            subtitle, (0, 1), xycoords="axes fraction", xytext=(0, 7), textcoords="offset points", color=SOFT
        )
        draw(axes if columns > 1 else axes[0])
        handles, labels = axes[0].get_legend_handles_labels()
        if legend and handles:
            small: Any = {"ncols": legend, "frameon": False, "fontsize": 8.5, "handlelength": 1.6}
            figure.legend(handles, labels, loc="outside lower center", **small)
        directory.mkdir(parents=True, exist_ok=True)
        figure.savefig(directory / f"{name}.png", dpi=144, metadata={"Software": None})
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(directory / f"{name}.svg", metadata=nothing)
    return Panel(name, inline_svg((directory / f"{name}.svg").read_text(encoding="utf-8"), name), alt)


def inline_svg(svg: str, name: str) -> str:
    """An SVG document as an element for an HTML page, its ids made unique to ``name``."""
    svg = svg[svg.index("<svg") :]
    head, _, body = svg.partition(">")
    view = re.search(r'viewBox="[^"]*"', head)
    assert view is not None
    prefix = re.sub(r"[^A-Za-z0-9_-]", "_", name)
    body = re.sub(r'\bid="([^"]*)"', rf'id="{prefix}-\1"', body)
    body = re.sub(r"url\(#([^)]*)\)", rf"url(#{prefix}-\1)", body)
    body = re.sub(r'xlink:href="#([^"]*)"', rf'href="#{prefix}-\1"', body)
    body = re.sub(r"<!--.*?-->\s*", "", body, flags=re.DOTALL)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {view.group()} aria-hidden="true">{body.strip()}'
