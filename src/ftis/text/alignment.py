"""A selection of the rollouts that can be aligned, and measures of how well two tokenizers agree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ftis.config import Recipe
from ftis.rollouts import Decode, Rollout
from ftis.selection import Judged, Selection


@dataclass
class Readable(Selection):
    """Drops rollouts whose text this peer cannot align with its own tokens; docs/tokenizers.md says which."""

    name: str = "alignment"
    _about: dict[str, dict[str, Any]] = field(default_factory=dict)

    def examine(self, judged: Judged) -> None:
        batch = judged.batch
        self._about = {}
        for source, name in enumerate(batch.sources):
            rollouts = [batch.rollouts[row] for row in np.flatnonzero((batch.source_N == source) & ~batch.own_N)]
            if texts := [rollout for rollout in rollouts if rollout.sent]:
                self._about[name] = unit_measures(texts)

    def shares(self, judged: Judged) -> Tensor:
        sent = (judged.batch.rollouts[row].sent for row in judged.rows.tolist())
        return torch.tensor([float(not (came and came.fault)) for came in sent])

    def about(self, peer: str, decode: Decode) -> Mapping[str, Any]:
        return self._about.get(peer, {})


def unit_measures(rollouts: list[Rollout]) -> dict[str, Any]:
    """Measures of rollouts that came as text: units with one token on either side, the most tokens of either side
    in a unit, and how many rollouts cannot be aligned."""
    both = np.concatenate([np.stack([_sender(rollout), _learner(rollout)]) for rollout in rollouts], axis=1)
    return {
        "units/one_to_one": float((both == 1).all(0).mean()),
        "units/most_tokens": int(both.max()),
        "units/not_aligned": sum(bool(rollout.sent and rollout.sent.fault) for rollout in rollouts),
    }


def _sender(rollout: Rollout) -> np.ndarray[Any, np.dtype[np.integer]]:
    assert rollout.sent is not None
    return rollout.sent.tokens_U


def _learner(rollout: Rollout) -> np.ndarray[Any, np.dtype[np.integer]]:
    return np.ones(len(rollout), np.int64) if rollout.unit is None else np.bincount(rollout.unit)


def readable(recipe: Recipe, own: str) -> Readable | None:
    """The selection of a recipe; None if a peer trains alone, or peers exchange ids."""
    return Readable() if len(recipe.peers) > 1 and recipe.exchange != "ids" else None
