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
    """A selection against rollouts that this peer cannot align with its own tokens; docs/tokenizers.md says which."""

    name: str = "alignment"
    _about: dict[str, dict[str, Any]] = field(default_factory=dict)

    def examine(self, judged: Judged) -> None:
        batch = judged.batch
        self._about = {}
        for source, name in enumerate(batch.sources):
            rollouts = [batch.rollouts[row] for row in np.flatnonzero((batch.source_N == source) & ~batch.own_N)]
            if texts := [rollout for rollout in rollouts if rollout.sent]:
                self._about[name] = _measures(texts)

    def shares(self, judged: Judged) -> Tensor:
        sent = (judged.batch.rollouts[row].sent for row in judged.rows.tolist())
        return torch.tensor([float(not (came and came.fault)) for came in sent])

    def about(self, peer: str, decode: Decode) -> Mapping[str, Any]:
        return self._about.get(peer, {})


def _measures(rollouts: list[Rollout]) -> dict[str, Any]:
    """Measures of rollouts that came as text: units with one token on either side, the most tokens of either side
    in a unit, and how many rollouts cannot be aligned."""
    sent = [rollout.sent for rollout in rollouts if rollout.sent]
    learner = [np.ones(len(one), np.int64) if one.unit is None else np.bincount(one.unit) for one in rollouts]
    both = np.stack([np.concatenate([came.tokens_U for came in sent]), np.concatenate(learner)])
    return {
        "units/one_to_one": float((both == 1).all(0).mean()),
        "units/most_tokens": int(both.max()),
        "units/not_aligned": sum(bool(came.fault) for came in sent),
    }


def readable(recipe: Recipe, own: str) -> Readable | None:
    """The selection of a recipe; None if a peer trains alone, or peers exchange ids."""
    return Readable() if len(recipe.peers) > 1 and recipe.exchange != "ids" else None
