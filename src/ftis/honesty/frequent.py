"""Evidence that a sender writes a token more often than it reports: an e-detector for each token, and each pair."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ftis.honesty.contexts import ID_BITS, START, renumbered
from ftis.honesty.evidence import NOTHING, STAKES, TOLERANCE, Floats64
from ftis.honesty.spellings import OTHER
from ftis.rollouts import Rollout, pad

SHARES = STAKES / 4
"""The part ε that is staked at each place, about the share of places with a lie: 1/4, 1/16, ..., 1/4096."""
LOG_REST = np.log1p(-SHARES)
"""log(1 − ε), the nats of a place without the token."""
ANYWHERE = 2**ID_BITS
"""The context of a token that counts wherever it stands."""
MOST_KEYS = 2**14
"""The most keys at a time. A group adds at most half of them, the most frequent first; the others keep those with most
evidence."""

Keys = npt.NDArray[np.int64]


LARGEST = 1e150
"""R grows no further, far above every threshold: products stay finite. Of several keys there, the first is shown."""
AT_ONCE = 2**20
"""The most numbers of E that a message's groups have at a time."""


class Frequent:
    """An e-detector for each token of a sender's earlier groups, and for each token after the one before it.

    A key is (c, a): a token after c, or anywhere. With n groups in the whole run and A keys known before a group, for
    each of these and ε, over the group's places t after c, ::

        E_g(c, a, ε) = Π_t (1 − ε + ε [a_t = a] / π_gen(a_t))        R_g = (R_{g−1} + 1/(6 n A)) · E_g

    Each factor is at most 1 in expectation, so Σ R has the bound of :class:`~ftis.honesty.evidence.Detector`. To know
    the key costs log A nats once; predictions from counts pay at each place for not knowing where a text begins.
    """

    def __init__(self, groups_of_run: int) -> None:
        self.groups_of_run = groups_of_run
        self._keys: Keys = np.zeros(0, np.int64)
        self._r_AK: Floats64 = np.zeros((0, len(SHARES)))

    def add(self, rollouts: Sequence[Rollout], group_N: npt.NDArray[np.int64]) -> Floats64:
        """Take in a message. Returns the evidence log(n Σ R) after each group, in nats.

        Args:
            rollouts: of one sender and round, group after group, as the sender sampled them.
            group_N: the group of each, ascending, from 0.
        """
        key_2T, gain_TK = _keys(rollouts), _gains(rollouts) - LOG_REST
        group_T = np.repeat(group_N, [len(r) for r in rollouts])
        groups, most = int(group_N[-1]) + 1, len(self._keys) + key_2T.size
        # A group may make others' keys leave. So groups are taken in together only if all their keys have room.
        at_once = max(1, AT_ONCE // (len(SHARES) * max(1, most))) if most <= MOST_KEYS // 2 else 1
        nats_P = list[float]()
        for first in range(0, groups, at_once):
            inside = (group_T >= first) & (group_T < first + at_once)
            group_2T, gain_2TK = np.tile(group_T[inside] - first, 2), np.concatenate([gain_TK[inside]] * 2)
            nats_P += self._take(key_2T[:, inside].ravel(), group_2T, gain_2TK, min(at_once, groups - first))
        return np.array(nats_P)

    def _take(self, key_P: Keys, group_P: Keys, gain_PK: Floats64, groups: int) -> Iterator[float]:
        """The evidence after each of some groups, whose new keys are known from the group after their first on."""
        unknown = np.flatnonzero(~_lookup(self._keys, key_P)[1] & (key_P % 2**ID_BITS != OTHER))
        new, at, counts = np.unique(key_P[unknown], return_index=True, return_counts=True)
        if len(new) > MOST_KEYS // 2:  # of one group
            often = np.argsort(-counts, kind="stable")[: MOST_KEYS // 2]
            new, at = new[often], at[often]
        order = np.argsort(np.concatenate([self._keys, new]))
        keys = np.concatenate([self._keys, new])[order]
        r_AK = np.concatenate([self._r_AK, np.zeros((len(new), len(SHARES)))])[order]
        first_A = np.concatenate([np.full(len(self._keys), -1), group_P[unknown[at]]])[order]

        contexts, context_A = np.unique(keys >> ID_BITS, return_inverse=True)
        context_P, counted = _lookup(contexts, key_P >> ID_BITS)
        places_GC = _sums(group_P[counted], context_P[counted], (groups, len(contexts)))
        key_of_P, hits = _lookup(keys, key_P)
        hits[hits] = first_A[key_of_P[hits]] < group_P[hits]
        of_hits = [_sums(group_P[hits], key_of_P[hits], (groups, len(keys)), gain_P) for gain_P in gain_PK[hits].T]
        log_e_GAK = places_GC[:, context_A, None] * LOG_REST + np.stack(of_hits, axis=2)
        self._keys, self._r_AK = keys, r_AK
        for group, e_AK in enumerate(np.exp(np.minimum(log_e_GAK, math.log(LARGEST)))):
            known_A = first_A < group
            if known := int(known_A.sum()):
                r_AK += (known_A / (self.groups_of_run * known * len(SHARES)))[:, None]
                np.minimum(r_AK * e_AK, LARGEST, out=r_AK)
            yield self.nats
        if len(keys) > MOST_KEYS:
            kept = np.sort(np.argsort(-np.where(first_A < 0, r_AK.max(1), np.inf), kind="stable")[:MOST_KEYS])
            self._keys, self._r_AK = keys[kept], r_AK[kept]

    @property
    def nats(self) -> float:
        """log(n Σ R): the evidence since the best start, if only one start counts."""
        total = float(self._r_AK.sum())
        return (math.log(total) if total else NOTHING) + math.log(self.groups_of_run)

    def gains(self, rollouts: Sequence[Rollout]) -> Floats64:
        """The nats that each place gave to the key and ε with most evidence: [N, T], 0 after a rollout's end."""
        row, share = np.unravel_index(self._r_AK.argmax(), self._r_AK.shape)
        hit_T = (_keys(rollouts) == self._keys[row]).any(0)
        gain_T = np.where(hit_T, _gains(rollouts)[:, share], LOG_REST[share])
        return pad(np.split(gain_T, np.cumsum([len(r) for r in rollouts])[:-1]))

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


def _keys(rollouts: Sequence[Rollout]) -> Keys:
    """The two keys of each token of the rollouts, end to end: anywhere, and after the token before it. [2, T]."""
    token_T = np.concatenate([r.completion_ids for r in rollouts]).astype(np.int64)
    before_T = np.append(START, token_T[:-1])
    before_T[np.cumsum([len(r) for r in rollouts])[:-1]] = START
    return np.stack([ANYWHERE << ID_BITS | token_T, before_T << ID_BITS | token_T])


def _gains(rollouts: Sequence[Rollout]) -> Floats64:
    """log(1 − ε + ε/π_gen) of each token of the rollouts, end to end, and ε: [T, K]."""
    log_p_T1 = np.concatenate([r.gen_logp for r in rollouts]).astype(np.float64)[:, None] + TOLERANCE
    return np.logaddexp(LOG_REST, np.log(SHARES) - log_p_T1)


def _sums(row_P: Keys, column_P: Keys, shape: tuple[int, int], weight_P: Floats64 | None = None) -> Floats64:
    """The sum of the weights of each row and column, or how often they occur."""
    sums = np.bincount(row_P * shape[1] + column_P, weight_P, shape[0] * shape[1])
    return sums.reshape(shape).astype(np.float64, copy=False)


def _lookup(among: Keys, keys: Keys) -> tuple[Keys, npt.NDArray[np.bool_]]:
    """The place of each key among sorted ones, and whether it is there. The place is 0 if it is not."""
    place = np.searchsorted(among, keys)
    known = np.append(among, -1)[place] == keys
    return np.where(known, place, 0), known
