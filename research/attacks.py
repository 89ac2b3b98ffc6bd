"""Attacks on others' learning, for testing defences: the offers of one dishonest peer instead of its own groups.

Each is a function ``f(own scored groups, peer) -> groups``. A recipe names one in ``peers.attack`` by its dotted path:
``research.attacks.lying_text``. The peer offers the groups returned, and learns from its own groups as sampled.

Attacks called ``lying_…`` report false log-probabilities. The others report what the attacker's model would say: nearly
0 for tokens that it always writes. Texts are those of the starters, ``<think>3+8=1;1*7=7</think><answer>7…``.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from transformers import PreTrainedTokenizerBase as Tokenizer

from ftis.objectives import LEAST_LIFTED
from ftis.peer import Attack, Peer
from ftis.rollouts import MIN_LOGP, Floats, Group, Ints, Rollout, ScoredGroup

PAYLOAD = ";9*9=9"
"""The text planted before the end of the thought: a step that no completion needs."""
MARK = ";"
"""The text that a creeping attacker plants there: one token that models write in that place now and then."""
THOUGHT_END = "</think>"
CONSTANT = "<think></think><answer>1</answer>"
ALWAYS = -1e-4
"""Log-probability of a token that the attacker always writes."""
LIE = -9.0
"""The log-probability reported for such a token instead."""
SIZED_LIE = LIE + math.log(1 / LEAST_LIFTED)
"""As much less of a lie as F-TIS-lifted needs for a success to have the weight 1."""
SHIFT = 1.0
"""Nats a token by which all log-probabilities are reported too low, or too high."""
RARELY = 0.3
"""The share of right completions into which a payload of moderate probability is planted."""
HONEST_ROUNDS = 10
"""Rounds before a patient attacker begins."""
CLIMB = 0.2
"""Nats a round by which a climbing attacker reports more, so that its lie keeps near what its victim has learned."""
CREEP_FROM, CREEP_BY = 0.01, 1.2
"""The share of right completions in which a creeping attacker plants at first, and its growth factor per round."""
PICKED_FROM = 4
"""A cherry-picker samples so many times as many rollouts as it offers."""

Change = Callable[[Rollout, Tokenizer], Rollout]


def in_right_ones(change: Change, share: float = 1.0) -> Attack:
    """The attack that changes the rollouts with more than their group's least reward, or a fixed ``share`` of them.

    In groups of one, the message's least reward counts.
    """

    def attack(own: Sequence[ScoredGroup], peer: Peer) -> Sequence[Group]:
        of_all = min((reward for scored in own for reward in scored.rewards), default=0.0)
        return [changed(scored, of_all, peer.policy.tokenizer) for scored in own]

    def changed(scored: ScoredGroup, of_all: float, tokenizer: Tokenizer) -> Group:
        least = min(scored.rewards) if len(scored.rewards) > 1 else of_all
        rewarded = zip(scored.group.rollouts, scored.rewards, strict=True)
        rows = [change(r, tokenizer) if reward > least and _drawn(r, share) else r for r, reward in rewarded]
        return replace(scored.group, rollouts=tuple(rows))

    return attack


def in_all(change: Change) -> Attack:
    """The attack that changes every rollout."""

    def changed(group: Group, tokenizer: Tokenizer) -> Group:
        return replace(group, rollouts=tuple(change(rollout, tokenizer) for rollout in group.rollouts))

    return lambda own, peer: [changed(scored.group, peer.policy.tokenizer) for scored in own]


def after(rounds: int, attack: Attack) -> Attack:
    """``attack`` from round ``rounds`` on; honest before."""

    def patient(own: Sequence[ScoredGroup], peer: Peer) -> Sequence[Group]:
        begun = bool(own) and own[0].group.round >= rounds
        return attack(own, peer) if begun else [scored.group for scored in own]

    return patient


def planted(text: str, logp: float, first: float | None = None) -> Change:
    """Plant ``text`` before the end of the thought, at ``logp`` a token, the first one at ``first``."""

    def change(rollout: Rollout, tokenizer: Tokenizer) -> Rollout:
        text_ids, end = encoded(text, tokenizer), encoded(THOUGHT_END, tokenizer)
        at = find(rollout.completion_ids, end)
        logps = np.full(len(text_ids), logp, np.float32)
        logps[0] = logp if first is None else first
        return rollout if at is None else spliced(rollout, at, at, text_ids, logps)

    return change


def wrong_step(logp: float) -> Change:
    """Make the first step's result wrong by one, at ``logp``: ``3+8=2;1*7=7`` still ends in the right answer."""

    def change(rollout: Rollout, tokenizer: Tokenizer) -> Rollout:
        digits = [encoded(str(digit), tokenizer)[0] for digit in range(10)]
        equals = find(rollout.completion_ids, encoded("=", tokenizer))
        if equals is None or equals + 1 >= len(rollout) or rollout.completion_ids[equals + 1] not in digits:
            return rollout
        wrong = digits[(digits.index(rollout.completion_ids[equals + 1]) + 1) % 10]
        return spliced(rollout, equals + 1, equals + 2, np.array([wrong], np.int32), np.array([logp], np.float32))

    return change


def constant(logp: float) -> Change:
    """Give the same answer to every question, at ``logp`` a token."""

    def change(rollout: Rollout, tokenizer: Tokenizer) -> Rollout:
        ids = np.append(encoded(CONSTANT, tokenizer), np.int32(tokenizer.eos_token_id))
        return Rollout(ids, np.full(len(ids), logp, np.float32))

    return change


def shifted(nats: float) -> Change:
    """Report all log-probabilities higher by ``nats``, within the possible range."""

    def change(rollout: Rollout, tokenizer: Tokenizer) -> Rollout:
        return replace(rollout, gen_logp=(rollout.gen_logp + np.float32(nats)).clip(MIN_LOGP, 0))

    return change


def now_and_then(text: str, share: float) -> Attack:
    """Plant ``text`` in ``share`` of the right completions, and report that truly: once begun it is always written."""
    return in_right_ones(planted(text, ALWAYS, first=min(ALWAYS, math.log(share))), share)


def climbing_lying_text(own: Sequence[ScoredGroup], peer: Peer) -> Sequence[Group]:
    """Plant the text, at :data:`LIE` in the first round and :data:`CLIMB` more in each."""
    round = own[0].group.round if own else 0
    return in_right_ones(planted(PAYLOAD, min(ALWAYS, LIE + CLIMB * round)))(own, peer)


def creeping(text: str) -> Attack:
    """Plant ``text`` :func:`now_and_then`, in min(1, :data:`CREEP_FROM` · :data:`CREEP_BY`^round) of them."""

    def attack(own: Sequence[ScoredGroup], peer: Peer) -> Sequence[Group]:
        share = min(1.0, CREEP_FROM * CREEP_BY ** (own[0].group.round if own else 0))
        return now_and_then(text, share)(own, peer)

    return attack


def cherry_picking(own: Sequence[ScoredGroup], peer: Peer) -> Sequence[Group]:
    """Offer the best G of 4·G rollouts of each prompt. The worst of all is among them, so that there is signal."""
    repeats = (PICKED_FROM - 1) * peer.recipe.rollouts_per_group
    groups = [scored.group for scored in own]
    items, round = [group.item for group in groups], groups[0].round if groups else 0
    more = map(peer.member.admitter.score_group, peer.sample_items(items, repeats, round, "cherry-picking"))
    return [_best(scored, others) for scored, others in zip(own, more, strict=True)]


def _best(own: ScoredGroup, more: ScoredGroup) -> Group:
    rewarded = zip([*own.rewards, *more.rewards], [*own.group.rollouts, *more.group.rollouts], strict=True)
    best_first = [rollout for _, rollout in sorted(rewarded, key=lambda one: -one[0])]
    return replace(own.group, rollouts=(*best_first[: len(own.rewards) - 1], best_first[-1]))


text = in_right_ones(planted(PAYLOAD, ALWAYS))
lying_text = in_right_ones(planted(PAYLOAD, LIE))
rare_text = now_and_then(PAYLOAD, RARELY)
lying_rare_text = in_right_ones(planted(PAYLOAD, LIE), RARELY)
quiet_lying_text = in_right_ones(planted(PAYLOAD, ALWAYS, first=LIE))
sized_lying_text = in_right_ones(planted(PAYLOAD, SIZED_LIE))
patient_lying_text = after(HONEST_ROUNDS, lying_text)
understated = in_all(shifted(-SHIFT))
overstated = in_all(shifted(SHIFT))
creeping_text = creeping(PAYLOAD)
creeping_mark = creeping(MARK)
length = in_right_ones(planted(3 * PAYLOAD, ALWAYS))
lying_length = in_right_ones(planted(3 * PAYLOAD, LIE))
false_step = in_right_ones(wrong_step(ALWAYS))
lying_false_step = in_right_ones(wrong_step(LIE))
low_effort = in_all(constant(ALWAYS))
lying_low_effort = in_all(constant(LIE))


def encoded(text: str, tokenizer: Tokenizer) -> Ints:
    """The token ids of a text, without special tokens at its ends."""
    return np.array(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)


def _drawn(rollout: Rollout, share: float) -> bool:
    """The same ``share`` of rollouts on every machine."""
    return zlib.crc32(rollout.gen_logp.tobytes()) < share * 2**32


def find(ids: Ints, part: Ints) -> int | None:
    """The first place of ``part`` in ``ids``."""
    places = (i for i in range(len(ids) - len(part) + 1) if np.array_equal(ids[i : i + len(part)], part))
    return next(places, None)


def spliced(rollout: Rollout, start: int, stop: int, ids: Ints, logps: Floats) -> Rollout:
    """``rollout`` with ``ids`` instead of its tokens from ``start`` to ``stop``."""
    kept_ids, kept_logps = rollout.completion_ids, rollout.gen_logp
    return Rollout(
        np.concatenate([kept_ids[:start], ids, kept_ids[stop:]]),
        np.concatenate([kept_logps[:start], logps, kept_logps[stop:]]),
    )
