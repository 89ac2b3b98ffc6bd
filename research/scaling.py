"""Accuracy against the number of peers, for arms that are swarm sizes: ``python -m research.scaling``.

Arms that differ in nothing but the size of their swarms are a series: a peer samples as much itself in all of them. A
peer alone that samples as much is the swarm of one of every series; one that samples more is a ceiling. Learning rates
may differ too: an arm that trains on more rollouts is often served by a higher one (:mod:`research.rates`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import inf, log2
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from rich.box import MARKDOWN
from rich.table import Table

from ftis.cli_options import console
from ftis.comparison.results import differences, finals, over_seeds
from ftis.comparison.summary import accuracy_is
from ftis.config import RunError
from ftis.recipe.arms import Arm, arms_of, rollouts_per_round
from ftis.records.files import write_json
from ftis.records.reading import VALIDATION, PeerRun, Study, own_seconds, read_study
from ftis.view.formatting import amount, interval_text, number, p_text, seconds_text, true_minus
from research import commands

FEWEST_SIZES = 3
"""Sizes of swarms, the peer alone among them, that make a curve."""


def scaling(study: Study) -> dict[str, Any] | None:
    """The results of swarms of each size, as in ``scaling.json``. None if the arms are no swarm sizes.

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
    log₂ between the peers alone and the ceilings; None where no ceiling is as high, 0 where the peers alone end higher.
    ``times_per_seed`` has the same of each seed's means. ``pays_from`` is the least s / t,
    seconds to sample a rollout over seconds to train on one, at which the swarm takes a peer less time than that:
    s + m·t < times · (s + t). It is 0 where the swarm pays whatever the ratio, None where ``times`` is unknown or 1.
    ``seconds_alone`` are what a peer alone took here for so many times the sampling, by a straight line over log₂ for
    their logarithm: the swarm saved time where they are more than ``seconds``. None where one of both is unknown.

    ``against_alone`` compares the mean over peers with that of the peers alone, seed by seed: None for the peers alone,
    else ``mean``, ``low``, ``high``, ``p_value``, ``p_adjusted`` (Holm, over all comparisons here), and a verdict
    (``label``, ``text``). ``against_equal_training`` compares a swarm like that with the ceiling that trains on as many
    rollouts, and ``gains_at_equal_training`` is to it as ``gains`` to
    ``against_alone``; None where there is none.
    """
    arms = None if not study.seeds or study.elsewhere else _by_size(study)
    if arms is None:
        return None
    one = arms.alone.name
    swarms_of = [arm for sizes in arms.series for arm in sizes]
    ceiling_of = {_trained(arm): arm.name for arm in arms.ceilings}
    equal = [(arm.name, ceiling_of[_trained(arm)]) for arm in swarms_of if _trained(arm) in ceiling_of]
    against = _against(study, [*((arm.name, one) for arm in (*swarms_of, *arms.ceilings)), *equal])
    ceilings = [_size(study, arm, one, against) for arm in arms.ceilings]
    series: list[dict[str, Any]] = [
        {"name": name, "sizes": [_size(study, arm, one, against) for arm in _with_one(sizes, arms.alone)]}
        for name, sizes in zip(_names(arms.series), arms.series, strict=True)
    ]
    alone = _size(study, arms.alone, one, against)
    swarms = [size for of in series for size in of["sizes"]]
    for size in swarms:
        size |= _worth_alone(size, [alone, *ceilings])
    for size in (size for size in swarms if size["size"] > 1):
        ceiling = ceiling_of.get(size["trained"], "")
        size["against_equal_training"] = against.get((size["arm"], ceiling))
        size["gains_at_equal_training"] = _gains(study, size["arm"], ceiling) if ceiling else None
    starts = {
        seed: fmean(study.peer(seed, one, peer).on(VALIDATION)[0].accuracy for peer in study.peer_names)
        for seed in study.seeds
    }
    return {
        "accuracy_is": accuracy_is(arms.alone.recipe),
        "own_rollouts": arms.own,
        "peers": len(study.peer_names),
        "seeds": list(study.seeds),
        "start": asdict(over_seeds(starts)),
        "series": series,
        "alone": alone,
        "ceilings": ceilings,
    }


@dataclass(frozen=True)
class _Arms:
    """The arms that are swarm sizes.

    Attributes:
        own: rollouts that each peer samples itself in a round.
        series: arms that differ in nothing but the size (and rates).
        alone: the arm whose peers train alone and sample as much.
        ceilings: arms whose peers train alone and sample more, the least first.
    """

    own: int
    series: Sequence[Sequence[Arm]]
    alone: Arm
    ceilings: Sequence[Arm]


def _by_size(study: Study) -> _Arms | None:
    """The study's arms by their sizes; None where they are too few for a curve."""
    run = {arm.name for arm in study.arms}
    if run <= set(study.recipe.experiment.baselines):  # nothing is compared
        return None
    arms = [arm for arm in arms_of(study.recipe) if arm.name in run]
    series: list[list[Arm]] = []
    for arm in (arm for arm in arms if _size_of(arm) > 1):
        one_more = [sizes for sizes in series if _are_sizes_of_one(sizes, arm)]
        alike = max(one_more, key=lambda sizes: _rates(sizes[0]) == _rates(arm), default=None)
        if alike is None:
            series.append([arm])
        else:
            alike.append(arm)
    longest = max(series, key=len, default=[])
    if not longest:
        return None
    own = _own(longest[0])
    alone = [arm for arm in arms if _size_of(arm) == 1]
    ones = [arm for arm in alone if _own(arm) == own]
    if not ones or len({1, *map(_size_of, longest)}) < FEWEST_SIZES:
        return None
    one = min(
        ones, key=lambda arm: _settings(arm) != _settings(longest[0])
    )  # of several, one with the swarms' settings
    more = [arm for arm in alone if _own(arm) > own and _settings(arm) == _settings(one)]
    ceilings = {_own(arm): arm for arm in reversed(more)}  # of two that sample as much, the first
    return _Arms(own, [s for s in series if _own(s[0]) == own], one, [ceilings[n] for n in sorted(ceilings)])


def _with_one(sizes: Sequence[Arm], alone: Arm) -> Sequence[Arm]:
    """A series from the peers alone on; an arm that is no series stands by itself."""
    return [alone, *sorted(sizes, key=_size_of)] if len(sizes) > 1 else sizes


def _worth_alone(size: Mapping[str, Any], alone: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The worth of a size in sampling alone: the keys from ``times`` to ``seconds_alone`` of :func:`scaling`.

    Args:
        alone: the peers alone, and the ceilings with more and more sampling.
    """
    own = alone[0]["sampled"]
    final = size["final"]
    times = _reached_at([(one["sampled"] / own, one["final"]["mean"]) for one in alone], final["mean"])
    m = size["trained"] / own
    return {
        "times": times,
        "times_per_seed": {
            seed: _reached_at([(one["sampled"] / own, one["final"]["per_seed"][seed]) for one in alone], reached)
            for seed, reached in final["per_seed"].items()
        },
        "pays_from": None if times is None or times <= 1 else max(0.0, (m - times) / (times - 1)),
        "seconds_alone": None if not times else _seconds_at(times, own, alone),
    }


def _reached_at(line: Sequence[tuple[float, float]], height: float) -> float | None:
    """The least x at which a line through (x, y), straight over log₂ x, is as high as ``height``; None if nowhere.

    0 if the whole line is higher.
    """
    if not line or height <= line[0][1]:
        return (line[0][0] if height == line[0][1] else 0.0) if line else None
    for (x0, y0), (x1, y1) in pairwise(line):
        if y0 < height <= y1:
            return float(x0 * (x1 / x0) ** ((height - y0) / (y1 - y0)))
    return None


def _seconds_at(times: float, own: int, sizes: Sequence[Mapping[str, Any]]) -> float | None:
    """The seconds of a peer alone for so many times the sampling, from arms with more and more of it."""
    line = [(size["sampled"] / own, size["seconds"]["mean"]) for size in sizes]
    for (x0, y0), (x1, y1) in pairwise(line):
        if x0 <= times <= x1 and y0 and y1:
            return float(y0 * (y1 / y0) ** (log2(times / x0) / log2(x1 / x0)))
    return None


def _size_of(arm: Arm) -> int:
    return len(arm.swarms[0].peers)


def _own(arm: Arm) -> int:
    """Rollouts that a peer of the arm samples itself in a round."""
    return rollouts_per_round(arm.swarms[0])[0]


def _trained(arm: Arm) -> int:
    """Rollouts that a peer of the arm trains on in a round."""
    return rollouts_per_round(arm.swarms[0])[1]


def _against(study: Study, pairs: Sequence[tuple[str, str]]) -> dict[tuple[str, str], dict[str, Any]]:
    """The mean over peers of each pair's first arm against that of its second, by the pair; all are one family.

    A comparison is of whole swarms, so there are as many as arms: among as many as arms × peers, few seeds show none.
    """
    values = [(finals(study, VALIDATION, arm), finals(study, VALIDATION, one)) for arm, one in pairs]
    tested = zip(pairs, differences(values), strict=True)
    return {(arm, baseline): {"arm": arm, "baseline": baseline, **found} for (arm, baseline), found in tested}


def _gains(study: Study, arm: str, baseline: str) -> dict[str, float]:
    """By peer: the mean over seeds of its final accuracy in the arm, minus that in the baseline."""
    arms = (arm, baseline)
    return {
        peer: fmean(here.values()) - fmean(there.values())
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
    """The recipe of an arm without the sizes of its swarms, its peers' amount of sampling, and learning rates."""
    of_sizes = {"swarm_size", "prompts_per_round"}
    rates = {"__all__": {"learning_rate"}}
    return arm.recipe.model_dump(exclude={"arms": True, "training": of_sizes, "peers": rates})


def _size(study: Study, arm: Arm, alone: str, against: Mapping[tuple[str, str], Any]) -> dict[str, Any]:
    """One size of swarm, as :func:`scaling` has it; ``alone`` names the arm that gains are counted from."""
    sampled, trained = rollouts_per_round(arm.swarms[0])
    runs = {seed: [study.peer(seed, arm.name, peer) for peer in study.peer_names] for seed in study.seeds}

    def of_a_peer(quantity: Callable[[PeerRun], float]) -> dict[str, Any]:
        return asdict(over_seeds({seed: fmean(map(quantity, of_seed)) for seed, of_seed in runs.items()}))

    return {
        "arm": arm.name,
        "size": _size_of(arm),
        "sampled": sampled,
        "trained": trained,
        "final": asdict(over_seeds(finals(study, VALIDATION, arm.name))),
        "against_alone": against.get((arm.name, alone)),
        "gains": _gains(study, arm.name, alone),
        "seconds": of_a_peer(lambda run: sum(own_seconds(run.rounds).values())),
        "bytes_sent": of_a_peer(lambda run: run.bytes_sent),
        "bytes_received": of_a_peer(lambda run: run.bytes_received),
    }


def tables(found: Mapping[str, Any]) -> list[Table]:
    """Accuracy of each arm against the peers alone, against equal training, and what it costs a peer."""
    every = [found["alone"], *(size for series in found["series"] for size in series["sizes"]), *found["ceilings"]]
    sizes = list({size["arm"]: size for size in every}.values())
    accuracy = Table("arm", "peers", "sampled", "trained on", "final", "gain", "p, Holm", "least gain")
    equal = Table("arm", "peers", "trained on", "against equal training", "p, Holm", "least gain")
    cost = Table(
        "arm", "peers", "as alone, ×", "pays from s/t", "own seconds", "alone, seconds", "kB sent", "MB received"
    )
    accuracy.title = "Rollouts of a peer and round; accuracy on validation"
    equal.title = "Against peers that train alone on as many rollouts"
    cost.title = "What joining is worth in sampling, and what a peer spends over all rounds"
    for size in sizes:
        head = (size["arm"], str(size["size"]))
        trained, against = amount(size["trained"]), _compared(size["against_alone"])
        accuracy.add_row(
            *head, amount(size["sampled"]), trained, with_ends(size["final"]), *against, _least(size["gains"])
        )
        if (others := size.get("against_equal_training")) is not None:
            equal.add_row(*head, trained, *_compared(others), _least(size["gains_at_equal_training"]))
        alone = size.get("seconds_alone")
        cost.add_row(
            *head,
            _times(found, size),
            "" if size.get("pays_from") is None else f"{size['pays_from']:.2g}",
            seconds_text(size["seconds"]["mean"]),
            "" if alone is None else seconds_text(alone),
            amount(size["bytes_sent"]["mean"], 1e3),
            f"{size['bytes_received']['mean'] / 1e6:.2f}",
        )
    return [table for table in (accuracy, equal, cost) if table.row_count]


def with_ends(estimate: Mapping[str, Any], sign: str = "") -> str:
    """A mean with the ends of its interval; one seed has none."""
    mean = number(estimate["mean"], sign)
    ends = "" if estimate["low"] is None else f" ({interval_text(estimate['low'], estimate['high'], sign, ' to ')})"
    return true_minus(mean + ends)


def _compared(against: Mapping[str, Any] | None) -> tuple[str, str]:
    """A difference and its p."""
    return ("", "") if against is None else (with_ends(against, "+"), p_text(against["p_adjusted"]))


def _least(gains: Mapping[str, float]) -> str:
    """The least gain of a peer, with its name."""
    peer = min(gains, key=lambda peer: gains[peer])
    return f"{true_minus(number(gains[peer], '+'))} {peer}"


def _times(found: Mapping[str, Any], size: Mapping[str, Any]) -> str:
    """The worth of a swarm in times as much sampling alone, with the least and the most of a seed."""
    if size["size"] == 1 or not found["ceilings"]:
        return ""
    most = found["ceilings"][-1]["sampled"] / found["own_rollouts"]
    of_seeds = sorted(size["times_per_seed"].values(), key=lambda times: inf if times is None else times)

    def worth(times: float | None) -> str:
        if times is None:
            return f"over {most:g}"
        return f"{times:.2g}" if times else "under 1"

    mean, least, greatest = map(worth, (size["times"], of_seeds[0], of_seeds[-1]))
    return f"{mean} [{least} to {greatest}]" if len(of_seeds) > 1 else mean


def show_scaling(
    directory: Annotated[Path, typer.Argument(help="An experiment whose arms are swarm sizes.", show_default=False)],
) -> None:
    """Write scaling.json into an experiment, and print what swarms of each size came to."""
    found = scaling(read_study(directory))
    if found is None:
        raise RunError(
            f"{directory}: its arms make no curve over {FEWEST_SIZES} sizes of swarms, the peer alone among them"
        )
    write_json(directory / "scaling.json", found)
    for table in tables(found):
        table.box, table.title_justify = MARKDOWN, "left"
        console.print(table)


if __name__ == "__main__":
    commands.run(show_scaling)
