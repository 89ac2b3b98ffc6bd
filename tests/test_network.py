"""What strangers may do to a peer on the network, and that its rounds go on unharmed.

Two honest peers and an attacker in one process; the attacker speaks the engine's language and writes what it likes.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import zenoh
from light_peer import TOKENIZER, light_admitter, light_recipe, made_up_groups
from light_swarm import free_port

from ftis.admission import Reason
from ftis.codec import VERSION, Header, Message, encode
from ftis.config import NetworkConfig, Recipe, agreement, run_id
from ftis.exchange import Collected, ExchangeError
from ftis.swarm import manifest as manifests
from ftis.swarm.identity import load_key, new_certificates, new_key, public_hex
from ftis.swarm.link import NetworkExchange
from ftis.swarm.manifest import Manifest
from ftis.swarm.session import ask_status, engine_config, open_session

NAMES = ("a", "b", "eve")


class Peers:
    """Honest ``a`` and ``b`` of a run in which ``eve`` is a member too, and what it takes to speak for anybody."""

    def __init__(self, place: Path, **network: Any) -> None:
        self.place = place
        self.public = {name: new_key(place, name) for name in (*NAMES, "stranger")}
        self.keys = {name: load_key(place / f"{name}.key") for name in self.public}
        settings = {"port": free_port(), "deadline": 5.0, "start_seconds": 0.5, **network}
        self.recipe = light_recipe(NAMES, 6, 2, 4, 8, settings)
        self.facts = agreement(self.recipe, "light", VERSION)
        self.run = run_id(self.facts)
        self.admitter = light_admitter(self.recipe, self.run)
        self.stack = ExitStack()
        self.served: list[Any] = []

    def open(self, name: str, recipe: Recipe | None = None, **changes: Any) -> NetworkExchange:
        limits = self.admitter.terms.limits
        settings: dict[str, Any] = {
            "run": self.run,
            "facts": self.facts,
            "key": self.keys[name],
            "roster": {n: self.public[n] for n in NAMES},
            "max_bytes": limits.max_bytes,
            "max_items": limits.max_groups,
            "outbox": self.place / f"{name}.outbox",
            "incarnation": 1,
            **changes,
        }
        exchange = NetworkExchange(recipe or self.recipe, name, **settings)
        return self.stack.enter_context(_Quick(exchange))

    def message(self, name: str, round: int) -> bytes:
        header = Header(self.run, round, name, TOKENIZER, 1.0, 0, 1.0)
        return encode(Message(header, tuple(made_up_groups(self.recipe, name, round))))

    def session(self) -> zenoh.Session:
        """The attacker's: linked as a client would be, without an exchange."""
        settings = NetworkConfig(mode="client", connect=(f"tcp/127.0.0.1:{self.recipe.network.port}",))
        return self.stack.enter_context(zenoh.open(engine_config(settings)))

    def manifest(self, name: str, round: int, data: bytes, **changes: Any) -> bytes:
        offer = replace(manifests.describe(self.run, name, round, 1, data, ()), **changes)
        return manifests.to_bytes(offer)

    def put(self, session: zenoh.Session, key: str, document: bytes, signer: str, **changes: Any) -> None:
        signature = bytes.fromhex(public_hex(self.keys[signer])) + manifests.sign(self.keys[signer], document)
        attachment = changes.get("attachment", signature)
        session.put(
            f"ftis/{self.run}/man/{key}",
            document,
            attachment=attachment,
            congestion_control=zenoh.CongestionControl.BLOCK,
        )

    def pretend_live(self, session: zenoh.Session, name: str) -> None:
        self.token = session.liveliness().declare_token(f"ftis/{self.run}/live/{name}/9/0")


class _Quick:
    """An exchange that does not linger for the others when the test is over."""

    def __init__(self, exchange: NetworkExchange) -> None:
        self.exchange = exchange

    def __enter__(self) -> NetworkExchange:
        return self.exchange.__enter__()

    def __exit__(self, *exception: object) -> None:
        self.exchange.__exit__(RuntimeError, None, None)


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[Peers]:
    made = Peers(tmp_path)
    with made.stack:
        yield made


def both_ready(*exchanges: NetworkExchange, round: int = 0) -> None:
    for exchange in exchanges:
        exchange.catch_up(round)
    until(lambda: all(e.rounds.live for e in exchanges))


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def one_round(peers: Peers, a: NetworkExchange, b: NetworkExchange, round: int = 0) -> tuple[Collected, Collected]:
    """What the honest ones take away from a round; it closes at its deadline if the attacker looks alive."""
    taken: dict[str, Collected] = {}

    def work(name: str, exchange: NetworkExchange) -> None:
        exchange.publish(round, peers.message(name, round), ())
        taken[name] = exchange.collect(round)

    threads = [threading.Thread(target=work, args=pair) for pair in (("a", a), ("b", b))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert taken["a"].messages["b"] == peers.message("b", round)
    assert taken["b"].messages["a"] == peers.message("a", round)
    return taken["a"], taken["b"]


def reasons(collected: Collected) -> set[tuple[str, str]]:
    return {(r.peer, str(r.reason)) for r in collected.rejections}


def promise(peers: Peers, gigabytes: int) -> bytes:
    size = gigabytes * 2**30
    return peers.manifest("eve", 0, b"x", size=size, chunks=("0" * 64,) * (size // manifests.CHUNK_BYTES))


OFFERS: dict[str, tuple[Callable[[Peers], tuple[str, bytes, str]], str | None]] = {
    "signed by a stranger": (lambda p: ("eve/0", p.manifest("eve", 0, b"x"), "stranger"), "forged"),
    "in another member's name": (lambda p: ("b/1", p.manifest("b", 1, b"x"), "eve"), "forged"),
    "of a peer that is in no roster": (lambda p: ("mallory/0", p.manifest("mallory", 0, b"x"), "stranger"), None),
    "for another round than it says": (lambda p: ("eve/1", p.manifest("eve", 0, b"x"), "eve"), "wrong_sender"),
    "of another run": (lambda p: ("eve/0", p.manifest("eve", 0, b"x", run="0" * 32), "eve"), "wrong_sender"),
    "for a round that never comes": (lambda p: ("eve/600", p.manifest("eve", 600, b"x"), "eve"), "wrong_round"),
    "that promises 10 GB": (lambda p: ("eve/0", promise(p, 10), "eve"), "over_budget"),
    "that promises 3 GB and lists their digests": (lambda p: ("eve/0", promise(p, 3), "eve"), "over_budget"),
    "larger than a manifest may be": (lambda p: ("eve/0", b"{" * (manifests.MAX_BYTES + 1), "eve"), "over_budget"),
    "that is no manifest": (lambda p: ("eve/0", b"\x80\x04K\x01.", "eve"), "malformed"),
    "deeply nested": (lambda p: ("eve/0", b"[" * 100_000, "eve"), "malformed"),
    "of ten thousand groups": (
        lambda p: ("eve/0", p.manifest("eve", 0, b"x", items=tuple(range(10_000))), "eve"),
        "over_budget",
    ),
}


@pytest.mark.parametrize("case", OFFERS)
def test_an_offer(case: str, peers: Peers) -> None:
    make, reason = OFFERS[case]
    a, b = peers.open("a"), peers.open("b")
    both_ready(a, b)
    attacker = peers.session()
    key, document, signer = make(peers)
    peers.put(attacker, key, document, signer)
    name = key.partition("/")[0]
    if reason is not None:
        until(lambda: all(e.rounds.rejections for e in (a, b) if e.peer != name))
    for exchange, collected in zip((a, b), one_round(peers, a, b), strict=True):
        assert reasons(collected) == ({(name, reason)} if reason and exchange.peer != name else set())
        assert "eve" not in collected.messages


def test_a_round_that_the_others_are_past_is_not_waited_for(tmp_path: Path) -> None:
    peers = Peers(tmp_path, quorum=2, deadline=600.0)
    with peers.stack:
        a, b = peers.open("a"), peers.open("b")
        both_ready(a, b)
        attacker = peers.session()
        peers.pretend_live(attacker, "eve")
        document = peers.manifest("eve", 5, b"x")
        peers.put(attacker, "eve/5", document, "eve")

        def reply(query: zenoh.Query) -> None:
            signature = bytes.fromhex(peers.public["eve"]) + manifests.sign(peers.keys["eve"], document)
            with query:
                query.reply(f"ftis/{peers.run}/man/eve/5", document, attachment=signature)

        peers.served.append(attacker.declare_queryable(f"ftis/{peers.run}/man/eve/*", reply, complete=True))
        for collected in one_round(peers, a, b):
            assert collected.missing == ("eve",)


def test_a_replayed_round_is_taken_once(peers: Peers) -> None:
    a, b = peers.open("a"), peers.open("b")
    both_ready(a, b)
    one_round(peers, a, b)
    old, signature = b.outbox.signed[0]
    attacker = peers.session()
    for key in ("b/0", "b/1", "eve/1"):  # as it was, as the next round's, as another peer's
        peers.put(attacker, key, old, "eve", attachment=signature)
    until(lambda: len(a.rounds.rejections) == 2)
    collected, _ = one_round(peers, a, b, round=1)
    assert reasons(collected) == {("b", "wrong_sender"), ("eve", "forged")}
    assert collected.late == ()


def test_two_offers_for_one_round_are_told_apart_from_a_second_life(peers: Peers) -> None:
    a, b = peers.open("a"), peers.open("b")
    both_ready(a, b)
    attacker = peers.session()
    for data in (b"one thing", b"another"):
        peers.put(attacker, "eve/0", peers.manifest("eve", 0, data), "eve")
    until(lambda: bool(a.rounds.rejections))
    assert 0 not in a.rounds.offers_of("eve")
    for data, life in ((b"one thing", 1), (b"another", 2)):
        peers.put(attacker, "eve/1", peers.manifest("eve", 1, data, incarnation=life), "eve")
    until(lambda: 1 in a.rounds.offers_of("eve") and a.rounds.offers_of("eve")[1].incarnation == 2)
    collected, _ = one_round(peers, a, b)
    assert reasons(collected) == {("eve", "equivocation")}


def serve(peers: Peers, session: zenoh.Session, name: str, answer: Callable[[int], bytes]) -> None:
    def reply(query: zenoh.Query) -> None:
        with query:
            query.reply(query.key_expr, answer(int(str(query.key_expr).rpartition("/")[2])))

    peers.served.append(session.declare_queryable(f"ftis/{peers.run}/blob/{name}/*/*", reply, complete=True))


@pytest.mark.parametrize("size", [0, 7, 100_000, 5_000_000])
def test_contents_that_are_not_what_was_signed_are_given_up(size: int, peers: Peers) -> None:
    a, b = peers.open("a"), peers.open("b")
    both_ready(a, b)
    attacker = peers.session()
    serve(peers, attacker, "eve", lambda chunk: bytes(size))
    peers.pretend_live(attacker, "eve")
    peers.put(attacker, "eve/0", peers.manifest("eve", 0, peers.message("eve", 0)), "eve")
    for collected in one_round(peers, a, b):
        assert reasons(collected) == {("eve", "corrupt")}


def test_junk_answered_in_anothers_name_does_not_keep_the_truth_out(peers: Peers) -> None:
    a, b = peers.open("a"), peers.open("b")
    both_ready(a, b)
    attackers = [peers.session() for _ in range(4)]
    for attacker in attackers:
        serve(peers, attacker, "b", lambda chunk: b"junk")
    time.sleep(0.2)
    collected, _ = one_round(peers, a, b)
    assert collected.messages["b"] == peers.message("b", 0)


def test_junk_in_the_place_of_peers_that_are_cut_off_brings_nobody_to_train_alone(tmp_path: Path) -> None:
    peers = Peers(tmp_path, quorum=2, below_quorum="stop", deadline=2.0)
    with peers.stack:
        a = peers.open("a")
        a.catch_up(0)
        attacker = peers.session()
        for name in ("b", "eve"):
            serve(peers, attacker, name, lambda chunk: b"junk")
            peers.put(attacker, f"{name}/0", peers.manifest(name, 0, peers.message(name, 0)), name)
        a.publish(0, peers.message("a", 0), ())
        with pytest.raises(ExchangeError, match=r"0 of 2 peers needed delivered \(missing: b \(refused\)"):
            a.collect(0)


def test_an_offer_without_contents_is_not_waited_for_beyond_the_deadline(peers: Peers) -> None:
    a, b = peers.open("a"), peers.open("b")
    both_ready(a, b)
    attacker = peers.session()
    peers.pretend_live(attacker, "eve")
    peers.put(attacker, "eve/0", peers.manifest("eve", 0, peers.message("eve", 0)), "eve")
    for collected in one_round(peers, a, b):
        assert collected.missing == ("eve",)


def test_a_flood_of_forgeries_is_counted_and_forgotten(peers: Peers) -> None:
    a, b = peers.open("a"), peers.open("b")
    both_ready(a, b)
    attacker = peers.session()
    document = peers.manifest("eve", 0, b"x")
    for _ in range(3000):
        peers.put(attacker, "eve/0", document, "stranger", attachment=bytes(96))
    collected, _ = one_round(peers, a, b)
    assert 0 < len(collected.rejections) <= 1000
    assert reasons(collected) == {("eve", "forged")}
    assert len(a.rounds.offers_of("eve")) == 0


def test_offers_for_all_rounds_at_once_do_not_keep_the_next_one_out(tmp_path: Path) -> None:
    peers = Peers(tmp_path)
    peers.recipe = light_recipe(NAMES, 500, 2, 4, 8, dict(peers.recipe.network))
    with peers.stack:
        a, b = peers.open("a"), peers.open("b")
        both_ready(a, b)
        attacker = peers.session()
        for round in reversed(range(500)):
            peers.put(attacker, f"eve/{round}", peers.manifest("eve", round, b"x"), "eve")
        until(lambda: 0 in a.rounds.offers_of("eve"))
        assert len(a.rounds.offers_of("eve")) <= 32


def test_contents_are_judged_by_admission_like_any_others(peers: Peers) -> None:
    """What arrives whole and signed may still be anything: a zip bomb's place is the decoder's."""
    a, b = peers.open("a"), peers.open("b")
    both_ready(a, b)
    attacker = peers.session()
    bad = peers.message("eve", 0)[:-1] + b"\0"
    serve(peers, attacker, "eve", lambda chunk: bad)
    peers.pretend_live(attacker, "eve")
    peers.put(attacker, "eve/0", peers.manifest("eve", 0, bad), "eve")
    collected, _ = one_round(peers, a, b)
    assert collected.messages["eve"] == bad
    admission = peers.admitter.admit("eve", bad, 0)
    assert [r.reason for r in admission.rejections] == [Reason.MALFORMED]


def test_in_an_open_swarm_the_first_key_keeps_the_name(tmp_path: Path) -> None:
    peers = Peers(tmp_path)
    with peers.stack:
        a, b = peers.open("a", roster=None), peers.open("b", roster=None)
        both_ready(a, b)
        one_round(peers, a, b)
        attacker = peers.session()
        peers.put(attacker, "b/1", peers.manifest("b", 1, b"x"), "stranger")
        peers.put(attacker, "eve/1", peers.manifest("eve", 1, b"x"), "eve", attachment=bytes(96))  # takes no name
        peers.put(attacker, "eve/1", peers.manifest("eve", 1, b"x"), "stranger")
        until(lambda: 1 in a.rounds.offers_of("eve"))
        collected, _ = one_round(peers, a, b, round=1)
        assert reasons(collected) == {("b", "forged"), ("eve", "forged")}


# --- certificates -------------------------------------------------------------------------------------


def tls(place: Path, name: str, port: int, listens: bool) -> dict[str, Any]:
    endpoint = f"tls/127.0.0.1:{port}"
    return {
        "listen": [endpoint] if listens else [],
        "connect": [] if listens else [endpoint],
        "tls_authority": str(place / "ca.pem"),
        "tls_certificate": str(place / f"{name}.pem"),
        "tls_key": str(place / f"{name}.tls.key"),
    }


def test_only_the_swarms_own_certificates_connect(tmp_path: Path) -> None:
    ours, theirs, port = tmp_path / "certs", tmp_path / "other", free_port()
    new_certificates(ours, ["a", "b"])
    new_certificates(theirs, ["eve"])
    peers = Peers(tmp_path)

    def recipe(settings: dict[str, Any]) -> Recipe:
        return light_recipe(NAMES, 6, 2, 4, 8, {"deadline": 5.0, "start_seconds": 0.5, **settings})

    with peers.stack:
        a = peers.open("a", recipe(tls(ours, "a", port, listens=True)))
        b = peers.open("b", recipe(tls(ours, "b", port, listens=False)))
        both_ready(a, b)
        one_round(peers, a, b)
        member = NetworkConfig.model_validate(tls(ours, "b", port, listens=False) | {"mode": "client"}, strict=False)
        with open_session(member) as session:
            assert [status["peer"] for status in ask_status(session)] == ["a", "b"]
        foreign = tls(theirs, "eve", port, listens=False) | {"mode": "client"}
        for bad in (foreign, {"connect": [f"tcp/127.0.0.1:{port}"], "mode": "client"}):
            config = engine_config(NetworkConfig.model_validate(bad, strict=False))
            config.insert_json5("connect/timeout_ms", "1500")
            with pytest.raises(zenoh.ZError):
                zenoh.open(config)


def test_an_address_in_use_or_a_missing_certificate_is_named(tmp_path: Path) -> None:
    port = free_port()
    settings = NetworkConfig(listen=(f"tcp/127.0.0.1:{port}",))
    with open_session(settings), pytest.raises(ExchangeError, match="Address already in use") as refused:
        open_session(settings)
    assert str(refused.value).startswith(f"no network at tcp/127.0.0.1:{port} (")
    assert ".rs" not in str(refused.value)
    nowhere = NetworkConfig.model_validate(tls(tmp_path, "a", free_port(), listens=True), strict=False)
    with pytest.raises(ExchangeError, match="no certificate or key at"):
        open_session(nowhere)


# --- what peers say of themselves -----------------------------------------------------------------------


def test_status_says_where_each_peer_is_and_survives_nonsense(peers: Peers) -> None:
    a, b = peers.open("a"), peers.open("b")
    both_ready(a, b)
    one_round(peers, a, b)
    attacker = peers.session()
    lies = [b"[1", b'"text"', b"[" * 50_000, json.dumps({"peer": ["x"], "round": "far"}).encode()]
    lies.append(
        json.dumps({"peer": "\x1b[2J", "name": "\x1b]0;x\x07", "live": ["\r[red]y"], "state": "\x1bc"}).encode()
    )

    def reply(query: zenoh.Query) -> None:
        with query:
            for lie in lies:
                query.reply("ftis/status/light/eve", lie)

    served = attacker.declare_queryable("ftis/status/light/eve", reply, complete=True)
    time.sleep(0.2)
    said = [status for status in ask_status(attacker) if status["peer"] in NAMES]
    assert [(s["peer"], s["round"], s["live"]) for s in said] == [("a", 0, ["b"]), ("b", 0, ["a"])]
    from rich.console import Console

    from ftis.lab.progress import status_table

    out = StringIO()
    Console(file=out, width=200).print(status_table(ask_status(attacker)))
    assert "[2J" in out.getvalue()
    assert not set(out.getvalue()) & {"\x1b", "\x07", "\r"}
    served.undeclare()


def test_a_manifest_reads_back_what_was_published(peers: Peers) -> None:
    a = peers.open("a")
    a.publish(3, b"contents", (7, 5))
    document, signature = a.outbox.signed[3]
    assert manifests.parse(document) == Manifest(peers.run, "a", 3, 1, 8, (manifests.digest(b"contents"),), (5, 7))
    assert manifests.signed_by(peers.public["a"], document, signature[32:])
    again = peers.open("a", incarnation=2)  # a second life: the outbox outlives the first
    again.catch_up(4)
    assert manifests.parse(again.outbox.signed[3][0]).contents == manifests.parse(document).contents


def test_of_the_unread_the_offer_is_waited_for_and_nothing_fetched(tmp_path: Path) -> None:
    peers = Peers(tmp_path, deadline=600.0, start_seconds=600.0)
    with peers.stack:
        a, b, eve = (peers.open(name) for name in NAMES)
        both_ready(a, b, eve)
        asked: list[tuple[int, int]] = []
        chunk = b.outbox.chunk
        b.outbox.chunk = lambda round, index: asked.append((round, index)) or chunk(round, index)  # type: ignore[func-returns-value, method-assign]
        taken: list[Collected] = []
        collecting = threading.Thread(target=lambda: taken.append(a.collect(0, unread=("b",))))
        collecting.start()
        eve.publish(0, peers.message("eve", 0))
        until(lambda: 0 in a._senders["eve"].contents)
        time.sleep(0.2)
        assert collecting.is_alive()
        b.publish(0, peers.message("b", 0))
        collecting.join(timeout=20)
        assert taken == [Collected({"eve": peers.message("eve", 0)}, unread=("b",))]
        for name, exchange in (("b", b), ("eve", eve)):
            exchange.publish(1, peers.message(name, 1))
        late = a.collect(1)
        assert set(late.messages) == {"b", "eve"}
        assert late.late == ()
        assert {round for round, _ in asked} == {1}
