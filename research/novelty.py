"""A second defence, for objectives without weights: it drops foreign completions with a burst of surprise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ftis.config import Recipe
from ftis.rollouts import Floats
from ftis.selection import Judged, Selection

WINDOW = 4
"""Tokens of a burst."""
USUAL = 0.99
"""The part of the learner's own rollouts that have no stronger burst than the usual one."""
REMEMBERED, FEWEST = 512, 32
"""Own rollouts that the usual burst is taken from; with fewer nothing is dropped."""


class Novelty(Selection):
    """Drops foreign rollouts with Â > 0 that hold a burst of surprise, for ``training.selections``.

    A rollout's burst is the learner's largest mean surprise over :data:`WINDOW` tokens in a row::

        burst_i = max_t (1/k) Σ_{t ≤ j < t + k} −log π_old(a_ij)

    The usual one is the 99th percentile over the learner's own last rollouts with Â ≠ 0, which it drew from π_old
    itself. An importance weight mutes planted tokens without this selection. It is meant for NoIS, F-NoIS and
    fine-tuning on what others solved.
    """

    name = "novelty"

    def __init__(self, recipe: Recipe, own: str) -> None:
        self._bursts: list[float] = []
        self._usual = np.inf

    def examine(self, judged: Judged) -> None:
        """Take the usual burst from earlier rounds, then note this round's own ones."""
        if len(self._bursts) >= FEWEST:
            self._usual = float(np.quantile(self._bursts, USUAL))
        own_R = judged.batch.own_N[judged.rows]
        of_round = [burst(logp) for logp, own in zip(judged.old_logp, own_R, strict=True) if own]
        self._bursts = [*self._bursts, *of_round][-REMEMBERED:]

    def shares(self, judged: Judged) -> Tensor:
        asked_R = ~judged.batch.own_N[judged.rows] & (judged.advantage_R > 0).numpy()
        asked = zip(asked_R, judged.old_logp, strict=True)
        return torch.tensor([float(not (ask and burst(logp) > self._usual)) for ask, logp in asked])

    def state(self) -> Mapping[str, Any]:
        return {"bursts": self._bursts, "usual": self._usual if np.isfinite(self._usual) else None}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._bursts = list(state["bursts"])
        self._usual = np.inf if state["usual"] is None else state["usual"]


def burst(logp: Floats) -> float:
    """The largest mean of −logp over :data:`WINDOW` tokens in a row, or over all of fewer."""
    n = min(WINDOW, len(logp))
    return float(np.convolve(-logp.astype(np.float64), np.full(n, 1 / n), "valid").max())
