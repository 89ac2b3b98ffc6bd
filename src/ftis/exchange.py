"""How a round's messages get from peer to peer: the protocol.

``publish`` offers this peer's bytes for a round; ``collect`` waits for the others'. An exchange does not read them.
:mod:`ftis.run.local` has exchanges for one machine, :mod:`ftis.swarm.link` one for a network.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from ftis.admission import Rejection
from ftis.config import FtisError


class ExchangeError(FtisError):
    """A round's messages could not be gathered."""


class Stopped(Exception):  # noqa: N818 - a request, not an error
    """The run was asked to stop while a peer waited. The peer's round has changed nothing yet."""


@dataclass(frozen=True)
class Collected:
    """What a round's exchange brought.

    Attributes:
        messages: the other peers' messages for the round, by sender.
        missing: peers that did not deliver.
        late: (sender, round, message) of earlier rounds.
        offered_only: peers that delivered, and whose messages were not fetched, as asked.
        rejections: of offers, before anything was fetched.
    """

    messages: Mapping[str, bytes]
    missing: tuple[str, ...] = ()
    late: tuple[tuple[str, int, bytes], ...] = ()
    offered_only: tuple[str, ...] = ()
    rejections: tuple[Rejection, ...] = ()


class Exchange(Protocol):
    """One peer's end of an exchange."""

    def catch_up(self, round: int) -> int:
        """The round to train next: ``round``, or a later one if the others have gone on without this peer."""

    def publish(self, round: int, data: bytes, items: Collection[int] = ()) -> None:
        """Offer this peer's message for ``round``, with groups for ``items``. A second call replaces it."""

    def collect(self, round: int, skip: Collection[str] = (), offers_only: Collection[str] = ()) -> Collected:
        """Wait for the messages of all other peers for ``round``, except those in ``skip``.

        Args:
            skip: peers that are neither waited for nor heard.
            offers_only: peers that are waited for, but whose messages are not fetched.

        Raises:
            Stopped: asked to stop while waiting.
            ExchangeError: the round cannot be closed.
        """
