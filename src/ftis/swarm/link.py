"""The exchange between machines, on eclipse-zenoh: small signed manifests are pushed, contents are fetched.

Keys, all under ``ftis/``::

    <run>/live/<peer>/<incarnation>/<round>   a liveliness token: this peer takes part from that round on; if the run
                                              has no such round, it has finished, and still serves its messages
    <run>/man/<peer>/<round>                  its manifest of a round, the seal as attachment
    <run>/blob/<peer>/<round>/<chunk>         256 KiB of that round's message
    facts/<recipe's name>/<peer>              its reading of the recipe, to name a difference
    status/<recipe's name>/<peer>             its state, for ``ftis status``

``<run>`` is the digest of the peers' agreement, so peers of different runs never meet. :mod:`ftis.swarm.rounds`
decides when a round closes, and this module carries its decisions out. The engine finds peers, retries and
encrypts; signatures tell whose rollouts they are. See docs/wire.md, and docs/threat-model.md for the limits.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import zenoh
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ftis.admission import Collected
from ftis.config import Recipe, first_line
from ftis.machine.resources import in_background
from ftis.member import Outgoing
from ftis.records.events import Event, NetworkEvent, RoundEnded, Say, Stopped, unheard
from ftis.swarm import manifest as manifests
from ftis.swarm.facts import ExchangeError, mismatch, other_code, read_facts
from ftis.swarm.identity import Roster
from ftis.swarm.manifest import Assembly, Manifest
from ftis.swarm.offers import OfferCheck
from ftis.swarm.outbox import Outbox
from ftis.swarm.rounds import CATCH_UP_SECONDS, GRACE_SECONDS, KEEP_ROUNDS, Announce, Ask, Decision, Rounds
from ftis.swarm.session import BLOCK, Question, key_of, open_session
from ftis.swarm.shares import Share
from ftis.swarm.status import Status

FACTS_SECONDS = 2.0
GET_SECONDS = 20.0
POLL_SECONDS = 0.05
"""Seconds between two looks of a waiting peer at the clock."""
CHUNKS_IN_FLIGHT = 8
ANSWERING, PENDING_ANSWERS = 4, 256
"""Threads that answer the others' questions, and the most questions that wait for one."""


@dataclass
class Fetching:
    """The fetching of an offer, some chunks at a time.

    Attributes:
        asked: the questions that are not over, by chunk.
        pause: seconds until the next question after one that brought no chunk.
        again: the time of that question.
    """

    assembly: Assembly
    asked: dict[int, Question] = field(default_factory=dict)
    pause: float = 0.05
    again: float = 0.0


class NetworkExchange:
    """One peer's end of the exchange between machines.

    Args:
        run: the digest of all that the peers must agree on.
        facts: the values behind that digest: :func:`ftis.swarm.facts.agreement`, the roster and the tokenizer.
        roster, max_bytes, max_items: as :class:`~ftis.swarm.offers.OfferCheck` has them.
        incarnation: how often this peer has been started.
        say: hears events with a ``text`` for people. Called from several threads.
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
        self.recipe, self.peer, self.run, self.incarnation = recipe, peer, run, incarnation
        self.facts = dict(facts)
        self.others = tuple(p.name for p in recipe.peers if p.name != peer)
        # A message stays on offer for longer than a peer that resumes from its checkpoint goes back.
        keep = max(KEEP_ROUNDS, recipe.training.save_every + 2)
        self.outbox = Outbox(outbox, keep, run, peer, incarnation, key)
        check = OfferCheck(run, recipe.training.rounds, roster, max_bytes, max_items, self.outbox.first_keys)
        self.rounds = Rounds(self.others, recipe.training.rounds, recipe.network, check, keep)
        self.share = Share(peer, recipe.prompts_per_peer, recipe.most_prompts_per_peer, recipe.rollouts_per_group)
        self.changed = threading.Condition()
        """The lock of ``rounds``, notified after anything was heard."""
        self.status = Status(recipe.name, run, peer)
        self._should_stop, self._say = should_stop, say
        self.session: zenoh.Session  # from ``__enter__`` on
        self._arriving: Future[Collected | None]  # from :meth:`offer` on
        self._declared: list[zenoh.Queryable[None] | zenoh.Subscriber[None]] = []
        self._answers = ThreadPoolExecutor(ANSWERING, thread_name_prefix="answer")
        self._pending_answers = threading.Semaphore(PENDING_ANSWERS)
        self._asking: set[str | None] = set()
        self._fetching: list[Fetching] = []
        self._news = 0
        self._compared = float("-inf")
        self._code_of: set[str] = set()
        self._entered = False
        self._is_alone = True
        self._token: zenoh.LivelinessToken | None = None
        self._since: int | None = None
        self._closing = threading.Event()

    # --- opening and closing ----------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.session = open_session(self.recipe.network)
        tokens, offers = f"ftis/{self.run}/live/**", f"ftis/{self.run}/man/*/*"
        try:
            self._declared = [
                self._answer(f"ftis/{self.run}/blob/{self.peer}/*/*", self._answer_blob),
                self._answer(f"ftis/{self.run}/man/{self.peer}/*", self._answer_manifests),
                self._answer(key_of("facts", self.recipe.name, self.peer), self._answer_facts),
                self._answer(key_of("status", self.recipe.name, self.peer), self._answer_status),
                self.session.declare_subscriber(offers, self._hear_manifest, allowed_origin=zenoh.Locality.REMOTE),
                self.session.liveliness().declare_subscriber(tokens, self._hear_token, history=True),
            ]
        except zenoh.ZError as error:
            self.session.close()  # type: ignore[no-untyped-call]
            raise ExchangeError(f"the network closed during its opening ({first_line(error)}): try again") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        last = self.recipe.training.rounds - 1
        has_finished = kind is None and last in self.outbox.signed and not self._should_stop()
        self._announce(last + 1 if has_finished else None)
        if kind is None:
            self._linger()
        self._announce(None)
        self._closing.set()
        for declared in self._declared:
            declared.undeclare()  # type: ignore[no-untyped-call]
        self._answers.shutdown(wait=False, cancel_futures=True)
        self.session.close()  # type: ignore[no-untyped-call]

    def _linger(self) -> None:
        """Serve the last rounds, for ``deadline`` seconds at most, to those who still need them or may come back."""
        give_up = time.monotonic() + self.recipe.network.deadline
        self.status.doing("finished")
        with self.changed:
            while not (self.rounds.may_leave() or self._should_stop() or time.monotonic() >= give_up):
                self.changed.wait(timeout=2 * POLL_SECONDS)

    # --- a round's messages -----------------------------------------------------------------------

    def exchange(self, outgoing: Outgoing) -> Collected | None:
        """Offer this peer's message of a round, and wait for the others'. None if asked to stop meanwhile.

        Raises:
            ExchangeError: the round cannot be closed.
        """
        return self._wait_for(partial(self._offer_and_collect, outgoing))

    def offer(self, outgoing: Outgoing) -> None:
        """Begin an exchange in a thread of its own, so that the peer can sample meanwhile."""
        self._arriving = in_background(partial(self._offer_and_collect, outgoing), "exchange")

    def collected(self) -> Collected | None:
        """Wait for the messages of the exchange that :meth:`offer` began, as :meth:`exchange`."""
        return self._wait_for(self._arriving.result)

    def _wait_for(self, messages: Callable[[], Collected | None]) -> Collected | None:
        self.status.doing("collecting")
        collected = messages()
        self.status.doing("training")
        return collected

    def _offer_and_collect(self, outgoing: Outgoing) -> Collected | None:
        with suppress(Stopped):
            if not self._should_stop():
                self.publish(outgoing.round, outgoing.message, outgoing.items)
                return self.collect(outgoing.round, outgoing.skip, outgoing.offers_only)
        return None

    def catch_up(self, round: int) -> int:
        """The round to train next; from here on this peer is present, and rounds wait for it."""
        if not self._entered:
            self._entered = True
            with self.changed:
                self.rounds.enter(round, time.monotonic())
            self.outbox.offer_again(round)
            self._compare_facts()
            self._hear_where_the_others_are(round, time.monotonic() + 2 * GRACE_SECONDS)
        with self.changed:
            target, decisions = self.rounds.catch_up(round)
        self._carry_out(decisions)
        self.status.doing("sampling", round=target, rounds=self.recipe.training.rounds)
        return target

    def hear(self, event: Event) -> None:
        """Pass an event of this peer on to ``say`` and its status, and the end of a round to its share of prompts."""
        self._say(event)
        self.status.hear(event)
        if isinstance(event, RoundEnded):
            self.share.took(event.metrics)

    def own_share(self, round: int) -> int:
        """Number of prompts that this peer samples in a round."""
        if self.share.is_equal:
            return self.share.equal
        with self.changed:
            stated = self.rounds.milliseconds
        return self.outbox.prompts(round, self.share.prompts(stated))

    def _hear_where_the_others_are(self, round: int, until: float) -> None:
        """Ask until the rounds of all present peers are known. A new link answers the first question with nothing.

        A peer that does not know them would wait for rounds that the others have left behind.
        """
        while time.monotonic() < until and not self._should_stop():
            self._ask(None, GRACE_SECONDS)
            with self.changed:
                self.changed.wait_for(lambda: None not in self._asking, GRACE_SECONDS)
                if not self.rounds.silent(round):
                    return
            self._closing.wait(POLL_SECONDS)

    def publish(self, round: int, data: bytes, items: Collection[int] = ()) -> None:
        """Offer this peer's message; the same round again replaces it."""
        document, seal = self.outbox.offer(round, data, tuple(sorted(items)), self.share.milliseconds)
        key = f"ftis/{self.run}/man/{self.peer}/{round}"
        self.session.put(key, document, attachment=seal, congestion_control=BLOCK, express=True)
        self.outbox.write(round, data)  # last: the others need not wait for the disk

    def collect(self, round: int, skip: Collection[str] = (), offers_only: Collection[str] = ()) -> Collected:
        """The others' messages for ``round`` and late ones of rounds before; :class:`Outgoing` has the arguments.

        Raises:
            Stopped: asked to stop while waiting, or closed by another thread.
            ExchangeError: the round cannot be closed.
        """
        with self.changed:
            self.rounds.collect(round, time.monotonic(), skip, offers_only)
        while (collected := self._poll()) is None:
            pass
        return collected

    def _poll(self) -> Collected | None:
        """Carry out the due decisions, or wait a moment for news; the round's messages once it is closed."""
        if self._should_stop() or self._closing.is_set():
            raise Stopped
        known = self._news
        self._compare_facts()
        self._fetching = [fetching for fetching in self._fetching if self._fetch_on(fetching)]
        with self.changed:
            decisions = self.rounds.poll(time.monotonic())
            if not decisions:
                self.changed.wait_for(lambda: self._news != known, POLL_SECONDS)
        self._carry_out(decisions)
        return next((decision for decision in decisions if isinstance(decision, Collected)), None)

    def _tell(self) -> None:
        """Wake the peer that waits: something was heard."""
        with self.changed:
            self._news += 1
            self.changed.notify_all()

    # --- carrying out the rounds' decisions -------------------------------------------------------

    def _carry_out(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            match decision:  # collected messages are collect's to return
                case NetworkEvent():
                    self._say(decision)
                case Announce(round):
                    self._announce(round)
                case Ask(peer):
                    self._ask(peer, CATCH_UP_SECONDS)
                case Manifest():
                    self._fetching.append(Fetching(Assembly(decision)))

    def _announce(self, round: int | None) -> None:
        """Declare that this peer takes part from ``round`` on, instead of what it declared before; None: it leaves."""
        if round == self._since:
            return
        before, self._token, self._since = self._token, None, round
        if round is not None:
            key = f"ftis/{self.run}/live/{self.peer}/{self.incarnation}/{round}"
            self._token = self.session.liveliness().declare_token(key)
        if before is not None:
            before.undeclare()  # type: ignore[no-untyped-call]

    def _ask(self, peer: str | None, seconds: float) -> None:
        """Ask for manifests that were pushed before this peer was there to hear, or that were lost.

        Nobody waits for the answers. There is one question at a time for each peer.
        """
        answered: dict[str, set[int]] = {}

        def hear(sample: zenoh.Sample) -> bool:
            self._hear_manifest(sample)
            sender, round = _peer_and_round(str(sample.key_expr))
            if sender in self.others and round >= 0:
                answered.setdefault(sender, set()).add(round)
            return False

        def over() -> None:
            with self.changed:
                for sender, rounds in answered.items():
                    self.rounds.answered(sender, rounds)
                self._asking.discard(peer)
            self._tell()

        with self.changed:
            if peer in self._asking:
                return
            self._asking.add(peer)
        try:
            Question(self.session, f"ftis/{self.run}/man/{peer or '*'}/*", seconds, hear, over)
        except zenoh.ZError:  # closing, or no link for a moment: asked again soon
            over()

    # --- fetching ---------------------------------------------------------------------------------

    def _fetch_on(self, fetching: Fetching) -> bool:
        """Ask for more of an offer's chunks. Returns False once all are there or the offer is not wanted."""
        assembly, asked, now = fetching.assembly, fetching.asked, time.monotonic()
        over = [index for index, question in asked.items() if question.over]
        failed = sum(map(assembly.over, over)) < len(over)
        for index in over:
            del asked[index]
        with self.changed:
            if assembly.spoiled:
                self.rounds.corrupt(assembly.offer)
            missing = [index for index in assembly.missing() if index not in asked]
            if not (missing or asked) or not self.rounds.wants(assembly.offer):
                self.rounds.fetched(assembly)
                return False
        if now < fetching.again:
            return True
        try:
            for index in missing[: 0 if failed else CHUNKS_IN_FLIGHT - len(asked)]:
                asked[index] = self._ask_chunk(assembly, index)
        except zenoh.ZError:  # the session closes, or the link broke: the next try finds out
            failed = True
        if failed:
            fetching.again, fetching.pause = now + fetching.pause, min(2 * fetching.pause, 1.0)
        return True

    def _ask_chunk(self, assembly: Assembly, index: int) -> Question:
        key = f"ftis/{self.run}/blob/{assembly.offer.peer}/{assembly.offer.round}/{index}"

        def hear(sample: zenoh.Sample) -> bool:
            return assembly.hear(index, sample.payload.to_bytes())

        return Question(self.session, key, GET_SECONDS, hear, self._tell)

    # --- hearing from the others ------------------------------------------------------------------

    def _hear_token(self, sample: zenoh.Sample) -> None:
        token = str(sample.key_expr)
        parts = token.split("/")
        if len(parts) != 6 or (since := _round_in(parts[5])) < 0:
            return
        with self.changed:
            if sample.kind == zenoh.SampleKind.PUT:
                decisions = self.rounds.present(parts[3], token, since)
            else:
                decisions = self.rounds.absent(parts[3], token, time.monotonic())
        self._tell()
        self._carry_out(decisions)

    def _hear_manifest(self, sample: zenoh.Sample) -> None:
        peer, round = _peer_and_round(str(sample.key_expr))
        seal = sample.attachment.to_bytes() if sample.attachment is not None else b""
        if peer == self.peer and self._is_alone and len(sample.payload) <= manifests.MAX_BYTES:
            if self.outbox.is_signed_elsewhere(sample.payload.to_bytes(), seal):
                how = "stop one of them, since others refuse messages that differ"
                with self.changed:
                    was_alone, self._is_alone = self._is_alone, False
                if was_alone:
                    self._say(NetworkEvent("twice", f"the key of {peer} signs at two places: {how}", round))
            return
        with self.changed:
            decisions = self.rounds.offered(peer, round, sample.payload.to_bytes(), seal, time.monotonic())
            self.outbox.keep_keys()
        self._tell()
        self._carry_out(decisions)

    def _compare_facts(self) -> None:
        """Now and then compare the peers' readings of this recipe, until all have been met."""
        now = time.monotonic()
        may_differ = self.recipe.network.allow_other_code and not self._code_of.issuperset(self.others)
        if now - self._compared < FACTS_SECONDS or (self.rounds.met_all and not may_differ):
            return
        self._compared = now
        with suppress(zenoh.ZError):
            Question(self.session, key_of("facts", self.recipe.name), FACTS_SECONDS, self._hear_facts, self._tell)

    def _hear_facts(self, sample: zenoh.Sample) -> bool:
        theirs, peer = read_facts(sample.payload.to_bytes()), str(sample.key_expr).rpartition("/")[2]
        if theirs is None or peer not in self.others:
            return False
        differs, decisions = mismatch(self.recipe.name, self.facts, theirs), list[Decision]()
        with self.changed:
            if differs is not None:
                decisions = self.rounds.mismatched(peer, differs)
            elif peer not in self._code_of:
                self._code_of.add(peer)
                if code := other_code(self.facts, theirs):
                    text = f"{peer} has other code, as network.allow_other_code permits ({code})"
                    decisions.append(NetworkEvent("code", text, self.status.facts.get("round", 0)))
        self._carry_out(decisions)
        return False

    # --- answering --------------------------------------------------------------------------------

    def _answer(self, key: str, answer: Callable[[zenoh.Query], None]) -> zenoh.Queryable[None]:
        """Answer from a pool: a slow reader must not hold up the engine's own thread, nor queries pile up."""

        def work(query: zenoh.Query) -> None:
            try:
                with query:
                    answer(query)
            except zenoh.ZError:
                pass  # the asker is gone
            finally:
                self._pending_answers.release()

        def take(query: zenoh.Query) -> None:
            if self._pending_answers.acquire(blocking=False):
                with suppress(RuntimeError):  # the exchange closes, and the pool takes no more
                    self._answers.submit(work, query)
                    return
                self._pending_answers.release()
            query.drop()  # type: ignore[no-untyped-call]

        return self.session.declare_queryable(key, take, complete=True)

    def _answer_blob(self, query: zenoh.Query) -> None:
        *_, round, index = str(query.key_expr).split("/")
        chunk = self.outbox.chunk(int(round), int(index)) if round.isdecimal() and index.isdecimal() else b""
        if chunk:
            query.reply(query.key_expr, chunk)
        else:
            query.reply_err("absent")

    def _answer_manifests(self, query: zenoh.Query) -> None:
        for round, (document, seal) in sorted(self.outbox.signed.items()):
            query.reply(f"ftis/{self.run}/man/{self.peer}/{round}", document, attachment=seal)

    def _answer_facts(self, query: zenoh.Query) -> None:
        query.reply(key_of("facts", self.recipe.name, self.peer), json.dumps(self.facts))

    def _answer_status(self, query: zenoh.Query) -> None:
        with self.changed:
            live = self.rounds.live
        query.reply(key_of("status", self.recipe.name, self.peer), self.status.stated(live))


def _peer_and_round(key: str) -> tuple[str, int]:
    """Peer and round of a key that ends in ``<peer>/<round>``; round -1 if it is none."""
    *_, peer, round = ["", "", *key.split("/")]
    return peer, _round_in(round)


def _round_in(text: str) -> int:
    """The round that ``text`` writes in its one way; -1 for anything else."""
    return int(text) if text.isdecimal() and len(text) <= 9 and str(int(text)) == text else -1
