"""Whom rounds wait for, in whole swarms: several peers' rounds on one clock, and members that delay them on purpose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from round_table import Table

from ftis.config import NetworkConfig
from ftis.swarm.pace import LATE, LEAST_SECONDS, Pace

ROUNDS, TICK = 40, 1.0
DEADLINE, PATIENCE = 120.0, NetworkConfig().patience
SAMPLING = 10.0
"""Seconds in which a peer of usual speed samples."""


@dataclass
class Seat:
    """An honest peer: it samples for ``seconds(round)``, offers, and waits. ``closed`` has the length of each round."""

    name: str
    seconds: Callable[[int], float]
    table: Table
    ready: float = 0.0
    round: int = 0
    is_waiting: bool = False
    began: float = 0.0
    closed: dict[int, float] = field(default_factory=dict)
    waited: Counter[str] = field(default_factory=Counter)
    late: set[str] = field(default_factory=set)

    @property
    def pace(self) -> Pace:
        return self.table.rounds._pace

    def end_for(self, name: str) -> float:
        """The last moment at which this peer still waits for ``name``."""
        pace, wanted = self.pace, self.table.rounds.wanted
        to_come = [other for other in wanted if other not in pace.came and pace.waits_for(other)]
        return min(pace.end(name, len(to_come)), pace.since + DEADLINE) if name in to_come else float("inf")

    def poll(self) -> None:
        now = self.table.now
        if self.is_waiting and (decided := self.table.poll()) is not None:
            self.closed[self.round] = now - self.began
            self.waited.update(decided.waited)
            self.late |= {name for name, *_ in decided.late}
            self.round = self.table.catch_up(self.round + 1)
            self.began, self.ready, self.is_waiting = now, now + self.seconds(self.round), False


Malice = Callable[[Seat, str], None]
"""An action of a member on a waiting peer."""


def play(honest: Sequence[Callable[[int], float]], bad: Sequence[Malice] = (), staleness: int = 1) -> list[Seat]:
    """A swarm of honest peers a, b, … and bad ones z, y, … until the first honest one has closed all its rounds."""
    names, others = "abcdefgh"[: len(honest)], "zyx"[: len(bad)]
    settings = {"deadline": DEADLINE, "max_staleness": staleness, "patience": PATIENCE}
    seats = []
    for name, seconds in zip(names, honest, strict=True):
        table = Table(settings, (names + others).replace(name, ""), now=0.0, total=10**6)
        table.enter()
        table.comes(*table.names)
        seats.append(Seat(name, seconds, table, ready=seconds(0)))
    while all(len(seat.closed) < ROUNDS for seat in seats):
        for seat in seats:
            if not seat.is_waiting and seat.table.now >= seat.ready:
                seat.is_waiting = True
                seat.table.collect(seat.round)
                for hears in seats:
                    if hears is not seat:
                        hears.table.offers(seat.name, seat.round)
        for seat in seats:
            if seat.is_waiting:
                for name, malice in zip(others, bad, strict=True):
                    malice(seat, name)
                for _ in range(2):
                    seat.poll()
                    for name in names:
                        seat.table.serve(name)
                seat.poll()
        for seat in seats:
            seat.table.now += TICK
    return seats


def be_silent(seat: Seat, name: str) -> None:
    pass


def half_arrive(seat: Seat, name: str) -> None:
    """Offer, and never hand the contents over."""
    seat.table.offers(name, seat.round)


def deliver(seat: Seat, name: str) -> None:
    half_arrive(seat, name)
    seat.poll()
    seat.table.serve(name)


def stall(seat: Seat, name: str) -> None:
    """Deliver at the last moment at which it is waited for. It reads the victim's memory."""
    if seat.end_for(name) - TICK < seat.table.now <= seat.end_for(name):
        deliver(seat, name)


def alternate(seat: Seat, name: str) -> None:
    (deliver if seat.round % 2 else be_silent)(seat, name)


def stall_for_one(seat: Seat, name: str) -> None:
    """Deliver to one peer at the last moment, and never to the others."""
    (stall if seat.name == "a" else be_silent)(seat, name)


def be_late_if_it_costs(seat: Seat, name: str) -> None:
    """Be late whenever that costs something, and in time otherwise."""
    (be_silent if seat.pace.waits_for(name) else deliver)(seat, name)


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
    unawaited = [name for name in first.table.names if not first.pace.waits_for(name)]
    assert swarm.unawaited is None or unawaited == [*swarm.unawaited]
    usual = [seat for seat, seconds in zip(seats, swarm.honest, strict=True) if seconds is USUAL]
    assert len({seat.round for seat in usual}) <= 2
    assert all(first.pace.waits_for(seat.name) for seat in usual[1:])


def test_who_is_not_waited_for_is_heard_late_named_and_waited_for_again() -> None:
    a, *_, d = play(SWARMS["one is slow at first"].honest)
    assert [event.text.split(": ")[1][:28] for event in a.table.said if event.what == "pace"] == [
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
