"""When a round closes and with whose messages: tables of what is heard and when, on a clock that the tests turn."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from round_table import NEVER, ROUNDS, RUN, TICK, Table, contents_of, seated

from ftis.admission import Collected
from ftis.swarm import manifest as manifests
from ftis.swarm.facts import ExchangeError, Mismatch, mismatch
from ftis.swarm.pace import LATE
from ftis.swarm.rounds import CATCH_UP_SECONDS, GRACE_SECONDS, MAX_COMINGS, MAX_TOKENS, NOTICE_SECONDS

Events = tuple[tuple[float, str, str], ...]


@dataclass(frozen=True)
class Case:
    """``events``: (seconds after the round is awaited, a peer, what it does). ``closes``: seconds after, or never."""

    events: Events
    closes: float | None
    missing: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    skip: str = ""
    offers_only: str = ""
    says: str = ""
    fails: str = ""


def there(names: str) -> Events:
    return tuple((0, name, "comes") for name in names)


DELIVERED: Events = ((1, "b", "delivers"), (2, "c", "delivers"))
TWO = (*there("bc"), *DELIVERED)
"""Peers b and c are present and deliver; d is not."""


def of_d(*events: tuple[float, str]) -> Events:
    """All are present, b and c deliver, and d does this."""
    return (*there("bcd"), *DELIVERED, *((at, "d", deed) for at, deed in events))


GONE, AHEAD, ALL = (5, "leaves"), (3, "offers the last round"), {"quorum": 3}
ALONE, STOP = {"quorum": 3, "below_quorum": "alone"}, {"quorum": 3, "below_quorum": "stop"}
SPOILED = (*there("b"), (1, "b", "offers"), (2, "b", "spoils"))

CASES = {
    "everyone has delivered": Case(of_d((3, "delivers")), 3),
    "everyone has delivered, though nobody looks alive": Case((*DELIVERED, (3, "d", "delivers")), 3),
    # start_seconds
    "not seen yet: waited for at the start": Case(TWO, 10, "d"),
    "seen at the start: waited for": Case((*TWO, (9, "d", "comes"), (15, "d", "delivers")), 15),
    "takes part from a later round on": Case((*TWO, (0, "d", "comes for round 3")), 2, "d"),
    # deadline
    "silent: waited for until the deadline": Case(of_d(), 20.5, "d", says="closed at its deadline without d"),
    "half-arrived, an offer without contents": Case(of_d((4, "offers")), 20.5, "d", says="without d"),
    "just in time": Case(of_d((20, "delivers")), 20),
    "no deadline in sight": Case(of_d((900, "delivers")), 900, settings={"deadline": 1e6}),
    # grace
    "gone: waited for through the grace": Case(of_d(GONE), 5 + GRACE_SECONDS, "d", says="d is gone"),
    "gone and back within the grace": Case(of_d(GONE, (5.5, "comes"), (9, "delivers")), 9),
    "gone, its message still arrives": Case(of_d(GONE, (5.5, "delivers")), 5.5),
    "one of two links gone": Case(of_d(GONE, (4, "comes again"), (9, "delivers")), 9),
    # quorum
    "below the quorum: wait": Case(of_d(GONE), None, settings=ALL, says="waiting for d (gone for 6 s)"),
    "below the quorum: until it is back": Case(of_d(GONE, (300, "comes"), (310, "delivers")), 310, settings=ALL),
    "below the quorum at the deadline: wait": Case(of_d(), None, settings=ALL, says="waiting for d (sampling)"),
    "below the quorum: alone": Case(of_d(GONE), 6, "d", ALONE, says="going on alone, missing: d (gone)"),
    "below the quorum: stop": Case(of_d(GONE), 6, settings=STOP, fails=r"2 of 3 peers .*missing: d \(gone\)"),
    "nobody comes: wait": Case((), None, settings={"quorum": 1}, says="b (not seen yet), c (not seen yet)"),
    "not seen yet: since when": Case(there("b"), None, settings=ALL, says="; start c, d, or check"),
    "nobody comes: alone": Case((), 10, "bcd", {"below_quorum": "alone"}, says="going on alone"),
    "quorum of one": Case((*there("bcd"), (1, "b", "delivers"), (2, "c", "leaves"), (2, "d", "leaves")), 3, "cd"),
    # set aside
    "set aside: neither waited for nor heard": Case(of_d((1, "delivers")), 2, "d", skip="d"),
    "set aside: the quorum is of the rest": Case(of_d(), 2, "d", ALL, skip="d", says="d set aside"),
    "set aside, and present: the round does not stay open for who is gone": Case(
        (*there("bc"), (5, "b", "leaves")), 5 + GRACE_SECONDS, "bcd", skip="cd"
    ),
    "set aside, and gone too: below the quorum": Case((*there("b"), (5, "b", "leaves")), None, skip="cd"),
    "all set aside": Case(there("bcd"), 0, "bcd", skip="bcd"),
    # refused and corrupt
    "contradicting: not waited for": Case(of_d((3, "offers"), (4, "equivocates")), 4, "d"),
    "contradicting: counts for the quorum": Case(
        of_d((4, "offers"), (5, "equivocates")), None, settings=ALL, says="waiting for d (refused)"
    ),
    "contents that are not what was signed: not waited for": Case(of_d((3, "offers"), (4, "spoils")), 4, "d"),
    "spoiled and made good": Case(of_d((1.2, "offers"), (1.4, "spoils"), (1.6, "delivers")), 2),
    "spoiling brings nobody to train alone": Case(
        SPOILED, 10, settings={**STOP, "quorum": 1}, fails=r"missing: b \(refused\), c \(not seen yet\)"
    ),
    # those who finished before
    "finished": Case(
        of_d(AHEAD, (4, "finishes"), (5, "answers without this round")), 5, "d", ALL, says="who finished it before"
    ),
    "finished, by an offer that it contradicts": Case(
        of_d(AHEAD, (3.5, "equivocates on the last round"), (4, "finishes")), None, settings=ALL, says="d is gone"
    ),
    "finished, and still offers the round": Case(
        of_d(AHEAD, (3, "offers"), (4, "finishes"), (9, "delivers")), 9, settings=ALL
    ),
    "finished, and left before its message came": Case(
        of_d(AHEAD, (3, "offers"), (4, "finishes"), (7, "serves no more")), 8, "d", ALL, says="who finished it before"
    ),
    "finished, and serves nothing": Case(
        of_d(AHEAD, (3, "offers"), (4, "finishes")), 20.5, "d", says="closed at its deadline without d"
    ),
    "finished, and its offers come to be known": Case(
        of_d((4, "finishes"), (7, "offers the last round"), (7, "offers"), (9, "delivers")), 9, settings=STOP
    ),
    "killed after the last round": Case(of_d(AHEAD, (4, "leaves")), None, settings=ALL, says="d is gone"),
    "beyond the round, which it no longer offers": Case(
        of_d(AHEAD, (4, "answers without this round")), 4, "d", ALL, says="without d, who finished it before"
    ),
    "beyond the round, and not asked yet": Case(of_d(AHEAD), None, settings=ALL),
    "beyond the round, which it still offers": Case(
        of_d(AHEAD, (4, "answers with this round"), (9, "delivers")), 9, settings=ALL
    ),
    # offers only
    "of whom the offer suffices: waited for": Case(of_d((7, "offers")), 7, offers_only="d"),
    "of whom the offer suffices: missing": Case(of_d(), 20.5, "d", offers_only="d"),
    "of whom the offer suffices: counts for the quorum": Case(of_d((7, "offers")), 7, settings=ALL, offers_only="bcd"),
}

DEEDS: dict[str, Callable[[Table, str, int], None]] = {
    "comes": lambda table, name, round: table.comes(name),
    "comes again": lambda table, name, round: table.comes(name, token="2"),
    "comes for round 3": lambda table, name, round: table.comes(name, since=3),
    "leaves": lambda table, name, round: table.leaves(name),
    "finishes": lambda table, name, round: table.finishes(name),
    "serves": lambda table, name, round: table.comes(name, since=ROUNDS),
    "serves no more": lambda table, name, round: table.leaves(name, since=ROUNDS),
    "offers": lambda table, name, round: table.offers(name, round),
    "offers the last round": lambda table, name, round: table.offers(name, ROUNDS - 1),
    "forges the last round": lambda table, name, round: table.offers(name, ROUNDS - 1, signer="x"),
    "equivocates on the last round": lambda table, name, round: table.offers(name, ROUNDS - 1, b"another"),
    "equivocates": lambda table, name, round: table.offers(name, round, b"another"),
    "delivers": lambda table, name, round: table.delivers(name, round),
    "spoils": lambda table, name, round: table.rounds.corrupt(manifests.describe(RUN, name, round, 1, b"", ())),
    "answers without this round": lambda table, name, round: table.rounds.answered(name, {round + 1}),
    "answers with this round": lambda table, name, round: table.rounds.answered(name, {round, round + 1}),
}


def play(table: Table, events: Events, until: float = NEVER) -> float | None:
    """The seconds after which round 0 closes while the others do as ``events`` say; None if it does not."""
    began, due = table.now, sorted(events, key=lambda event: event[0])
    while table.now - began < until:
        while due and due[0][0] <= table.now - began:
            _, peer, deed = due.pop(0)
            DEEDS[deed](table, peer, 0)
            if table.closed or table.poll():
                return table.now - began
        if table.poll():
            return table.now - began
        table.now += TICK
    return None


def test_a_round_closes() -> None:
    for name, case in CASES.items():
        table = Table(case.settings)
        table.enter()
        table.collect(0, case.skip, case.offers_only)
        began = table.now
        if case.fails:
            with pytest.raises(ExchangeError, match=case.fails):
                play(table, case.events)
            assert table.now - began == case.closes, name
            continue
        assert play(table, case.events) == case.closes, name
        assert not case.says or any(case.says in notice.text for notice in table.said), (name, table.said)
        if table.closed is not None:
            delivered = [n for n in "bcd" if n not in case.missing]
            assert table.closed.missing == tuple(case.missing), name
            assert table.closed.offered_only == {n: 0 for n in delivered if n in case.offers_only}, name
            read = {n: contents_of(n, 0) for n in delivered if n not in case.offers_only}
            assert table.closed.messages == read, name
            assert not {offer.peer for offer in table.to_fetch} & set(case.offers_only), name


deeds = st.tuples(st.integers(0, 40).map(lambda half: half / 2), st.sampled_from("bcd"), st.sampled_from([*DEEDS]))


@given(st.lists(deeds, max_size=20), st.integers(1, 3), st.sampled_from(["wait", "alone"]))
@settings(max_examples=300, deadline=None)
def test_whatever_the_others_do_only_what_they_signed_is_handed_on(
    events: list[tuple[float, str, str]], quorum: int, below: str
) -> None:
    """Nobody counts twice, a round closes by its deadline if it may, and it waits if it must."""
    table = Table({"quorum": quorum, "below_quorum": below})
    table.enter()
    table.collect(0)
    closed_after = play(table, tuple(events), until=100.0)
    ahead = {peer for _, peer, deed in events if "the last round" in deed or deed == "answers without this round"}
    collected = table.closed
    if closed_after is None or collected is None:
        assert (closed_after, collected, below) == (None, None, "wait")
        return
    assert closed_after <= 40.5
    assert sorted([*collected.messages, *collected.missing]) == ["b", "c", "d"]
    assert all(data == contents_of(peer, 0) for peer, data in collected.messages.items())
    delivering = {peer for _, peer, deed in events if deed == "delivers"}
    assert collected.messages.keys() <= delivering
    assert below == "alone" or len(collected.messages) >= min(quorum, 3 - len(ahead))


def test_a_waiting_peer_says_so_now_and_then_and_asks_everybody() -> None:
    table = Table({"quorum": 3})
    table.enter()
    table.asked.clear()
    table.collect(0)
    table.run(until=10 * NOTICE_SECONDS)
    waiting = [notice for notice in table.said if notice.what == "waiting"]
    assert 8 <= len(waiting) <= 10
    assert {notice.round for notice in waiting} == {0}
    assert len(table.asked) >= 10 * NOTICE_SECONDS / (CATCH_UP_SECONDS + TICK) - 1
    assert set(table.asked) == {None}


@pytest.mark.parametrize(
    ("deeds", "said"),
    [
        ([], "d is gone"),  # silent
        (["offers"], "d is gone"),  # half-arrived
        (["delivers"], "d is gone"),
        (["offers the last round"], "d is gone"),  # killed before it had learned from that round
        (["serves"], "d is gone"),  # anybody can, since presence is not signed
        (["offers the last round", "serves"], "d has finished"),
        (["offers the last round", "equivocates on the last round", "serves"], "d is gone"),
        (["forges the last round", "serves"], "d is gone"),
        (["offers the last round", "serves", "comes again"], None),  # by another link
    ],
)
def test_who_leaves_has_finished_if_it_says_so_and_signed_for_the_last_round(
    deeds: list[str], said: str | None
) -> None:
    table = seated({"quorum": 3})
    table.collect(0)
    for deed in deeds:
        DEEDS[deed](table, "d", 0)
    before = len(table.said)
    table.leaves("d")
    assert [notice.text for notice in table.said[before:]] == ([said] if said else [])
    assert table.catch_up(0) == 0  # whatever it claims, this peer skips nothing
    table.delivers("bc", 0)
    closes = table.run(until=100.0) is not None
    assert closes == (said == "d has finished" or deeds == ["delivers"])


def test_a_peer_whose_run_differs_is_named_and_ends_the_wait_of_one_that_met_nobody() -> None:
    def differs(here: dict[str, Any], there: dict[str, Any]) -> Mismatch:
        found = mismatch("demo", here, there)
        assert found is not None
        return found

    assert "same roster" in differs({"roster": "1"}, {"roster": "2"}).of(["b"])
    assert "exchange" in differs({"exchange": "text"}, {"tokenizer": "7381fc35"}).of(["b"])
    of_seed = {peer: differs({"seed": 0}, {"seed": seed}) for peer, seed in (("b", 1), ("c", 2), ("d", 1))}
    for someone_came in (False, True):
        table = Table()
        table.enter()
        table.collect(0)
        for peer in ("b", "b", "mallory", "c", "d"):
            table.heed(table.rounds.mismatched(peer, of_seed.get(peer, of_seed["b"])))
        assert [notice.text for notice in table.said] == [of_seed[peer].of([peer]) for peer in "bcd"], "each once"
        if someone_came:
            table.comes("c")
            assert table.run() is None
            assert "b (means another run), c (sampling), d (means another run)" in table.said[-1].text
        else:
            with pytest.raises(ExchangeError) as ended:
                table.run()
            assert str(ended.value) == f"{of_seed['b'].of(['b', 'd'])}; {of_seed['c'].of(['c'])}", "together"
            assert table.now == 110.0


def test_a_message_may_be_so_many_rounds_late_and_no_more_and_is_handed_on_once() -> None:
    for staleness, behind in itertools.product(range(4), range(5)):
        table = seated({"max_staleness": staleness, "deadline": 1.0})
        for round in range(4):
            assert table.round_of(round, *"bc").missing == ("d",)
        table.collect(4)
        table.offers("d", 4 - behind)
        table.poll()
        assert table.fetching() == ([4 - behind] if behind <= staleness else [])
        table.serve("d")
        table.delivers("bc", 4)
        late = (("d", 4 - behind, contents_of("d", 4 - behind)),)
        assert table.closes().late == (late if 0 < behind <= staleness else ())
        table.offers("d", 4 - behind)
        assert table.round_of(5, *"bcd").late == ()


def test_the_round_at_hand_is_fetched_beside_a_late_one_that_does_not_come() -> None:
    """A peer that was killed before it wrote its message offers contents that nobody holds."""
    table = seated({"max_staleness": 3})
    table.collect(0)
    table.delivers("bc", 0)
    table.offers("d", 0)
    table.closes()
    assert table.fetching() == [0]
    for round in (1, 2):
        table.collect(round)
        table.delivers("bc", round)
        table.offers("d", round, life=2)
        table.poll()
        assert table.fetching() == [*range(round + 1)]
    dead = table.to_fetch.pop(0)
    table.serve("d")
    assert table.closes().messages.keys() == {*"bcd"}
    assert table.rounds.wants(dead)


def test_the_round_at_hand_is_fetched_before_a_late_one_and_one_at_a_time() -> None:
    table = seated()
    table.round_of(0, *"bc")
    table.collect(1)
    for round in range(3):
        table.offers("d", round)
    for fetched in ([1], [0], []):  # what came early waits for its round
        table.poll()
        table.poll()
        assert table.fetching() == fetched
        table.serve("d")
    table.delivers("bc", 1)
    table.closes()
    table.collect(2)
    table.poll()
    assert table.fetching() == [2]


def test_rounds_from_before_this_peer_joined_are_not_fetched() -> None:
    table = Table({"max_staleness": 5})
    table.comes(*"bcd", since=7)
    for round in (7, 8, 9):
        table.offers("b", round)
    table.enter(8)
    table.collect(9)
    for _ in range(2):
        table.poll()
        table.serve("b")
    table.poll()
    assert table.to_fetch == []
    table.delivers("cd", 9)
    assert table.closes().late == (("b", 8, contents_of("b", 8)),)


def test_an_offer_is_fetched_until_it_comes_falls_or_is_too_old() -> None:
    for falls in (True, False):
        table = seated({"max_staleness": 1})
        table.collect(0)
        table.offers("b", 0)
        table.poll()
        table.serve("b", data=b"junk")
        assert table.to_fetch == []
        table.poll()
        (offer,) = table.to_fetch
        assert (offer.peer, table.rounds.wants(offer)) == ("b", True)
        if falls:
            table.offers("b", 0, b"another")
            assert not table.rounds.wants(offer)
            table.serve("b")
            table.delivers("cd", 0)
            assert "b" not in table.closes().messages
        else:
            for round, wanted in ((1, True), (2, False)):
                table.collect(round)
                assert table.rounds.wants(offer) == wanted


def test_of_whom_the_offer_suffices_in_one_round_the_next_one_is_fetched_and_the_first_never_late() -> None:
    table = seated()
    table.collect(0, offers_only="b")
    table.delivers("cd", 0)
    table.offers("b", 0, items=(1, 4, 9))
    assert table.run() == Collected({n: contents_of(n, 0) for n in "cd"}, offered_only={"b": 3})
    table.collect(1)
    table.offers("b", 1)
    for fetched in ([1], []):
        table.poll()
        assert table.fetching() == fetched
        table.serve("b")


def test_who_lets_two_deadlines_pass_is_not_waited_for_until_it_has_been_in_time_for_a_while() -> None:
    """Neither presence, which is not signed, nor an offer that is never served makes up for them."""
    for again in ("offers", "comes", None):
        table = seated()

        def seconds(round: int, deed: str | None, table: Table = table) -> float:
            began = table.now
            table.collect(round)
            if deed is not None:
                DEEDS[deed](table, "d", round)
            table.delivers("bc", round)
            table.run()
            table.serve("d", data=b"junk")  # the fetch of what never came ends
            return table.now - began

        assert [seconds(round, again) for round in range(6)] == [20.5] * 2 + [0.0] * 4
        again_in_time = range(6, 6 + 2 * LATE)
        assert [seconds(round, "delivers") for round in again_in_time] == [0.0] * len(again_in_time)
        assert [seconds(round, None) for round in range(14, 18)] == [20.5, 20.5, 0.0, 0.0]


def test_who_was_asleep_does_not_wait_for_rounds_that_the_others_have_left_behind() -> None:
    """Its last news is their offers of its round, which nobody holds any more; in lock-step they cannot be so far."""
    for quorum in (1, 3):
        table = seated({"quorum": quorum})
        table.collect(2)
        for round, name in itertools.product((2, 6), "bcd"):
            table.offers(name, round)
        began, collected = table.now, table.run(until=100.0)
        assert (collected is None) == (quorum == 3)
        if collected is not None:
            assert (collected.missing, table.now - began) == (("b", "c", "d"), 20.5)
            assert "finished" in table.kinds()
            assert table.catch_up(3) == 7


def test_who_comes_is_asked_and_unknown_names_or_a_thousand_signs_of_presence_take_no_room() -> None:
    table = Table()
    table.comes("mallory")
    table.leaves("mallory")
    table.offers("x", 0)
    table.rounds.answered("mallory", {1})
    assert (table.asked, table.rounds.live) == ([], [])
    for token in range(1000):
        table.comes("b", token=str(token))
    assert set(table.asked) == {"b"}
    for token in range(MAX_TOKENS):
        assert table.rounds.live == ["b"]
        for _ in range(2):
            table.leaves("b", token=str(token))
    assert table.rounds.live == []
    assert [notice.text for notice in table.said] == ["b is there", "b is gone"]
    assert table.reasons() == []
    assert not table.rounds.met_all
    table.comes("c", "d")
    assert table.rounds.met_all


def test_presence_that_comes_and_goes_is_told_a_few_times_a_round() -> None:
    table = Table()
    table.enter()
    for round in range(2):
        before = len(table.said)
        for _ in range(500):
            table.comes("b")
            table.leaves("b")
        told = [notice.text for notice in table.said[before:] if notice.what in ("joined", "left")]
        assert len(told) == MAX_COMINGS
        assert told[-1].endswith(", and comes and goes: this round says no more of it")
        table.comes(*"bcd")
        table.round_of(round, *"bcd")


def test_a_finished_peer_stays_while_it_may_be_needed() -> None:
    cases: list[tuple[dict[str, Any], str, str, str, bool]] = [
        ({}, "bcd", "", "", True),
        ({}, "bc", "d", "", False),
        ({}, "bc", "", "", True),  # elastic: whoever comes back goes on from where the others are
        ({}, "bc", "", "d", True),
        ({"quorum": 3}, "bc", "", "", False),  # in lock-step it may come back for what this one holds
        ({"quorum": 3}, "bc", "", "d", False),
        ({"quorum": 3}, "bcd", "", "", True),
        ({"quorum": 3, "below_quorum": "alone"}, "", "", "", True),
    ]
    for network, finished, present, killed, leaves in cases:
        for serves in (True, False):
            table = Table(network)
            table.comes(*finished, *present, *killed)
            for name in finished + killed:
                table.offers(name, ROUNDS - 1)
                table.leaves(name) if name in killed else table.finishes(name)
                if not serves:
                    table.leaves(name, since=ROUNDS)
            assert table.rounds.may_leave() == leaves


@dataclass(frozen=True)
class Seat:
    """What is known of another peer: presence, its latest offer, and whether it signed a second one for that round."""

    present: bool = True
    newest: int | None = None
    contradicts: bool = False


def entering(round: int, seats: dict[str, Seat], network: dict[str, Any], offered: int = 1) -> tuple[Table, int]:
    """A table whose peers sit so, each with its last ``offered`` rounds on offer, and where ``a`` goes on."""
    table = Table(network)
    for name, seat in seats.items():
        if seat.present:
            table.comes(name)
        if seat.newest is not None:
            for of in range(max(0, seat.newest - offered + 1), seat.newest + 1):
                table.offers(name, of)
            if seat.contradicts:
                table.offers(name, seat.newest, b"another")
    table.said.clear()
    return table, table.enter(round)


seats = st.builds(Seat, st.booleans(), st.none() | st.integers(0, ROUNDS - 1), st.booleans())


@given(st.fixed_dictionaries(dict.fromkeys("bcd", seats)), st.integers(0, ROUNDS - 1), st.integers(0, 3))
@settings(max_examples=500, deadline=None)
def test_a_peer_is_carried_ahead_only_by_more_than_half_of_those_present(
    others: dict[str, Seat], round: int, staleness: int
) -> None:
    """Silent, absent and contradicting peers carry nobody, and the median peer's next round is the goal."""
    table, goes = entering(round, others, {"max_staleness": staleness})
    reached = sorted(
        -1 if seat.newest is None or seat.contradicts else seat.newest for seat in others.values() if seat.present
    )
    median = reached[(len(reached) - 1) // 2] if reached else -1
    assert goes == (min(median + 1, ROUNDS - 1) if median - round > staleness else round)
    if goes > round:
        assert 2 * sum(newest >= goes - 1 for newest in reached) > len(reached)
    assert table.kinds() == (["behind"] if goes != round else [])
    assert table.announced == [goes]
    assert table.catch_up(goes) == goes
    assert table.announced == [goes], "once is enough"


def test_in_lock_step_a_peer_makes_up_for_what_is_still_on_offer() -> None:
    at_nine = {name: Seat(newest=9) for name in "bcd"}
    one = {"b": Seat(newest=9), "c": Seat(), "d": Seat()}
    for others, round, offered, network, goes in (
        (at_nine, 3, 8, ALL, 3),
        (at_nine, 0, 8, ALL, 9),  # what nobody offers any more is lost
        (at_nine, 3, 1, ALL, 9),  # at their round, not after it
        (at_nine, 3, 8, ALONE, 10),  # alone below the quorum is never lock-step
        (one, 3, 1, ALL, 3),
    ):
        assert entering(round, others, network, offered)[1] == goes
    for quorum, goes in ((3, 1), (1, 16)):  # nothing is skipped once this peer is present
        table = seated({"quorum": quorum})
        for name in "bcd":
            table.offers(name, 15)
        assert table.catch_up(1) == goes
        assert table.announced == ([0] if goes == 1 else [0, goes])


def test_a_present_peer_is_silent_until_one_of_its_rounds_is_known() -> None:
    table = Table()
    assert table.rounds.silent(3) == ["b", "c", "d"], "nobody is there yet"
    table.comes("b", "c")
    assert table.rounds.silent(3) == ["b", "c"]
    assert table.rounds.silent(0) == [], "nobody is ahead of the start"
    table.offers("b", 4)
    assert table.rounds.silent(3) == table.rounds.silent(0) == ["c"]
    table.leaves("c")
    assert table.rounds.silent(3) == []
