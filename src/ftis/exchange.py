"""How the messages of a round get from peer to peer: a small protocol, and two exchanges for one machine.

``publish`` offers this peer's bytes for a round; ``collect`` waits for the other peers' bytes and returns them. What
the bytes mean is not the exchange's business.
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
    """The run was asked to stop while a peer waited; the round it was in has changed nothing yet."""


@dataclass(frozen=True)
class Collected:
    """What a round's exchange brought.

    Attributes:
        messages: the other peers' messages for the round, by sender.
        missing: peers that did not deliver.
        late: (sender, message) of earlier rounds that came only now.
        offered_only: peers that delivered and whose messages were not fetched, as asked.
        rejections: what was refused before it was fetched.
    """

    messages: Mapping[str, bytes]
    missing: tuple[str, ...] = ()
    late: tuple[tuple[str, bytes], ...] = ()
    offered_only: tuple[str, ...] = ()
    rejections: tuple[Rejection, ...] = ()


class Exchange(Protocol):
    """One peer's end of an exchange."""

    def catch_up(self, round: int) -> int:
        """The round to train next: ``round``, or a later one where the others have gone on without this peer."""

    def publish(self, round: int, data: bytes, items: Collection[int] = ()) -> None:
        """Offer this peer's message for ``round``, with groups for ``items``; the same round again replaces it."""

    def collect(self, round: int, skip: Collection[str] = (), offers_only: Collection[str] = ()) -> Collected:
        """Wait for the messages of all other peers for ``round``, except those in ``skip``.

        Args:
            skip: peers that are neither waited for nor heard.
            offers_only: peers that are waited for, but whose messages are left where they are.

        Raises:
            Stopped: asked to stop while waiting.
            ExchangeError: the round cannot be closed.
        """


class AloneExchange:
    """The exchange of a peer that trains alone."""

    def catch_up(self, round: int) -> int:
        return round

    def publish(self, round: int, data: bytes, items: Collection[int] = ()) -> None:
        pass

    def collect(self, round: int, skip: Collection[str] = (), offers_only: Collection[str] = ()) -> Collected:
        return Collected({})
