"""Copies of a policy's weights and gradients, and how far two of them are apart."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from ftis.policy import Policy


def gradients(policy: Policy) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in policy.model.named_parameters() if p.grad is not None}


def weights(policy: Policy) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in policy.model.named_parameters()}


def relative_difference(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """‖a − b‖ / ‖a‖ of all tensors together."""
    assert a.keys() == b.keys()
    difference = sum(float((a[n] - b[n]).double().square().sum()) for n in a)
    return float(np.sqrt(difference / sum(float(v.double().square().sum()) for v in a.values())))
