"""When a round closes and with whose messages: tables of what is heard and when, on a clock that the tests turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from round_table import KEYS, NEVER, ROUNDS, RUN, TICK, Table, contents_of, seated

from ftis.admission import Collected
from ftis.swarm import manifest as manifests
from ftis.swarm.chunks import Assembly
from ftis.swarm.facts import ExchangeError, mismatch
from ftis.swarm.manifest import CHUNK_BYTES
from ftis.swarm.rounds import (
    CATCH_UP_SECONDS,
    GRACE_SECONDS,
    MAX_COMINGS,
    MAX_TOKENS,
    NOTICE_SECONDS,
    STRIKES,
)

# --- when a round closes --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """``events``: (seconds after the round is awaited, a peer, what it does). ``closes``: seconds after, or never."""

    events: tuple[tuple[float, str, str], ...]
    closes: float | None
    missing: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    skip: str = ""
    offers_only: str = ""
    round: int = 0
    says: str | None = None
    fails: str | None = None


def there(*names: str) -> tuple[tuple[float, str, str], ...]:
    return tuple((0, name, "comes") for name in names)


B_AND_C = ((1, "b", "delivers"), (2, "c", "delivers"))
D_IS_GONE = (*there("b", "c", "d"), *B_AND_C, (5, "d", "leaves"))
D_IS_AHEAD = (*there("b", "c", "d"), *B_AND_C, (3, "d", "offers the last round"))
ALONE_THERE = (*there("b"), (1, "b", "offers"), (2, "b", "spoils"))

CASES = {
    "everyone has delivered": Case((*there("b", "c", "d"), *B_AND_C, (3, "d", "delivers")), closes=3),
    "everyone has delivered, though nobody looks alive": Case((*B_AND_C, (3, "d", "delivers")), closes=3),
    # start_seconds
    "not seen yet: waited for at the start": Case((*there("b", "c"), *B_AND_C), closes=10, missing="d"),
    "seen at the start: waited for": Case((*there("b", "c"), *B_AND_C, (9, "d", "comes"), (15, "d", "delivers")), 15),
    "takes part from a later round on": Case(
        (*there("b", "c"), *B_AND_C, (0, "d", "comes for round 3")), closes=2, missing="d"
    ),
    # deadline
    "slow: waited for until the deadline": Case(
        (*there("b", "c", "d"), *B_AND_C), closes=20.5, missing="d", says="closed at its deadline without d"
    ),
    "an offer without contents": Case(
        (*there("b", "c", "d"), *B_AND_C, (4, "d", "offers")), closes=20.5, missing="d", says="without d"
    ),
    "just in time": Case((*there("b", "c", "d"), *B_AND_C, (20, "d", "delivers")), closes=20),
    # grace
    "gone: waited for through the grace": Case(D_IS_GONE, closes=5 + GRACE_SECONDS, missing="d", says="d is gone"),
    "gone and back within the grace": Case((*D_IS_GONE, (5.5, "d", "comes"), (9, "d", "delivers")), closes=9),
    "gone, its message still arrives": Case((*D_IS_GONE, (5.5, "d", "delivers")), closes=5.5),
    "one of two links gone": Case((*D_IS_GONE, (4, "d", "comes again"), (9, "d", "delivers")), closes=9),
    # quorum
    "below the quorum: wait": Case(D_IS_GONE, None, settings={"quorum": 3}, says="waiting for d (gone)"),
    "below the quorum: until it is back": Case(
        (*D_IS_GONE, (300, "d", "comes"), (310, "d", "delivers")), closes=310, settings={"quorum": 3}
    ),
    "below the quorum at the deadline: wait": Case(
        (*there("b", "c", "d"), *B_AND_C), None, settings={"quorum": 3}, says="waiting for d (sampling)"
    ),
    "below the quorum: alone": Case(
        D_IS_GONE,
        closes=6,
        missing="d",
        settings={"quorum": 3, "below_quorum": "alone"},
        says="round 1: going on alone, missing: d (gone)",
    ),
    "below the quorum: stop": Case(
        D_IS_GONE,
        closes=6,
        settings={"quorum": 3, "below_quorum": "stop"},
        fails=r'round 1: 2 of 3 peers needed delivered \(missing: d \(gone\)\), and network.below_quorum = "stop"',
    ),
    "nobody comes: wait": Case((), None, settings={"quorum": 1}, says="b (not seen yet), c (not seen yet)"),
    "nobody comes: alone": Case((), 10, "bcd", {"below_quorum": "alone"}, says="going on alone"),
    "quorum of one": Case(
        (*there("b", "c", "d"), (1, "b", "delivers"), (2, "c", "leaves"), (2, "d", "leaves")), 3, "cd"
    ),
    # set aside
    "set aside: neither waited for nor heard": Case(
        (*there("b", "c", "d"), *B_AND_C, (1, "d", "delivers")), closes=2, missing="d", skip="d"
    ),
    "set aside: the quorum is of the rest, and that is said": Case(
        (*there("b", "c", "d"), *B_AND_C),
        closes=2,
        missing="d",
        settings={"quorum": 3},
        skip="d",
        says="below the quorum without d, set aside",
    ),
    "all set aside": Case(there("b", "c", "d"), closes=0, missing="bcd", skip="bcd"),
    # refused and corrupt
    "an offer that contradicts another: not waited for": Case(
        (*there("b", "c", "d"), *B_AND_C, (3, "d", "offers"), (4, "d", "equivocates")), closes=4, missing="d"
    ),
    "contents that are not what was signed: not waited for": Case(
        (*there("b", "c", "d"), *B_AND_C, (3, "d", "offers"), (4, "d", "spoils")), closes=4, missing="d"
    ),
    "spoiled and made good": Case(
        (
            *there("b", "c", "d"),
            (1, "b", "delivers"),
            (3, "d", "offers"),
            (4, "d", "spoils"),
            (5, "d", "delivers"),
            (6, "c", "delivers"),
        ),
        closes=6,
    ),
    "whoever is refused counts for the quorum": Case(
        (*there("b", "c", "d"), *B_AND_C, (4, "d", "offers"), (5, "d", "equivocates")),
        None,
        settings={"quorum": 3},
        says="waiting for d (refused)",
    ),
    "spoiling brings nobody to train alone": Case(
        ALONE_THERE,
        closes=10,
        settings={"quorum": 1, "below_quorum": "stop"},
        fails=r"missing: b \(refused\), c \(not seen yet\)",
    ),
    # those who finished before
    "finished and left": Case(
        (*D_IS_AHEAD, (4, "d", "leaves")),
        closes=5,
        missing="d",
        settings={"quorum": 3},
        says="round 1: without d, who finished it before",
    ),
    "beyond the round, which it no longer offers": Case(
        (*D_IS_AHEAD, (4, "d", "answers without this round")),
        closes=4,
        missing="d",
        settings={"quorum": 3},
        says="without d, who finished it before",
    ),
    "beyond the round, and not asked yet": Case(D_IS_AHEAD, None, settings={"quorum": 3}),
    "beyond the round, which it still offers": Case(
        (
            *D_IS_AHEAD,
            (4, "d", "answers with this round"),
            (9, "d", "delivers"),
        ),
        closes=9,
        settings={"quorum": 3},
    ),
    # offers only
    "of whom the offer suffices: waited for": Case(
        (*there("b", "c", "d"), *B_AND_C, (7, "d", "offers")), closes=7, offers_only="d"
    ),
    "of whom the offer suffices: missing": Case(
        (*there("b", "c", "d"), *B_AND_C), closes=20.5, missing="d", offers_only="d"
    ),
    "of whom the offer suffices: counts for the quorum": Case(
        (*there("b", "c", "d"), *B_AND_C, (7, "d", "offers")), closes=7, settings={"quorum": 3}, offers_only="bcd"
    ),
    "no deadline in sight": Case(
        (*there("b", "c", "d"), *B_AND_C, (900, "d", "delivers")), closes=900, settings={"deadline": 1e6}
    ),
}

DEEDS: dict[str, Callable[[Table, str, int], None]] = {
    "comes": lambda table, name, round: table.comes(name),
    "comes again": lambda table, name, round: table.comes(name, token="2"),
    "comes for round 3": lambda table, name, round: table.comes(name, since=3),
    "leaves": lambda table, name, round: table.leaves(name),
    "offers": lambda table, name, round: table.offers(name, round),
    "offers the last round": lambda table, name, round: table.offers(name, ROUNDS - 1),
    "equivocates": lambda table, name, round: table.offers(name, round, b"another"),
    "delivers": lambda table, name, round: table.delivers(name, round),
    "spoils": lambda table, name, round: table.rounds.corrupt(manifests.describe(RUN, name, round, 1, b"", ())),
    "answers without this round": lambda table, name, round: table.rounds.answered(name, {round + 1}),
    "answers with this round": lambda table, name, round: table.rounds.answered(name, {round, round + 1}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_round_closes(name: str) -> None:
    case = CASES[name]
    table = Table(case.settings)
    table.enter(case.round)
    table.collect(case.round, case.skip, case.offers_only)
    began, events = table.now, sorted(case.events, key=lambda event: event[0])

    def play() -> float | None:
        while table.now - began < NEVER:
            while events and events[0][0] <= table.now - began:
                _, peer, deed = events.pop(0)
                DEEDS[deed](table, peer, case.round)
                if table.closed or table.poll():
                    return table.now - began
            if table.poll():
                return table.now - began
            table.now += TICK
        return None

    if case.fails is not None:
        with pytest.raises(ExchangeError, match=case.fails):
            play()
        assert table.now - began == case.closes
        return
    assert play() == case.closes
    if case.says is not None:
        assert any(case.says in notice.text for notice in table.said), table.said
    if table.closed is not None:
        delivered = [n for n in "bcd" if n not in case.missing]
        assert table.closed.missing == tuple(case.missing)
        assert table.closed.offered_only == tuple(n for n in delivered if n in case.offers_only)
        read = {n: contents_of(n, case.round) for n in delivered if n not in case.offers_only}
        assert table.closed.messages == read
        assert not {offer.peer for offer in table.to_fetch} & set(case.offers_only)


def test_closing_says_nothing_when_everybody_delivered() -> None:
    table = seated()
    assert table.round_of(0, *"bcd") == Collected({name: contents_of(name, 0) for name in "bcd"})
    assert table.kinds() == ["joined"] * 3


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


def test_a_peer_whose_run_differs_is_named_and_ends_the_wait_of_one_that_met_nobody() -> None:
    differs = mismatch("demo", {"temperature": 1.0, "seed": 1}, {"temperature": 0.7, "seed": 1})
    assert differs is not None
    text = differs.of(["b"])
    assert text == (
        "b means another run by 'demo' and is not heard (temperature: 1.0 here, 0.7 there): let all have the same "
        "recipe, --set and version of ftis"
    )
    of_keys = mismatch("demo", {"roster": "1"}, {"roster": "2"})
    assert of_keys is not None
    assert of_keys.of(["b"]).endswith("is not heard (roster: 1 here, 2 there): give all the same roster")
    other = mismatch("demo", {"exchange": "text"}, {"tokenizer": "7381fc35"})
    assert other is not None
    assert other.of(["b"]).endswith(': one has exchange = "text" and the other has not: let all peers set the same')
    for someone_came in (False, True):
        table = Table()
        table.enter()
        table.collect(0)
        for _ in range(3):
            table.heed(table.rounds.mismatched("b", differs))
            table.heed(table.rounds.mismatched("mallory", differs))
        assert [notice.text for notice in table.said] == [text]
        if someone_came:
            table.comes("c")
            assert table.run() is None
            last = table.said[-1].text
            assert last == "round 1: waiting for b (means another run), c (sampling), d (not seen yet)"
        else:
            with pytest.raises(ExchangeError, match=r"temperature: 1\.0 here, 0\.7 there"):
                table.run()
            assert table.now == 110.0


def test_peers_that_mean_the_same_other_run_are_named_together() -> None:
    table = Table()
    table.enter()
    table.collect(0)
    for peer, seed in (("b", 1), ("c", 2), ("d", 1)):
        differs = mismatch("demo", {"seed": 0}, {"seed": seed})
        assert differs is not None
        table.heed(table.rounds.mismatched(peer, differs))
    with pytest.raises(ExchangeError) as ended:
        table.run()
    remedy = "let all have the same recipe, --set and version of ftis"
    assert str(ended.value) == (
        f"b, d mean another run by 'demo' and are not heard (seed: 0 here, 1 there): {remedy}; "
        f"c means another run by 'demo' and is not heard (seed: 0 here, 2 there): {remedy}"
    )


# --- late, stale, twice ---------------------------------------------------------------------------------------------


def test_a_late_message_is_handed_on_once() -> None:
    table = seated()
    table.collect(0)
    table.delivers("b", 0)
    table.delivers("c", 0)
    closed = table.run()
    assert closed is not None
    assert closed.missing == ("d",)
    table.collect(1)
    table.delivers("d", 0)
    for name in "bcd":
        table.delivers(name, 1)
    closed = table.run()
    assert closed is not None
    assert closed.late == (("d", 0, contents_of("d", 0)),)
    assert set(closed.messages) == set("bcd")
    table.offers("d", 0)
    assert table.round_of(2, *"bcd").late == ()


@pytest.mark.parametrize("staleness", [0, 1, 2, 3])
def test_a_message_may_be_so_many_rounds_late_and_no_more(staleness: int) -> None:
    for behind in range(5):
        table = Table({"max_staleness": staleness, "deadline": 1.0})
        table.enter()
        table.comes(*"bcd")
        for round in range(4):
            table.round_of(round, *"bc")
        table.collect(4)
        table.offers("d", 4 - behind)
        table.poll()
        assert [offer.round for offer in table.to_fetch] == ([4 - behind] if behind <= staleness else [])
        table.serve("d")
        table.delivers("b", 4)
        table.delivers("c", 4)
        closed = table.run()
        assert closed is not None
        late = (("d", 4 - behind, contents_of("d", 4 - behind)),)
        assert closed.late == (late if 0 < behind <= staleness else ())


def test_the_round_at_hand_is_fetched_before_a_late_one_and_one_at_a_time() -> None:
    table = seated()
    table.round_of(0, *"bc")
    table.collect(1)
    table.offers("d", 0)
    table.offers("d", 1)
    table.offers("d", 2)
    table.poll()
    table.poll()
    assert [offer.round for offer in table.to_fetch] == [1]
    table.serve("d")
    table.poll()
    assert [offer.round for offer in table.to_fetch] == [0]
    table.serve("d")
    table.poll()
    assert table.to_fetch == []


def test_rounds_from_before_this_peer_joined_are_not_fetched() -> None:
    table = Table({"max_staleness": 5})
    table.comes(*"bcd", since=7)
    for round in (7, 8, 9):
        table.offers("b", round)
    table.enter(8)
    table.collect(9)
    table.poll()
    table.serve("b")
    table.poll()
    table.serve("b")
    table.poll()
    assert table.to_fetch == []
    table.delivers("c", 9)
    table.delivers("d", 9)
    closed = table.run()
    assert closed is not None
    assert closed.late == (("b", 8, contents_of("b", 8)),)


def test_what_came_early_is_kept_for_its_round() -> None:
    table = seated()
    table.collect(0)
    table.offers("b", 1)
    table.poll()
    assert table.to_fetch == []
    table.delivers("b", 0)
    table.delivers("c", 0)
    table.delivers("d", 0)
    assert table.run() is not None
    table.collect(1)
    table.poll()
    assert [offer.round for offer in table.to_fetch] == [1]


def test_contents_of_an_offer_that_fell_meanwhile_do_not_count() -> None:
    table = seated()
    table.collect(0)
    table.offers("b", 0)
    table.poll()
    (offer,) = table.to_fetch
    assert table.rounds.wants(offer)
    table.offers("b", 0, b"another")
    assert not table.rounds.wants(offer)
    table.serve("b")
    closed = table.run()
    assert closed is None or "b" not in closed.messages


def test_an_offer_is_no_longer_wanted_once_it_is_too_old() -> None:
    table = seated({"max_staleness": 1, "deadline": 1.0})
    table.collect(0)
    table.offers("d", 0)
    table.poll()
    (offer,) = table.to_fetch
    for round, wanted in ((1, True), (2, False)):
        table.collect(round)
        assert table.rounds.wants(offer) == wanted


def test_a_fetch_that_was_given_up_is_tried_again() -> None:
    table = seated()
    table.collect(0)
    table.offers("b", 0)
    table.poll()
    table.serve("b", data=b"junk")
    assert table.to_fetch == []
    table.poll()
    assert [offer.peer for offer in table.to_fetch] == ["b"]


def test_of_whom_the_offer_suffices_in_one_round_the_next_one_is_fetched_and_the_first_never_late() -> None:
    table = seated()
    table.collect(0, offers_only="b")
    table.delivers("c", 0)
    table.delivers("d", 0)
    table.offers("b", 0)
    assert table.run() == Collected({n: contents_of(n, 0) for n in "cd"}, offered_only=("b",))
    table.collect(1)
    table.offers("b", 1)
    table.poll()
    assert [offer.round for offer in table.to_fetch] == [1]
    table.serve("b")
    table.poll()
    assert table.to_fetch == []


# --- strikes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("again", ["delivers", "offers", "comes", None])
def test_a_peer_that_lets_two_deadlines_pass_is_not_waited_for_until_it_delivers(again: str | None) -> None:
    table = seated()

    def seconds(round: int) -> float:
        began = table.now
        table.round_of(round, *"bc")
        return table.now - began

    assert [seconds(round) for round in range(5)] == [20.5] * STRIKES + [0.0] * (5 - STRIKES)
    if again is not None:
        DEEDS[again](table, "d", 4)
    waited = again in ("delivers", "comes")  # an offer that is never served costs nobody a deadline
    assert [seconds(round) for round in (5, 6, 7)] == ([20.5, 20.5, 0.0] if waited else [0.0, 0.0, 0.0])


def test_a_peer_that_offers_every_round_and_serves_none_is_waited_for_twice() -> None:
    table = seated()

    def seconds(round: int) -> float:
        began = table.now
        table.collect(round)
        table.offers("d", round)
        for name in "bc":
            table.delivers(name, round)
        table.run()
        return table.now - began

    assert [seconds(round) for round in range(6)] == [20.5] * STRIKES + [0.0] * (6 - STRIKES)


def test_only_deadlines_in_a_row_count() -> None:
    table = seated()
    for round in range(0, 8, 2):
        began = table.now
        table.round_of(round, *"bc")
        assert table.now - began == 20.5
        table.round_of(round + 1, *"bcd")
    assert table.kinds().count("deadline") == 4


@pytest.mark.parametrize("quorum", [1, 3])
def test_who_was_asleep_does_not_wait_for_rounds_that_the_others_have_left_behind(quorum: int) -> None:
    """Its last news is their offers of its round, which nobody holds any more; in lock-step they cannot be so far."""
    table = seated({"quorum": quorum})
    table.collect(2)
    for round in (2, 6):
        for name in "bcd":
            table.offers(name, round)
    began = table.now
    collected = table.run(until=100.0)
    if quorum == 3:
        assert collected is None
        return
    assert collected is not None
    assert (collected.missing, table.now - began) == (("b", "c", "d"), 20.5)
    assert "finished" in table.kinds()
    assert table.catch_up(3) == 7


# --- presence -------------------------------------------------------------------------------------------------------


def test_who_comes_is_asked_what_it_offers() -> None:
    table = Table()
    table.comes("b")
    assert table.asked == ["b"]
    table.comes("b", token="2")
    table.leaves("b")
    assert table.rounds.live == ["b"]
    table.leaves("b", token="2")
    table.leaves("b", token="2")
    assert table.rounds.live == []
    assert [notice.text for notice in table.said] == ["b is there", "b is gone"]
    assert not table.rounds.met_all
    table.comes("c", "d")
    assert table.rounds.met_all


def test_presence_in_unknown_names_or_a_thousand_times_over_takes_no_room() -> None:
    table = Table()
    table.comes("mallory")
    table.leaves("mallory")
    table.offers("x", 0)
    table.rounds.answered("mallory", {1})
    for token in range(1000):
        table.comes("b", token=str(token))
    for token in range(MAX_TOKENS):
        assert table.rounds.live == ["b"]
        table.leaves("b", token=str(token))
    assert table.rounds.live == []
    assert [notice.text for notice in table.said] == ["b is there", "b is gone"]
    assert table.rounds.rejections == ()


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


@pytest.mark.parametrize(
    ("settings", "finished", "present", "leaves"),
    [
        ({}, "bcd", "", True),
        ({}, "bc", "d", False),
        ({}, "bc", "", True),  # elastic: whoever comes back goes on from where the others are
        ({"quorum": 3}, "bc", "", False),  # in lock-step it may come back for what this one holds
        ({"quorum": 3}, "bcd", "", True),
        ({"quorum": 3, "below_quorum": "alone"}, "", "", True),
    ],
)
def test_a_finished_peer_stays_while_it_may_be_needed(
    settings: dict[str, Any], finished: str, present: str, leaves: bool
) -> None:
    table = Table(settings)
    table.comes(*finished, *present)
    for name in finished:
        table.offers(name, ROUNDS - 1)
        table.leaves(name)
    assert table.rounds.may_leave() == leaves


# --- catching up ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CatchUp:
    """``newest``: by live peer, the latest round that it offers. ``goes``: where a peer at ``round`` continues."""

    newest: dict[str, int]
    round: int
    goes: int
    settings: dict[str, Any] = field(default_factory=dict)
    dead: str = ""
    silent: str = ""
    """Present, and nothing of theirs was heard."""
    absent: str = ""
    """Their offers were heard, and nobody declares them present."""
    contradicts: str = ""
    """Each of these signed another offer for its latest round too."""
    offered: int = 1
    """How many of its latest rounds each offers."""


CATCHING_UP = {
    "nobody there": CatchUp({}, 3, 3),
    "at the same round": CatchUp({"b": 3, "c": 3, "d": 3}, 3, 3),
    "within the staleness": CatchUp({"b": 4, "c": 4, "d": 4}, 3, 3),
    "elastic: after the others' round": CatchUp({"b": 9, "c": 9, "d": 9}, 3, 10),
    "elastic: more staleness": CatchUp({"b": 9, "c": 9, "d": 9}, 3, 3, {"max_staleness": 6}),
    "one of three ahead carries nobody off": CatchUp({"b": 3, "c": 3, "d": 15}, 3, 3),
    "one ahead and two silent at the start": CatchUp({"b": 5}, 0, 0, silent="cd"),
    "one ahead and two silent later": CatchUp({"b": 15}, 3, 3, silent="cd"),
    "one ahead and one silent": CatchUp({"b": 15}, 3, 3, silent="c"),
    "two ahead and one silent": CatchUp({"b": 15, "c": 15}, 0, 16, silent="d"),
    "all silent": CatchUp({}, 3, 3, silent="bcd"),
    "offers of absent peers": CatchUp({"b": 15, "c": 15, "d": 3}, 3, 3, absent="bc"),
    "one ahead that contradicts itself": CatchUp({"b": 15}, 3, 3, contradicts="b"),
    "two ahead, one of which contradicts itself": CatchUp({"b": 3, "c": 15, "d": 15}, 3, 3, contradicts="d"),
    "lock-step: one ahead and two silent": CatchUp({"b": 9}, 3, 3, {"quorum": 3}, silent="cd"),
    "two of three ahead do": CatchUp({"b": 3, "c": 15, "d": 15}, 3, 16),
    "one of two ahead carries nobody off": CatchUp({"b": 3, "c": 15}, 3, 3),
    "the only one decides": CatchUp({"b": 15}, 3, 16),
    "whoever is gone does not count": CatchUp({"b": 3, "c": 15, "d": 15}, 3, 3, dead="cd"),
    "never behind where it is": CatchUp({"b": 1, "c": 1, "d": 1}, 9, 9),
    "never beyond the last round": CatchUp({"b": ROUNDS - 1, "c": ROUNDS - 1, "d": ROUNDS - 1}, 3, ROUNDS - 1),
    "lock-step: what the others still offer is made up for": CatchUp(
        {"b": 9, "c": 9, "d": 9}, 3, 3, {"quorum": 3}, offered=8
    ),
    "lock-step: what nobody offers any more is lost": CatchUp({"b": 9, "c": 9, "d": 9}, 0, 9, {"quorum": 3}, offered=8),
    "lock-step: at their round, not after it": CatchUp({"b": 9, "c": 9, "d": 9}, 3, 9, {"quorum": 3}),
    "alone below the quorum is never lock-step": CatchUp(
        {"b": 9, "c": 9, "d": 9}, 3, 10, {"quorum": 3, "below_quorum": "alone"}, offered=8
    ),
}


@pytest.mark.parametrize("name", CATCHING_UP)
def test_a_peer_catches_up(name: str) -> None:
    case = CATCHING_UP[name]
    table = Table(case.settings)
    table.comes(*case.silent, *(peer for peer in case.newest if peer not in case.absent))
    for peer, newest in case.newest.items():
        for round in range(max(0, newest - case.offered + 1), newest + 1):
            table.offers(peer, round)
    for peer in case.contradicts:
        table.offers(peer, case.newest[peer], b"another")
    for peer in case.dead:
        table.leaves(peer)
    table.said.clear()
    assert table.enter(case.round) == case.goes
    assert table.announced == [case.goes]
    behind = [f"the others are at round {case.goes + 1}: going on from there, not from {case.round + 1}"]
    assert [notice.text for notice in table.said] == (behind if case.goes != case.round else [])
    assert table.catch_up(case.goes) == case.goes
    assert table.announced == [case.goes]  # once is enough


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


def test_in_lock_step_nothing_is_skipped_once_this_peer_is_present() -> None:
    for quorum, goes in ((3, 1), (1, 16)):
        table = Table({"quorum": quorum})
        table.enter()
        table.comes(*"bcd")
        for name in "bcd":
            table.offers(name, 15)
        assert table.catch_up(1) == goes
        assert table.announced == ([0] if goes == 1 else [0, goes])


# --- another transport ----------------------------------------------------------------------------------------------


def test_two_peers_train_over_a_transport_of_ten_lines() -> None:
    """What a transport has to do, with two dictionaries for a wire."""
    wire: dict[tuple[str, int], tuple[bytes, bytes, bytes]] = {}
    tables = {"a": Table(names="b"), "b": Table(names="a")}

    def carry(name: str, other: str) -> None:
        table = tables[name]
        for (peer, round), (document, seal, _) in sorted(wire.items()):
            if peer == other:
                table.heed(table.rounds.offered(peer, round, document, seal))
        table.poll()
        for offer in table.to_fetch:
            assembly = Assembly(offer)
            for index in assembly.missing():
                assembly.hear(index, wire[offer.peer, offer.round][2][index * CHUNK_BYTES :][:CHUNK_BYTES])
            table.rounds.fetched(assembly)
        table.to_fetch.clear()
        table.poll()

    for name, other in (("a", "b"), ("b", "a")):
        assert tables[name].enter() == 0
        tables[name].comes(other)
    for round in range(ROUNDS):
        for name in "ab":
            data = contents_of(name, round) * 20_000
            document = manifests.to_bytes(manifests.describe(RUN, name, round, 1, data, ()))
            wire[name, round] = document, manifests.seal(KEYS[name], document), data
            tables[name].collect(round)
        for name, other in (("a", "b"), ("b", "a")):
            carry(name, other)
            assert tables[name].closed == Collected({other: contents_of(other, round) * 20_000})
