"""Who learned from whom in the last rounds, mark by mark, as a section of a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from ftis.records.reading import RoundRow
from ftis.view.arm_rounds import ArmRounds

LAST_ROUNDS = 30
"""Columns of the matrix."""

MOST_ROWS = 24
"""Rows of the matrix, one per pair of a learner and a source. Of more pairs, each learner has one row."""

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

TROUBLE = ("late", "rejected", "missing", "quarantined")


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

    @property
    def is_news(self) -> bool:
        """Whether it says what counts of rollouts do not: that something came late, was rejected or did not come."""
        return any(mark and mark.state in TROUBLE for row in self.rows for mark in row.marks)


def taken(rounds: ArmRounds) -> Taken | None:
    """Who learned from whom in the last rounds of one seed; None where nobody learns together or no round has ended."""
    (run,) = rounds.runs.values()
    last = max((of_peer[-1].step for of_peer in run.values() if of_peer), default=0)
    if not rounds.pairs or not last:
        return None
    first = max(1, last - LAST_ROUNDS + 1)
    together = len(rounds.pairs) > MOST_ROWS
    rows = []
    for learner, sources in rounds.sources.items():
        by_step = {row.step: row for row in run[learner][-LAST_ROUNDS:]}
        of_rounds = [by_step.get(step) for step in range(first, last + 1)]
        for name, others in [("the others", sources)] if together else [(source, [source]) for source in sources]:
            rows.append(MatrixRow(learner, name, [None if r is None else mark(r, others) for r in of_rounds]))
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
