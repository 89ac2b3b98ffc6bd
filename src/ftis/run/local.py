"""Exchanges for peers on one machine: alone, in threads that take turns, or in processes that share a directory.

Every peer of a machine delivers in every round, so these exchanges wait for peers in ``skip`` too; the peer itself
rejects their messages.

All peers of a swarm stop after the same round: one that has published waits for the others even when asked to stop, and
gives the round up only if somebody has left without publishing. Nobody can finish such a round.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ftis.exchange import Collected, Exchange, Stopped
from ftis.records.files import InUseError, locked, write_whole

POLL_SECONDS = 0.005
SECONDS_BETWEEN_TRIES = 0.02
"""To take a core: asking for one takes a tenth of a millisecond of somebody else's."""
KEEP_ROUNDS = 2
"""Published rounds kept besides the current one, for a peer that has not collected them yet."""


class AloneExchange:
    """The exchange of a peer that trains alone."""

    def catch_up(self, round: int) -> int:
        return round

    def publish(self, round: int, data: bytes, items: Collection[int] = ()) -> None:
        pass

    def collect(self, round: int, skip: Collection[str] = (), offers_only: Collection[str] = ()) -> Collected:
        return Collected({})


class Hub:
    """The in-process exchange. Peers run in threads and take turns: one computes while the others wait.

    So only one peer's activations are in memory at a time, and that peer has all of the machine's cores.

    Args:
        after_turn: called before a peer's turn ends, so while no other works.
    """

    def __init__(self, roster: tuple[str, ...], after_turn: Callable[[], None] = lambda: None) -> None:
        self.roster = roster
        self.turn, self.after_turn = threading.Lock(), after_turn
        self.changed = threading.Condition()
        self.messages: dict[tuple[int, str], bytes] = {}
        self.left = set[str]()

    def leave(self, peer: str) -> None:
        """``peer`` publishes no more: who waits for a message that it has not published is woken with Stopped."""
        with self.changed:
            self.left.add(peer)
            self.changed.notify_all()

    def endpoint(self, peer: str) -> HubEndpoint:
        return HubEndpoint(self, peer)


@dataclass(frozen=True)
class HubEndpoint:
    """One peer's end of a :class:`Hub`. Its thread holds ``hub.turn``; ``collect`` releases it while it waits."""

    hub: Hub
    peer: str

    def catch_up(self, round: int) -> int:
        return round

    def publish(self, round: int, data: bytes, items: Collection[int] = ()) -> None:
        hub = self.hub
        with hub.changed:
            hub.messages[round, self.peer] = data
            for old in [key for key in hub.messages if key[0] < round - KEEP_ROUNDS]:
                del hub.messages[old]
            hub.changed.notify_all()

    def collect(self, round: int, skip: Collection[str] = (), offers_only: Collection[str] = ()) -> Collected:
        hub, others = self.hub, [name for name in self.hub.roster if name != self.peer]
        hub.after_turn()
        hub.turn.release()
        try:
            with hub.changed:
                while waiting := {name for name in others if (round, name) not in hub.messages}:
                    if waiting & hub.left:
                        raise Stopped
                    hub.changed.wait()
                messages = {name: hub.messages[round, name] for name in others if name not in offers_only}
                return Collected(messages, offered_only=tuple(name for name in others if name in offers_only))
        finally:
            hub.turn.acquire()


class Delayed:
    """Another exchange, in which some peers' messages come ``rounds_late`` rounds late.

    Args:
        directory: where messages wait. A peer that is resumed finds there what was on its way to it.
    """

    def __init__(self, inner: Exchange, rounds_late: Mapping[str, int], directory: Path) -> None:
        self.inner, self.rounds_late, self.directory = inner, rounds_late, directory
        self.catch_up, self.publish = inner.catch_up, inner.publish

    def collect(self, round: int, skip: Collection[str] = (), offers_only: Collection[str] = ()) -> Collected:
        collected = self.inner.collect(round, skip, offers_only)
        slow = [name for name in collected.messages if name in self.rounds_late]
        for name in slow:
            self.directory.mkdir(exist_ok=True)
            write_whole(self._path(name, round), collected.messages[name], sync=False)
        sent = [(name, round - by) for name, by in sorted(self.rounds_late.items())]
        late = tuple((n, r, self._path(n, r).read_bytes()) for n, r in sent if self._path(n, r).exists())
        in_time = {name: data for name, data in collected.messages.items() if name not in slow}
        return replace(collected, messages=in_time, missing=(*collected.missing, *slow), late=(*collected.late, *late))

    def _path(self, peer: str, round: int) -> Path:
        return _message_path(self.directory, peer, round)


class Cores:
    """The cores that peers in processes of their own share: who computes holds one, and who waits holds none.

    So a peer's own seconds have nobody else's work in them. A core whose holder dies is free.

    Args:
        directory: of all these peers; a file in it stands for each core.
        number: how many of the peers compute at a time.
    """

    def __init__(self, directory: Path, number: int) -> None:
        self._paths = [directory / f".core@{i}" for i in range(number)]
        self._held = ExitStack()

    def take(self) -> None:
        """Wait for a core."""
        while True:
            for path in self._paths:
                with suppress(InUseError):
                    self._held.enter_context(locked(path, 0))
                    return
            time.sleep(SECONDS_BETWEEN_TRIES)

    def give_up(self) -> None:
        self._held.close()


class DirectoryExchange:
    """Peers in processes of their own that share a directory: a message is a file that appears whole or not at all.

    All of a swarm start, and start again, at the same round in a directory without messages.

    Args:
        cores: given up while the peer waits for the others.
        has_left: whether a peer publishes no more; looked at once ``should_stop`` says so.
    """

    def __init__(
        self,
        directory: Path,
        peer: str,
        roster: tuple[str, ...],
        should_stop: Callable[[], bool] = lambda: False,
        has_left: Callable[[str], bool] = lambda peer: False,
        cores: Cores | None = None,
    ) -> None:
        self.directory, self.peer, self.roster, self.cores = directory, peer, roster, cores
        self.should_stop, self.has_left = should_stop, has_left
        directory.mkdir(parents=True, exist_ok=True)

    def catch_up(self, round: int) -> int:
        return round

    def publish(self, round: int, data: bytes, items: Collection[int] = ()) -> None:
        write_whole(self._path(self.peer, round), data, sync=False)
        self._path(self.peer, round - KEEP_ROUNDS - 1).unlink(missing_ok=True)

    def collect(self, round: int, skip: Collection[str] = (), offers_only: Collection[str] = ()) -> Collected:
        if not self.cores:
            return self._collect(round, offers_only)
        self.cores.give_up()
        try:
            return self._collect(round, offers_only)
        finally:
            self.cores.take()

    def _collect(self, round: int, offers_only: Collection[str]) -> Collected:
        waiting = {name: self._path(name, round) for name in self.roster if name != self.peer}
        messages: dict[str, bytes] = {}
        while True:
            # Asked first: whatever a peer published before it left is then found.
            left = {name for name in waiting if self.has_left(name)} if self.should_stop() else set()
            for name in [n for n, path in waiting.items() if path.exists()]:
                path = waiting.pop(name)
                if name not in offers_only:
                    messages[name] = path.read_bytes()
            if not waiting:
                others = [name for name in self.roster if name != self.peer]
                return Collected(messages, offered_only=tuple(name for name in others if name in offers_only))
            if left & waiting.keys():
                raise Stopped
            time.sleep(POLL_SECONDS)

    def _path(self, peer: str, round: int) -> Path:
        return _message_path(self.directory, peer, round)


def _message_path(directory: Path, peer: str, round: int) -> Path:
    return directory / f"{round:06d}-{peer}.ftis"
