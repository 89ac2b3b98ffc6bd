"""The page's section on what the peers of each collaborative arm took from each other."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ftis.config import ArmConfig
from ftis.lab.formatting import counted
from ftis.lab.reading import Study
from ftis.lab.recipes import with_arm
from ftis.page import exchange_figures
from ftis.page.corrections import Correction, correction_of
from ftis.page.exchange_figures import EFFECTIVE, WEIGHT, PairMeasures
from ftis.page.views import Cell, PanelRow, RowGroup, Table
from ftis.study.budgets import plan

MOST_PAIRS = 12
"""So many pairs of peers get figures of their own, as in a swarm of four; more are shown together in one figure."""

LONGEST_REASON = 300
"""Letters of a first rejection that are shown."""

LEARNED = {
    "admitted": ("Came", 1),
    "zero_advantage": ("Without signal", 1),
    "dropped": ("Dropped", 1),
    "kept": ("Learned from", 1),
    "kl/k1": ("k1, nats", 2),
    f"{WEIGHT}mean": ("Weight", 3),
    EFFECTIVE: ("Effective sample size", 2),
}
"""Measures of a source's rollouts: their titles in the table, and digits."""

GAP = "sampling/checked_logp_difference/max"


@dataclass(frozen=True)
class ArmExchange:
    """One arm's figures and what stands between them.

    Attributes:
        together: how many pairs of peers a figure shows together, in words; "" if each pair has figures of its own.
        expected: rollouts that a peer offers in a round.
        learned: what became of each source's rollouts, its own among them, in numbers.
        refusals: what was refused and why; None if nothing was.
        evidence: the honesty test's highest evidence on each source; None where there was no test.
        use: what the objective does with the importance weights, in words.
        filter: what its filter does, in words.
        sampler_gap: by how many nats sampler and learner disagree on the own tokens that were checked, at most; "" if
            it was not measured.
    """

    name: str
    together: str
    expected: int
    participation: PanelRow
    learned: Table
    refusals: Table | None
    evidence: Table | None
    use: str
    weights: PanelRow
    shares: PanelRow
    filter: str
    divergence: PanelRow
    sampler_gap: str


def exchanges(study: Study) -> list[ArmExchange] | None:
    """Of each arm whose peers learn together; None where there is none."""
    together = [arm for arm in study.arms if arm.collaborate and len(study.recipe.peers) > 1]
    return [_arm_exchange(study, arm) for arm in together] or None


def _arm_exchange(study: Study, arm: ArmConfig) -> ArmExchange:
    correction = correction_of(with_arm(study.recipe, arm))
    expected = plan(study.recipe, arm).generated
    columns = len(study.recipe.peers) - bool(study.elsewhere)
    pairs = _pairs(study, arm)
    heard = [
        PairMeasures.of(arm.name, peer, source, (study.peer(seed, arm.name, peer).rounds for seed in study.seeds_shown))
        for peer, source in pairs
    ]
    many = len(pairs) > MOST_PAIRS
    heard = [_together(heard)] if many else heard
    return ArmExchange(
        name=arm.name,
        together=f"{len(pairs)} pairs of a learner and a source" if many else "",
        expected=expected,
        participation=PanelRow.of([exchange_figures.participation(h, expected) for h in heard], columns),
        learned=_learned(study, arm, pairs),
        refusals=_refusals(study, arm),
        evidence=_evidence(study, arm),
        use=_use_in_words(correction),
        weights=PanelRow.of([panel for h in heard for panel in exchange_figures.weights(h, correction.cap)], 2),
        shares=PanelRow.of([exchange_figures.shares(h) for h in heard], columns),
        filter=_filter_in_words(correction),
        divergence=PanelRow.of(
            [exchange_figures.divergence(h, correction.objective.kl_reduction, correction.threshold) for h in heard],
            columns,
        ),
        sampler_gap=_sampler_gap(study, arm),
    )


def _pairs(study: Study, arm: ArmConfig) -> list[tuple[str, str]]:
    """Learner and source of one swarm, such that a line of panels has each learner once, in the peers' order."""
    names = tuple(peer.name for peer in study.recipe.peers)
    swarms = with_arm(study.recipe, arm).training.swarms or (names,)
    swarm_of = {name: swarm for swarm in swarms for name in swarm}

    def distance(pair: tuple[str, str]) -> int:
        learner, source = (swarm_of[pair[0]].index(name) for name in pair)
        return (source - learner) % len(swarm_of[pair[0]])

    pairs = [(peer, source) for peer in study.peer_names for source in swarm_of[peer] if source != peer]
    return sorted(pairs, key=distance)


def _together(pairs: Sequence[PairMeasures]) -> PairMeasures:
    """What all learners measured of all sources, as if each pair were a seed of one."""
    at_step: dict[int, list[Mapping[str, Any]]] = {}
    for pair in pairs:
        for step, measures in pair.at_step.items():
            at_step.setdefault(step, []).extend(measures)
    return PairMeasures(pairs[0].arm, "peers", "others", dict(sorted(at_step.items())))


def _use_in_words(correction: Correction) -> str:
    cut = f"what C = {correction.cap:g} would cut is shown for comparison"
    if correction.weighted is None:
        return f"{correction.name} is not importable here, so the page cannot say whether it uses the weights: {cut}"
    if correction.weighted:
        return f"It multiplies the gradient, cut at C = {correction.cap:g}"
    return f"{correction.name} does not use it: {cut}"


def _filter_in_words(correction: Correction) -> str:
    if correction.filtered is None:
        return f"{correction.name} is not importable here, so the page cannot say whether it filters"
    if correction.filtered:
        return (
            f"The filter drops a rollout with Â ≤ 0 whose {correction.objective.kl_estimator} reaches "
            f"g = {correction.objective.kl_threshold:g}"
        )
    return f"{correction.name} has no filter"


def _learned(study: Study, arm: ArmConfig, pairs: Sequence[tuple[str, str]]) -> Table:
    """What became of each learner's own rollouts and of every other's, on the mean over rounds and seeds."""
    rows = []
    for peer in study.peer_names:
        rounds = [row.by_peer for seed in study.seeds_shown for row in study.peer(seed, arm.name, peer).rounds]
        sources = [peer, *(source for learner, source in pairs if learner == peer)]
        measured = {source: [row[source] for row in rounds if source in row] for source in sources}
        told = {f"{peer} itself": measured.pop(peer)}
        told |= measured if len(pairs) <= MOST_PAIRS else {"another": list(itertools.chain(*measured.values()))}
        rows += [[Cell(peer), Cell(source), *_mean_cells(measures)] for source, measures in told.items()]
    head = ["Learner", "Source", *(title for title, _ in LEARNED.values())]
    caption = f"{arm.name}: rollouts a round, and their weights; means over rounds and seeds"
    return Table(caption, head, [RowGroup(None, rows)])


def _mean_cells(measures: Sequence[Mapping[str, Any]]) -> list[Cell]:
    cells = []
    for measure, (_, digits) in LEARNED.items():
        values = [float(of_round[measure]) for of_round in measures if measure in of_round]
        cells.append(Cell(f"{fmean(values):.{digits}f}" if values else "–"))
    return cells


def _refusals(study: Study, arm: ArmConfig) -> Table | None:
    """What each learner refused of each source and why, over all rounds and seeds."""
    rows = []
    for peer in study.peer_names:
        for source in (other.name for other in study.recipe.peers if other.name != peer):
            reasons: Counter[str] = Counter()
            first, absent = "", 0
            for seed in study.seeds_shown:
                for row in study.peer(seed, arm.name, peer).rounds:
                    measures = row.by_peer.get(source, {})
                    absent += not (measures.get("delivered", True) or measures.get("late"))
                    first = first or str(measures.get("first_rejection", ""))
                    for measure, count in measures.items():
                        kind, _, reason = measure.partition("/")
                        if kind == "rejected" and reason:
                            reasons[reason] += int(count)
            if absent:
                reasons["nothing came"] = absent
            why = ", ".join(f"{reason}: {count}" for reason, count in sorted(reasons.items()))
            if why:
                rows.append([Cell(peer), Cell(source), Cell(why), Cell(first[:LONGEST_REASON])])
    if not rows:
        return None
    head = ["Learner", "Source", "Reasons, times", "The first, in words"]
    return Table(f"{arm.name}: refused or missing", head, [RowGroup(None, rows)])


def _evidence(study: Study, arm: ArmConfig) -> Table | None:
    """The honesty test's evidence: a line for each pair of which one was accused, and one for the others."""
    rows, highest, tested = [], 0.0, 0
    for seed, peer in itertools.product(study.seeds_shown, study.peer_names):
        rounds = study.peer(seed, arm.name, peer).rounds
        for source, last in (rounds[-1].by_peer if rounds else {}).items():
            if "honesty/evidence" not in last:
                continue
            nats = max(row.by_peer.get(source, {}).get("honesty/evidence", 0.0) for row in rounds)
            needed = f"{nats:.1f} of {last['honesty/threshold']:.1f}"
            if "honesty/found_in_round" in last:
                passages = ", ".join(map(repr, last["honesty/passages"]))[:LONGEST_REASON]
                found = f"round {last['honesty/found_in_round']}, after {last['honesty/found_after_tokens']:,} tokens"
                rows.append([Cell(peer), Cell(f"{source}, seed {seed}"), Cell(needed), Cell(found), Cell(passages)])
            else:
                tested, highest = tested + 1, max(highest, nats)
    if tested:
        pairs = counted(tested, "other pair" if rows else "pair")
        rows.append([Cell(pairs), Cell(""), Cell(f"at most {highest:.1f}"), Cell(""), Cell("")])
    head = ["Learner", "Source", "Evidence of false log-probabilities, nats", "Found in", "Telling passages"]
    return Table(f"{arm.name}: honesty", head, [RowGroup(None, rows)]) if rows else None


def _sampler_gap(study: Study, arm: ArmConfig) -> str:
    gaps = [
        row.measures[GAP]
        for seed in study.seeds_shown
        for peer in study.peer_names
        for row in study.peer(seed, arm.name, peer).rounds
        if GAP in row.measures
    ]
    return f"{max(gaps):.1e}" if gaps else ""
