"""Evidence that a sender writes a token more often than it reports: an e-detector for each token, and each pair.

Axes: ``_B`` blocks, ``_T`` tokens end to end, ``_P`` keys at all places, ``_A`` known keys, ``_C`` contexts, ``_K``
shares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ftis.honesty.contexts import ID_BITS, START, renumbered
from ftis.honesty.evidence import LARGEST_LOG_RATIO, NOTHING, STAKES, TOLERANCE, Floats64
from ftis.honesty.spellings import OTHER
from ftis.rollouts import Rollout, pad

SHARES = STAKES / 4
"""The part ε that is staked at each place, about the share of places with a lie: 1/4, 1/16, ..., 1/4096."""
LOG_REST = np.log1p(-SHARES)
"""log(1 − ε), the nats of a place without the token."""
ANYWHERE = 2**ID_BITS
"""The context of a token that counts wherever it stands."""
MOST_KEYS = 2**14
"""The most keys at a time. A block adds its most frequent new keys, at most half as many. Of the earlier keys those
with most evidence stay."""

Keys = npt.NDArray[np.int64]


LARGEST = 1e150
"""The largest R, far above every threshold, so products stay finite. If several keys reach it, the first is shown."""
BLOCK = 8
"""Completions that are taken in before the next keys count."""


class Frequent:
    """Two e-detectors for each token of a sender's earlier blocks: at any place, and after a given token.

    A block is a group of a message, or several small ones (:func:`blocks_of`). A key is (c, a): a token after c, or
    anywhere. With n groups in the whole run and A keys known before a block b, for each of these and ε, over the
    block's places t after c, ::

        E_b(c, a, ε) = Π_t (1 − ε + ε [a_t = a] / π_gen(a_t))        R_b = (R_{b−1} + 1/(6 n A)) · E_b

    Each factor is at most 1 in expectation, so Σ R has the bound of :class:`~ftis.honesty.evidence.Detector`. The
    choice of a key costs log A nats once. Predictions from counts pay at each place, since a text may begin anywhere.
    """

    def __init__(self, groups_of_run: int) -> None:
        self.groups_of_run = groups_of_run
        self._keys: Keys = np.zeros(0, np.int64)
        self._r_AK: Floats64 = np.zeros((0, len(SHARES)))

    def add(self, rollouts: Sequence[Rollout], block_N: npt.NDArray[np.int64]) -> Floats64:
        """Take in a message. Returns the evidence log(n Σ R) after each block, in nats.

        Args:
            rollouts: of one sender and round, as the sender sampled them.
            block_N: the block of each, ascending, from 0.
        """
        length_N = np.fromiter(map(len, rollouts), np.int64)
        key_2T, gain_TK = _keys(rollouts, length_N), _gains(rollouts) - LOG_REST
        ends_B = length_N.cumsum()[np.flatnonzero(np.diff(block_N, append=-1))]
        parts = zip(np.split(key_2T, ends_B[:-1], axis=1), np.split(gain_TK, ends_B[:-1]), strict=True)
        return np.array([self._take(keys.ravel(), np.tile(gains, (2, 1))) for keys, gains in parts])

    def _take(self, key_P: Keys, gain_PK: Floats64) -> float:
        """The evidence after a block. Its new keys count from the next one on."""
        contexts, context_A = np.unique(self._keys >> ID_BITS, return_inverse=True)
        context_P, counted_P = _lookup(contexts, key_P >> ID_BITS)
        places_C = np.bincount(context_P[counted_P], minlength=len(contexts))
        log_e_AK = places_C[context_A][:, None] * LOG_REST
        row_P, known_P = _lookup(self._keys, key_P)
        np.add.at(log_e_AK, row_P[known_P], gain_PK[known_P])
        start = 1 / (self.groups_of_run * len(SHARES) * max(1, len(self._keys)))
        log_e_AK = np.minimum(log_e_AK, math.log(LARGEST))
        self._r_AK = np.minimum((self._r_AK + start) * np.exp(log_e_AK), LARGEST)
        nats = self.nats

        is_new_P = ~known_P & (key_P % 2**ID_BITS != OTHER)
        new, count = np.unique(key_P[is_new_P], return_counts=True)
        new = new[np.argsort(-count, kind="stable")[: MOST_KEYS // 2]]
        if len(self._keys) + len(new) > MOST_KEYS:
            kept = np.argsort(-self._r_AK.max(1), kind="stable")[: MOST_KEYS - len(new)]
            self._keys, self._r_AK = self._keys[kept], self._r_AK[kept]
        keys = np.append(self._keys, new)
        order = np.argsort(keys, kind="stable")
        self._keys = keys[order]
        self._r_AK = np.append(self._r_AK, np.zeros((len(new), len(SHARES))), axis=0)[order]
        return nats

    @property
    def nats(self) -> float:
        """log(n Σ R): the evidence since the best start, if the other starts count for nothing."""
        total = float(self._r_AK.sum())
        return (math.log(total) if total else NOTHING) + math.log(self.groups_of_run)

    def gains(self, rollouts: Sequence[Rollout]) -> Floats64:
        """The nats that each place gave to the key and ε with most evidence: [N, T], 0 after a rollout's end."""
        row, share = np.unravel_index(self._r_AK.argmax(), self._r_AK.shape)
        length_N = np.fromiter(map(len, rollouts), np.int64)
        hit_T = (_keys(rollouts, length_N) == self._keys[row]).any(0)
        gain_T = np.where(hit_T, _gains(rollouts)[:, share], LOG_REST[share])
        return pad(np.split(gain_T, length_N.cumsum()[:-1]))

    @property
    def tokens(self) -> Keys:
        """The tokens of all keys, contexts included."""
        tokens = np.unique(np.concatenate([self._keys >> ID_BITS, self._keys & (2**ID_BITS - 1)]))
        return tokens[tokens < OTHER]

    def renumber(self, new_number: Keys) -> None:
        """Give each token its new number, [old number]."""
        self._keys, kept = renumbered(self._keys, new_number, 2)
        self._keys, self._r_AK = self._keys[kept], self._r_AK[kept]
        order = np.argsort(self._keys)
        self._keys, self._r_AK = self._keys[order], self._r_AK[order]

    def state(self) -> Mapping[str, Any]:
        """The keys and their evidence as a JSON object."""
        return {"keys": self._keys.tolist(), "r": self._r_AK.tolist()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state`."""
        self._keys = np.array(state["keys"], dtype=np.int64)
        self._r_AK = np.array(state["r"], dtype=np.float64).reshape(-1, len(SHARES))


def blocks_of(group_N: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The block of each rollout of a message, ascending, from 0: one large group, or neighbours of :data:`BLOCK` rows.

    Over prompts that peers share, a group may be one completion. A block then holds the groups of eight prompts.
    """
    sizes_P = np.bincount(group_N)
    first_P = sizes_P.cumsum() - sizes_P
    block_P: npt.NDArray[np.int64] = np.unique(first_P // BLOCK, return_inverse=True)[1]
    return block_P[group_N]


def _keys(rollouts: Sequence[Rollout], length_N: npt.NDArray[np.int64]) -> Keys:
    """The two keys of each token of the rollouts, end to end: anywhere, and after the token before it. [2, T]."""
    token_T = np.concatenate([r.completion_ids for r in rollouts]).astype(np.int64)
    before_T = np.append(START, token_T[:-1])
    before_T[length_N.cumsum()[:-1]] = START
    return np.stack([ANYWHERE << ID_BITS | token_T, before_T << ID_BITS | token_T])


def _gains(rollouts: Sequence[Rollout]) -> Floats64:
    """log(1 − ε + ε/π_gen) of each token of the rollouts, end to end, and ε: [T, K]."""
    log_p_T = np.concatenate([r.gen_logp for r in rollouts]).astype(np.float64) + TOLERANCE
    gain_TK: Floats64 = np.log(1 - SHARES + SHARES * np.exp(np.minimum(-log_p_T, LARGEST_LOG_RATIO))[:, None])
    return gain_TK


def _lookup(among: Keys, keys: Keys) -> tuple[Keys, npt.NDArray[np.bool_]]:
    """The place of each key among sorted ones, and whether it is there. The place is 0 if it is not."""
    place = np.searchsorted(among, keys)
    known = np.append(among, -1)[place] == keys
    return np.where(known, place, 0), known
