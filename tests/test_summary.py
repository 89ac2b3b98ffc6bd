"""Why a round used nothing of the others."""

from __future__ import annotations

from typing import Any

from ftis.comparison.summary import unused
from ftis.metric_keys import peer_key
from ftis.view.progress import _why

SENT: dict[str, Any] = {"delivered": True, "admitted": 4, "zero_advantage": 2, "passed_over": 0, "rejected": 0}


def test_every_reason_is_given() -> None:
    kl = ("dropped for kl", 2)
    cases: list[tuple[dict[str, Any], list[tuple[str, float]]]] = [
        ({"delivered": False, "admitted": 0}, [("nothing came", 0)]),
        (
            {"rejected": 3, "rejected/kl": 2, "rejected/late": 1, "admitted": 0},
            [("rejected for kl", 2), ("rejected for late", 1)],
        ),
        ({"dropped": 2.0, "dropped/kl": 2}, [kl]),
        ({"passed_over": 8, "admitted": 0}, [("passed over by the limit", 8)]),
        ({"zero_advantage": 4}, [("in each of its groups all rewards are equal", 0)]),
        ({"delivered": False, "late": 1, "dropped": 2.0, "dropped/kl": 2}, [kl]),  # a message of an earlier round
        ({"admitted": 0}, [("offered no groups", 0)]),
        ({}, []),
    ]
    for measures, reasons in cases:
        row = {peer_key("bob", measure): value for measure, value in {**SENT, **measures}.items()}
        row |= {peer_key("ada", key): value for key, value in SENT.items()}
        assert list(unused("ada", row)) == [("bob", why, count) for why, count in reasons]
        assert _why("ada", row).count("bob") == len(reasons)
