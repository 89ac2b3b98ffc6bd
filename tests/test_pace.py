"""Whom rounds wait for, in whole swarms: several peers' rounds on one clock, and members that delay them on purpose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import fmean

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from ftis.admission import Collected
from ftis.config import NetworkConfig
from ftis.records.events import NetworkEvent
from ftis.swarm import manifest as manifests
from ftis.swarm.identity import public_hex
from ftis.swarm.manifest import Assembly, Manifest
from ftis.swarm.offers import OfferCheck
from ftis.swarm.pace import LATE, LEAST_SECONDS, Pace
from ftis.swarm.rounds import Rounds

RUN, ROUNDS, TICK = "0" * 32, 40, 1.0
DEADLINE, PATIENCE = 120.0, NetworkConfig().patience
SAMPLING = 10.0
"""Seconds in which a peer of usual speed samples."""


@cache
def key_of(name: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(name.encode().ljust(32))


@cache
def offer(name: str, round: int) -> tuple[bytes, bytes]:
    document = manifests.to_bytes(manifests.describe(RUN, name, round, 1, f"{name}{round}".encode(), ()))
    return document, manifests.seal(key_of(name), document)


@dataclass
class Seat:
    """An honest peer: it samples for ``seconds(round)``, offers, and waits. ``closed`` has the length of each round."""

    name: str
    seconds: Callable[[int], float]
    rounds: Rounds
    ready: float = 0.0
    round: int = 0
    is_waiting: bool = False
    began: float = 0.0
    fetching: list[Manifest] = field(default_factory=list)
    closed: dict[int, float] = field(default_factory=dict)
    waited: Counter[str] = field(default_factory=Counter)
    late: set[str] = field(default_factory=set)
    said: list[NetworkEvent] = field(default_factory=list)

    def receive(self, sender: str, round: int, now: float) -> None:
        self.rounds.offered(sender, round, *offer(sender, round), now)

    def end_for(self, name: str) -> float:
        """The last moment at which this peer still waits for ``name``."""
        pace = self.rounds._pace
        to_come = [other for other in self.rounds.wanted if other not in pace.came and pace.waits_for(other)]
        return min(pace.end(name, len(to_come)), pace.since + DEADLINE) if name in to_come else float("inf")

    def serve(self, sender: str) -> None:
        for wanted in [one for one in self.fetching if one.peer == sender]:
            self.fetching.remove(wanted)
            assembly = Assembly(wanted)
            assembly.hear(0, f"{sender}{wanted.round}".encode())
            self.rounds.fetched(assembly)

    def poll(self, now: float) -> None:
        for decision in self.rounds.poll(now) if self.is_waiting else ():
            if isinstance(decision, Manifest):
                self.fetching.append(decision)
            elif isinstance(decision, NetworkEvent):
                self.said.append(decision)
            elif isinstance(decision, Collected):
                self.closed[self.round] = now - self.began
                self.waited.update(decision.waited)
                self.late |= {name for name, *_ in decision.late}
                self.round, _ = self.rounds.catch_up(self.round + 1)
                self.began, self.ready, self.is_waiting = now, now + self.seconds(self.round), False


Malice = Callable[[Seat, str, float], None]
"""An action of a member on a waiting peer, at a time."""


def play(honest: Sequence[Callable[[int], float]], bad: Sequence[Malice] = (), staleness: int = 1) -> list[Seat]:
    """A swarm of honest peers a, b, … and bad ones z, y, … until the first honest one has closed all its rounds."""
    names, others = "abcdefgh"[: len(honest)], "zyx"[: len(bad)]
    roster = {name: public_hex(key_of(name)) for name in names + others}
    settings = NetworkConfig(deadline=DEADLINE, max_staleness=staleness)
    seats = []
    for name, seconds in zip(names, honest, strict=True):
        there = [other for other in roster if other != name]
        made = Rounds(there, 10**6, settings, OfferCheck(RUN, 10**6, roster, 1000, 1))
        made.enter(0, 0.0)
        for other in there:
            made.present(other, f"{other}/1/0", 0)
        made.catch_up(0)
        seats.append(Seat(name, seconds, made, ready=seconds(0)))
    now = 0.0
    while all(len(seat.closed) < ROUNDS for seat in seats):
        for seat in seats:
            if not seat.is_waiting and now >= seat.ready:
                seat.is_waiting = True
                seat.rounds.collect(seat.round, now)
                for hears in seats:
                    if hears is not seat:
                        hears.receive(seat.name, seat.round, now)
        for seat in seats:
            if seat.is_waiting:
                for name, malice in zip(others, bad, strict=True):
                    malice(seat, name, now)
                for _ in range(2):
                    seat.poll(now)
                    for name in names:
                        seat.serve(name)
                seat.poll(now)
        now += TICK
    return seats


def be_silent(seat: Seat, name: str, now: float) -> None:
    pass


def half_arrive(seat: Seat, name: str, now: float) -> None:
    """Offer, and never hand the contents over."""
    seat.receive(name, seat.round, now)


def deliver(seat: Seat, name: str, now: float) -> None:
    half_arrive(seat, name, now)
    seat.poll(now)
    seat.serve(name)


def stall(seat: Seat, name: str, now: float) -> None:
    """Deliver at the last moment at which it is waited for. It reads the victim's memory."""
    if seat.end_for(name) - TICK < now <= seat.end_for(name):
        deliver(seat, name, now)


def alternate(seat: Seat, name: str, now: float) -> None:
    (deliver if seat.round % 2 else be_silent)(seat, name, now)


def stall_for_one(seat: Seat, name: str, now: float) -> None:
    """Deliver to one peer at the last moment, and never to the others."""
    (stall if seat.name == "a" else be_silent)(seat, name, now)


def be_late_if_it_costs(seat: Seat, name: str, now: float) -> None:
    """Be late whenever that costs something, and in time otherwise."""
    (be_silent if seat.rounds._pace.waits_for(name) else deliver)(seat, name, now)


def slow_until(end: int, medians: float) -> Callable[[int], float]:
    return lambda round: SAMPLING * (9 if round < end else medians)


USUAL, SLOW = slow_until(0, 1), slow_until(0, 9)
TWICE = 1 + 2 * PATIENCE / ROUNDS
"""The mean length of a round, in medians, if a peer is waited for in vain twice."""
OFTEN = TWICE + (PATIENCE - 1) / (LATE + 1)
"""The same if it is late as often as it can be, and still waited for."""


@dataclass(frozen=True)
class Swarm:
    """``most``: what a round of ``a`` lasts at most on the mean, in medians. ``unawaited``: by ``a``, at the end."""

    honest: list[Callable[[int], float]]
    bad: list[Malice]
    most: float
    unawaited: str | None = ""
    staleness: int = 1


SWARMS = {
    "nobody is slow": Swarm([USUAL] * 4, [], 1.0),
    "one is slow": Swarm([USUAL] * 3 + [SLOW], [], TWICE, "d"),
    "one is slow, and within the patience": Swarm([USUAL] * 3 + [slow_until(0, 3)], [], 3.0),
    "one is slow in every second round": Swarm([USUAL] * 3 + [lambda r: SAMPLING * (9 - r % 2 * 8)], [], OFTEN, None),
    "one is slow at first": Swarm([USUAL] * 3 + [slow_until(6, 1)], [], TWICE),
    "one pauses, and is slow within the patience": Swarm([USUAL] * 3 + [slow_until(3, 2.5)], [], 2.5),
    "the same, and nothing late counts": Swarm([USUAL] * 3 + [slow_until(3, 2)], [], 2.0, staleness=0),
    "one is slow at first, and nothing late counts": Swarm([USUAL] * 3 + [slow_until(6, 1)], [], TWICE, staleness=0),
    "half of all are slow": Swarm([USUAL] * 2 + [SLOW] * 2, [], 9.0),
    "all are slow": Swarm([SLOW] * 4, [], 9.0),
    "all are slow in some rounds": Swarm([lambda r: SAMPLING * (1 if r % 5 else 9)] * 4, [], 2.6),
    "one is silent": Swarm([USUAL] * 3, [be_silent], TWICE, "z"),
    "one half-arrives": Swarm([USUAL] * 3, [half_arrive], TWICE, "z"),
    "one half-arrives, and nothing late counts": Swarm([USUAL] * 3, [half_arrive], TWICE, "z", staleness=0),
    "most are silent": Swarm([USUAL] * 2, [be_silent] * 3, 1 + DEADLINE / SAMPLING),
    "one alternates": Swarm([USUAL] * 3, [alternate], OFTEN),
    "one is late whenever it is waited for": Swarm([USUAL] * 3, [be_late_if_it_costs], OFTEN, None),
    "one stalls a moment before the end": Swarm([USUAL] * 3, [stall], PATIENCE),
    "two stall a moment before the end": Swarm([USUAL] * 3, [stall] * 2, PATIENCE),
    "three of eight stall": Swarm([USUAL] * 5, [stall] * 3, PATIENCE),
    "one stalls for one peer only": Swarm([USUAL] * 4, [stall_for_one], PATIENCE),
    "half of all stall": Swarm([USUAL] * 2, [stall] * 2, 1 + DEADLINE / SAMPLING),
    "one of a pair stalls": Swarm([USUAL], [stall], 1 + DEADLINE / SAMPLING),
}


@pytest.mark.parametrize("name", SWARMS)
def test_nobody_costs_the_others_more_than_their_patience(name: str) -> None:
    """More than half can; so can one of a pair. Honest peers of usual speed stay together."""
    swarm = SWARMS[name]
    seats = play(swarm.honest, swarm.bad, swarm.staleness)
    first = seats[0]
    assert fmean(first.closed.values()) <= SAMPLING * swarm.most + 2 * TICK
    unawaited = [name for name in first.rounds._others if not first.rounds._pace.waits_for(name)]
    assert swarm.unawaited is None or unawaited == [*swarm.unawaited]
    usual = [seat for seat, seconds in zip(seats, swarm.honest, strict=True) if seconds is USUAL]
    assert len({seat.round for seat in usual}) <= 2
    assert all(seats[0].rounds._pace.waits_for(seat.name) for seat in usual[1:])


def test_who_is_not_waited_for_is_heard_late_named_and_waited_for_again() -> None:
    a, *_, d = play(SWARMS["one is slow at first"].honest)
    assert [event.text.split(": ")[1][:28] for event in a.said if event.what == "pace"] == [
        "d is not waited for any long",
        "d is waited for again, after",
    ]
    assert a.late == {"d"}
    assert a.waited["b"] == 0.0 < 2 * (PATIENCE - 1) * SAMPLING <= a.waited["d"]
    assert d.waited["a"] == 0.0


@given(st.lists(st.booleans(), max_size=200))
def test_one_late_round_in_five_is_waited_for_at_most(in_time: list[bool]) -> None:
    pace, waited_in_vain = Pace(PATIENCE), 0
    for round, delivers in enumerate(in_time):
        pace.start(float(round), 0)
        if delivers:
            pace.delivered("b", round, float(round))
        late = [] if delivers or not pace.waits_for("b") else ["b"]
        waited_in_vain += len(late)
        pace.close(round, late, float(round))
    assert waited_in_vain <= sum(in_time) / LATE + 2


times = st.lists(st.floats(0, 1e3), min_size=1, max_size=8)


@given(times, times, st.integers(0, 8))
def test_less_than_half_of_all_move_the_median_no_further_than_honest_peers_are(
    honest: list[float], others: list[float], to_come: int
) -> None:
    pace, first = Pace(PATIENCE, since=honest[0]), honest[0]
    bad = others[: max(0, len(honest) - 1)]
    to_come = min(to_come, len(honest) - 1 - len(bad))
    for number, seconds in enumerate(sorted([*honest[1:], *bad])):
        pace.delivered(f"p{number}", 0, first + seconds)
    came = [first, *(first + seconds for seconds in honest[1:])]
    median = pace.median(to_come)
    assert median is not None
    assert min(came) <= median <= max(came)
    assert pace.end("p", to_come) <= max(came) + (PATIENCE - 1) * max(*came, LEAST_SECONDS)
