"""Evidence that a sender writes a token more often than it reports: an e-detector for each token, and each pair.

Axes: ``_B`` blocks, ``_T`` tokens end to end, ``_P`` keys at all places, ``_U`` distinct keys, ``_A`` known keys,
``_C`` contexts, ``_X`` hits, ``_K`` shares.
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
AT_ONCE = 2**16
"""The most numbers of E in memory: a message's blocks are taken in so many numbers at a time."""


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
        block_T, blocks = np.repeat(block_N, length_N), int(block_N[-1]) + 1
        # A block may make others' keys leave. So blocks are taken in together only if all their keys have room.
        at_once = blocks if len(self._keys) + key_2T.size <= MOST_KEYS // 2 else 1
        nats_B = list[Floats64]()
        for first in range(0, blocks, at_once):
            inside = slice(*np.searchsorted(block_T, (first, first + at_once)))
            block_2T, gain_2TK = np.tile(block_T[inside] - first, 2), np.concatenate([gain_TK[inside]] * 2)
            nats_B.append(self._take(key_2T[:, inside].ravel(), block_2T, gain_2TK, at_once))
        return np.concatenate(nats_B)

    def _take(self, key_P: Keys, block_P: Keys, gain_PK: Floats64, blocks: int) -> Floats64:
        """The evidence after each of some blocks. A new key counts from the block after its first one on."""
        key_U, of_P, count_U = np.unique(key_P, return_inverse=True, return_counts=True)
        first_U = np.empty_like(key_U)
        first_U[of_P[::-1]] = block_P[::-1]  # the first place of a key is written last
        new_U = np.flatnonzero(~_lookup(self._keys, key_U)[1] & (key_U % 2**ID_BITS != OTHER))
        if len(new_U) > MOST_KEYS // 2:  # these are of one block
            new_U = new_U[np.argsort(-count_U[new_U], kind="stable")[: MOST_KEYS // 2]]
        keys = np.concatenate([self._keys, key_U[new_U]])
        order = np.argsort(keys)
        keys = keys[order]
        r_KA = np.concatenate([self._r_AK.T, np.zeros((len(SHARES), len(new_U)))], axis=1).take(order, axis=1)
        first_A = np.concatenate([np.full(len(self._keys), -1), first_U[new_U]])[order]

        contexts, context_A = np.unique(keys >> ID_BITS, return_inverse=True)
        context_U, counted_U = _lookup(contexts, key_U >> ID_BITS)
        place_P = block_P * len(contexts) + context_U[of_P]
        places = np.bincount(place_P[counted_U[of_P]], minlength=blocks * len(contexts))
        places_B1C = places.reshape(blocks, 1, -1)
        e_BKC = np.exp(places_B1C * LOG_REST[:, None])
        key_of_U, known_U = _lookup(keys, key_U)
        since_U = np.append(first_A, blocks)[key_of_U]  # the appended entry stands in if there is no key
        hits = known_U[of_P] & (since_U[of_P] < block_P)
        cell_P = block_P[hits] * len(keys) + key_of_U[of_P[hits]]
        is_hit = np.zeros(blocks * len(keys), np.bool_)
        is_hit[cell_P] = True
        block_X, key_X = divmod(np.flatnonzero(is_hit), len(keys))
        number_PK = (is_hit.cumsum()[cell_P] - 1)[:, None] * len(SHARES) + np.arange(len(SHARES))
        gains = np.bincount(number_PK.ravel(), gain_PK[hits].ravel(), len(key_X) * len(SHARES))
        log_e_XK = gains.reshape(-1, len(SHARES)) + places_B1C[block_X, 0, context_A[key_X]][:, None] * LOG_REST
        of_hits_XK = np.exp(np.minimum(log_e_XK, math.log(LARGEST)))
        total_B = np.zeros(blocks)
        at_once = max(1, AT_ONCE // max(1, r_KA.size))
        for first in range(0, blocks, at_once):
            block_B = np.arange(first, min(first + at_once, blocks))
            begin, end = np.searchsorted(block_X, (first, block_B[-1] + 1))
            e_BKA = e_BKC[block_B].take(context_A, axis=2)
            e_BKA[block_X[begin:end] - first, :, key_X[begin:end]] = of_hits_XK[begin:end]
            known_BA = first_A < block_B[:, None]
            start_BA = known_BA / (self.groups_of_run * len(SHARES) * np.maximum(1, known_BA.sum(1))[:, None])
            for start_A, e_KA in zip(start_BA, e_BKA, strict=True):
                e_KA *= r_KA + start_A
                r_KA = np.minimum(e_KA, LARGEST, out=e_KA)
            total_B[block_B] = e_BKA.sum((1, 2))
        self._keys, self._r_AK = keys, r_KA.T.copy()
        if len(keys) > MOST_KEYS:
            kept = np.sort(np.argsort(-np.where(first_A < 0, r_KA.max(0), np.inf), kind="stable")[:MOST_KEYS])
            self._keys, self._r_AK = keys[kept], self._r_AK[kept]
        with np.errstate(divide="ignore"):
            return np.maximum(np.log(total_B), NOTHING) + math.log(self.groups_of_run)

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
