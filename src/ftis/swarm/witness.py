"""Evidence for others, written when the honesty test has found a peer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftis.metric_keys import by_peer
from ftis.records.events import Event, NetworkEvent, RoundEnded, Say
from ftis.records.files import write_whole
from ftis.swarm.bundle import BundleError, strongest
from ftis.swarm.identity import Roster
from ftis.swarm.inbox import Inbox


@dataclass
class Witness:
    """A listener that passes events on, and writes ``<directory>/<peer>-round-<round>.evidence`` for each peer found.

    Attributes:
        facts: what the run's peers agreed on.
        done: peers for which it was written, or tried.
    """

    inbox: Inbox
    facts: Mapping[str, Any]
    roster: Roster
    directory: Path
    say: Say
    done: set[str] = field(default_factory=set)

    def __call__(self, event: Event) -> None:
        self.say(event)
        if isinstance(event, RoundEnded):
            for peer, measures in by_peer(event.metrics).items():
                found = measures.get("honesty/found_in_round")
                if found is not None and peer not in self.done:
                    self.done.add(peer)
                    self._write(peer, int(found), event.step - 1)

    def _write(self, peer: str, found: int, now: int) -> None:
        path = self.directory / f"{peer}-round-{found}.evidence"
        if path.exists():  # by this peer before it was started again
            return
        try:
            bundle, finding = strongest(self.facts, self.inbox.messages(peer, found - 1), self.roster)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, bundle.to_bytes())
        except (BundleError, OSError) as error:
            text = f"the honesty test found {peer}, but evidence for others cannot be written to {path}: {error}"
        else:
            nats = f"{finding.nats:.1f} nats of {finding.needed:.1f} needed"
            if finding.is_proof:
                text = (
                    f"the honesty test found {peer}: {path} proves it to anybody ({nats}), who checks it with "
                    f"ftis verify-evidence {path.name} --roster ROSTER"
                )
            else:
                text = (
                    f"the honesty test found {peer}, but {path} proves nothing to others ({nats}): "
                    f"only this peer's own model or longer memory saw it"
                )
        self.say(NetworkEvent("evidence", text, now))
