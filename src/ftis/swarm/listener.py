"""The network side of an :class:`ftis.swarm.onlooker.Onlooker`: it listens to a swarm, and asks its peers.

It declares no presence and answers nothing, so no peer counts it or waits for it. To the engine it is one more link of
each peer: offers are sent to it when they are made, and small questions come from it now and then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import zenoh

from ftis.config import NetworkConfig
from ftis.swarm.onlooker import Onlooker
from ftis.swarm.session import ask_everybody, open_session

STATUS_SECONDS, FACTS_SECONDS, OFFERS_SECONDS = 2.0, 10.0, 30.0
"""How often everybody is asked for its status, for what it means by its recipe, and for offers that were missed."""

ANSWER_SECONDS = 2.0
MOST_ANSWERS = 4096
"""Answers to one question that are read."""


class Listener:
    """A link to the peers or routers in ``settings.connect``, and a thread that asks them."""

    def __init__(self, settings: NetworkConfig, onlooker: Onlooker) -> None:
        self.settings, self.onlooker = settings, onlooker
        self._closing = threading.Event()

    def __enter__(self) -> Self:
        self._session = open_session(self.settings)
        self._declared: list[zenoh.Subscriber[None]] = [
            self._session.liveliness().declare_subscriber("ftis/*/live/**", self._hear_token, history=True),
            self._session.declare_subscriber("ftis/*/man/*/*", self._hear_offer),
        ]
        self._asker = threading.Thread(target=self._ask_on, name="listener", daemon=True)
        self._asker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        for declared in self._declared:
            declared.undeclare()  # type: ignore[no-untyped-call]
        self._session.close()  # type: ignore[no-untyped-call]
        self._asker.join(timeout=ANSWER_SECONDS)

    def _hear_token(self, sample: zenoh.Sample) -> None:
        self.onlooker.token(str(sample.key_expr), sample.kind == zenoh.SampleKind.PUT, time.time())

    def _hear_offer(self, sample: zenoh.Sample) -> None:
        seal = sample.attachment.to_bytes() if sample.attachment is not None else b""
        self.onlooker.offer(str(sample.key_expr), sample.payload.to_bytes(), seal, time.time())

    def _ask_on(self) -> None:
        def heard(hear: Callable[[str, bytes, float], None]) -> Callable[[zenoh.Sample], None]:
            return lambda sample: hear(str(sample.key_expr), sample.payload.to_bytes(), time.time())

        questions: list[tuple[str, float, Callable[[zenoh.Sample], None]]] = [
            ("ftis/status/*/*", STATUS_SECONDS, heard(self.onlooker.status)),
            ("ftis/facts/*/*", FACTS_SECONDS, heard(self.onlooker.facts)),
            ("ftis/*/man/*/*", OFFERS_SECONDS, self._hear_offer),
        ]
        due = [0.0] * len(questions)
        while not self._closing.wait(STATUS_SECONDS / 4):
            for i, (key, every, hear) in enumerate(questions):
                # Until somebody is reached it asks often, so that a swarm is seen as soon as it is there.
                if time.monotonic() >= due[i] and not self._closing.is_set():
                    self._ask(key, hear)
                    due[i] = time.monotonic() + (every if self.onlooker.reached else 1.0)

    def _ask(self, key: str, hear: Callable[[zenoh.Sample], None]) -> None:
        try:
            for number, reply in enumerate(ask_everybody(self._session, key, ANSWER_SECONDS)):
                if number >= MOST_ANSWERS:
                    return
                if reply.ok is not None:
                    hear(reply.ok)
        except zenoh.ZError:
            return  # closing, or no link for a moment: asked again soon
