"""Accusations from rounds that were undone. A liar stays accused after its victim goes back to an earlier step.

    <arm>/<peer>.accused.json    {"step": 20, "senders": {"bob": {"found": 24, "found_after": 512, "passages": [[7]]}}}

The file stands beside the peer's directory, so that it outlives a start from the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf
from pathlib import Path

from ftis.honesty.selection import Accusation, HonestyTest
from ftis.records.files import read_json, write_json
from ftis.records.lines import damaged
from ftis.records.reading import PeerRun
from ftis.selection import Selection


def path_of(peer: Path) -> Path:
    """The file of a peer, from its directory in an arm."""
    return peer.with_name(f"{peer.name}.accused.json")


def keep_undone(peer: Path, step: int) -> None:
    """Keep the recorded accusations of rounds after ``step``, the step from which a killed peer goes on."""
    rounds = PeerRun.read(peer).rounds
    accused = HonestyTest.found_by(rounds[-1].by_peer) if rounds else {}
    undone = {sender: accusation for sender, accusation in accused.items() if accusation.found >= step}
    if undone:
        write(peer, step, undone | read(peer, inf))  # those kept before may have token ids


def accuse_again(peer: Path, step: int, selections: Iterable[Selection]) -> None:
    """Restore the file's accusations in the honesty test of a peer that goes on from ``step``."""
    for selection in selections:
        if isinstance(selection, HonestyTest):
            for sender, accusation in read(peer, step).items():
                selection.accuse(sender, accusation)


def write(peer: Path, step: int, senders: Mapping[str, Accusation]) -> None:
    """Keep the accusations of ``senders`` for a peer that goes on from ``step``.

    If the file's accusations hold from an earlier step, the new ones do too: a sender once found stays found.

    Raises:
        RecordsError: as :func:`read`.
    """
    earlier, _ = _document(peer)
    keyed = {sender: accusation._asdict() for sender, accusation in senders.items()}
    write_json(path_of(peer), {"step": min(step, earlier), "senders": keyed})


def read(peer: Path, step: float) -> dict[str, Accusation]:
    """The accusations, by sender, for a peer that goes on from ``step``.

    There are none for a step before the file's, so a replay from there decides as the recorded rounds did.

    Raises:
        RecordsError: the file is damaged.
    """
    since, senders = _document(peer)
    return senders if step >= since else {}


def _document(peer: Path) -> tuple[float, dict[str, Accusation]]:
    """The step from which the file's accusations hold, and these by sender; infinity without a file."""
    path = path_of(peer)
    if not path.exists():
        return inf, {}
    try:
        document = read_json(path)
        return int(document["step"]), {name: Accusation(**one) for name, one in document["senders"].items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise damaged(path, error) from None
