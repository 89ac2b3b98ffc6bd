"""What a window of one sender's messages proves to somebody who has no model and trusts nobody.

Evidence is counted from nothing, by the reported probabilities and the contexts alone. Whoever shows the window may
have chosen it, so a choice is charged with the nats that it takes to name it. docs/method.md has the proof.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ftis.honesty.contexts import Contexts
from ftis.honesty.evidence import TRUSTING, mixtures, ratios_of
from ftis.honesty.spellings import Spellings
from ftis.rollouts import Group

ALPHA = 1e-6
"""The probability, by default, with which an honest peer of a run can be shown to be dishonest."""
BREAK = 0.01
"""What is set aside at each message for a window that skips rounds, or goes on with another start of the sender."""
MOST_STARTS = 1000
"""The most starts assumed of an honest peer, and so the most messages it signs for one round."""


class Spot(NamedTuple):
    """Where a message stands in its sender's history: its round, and the number of the sender's start."""

    round: int
    incarnation: int


def evidence_in(messages: Iterable[Sequence[Group]], groups_sampled: int, share: float) -> float:
    """log of what a bet of 1 on the sender's dishonesty is worth after its ``messages``, given in the order of rounds.

    It is a supermartingale in the messages if the sender is honest.

    Args:
        groups_sampled: among how many groups the sender may have chosen those of a message; 0 if it delivers all.
        share: s of the mixture.
    """
    contexts, spellings, weights, nats = Contexts(), Spellings(), TRUSTING, 0.0
    for message in messages:
        groups = sorted(message, key=lambda group: group.item)  # an order that does not depend on the tokens
        if spellings.used_up:
            contexts, spellings = Contexts(), Spellings()
        rollouts = spellings.as_sent([rollout for group in groups for rollout in group.rollouts])
        if not rollouts:
            continue
        group_N = np.repeat(np.arange(len(groups)), [len(group.rollouts) for group in groups])
        gain_WNU, after = mixtures(weights, ratios_of(rollouts, group_N, contexts, [None] * len(rollouts)), share)
        weights = np.stack([after[0].mean(0), TRUSTING[1]])
        nats += float(gain_WNU[0].sum()) - log_choices(groups_sampled, len(groups))
    return nats


def log_choices(groups_sampled: int, delivered: int) -> float:
    """log of the number of ways to choose the ``delivered`` groups among all sampled; 0 where there was no choice."""
    return math.log(math.comb(max(groups_sampled, delivered), delivered)) if groups_sampled else 0.0


def nats_needed(spots: Sequence[Spot], peers: int, alpha: float = ALPHA) -> float:
    """The evidence at which a window is proof at level ``alpha``, in a run of so many ``peers``.

    Args:
        spots: of the window's messages: rounds strictly ascending, incarnations ascending.
    """
    first = spots[0]
    named = _log_pick(first.round) + _log_start(first.incarnation)
    for before, spot in pairwise(spots):
        if spot.round == before.round + 1 and spot.incarnation == before.incarnation:
            named -= math.log(1 - BREAK)
        else:
            named += _log_pick(spot.round - before.round - 1) + _log_start(spot.incarnation) - math.log(BREAK)
    return math.log((peers - 1) / alpha) + named


def _log_pick(number: int) -> float:
    """Nats to name one of 0, 1, 2, …: the weights 1 / ((i + 1) (i + 2)) add up to 1."""
    return math.log((number + 1) * (number + 2))


def _log_start(incarnation: int) -> float:
    return _log_pick(min(max(incarnation, 1), MOST_STARTS) - 1)
