"""The time that a round waits for each peer, by the others' delivery times. No input or output and no clock.

Once more than half of the peers have delivered, at the time h, the rest have until ``h + (patience − 1) · m``. Here m
is the median of all peers' delivery times since the end of the round before, and at least :data:`LEAST_SECONDS`. While
at most half have delivered nobody is late: if all are slow together, all are waited for.

A late round costs a peer :data:`LATE` strikes, and a round in time takes one back. A peer with more than :data:`LATE`
strikes is not waited for until it has none. So in the long run the others wait in vain for a peer in at most one of
``LATE + 1`` rounds. If more than half of all peers are missing at a round's deadline, nobody gets a strike: the
deadline or this peer is at fault.

A peer that is not waited for takes a strike back by each offer within ``patience · m`` of its previous one, however far
the others are ahead.

Peers need not agree, since a round's messages need not be the same everywhere. A peer that waited longer than the
others finds their next messages there at once. Then m is small, and it catches up.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

LEAST_SECONDS = 2.0
"""The least median that counts: a second more in a round of one second is no sign of being slow."""
LATE = 4
"""Strikes of a late round: so many rounds in time make up for it."""


@dataclass
class Pace:
    """The delivery times of the others, and a round's end by them.

    Attributes:
        patience: multiples of the median delivery time.
        changes: peers that are waited for again (True) or no longer (False). The reader clears the list.
        began: the end of the round before.
        since: this peer's own delivery.
        seen: the first time that each peer was there; a peer's first round begins with it.
        heard: the first time that a peer's offer for a round was heard.
        came: in this round, the time of each delivery.
        took: in this round, the delivery times in seconds; the time that an offer lay waiting for this peer is no
            part of them.
        strikes: by peer.
        unawaited: the peers that are not waited for.
        span: the time within which the next offer of a peer is prompt.
        last: the time of each peer's last offer, and its round.
        prompt: the peers and rounds of prompt offers that have not counted yet.
        asked: the peers and rounds whose contents this peer asked for.
    """

    patience: float
    changes: list[tuple[str, bool]] = field(default_factory=list)
    began: float = 0.0
    since: float = 0.0
    seen: dict[str, float] = field(default_factory=dict)
    heard: dict[tuple[str, int], float] = field(default_factory=dict)
    came: dict[str, float] = field(default_factory=dict)
    took: dict[str, float] = field(default_factory=dict)
    strikes: dict[str, int] = field(default_factory=dict)
    unawaited: set[str] = field(default_factory=set)
    span: float = float("inf")
    last: dict[str, tuple[float, int]] = field(default_factory=dict)
    prompt: set[tuple[str, int]] = field(default_factory=set)
    asked: set[tuple[str, int]] = field(default_factory=set)

    def start(self, now: float, oldest: int) -> None:
        """Begin to wait: this peer has delivered, and rounds before ``oldest`` are too old to be learned from."""
        self.since, self.came, self.took = now, {}, {}
        for peer in [peer for peer, round in self.prompt - self.asked if round < oldest]:
            self._was_in_time(peer)
        self.heard = {place: at for place, at in self.heard.items() if place[1] >= oldest}
        for places in (self.prompt, self.asked):
            places -= {place for place in places if place[1] < oldest}
        self._note_changes()

    def offered(self, peer: str, round: int, now: float, too_late: bool) -> None:
        """Note an offer. If it is ``too_late`` to be learned from, it counts at once."""
        at, latest = self.last.get(peer, (float("-inf"), -1))
        if round <= latest:
            return
        self.last[peer] = now, round
        if now <= at + self.span:
            self.prompt.add((peer, round))
            if too_late:
                self.came_later(peer, round)

    def forget(self, peer: str, round: int) -> None:
        """Forget an offer."""
        self.heard.pop((peer, round), None)
        self.prompt.discard((peer, round))

    def delivered(self, peer: str, round: int, now: float) -> None:
        """Note that ``peer`` has delivered for the awaited round."""
        if peer not in self.came:
            offered = max(self.heard.get((peer, round), self.since), self.began)
            self.came[peer], self.took[peer] = now, now - self.began - max(0.0, self.since - offered)

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
        return peer not in self.unawaited

    def close(self, round: int, late: Collection[str], now: float) -> None:
        """End the round, without the peers ``late``, which were waited for and did not deliver."""
        if (median := self.median(len(late))) is not None:
            self.span = self.patience * max(median, LEAST_SECONDS)
        if 2 * len(late) <= 1 + len(self.came) + len(late):
            for peer in late:
                self.strikes[peer] = min(self.strikes.get(peer, 0) + LATE, 2 * LATE)
        for peer in self.came:
            self.prompt.discard((peer, round))
            self._was_in_time(peer)
        self.began = now
        self._note_changes()

    def came_later(self, peer: str, round: int) -> None:
        """Note that a message of ``peer`` for a closed round came."""
        if (peer, round) in self.prompt:
            self.prompt.discard((peer, round))
            if peer in self.unawaited:
                self._was_in_time(peer)
        self._note_changes()

    def _was_in_time(self, peer: str) -> None:
        self.strikes[peer] = max(self.strikes.get(peer, 0) - 1, 0)

    def _note_changes(self) -> None:
        before = self.unawaited
        most = {peer: 0 if peer in before else LATE for peer in self.strikes}
        self.unawaited = {peer for peer, strikes in self.strikes.items() if strikes > most[peer]}
        self.changes += [(peer, self.waits_for(peer)) for peer in sorted(before ^ self.unawaited)]


def _upper_median(times: Collection[float], awaited: int) -> float | None:
    """The upper median of ``times`` and of ``awaited`` later ones; None if it is one of these."""
    half = (len(times) + awaited) // 2
    return sorted(times)[half] if half < len(times) else None
