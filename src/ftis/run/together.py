"""Peers of one machine learn together: their turns, and the messages that each gets.

Each peer is a generator (:meth:`ftis.run.training.Trainer.train`). It yields its message of a round, and goes on with
the others' messages. A loop in one process, or a parent with a pipe to each peer's process, asks :class:`Turns`
whom to let go on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress

from ftis.admission import Collected
from ftis.member import Outgoing

TurnTaking = Generator[Outgoing, Collected | None, None]
"""A peer's rounds. The first value sent in is None. A later None asks the peer to stop with its finished rounds."""

Reply = tuple[str, Collected | None]
"""A peer that may go on, and the others' messages."""


def delivered(sent: Mapping[str, Outgoing]) -> dict[str, Collected]:
    """Each peer's messages of a round in which all of its swarm have offered.

    Every peer of a machine delivers. Messages of peers in ``skip`` come too, and the receiver rejects them.
    """
    found = {}
    for name, own in sent.items():
        messages = {other: one.message for other, one in sent.items() if other not in (name, *own.offers_only)}
        unread = {other: len(one.items) for other, one in sent.items() if other in own.offers_only}
        found[name] = Collected(messages, offered_only=unread)
    return found


class Turns:
    """The turns of some peers: at most ``at_a_time`` compute at once, and each goes on with its messages.

    A peer :meth:`asks` when it is ready and after each message, and computes no more until :meth:`next` names it. A
    swarm goes on once all its peers have offered. If one has left, nobody can finish the round, and the others stop.

    Args:
        swarms: the peers' names, swarm by swarm.
    """

    def __init__(self, swarms: Sequence[Sequence[str]], at_a_time: int) -> None:
        self._swarms = [tuple(swarm) for swarm in swarms]
        self._at_a_time = at_a_time
        self._sent: dict[str, Outgoing] = {}
        self._left: set[str] = set()
        self._computing: set[str] = set()
        self._due: deque[Reply] = deque()

    def asks(self, peer: str, outgoing: Outgoing | None) -> None:
        """``peer`` waits: to begin (None), or for the others' messages in the round of ``outgoing``."""
        self._computing.discard(peer)
        if outgoing is None:
            self._due.append((peer, None))
            return
        self._sent[peer] = outgoing
        self._close(peer)

    def left(self, peer: str) -> None:
        """``peer`` has ended, at its last round or before."""
        self._computing.discard(peer)
        self._left.add(peer)
        self._close(peer)

    def next(self) -> list[Reply]:
        """The peers that go on now. Each counts as computing until it asks again or has left."""
        free = self._at_a_time - len(self._computing)
        replies = [self._due.popleft() for _ in range(min(free, len(self._due)))]
        self._computing |= {peer for peer, _ in replies}
        return replies

    def _close(self, peer: str) -> None:
        """Let the swarm of ``peer`` go on if it can, or stop."""
        swarm = next(swarm for swarm in self._swarms if peer in swarm)
        waiting = {name: self._sent[name] for name in swarm if name in self._sent}
        if len(waiting) == len(swarm):
            self._due.extend(delivered(waiting).items())
        elif self._left.intersection(swarm):
            self._due.extend((name, None) for name in waiting)
        else:
            return
        for name in waiting:
            del self._sent[name]


def in_turns(
    peers: Mapping[str, TurnTaking],
    before_turn: Callable[[str], None] = lambda name: None,
    after_turn: Callable[[], None] = lambda: None,
) -> None:
    """Let the peers of one swarm go on in this process, one at a time, until all have ended.

    Args:
        before_turn, after_turn: called around each turn; the former with the peer's name.

    Raises:
        Exception: the first error of a peer, once the others have stopped.
    """
    turns, failure, begun = Turns([tuple(peers)], 1), None, set[str]()
    for name in peers:
        turns.asks(name, None)
    while replies := turns.next():
        for name, reply in replies:
            if failure is not None and name not in begun:
                turns.left(name)
                continue
            begun.add(name)
            try:
                before_turn(name)
                turns.asks(name, peers[name].send(reply))
            except StopIteration:
                turns.left(name)
            except Exception as error:  # of one peer: raised once the others have saved their rounds
                failure = failure or error
                turns.left(name)
            after_turn()
    if failure is not None:
        raise failure


def go_on(rounds: TurnTaking, messages: Callable[[], Collected | None]) -> None:
    """Let one peer go on with the ``messages`` of each round, until it has ended.

    If they cannot be had, the peer saves its finished rounds and raises that error.
    """
    with suppress(StopIteration):
        next(rounds)
        while True:
            try:
                collected = messages()
            except Exception as error:
                rounds.throw(error)
                raise
            rounds.send(collected)
