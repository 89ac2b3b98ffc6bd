"""What the peers of one arm take from each other, round by round, as sections of a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any
from weakref import WeakKeyDictionary

from ftis.lab.reading import RoundRow
from ftis.metric_keys import PREFIX
from ftis.page.plots import ROUND, Chart, Series, chart
from ftis.page.views import Cell, RowGroup, Table
from ftis.study.following import ArmOfRun

LAST_ROUNDS = 30
"""Columns of the matrix."""

MOST_ROWS = 24
"""Rows of the matrix, one per pair of a learner and a source. Of more pairs, each learner has one row."""

MOST_LEARNERS = 6
"""Charts of weights and KL, one per learner. Of more, one chart has a line per learner."""

STATES: Mapping[str, tuple[str, str]] = {
    "kept": ("●", "learned from"),
    "late": ("◔", "learned from, some of it late"),
    "partly": ("◐", "learned from; some dropped, or without signal"),
    "dropped": ("○", "all dropped, or without signal"),
    "rejected": ("×", "something rejected"),
    "missing": ("–", "nothing came"),
    "quarantined": ("■", "in quarantine"),
}
"""What a cell of the matrix may say: its sign and its meaning."""


@dataclass(frozen=True)
class Mark:
    """A cell of the matrix: one of :data:`STATES`, its sign and what it says in words."""

    state: str
    sign: str
    words: str


@dataclass(frozen=True)
class MatrixRow:
    """A row of the matrix: who learns from whom, and a mark per round, None where nothing is known."""

    learner: str
    source: str
    marks: Sequence[Mark | None]


@dataclass(frozen=True)
class Taken:
    first: int
    last: int
    rows: Sequence[MatrixRow]
    legend: Sequence[tuple[str, str, str]]
    together: bool


@dataclass(frozen=True)
class Weighed:
    """Charts of divergence and of effective sample size."""

    charts: Sequence[Chart]
    cap: float | None


def taken(arm: ArmOfRun) -> Taken | None:
    """Who learned from whom in the last rounds; None where nobody learns together or no round has ended."""
    pairs = arm.pairs
    last = max((peer.step for peer in arm.peers.values()), default=0)
    if not pairs or not last:
        return None
    first = max(1, last - LAST_ROUNDS + 1)
    by_step = {name: {row.step: row for row in peer.recent if row.step >= first} for name, peer in arm.peers.items()}
    together = len(pairs) > MOST_ROWS
    rows = []
    for learner, source in [(name, "the others") for name in arm.peers] if together else pairs:
        others = arm.others_of(learner) if together else [source]
        of_rounds = [by_step[learner].get(step) for step in range(first, last + 1)]
        rows.append(MatrixRow(learner, source, [None if r is None else mark(r, others) for r in of_rounds]))
    legend = [(state, sign, meaning) for state, (sign, meaning) in STATES.items()]
    return Taken(first, last, rows, legend, together)


_marks: WeakKeyDictionary[RoundRow, dict[tuple[str, ...], Mark]] = WeakKeyDictionary()
"""Marks of rounds that are still shown: a round's end adds one column to thirty."""


def mark(row: RoundRow, others: Sequence[str]) -> Mark:
    """What became of the rollouts of some sources in one round; the worst of them decides."""
    known, key = _marks.setdefault(row, {}), tuple(others)
    if key not in known:
        known[key] = _mark(row, others)
    return known[key]


def _mark(row: RoundRow, others: Sequence[str]) -> Mark:
    measured = [row.by_peer.get(other, {}) for other in others]

    def total(measure: str) -> int:
        return int(sum(m.get(measure, 0) for m in measured))

    kept, zero, dropped, rejected = (total(name) for name in ("kept", "zero_advantage", "dropped", "rejected"))
    came = sum(bool(m.get("delivered") or m.get("late")) for m in measured)
    if any(m.get("honesty/quarantined") for m in measured):
        state = "quarantined"
    elif rejected:
        state = "rejected"
    elif came < len(others):
        state = "missing"
    elif not kept:
        state = "dropped"
    else:
        state = "late" if total("late") else "partly" if dropped or zero else "kept"
    counts = {"learned from": kept, "without signal": zero, "dropped": dropped, "rejected": rejected}
    of_peers = f"{came} of {len(others)} came; " if len(others) > 1 else "" if came else "nothing came; "
    words = ", ".join(f"{n} {name}" for name, n in counts.items() if n) or "nothing of it"
    return Mark(state, STATES[state][0], f"round {row.step}: {of_peers}{words}")


def weighed(arm: ArmOfRun) -> Weighed | None:
    """How far the learners are from what the others write; None where nothing was weighed."""
    if not arm.pairs or not any(peer.rows for peer in arm.peers.values()):
        return None
    measures = [
        ("KL of others’ rollouts, nats", "kl/k1", None, None),
        ("Effective sample size", "sampling/effective_sample_size", 0.0, 1.0),
    ]
    few = len(arm.peers) <= MOST_LEARNERS
    charts = []
    for title, measure, low, high in measures:
        if few:
            for learner, peer in arm.peers.items():
                lines = [
                    Series(other, arm.colour_of(other), _points(peer.rows, [other], measure))
                    for other in arm.others_of(learner)
                ]
                charts.append(chart(f"{title}: {learner} learns", ROUND, lines, low=low, high=high))
        else:
            lines = [
                Series(learner, arm.colour_of(learner), _points(peer.rows, arm.others_of(learner), measure))
                for learner, peer in arm.peers.items()
            ]
            charts.append(chart(f"{title}, mean over sources", ROUND, lines, low=low, high=high))
    return Weighed(charts, cap_of(arm))


def _points(rows: Sequence[Mapping[str, Any]], others: Sequence[str], measure: str) -> list[tuple[float, float]]:
    """The mean over sources, round by round; rounds in which none was measured are left out."""
    keys = [f"{PREFIX}{other}/{measure}" for other in others]
    found = [(float(row["step"]), [float(row[key]) for key in keys if row.get(key) is not None]) for row in rows]
    return [(step, fmean(values)) for step, values in found if values]


def cap_of(arm: ArmOfRun) -> float | None:
    """C: as the recipe says, or as the records show it, where a ratio was above its weight. None if none ever was."""
    said = arm.recipe.objective.importance_sampling_clip_max
    if said is not None:
        return float(said)
    for peer in arm.peers.values():
        for row in reversed(peer.recent):
            for measures in row.by_peer.values():
                ratio = measures.get("sampling/importance_sampling_ratio/max")
                weight = measures.get("sampling/importance_sampling_weight/max")
                if ratio is not None and weight is not None and ratio > weight:
                    return float(weight)
    return None


def honesty(arm: ArmOfRun) -> Table | None:
    """The honesty test's evidence on each sender: the highest of its learners', and who found it."""
    rows = []
    found: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for learner, peer in arm.peers.items():
        last = peer.recent[-1].by_peer if peer.rows else {}
        for source, measures in last.items():
            if "honesty/evidence" in measures and source != learner:
                found.setdefault(source, []).append((learner, measures))
    for source, heard in found.items():
        learner, worst = max(heard, key=lambda one: one[1]["honesty/evidence"])
        accused = [
            f"{name} in round {m['honesty/found_in_round']}" for name, m in heard if "honesty/found_in_round" in m
        ]
        rows.append(
            [
                Cell(source),
                Cell(f"{worst['honesty/evidence']:.1f}", strong=bool(accused)),
                Cell(f"{worst['honesty/threshold']:.1f}"),
                Cell(learner),
                Cell(f"{max(m['honesty/tokens'] for _, m in heard):,}"),
                Cell(", ".join(accused) or "nobody"),
            ]
        )
    if not rows:
        return None
    head = ["Sender", "Evidence, nats", "Needed", "Highest at", "Tokens tested", "Found by"]
    caption = "Evidence that a sender does not draw its tokens from the log-probabilities that it reports"
    return Table(caption, head, [RowGroup(None, rows)])
