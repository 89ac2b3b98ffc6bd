"""The protocol between peers as plain values: it decides when a round closes, and with whose messages.

No threads, no clock, no sockets. A transport passes in everything that it observes, the time (seconds of any steady
clock) included; every call returns the decisions that the transport then carries out::

    enter, catch_up            this peer takes part    -> Announce, NetworkEvent
    present, absent            another peer does       -> NetworkEvent, Ask
    offered, answered          manifests came          -> NetworkEvent
    collect, then poll         a round is awaited      -> Manifest, Ask, NetworkEvent, at last Collected
    fetched, corrupt           contents came, or junk

A round closes at the first of these:

- every peer that takes part has delivered;
- the missing peers are gone;
- the missing peers take too long beside the others (:mod:`ftis.swarm.pace`);
- the deadline.

The quorum counts against the roster, never against the peers that happen to be visible. Below it a peer follows the
recipe's ``below_quorum``, loudly. A transport with threads holds one lock around all calls; :mod:`ftis.swarm.link` is
such a transport.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from ftis.admission import Collected, Reason, Rejection
from ftis.config import NetworkConfig
from ftis.records.events import NetworkEvent
from ftis.swarm.facts import ExchangeError, Mismatch
from ftis.swarm.manifest import Assembly, Manifest
from ftis.swarm.offers import OfferCheck, Refusal
from ftis.swarm.others import Other
from ftis.swarm.outbox import KEYS, OUTBOX
from ftis.swarm.pace import Pace

GRACE_SECONDS = 1.0
"""Seconds for which a peer that has gone is still waited for: a link that broke may be back at once."""
CATCH_UP_SECONDS = 2.0
"""Seconds between two questions to everybody for manifests, while a round is awaited."""
NOTICE_SECONDS = 10.0
"""Seconds after which a waiting peer names again the peers that it waits for."""
KEEP_ROUNDS = 8
"""The fewest rounds for which a message stays on offer."""
MAX_REJECTIONS = 1000
"""Rejections kept per round of one peer for one reason. A flood of them thus hides no others."""
MAX_COMINGS = 8
"""The most reports in one round that a peer came or went."""
MOST_NAMES = 8
"""Peers that a sentence names; it counts the others."""
NOTICES = {
    Reason.FORGED: "an offer in the name of {peer} was not signed by its key and is refused; in an open swarm "
    f"{OUTBOX}/{KEYS} here holds the key that came first",
    Reason.EQUIVOCATION: "{peer} signed {detail}: neither counts, and it should run in one place only",
}
"""Sentences on refused offers, each said once for a peer."""
MAX_TOKENS = 64
"""Signs of presence kept per peer. They are not signed, so anybody may declare more."""


@dataclass(frozen=True)
class Announce:
    """Declare that this peer takes part from ``round`` on, and withdraw the declaration before."""

    round: int


@dataclass(frozen=True)
class Ask:
    """Ask ``peer`` (None: every peer) for the manifests it offers, and pass them to :meth:`Rounds.offered`."""

    peer: str | None = None


Decision = Announce | Ask | Manifest | NetworkEvent | Collected
"""A :class:`Manifest`: fetch its contents while :meth:`Rounds.wants` it, and end with :meth:`Rounds.fetched`. A
:class:`Collected`: the awaited round is over."""


class Rounds:
    """One peer's view of a run's rounds.

    Args:
        others: the names of all other peers.
        rounds: of the run.
        keep: rounds for which peers keep their messages on offer. It bounds the offers known of a peer that is ahead.

    Attributes:
        round, wanted: the round that is awaited, and the peers to hear.
    """

    def __init__(
        self, others: Collection[str], rounds: int, settings: NetworkConfig, check: OfferCheck, keep: int = KEEP_ROUNDS
    ) -> None:
        self.settings, self.check = settings, check
        self._others = {name: Other() for name in others}
        self._last_round = rounds - 1
        self._max_offers = 4 * keep
        self.round, self.wanted, self._since = 0, tuple[str, ...](), 0.0
        self._pace = Pace(settings.patience)
        self._first_round = 0
        self._entered = float("inf")
        self._announced = False
        self._noticed = self._asked = 0.0
        self._rejections: list[Rejection] = []
        self._rejected: Counter[tuple[str, Reason]] = Counter()
        self._notified: set[tuple[str, Reason]] = set()
        self._waited: dict[str, float] = {}
        self._mismatches: dict[str, Mismatch] = {}

    # --- asked by the transport -----------------------------------------------------------------------

    @property
    def live(self) -> list[str]:
        """The other peers that are present."""
        return [name for name, other in self._others.items() if other.live]

    @property
    def milliseconds(self) -> list[int]:
        """The statements of the present peers that the last round waited for."""
        stated = [self._others[name].milliseconds for name in self.live if name in self.wanted]
        return [milliseconds for milliseconds in stated if milliseconds]

    @property
    def met_all(self) -> bool:
        return all(other.met for other in self._others.values())

    @property
    def lock_step(self) -> bool:
        """Whether every round needs every peer, so that a peer that comes back continues at its own round."""
        return self.settings.quorum >= len(self._others) and self.settings.below_quorum != "alone"

    def may_leave(self) -> bool:
        """Whether no peer is left that may need this one's messages, once it has finished."""
        all_finished = all(other.has_finished(self._last_round) for other in self._others.values())
        return all_finished or not (self.lock_step or self.live)

    # --- taking part ------------------------------------------------------------------------------

    def enter(self, round: int, now: float) -> None:
        """This peer starts, or restarts, at ``round``. Before :meth:`catch_up`, ask everybody for manifests."""
        self._first_round, self._entered = round, now
        self._pace.began = now
        self.round, self._since = round, now  # so that older offers, which anybody can send again, are no news
        for other in self._others.values():
            other.forget_before(self._oldest)

    def catch_up(self, round: int) -> tuple[int, list[Decision]]:
        """The round to train next: ``round``, or a later one if the swarm has gone on without this peer.

        The swarm's round is the one that more than half of the other present peers have reached. A peer without any
        offer counts as being at the beginning. So no single peer moves the others by one signed offer.
        """
        target, decisions = max(round, min(self._swarm_round(round), self._last_round)), list[Decision]()
        if target != round:
            text = f"the others are at round {target + 1}: going on from there, not from {round + 1}"
            decisions.append(self._notice("behind", text))
            self._first_round = target
        if target != round or not self._announced:
            decisions.append(Announce(target))
        self._announced = True
        return target, decisions

    def silent(self, round: int) -> list[str]:
        """Peers without a known offer, to be heard before :meth:`catch_up`: the present ones or, if none is there, all.

        Silence is usual at the run's start: nobody is ahead then.
        """
        live = {name: other for name, other in self._others.items() if other.live} or self._others
        if round == 0 and all(other.newest <= 0 for other in live.values()):
            return []
        return [name for name, other in live.items() if other.newest < 0]

    def _swarm_round(self, round: int) -> int:
        """The round to continue at; ``round`` or an earlier one if nothing was missed."""
        live = [other for other in self._others.values() if other.live]
        reached = sorted(other.reached for other in live)
        there = reached[(len(reached) - 1) // 2] if live else -1
        if not self.lock_step:
            return there + 1 if there - round > self.settings.max_staleness else round
        # In lock-step the others wait at that round; this peer can join only if its own rounds are no longer needed.
        on_offer = [min(other.offers) for other in live if other.offers]
        lost = bool(on_offer) and min(on_offer) > round
        return there if lost and not self._announced else round

    # --- heard from the others ------------------------------------------------------------------------

    def present(self, peer: str, token: str, round: int) -> list[Decision]:
        """``peer`` declares, by the sign ``token``, that it takes part from ``round`` on.

        With a round after the run's last one, ``peer`` has finished, and stays for those who still need its messages.
        """
        other = self._others.get(peer)
        if other is None:
            return []
        other.met, other.gone_since = True, None
        if round > self._last_round:
            other.done = True
            if len(other.serving) < MAX_TOKENS:
                other.serving.add(token)
            return [Ask(peer)]
        came = not other.live
        if len(other.presence) < MAX_TOKENS:
            other.presence[token] = round
        return [*(self._came_or_went(other, "joined", f"{peer} is there") if came else []), Ask(peer)]

    def absent(self, peer: str, token: str, now: float) -> list[Decision]:
        """The sign ``token`` of ``peer`` is gone."""
        other = self._others.get(peer)
        if other is None:
            return []
        was_live = other.live
        other.presence.pop(token, None)
        other.serving.discard(token)
        if other.live:
            return [Ask(peer)]
        if not other.serving:
            other.gone_since = now
        if not was_live:
            return []
        if other.has_finished(self._last_round):
            return self._came_or_went(other, "finished", f"{peer} has finished")
        return self._came_or_went(other, "left", f"{peer} is gone")

    def _came_or_went(self, other: Other, what: str, text: str) -> list[Decision]:
        """A notice, few of one peer in a round: presence is not signed, and a flood of notices would fill disks."""
        other.comings += 1
        if other.comings > MAX_COMINGS:
            return []
        last = other.comings == MAX_COMINGS
        return [self._notice(what, text + ", and comes and goes: this round says no more of it" * last)]

    def offered(self, peer: str, round: int, document: bytes, seal: bytes, now: float) -> list[Decision]:
        """A manifest was found in the place of ``peer`` and ``round``; ``seal`` came with it."""
        if peer not in self._others:
            return []
        offer = self.check.read(peer, round, document, seal)
        if isinstance(offer, Refusal):
            return self._refuse(peer, offer)
        other = self._others[peer]
        known = other.offers.get(round)
        if known is not None and known.incarnation == offer.incarnation and known.contents != offer.contents:
            del other.offers[round]
            other.contents.pop(round, None)
            detail = f"two different offers for round {round + 1}"
            return self._refuse(peer, Refusal(Reason.EQUIVOCATION, detail, round, offer.incarnation))
        if round > other.newest:
            other.newest, other.milliseconds = round, offer.milliseconds
        if is_news := self._is_news(other, offer, known):
            other.offers[round] = offer
            other.refused.pop(round, None)
            self._pace.heard.setdefault((peer, round), now)
        if is_news or round < self._oldest:
            self._pace.offered(peer, round, now, too_late=not is_news)
        return []

    def _is_news(self, other: Other, offer: Manifest, known: Manifest | None) -> bool:
        if offer.round < self._oldest or offer.round in other.taken:
            return False
        if offer.incarnation <= other.refused.get(offer.round, -1):
            return False
        if known is not None:
            return offer.incarnation > known.incarnation and offer.contents != known.contents
        if len(other.offers) >= self._max_offers:
            least = max((*other.offers, offer.round), key=lambda place: self._needed_after(other, place))
            if least == offer.round:
                return False
            del other.offers[least]
            self._pace.forget(offer.peer, least)
        return True

    def _needed_after(self, other: Other, round: int) -> tuple[bool, bool, int]:
        """A sort key of a peer's offers: the awaited round first, then later ones, late ones, taken ones."""
        return round in other.taken, round < self.round, abs(round - self.round)

    def _refuse(self, peer: str, refusal: Refusal) -> list[Decision]:
        if refusal.round is not None:
            refused = self._others[peer].refused
            refused[refusal.round] = max(refusal.incarnation, refused.get(refusal.round, 0))
        self._reject(peer, refusal.reason, refusal.detail)
        text = NOTICES.get(refusal.reason)
        if text is None or (peer, refusal.reason) in self._notified:
            return []
        self._notified.add((peer, refusal.reason))
        return [self._notice(str(refusal.reason), text.format(peer=peer, detail=refusal.detail))]

    def _reject(self, peer: str, reason: Reason, detail: str) -> None:
        self._rejected[peer, reason] += 1
        if self._rejected[peer, reason] <= MAX_REJECTIONS:
            self._rejections.append(Rejection(peer, reason, None, detail))

    def answered(self, peer: str, rounds: Collection[int]) -> None:
        """``peer`` answered with offers for ``rounds``."""
        if peer in self._others:
            self._others[peer].answered = frozenset(rounds)

    def mismatched(self, peer: str, differs: Mismatch) -> list[Decision]:
        """``peer`` means another run by the recipe; ``differs`` has the differences."""
        if peer not in self._others or peer in self._mismatches:
            return []
        self._mismatches[peer] = differs
        return [self._notice("mismatch", differs.of([peer]))]

    # --- contents ---------------------------------------------------------------------------------

    def wants(self, offer: Manifest) -> bool:
        """Whether ``offer`` still stands and is not too old."""
        return self._others[offer.peer].offers.get(offer.round) == offer and offer.round >= self._oldest

    def corrupt(self, offer: Manifest) -> None:
        """Stop waiting for an offer: the contents that came are not the signed ones."""
        other = self._others[offer.peer]
        if offer.round not in other.corrupt:
            other.corrupt.add(offer.round)
            detail = f"round {offer.round + 1}: contents that came are not what was signed"
            self._reject(offer.peer, Reason.CORRUPT, detail)

    def fetched(self, assembly: Assembly) -> None:
        """A fetch has ended, with all chunks or without."""
        offer, contents = assembly.offer, assembly.contents()
        other = self._others[offer.peer]
        other.fetching.discard(offer.round)
        if contents is not None and other.offers.get(offer.round) == offer:
            other.contents[offer.round] = contents
            self._pace.came_later(offer.peer, offer.round)

    # --- closing a round --------------------------------------------------------------------------

    def collect(self, round: int, now: float, skip: Collection[str] = (), offers_only: Collection[str] = ()) -> None:
        """Await ``round`` from now on; :meth:`ftis.swarm.link.NetworkExchange.collect` has the arguments."""
        self.round, self.wanted = round, tuple(name for name in self._others if name not in skip)
        self._since = self._noticed = self._asked = now
        self._waited = {}
        self._pace.start(now, self._oldest)
        for name in offers_only:
            if name in self._others:
                self._others[name].offers_only.add(round)

    def poll(self, now: float) -> list[Decision]:
        """The next decisions about the awaited round. The round is over once its messages are among the decisions.

        Call it again after anything was heard, and now and then without: deadlines pass silently.

        Raises:
            ExchangeError: below the quorum, and the recipe says stop; or nobody came because all mean another run.
        """
        decisions = self._fetches()
        waiting = self._waiting_for(now, decisions)
        self._waited |= dict.fromkeys(waiting, now - self._since)
        if not waiting:
            return [*decisions, self._take()]
        if now - self._noticed > NOTICE_SECONDS:
            self._noticed = now
            who = f"waiting for {self._in_words(waiting, now)}, {now - self._since:.0f} s so far"
            decisions.append(self._of_round("waiting", who + self._remedy(waiting)))
        if now - self._asked > CATCH_UP_SECONDS:
            self._asked = now
            decisions.append(Ask())
        return decisions

    @property
    def _oldest(self) -> int:
        """The earliest round whose messages may still be learned from."""
        return self.round - self.settings.max_staleness

    def _fetches(self) -> list[Decision]:
        """One fetch at a time per peer, this round's first. It may begin while a late one is under way."""
        oldest, fetches = max(self._oldest, self._first_round), list[Decision]()
        for name in self.wanted:
            other = self._others[name]
            done = other.contents.keys() | other.taken | other.refused.keys() | other.offers_only
            due = [round for round in other.offers if oldest <= round <= self.round and round not in done]
            self._pace.asked.update((name, round) for round in due)
            newest = max(due, default=-1)
            if due and newest not in other.fetching and (not other.fetching or newest == self.round):
                other.fetching.add(newest)
                fetches.append(other.offers[newest])
        return fetches

    def _waiting_for(self, now: float, decisions: list[Decision]) -> list[str]:
        """The peers still waited for. Without any the round closes, and ``decisions`` names the missing ones."""
        round, wanted = self.round, self.wanted
        delivered = [name for name in wanted if self._others[name].has_delivered(round)]
        for name in delivered:
            self._pace.delivered(name, round, now)
        if len(delivered) == len(self._others):
            self._end_of_round(now, [], decisions)
            return []
        undelivered = [name for name in wanted if name not in delivered]
        missing = [name for name in undelivered if round not in self._others[name].refused]
        past = [name for name in missing if self._others[name].is_past(round)]
        through = [name for name in missing if name in past or self._has_left_behind(self._others[name])]
        # Whoever was refused still counts: nobody brings a peer to train alone by spoiling the others' offers.
        # So does a present peer that is set aside, else the round would stay open for one that is gone.
        aside = [name for name in self._others if name not in wanted]
        present = sum(self._others[name].live for name in aside)
        is_quorum = len(delivered) >= min(self.settings.quorum - present, len(wanted) - len(through))
        expected = [name for name in missing if name not in past and self._is_expected(name, now)]
        in_time = [name for name in expected if not (is_quorum and self._is_late(name, expected, now))]
        if in_time and now - self._since <= self.settings.deadline:
            return in_time
        if not is_quorum:
            if self._waits_below_quorum(len(delivered), undelivered, now):
                return undelivered
            decisions.append(self._of_round("alone", f"going on alone, missing: {self._in_words(undelivered)}"))
        if through:
            decisions.append(self._of_round("finished", f"without {', '.join(through)}, who finished it before"))
        if len(delivered) + len(aside) >= self.settings.quorum > len(delivered):
            who = ", ".join(aside)
            decisions.append(self._of_round("aside", f"closed with fewer than the quorum: {who} set aside"))
        if expected:
            why = self._reason(expected, now)
            decisions.append(self._of_round("deadline", f"closed {why} without {', '.join(expected)}"))
        self._end_of_round(now, [name for name in expected if self._others[name].met], decisions)
        return []

    def _is_late(self, name: str, expected: Collection[str], now: float) -> bool:
        """Whether a peer takes too long beside those that have delivered."""
        met = [other for other in expected if self._others[other].met]
        return name in met and now > self._pace.end(name, len(met))

    def _reason(self, late: Collection[str], now: float) -> str:
        """The reason to close a round without these."""
        if now - self._since > self.settings.deadline:
            return "at its deadline"
        return f"after {now - self._pace.began:.1f} s (median {self._pace.median(len(late)) or 0:.1f} s)"

    def _end_of_round(self, now: float, late: Collection[str], decisions: list[Decision]) -> None:
        """Note who was late, and name the peers that are waited for no longer or again."""
        self._pace.close(self.round, late, now)
        for name, again in self._pace.changes:
            how = "waited for again, after rounds in time" if again else "not waited for any longer: often late"
            decisions.append(self._of_round("pace", f"{name} is {how}"))
        self._pace.changes.clear()

    def _has_left_behind(self, other: Other) -> bool:
        """Whether it will not come back to this round: it has finished, or is further ahead than anybody waits.

        Its offer may still be known although nobody holds the contents any more, as after this peer was asleep.
        """
        far = not self.lock_step and other.newest > self.round + self.settings.max_staleness
        return far or (other.has_finished(self._last_round) and not other.serves(self.round))

    def _waits_below_quorum(self, delivered: int, undelivered: list[str], now: float) -> bool:
        """Whether the round stays open below the quorum, or goes on without the others."""
        if self.settings.below_quorum == "stop":
            raise ExchangeError(
                f"round {self.round + 1}: {delivered} of {self.settings.quorum} peers needed delivered "
                f'(missing: {self._in_words(undelivered)}), and network.below_quorum = "stop": see whether they run, '
                f"then start again with --resume"
            )
        met_nobody = not any(other.met for other in self._others.values())
        if met_nobody and self._mismatches and not self._is_starting(now):
            alike: dict[Mismatch, list[str]] = {}
            for peer, differs in self._mismatches.items():
                alike.setdefault(differs, []).append(peer)
            raise ExchangeError("; ".join(differs.of(peers) for differs, peers in alike.items()))
        return self.settings.below_quorum == "wait"

    def _is_starting(self, now: float) -> bool:
        return now - self._entered < self.settings.start_seconds

    def _is_expected(self, name: str, now: float) -> bool:
        """Whether a peer that has not delivered is worth waiting for."""
        round, other = self.round, self._others[name]
        if not other.met:
            return self._is_starting(now)
        self._pace.seen.setdefault(name, now)
        if not self._pace.waits_for(name) or round in other.corrupt:
            return False
        if other.live:
            return min(other.presence.values()) <= round
        if other.serves(round) or (other.serving and not other.answered):  # its offers may not be known yet
            return True
        return other.gone_since is not None and now - other.gone_since < GRACE_SECONDS

    def _take(self) -> Collected:
        round, wanted = self.round, self.wanted
        messages, offered_only = dict[str, bytes](), dict[str, int]()
        late, missing = list[tuple[str, int, bytes]](), list[str]()
        for name, other in self._others.items():
            has_delivered = other.has_delivered(round)
            for of_round in sorted(found for found in other.contents if found <= round):
                data = other.contents.pop(of_round)
                other.taken.add(of_round)
                if name in wanted and of_round == round:
                    messages[name] = data
                elif name in wanted and of_round >= max(self._oldest, self._first_round):
                    late.append((name, of_round, data))
            if name in wanted and round in other.offers_only and has_delivered:
                offered_only[name] = len(other.offers[round].items)
            elif name not in messages:
                missing.append(name)
            other.forget_before(self._oldest)
            other.comings = 0
        rejections, self._rejections = tuple(self._rejections), []
        self._rejected.clear()
        waited = {name: self._waited.get(name, 0.0) for name in wanted}
        return Collected(messages, tuple(missing), tuple(late), offered_only, rejections, waited)

    def _in_words(self, names: Collection[str], now: float | None = None) -> str:
        """Peers with their states, and with ``now`` how long they have been gone."""
        each = [f"{name} ({self._state(name, now)})" for name in names]
        return ", ".join(each[:MOST_NAMES]) + f" and {len(each) - MOST_NAMES} more" * (len(each) > MOST_NAMES)

    def _remedy(self, names: Collection[str]) -> str:
        """The remedy for peers without a sign; empty if all are present."""
        unseen = [name for name in names if not (self._others[name].met or name in self._mismatches)]
        gone = [name for name in names if self._others[name].gone_since is not None]
        refused = [name for name in names if self.round in self._others[name].refused]
        twice = [name for name in refused if (name, Reason.EQUIVOCATION) in self._notified]
        remedies = (
            (unseen, "start {}, or check on both sides who listens and connects where"),
            (gone, "start {} again there with --resume, or mend the connection"),
            (twice, "run each of {} in one place only, and start it again there with --resume"),
        )
        return "".join("; " + remedy.format(", ".join(peers)) for peers, remedy in remedies if peers)

    def _state(self, name: str, now: float | None = None) -> str:
        other = self._others[name]
        if not other.met and name in self._mismatches:
            return "means another run"
        state, since = other.state(self.round), other.gone_since
        return state if state != "gone" or now is None or since is None else f"gone for {now - since:.0f} s"

    def _notice(self, what: str, text: str) -> NetworkEvent:
        return NetworkEvent(what, text, self.round)

    def _of_round(self, what: str, text: str) -> NetworkEvent:
        return self._notice(what, f"round {self.round + 1}: {text}")
