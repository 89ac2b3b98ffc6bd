"""What only a network can answer: offers, junk and floods over real links, certificates, and questions to peers.

Two honest peers and an attacker in one process; the attacker speaks to the engine directly and writes what it likes.
When a round closes is the business of test_rounds.py, which offers count that of test_offers.py.
"""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from io import StringIO
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import zenoh
from commands import ftis
from light_peer import TOKENIZER, light_admitter, light_recipe, made_up_groups
from light_swarm import free_port
from rich.console import Console

from ftis.admission import Collected
from ftis.codec import VERSION, Header, Message, encode
from ftis.config import NetworkConfig, Recipe
from ftis.machine.resources import in_background
from ftis.member import Outgoing
from ftis.records.events import RoundEnded
from ftis.swarm import manifest as manifests
from ftis.swarm.certificates import network_keys, new_certificates
from ftis.swarm.facts import ExchangeError, agreement, run_id
from ftis.swarm.identity import load_key, new_key
from ftis.swarm.link import NetworkExchange
from ftis.swarm.manifest import CHUNK_BYTES
from ftis.swarm.rounds import Ask, Rounds
from ftis.swarm.session import ask_everybody, ask_status, check_endpoints, engine_config, open_session, ways_in
from ftis.swarm.status import Status, read_status
from ftis.view.tables import status_table

NAMES = ("a", "b", "eve")
PATIENCE = 20.0


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
        limits, roster = self.admitter.terms.limits, {n: self.public[n] for n in NAMES}
        settings: dict[str, Any] = {"run": self.run, "facts": self.facts, "key": self.keys[name], "roster": roster}
        settings |= {"max_bytes": limits.max_bytes, "max_items": limits.max_groups, "incarnation": 1}
        settings |= {"outbox": self.place / f"{name}.outbox", **changes}
        exchange = NetworkExchange(recipe or self.recipe, name, **settings).__enter__()
        self.stack.push(lambda *_: exchange.__exit__(RuntimeError, None, None))  # without lingering for the others
        return exchange

    def message(self, name: str, round: int) -> bytes:
        header = Header(self.run, round, name, TOKENIZER, 1.0, 0, 1.0)
        return encode(Message(header, tuple(made_up_groups(self.recipe, name, round))))

    def session(self) -> zenoh.Session:
        """The attacker's: linked as a client would be, without an exchange."""
        settings = NetworkConfig(mode="client", connect=(f"tcp/127.0.0.1:{self.recipe.network.port}",))
        return self.stack.enter_context(zenoh.open(engine_config(settings)))

    def manifest(self, name: str, round: int, data: bytes) -> bytes:
        return manifests.to_bytes(manifests.describe(self.run, name, round, 1, data, ()))

    def put(self, session: zenoh.Session, key: str, document: bytes, signer: str, seal: bytes | None = None) -> None:
        seal, block = seal or manifests.seal(self.keys[signer], document), zenoh.CongestionControl.BLOCK
        session.put(f"ftis/{self.run}/man/{key}", document, attachment=seal, congestion_control=block)

    def pretend_live(self, session: zenoh.Session, name: str) -> None:
        self.token = session.liveliness().declare_token(f"ftis/{self.run}/live/{name}/9/0")

    def answer(self, session: zenoh.Session, key: str, reply: Callable[[zenoh.Query], object]) -> None:
        """Answer to a key of the run: a query that ``reply`` does not keep is over when it returns."""
        self.served.append(session.declare_queryable(f"ftis/{self.run}/{key}", reply, complete=True))


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[Peers]:
    made = Peers(tmp_path)
    with made.stack:
        yield made


def both_ready(*exchanges: NetworkExchange) -> None:
    for exchange in exchanges:
        exchange.catch_up(0)
    for exchange in exchanges:
        heard(exchange, lambda rounds: bool(rounds.live))


def two_ready(peers: Peers, **changes: Any) -> tuple[NetworkExchange, NetworkExchange]:
    a, b = peers.open("a", **changes), peers.open("b", **changes)
    both_ready(a, b)
    return a, b


def heard(exchange: NetworkExchange, condition: Callable[[Rounds], bool]) -> None:
    """Wait until what the exchange hears makes ``condition`` true."""
    with exchange.changed:
        assert exchange.changed.wait_for(lambda: condition(exchange.rounds), PATIENCE)


def answered(session: zenoh.Session, key: str, answers: int) -> None:
    """Wait until so many answer to ``key``: the engine tells others in its own time of who answers what."""
    give_up = time.monotonic() + PATIENCE
    while sum(reply.ok is not None for reply in ask_everybody(session, key, 1.0)) < answers:
        assert time.monotonic() < give_up
        time.sleep(0.05)


def collected_by(
    peers: Peers, exchanges: Sequence[NetworkExchange], round: int, data: Mapping[int, bytes] = MappingProxyType({})
) -> list[Collected]:
    """Each peer's messages of a round; ``data`` has those of peers that do not offer the usual one."""
    assert round < peers.recipe.training.rounds, "no peer hears an offer for a round that the run does not have"

    def work(number: int) -> Collected:
        exchange = exchanges[number]
        exchange.publish(round, data.get(number, peers.message(exchange.peer, round)), ())
        return exchange.collect(round)

    done = [in_background(partial(work, number), "peer") for number in range(len(exchanges))]
    return [of_one.result(timeout=60) for of_one in done]


def one_round(peers: Peers, a: NetworkExchange, b: NetworkExchange, round: int = 0) -> tuple[Collected, Collected]:
    """The honest peers' messages of a round; it closes at its deadline if the attacker looks alive."""
    of_a, of_b = collected_by(peers, (a, b), round)
    assert of_a.messages["b"] == peers.message("b", round)
    assert of_b.messages["a"] == peers.message("a", round)
    return of_a, of_b


def reasons(collected: Collected) -> set[tuple[str, str]]:
    return {(r.peer, str(r.reason)) for r in collected.rejections}


def test_offers_that_are_not_what_they_say_are_refused_and_cost_no_message(peers: Peers) -> None:
    a, b = two_ready(peers)
    attacker = peers.session()
    for key, document, signer in (
        ("mallory/0", peers.manifest("mallory", 0, b"x"), "stranger"),  # in no roster: nobody listens
        ("eve/0", peers.manifest("eve", 0, b"x"), "stranger"),
        ("eve/1", peers.manifest("eve", 0, b"x"), "eve"),
        ("eve/0", b"{" * (manifests.MAX_BYTES + 1), "eve"),
    ):
        peers.put(attacker, key, document, signer)
    for exchange in (a, b):
        heard(exchange, lambda rounds: len(rounds._rejections) == 3)
    for collected in one_round(peers, a, b):
        assert reasons(collected) == {("eve", why) for why in ("forged", "wrong_sender", "over_budget")}
        assert len(collected.messages) == 1


def test_a_late_round_that_one_of_two_offers_moves_nobody(peers: Peers) -> None:
    a, _ = two_ready(peers)
    session = peers.session()
    peers.pretend_live(session, "eve")
    peers.put(session, "eve/5", peers.manifest("eve", 5, b"x"), "eve")
    heard(a, lambda rounds: 5 in rounds._others["eve"].offers and len(rounds.live) == 2)
    assert [a.catch_up(0), a.catch_up(1)] == [0, 1], "b is present and has offered nothing yet"


def test_a_round_that_the_others_are_past_is_not_waited_for(tmp_path: Path) -> None:
    peers = Peers(tmp_path, quorum=2, deadline=600.0)
    with peers.stack:
        a, b = two_ready(peers)
        attacker = peers.session()
        peers.pretend_live(attacker, "eve")
        document = peers.manifest("eve", 5, b"x")
        peers.put(attacker, "eve/5", document, "eve")
        seal = manifests.seal(peers.keys["eve"], document)

        def reply(query: zenoh.Query) -> None:
            with query:
                query.reply(f"ftis/{peers.run}/man/eve/5", document, attachment=seal)

        peers.answer(attacker, "man/eve/*", reply)
        for collected in one_round(peers, a, b):
            assert collected.missing == ("eve",)


def junk(size: int, query: zenoh.Query) -> None:
    with query:
        query.reply(query.key_expr, bytes(size))


@pytest.mark.parametrize("size", [0, 5_000_000])
def test_contents_that_are_not_what_was_signed_are_given_up(size: int, peers: Peers) -> None:
    a, b = two_ready(peers)
    attacker = peers.session()
    peers.answer(attacker, "blob/eve/*/*", partial(junk, size))
    peers.pretend_live(attacker, "eve")
    peers.put(attacker, "eve/0", peers.manifest("eve", 0, peers.message("eve", 0)), "eve")
    for collected in one_round(peers, a, b):
        assert reasons(collected) == {("eve", "corrupt")}


def test_junk_answered_in_anothers_name_does_not_keep_the_truth_out(peers: Peers) -> None:
    a, b = two_ready(peers)
    attackers = [peers.session() for _ in range(4)]
    for attacker in attackers:
        peers.answer(attacker, "blob/b/*/*", partial(junk, 4))
    answered(a.session, f"ftis/{peers.run}/blob/b/0/0", len(attackers))
    collected, _ = one_round(peers, a, b)
    assert collected.messages["b"] == peers.message("b", 0)


def test_answers_without_end_to_one_question_hold_up_no_other(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = two_ready(peers, max_bytes=4 * CHUNK_BYTES)
    attackers = [peers.session() for _ in range(2)]

    def flood(query: zenoh.Query) -> None:
        with query:
            for _ in range(1000):  # more than a queue of the engine holds
                query.reply(query.key_expr, bytes(1000))

    for chunk, attacker in enumerate(attackers, start=1):
        peers.answer(attacker, f"blob/b/0/{chunk}", flood)
        answered(a.session, f"ftis/{peers.run}/blob/b/0/{chunk}", 1)
    chunk_of = b.outbox.chunk

    def slowly(round: int, index: int) -> bytes:
        time.sleep(0.0 if index else 1.0)  # what was asked with the first chunk is answered before it
        return chunk_of(round, index)

    monkeypatch.setattr(b.outbox, "chunk", slowly)
    data = random.Random(0).randbytes(3 * CHUNK_BYTES + 5)
    b.publish(0, data)
    a.publish(0, peers.message("a", 0))
    assert in_background(lambda: a.collect(0), "peer").result(PATIENCE).messages["b"] == data


def test_questions_that_nobody_answers_hold_up_nothing(peers: Peers) -> None:
    """Whoever declares absent peers present, or offers in their names, has them asked and may never answer."""
    a, b = two_ready(peers)
    attacker, held = peers.session(), list[zenoh.Query]()
    for key in ("man/*/*", "blob/eve/*/*"):
        peers.answer(attacker, key, held.append)
    peers.put(attacker, "eve/0", peers.manifest("eve", 0, peers.message("eve", 0)), "eve")
    heard(a, lambda rounds: 0 in rounds._others["eve"].offers)
    for n in range(20):
        a._ask(f"absent{n}", PATIENCE)
    answered(b.session, f"ftis/status/{a.recipe.name}/a", 1)
    threads = threading.active_count()
    one_round(peers, a, b)
    assert len(held) > 20
    assert threading.active_count() <= threads


def test_what_is_decided_while_the_exchange_closes_is_not_carried_out(peers: Peers) -> None:
    exchange = peers.open("a")
    peers.stack.close()
    offer = manifests.describe(peers.run, "b", 0, 1, b"x", ())
    exchange._carry_out([Ask(), Ask("b"), offer])
    assert not exchange._asking


def test_manifests_sent_again_in_any_order_change_nothing(peers: Peers) -> None:
    """Also those of an earlier life, whose contents were others, and which come before those of this one."""
    a, b = peers.open("a"), peers.open("b", incarnation=2)
    both_ready(a, b)
    attacker, heard_of = peers.session(), list[tuple[str, bytes, bytes]]()
    earlier = peers.manifest("b", 2, b"of an earlier life")
    heard_of.append(("b/2", earlier, manifests.seal(peers.keys["b"], earlier)))
    listening = attacker.declare_subscriber(
        f"ftis/{peers.run}/man/*/*",
        lambda s: heard_of.append((str(s.key_expr)[-3:], s.payload.to_bytes(), (s.attachment or s.payload).to_bytes())),
    )
    peers.served.append(listening)
    shuffled = random.Random(0)
    for round in range(4):
        for key, document, seal in shuffled.choices(heard_of, k=50):
            peers.put(attacker, key, document, "b", seal)
        for collected, other in zip(one_round(peers, a, b, round), "ba", strict=True):
            assert (set(collected.messages), collected.late, reasons(collected)) == ({other}, (), set())


@pytest.mark.parametrize("life", [1, 2])
def test_one_key_in_two_places_is_told_to_everybody_and_holds_nobody_up(life: int, peers: Peers) -> None:
    """In the same life the two contradict each other. The later one of two lives is heard alone."""
    found = set[tuple[str, str]]()

    def say(who: str, event: Any) -> None:
        if event.what in ("twice", "equivocation"):
            found.add((who, event.what))

    everybody = [peers.open(name, say=partial(say, name)) for name in NAMES]
    again: dict[str, Any] = {"incarnation": life, "outbox": peers.place / "again.outbox"}
    everybody.append(peers.open("b", say=partial(say, "b again"), **again))
    both_ready(*everybody)
    for exchange in everybody:
        heard(exchange, lambda rounds: len(rounds.live) == 2)
    expected = {("b", "twice")}
    if life == 1:
        expected |= {("b again", "twice"), ("a", "equivocation"), ("eve", "equivocation")}
    for round in range(peers.recipe.training.rounds):
        collected = collected_by(peers, everybody, round, {3: peers.message("b", round) + b"otherwise"})
        assert all("eve" in one.messages for one in (collected[0], collected[1], collected[3]))
        give_up = time.monotonic() + 1  # on a busy machine, one of the two offers may come when the round is over
        while found != expected and time.monotonic() < give_up:
            time.sleep(0.02)
        if round and found == expected:
            break
    assert found == expected


def test_a_newcomer_meets_the_others_when_the_first_of_a_machine_was_killed(peers: Peers) -> None:
    a, b = two_ready(peers)
    a.session.close()  # type: ignore[no-untyped-call]
    eve = peers.open("eve")
    both_ready(eve, b)
    a = peers.open("a", incarnation=2)
    both_ready(a, eve, b)
    for exchange in (a, b, eve):
        heard(exchange, lambda rounds: len(rounds.live) == 2)
    for collected in collected_by(peers, (a, b, eve), 0):
        assert len(collected.messages) == 2


def test_a_session_that_breaks_while_it_opens_is_closed_and_one_line(peers: Peers, monkeypatch: Any) -> None:
    class Broken:
        closed = False

        def declare_queryable(self, *asked: Any, **options: Any) -> None:
            raise zenoh.ZError("the link broke")

        def close(self) -> None:
            self.closed = True

    broken = Broken()
    monkeypatch.setattr("ftis.swarm.link.open_session", lambda settings: broken)
    with pytest.raises(ExchangeError, match="the link broke"):
        peers.open("a")
    assert broken.closed


@pytest.mark.slow
def test_thirty_two_peers_hear_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = tuple(f"p{number}" for number in range(32))
    monkeypatch.setattr("test_network.NAMES", names)
    peers = Peers(tmp_path, deadline=120.0, start_seconds=60.0)
    with peers.stack:
        exchanges = [peers.open(name) for name in names]
        both_ready(*exchanges)
        for exchange, collected in zip(exchanges, collected_by(peers, exchanges, 0), strict=True):
            assert collected.messages == {n: peers.message(n, 0) for n in names if n != exchange.peer}


def tls(place: Path, name: str, port: int, listens: bool) -> dict[str, Any]:
    own, other = ("listen", "connect") if listens else ("connect", "listen")
    return {own: [f"tls/127.0.0.1:{port}"], other: [], **network_keys(place / name)}


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
            assert [status.peer for status in ask_status(session)] == ["a", "b"]
        foreign = tls(theirs, "eve", port, listens=False) | {"mode": "client"}
        for bad in (foreign, {"connect": [f"tcp/127.0.0.1:{port}"], "mode": "client"}):
            config = engine_config(NetworkConfig.model_validate(bad, strict=False))
            config.insert_json5("connect/timeout_ms", "1500")
            with pytest.raises(zenoh.ZError):
                zenoh.open(config)


def test_only_in_a_swarm_of_tls_endpoints_nobody_is_linked_without_it(tmp_path: Path) -> None:
    new_certificates(tmp_path, ["a"])
    settings = tls(tmp_path, "a", free_port(), True)
    (own,) = settings["listen"]
    for listen, protocols in (([], None), ([own], ["tls"]), ([own, "tcp/127.0.0.1:0"], None)):
        config = engine_config(NetworkConfig(**{**settings, "listen": listen}))
        assert json.loads(config.get_json("transport/link/protocols")) == protocols


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


def test_status_without_a_swarm_says_what_follows_a_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ftis.cli_swarm.NetworkConfig", lambda: NetworkConfig(port=free_port()))
    assert ftis("status", "--once") == 1
    said = capsys.readouterr().err
    assert ("ftis watch" in said, "tcp/" in said) == (True, False)


def test_a_peer_says_how_others_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftis.swarm.session.address", lambda: "192.0.2.7")
    for settings, said in (
        ({}, "--connect tcp/192.0.2.7:17447"),  # and what to listen at first
        ({"listen": ("tcp/127.0.0.1:7447",)}, "--listen tcp/0.0.0.0:7447"),
        ({"listen": ("tcp/0.0.0.0:7447",)}, "give --connect tcp/192.0.2.7:7447"),
        ({"listen": ("udp/[::]:9#x=1",)}, "give --connect udp/192.0.2.7:9"),
        ({"listen": ("tcp/node.example:7447",), "connect": ("tcp/h:1",)}, "give --connect tcp/node.example:7447"),
        ({"listen": ("unixpipe/x.pipe",)}, "unixpipe/x.pipe"),
        ({"connect": ("tcp/h:1",)}, "through tcp/h:1"),
        ({"mode": "client", "connect": ("tcp/h:1",)}, "through tcp/h:1"),
    ):
        (line,) = ways_in(NetworkConfig.model_validate(settings))
        assert said in line


def test_an_endpoint_without_its_protocol_or_port_is_refused_with_a_better_one() -> None:
    for key, endpoint, better in (
        ("connect", "127.0.0.1:17447", "tcp/127.0.0.1:17447"),
        ("listen", "0.0.0.0:7447", "tcp/0.0.0.0:7447"),
        ("connect", "tcp/host.example", "tcp/host.example:17447"),
        ("connect", "tcp://host:7447", "tcp/host:7447"),
        ("connect", "tls/host.example", "tls/host.example:17447"),
        ("connect", "tcp/host:7447 ", "tcp/host:7447"),
        ("listen", "[::1]:7447", "tcp/[::1]:7447"),
        *(("connect", bad, "in tcp/") for bad in ("::1", "tcp/fe80::1:7447", "tcp/h:123456", "tcp/h:x", "tcp/:1", "")),
    ):
        with pytest.raises(ExchangeError, match=re.escape(f"{key}: {endpoint!r} ") + ".*" + re.escape(better)):
            open_session(NetworkConfig().model_copy(update={key: (endpoint,)}))
    for endpoint in ("tcp/[::1]:7447", "udp/h:1", "tcp/127.0.0.1:1#exit_on_failure=false", "unixpipe/x.pipe"):
        check_endpoints(NetworkConfig(connect=(endpoint,)))


def test_status_says_where_each_peer_is_and_survives_nonsense(peers: Peers) -> None:
    a, b = two_ready(peers)
    one_round(peers, a, b)
    attacker = peers.session()
    claims: list[dict[str, Any]] = [
        {"peer": ["x"], "round": "far"},
        {"peer": "vast", "round": 10**300, "from": {"x": {"bytes": 10**400, "late": -3}}},
        {"peer": "idle", "seconds": {"waiting": -1, "sampling": "x", "evaluating": 10**400}},
        {"peer": "busy", "seconds": {"sampling": 3, "waiting": 1, "bragging": 9}},
        {"peer": "\x1b[2J", "name": "\x1b]0;x\x07", "live": ["\r[red]y"], "state": "\x1bc"},
    ]
    lies = [b"[1", b'"text"', b"[" * 50_000, *(json.dumps(claim).encode() for claim in claims)]

    def reply(query: zenoh.Query) -> None:
        with query:
            for lie in lies:
                query.reply("ftis/status/light/eve", lie)

    served = attacker.declare_queryable("ftis/status/light/eve", reply, complete=True)
    answered(attacker, "ftis/status/*/*", len(lies) + 2)
    said = [status for status in ask_status(attacker) if status.peer in NAMES]
    assert [(s.peer, s.round, s.live) for s in said] == [("a", 0, ["b"]), ("b", 0, ["a"])]
    out = StringIO()
    Console(file=out, width=200).print(status_table(ask_status(attacker)))
    shown = out.getvalue()
    assert all(part in " ".join(shown.split()) for part in ("[2J", "vast", "sampling 75%, waiting 25%"))
    assert "[red]y" not in shown
    assert not set(shown) & {"\x1b", "\x07", "\r"}
    served.undeclare()  # type: ignore[no-untyped-call]


def test_a_status_has_totals_of_all_rounds_and_reads_as_it_was_stated() -> None:
    status = Status("light", "0" * 32, "a")
    for reward in (0.5, 0.25):
        of_b = {"peer/b/admitted": 8, "peer/b/late": 1, "peer/b/honesty/quarantined": reward < 0.5}
        status.hear(RoundEnded({"step": 1, "reward": reward, "time/wait": 2.0, **of_b}))
    said = read_status(status.stated(["b"]).encode())
    assert said is not None
    assert said.keyed() == status.facts | {"live": ["b"]}
    assert said.seconds is not None
    assert said.sources is not None
    assert (said.reward, said.seconds["waiting"]) == (0.25, 4.0)
    assert said.sources["b"] == {"admitted": 16, "rejected": 0, "late": 2, "bytes": 0, "quarantined": 1}


def test_a_peer_that_samples_while_messages_arrive_is_sampling(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = two_ready(peers)
    b.publish(0, peers.message("b", 0))
    a.offer(Outgoing(0, peers.message("a", 0), ()))
    a._arriving.result()
    assert a.status.facts["state"] == "sampling", "the messages are there, and the peer has not asked for them"
    states: list[str] = []
    monkeypatch.setattr(a.status, "doing", states.append)
    assert a.collected() is not None
    assert states == ["collecting", "training"]
