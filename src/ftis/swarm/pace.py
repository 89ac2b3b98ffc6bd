"""The time that a round waits for each peer, by the others' delivery times. Pure, and each peer's own.

Once more than half of the peers have delivered, at the time h, the rest have until ``h + (patience − 1) · m``. Here m
is the median of all peers' delivery times since the end of the round before, and at least :data:`LEAST_SECONDS`. While
at most half have delivered nobody is late: if all are slow together, all are waited for.

A late round costs a peer :data:`LATE` strikes, one in time takes one back. Beyond :data:`LATE` it is not waited for. So
in the long run it is late, and waited for, in at most one of ``LATE + 1`` rounds.

Peers need not agree, since a round's messages need not be the same everywhere. A peer that waited longer than the
others finds their next messages there at once. Then m is small, and it catches up.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

LEAST_SECONDS = 2.0
"""The least median that counts: a second more in a round of one second is no sign of being slow."""
LATE = 4
"""Strikes of a late round: so many rounds in time make up for it."""


@dataclass
class Pace:
    """The delivery times of the others, and what follows from them.

    Attributes:
        patience: multiples of the median delivery time.
        began: the end of the round before.
        since: this peer's own delivery.
        seen: the first time that each peer was there; a peer's first round begins with it.
        heard: the first time that a peer's offer for a round was heard.
        came: in this round, the time of each delivery.
        took: in this round, the delivery times in seconds; the time that an offer lay waiting for this peer is no
            part of them.
        strikes: by peer.
        ended: of earlier rounds, the time after which a message was late, and the peers that were not waited for.
    """

    patience: float
    began: float = 0.0
    since: float = 0.0
    seen: dict[str, float] = field(default_factory=dict)
    heard: dict[tuple[str, int], float] = field(default_factory=dict)
    came: dict[str, float] = field(default_factory=dict)
    took: dict[str, float] = field(default_factory=dict)
    strikes: dict[str, int] = field(default_factory=dict)
    ended: dict[int, tuple[float, frozenset[str]]] = field(default_factory=dict)

    def start(self, now: float, oldest: int) -> None:
        """Begin to wait, since this peer has delivered. Forget rounds before ``oldest``."""
        self.since, self.came, self.took = now, {}, {}
        self.heard = {place: at for place, at in self.heard.items() if place[1] >= oldest}
        self.ended = {round: end for round, end in self.ended.items() if round >= oldest}

    def delivered(self, peer: str, round: int, now: float) -> None:
        """Note that ``peer`` has delivered for the awaited round."""
        if peer not in self.came:
            lay = max(0.0, self.since - max(self.heard.get((peer, round), self.since), self.began))
            self.came[peer], self.took[peer] = now, now - self.began - lay

    def median(self, awaited: int) -> float | None:
        """The upper median of all delivery times, with ``awaited`` peers to come; None if it is still to come."""
        return _upper_median([self.since - self.began, *self.took.values()], awaited)

    def end(self, peer: str, awaited: int) -> float:
        """The time after which ``peer`` is late, with ``awaited`` peers to come."""
        half, median = _upper_median([self.since, *self.came.values()], awaited), self.median(awaited)
        if half is None or median is None:
            return float("inf")
        joined = max(0.0, self.seen.get(peer, self.began) - self.began)
        return half + (self.patience - 1) * max(median, LEAST_SECONDS) + joined

    def waits_for(self, peer: str) -> bool:
        return self.strikes.get(peer, 0) <= LATE

    def close(self, round: int, now: float, late: Collection[str], others: Collection[str]) -> Mapping[str, bool]:
        """End the round. Returns, for each peer for which that changed, whether it is waited for from now on.

        Args:
            late: the peers that were waited for, and did not deliver.
            others: the peers that were not waited for, and did not deliver.
        """
        before = {peer: self.waits_for(peer) for peer in self.strikes}
        self.ended[round] = max(now, self.end("", len(late))), frozenset(others)
        for peer in late:
            self.strikes[peer] = min(self.strikes.get(peer, 0) + LATE, 2 * LATE)
        for peer in self.came:
            self._was_in_time(peer)
        self.began = now
        return self._changed(before)

    def came_later(self, peer: str, round: int) -> Mapping[str, bool]:
        """Note that a message of ``peer`` for a closed round came. Returns the same as :meth:`close`."""
        before = {peer: self.waits_for(peer)}
        end, others = self.ended.get(round, (0.0, frozenset()))
        if peer in others and self.heard.get((peer, round), float("inf")) <= end:
            self._was_in_time(peer)
        return self._changed(before)

    def _was_in_time(self, peer: str) -> None:
        self.strikes[peer] = max(self.strikes.get(peer, 0) - 1, 0)

    def _changed(self, before: Mapping[str, bool]) -> Mapping[str, bool]:
        return {peer: not waited for peer, waited in before.items() if self.waits_for(peer) != waited}


def _upper_median(times: Collection[float], awaited: int) -> float | None:
    """The upper median of ``times`` and of ``awaited`` later ones; None if it is one of these."""
    half = (len(times) + awaited) // 2
    return sorted(times)[half] if half < len(times) else None
