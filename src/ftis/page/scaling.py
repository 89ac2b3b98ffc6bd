"""The section on accuracy against the number of peers: figures, verdicts and tables of what study/scaling.py found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from ftis.check.formatting import amount, counted, number, p_text, seconds_text, true_minus
from ftis.view.charts import DASHES, Panel, Plot, Tick, arm_styles, logarithmic
from ftis.view.figures import with_room
from ftis.view.sections import Cell, PanelRow, RowGroup, Table, with_interval


@dataclass(frozen=True)
class Scaling:
    """The page's section."""

    intro: str
    verdicts: Sequence[str]
    panels: PanelRow
    tables: Sequence[Table]


def section(found: Mapping[str, Any] | None) -> Scaling | None:
    """The section on what :func:`~ftis.study.scaling.scaling` found; None of nothing."""
    if found is None:
        return None
    intro = (
        f"Every peer samples {found['own_rollouts']} rollouts a round itself, whatever its swarm. Means over "
        f"{counted(found['peers'], 'peer')} and {counted(len(found['seeds']), 'seed')}; intervals are 95%, over seeds."
    )
    if not any(size.get("against_equal_training") for size in _sizes(found)):
        intro += " No arm trains alone on as many rollouts as a peer of a swarm, so nothing is said of equal training."
    panels = draw(found)
    compared = [
        (size["arm"], against)
        for key in ("against_alone", "against_equal_training")
        for size in _sizes(found)
        if (against := size.get(key)) is not None
    ]
    verdicts = [true_minus(f"{arm}: {against['text']}.") for arm, against in compared]
    tables = [_accuracies(found), *_at_equal_training(found), _costs(found)]
    return Scaling(intro, verdicts, PanelRow.of(panels, len(panels)), tables)


def draw(found: Mapping[str, Any]) -> list[Panel]:
    """Three charts over the number of peers: final accuracy, a peer's own seconds, its bytes."""
    unknown = any(size["seconds"] is None for size in _sizes(found))
    panels = [_accuracy_panel(found)]
    if not unknown:
        panels.append(_cost_panel(found, "seconds", "Own seconds", "a peer's own work, all rounds", 1.0))
    panels.append(_cost_panel(found, "bytes_received", "MB received", "by a peer, all rounds", 1e6))
    return panels


def _accuracy_panel(found: Mapping[str, Any]) -> Panel:
    means = [size["final"]["mean"] for size in _sizes(found)]
    heights = [*means, *_all_seeds(found)]
    plot = _over_sizes(found, with_room(min(heights), max(heights)))
    _draw_sizes(plot, found, "final")
    plot.level(found["alone"]["final"]["mean"], "alone", "soft")
    _draw_alone(plot, found, "final")
    start = f"{found['start']['mean']:.3f}"
    told = _told(found, lambda size: f"{size['final']['mean']:.3f}")
    alt = f"Final accuracy against peers in a swarm. Start {start}; {told}"
    subtitle = f"validation, {found['accuracy_is']}, at the end ({start} before training)"
    return Panel("scaling-accuracy", plot.chart("Accuracy", alt, subtitle))


def _cost_panel(found: Mapping[str, Any], key: str, title: str, subtitle: str, unit: float) -> Panel:
    shown = [size[key] for size in (_sizes(found) if key == "seconds" else _in_swarms(found))]
    tops = [of["mean"] if of["high"] is None else of["high"] for of in shown]
    plot = _over_sizes(found, (0.0, 1.1 * max(1e-9, *tops) / unit))
    _draw_sizes(plot, found, key, unit)
    if key == "seconds":
        _draw_alone(plot, found, key)
    told = _told(found, lambda size: f"{size[key]['mean'] / unit:.3g}")
    alt = f"{title} against peers in a swarm. {told}"
    return Panel(f"scaling-{key.partition('_')[0]}", plot.chart(title, alt, subtitle))


def _in_swarms(found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [size for series in found["series"] for size in series["sizes"]]


def _draw_sizes(plot: Plot, found: Mapping[str, Any], key: str, unit: float = 1.0) -> None:
    """Draw each series, its means joined and their intervals upright.

    One that lacks the least swarms of the others begins with its own: joined to the peers alone it would pass by them.
    """
    least = min((size["size"] for size in _in_swarms(found) if size["size"] > 1), default=1)
    styles = arm_styles([series["name"] for series in found["series"]], ())
    for series in found["series"]:
        style = styles[series["name"]]
        swarms = [size for size in series["sizes"] if size["size"] > 1]
        joined = series["sizes"] if not swarms or swarms[0]["size"] == least else swarms
        of_sizes = [(size["size"], size[key]) for size in joined]
        _draw_intervals(plot, of_sizes, style.ink, unit)
        points = [(x, estimate["mean"] / unit) for x, estimate in of_sizes]
        plot.line(points, style.ink, series["name"], width=1.9, dashes=style.dashes, marker=style.marker)


def _draw_alone(plot: Plot, found: Mapping[str, Any], key: str) -> None:
    """Draw what peers alone come to with more sampling, over how many times as much."""
    if found["ceilings"]:
        sizes = [found["alone"], *found["ceilings"]]
        of_sizes = [(size["sampled"] / found["own_rollouts"], size[key]) for size in sizes]
        _draw_intervals(plot, of_sizes, "ink")
        points = [(x, estimate["mean"]) for x, estimate in of_sizes]
        plot.line(points, "ink", "alone, × sampling", width=1.1, dashes=DASHES[1], marker="o")


def _draw_intervals(
    plot: Plot, estimates: Sequence[tuple[float, Mapping[str, Any]]], ink: str, unit: float = 1.0
) -> None:
    for x, estimate in estimates:
        if estimate["low"] is not None:
            ends = [(x, estimate["low"] / unit), (x, estimate["high"] / unit)]
            plot.line(ends, ink, width=1.4, opacity=0.7)


def _told(found: Mapping[str, Any], in_words: Callable[[Mapping[str, Any]], str]) -> str:
    """What the lines of a figure show."""
    told = [
        f"{series['name']}: " + ", ".join(f"{in_words(size)} with {size['size']}" for size in series["sizes"])
        for series in found["series"]
    ]
    times = [(size, size["sampled"] / found["own_rollouts"]) for size in found["ceilings"]]
    told += [f"alone with {k:g} times the sampling: {in_words(size)}" for size, k in times]
    return "; ".join(told)


def _all_seeds(found: Mapping[str, Any]) -> list[float]:
    return [value for s in found["series"] for size in s["sizes"] for value in size["final"]["per_seed"].values()]


def _over_sizes(found: Mapping[str, Any], heights: tuple[float, float]) -> Plot:
    """An empty chart over peers in a swarm, each doubling as wide as the last."""
    sizes = sorted({size["size"] for series in found["series"] for size in series["sizes"]})
    reach = max([sizes[-1], *(size["sampled"] / found["own_rollouts"] for size in found["ceilings"])])
    label = "peers in a swarm" + (" – or, alone, times the sampling" if found["ceilings"] else "")
    ticks = [Tick(size, str(size)) for size in sizes]
    return Plot((sizes[0] / 1.15, reach * 1.15), heights, label, x_scale=logarithmic, x_ticks=ticks)


def _sizes(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each arm once; the peer alone is in every series."""
    sizes = [found["alone"], *(size for series in found["series"] for size in series["sizes"]), *found["ceilings"]]
    return list({size["arm"]: size for size in sizes}.values())


def _times(found: Mapping[str, Any], size: Mapping[str, Any]) -> Cell:
    """How many times as much sampling alone a swarm is worth, and the least and the most of a seed."""
    if size["size"] == 1 or not found["ceilings"]:
        return Cell()
    most = found["ceilings"][-1]["sampled"] / found["own_rollouts"]

    def in_words(times: float | None) -> str:
        return f"{times:.2g}" if times is not None else f"over {most:g}"

    of_seeds = sorted(size["times_per_seed"].values(), key=lambda times: inf if times is None else times)
    ends = f"[{in_words(of_seeds[0])} to {in_words(of_seeds[-1])}]" if len(of_seeds) > 1 else ""
    return Cell(in_words(size["times"]), ends)


def _compared(against: Mapping[str, Any] | None) -> list[Cell]:
    """A difference and its p."""
    if against is None:
        return [Cell(), Cell()]
    shown = against["label"] != "no difference shown"
    return [with_interval(against, "+", strong=shown), Cell(p_text(against["p_adjusted"]))]


def _least(gains: Mapping[str, float] | None) -> Cell:
    """The least gain of a peer, with its name."""
    if not gains:
        return Cell()
    peer = min(gains, key=lambda peer: gains[peer])
    return Cell(true_minus(number(gains[peer], "+")), peer)


def _cost(estimate: Mapping[str, Any] | None, in_words: Callable[[float], str]) -> Cell:
    if estimate is None:
        return Cell(amount(None))
    known = estimate["low"] is not None
    ends = f"[{in_words(estimate['low'])}, {in_words(estimate['high'])}]" if known else ""
    return Cell(in_words(estimate["mean"]), ends)


def _accuracies(found: Mapping[str, Any]) -> Table:
    head = ["Arm", "Peers", "Sampled", "Trained on", "Final", "Gain", "p, Holm", "Least gain"]
    rows = []
    for size in _sizes(found):
        rows.append(
            [
                Cell(size["arm"]),
                Cell(str(size["size"])),
                Cell(amount(size["sampled"])),
                Cell(amount(size["trained"])),
                with_interval(size["final"]),
                *_compared(size["against_alone"]),
                _least(size["gains"]),
            ]
        )
    return Table("Rollouts of a peer and round; accuracy on validation", head, [RowGroup(None, rows)])


def _at_equal_training(found: Mapping[str, Any]) -> list[Table]:
    """A table of the swarms that have an arm which trains alone on as many rollouts; none where no swarm has one."""
    head = ["Arm", "Peers", "Trained on", "Against equal training", "p, Holm", "Least gain"]
    rows = [
        [
            Cell(size["arm"]),
            Cell(str(size["size"])),
            Cell(amount(size["trained"])),
            *_compared(against),
            _least(size["gains_at_equal_training"]),
        ]
        for size in _sizes(found)
        if (against := size.get("against_equal_training")) is not None
    ]
    return [Table("Against peers that train alone on as many rollouts", head, [RowGroup(None, rows)])] if rows else []


def _costs(found: Mapping[str, Any]) -> Table:
    head = ["Arm", "Peers", "As alone, ×", "Pays from s/t", "Own seconds", "Alone, seconds", "kB sent", "MB received"]
    rows = []
    for size in _sizes(found):
        rows.append(
            [
                Cell(size["arm"]),
                Cell(str(size["size"])),
                _times(found, size),
                Cell("" if size.get("pays_from") is None else f"{size['pays_from']:.2g}"),
                _cost(size["seconds"], seconds_text),
                Cell("" if size.get("seconds_alone") is None else seconds_text(size["seconds_alone"])),
                _cost(size["bytes_sent"], lambda count: amount(count, 1e3)),
                _cost(size["bytes_received"], lambda count: f"{count / 1e6:.2f}"),
            ]
        )
    caption = "What joining is worth in sampling, and what a peer spends over all rounds"
    return Table(caption, head, [RowGroup(None, rows)])
