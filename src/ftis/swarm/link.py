"""The exchange between machines, on eclipse-zenoh: small signed manifests are pushed, contents are fetched.

Keys, all under ``ftis/``::

    <run>/live/<peer>/<incarnation>/<round>   a liveliness token: this peer takes part from that round on
    <run>/man/<peer>/<round>                  its manifest of a round, the signature as attachment
    <run>/blob/<peer>/<round>/<chunk>         256 KiB of that round's message
    facts/<recipe's name>/<peer>              what it means by the recipe, to name what differs
    status/<recipe's name>/<peer>             what it is doing, for ``ftis status``

``<run>`` is the digest of what the peers must agree on, so nothing of another run is ever met. A round closes when
every peer that takes part has delivered; or when those that have not are gone; or at the deadline. It closes against
the roster, never against who happens to be visible: with fewer than the quorum of others it does what the recipe's
``below_quorum`` says, loudly. No round depends on a clock on the wall.

The engine retries, encrypts and finds; signatures say whose rollouts they are. See docs/wire.md and
docs/threat-model.md for what holds and what does not.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import zenoh
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ftis.admission import Reason, Rejection
from ftis.config import NetworkConfig, Recipe
from ftis.events import NetworkEvent, Say, unheard
from ftis.exchange import Collected, ExchangeError, Stopped
from ftis.swarm import manifest as manifests
from ftis.swarm.identity import Roster, public_hex
from ftis.swarm.manifest import Manifest, ManifestError

GRACE_SECONDS = 1.0
"""A peer whose token went away may be back at once (a link that broke); for so long it is waited for."""
KEEP_ROUNDS = 8
"""Rounds that a message stays on offer, at least."""
CATCH_UP_SECONDS = 2.0
FACTS_SECONDS = 2.0
GET_SECONDS = 20.0
CHUNKS_IN_FLIGHT = 8
BAD_CHUNKS = 3
"""So often may nothing but other contents than those signed for come for a chunk before the peer is not waited for."""
STRIKES = 2
"""A peer that lets so many deadlines pass in a row is not waited for until it delivers again."""
NOTICE_SECONDS = 10.0
PENDING_ANSWERS = 256
MAX_FACTS_BYTES = 64 * 1024

BLOCK = zenoh.CongestionControl.BLOCK
"""The default drops what does not fit a queue, which on a busy link is most of a large message."""


def engine_config(settings: NetworkConfig) -> zenoh.Config:
    """The engine's settings; docs/wire.md has the reasons."""
    config = zenoh.Config()
    local = [f"tcp/127.0.0.1:{settings.port}"]
    on_one_machine = not settings.listen and not settings.connect
    # The first peer of a machine gets the port that the others look for; each also has one of its own, so that they
    # are linked with each other and go on when the first one dies.
    listen = [f"{local[0]}#exit_on_failure=false", "tcp/127.0.0.1:0"] if on_one_machine else list(settings.listen)
    values: dict[str, Any] = {
        "mode": settings.mode,
        "listen/endpoints": listen if settings.mode != "client" else [],
        "listen/exit_on_failure": not on_one_machine,
        "connect/endpoints": local if on_one_machine else list(settings.connect),
        "connect/timeout_ms": 15_000 if settings.mode == "client" else -1,
        "connect/exit_on_failure": settings.mode == "client",
        # A peer that comes back is met within a second, not within the default's four.
        "connect/retry": {"period_init_ms": 200, "period_max_ms": 1000, "period_increase_factor": 2},
        "scouting/multicast/enabled": False,
        "transport/shared_memory/enabled": False,
        "timestamping/enabled": True,
        "transport/link/rx/max_message_size": 8 * 1024 * 1024,
        "transport/link/tx/lease": 10_000,
        # Microseconds for which a full queue blocks before the link is closed.
        "transport/link/tx/queue/congestion_control/block/wait_before_close": 30_000_000,
    }
    if settings.tls_certificate is not None:
        values |= {
            "transport/link/tls/root_ca_certificate": settings.tls_authority,
            "transport/link/tls/listen_certificate": settings.tls_certificate,
            "transport/link/tls/listen_private_key": settings.tls_key,
            "transport/link/tls/connect_certificate": settings.tls_certificate,
            "transport/link/tls/connect_private_key": settings.tls_key,
            "transport/link/tls/enable_mtls": True,
            # The authority is the swarm's own and a peer's address changes: membership is what counts.
            "transport/link/tls/verify_name_on_connect": False,
        }
    for key, value in values.items():
        config.insert_json5(key, json.dumps(value))
    return config


def open_session(settings: NetworkConfig) -> zenoh.Session:
    """
    Raises:
        ExchangeError: an endpoint cannot be listened on or reached, or a certificate cannot be read.
    """
    for file in (settings.tls_authority, settings.tls_certificate, settings.tls_key):
        if file is not None and not Path(file).is_file():
            raise ExchangeError(f"no certificate or key at {file}: ftis keys certs makes them")
    try:
        return zenoh.open(engine_config(settings))
    except zenoh.ZError as error:
        where = ", ".join((*settings.listen, *settings.connect)) or f"tcp/127.0.0.1:{settings.port}"
        reason = re.sub(r"\s+at /\S+", "", str(error).splitlines()[0]).rstrip(". ")  # places in the engine's source
        raise ExchangeError(
            f"no network at {where} ({reason}): check the addresses (tcp/host:port), certificates and who listens"
        ) from None


@dataclass
class Outbox:
    """This peer's own messages, as files, so that a killed peer still offers what it offered before."""

    directory: Path
    keep: int
    manifests: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    """By round: the manifest and its signature."""
    newest: tuple[int, bytes] = (-1, b"")
    """The latest round and its message: what all others ask for at once comes from memory."""

    def write(self, round: int, data: bytes) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        partial = self.path(round).with_suffix(".partial")
        partial.write_bytes(data)
        partial.replace(self.path(round))

    def forget_before(self, round: int) -> None:
        for old in [r for r in self.manifests if r < round]:
            del self.manifests[old]
        for path in self.directory.glob("*.ftis"):
            if path.stem.isdecimal() and int(path.stem) < round:
                path.unlink(missing_ok=True)

    def rounds(self) -> list[int]:
        return sorted(int(path.stem) for path in self.directory.glob("*.ftis") if path.stem.isdecimal())

    def chunk(self, round: int, index: int) -> bytes:
        """Empty where there is none."""
        at = index * manifests.CHUNK_BYTES
        newest, data = self.newest
        if round == newest:
            return data[at : at + manifests.CHUNK_BYTES]
        try:
            with self.path(round).open("rb") as file:
                file.seek(at)
                return file.read(manifests.CHUNK_BYTES)
        except OSError:
            return b""

    def path(self, round: int) -> Path:
        return self.directory / f"{round:06d}.ftis"


@dataclass
class _Sender:
    """What is known of one other peer. Guarded by the exchange's lock."""

    tokens: dict[str, int] = field(default_factory=dict)
    """Key of each of its liveliness tokens -> the round from which on it takes part."""
    gone_since: float | None = None
    seen: bool = False
    offers: dict[int, Manifest] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)
    """Rounds whose offer contradicts another one that it signed too, or that cannot be what it says."""
    corrupt: set[int] = field(default_factory=set)
    """Rounds for which other contents than those signed for came. Asked for again, since anybody may have sent them."""
    contents: dict[int, bytes] = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)
    unread: set[int] = field(default_factory=set)
    """Rounds of which only the offer is wanted."""
    fetching: int | None = None
    answered: frozenset[int] = frozenset()
    """The rounds it offered when it was last asked."""
    strikes: int = 0
    newest: int = -1

    def live(self) -> bool:
        return bool(self.tokens)

    def has_delivered(self, round: int) -> bool:
        return round in (self.offers if round in self.unread else self.contents)


class NetworkExchange:
    """One peer's end of the exchange between machines.

    Args:
        facts: :func:`ftis.config.agreement`'s, with the tokenizer's fingerprint.
        run: their digest.
        roster: public keys by name; None in an open swarm, where whoever takes a name first keeps it.
        max_bytes: of one message.
        max_items: groups of one message.
        outbox: a directory of this peer's own.
        incarnation: how often this peer has been started.
        should_stop: asked while waiting.
        say: told what happens, as events with a ``text`` for people.
    """

    def __init__(
        self,
        recipe: Recipe,
        peer: str,
        *,
        run: str,
        facts: Mapping[str, Any],
        key: Ed25519PrivateKey,
        roster: Roster | None,
        max_bytes: int,
        max_items: int,
        outbox: Path,
        incarnation: int,
        should_stop: Callable[[], bool] = lambda: False,
        say: Say = unheard,
    ) -> None:
        self.settings, self.recipe, self.peer = recipe.network, recipe, peer
        self.run, self.facts, self.incarnation = run, dict(facts), incarnation
        self.others = tuple(p.name for p in recipe.peers if p.name != peer)
        self.max_bytes, self.max_items = max_bytes, max_items
        self.outbox = Outbox(outbox, max(KEEP_ROUNDS, recipe.training.save_every + 2))
        self.status: dict[str, Any] = {"peer": peer, "run": run, "name": recipe.name, "state": "starting"}
        self._key = key
        self._roster = dict(roster) if roster is not None else None
        self._first_keys: dict[str, str] = {}
        self._should_stop, self._say = should_stop, say
        self._changed = threading.Condition()
        self._senders = {name: _Sender() for name in self.others}
        self._rejections: list[Rejection] = []
        self._mismatches: dict[str, str] = {}
        self._asking: set[str] = set()
        self._forgeries: set[str] = set()
        self._round, self._first_round = 0, 0
        self._token: zenoh.LivelinessToken | None = None
        self._closing = threading.Event()
        self._began = float("inf")
        self._last_round = recipe.training.rounds - 1

    @property
    def lock_step(self) -> bool:
        """Whether every round needs every peer, so that one that comes back takes up where it was."""
        return self.settings.quorum >= len(self.others) and self.settings.below_quorum != "alone"

    # --- opening and closing ----------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._session = open_session(self.settings)
        a_thread_each = max(1, len(self.others))  # so that no peer's fetch waits for another's
        self._fetchers = ThreadPoolExecutor(a_thread_each, thread_name_prefix="fetch")
        self._answers = ThreadPoolExecutor(4, thread_name_prefix="answer")
        self._pending_answers = threading.Semaphore(PENDING_ANSWERS)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="outbox")
        self._stored: Future[None] = Future()
        self._stored.set_result(None)
        base = f"ftis/{self.run}"
        answer = self._session.declare_queryable
        self._declared: list[zenoh.Queryable[None] | zenoh.Subscriber[None]] = [
            answer(f"{base}/blob/{self.peer}/*/*", self._answering(self._answer_blob), complete=True),
            answer(f"{base}/man/{self.peer}/*", self._answering(self._answer_manifests), complete=True),
            answer(f"ftis/facts/{self.recipe.name}/{self.peer}", self._answering(self._answer_facts), complete=True),
            answer(f"ftis/status/{self.recipe.name}/{self.peer}", self._answering(self._answer_status), complete=True),
            self._session.declare_subscriber(
                f"{base}/man/*/*", self._on_manifest, allowed_origin=zenoh.Locality.REMOTE
            ),
            self._session.liveliness().declare_subscriber(f"{base}/live/**", self._on_live, history=True),
        ]
        self._watcher = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._token is not None:
            self._token.undeclare()  # type: ignore[no-untyped-call]
        if kind is None:
            self._linger()
        self._closing.set()
        self._fetchers.shutdown(wait=False, cancel_futures=True)
        for declared in self._declared:
            declared.undeclare()  # type: ignore[no-untyped-call]
        self._watcher.join(timeout=5)
        self._answers.shutdown(wait=False, cancel_futures=True)
        self._writer.shutdown(wait=True)
        self._session.close()  # type: ignore[no-untyped-call]

    def _linger(self) -> None:
        """Having left the swarm, serve the last rounds to those who still are in it, or may come back to it."""
        give_up = time.monotonic() + self.settings.deadline
        self.status["state"] = "finished"
        with self._changed:
            while not self._should_stop() and time.monotonic() < give_up:
                senders = self._senders.values()
                if all(self._has_finished(s) for s in senders):
                    return
                if not self.lock_step and not any(s.live() for s in senders):
                    return
                self._changed.wait(timeout=0.1)

    # --- the Exchange protocol --------------------------------------------------------------------

    def catch_up(self, round: int) -> int:
        """The round to train next: ``round``, or a later one if the swarm has gone on without this peer.

        The swarm is where more than half of the other live peers are, so that one of them cannot carry it off. From
        here on this peer's presence counts, and rounds wait for it.
        """
        if self._token is None:
            self._first_round, self._began = round, time.monotonic()
            self._offer_again(round)
            self._ask_for_manifests("*", GRACE_SECONDS)
        target = max(round, min(self._where_the_swarm_is(round), self._last_round))
        if self._token is None or target != round:
            if target != round:
                self._tell("behind", f"the others are at round {target}: going on from there, not from {round}")
                self._first_round = target
            old = self._token
            key = f"ftis/{self.run}/live/{self.peer}/{self.incarnation}/{target}"
            self._token = self._session.liveliness().declare_token(key)
            if old is not None:
                old.undeclare()  # type: ignore[no-untyped-call]
        self.status |= {"state": "sampling", "round": target, "rounds": self.recipe.training.rounds}
        return target

    def _where_the_swarm_is(self, round: int) -> int:
        """The round to take up instead of ``round``, or an earlier one if there is no need to."""
        with self._changed:
            live = [sender for sender in self._senders.values() if sender.live() and sender.newest >= 0]
            reached = sorted(sender.newest for sender in live)
            offered = [min(sender.offers) for sender in live if sender.offers]
        if not reached:
            return round
        there = reached[(len(reached) - 1) // 2]
        if self.lock_step:  # they wait at that round, unless this one can still be made up for
            return there if offered and min(offered) > round and self._token is None else round
        return there + 1 if there - round > self.settings.max_staleness else round

    def publish(self, round: int, data: bytes, items: Collection[int] = ()) -> None:
        """Offer this peer's message; the same round again replaces it."""
        self._stored.result()
        self.outbox.newest = round, data
        self._offer(round, data, tuple(sorted(items)))
        self.outbox.forget_before(round - self.outbox.keep)
        document, signature = self.outbox.manifests[round]
        self._put_manifest(round, document, signature)
        self._stored = self._writer.submit(self.outbox.write, round, data)  # the others need not wait for the disk
        self.status["bytes_offered"] = self.status.get("bytes_offered", 0) + len(data)

    def collect(self, round: int, without: Collection[str] = (), unread: Collection[str] = ()) -> Collected:
        """The others' messages for ``round`` and late ones of rounds before.

        Args:
            without: peers that are neither waited for nor heard.
            unread: peers whose offers are waited for, and whose contents are not fetched.

        Raises:
            Stopped: asked to.
            ExchangeError: below the quorum, and the recipe says stop; or nobody came because all mean another run.
        """
        began = time.monotonic()
        wanted = [name for name in self.others if name not in without]
        self.status["state"] = "collecting"
        noticed = began
        asked = began
        with self._changed:
            self._round = round
            for name in self.others:
                self._senders[name].unread |= {round} if name in unread else set()
            while True:
                if self._should_stop():
                    raise Stopped
                now = time.monotonic()
                self._start_fetches(round, wanted)
                verdict, waiting = self._may_close(round, wanted, now, began)
                if verdict:
                    break
                if now - noticed > NOTICE_SECONDS:
                    noticed = now
                    self._tell("waiting", f"round {round}: waiting for {self._in_words(waiting, round)}")
                if now - asked > CATCH_UP_SECONDS:
                    asked = now
                    self._ask_soon("*")
                self._changed.wait(timeout=0.05)
            collected = self._take(round, wanted)
        self._stored.result()  # before this peer learns from the round, so that it can be killed from here on
        self.status["state"] = "training"
        return collected

    # --- closing a round --------------------------------------------------------------------------

    def _may_close(self, round: int, wanted: list[str], now: float, began: float) -> tuple[bool, list[str]]:
        """Whether the round may close, and who is still waited for."""
        delivered = [name for name in wanted if self._senders[name].has_delivered(round)]
        missing = [name for name in wanted if name not in delivered and round not in self._senders[name].refused]
        if len(delivered) == len(self.others):
            return True, []
        starting = now - self._began < self.settings.start_seconds
        past = [name for name in missing if self._is_past(self._senders[name], round)]
        expected = [
            name
            for name in missing
            if name not in past and self._is_expected(self._senders[name], round, now, starting)
        ]
        at_deadline = now - began > self.settings.deadline
        if expected and not at_deadline:
            return False, expected
        through = [name for name in missing if name in past or self._has_finished(self._senders[name])]
        # Whoever was refused still counts: nobody brings a peer to train alone by spoiling the others' offers.
        if len(delivered) < min(self.settings.quorum, len(wanted) - len(through)):
            missing = [name for name in wanted if name not in delivered]
            words = self._in_words(missing, round)
            if self.settings.below_quorum == "stop":
                raise ExchangeError(
                    f"round {round}: {len(delivered)} of {self.settings.quorum} peers needed delivered (missing: "
                    f'{words}), and network.below_quorum = "stop": see whether they run, then start again with --resume'
                )
            if not any(s.seen for s in self._senders.values()) and self._mismatches and not starting:
                raise ExchangeError("; ".join(self._mismatches.values()))
            if self.settings.below_quorum == "wait":
                return False, missing
            self._tell("alone", f"round {round}: going on alone, missing: {words}")
        if through:
            self._tell("finished", f"round {round}: without {', '.join(through)}, who went through it before")
        aside = [name for name in self.others if name not in wanted]
        if len(delivered) + len(aside) >= self.settings.quorum > len(delivered):
            self._tell("aside", f"round {round}: below the quorum without {', '.join(aside)}, set aside for rejections")
        for name in expected:
            self._senders[name].strikes += 1
        if expected:
            self._tell("deadline", f"round {round}: closed at its deadline without {', '.join(expected)}")
        return True, []

    def _has_finished(self, sender: _Sender) -> bool:
        """Whether a peer was through with the last round when it left."""
        return sender.seen and not sender.live() and sender.newest == self._last_round

    def _is_past(self, sender: _Sender, round: int) -> bool:
        """Whether a peer is beyond the round and no longer offers it."""
        return (
            sender.newest > round
            and round not in sender.offers
            and max(sender.answered, default=-1) > round
            and round not in sender.answered
        )

    def _is_expected(self, sender: _Sender, round: int, now: float, starting: bool) -> bool:
        """Whether a peer that has not delivered is worth waiting for."""
        if not sender.seen:
            return starting
        if sender.strikes >= STRIKES or round in sender.corrupt:
            return False
        if sender.live():
            return min(sender.tokens.values()) <= round
        return sender.gone_since is not None and now - sender.gone_since < GRACE_SECONDS

    def _take(self, round: int, wanted: list[str]) -> Collected:
        messages: dict[str, bytes] = {}
        late: list[tuple[str, bytes]] = []
        missing: list[str] = []
        unread: list[str] = []
        oldest = max(round - self.settings.max_staleness, self._first_round)
        for name in self.others:
            sender = self._senders[name]
            for of in sorted(sender.contents):
                if of > round:
                    continue
                data = sender.contents.pop(of)
                sender.taken.add(of)
                if name in wanted and of == round:
                    messages[name] = data
                elif name in wanted and of >= oldest:
                    late.append((name, data))
            if name in wanted and round in sender.unread and sender.has_delivered(round):
                unread.append(name)
            elif name not in messages:
                missing.append(name)
            for old in [r for r in sender.offers if r < round - self.settings.max_staleness]:
                del sender.offers[old]
            sender.taken = {r for r in sender.taken if r >= round - self.settings.max_staleness}
            sender.refused = {r for r in sender.refused if r >= round - self.settings.max_staleness}
            sender.corrupt = {r for r in sender.corrupt if r >= round - self.settings.max_staleness}
            sender.unread = {r for r in sender.unread if r >= round - self.settings.max_staleness}
        rejections, self._rejections = tuple(self._rejections), []
        return Collected(messages, tuple(missing), tuple(late), tuple(unread), rejections)

    def _in_words(self, names: Collection[str], round: int) -> str:
        said = []
        for name in names:
            sender = self._senders[name]
            state = "not seen yet" if not sender.seen else "sampling" if sender.live() else "gone"
            if round in sender.offers:
                state = "being fetched"
            if round in sender.refused | sender.corrupt:
                state = "refused"
            said.append(f"{name} ({state})")
        return ", ".join(said)

    # --- hearing from the others ------------------------------------------------------------------

    def _on_live(self, sample: zenoh.Sample) -> None:
        parts = str(sample.key_expr).split("/")
        if len(parts) != 6 or not parts[5].isdecimal() or len(parts[5]) > 9 or parts[3] not in self._senders:
            return
        key, name, since = str(sample.key_expr), parts[3], int(parts[5])
        with self._changed:
            sender = self._senders[name]
            before = sender.live()
            if sample.kind == zenoh.SampleKind.PUT:
                if len(sender.tokens) < 64:
                    sender.tokens[key] = since
                sender.seen, sender.gone_since, sender.strikes = True, None, 0
            else:
                sender.tokens.pop(key, None)
                if not sender.tokens:
                    sender.gone_since = time.monotonic()
            self._changed.notify_all()
            after = sender.live()
        if after != before:
            self._tell("joined" if after else "left", f"{name} {'is there' if after else 'is gone'}")
        if after:
            self._ask_soon(name)

    def _on_manifest(self, sample: zenoh.Sample) -> None:
        attachment = sample.attachment.to_bytes() if sample.attachment is not None else b""
        self._judge_manifest(str(sample.key_expr), sample.payload.to_bytes(), attachment)

    def _judge_manifest(self, key: str, data: bytes, attachment: bytes) -> None:
        """Remember a manifest that is a peer's own, of this run, and new. ``attachment``: public key and signature."""
        name = key.split("/")[3] if key.count("/") >= 4 else ""
        if name not in self._senders:
            return
        public, signature = attachment[:32].hex(), attachment[32:]
        if len(data) > manifests.MAX_BYTES:
            return self._reject(name, Reason.OVER_BUDGET, f"a manifest of {len(data)} bytes")
        genuine = manifests.signed_by(public, data, signature)
        with self._changed:
            if self._roster is not None:
                known = self._roster.get(name, "")
            else:  # open swarm: the first key to sign for a name keeps it
                known = self._first_keys.setdefault(name, public) if genuine else self._first_keys.get(name, "")
        if not genuine or public != known:
            if name not in self._forgeries:
                self._forgeries.add(name)
                self._tell("forged", f"an offer in the name of {name} was not signed by its key and is refused")
            return self._reject(name, Reason.FORGED, f"a manifest that {name!r} did not sign")
        try:
            offer = manifests.parse(data)
        except ManifestError as error:
            return self._reject(name, Reason.MALFORMED, str(error))
        if offer.peer != name or offer.run != self.run or key.rpartition("/")[2] != str(offer.round):
            return self._reject(name, Reason.WRONG_SENDER, f"a manifest of {offer.peer!r} for another place: {key}")
        if offer.round > self._last_round:
            return self._reject(name, Reason.WRONG_ROUND, f"round {offer.round} of {self.recipe.training.rounds}")
        if offer.size > self.max_bytes or len(offer.items) > self.max_items:
            self._refuse(name, offer.round)
            detail = f"{offer.size} bytes and {len(offer.items)} groups, at most {self.max_bytes} and {self.max_items}"
            return self._reject(name, Reason.OVER_BUDGET, detail)
        with self._changed:
            sender = self._senders[name]
            known_offer = sender.offers.get(offer.round)
            same_life = known_offer is not None and known_offer.incarnation == offer.incarnation
            if known_offer is not None and same_life and known_offer.contents != offer.contents:
                sender.offers.pop(offer.round)
                sender.contents.pop(offer.round, None)
                sender.refused.add(offer.round)
                self._reject(name, Reason.EQUIVOCATION, f"two different offers for round {offer.round}")
            elif self._is_news(sender, offer, known_offer):
                sender.offers[offer.round] = offer
                sender.newest = max(sender.newest, offer.round)
                sender.strikes = 0
            self._changed.notify_all()

    def _is_news(self, sender: _Sender, offer: Manifest, known: Manifest | None) -> bool:
        oldest = self._round - self.settings.max_staleness
        if offer.round < oldest or offer.round in sender.taken | sender.refused:
            sender.newest = max(sender.newest, offer.round)
            return False
        if known is not None:
            return offer.incarnation > known.incarnation and offer.contents != known.contents
        if len(sender.offers) >= 4 * self.outbox.keep:  # a peer far ahead: what this one needs next comes first
            furthest = max(sender.offers)
            if offer.round > furthest:
                return False
            del sender.offers[furthest]
        return True

    def _refuse(self, name: str, round: int) -> None:
        with self._changed:
            self._senders[name].refused.add(round)
            self._changed.notify_all()

    def _reject(self, name: str, reason: Reason, detail: str) -> None:
        with self._changed:
            if len(self._rejections) < 1000:
                self._rejections.append(Rejection(name, reason, None, detail))
            self._changed.notify_all()

    # --- fetching ---------------------------------------------------------------------------------

    def _start_fetches(self, round: int, wanted: list[str]) -> None:
        """One fetch at a time per peer, this round's before late ones. Called with the lock held."""
        oldest = max(round - self.settings.max_staleness, self._first_round)
        for name in wanted:
            sender = self._senders[name]
            if sender.fetching is not None:
                continue
            due = [
                of
                for of in sender.offers
                if oldest <= of <= round
                and of not in sender.contents
                and of not in sender.taken | sender.refused | sender.unread
            ]
            if due:
                sender.fetching = max(due)
                self._fetchers.submit(self._fetch, name, sender.offers[max(due)])

    def _fetch(self, name: str, offer: Manifest) -> None:
        """Fetch an offer's chunks until they are all there or it is not wanted."""
        found: dict[int, bytes] = {}
        bad: dict[int, int] = {}
        pause = 0.05
        while len(found) < len(offer.chunks) and self._is_wanted(name, offer):
            missing = [i for i in range(len(offer.chunks)) if i not in found]
            try:
                progress = self._fetch_chunks(name, offer, missing, found, bad)
            except zenoh.ZError:  # the session closes, or the link broke: the next try finds out
                progress = False
            if max(bad.values(), default=0) >= BAD_CHUNKS:
                bad.clear()
                self._note_corrupt(name, offer.round)
            if not progress:
                self._closing.wait(pause)
                pause = min(2 * pause, 1.0)
        with self._changed:
            sender = self._senders[name]
            sender.fetching = None
            if len(found) == len(offer.chunks) and sender.offers.get(offer.round) == offer:
                sender.contents[offer.round] = b"".join(found[i] for i in range(len(offer.chunks)))
                sender.strikes = 0
            self._changed.notify_all()

    def _note_corrupt(self, name: str, round: int) -> None:
        with self._changed:
            known = round in self._senders[name].corrupt
            self._senders[name].corrupt.add(round)
        if not known:
            self._reject(name, Reason.CORRUPT, f"round {round}: contents that came are not what was signed")

    def _is_wanted(self, name: str, offer: Manifest) -> bool:
        with self._changed:
            stands = self._senders[name].offers.get(offer.round) == offer
            return stands and offer.round >= self._round - self.settings.max_staleness and not self._closing.is_set()

    def _fetch_chunks(
        self, name: str, offer: Manifest, indices: list[int], found: dict[int, bytes], bad: dict[int, int]
    ) -> bool:
        """Ask for these chunks, always so many at a time, up to the first that does not come; whether any came."""
        ahead = iter(indices)
        asked = deque((index, self._get_chunk(name, offer, index)) for index in islice(ahead, CHUNKS_IN_FLIGHT))
        progress = False
        while asked:
            index, replies = asked.popleft()
            junk = False
            for reply in replies:
                if reply.ok is None:
                    continue
                data = reply.ok.payload.to_bytes()
                right_size = len(data) == manifests.chunk_size(offer, index)
                if right_size and manifests.digest(data) == offer.chunks[index]:
                    found[index] = data
                    progress = True
                    break
                junk = True
            if junk and index not in found:  # junk beside the truth does no harm: anybody may answer
                bad[index] = bad.get(index, 0) + 1
            if index not in found or not self._is_wanted(name, offer):
                ahead = iter(())
            asked.extend((after, self._get_chunk(name, offer, after)) for after in islice(ahead, 1))
        return progress

    def _get_chunk(self, name: str, offer: Manifest, index: int) -> Iterable[zenoh.Reply]:
        return _ask_everybody(self._session, f"ftis/{self.run}/blob/{name}/{offer.round}/{index}", GET_SECONDS)

    def _ask_soon(self, name: str) -> None:
        """Ask in the background, once at a time."""
        with self._changed:
            if name in self._asking or self._closing.is_set():
                return
            self._asking.add(name)
        self._answers.submit(self._ask_and_forget, name)

    def _ask_and_forget(self, name: str) -> None:
        try:
            self._ask_for_manifests(name, CATCH_UP_SECONDS)
        finally:
            with self._changed:
                self._asking.discard(name)

    def _ask_for_manifests(self, name: str, seconds: float) -> None:
        """Manifests that were pushed before this peer was there to hear, or that were lost."""
        try:
            replies = _ask_everybody(self._session, f"ftis/{self.run}/man/{name}/*", seconds, zenoh.Locality.REMOTE)
            answered: dict[str, set[int]] = {}
            for reply in replies:
                if reply.ok is None:
                    continue
                self._on_manifest(reply.ok)
                *_, of, round = str(reply.ok.key_expr).split("/")
                if of in self._senders and round.isdecimal() and len(round) <= 9:
                    answered.setdefault(of, set()).add(int(round))
            with self._changed:
                for of, rounds in answered.items():
                    self._senders[of].answered = frozenset(rounds)
        except zenoh.ZError:
            return  # closing, or no link for a moment: asked again soon

    def _offer_again(self, round: int) -> None:
        """Offer what was offered before this peer was stopped. What it will do again may come out otherwise."""
        for old in self.outbox.rounds():
            if old < round:
                self._offer(old, self.outbox.path(old).read_bytes(), ())
            else:
                self.outbox.path(old).unlink(missing_ok=True)

    # --- answering --------------------------------------------------------------------------------

    def _offer(self, round: int, data: bytes, items: tuple[int, ...]) -> None:
        offer = manifests.describe(self.run, self.peer, round, self.incarnation, data, items)
        document = manifests.to_bytes(offer)
        signature = bytes.fromhex(public_hex(self._key)) + manifests.sign(self._key, document)
        self.outbox.manifests[round] = document, signature

    def _put_manifest(self, round: int, document: bytes, signature: bytes) -> None:
        key = f"ftis/{self.run}/man/{self.peer}/{round}"
        self._session.put(key, document, attachment=signature, congestion_control=BLOCK, express=True)

    def _answering(self, answer: Callable[[zenoh.Query], None]) -> Callable[[zenoh.Query], None]:
        """Answer from a pool: a slow reader must not hold up the engine's own thread, nor queries pile up."""

        def work(query: zenoh.Query) -> None:
            try:
                with query:
                    answer(query)
            except zenoh.ZError:
                pass  # whoever asked is gone
            finally:
                self._pending_answers.release()

        def take(query: zenoh.Query) -> None:
            if self._closing.is_set() or not self._pending_answers.acquire(blocking=False):
                query.drop()  # type: ignore[no-untyped-call]
                return
            try:
                self._answers.submit(work, query)
            except RuntimeError:  # shut down meanwhile
                self._pending_answers.release()
                query.drop()  # type: ignore[no-untyped-call]

        return take

    def _answer_blob(self, query: zenoh.Query) -> None:
        *_, round, index = str(query.key_expr).split("/")
        chunk = b""
        if round.isdecimal() and index.isdecimal() and int(round) in self.outbox.manifests:
            chunk = self.outbox.chunk(int(round), int(index))
        if chunk:
            query.reply(query.key_expr, chunk)
        else:
            query.reply_err("absent")

    def _answer_manifests(self, query: zenoh.Query) -> None:
        for round, (document, signature) in sorted(self.outbox.manifests.items()):
            query.reply(f"ftis/{self.run}/man/{self.peer}/{round}", document, attachment=signature)

    def _answer_facts(self, query: zenoh.Query) -> None:
        query.reply(f"ftis/facts/{self.recipe.name}/{self.peer}", json.dumps(self.facts))

    def _answer_status(self, query: zenoh.Query) -> None:
        with self._changed:
            live = [name for name, sender in self._senders.items() if sender.live()]
        status = {**self.status, "live": live, "incarnation": self.incarnation}
        query.reply(f"ftis/status/{self.recipe.name}/{self.peer}", json.dumps(status))

    # --- what differs -----------------------------------------------------------------------------

    def _watch(self) -> None:
        """Now and then compare what the peers of this recipe's name mean by it, until all have been met."""
        while not self._closing.wait(FACTS_SECONDS):
            if all(sender.seen for sender in self._senders.values()):
                continue
            try:
                facts_of_all = f"ftis/facts/{self.recipe.name}/*"
                for reply in _ask_everybody(self._session, facts_of_all, FACTS_SECONDS, zenoh.Locality.REMOTE):
                    if reply.ok is not None:
                        self._compare_facts(str(reply.ok.key_expr).rpartition("/")[2], _json_object(reply.ok.payload))
            except zenoh.ZError:
                continue

    def _compare_facts(self, name: str, theirs: dict[str, Any] | None) -> None:
        if name not in self._senders or name in self._mismatches or theirs is None:
            return
        differing = sorted(k for k in self.facts.keys() | theirs.keys() if self.facts.get(k) != theirs.get(k))
        if differing:
            shown = "; ".join(
                f"{_short(k)}: {_short(self.facts.get(k))} here, {_short(theirs.get(k))} there" for k in differing[:10]
            )
            text = f"{name} means another run by {self.recipe.name!r} and is not heard ({shown})"
            self._mismatches[name] = text
            self._tell("mismatch", text)

    def _tell(self, what: str, text: str) -> None:
        self._say(NetworkEvent(what, text, self._round))


def _short(value: Any) -> str:
    """A stranger's word, fit to be printed."""
    text = value if isinstance(value, str) else json.dumps(value)
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return text if len(text) <= 40 else f"{text[:28]}… ({hashlib.sha256(text.encode()).hexdigest()[:8]})"


def ask_status(session: zenoh.Session, seconds: float = 1.0) -> list[dict[str, Any]]:
    """What each reachable peer, of whatever run, says it is doing."""
    replies = _ask_everybody(session, "ftis/status/*/*", seconds)
    found = [_json_object(reply.ok.payload) for reply in replies if reply.ok is not None]
    statuses = [status for status in found if status is not None]
    return sorted(statuses, key=lambda status: (str(status.get("name")), str(status.get("peer"))))


def _ask_everybody(
    session: zenoh.Session, key: str, seconds: float, where: zenoh.Locality = zenoh.Locality.ANY
) -> Iterable[zenoh.Reply]:
    """Every answer, also to the same key: one that lies must not take the place of one that does not."""
    return session.get(
        key,
        target=zenoh.QueryTarget.ALL,
        consolidation=zenoh.ConsolidationMode.NONE,
        congestion_control=BLOCK,
        timeout=seconds,
        allowed_destination=where,
    )


def _json_object(payload: zenoh.ZBytes) -> dict[str, Any] | None:
    """What a stranger says, if it is a JSON object of a size to be read."""
    if len(payload) > MAX_FACTS_BYTES:
        return None
    try:
        found = json.loads(payload.to_bytes())
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
