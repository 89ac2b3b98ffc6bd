"""Evidence for others: what a bundle proves, what it refuses, who keeps it, and the command that checks it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from commands import ftis
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st
from light_peer import light_recipe
from memory import peak_of
from vocabularies import byte_level

from ftis.codec import VERSION, Header, Message, encode
from ftis.honesty.evidence import EQUAL, LARGEST_SHARE, TRUSTING
from ftis.honesty.proof import ALPHA, BREAK, MOST_STARTS, Spot, evidence_in, nats_needed
from ftis.records.events import Event, NetworkEvent, RoundEnded
from ftis.rollouts import Group, Rollout
from ftis.swarm import bundle as bundles
from ftis.swarm import manifest as manifests
from ftis.swarm.bundle import MAGIC, Bundle, BundleError, Finding, Signed, examine, strongest
from ftis.swarm.facts import agreement, run_id
from ftis.swarm.identity import public_hex, roster_digest, roster_text
from ftis.swarm.inbox import Inbox
from ftis.swarm.witness import Witness
from ftis.text.messages import write_groups
from ftis.text.token_bytes import TokenBytes

PEERS = ("ada", "bob", "eve")
KEYS = {name: Ed25519PrivateKey.from_private_bytes(bytes([i] * 32)) for i, name in enumerate((*PEERS, "stranger"))}
ROSTER = {name: public_hex(KEYS[name]) for name in PEERS}
RECIPE = light_recipe(PEERS, 40, 2, 4, 12, {})
FACTS = {**agreement(RECIPE, "task", VERSION), "roster": roster_digest(ROSTER), "tokenizer": "0" * 32}
RUN = run_id(FACTS)
PLANTED = np.array([7, 8, 9, 7, 8, 9], dtype=np.int32)


def groups_of(peer: str, round: int, lie: float | None = None) -> list[Group]:
    """Tokens drawn from 16 evenly; a liar plants the same text at the end of each, as if improbable by ``lie``."""
    rng = np.random.default_rng([round, PEERS.index(peer)])
    groups = []
    for item in (2 * round, 2 * round + 1):
        rollouts = []
        for _ in range(4):
            ids, logp = rng.integers(0, 16, 12).astype(np.int32), np.full(12, -math.log(16), np.float32)
            if lie is not None:
                ids[6:], logp[6:] = PLANTED, lie
            rollouts.append(Rollout(ids, logp))
        groups.append(Group(peer, round, item, tuple(rollouts)))
    return groups


def message(peer: str, round: int, groups: Sequence[Group]) -> bytes:
    """As in a joined run, where the message's own digest does not cover the roster and the tokenizer."""
    return encode(
        Message(Header(run_id(agreement(RECIPE, "task", VERSION)), round, peer, "0" * 32, 1.0, 0, 1.0), tuple(groups)),
        2,
    )


def signed(peer: str, round: int, lie: float | None = None, **other: Any) -> Signed:
    """``other``: the contents, the signer, the start, and fields of the manifest that say something else."""
    signer, life = other.pop("signer", peer), other.pop("life", 1)
    contents = other.pop("contents", None) or message(peer, round, groups_of(peer, round, lie))
    offer = manifests.describe(RUN, peer, round, life, contents, ())
    document = manifests.to_bytes(dataclasses.replace(offer, **other))
    return Signed(document, manifests.seal(KEYS[signer], document), contents)


def of(*messages: Signed, **facts: Any) -> Bundle:
    return Bundle({**FACTS, **facts}, messages)


def checked(data: bytes, roster: dict[str, str] = ROSTER) -> Finding:
    return examine(Bundle.read(data), roster)


LIES = of(*(signed("eve", round, -6.0) for round in range(3, 7)))
HONEST = of(*(signed("bob", round) for round in range(10)))


# --- the sums ---------------------------------------------------------------------------------------------------------


def test_a_lying_senders_messages_prove_it() -> None:
    finding = checked(LIES.to_bytes())
    assert finding.is_proof
    assert (finding.peer, finding.run, finding.rounds) == ("eve", RUN, (3, 4, 5, 6))
    assert finding.nats > 100


def test_messages_of_text_prove_what_ids_do() -> None:
    """A token is known by its bytes. Ids where the facts say text, and the other way round, count for nothing."""
    facts, known = {"exchange": "text"}, TokenBytes.of(byte_level())
    run = run_id({**FACTS, **facts})
    lies = {r: groups_of("eve", r, -6.0) for r in range(3, 7)}
    as_text = {r: message("eve", r, write_groups(groups, known, ())) for r, groups in lies.items()}
    text = of(*(signed("eve", r, contents=contents, run=run) for r, contents in as_text.items()), **facts)
    finding = checked(text.to_bytes())
    assert finding.is_proof
    assert finding.nats == checked(LIES.to_bytes()).nats
    as_ids = of(*(signed("eve", r, contents=message("eve", r, lies[r]), run=run) for r in lies), **facts)
    assert checked(as_ids.to_bytes()).nats == 0
    assert checked(of(*(signed("eve", r, contents=as_text[r]) for r in lies)).to_bytes()).nats == 0


def test_an_honest_senders_messages_prove_nothing() -> None:
    finding = checked(HONEST.to_bytes())
    assert not finding.is_proof
    assert finding.nats < 0


def test_the_evidence_by_hand() -> None:
    """Two rollouts of one token: the first has nothing before it, the second follows the first one's example."""
    p = 0.1
    rollout = Rollout(np.array([5], np.int32), np.log(np.array([p], np.float32)))
    favour = math.exp(1e-3)
    ratio = ((1 + 1 / 2) / 2) / (p * favour)
    mostly, rest = 1 - LARGEST_SHARE / 2, LARGEST_SHARE / 2  # of the reported component
    first = TRUSTING[0, 0] * mostly
    second = TRUSTING[0, 0] * (mostly + rest * ratio) + TRUSTING[0, 1] * ratio
    one = evidence_in([[Group("eve", 0, 0, (rollout,))]], 0, LARGEST_SHARE)
    assert one == pytest.approx(math.log(first), abs=1e-6)
    # In one message both begin with the same weights; in a later one with the weights that the first one ended with.
    together = evidence_in([[Group("eve", 0, 0, (rollout, rollout))]], 0, LARGEST_SHARE)
    assert together == pytest.approx(math.log(first * second), abs=1e-6)
    weight = LARGEST_SHARE * EQUAL[0, 1]  # all that is left to the contexts
    later = (1 - weight) * (mostly + rest * ratio) + weight * ratio
    after = evidence_in([[Group("eve", r, r, (rollout,))] for r in range(2)], 0, LARGEST_SHARE)
    assert after == pytest.approx(math.log(first * later), abs=1e-6)


def test_the_order_of_groups_in_a_message_is_not_the_senders_to_choose() -> None:
    groups = groups_of("eve", 3, -6.0)
    assert evidence_in([groups], 0, LARGEST_SHARE) == evidence_in([groups[::-1]], 0, LARGEST_SHARE)


def test_choosing_among_sampled_groups_is_counted_for_the_sender() -> None:
    groups = groups_of("eve", 3, -6.0)
    assert evidence_in([groups], 0, LARGEST_SHARE) - evidence_in([groups], 6, LARGEST_SHARE) == pytest.approx(
        math.log(math.comb(6, 2))
    )
    filling = {"resample_budget": 2}
    run = run_id({**FACTS, **filling})
    bundle = of(
        *(signed("eve", r, contents=message("eve", r, groups_of("eve", r, -6.0)), run=run) for r in range(2)),
        **filling,
    )
    plain = examine(of(*(signed("eve", r, -6.0) for r in range(2))), ROSTER)
    assert plain.nats - examine(bundle, ROSTER).nats == pytest.approx(2 * math.log(math.comb(6, 2)))


def test_the_expectation_of_what_a_bet_is_worth_is_at_most_1() -> None:
    """By enumeration of all messages that an honest sender with two tokens may send in two rounds."""
    p = np.array([0.7, 0.3])
    total = 0.0
    for ids in itertools.product(range(2), repeat=6):
        tokens = np.array(ids, np.int32).reshape(2, 3)
        logp = np.log(p)[tokens].astype(np.float32)
        messages = [[Group("bob", r, r, (Rollout(tokens[r], logp[r]),))] for r in range(2)]
        total += p[list(ids)].prod() * math.exp(evidence_in(messages, 0, LARGEST_SHARE))
    assert 0.25 < total <= 1


def test_honest_senders_are_shown_guilty_no_more_often_than_alpha() -> None:
    """Whatever window the accuser chooses."""
    alpha, guilty, runs = 0.2, 0, 100
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        p = rng.dirichlet(np.full(4, 0.4))
        messages = []
        for round in range(4):
            ids = rng.choice(4, 20, p=p).astype(np.int32)
            messages.append([Group("bob", round, 0, (Rollout(ids, np.log(p)[ids].astype(np.float32)),))])
        windows = [w for n in range(1, 5) for w in itertools.combinations(range(4), n)]
        guilty += any(
            evidence_in([messages[r] for r in window], 0, LARGEST_SHARE)
            >= nats_needed([Spot(r, 1) for r in window], 2, alpha)
            for window in windows
        )
    assert guilty <= alpha * runs


def test_what_the_accuser_could_choose_is_charged() -> None:
    base = math.log((3 - 1) / ALPHA)
    assert nats_needed([Spot(0, 1)], 3) == pytest.approx(base + 2 * math.log(2))
    assert nats_needed([Spot(4, 1)], 3) == pytest.approx(base + math.log(5 * 6) + math.log(2))
    assert nats_needed([Spot(4, 3)], 3) == pytest.approx(base + math.log(5 * 6) + math.log(3 * 4))
    on = nats_needed([Spot(0, 1), Spot(1, 1), Spot(2, 1)], 3)
    assert on == pytest.approx(nats_needed([Spot(0, 1)], 3) - 2 * math.log(1 - BREAK))
    skipped = nats_needed([Spot(0, 1), Spot(3, 1)], 3)
    assert skipped == pytest.approx(nats_needed([Spot(0, 1)], 3) + math.log(3 * 4) + math.log(2) - math.log(BREAK))
    most = MOST_STARTS * (MOST_STARTS + 1)
    assert nats_needed([Spot(0, 2**53)], 3) == pytest.approx(base + math.log(2) + math.log(most))


def test_the_charges_are_those_of_a_choice_by_lot() -> None:
    """All windows of two messages of so many rounds and starts have a probability of at most 1 together."""
    total = 0.0
    for (r, i), (s, j) in itertools.product(itertools.product(range(60), range(1, 12)), repeat=2):
        if r < s and i <= j:
            total += math.exp(math.log(1 / ALPHA) - nats_needed([Spot(r, i), Spot(s, j)], 2))
    assert 0.5 < total <= 1


# --- what is refused --------------------------------------------------------------------------------------------------

FOREIGN = "f" * 32
REFUSED: dict[str, tuple[Bundle, dict[str, str], str]] = {
    "a byte of the contents": (
        of(dataclasses.replace(signed("eve", 3), contents=bytes([1]) + signed("eve", 3).contents[1:])),
        ROSTER,
        "round 4 of eve: the contents are not what was signed",
    ),
    "contents that are longer": (
        of(dataclasses.replace(signed("eve", 3), contents=signed("eve", 3).contents + b"x")),
        ROSTER,
        "round 4 of eve: the contents are not what was signed",
    ),
    "a manifest of other contents": (
        of(dataclasses.replace(signed("eve", 3), document=signed("eve", 3, -6.0).document)),
        ROSTER,
        "round 4 of eve is refused as forged",
    ),
    "another peer's key": (of(signed("eve", 3, signer="bob")), ROSTER, "refused as forged"),
    "a stranger's key": (of(signed("eve", 3, signer="stranger")), ROSTER, "refused as forged"),
    "no key in the roster": (LIES, {n: k for n, k in ROSTER.items() if n != "eve"}, "the roster has no key for eve"),
    "another roster": (LIES, {**ROSTER, "eve": public_hex(KEYS["stranger"])}, "this is not the roster of run"),
    "a run without a roster": (
        of(signed("eve", 3, run=run_id({**FACTS, "roster": "open"})), roster="open"),
        ROSTER,
        "this is not the roster of run",
    ),
    "another run": (of(signed("eve", 3), signed("eve", 4, run=FOREIGN)), ROSTER, f"round 5 for run {FOREIGN}"),
    "facts of another run": (of(signed("eve", 3), seed=99), ROSTER, "the bundle is about run"),
    "two peers": (of(signed("eve", 3), signed("bob", 4)), ROSTER, "two peers, eve and bob"),
    "a round twice": (of(signed("eve", 3), signed("eve", 3)), ROSTER, "round 4 comes after round 4"),
    "two messages of a round": (of(signed("eve", 3), signed("eve", 3, -6.0)), ROSTER, "round 4 comes after round 4"),
    "another order": (of(signed("eve", 4), signed("eve", 3)), ROSTER, "round 4 comes after round 5"),
    "an earlier start": (of(signed("eve", 3, life=2), signed("eve", 4)), ROSTER, "round 5 is of an earlier start"),
    "contents of another round": (
        of(signed("eve", 3, contents=signed("eve", 4).contents)),
        ROSTER,
        "the contents are eve's for round 5",
    ),
    "contents that are none": (of(signed("eve", 3, contents=b"junk")), ROSTER, "the contents cannot be read"),
    "more bytes than the run has": (of(signed("eve", 3, contents=bytes(10_000))), ROSTER, "refused as over_budget"),
    "a peer that did not take part": (
        of(signed("eve", 3, run=run_id({**FACTS, "peers": ["ada", "bob"]})), peers=["ada", "bob"]),
        ROSTER,
        "eve did not take part",
    ),
    "gigabytes by its facts": (
        of(
            signed("eve", 3, run=run_id({**FACTS, "max_completion_length": 2**19, "num_generations": 64})),
            max_completion_length=2**19,
            num_generations=64,
        ),
        ROSTER,
        "at most",
    ),
    "a million rollouts by its facts": (
        of(
            signed("eve", 3, run=run_id({**FACTS, "max_completion_length": 1, "num_generations": 2**15})),
            max_completion_length=1,
            num_generations=2**15,
        ),
        ROSTER,
        "rollouts",
    ),
    "facts without peers": (of(signed("eve", 3, run=run_id({**FACTS, "peers": 3})), peers=3), ROSTER, "facts do not"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_with_its_reason(case: str) -> None:
    bundle, roster, reason = REFUSED[case]
    with pytest.raises(BundleError) as caught:
        checked(bundle.to_bytes(), roster)
    assert reason in str(caught.value)


DATA = LIES.to_bytes()


def rollout_of(ids: Sequence[int], logp: float = -1.0) -> Rollout:
    return Rollout(np.array(ids, np.int32), np.full(len(ids), logp, np.float32))


IMPOSSIBLE = {
    "NaN": (rollout_of([1], math.nan),),
    "above 0": (rollout_of([1], 0.5),),
    "below the lowest": (rollout_of([1], -101.0),),
    "a negative id": (rollout_of([-1]),),
    "an id beyond all": (rollout_of([2**30]),),
    "too long": (rollout_of(range(13)),),
    "no tokens": (rollout_of([]),),
    "too many": (rollout_of([1]),) * 5,
    "a second group of a prompt": (rollout_of([1]),),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_groups_that_nobody_admits_count_for_nothing_and_spoil_nothing(case: str) -> None:
    """So a liar does not escape by adding them."""
    groups = groups_of("eve", 3, -6.0)
    item = groups[0].item if case.startswith("a second") else 99
    added = [*groups, Group("eve", 3, item, IMPOSSIBLE[case])]
    header = Header(run_id(agreement(RECIPE, "task", VERSION)), 3, "eve", "0" * 32, 1.0, 0, 1.0)
    version: Literal[1, 2] = 2 if case in ("too long", "too many") else 1  # within the bytes, and with any value
    plain, with_it = (encode(Message(header, tuple(sent)), version) for sent in (groups, added))
    assert (
        examine(of(signed("eve", 3, contents=with_it)), ROSTER).nats
        == examine(of(signed("eve", 3, contents=plain)), ROSTER).nats
    )


BYTES: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "not evidence of ftis"),
    "something else": (b"PK\3\4" + bytes(100), "not evidence of ftis"),
    "a later version": (MAGIC + b"\2\0" + DATA[10:], "version 2, this ftis reads version 1"),
    "cut short": (DATA[:-1], "cut short"),
    "cut in the head": (DATA[:11], "cut short"),
    "something behind it": (DATA + b"x", "ends at byte"),
    "facts of gigabytes": (MAGIC + struct.pack("<HI", 1, 2**32 - 1), "facts of 4294967295 bytes"),
    "facts that are none": (MAGIC + struct.pack("<HI", 1, 2) + b"[]" + bytes(9), "not a JSON object"),
    "facts with a space": (MAGIC + struct.pack("<HI", 1, 3) + b"{ }" + bytes(2), "not written in their one way"),
    "facts that are deep": (MAGIC + struct.pack("<HI", 1, 50_000) + b'{"":' * 12_500 + bytes(2), "not a JSON object"),
    "no message": (MAGIC + struct.pack("<HI", 1, 2) + b"{}" + bytes(2), "0 messages"),
    "many messages": (MAGIC + struct.pack("<HI", 1, 2) + b"{}" + b"\xff\xff", "65535 messages"),
    "a manifest of gigabytes": (MAGIC + struct.pack("<HI", 1, 2) + b"{}\1\0" + b"\xff" * 4, "cut short"),
}


@pytest.mark.parametrize("case", BYTES)
def test_bytes_that_are_no_bundle(case: str) -> None:
    data, reason = BYTES[case]
    with pytest.raises(BundleError) as caught:
        checked(data)
    assert reason in str(caught.value)


def test_a_bundle_is_read_as_it_was_written() -> None:
    assert Bundle.read(DATA) == Bundle(LIES.facts, list(LIES.messages))
    assert Bundle.read(DATA).to_bytes() == DATA


def never_worse(data: bytes) -> None:
    with contextlib.suppress(BundleError):
        checked(data)


SHORT = of(signed("eve", 3, -6.0)).to_bytes()


@given(st.binary(max_size=200), st.booleans())
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_refused_by_an_error_of_its_own(data: bytes, with_magic: bool) -> None:
    with pytest.raises(BundleError):
        checked(MAGIC + b"\1\0" + data if with_magic else data)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_a_mutated_bundle_is_refused_by_an_error_of_its_own(data: st.DataObject) -> None:
    text = bytearray(SHORT)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text) - 1))
        match data.draw(st.sampled_from(["set", "cut", "insert"])):
            case "set":
                text[at] = data.draw(st.integers(0, 255))
            case "cut":
                del text[at : at + data.draw(st.integers(1, 40))]
            case "insert":
                text[at:at] = data.draw(st.binary(max_size=20))
        if not text:
            break
    mutated = bytes(text)
    if mutated != SHORT:
        with pytest.raises(BundleError):
            checked(mutated)


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=4)),
    max_leaves=8,
)


@given(st.sampled_from(sorted(FACTS)), json_values)
@settings(max_examples=200, deadline=None)
def test_any_facts_that_a_sender_signs_are_no_worse(key: str, value: object) -> None:
    """A bundle of somebody's own making, signed by a key in the roster."""
    facts = {**FACTS, key: value}
    run = run_id(facts)
    contents = message("eve", 3, groups_of("eve", 3))
    never_worse(of(signed("eve", 3, contents=contents, run=run), **{key: value}).to_bytes())


@given(st.binary(max_size=300))
@settings(max_examples=200, deadline=None)
def test_any_contents_that_a_sender_signs_are_no_worse(contents: bytes) -> None:
    with pytest.raises(BundleError):
        checked(of(signed("eve", 3, contents=contents or b"x")).to_bytes())


def test_sizes_are_checked_before_memory_is_taken() -> None:
    """Of what a bundle says, only what is there costs memory."""
    hostile = MAGIC + struct.pack("<HI", 1, 2) + b"{}\1\0" + struct.pack("<I", 2**31)
    assert peak_of(lambda: never_worse(hostile)) < 2**20


def test_more_tokens_than_are_worth_reading_are_refused_and_never_written(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [signed("eve", round) for round in range(1, 5)]
    in_each = sum(len(rollout) for group in groups_of("eve", 1) for rollout in group.rollouts)
    monkeypatch.setattr(bundles, "MOST_TOKENS_READ", 3 * in_each)
    checked(of(*messages[:3]).to_bytes())
    with pytest.raises(BundleError, match=f"the bundle holds {4 * in_each} tokens, at most {3 * in_each} are read"):
        checked(of(*messages).to_bytes())
    bundle, _ = bundles.strongest(FACTS, messages, ROSTER)
    assert len(bundle.messages) == 2


def test_a_file_of_gigabytes_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "MOST_BYTES", 100)
    path = tmp_path / "eve.evidence"
    path.write_bytes(DATA)
    with pytest.raises(BundleError, match="more than 100 bytes"):
        bundles.read_file(path)
    with pytest.raises(BundleError, match="cannot be read"):
        bundles.read_file(tmp_path / "nothing")


# --- what is kept -----------------------------------------------------------------------------------------------------


def keep(inbox: Inbox, message: Signed) -> None:
    inbox.keep(message.offer, message.seal, message.contents)


def test_the_last_rounds_of_each_peer_are_kept_and_read_back(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path / "inbox", keep_rounds=3)
    for round in range(6):
        keep(inbox, signed("eve", round))
    keep(inbox, signed("bob", 0))
    assert inbox.messages("eve", 9) == [signed("eve", round) for round in (3, 4, 5)]
    assert inbox.messages("eve", 4) == [signed("eve", round) for round in (3, 4)]
    assert inbox.messages("bob", 9) == [signed("bob", 0)]
    assert inbox.messages("ada", 9) == []
    again = Inbox(tmp_path / "inbox", keep_rounds=3)
    keep(again, signed("eve", 5, -6.0, life=2))
    assert again.messages("eve", 5)[-1] == signed("eve", 5, -6.0, life=2)


def test_the_bytes_kept_of_a_peer_are_bounded(tmp_path: Path) -> None:
    size = len(signed("eve", 9).to_bytes())
    inbox = Inbox(tmp_path / "inbox", keep_bytes=2 * size + size // 2)
    for round in range(6):
        keep(inbox, signed("eve", round))
        assert sum(path.stat().st_size for path in (tmp_path / "inbox").rglob("*.signed")) <= inbox.keep_bytes
    assert [message.offer.round for message in inbox.messages("eve", 9)] == [4, 5]


def test_a_damaged_file_is_left_out(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path / "inbox")
    for round in range(3):
        keep(inbox, signed("eve", round))
    path = sorted((tmp_path / "inbox" / "eve").iterdir())[1]
    path.write_bytes(path.read_bytes()[:50])
    (path.parent / ".000009.signed.partial-1").write_bytes(b"killed")
    assert [message.offer.round for message in inbox.messages("eve", 9)] == [0, 2]
    keep(inbox, signed("eve", 3))
    assert not list(path.parent.glob(".*"))


# --- what is written --------------------------------------------------------------------------------------------------


def test_the_shortest_window_that_is_proof_is_chosen() -> None:
    honest = [signed("eve", round) for round in range(8)]
    lies = [signed("eve", round, -6.0) for round in range(8, 10)]
    bundle, finding = strongest(FACTS, [*honest, *lies], ROSTER)
    assert finding.is_proof
    assert len(bundle.messages) <= 2
    bundle, finding = strongest(FACTS, honest, ROSTER)
    assert not finding.is_proof
    assert finding.rounds == tuple(range(8))


def test_messages_that_nobody_could_check_are_left_out() -> None:
    kept = [
        signed("eve", 3, life=2),
        signed("eve", 4),
        signed("eve", 5, contents=b"junk"),
        signed("eve", 6, signer="bob"),
        signed("eve", 7),
    ]
    _, finding = strongest(FACTS, kept, ROSTER)
    assert finding.rounds == (4, 7)
    with pytest.raises(
        BundleError, match=r"of 1 messages kept there is none that others could check \(.*contents cannot be read"
    ):
        strongest(FACTS, kept[2:3], ROSTER)


@pytest.fixture
def seen(tmp_path: Path) -> tuple[Witness, list[Event]]:
    events: list[Event] = []
    inbox = Inbox(tmp_path / "inbox")
    return Witness(inbox, FACTS, ROSTER, tmp_path / "evidence", events.append), events


def ended(round: int, peer: str = "eve", found: int | None = None) -> RoundEnded:
    about = {} if found is None else {f"peer/{peer}/honesty/found_in_round": found + 1}
    return RoundEnded({"step": round + 1, f"peer/{peer}/honesty/quarantined": False, **about})


Seen = tuple[Witness, list[Event]]


def test_evidence_is_written_once_in_the_round_in_which_a_peer_is_found(seen: Seen, tmp_path: Path) -> None:
    witness, events = seen
    for round in range(3):
        keep(witness.inbox, signed("eve", round, -6.0))
        witness(ended(round, found=1 if round == 2 else None))
    witness(ended(3, found=1))
    said = [event for event in events if isinstance(event, NetworkEvent)]
    path = tmp_path / "evidence" / "eve-round-2.evidence"
    assert [(event.what, event.round) for event in said] == [("evidence", 2)]
    assert str(path) in said[0].text
    assert "ftis verify-evidence eve-round-2.evidence --roster" in said[0].text
    finding = checked(path.read_bytes())
    assert finding.is_proof
    assert finding.rounds[-1] == 1  # later ones are not needed
    again = Witness(witness.inbox, FACTS, ROSTER, witness.directory, witness.say)
    again(ended(4, found=1))
    assert len([event for event in events if isinstance(event, NetworkEvent)]) == 1


def test_it_is_said_when_only_this_peers_model_saw_it(seen: Seen, tmp_path: Path) -> None:
    witness, events = seen
    keep(witness.inbox, signed("eve", 0))
    witness(ended(0, found=0))
    (said,) = (event for event in events if isinstance(event, NetworkEvent))
    assert "proves nothing to others" in said.text
    assert not checked((tmp_path / "evidence" / "eve-round-1.evidence").read_bytes()).is_proof


@pytest.mark.parametrize("fault", ["nothing kept", "no room"])
def test_a_run_goes_on_where_evidence_cannot_be_written(seen: Seen, tmp_path: Path, fault: str) -> None:
    witness, events = seen
    if fault == "no room":
        keep(witness.inbox, signed("eve", 0, -6.0))
        (tmp_path / "evidence").write_text("in the way")
    witness(ended(0, found=0))
    assert isinstance(events[-1], NetworkEvent)
    assert "cannot be written" in events[-1].text


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "roster.toml").write_text(roster_text(ROSTER))
    monkeypatch.chdir(tmp_path)
    return tmp_path


Captured = pytest.CaptureFixture[str]


def test_the_command_says_what_is_proven(place: Path, capsys: Captured) -> None:
    (place / "eve.evidence").write_bytes(DATA)
    assert ftis("verify-evidence", "eve.evidence", "--roster", "roster.toml") == 0
    said = capsys.readouterr().out
    assert "proven: eve did not draw its tokens" in said
    assert "rounds 4, 5, 6, 7" in said
    assert "at most 1e-06" in said


def test_the_command_says_plainly_that_nothing_is_proven(place: Path, capsys: Captured) -> None:
    (place / "bob.evidence").write_bytes(HONEST.to_bytes())
    assert ftis("verify-evidence", "bob.evidence", "--roster", "roster.toml") == 1
    captured = capsys.readouterr()
    assert "proves nothing against bob" in captured.out
    assert "needed" in captured.out
    assert captured.err == ""


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "the contents are not what was signed"),
        (lambda data: data[:-1], "cut short"),
        (lambda data: b"", "not evidence of ftis"),
    ],
)
def test_the_command_refuses(place: Path, capsys: Captured, change: Callable[[bytes], bytes], says: str) -> None:
    (place / "eve.evidence").write_bytes(change(DATA))
    assert ftis("verify-evidence", "eve.evidence", "--roster", "roster.toml") == 1
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.out == ""
