"""Evidence that a sender writes a token more often than it reports: an e-detector for each of its tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ftis.honesty.evidence import NOTHING, STAKES, TOLERANCE, Floats64, rounding
from ftis.honesty.spellings import OTHER
from ftis.rollouts import Ints, Rollout, pad

SHARES = STAKES / 16
"""The part ε that is staked on a token at each place, about the lies per token: 1/16, 1/64, ..., 1/16384."""
MOST_TOKENS = 2**16
"""The most tokens with evidence at a time; the oldest are forgotten first."""


class Frequent:
    """An e-detector for each token of a sender's earlier groups.

    With a_t the tokens of a group, n groups in the whole run and A tokens known before it, for each of these and ε, ::

        E_g(a, ε) = Π_t (1 − ε + ε [a_t = a] / π_gen(a_t))        R_g = (R_{g−1} + 1/(6 n A)) · E_g

    Each factor is at most 1 in expectation, so Σ R has the bound of :class:`~ftis.honesty.evidence.Detector`. A planted
    token is found wherever it stands. To know it costs log A nats once; predictions from counts pay at each place.
    """

    def __init__(self, groups_of_run: int) -> None:
        self.groups_of_run = groups_of_run
        self._tokens: list[int] = []
        self._place: dict[int, int] = {}
        self._log_r_AK: Floats64 = np.zeros((0, len(SHARES)))

    def add(self, rollouts: Sequence[Rollout], group_N: npt.NDArray[np.int64], log_choices: float = 0.0) -> Floats64:
        """Take in a message. Returns the evidence log(n Σ R) after each group, in nats.

        Args:
            rollouts: of one sender and round, group after group, as the sender sampled them.
            group_N: the group of each, ascending, from 0.
            log_choices: log of the number of ways in which the sender may have chosen these groups among more.
        """
        ids_T, gain_TK = np.concatenate([r.completion_ids for r in rollouts]), self._gains(rollouts)
        group_T = np.repeat(group_N, [len(r) for r in rollouts])
        nats_P = []
        for group in range(group_N[-1] + 1):
            inside = group_T == group
            if self._tokens:
                place_T = self._places(ids_T[inside])
                known = place_T >= 0
                log_e_AK = np.tile(inside.sum() * np.log1p(-SHARES), (len(self._tokens), 1))
                np.add.at(log_e_AK, place_T[known], gain_TK[inside][known] - np.log1p(-SHARES))
                start = -math.log(self.groups_of_run * self._log_r_AK.size)
                self._log_r_AK = np.logaddexp(self._log_r_AK, start) + log_e_AK
            nats_P.append(self.nats - log_choices)
            self._know(ids_T[inside])
        self._log_r_AK -= log_choices
        return np.array(nats_P)

    @property
    def nats(self) -> float:
        """log(n Σ R): the evidence since the best start, if only one start counts."""
        return float(np.logaddexp.reduce(self._log_r_AK, axis=None, initial=NOTHING)) + math.log(self.groups_of_run)

    def gains(self, rollouts: Sequence[Rollout]) -> Floats64:
        """The nats that each place gave to the token and ε with most evidence: [N, T], 0 behind a rollout's end."""
        token, share = np.unravel_index(self._log_r_AK.argmax(), self._log_r_AK.shape)
        place_T = self._places(np.concatenate([r.completion_ids for r in rollouts]))
        gain_T = np.where(place_T == token, self._gains(rollouts)[:, share], np.log1p(-SHARES[share]))
        return pad(np.split(gain_T, np.cumsum([len(r) for r in rollouts])[:-1]))

    def _know(self, ids: Ints) -> None:
        new = [token for token in np.unique(ids).tolist() if token not in self._place and token != OTHER]
        if new:
            log_r_AK = np.concatenate([self._log_r_AK, np.full((len(new), len(SHARES)), NOTHING)])
            self._keep([*self._tokens, *new], log_r_AK)

    def _places(self, ids: Ints) -> npt.NDArray[np.int64]:
        """The row of each token; −1 for one that is not known."""
        tokens, of_each = np.unique(ids, return_inverse=True)
        return np.array([self._place.get(token, -1) for token in tokens.tolist()], dtype=np.int64)[of_each]

    def _gains(self, rollouts: Sequence[Rollout]) -> Floats64:
        """log(1 − ε + ε/π_gen) of each token of the rollouts, end to end, and ε: [T, K]."""
        reported = [r.gen_logp for r in rollouts]
        off = TOLERANCE + rounding(reported)
        log_p_T1 = np.concatenate(reported).astype(np.float64)[:, None] + off
        return np.logaddexp(np.log1p(-SHARES), np.log(SHARES) - log_p_T1)

    def _keep(self, tokens: list[int], log_r_AK: Floats64) -> None:
        self._tokens, self._log_r_AK = tokens[-MOST_TOKENS:], log_r_AK[-MOST_TOKENS:]
        self._place = {token: place for place, token in enumerate(self._tokens)}

    def state(self) -> Mapping[str, Any]:
        """The tokens and their evidence as a JSON object."""
        return {"tokens": self._tokens, "log_r": self._log_r_AK.tolist()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state`."""
        self._keep(list(state["tokens"]), np.array(state["log_r"], dtype=np.float64).reshape(-1, len(SHARES)))
