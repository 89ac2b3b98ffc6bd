"""Which offers and chunks of the others count, and what is kept of them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from round_table import KEYS, MAX_BYTES, MAX_ITEMS, ROUNDS, RUN, Table, contents_of, seated

from ftis.admission import Collected
from ftis.swarm import manifest as manifests
from ftis.swarm.facts import MAX_FACTS_BYTES, mismatch, other_code, read_facts, run_id
from ftis.swarm.manifest import BAD_ANSWERS, CHUNK_BYTES, Assembly
from ftis.swarm.rounds import KEEP_ROUNDS, MAX_REJECTIONS

BIG = {"size": MAX_BYTES + 1, "chunks": ("0" * 64,) * 3}
GIGABYTES = {"size": 3 * 2**30, "chunks": ("0" * 64,) * (3 * 2**30 // CHUNK_BYTES)}

OFFERS: dict[str, tuple[str, int, dict[str, Any], str]] = {
    "signed by a stranger": ("b", 0, {"signer": "x"}, "forged"),
    "signed by another member": ("b", 0, {"signer": "c"}, "forged"),
    "in the place of another round": ("b", 0, {"place": ("b", 1)}, "wrong_sender"),
    "in the place of another peer": ("b", 0, {"place": ("c", 0), "signer": "c"}, "wrong_sender"),
    "in no round's place": ("b", 0, {"place": ("b", -1)}, "wrong_sender"),
    "of another run": ("b", 0, {"run": "1" * 32}, "wrong_sender"),
    "for a round that never comes": ("b", ROUNDS, {}, "wrong_round"),
    "of more bytes than a message may have": ("b", 0, BIG, "over_budget"),
    "of gigabytes, with all their digests": ("b", 0, GIGABYTES, "over_budget"),
    "of more groups than a share": ("b", 0, {"items": tuple(range(MAX_ITEMS + 1))}, "over_budget"),
}


@pytest.mark.parametrize("name", OFFERS)
def test_an_offer_that_does_not_count(name: str) -> None:
    peer, round, other, reason = OFFERS[name]
    table = seated()
    table.collect(0)
    table.offers(peer, round, **other)
    table.poll()
    found = other.get("place", (peer, round))[0]
    assert table.reasons() == [(found, reason)]
    assert table.to_fetch == []
    assert table.offers_of(found) == {}
    assert ("forged" in table.kinds()) == (reason == "forged")


def test_bytes_that_are_no_manifest_and_seals_that_are_none() -> None:
    for document in (b"{" * (manifests.MAX_BYTES + 1), b"\x80\x04K\x01.", b"[" * 100_000, b""):
        table = Table()
        table.heed(table.rounds.offered("b", 0, document, manifests.seal(KEYS["b"], document), table.now))
        assert table.reasons() == [("b", "over_budget" if len(document) > manifests.MAX_BYTES else "malformed")]
    document = manifests.to_bytes(manifests.describe(RUN, "b", 0, 1, b"x", ()))
    for seal, is_open in itertools.product((b"", b"x", bytes(32), b"\1" * 96, bytes(5000)), (False, True)):
        table = Table(is_open=is_open)
        table.heed(table.rounds.offered("b", 0, document, seal, table.now))
        assert table.reasons() == [("b", "forged")]
        table.offers("b", 0)  # in an open swarm the name is still free
        assert list(table.offers_of("b")) == [0]


def test_two_offers_for_one_round_are_told_apart_from_a_second_life() -> None:
    table = seated()
    table.collect(0)
    table.delivers("b", 0)
    table.offers("b", 0, b"another")
    assert table.reasons() == [("b", "equivocation")]
    assert table.offers_of("b") == {}
    table.offers("b", 0)
    table.offers("b", 0, b"a third")
    assert table.offers_of("b") == {}  # none of that life is taken
    table.offers("b", 0, b"of a second life", life=2)
    for again in (b"another", b"a third"):  # anybody can send them again
        table.offers("b", 0, again)
    assert table.offers_of("b")[0].incarnation == 2
    table.poll()
    table.serve("b", b"of a second life")
    for data, life in ((b"one thing", 1), (b"one thing", 1), (b"another", 2), (b"one thing", 1)):
        table.offers("c", 0, data, life)
    assert table.offers_of("c")[0].incarnation == 2
    assert len(table.rounds._rejections) == 1
    table.delivers("d", 0)
    table.serve("c", b"another")
    closed = table.closes()
    assert closed.messages == {"b": b"of a second life", "c": b"another", "d": contents_of("d", 0)}
    assert [str(r.reason) for r in closed.rejections] == ["equivocation"]


def test_the_same_offer_again_is_no_second_one_and_nothing_is_said_when_everybody_delivers() -> None:
    table = seated()
    for round in range(2):
        for _ in range(3):
            table.offers("b", 0)
        assert table.round_of(round, *"bcd") == Collected({name: contents_of(name, round) for name in "bcd"})
    assert table.kinds() == ["joined"] * 3


def test_a_restarted_peers_other_bytes_replace_what_was_not_taken_yet() -> None:
    table = seated()
    table.collect(0)
    table.offers("b", 0)
    table.poll()
    table.offers("b", 0, b"new life", life=2)
    table.serve("b")
    table.poll()
    assert [offer.incarnation for offer in table.to_fetch] == [2]
    table.serve("b", b"new life")
    table.delivers("cd", 0)
    closed = table.closes()
    assert closed.messages["b"] == b"new life"


def test_a_flood_is_counted_up_to_a_limit_said_once_hides_no_other_fault_and_is_forgotten() -> None:
    table = seated()
    for _ in range(MAX_REJECTIONS + 50):
        table.heed(table.rounds.offered("b", 0, b"{}", bytes(96), table.now))
    assert table.kinds().count("forged") == 1
    for peer in "bc":
        table.offers(peer, 0)
        table.offers(peer, 0, b"another")
    faults = {("b", "forged"): MAX_REJECTIONS, ("b", "equivocation"): 1, ("c", "equivocation"): 1}
    assert Counter(table.reasons()) == faults
    assert len(table.round_of(0, "d").rejections) == sum(faults.values())
    assert table.round_of(1, *"bcd").rejections == ()


@pytest.mark.parametrize("meet", ["never", "in time", "when the round is over"])
def test_other_words_for_each_receiver_count_unless_both_reach_one_of_them(meet: str) -> None:
    """``d`` has separate links to two receivers. Somebody may pass on to each what the other got."""
    for word, other in itertools.permutations((b"one", b"another")):
        receiver = seated()
        receiver.collect(0)
        receiver.delivers("bc", 0)
        receiver.offers("d", 0, word)
        receiver.heed(receiver.rounds.poll(receiver.now))
        if meet == "in time":
            receiver.offers("d", 0, other)
        receiver.serve("d", word)
        assert receiver.closes().messages.get("d") == (None if meet == "in time" else word)
        assert receiver.kinds().count("equivocation") == int(meet == "in time")
        if meet == "when the round is over":
            receiver.offers("d", 0, other)
        assert receiver.kinds().count("equivocation") == int(meet != "never")


@pytest.mark.parametrize(
    ("staleness", "at", "offered", "kept"),
    [
        (1, 0, range(499, -1, -1), range(4 * KEEP_ROUNDS)),  # far ahead
        (100, 60, range(9, 100), range(60, 60 + 4 * KEEP_ROUNDS)),
        (1, 60, [*range(53, 61), *range(48)], range(59, 61)),  # old ones, which anybody can send again
        (1, 60, [*range(48), *range(53, 61), *range(48)], range(59, 61)),
    ],
)
def test_of_many_rounds_on_offer_the_awaited_and_the_next_ones_are_kept(
    staleness: int, at: int, offered: Sequence[int], kept: Sequence[int]
) -> None:
    table = Table({"max_staleness": staleness})
    table.rounds.check.rounds = 500
    table.enter(at)
    table.comes("b")
    for round in offered:
        table.offers("b", round)
    assert sorted(table.offers_of("b")) == [*kept]
    assert len(table.rounds._pace.heard) <= 4 * KEEP_ROUNDS
    table.collect(at, skip="cd")
    table.poll()
    assert table.fetching() == [at]


def test_no_staleness_ends_the_exchange_and_offers_of_rounds_long_over_are_forgotten() -> None:
    for staleness in (0, 3, 31, 47, 200):
        table = seated({"max_staleness": staleness})
        table.rounds.check.rounds = 500
        for round in range(60):
            assert table.round_of(round, *"bcd").missing == ()
        for name in "bcd":
            table.offers(name, 0)
            assert max(table.offers_of(name)) == 59
            assert len(table.offers_of(name)) <= min(staleness + 1, 4 * KEEP_ROUNDS)


def test_in_an_open_swarm_the_first_key_keeps_the_name() -> None:
    table = Table(is_open=True)
    table.offers("c", 0, place=("b", 0))  # anybody can put a member's manifest in another's place
    table.offers("b", 0)
    table.offers("b", 1, signer="x")
    table.offers("c", 0, signer="x")  # whoever comes first
    table.offers("c", 1, signer="c")
    assert list(table.offers_of("b")) == list(table.offers_of("c")) == [0]
    assert table.reasons() == [("b", "wrong_sender"), ("b", "forged"), ("c", "forged")]


def test_contents_that_are_not_what_was_signed_are_counted_once_a_round() -> None:
    table = seated({"deadline": 1.0})
    for round in range(3):
        table.collect(round)
        table.offers("d", round)
        table.poll()
        (offer,) = table.to_fetch
        for _ in range(4):
            table.rounds.corrupt(offer)
        table.serve("d", b"junk")
        table.delivers("bc", round)
        closed = table.closes()
        assert [(r.peer, str(r.reason)) for r in closed.rejections] == [("d", "corrupt")]
        table.serve("d", b"junk")
    assert "deadline" not in table.kinds()


DATA = b"".join(number.to_bytes(4) for number in range(150_000))
OFFER = manifests.describe(RUN, "b", 0, 1, DATA, ())
PARTS = [DATA[at : at + CHUNK_BYTES] for at in range(0, len(DATA), CHUNK_BYTES)]


def answered(assembly: Assembly, index: int, *answers: bytes) -> bool:
    """Whether a chunk came, of a question with these answers."""
    for data in answers:
        assert assembly.hear(index, data) == (data == PARTS[index])
    return assembly.over(index)


def test_a_message_is_put_together_in_any_order_and_past_any_junk() -> None:
    assembly = Assembly(OFFER)
    assert assembly.missing() == [0, 1, 2]
    for index in (2, 0, 1):
        assert assembly.contents() is None
        assert not answered(assembly, index)
        part = PARTS[index]
        assert not answered(assembly, index, b"", b"junk", part[:-1], part + b"x", PARTS[index - 1])
        assert answered(assembly, index, b"junk", part, b"more junk")
    assert assembly.contents() == DATA
    assert not assembly.spoiled
    assert Assembly(manifests.describe(RUN, "b", 0, 1, b"", ())).contents() == b"", "no chunk is needed"


def test_an_offer_is_spoiled_by_junk_alone_to_one_chunk_again_and_again() -> None:
    assembly = Assembly(OFFER)
    for _ in range(BAD_ANSWERS):
        assert not assembly.spoiled
        assert not answered(assembly, 0)  # silence is no junk
        assert not answered(assembly, 1, bytes(len(PARTS[1])), b"")
    assert assembly.spoiled
    for index, part in enumerate(PARTS):
        assert answered(assembly, index, part)
    assert assembly.contents() == DATA


def test_facts_are_a_json_object_of_a_size_and_depth_to_be_read() -> None:
    for data in (b"", b"[1]", b"[" * 50_000, b'"text"', b"\xff", b"{" + b" " * MAX_FACTS_BYTES + b"}"):
        assert read_facts(data) is None
    for depth in (16, 500, 985, 990, 995, 1000):
        assert read_facts(b'{"a":' + b"[" * depth + b"]" * depth + b"}") is None
        assert read_facts(b'{"a":' + b'{"b":' * depth + b"1" + b"}" * depth + b"}") is None
        assert read_facts(b'{"a":' + b"[" * 15 + b"]" * 15 + b"}") is not None


@pytest.mark.parametrize(
    ("here", "there", "named"),
    [
        ({"reward_modules": {"my.reward": "1f" * 32}}, {"reward_modules": {"my.reward": "77" * 32}}, "my/reward.py"),
        ({"answers": "1f" * 16}, {"answers": "77" * 16}, "chat templates write"),
        ({"task_modules": {"mine": "1f" * 32}}, {}, "task module mine.py: 1f1f1f1f here, none there"),
        ({"prompt": {"template": "a", "system_prompt": ""}}, {"prompt": {"template": "b"}}, "prompt.template: a here"),
        (
            {"task_digest": "1f" * 32, "problems": "sums.jsonl, 9 problems"},
            {"task_digest": "77" * 32, "problems": "mine.jsonl, 9 problems"},
            "problems: sums.jsonl, 9 problems, 1f1f1f1f here, mine.jsonl, 9 problems, 77777777 there",
        ),
        ({"reward_modules": {"a": "1f"}, "allow_other_code": True}, {"reward_modules": {"a": "77"}}, "a.py: 1f here"),
    ],
)
def test_the_difference_between_two_peers_is_named_by_its_file_or_key(
    here: dict[str, Any], there: dict[str, Any], named: str
) -> None:
    differs = mismatch("demo", here, there)
    assert differs is not None
    assert named in differs.of(["b"])
    assert run_id(here) != run_id(there)


def test_other_code_is_told_and_meets_if_both_allow_it() -> None:
    allows = {"seed": 0, "allow_other_code": True}
    here, there = ({**allows, "reward_modules": {"a": digest}} for digest in ("1f", "77"))
    assert mismatch("demo", here, there) is None
    assert run_id(here) == run_id(there) != run_id({**there, "seed": 1})
    assert other_code(here, there) == "reward module a.py: 1f here, 77 there"
    assert not other_code(here, here)
    alike = {"seed": 0, "problems": "a.jsonl, 9 problems"}  # the same problems by another name
    assert mismatch("demo", alike, alike | {"problems": "b.jsonl, 9 problems"}) is None
    assert run_id(alike) == run_id({"seed": 0})


def test_facts_of_others_are_printed_short_and_without_control_characters() -> None:
    assert mismatch("demo", {"seed": 1}, {"seed": 1}) is None
    differs = mismatch("demo", {}, {f"\x1b{number}": "\x1b[2J" + "y" * 1000 for number in range(50)})
    assert differs is not None
    text = differs.of(["b"])
    assert text.isprintable()
    assert len(text) < 1200
