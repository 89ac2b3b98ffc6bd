"""The fate of another peer's rollouts in a learner's rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ftis import metric_keys as keys
from ftis.records.reading import RoundRow


@dataclass(frozen=True)
class Source:
    """The fate of another peer's rollouts in some of the learner's rounds.

    Attributes:
        name: the peer that sampled the rollouts.
        offered: rollouts that came, whether they were used or not.
        used: rollouts that the learner learned from.
        zero: rollouts in groups with equal rewards.
        dropped: rollouts that a selection dropped, by reason.
        rejected: groups, messages or offers that were rejected, by reason.
        first_rejection: the first rejection in words, with the text that the sender wrote.
        rounds: the number of rounds that the counts cover.
        missing: rounds in which nothing came.
        late: messages that came in a later round than their own.
        behind: rounds that the peer is behind the learner; 0 if that is not known.
        quarantined_since: the round, counted from 1, in which the honesty test found the peer; None if it did not.
        accused_only: whether the honesty test found the peer, but the learner still learns from it.
        evidence, needed: of the honesty test on that peer, in nats, and the evidence that suffices.
        harmful_since: the step at which the no-regret guard found that learning from it did harm; None if it did not.
        set_aside: whether the guard has the learner do without it for some rounds.
    """

    name: str
    offered: int = 0
    used: int = 0
    zero: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    rejected: Mapping[str, int] = field(default_factory=dict)
    first_rejection: str = ""
    rounds: int = 0
    missing: int = 0
    late: int = 0
    behind: int = 0
    quarantined_since: int | None = None
    accused_only: bool = False
    evidence: float = 0.0
    needed: float = 0.0
    harmful_since: int | None = None
    set_aside: bool = False


def source_of(name: str, rounds: Sequence[RoundRow], behind: int = 0) -> Source:
    """The fate of a peer's rollouts in one or more of a learner's rounds."""
    measured = [row.by_peer.get(name, {}) for row in rounds]

    def by_reason(prefix: str) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for measure, value in (pair for measures in measured for pair in measures.items()):
            if value and measure.startswith(prefix):
                counts[measure.removeprefix(prefix)] += int(value)
        return dict(counts)

    def total(measure: str) -> int:
        return int(sum(measures.get(measure, 0) for measures in measured))

    last: Mapping[str, Any] = measured[-1]
    found = last.get(keys.FOUND_IN)
    return Source(
        name=name,
        offered=total(keys.ADMITTED) + total(keys.PASSED_OVER),
        used=total(keys.KEPT),
        zero=total(keys.ZERO_ADVANTAGE),
        dropped=by_reason(keys.DROPPED),
        rejected=by_reason(keys.REJECTED),
        first_rejection=next(
            (str(m[keys.FIRST_REJECTION]) for m in reversed(measured) if m.get(keys.FIRST_REJECTION)), ""
        ),
        rounds=len(measured),
        missing=sum(not (measures.get(keys.DELIVERED) or measures.get("late")) for measures in measured),
        late=total("late"),
        behind=behind,
        quarantined_since=int(found) if found and last.get(keys.QUARANTINED) else None,
        accused_only=bool(found) and not last.get(keys.QUARANTINED),
        evidence=last.get(keys.EVIDENCE, 0.0),
        needed=last.get(keys.THRESHOLD, 0.0),
        harmful_since=last.get(keys.HARMFUL_SINCE),
        set_aside=bool(last.get(keys.SET_ASIDE)),
    )
