"""A peer sends what the recipe's ``[wire]`` asks for, and learns from its own exact log-probabilities."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ftis.codec import Header, Limits, decode
from ftis.config import WireConfig
from ftis.member import Member
from ftis.rollouts import Group, Rollout
from ftis.wire.plain import weight_error

EXACT = np.array([-0.3, -0.0123, -2.7], np.float32)
OWN = Group("ada", 4, 0, (Rollout(np.array([5, 6, 2], np.int32), EXACT),))


@pytest.mark.parametrize(
    "wire",
    [WireConfig(), WireConfig(format=2), WireConfig(format=2, logp="fixed9"), WireConfig(format=2, logp="fixed6")],
)
def test_the_recipe_says_how_the_others_get_it_and_own_rollouts_stay_exact(
    wire: WireConfig,
) -> None:
    stub: Any = SimpleNamespace(
        name="ada",
        recipe=SimpleNamespace(wire=wire, peers=[SimpleNamespace(name="ada")]),
        header=Header("0" * 32, 0, "ada", "0" * 32, 1.0, 0, 1.0),
        skipped=lambda round: frozenset(),
        write=tuple,
    )
    data = Member.outgoing(stub, 4, [OWN]).message

    assert data[4] == wire.format
    message = decode(data, Limits(1000, 1, 1, 3))
    assert message.header.round == 4
    sent = message.groups[0].rollouts[0].gen_logp
    assert (sent.tobytes() == EXACT.tobytes()) == (wire.logp == "float32")
    assert np.abs(np.expm1(EXACT.astype(np.float64) - sent)).max() <= weight_error(wire.logp)
    assert OWN.rollouts[0].gen_logp.tobytes() == EXACT.tobytes()
