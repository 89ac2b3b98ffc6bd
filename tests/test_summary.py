"""Why a round used nothing of the others."""

from __future__ import annotations

from typing import Any

import pytest

from ftis.comparison.summary import unused
from ftis.metric_keys import peer_key
from ftis.view.progress import _why

SENT: dict[str, Any] = {"delivered": True, "admitted": 4, "zero_advantage": 2, "passed_over": 0, "rejected": 0}


@pytest.mark.parametrize(
    ("measures", "expected", "said"),
    [
        ({"delivered": False, "admitted": 0}, [("bob", "nothing came", 0)], " (bob: nothing came)"),
        (
            {"rejected": 3, "rejected/kl": 2, "rejected/late": 1, "admitted": 0},
            [("bob", "rejected for kl", 2), ("bob", "rejected for late", 1)],
            " (bob: 2 rejected for kl, bob: 1 rejected for late)",
        ),
        ({"dropped": 2.0, "dropped/kl": 2}, [("bob", "dropped for kl", 2)], " (bob: 2 dropped for kl)"),
        (
            {"passed_over": 8, "admitted": 0},
            [("bob", "passed over by the limit", 8)],
            " (bob: 8 passed over by the limit)",
        ),
        (
            {"zero_advantage": 4},
            [("bob", "in each of its groups all rewards are equal", 0)],
            " (bob: in each of its groups all rewards are equal)",
        ),
        (
            {"delivered": False, "late": 1, "dropped": 2.0, "dropped/kl": 2},  # a message of an earlier round came
            [("bob", "dropped for kl", 2)],
            " (bob: 2 dropped for kl)",
        ),
        ({"admitted": 0}, [("bob", "offered no groups", 0)], " (bob: offered no groups)"),
        ({}, [], ""),
    ],
)
def test_every_reason_is_told(measures: dict[str, Any], expected: list[tuple[str, str, float]], said: str) -> None:
    row = {peer_key("bob", measure): value for measure, value in {**SENT, **measures}.items()}
    row |= {peer_key("ada", "admitted"): 4, peer_key("ada", "zero_advantage"): 4, peer_key("ada", "delivered"): True}
    assert list(unused("ada", row)) == expected
    assert _why("ada", row) == said
