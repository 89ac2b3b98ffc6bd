"""Accuracy against the number of peers, where an experiment's arms are swarm sizes: ``scaling.json``, figures, a table.

Arms that differ in nothing but the size of their swarms are a series: a peer samples as much itself in all of them. A
peer alone that samples as much is the swarm of one of every series; one that samples more is a ceiling. Learning rates
may differ too: an arm that trains on more rollouts is often served by a higher one (:mod:`ftis.study.rates`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, log2, nan
from pathlib import Path
from statistics import fmean
from typing import Any

from ftis.lab.arms import Arm, arms_of, rollouts_per_round
from ftis.lab.formatting import amount, counted, number, p_text, seconds_text, true_minus
from ftis.lab.reading import VALIDATION, PeerRun, Study
from ftis.loop.files import write_json
from ftis.page.drawing import COLOURS, DASHES, MARKERS
from ftis.page.figures import with_room
from ftis.page.plots import Panel, Plot, Tick, logarithmic
from ftis.page.views import Cell, PanelRow, RowGroup, Table, with_interval
from ftis.study.results import differences_of, finals, mean_finals, over_seeds, without_nan
from ftis.study.summary import accuracy_is

FEWEST_SIZES = 3
"""Sizes of swarms, the peer alone among them, that make a curve."""


@dataclass(frozen=True)
class Scaling:
    """The page's section."""

    intro: str
    verdicts: Sequence[str]
    panels: PanelRow
    tables: Sequence[Table]


def write_scaling(directory: Path, found: Mapping[str, Any] | None) -> None:
    """Write ``scaling.json``, if there is anything to say."""
    if found is not None:
        write_json(directory / "scaling.json", found)


def section(found: Mapping[str, Any] | None) -> Scaling | None:
    """The section on what :func:`scaling` found; None of nothing."""
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


def scaling(study: Study) -> dict[str, Any] | None:
    """What swarms of each size came to, as ``scaling.json`` has it. None where the arms are no swarm sizes.

    ==============  =======================================================================================
    own_rollouts    what each peer samples itself in a round
    peers, seeds    how many peers, and which seeds the means are over
    start           accuracy before training: mean, interval over seeds, per seed
    series          lists of sizes with a name: arms that differ in nothing but the size (and rates), the smallest first
    alone           the size of one: peers alone that sample as much
    ceilings        arms whose peers train alone and sample more, and differ in nothing else; the least first
    ==============  =======================================================================================

    A size, and a ceiling: ``arm``, ``size`` (m), ``sampled`` and ``trained`` (rollouts of a peer and round), ``final``
    (accuracy on validation), ``gains`` (by peer: the mean over seeds of its final accuracy minus that of the peer
    alone), ``seconds`` (of a peer's own work in all rounds, without waiting and evaluation; None where they were not
    recorded), ``bytes_sent`` to each other peer and ``bytes_received`` in all rounds. All but ``gains`` are the mean
    over peers: over seeds, with its interval and each seed's.

    ``times`` says how many times as much a peer alone would have to sample to end as high, by a straight line over
    log₂ between the peers alone and the ceilings; None where no ceiling is as high. ``times_per_seed`` has the same of
    each seed's means. ``pays_from`` is the least s / t,
    seconds to sample a rollout over seconds to train on one, at which the swarm takes a peer less time than that:
    s + m·t < times · (s + t). It is 0 where the swarm pays whatever the ratio, None where ``times`` is unknown or 1.
    ``seconds_alone`` are what a peer alone took here for so many times the sampling, by a straight line over log₂ for
    their logarithm: the swarm saved time where they are more than ``seconds``. None where one of both is unknown.

    ``against_alone`` compares the mean over peers with that of the peers alone, seed by seed: None for the peers alone,
    else ``mean``, ``low``, ``high``, ``p_value``, ``p_adjusted`` (Holm, over all other arms here), and a verdict
    (``label``, ``text``). ``against_equal_training`` compares a swarm like that with the ceiling that trains on as many
    rollouts, corrected over the swarms that have one, and ``gains_at_equal_training`` is to it as ``gains`` to
    ``against_alone``; None where there is none.
    """
    if not study.seeds or study.elsewhere:
        return None
    run = {arm.name for arm in study.arms}
    if run <= set(study.recipe.experiment.baselines):  # nothing is compared
        return None
    arms = [arm for arm in arms_of(study.recipe) if arm.name in run]
    together = [arm for arm in arms if _size_of(arm) > 1]
    series: list[list[Arm]] = []
    for arm in together:
        one_more = [s for s in series if _are_sizes_of_one(s, arm)]
        alike = max(one_more, key=lambda s: _rates(s[0]) == _rates(arm), default=None)
        (series.append([arm]) if alike is None else alike.append(arm))
    longest = max(series, key=len, default=[])
    if not longest:
        return None
    own = _own(longest[0])
    series = [s for s in series if _own(s[0]) == own]
    alone = [arm for arm in arms if arm not in together]
    ones = [arm for arm in alone if _own(arm) == own]
    if not ones:
        return None
    ones.sort(key=lambda arm: _settings(arm) != _settings(longest[0]))  # of several, one with the swarms' settings
    more = [arm for arm in alone if _own(arm) > own and _settings(arm) == _settings(ones[0])]
    ceilings = list({_own(arm): arm for arm in reversed(more)}.values())  # of two that sample as much, the first
    if len({_size_of(arm) for arm in [ones[0], *longest]}) < FEWEST_SIZES:
        return None
    starts = {
        str(seed): fmean(study.peer(seed, ones[0].name, peer).on(VALIDATION)[0].accuracy for peer in study.peer_names)
        for seed in study.seeds
    }
    others = [*(arm for s in series for arm in s), *ceilings]
    against = _against(study, [(arm.name, ones[0].name) for arm in others])
    found: dict[str, Any] = {
        "accuracy_is": accuracy_is(ones[0].recipe),
        "own_rollouts": own,
        "peers": len(study.peer_names),
        "seeds": list(study.seeds),
        "start": over_seeds(starts),
        "series": [
            {
                "name": name,
                "sizes": [
                    _size(study, arm, ones[0].name, against)
                    for arm in ([ones[0], *sorted(s, key=_size_of)] if len(s) > 1 else s)
                ],
            }
            for name, s in zip(_names(series), series, strict=True)
        ],
        "alone": _size(study, ones[0], ones[0].name, against),
        "ceilings": sorted(
            (_size(study, arm, ones[0].name, against) for arm in ceilings), key=lambda size: size["sampled"]
        ),
    }
    alone_sizes = [found["alone"], *found["ceilings"]]
    line_of_seed = {
        seed: [(size["sampled"] / own, size["final"]["per_seed"][seed]) for size in alone_sizes] for seed in starts
    }
    line = [(size["sampled"] / own, size["final"]["mean"]) for size in alone_sizes]
    for size in (size for s in found["series"] for size in s["sizes"]):
        size["times"] = times = _reached_at(line, size["final"]["mean"])
        final_of_seed = size["final"]["per_seed"]
        size["times_per_seed"] = {seed: _reached_at(line_of_seed[seed], final_of_seed[seed]) for seed in starts}
        m = size["trained"] / own
        size["pays_from"] = None if times is None or times <= 1 else max(0.0, (m - times) / (times - 1))
        size["seconds_alone"] = None if times is None else _seconds_at(times, own, alone_sizes)
    equal = {c["trained"]: c["arm"] for c in found["ceilings"]}
    swarms = [size for s in found["series"] for size in s["sizes"] if size["size"] > 1]
    compared = [(size["arm"], equal[size["trained"]]) for size in swarms if size["trained"] in equal]
    against_equal = _against(study, compared)
    for size in swarms:
        size["against_equal_training"] = against_equal.get(size["arm"])
        ceiling = equal.get(size["trained"])
        size["gains_at_equal_training"] = _gains(study, size["arm"], ceiling) if ceiling else None
    known: dict[str, Any] = without_nan(found)
    return known


def _reached_at(line: Sequence[tuple[float, float]], height: float) -> float | None:
    """The least x at which a line through (x, y), straight over log₂ x, is as high as ``height``; None if nowhere."""
    if not line or height <= line[0][1]:
        return line[0][0] if line else None
    for (x0, y0), (x1, y1) in pairwise(line):
        if y0 < height <= y1:
            return float(x0 * (x1 / x0) ** ((height - y0) / (y1 - y0)))
    return None


def _seconds_at(times: float, own: int, sizes: Sequence[Mapping[str, Any]]) -> float | None:
    """What a peer alone takes for so many times the sampling, from arms with more and more of it."""
    line = [(size["sampled"] / own, size["seconds"] and size["seconds"]["mean"]) for size in sizes]
    for (x0, y0), (x1, y1) in pairwise(line):
        if x0 <= times <= x1 and y0 and y1:
            return float(y0 * (y1 / y0) ** (log2(times / x0) / log2(x1 / x0)))
    return None


def _size_of(arm: Arm) -> int:
    return len(arm.swarms[0].peers)


def _own(arm: Arm) -> int:
    """Rollouts that a peer of the arm samples itself in a round."""
    return rollouts_per_round(arm.swarms[0])[0]


def _against(study: Study, pairs: Sequence[tuple[str, str]]) -> dict[str, dict[str, Any]]:
    """The mean over peers of each pair's first arm against that of its second, by the first's name.

    A comparison is of whole swarms, so there are as many as arms: among as many as arms × peers, few seeds show none.
    """
    compared = [{"arm": arm, "baseline": baseline} for arm, baseline in pairs]
    tested = differences_of(study, compared, lambda _, arm: mean_finals(study, VALIDATION, arm))
    return {arm: difference for (arm, _), difference in zip(pairs, tested, strict=True)}


def _gains(study: Study, arm: str, baseline: str) -> dict[str, float]:
    """By peer: the mean over seeds of its final accuracy in the arm, minus that in the baseline."""
    arms = (arm, baseline)
    return {
        peer: fmean(here) - fmean(there)
        for peer in study.peer_names
        for here, there in [(finals(study, VALIDATION, name, peer) for name in arms)]
    }


def _names(every: Sequence[Sequence[Arm]]) -> list[str]:
    """A name for each: what its arms' names share beside their sizes, or the objective's, or its largest arm's."""
    names: list[str] = []
    for series in every:
        largest = max(series, key=_size_of)
        without_size = {"-".join(part for part in arm.name.split("-") if part != str(_size_of(arm))) for arm in series}
        shared = without_size.pop() if len(without_size) == 1 else ""
        candidates = [shared, series[0].recipe.objective.name] if len(series) > 1 else []
        names.append(next((name for name in candidates if name and name not in names), largest.name))
    return names


def _are_sizes_of_one(series: Sequence[Arm], arm: Arm) -> bool:
    """Whether ``arm`` is one more size of a series. A second arm of a size begins a series of its own."""
    alike = _settings(series[0]) == _settings(arm) and _own(series[0]) == _own(arm)
    return alike and _size_of(arm) not in map(_size_of, series)


def _rates(arm: Arm) -> list[float]:
    return [peer.learning_rate for peer in arm.recipe.peers]


def _settings(arm: Arm) -> dict[str, Any]:
    """The recipe of an arm without what says how large its swarms are, how much a peer samples, and learning rates."""
    of_sizes = {"swarms", "prompts_per_round", "prompts_per_peer"}
    rates = {"__all__": {"learning_rate"}}
    return arm.recipe.model_dump(exclude={"arms": True, "training": of_sizes, "peers": rates})


def _size(study: Study, arm: Arm, alone: str, against: Mapping[str, Any]) -> dict[str, Any]:
    """One size of swarm, as :func:`scaling` has it; ``alone`` names the arm that gains are counted from."""
    sampled, trained = rollouts_per_round(arm.swarms[0])
    runs = {str(seed): [study.peer(seed, arm.name, peer) for peer in study.peer_names] for seed in study.seeds}

    def of_a_peer(quantity: Callable[[PeerRun], float]) -> dict[str, Any]:
        return over_seeds({seed: fmean(map(quantity, of_seed)) for seed, of_seed in runs.items()})

    timed = all(run.own_seconds is not None for of_seed in runs.values() for run in of_seed)
    return {
        "arm": arm.name,
        "size": _size_of(arm),
        "sampled": sampled,
        "trained": trained,
        "final": over_seeds(dict(zip(map(str, study.seeds), mean_finals(study, VALIDATION, arm.name), strict=True))),
        "against_alone": against.get(arm.name),
        "gains": _gains(study, arm.name, alone),
        "seconds": of_a_peer(lambda run: run.own_seconds.total if run.own_seconds else nan) if timed else None,
        "bytes_sent": of_a_peer(lambda run: run.bytes_sent),
        "bytes_received": of_a_peer(lambda run: run.bytes_received),
    }


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
    for i, series in enumerate(found["series"]):
        ink, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
        swarms = [size for size in series["sizes"] if size["size"] > 1]
        joined = series["sizes"] if not swarms or swarms[0]["size"] == least else swarms
        of_sizes = [(size["size"], size[key]) for size in joined]
        _draw_intervals(plot, of_sizes, ink, unit)
        points = [(x, estimate["mean"] / unit) for x, estimate in of_sizes]
        plot.line(points, ink, series["name"], width=1.9, marker=marker)


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
