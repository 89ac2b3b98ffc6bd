"""Many peers, many rounds: none is lost and memory stays what it was."""

from __future__ import annotations

import pytest
from scaling import SETTLED, live


@pytest.mark.slow
def test_peers_last_and_their_memory_does_not_grow() -> None:
    """A round's messages from the others are 0.8 MB: any that were kept would show."""
    found = live(peers=6, rounds=SETTLED + 20, seconds=60, tokens=400)
    assert found["complete"]
    assert found["growth"] < 3.0
