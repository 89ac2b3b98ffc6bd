"""Sampler, learner and a plain pass see one policy, or nothing is trained."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import TinyPolicy
from policies import check_drawn, drawn_rows, rows_of
from test_lengths import by_prefixes
from torch import Tensor

from ftis.config import ModelError
from ftis.engines import agreement
from ftis.engines.agreement import TRIED_TOKENS, Rows, gaps, plain_logps, require_agreement, sees_padding, trial
from ftis.engines.builtin import builtin_sampler
from ftis.engines.generate import generate_sampler
from ftis.engines.samplers import InPlace, _first_that_agrees, open_sampler
from ftis.policy import Forward, Policy
from ftis.rollouts import Rollout
from ftis.sampling import Decoding

ENDS = frozenset({2, 11, 13, 17, 23, 29})
GENERATE, BY_LENGTH = "transformers' generate", "prompts of one length at a time"
SLOW = {
    **dict.fromkeys(("qwen2", "qwen3", "llama", "llama3", "gemma", "gemma3", "gpt2", "sliding", "mixtral"), ""),
    **dict.fromkeys(("ministral3", "gemma4", "smollm3", "olmo2", "olmo3"), ""),
    **dict.fromkeys(("gptj", "falcon-alibi", "qwen3.5", "granite4", "lfm2", "llama4"), GENERATE),
    **dict.fromkeys(("phi3-long", "llama-long"), BY_LENGTH),
    **dict.fromkeys(("minimax", "recurrent-gemma"), f"{GENERATE}, {BY_LENGTH}"),
    "zamba2": f"{GENERATE} without a cache, {BY_LENGTH}",
}
"""How each kind of model samples, if the built-in sampler does not fit it."""


@pytest.mark.parametrize("kind", SLOW)
def test_sampler_and_learner_give_the_log_probabilities_of_a_row_by_itself(kind: str, tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy(kind)
    policy.end_ids = ENDS
    sampler = open_sampler("auto", policy, longest=40)
    assert getattr(sampler, "slow", None) == SLOW[kind]
    prompts, decoding = rows_of((3, 14, 7, 16, 17, 20, 3)), Decoding(18)
    groups = sampler(policy, prompts, 3, decoding, 0)
    atol = 5e-4 if SLOW[kind] else 2e-4  # a recurrence rounds otherwise in chunks than token by token
    check_drawn(policy, prompts, groups, atol=atol)
    rows = list(zip(*drawn_rows(prompts, groups), strict=True))
    assert len({len(ids) for _, ids, _ in rows}) > 3
    for _, ids, _ in rows:
        assert not ENDS.intersection(ids[:-1].tolist())
        assert ids[-1] in ENDS or len(ids) == 18
    for prompt, ids, logp in rows[::4]:
        np.testing.assert_allclose(logp, by_prefixes(policy, prompt, ids), atol=atol)


@dataclass
class OffBeyond:
    """A sampler whose log-probabilities of tokens behind longer rows are off."""

    length: int
    by: float = 1.0
    rollout: int = -1
    """The only rollout of each group that is off; -1: all are."""
    places: float = np.inf
    """The number of places that are off."""
    draw: Any = builtin_sampler

    def __call__(
        self, policy: Policy, prompt_ids: Any, repeats: int, decoding: Decoding, seed: int, batch_size: int = 0
    ) -> list[tuple[Rollout, ...]]:
        groups = self.draw(policy, prompt_ids, repeats, decoding, seed, batch_size)
        return [
            tuple(self._off(len(p), r) if self.rollout in (-1, i) else r for i, r in enumerate(group))
            for p, group in zip(prompt_ids, groups, strict=True)
        ]

    def _off(self, before: int, rollout: Rollout) -> Rollout:
        places = before + np.arange(len(rollout)) - self.length
        beyond = ((places >= 0) & (places < self.places)).astype(np.float32)
        return replace(rollout, gen_logp=(rollout.gen_logp - self.by * beyond).astype(np.float32))


@dataclass
class Scaled(Forward):
    """A way to run rows whose outputs are other ones."""

    forward: Forward
    padding_cost: float = 1.0

    def held(self) -> Any:
        return self.forward.held()

    def __call__(self, prompts: Any, completions: Any) -> Tensor:
        return 1.3 * self.forward(prompts, completions)


@pytest.mark.parametrize("length", [40, 64, 96, 120])
def test_a_trial_passes_the_lengths_that_the_model_names(length: int, tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy(model={"my_window": length})
    if length == 120:  # the last
        assert trial(policy, OffBeyond(length), 128).sampler > 0.5
    assert trial(policy, OffBeyond(length - 1), 128).sampler > 0.5
    for found in (trial(policy, builtin_sampler, 128), trial(policy, OffBeyond(length), length)):  # no row gets so long
        assert max(found.sampler, found.learner) < 1e-4


def test_a_trial_s_rows_become_long_though_the_first_token_would_end_them(tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy(model={"my_window": 64})
    policy.end_ids = every = frozenset(range(policy.vocab_size))
    for draw in (OffBeyond(63), OffBeyond(63, draw=generate_sampler)):
        assert trial(policy, draw, 128).sampler > 0.5
    assert policy.end_ids == every


@pytest.mark.parametrize(("window", "longest", "tried"), [(300, 600, True), (300, 299, False), (100, 900, True)])
def test_a_length_beyond_the_tokens_of_a_trial_is_tried_if_rows_reach_it(
    window: int, longest: int, tried: bool, tiny_policy: TinyPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model computes otherwise around that length alone, so that the longest row does not show it."""
    monkeypatch.setitem(TRIED_TOKENS, "cpu", 256)
    policy = tiny_policy(model={"my_window": window, "max_position_embeddings": 1024})
    assert (trial(policy, OffBeyond(window - 1, places=2), longest).sampler > 0.5) == tried


def test_in_float32_the_policy_s_own_arithmetic_is_held_to_each_token(policy: Policy) -> None:
    prompts = rows_of((3, 9, 5))
    off = OffBeyond(0, by=0.05)(policy, prompts, 2, Decoding(8), 0)
    require_agreement(policy, prompts, off, Decoding(8))  # another engine's rounding
    with pytest.raises(ModelError, match="the sampler"):
        require_agreement(policy, prompts, off, Decoding(8), in_place=True)
    assert open_sampler("auto", policy).in_place
    found = trial(policy, OffBeyond(31, by=0.02), 32)  # the row's last token alone
    assert found.sampler == pytest.approx(0.02, abs=1e-4)
    with pytest.raises(ModelError, match="the sampler"):
        found.refuse(policy)
    assert trial(policy, OffBeyond(0, rollout=1), 32).sampler > 0.5  # though right for one row at a time


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("in_place", [False, True])
def test_one_token_of_a_long_row_is_enough(dtype: str, in_place: bool, tiny_policy: TinyPolicy) -> None:
    policy, prompts, decoding = tiny_policy(dtype=dtype), rows_of((3, 5)), Decoding(110)
    policy.end_ids = frozenset()
    groups = builtin_sampler(policy, prompts, 1, decoding, 0)
    require_agreement(policy, prompts, groups, decoding, in_place)
    groups[1][0].gen_logp[60] -= 2  # a root mean square of 0.2
    with pytest.raises(ModelError, match="the sampler"):
        require_agreement(policy, prompts, groups, decoding, in_place)


def test_a_learner_that_no_sampler_mends_is_refused(tiny_policy: TinyPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, never = tiny_policy(), Mock()
    monkeypatch.setattr(policy, "logps", tiny_policy(model={"seed": 1}).logps)
    with pytest.raises(ModelError, match="the learner"):
        _first_that_agrees(policy, [InPlace(builtin_sampler), InPlace(never)], 32)
    never.assert_not_called()


@pytest.mark.parametrize("kind", ["qwen2", "gpt2", "mixtral", "qwen3.5", "granite4", "minimax", "recurrent-gemma"])
def test_padding_in_front_is_seen_by_models_that_mix_it_into_their_states(kind: str, tiny_policy: TinyPolicy) -> None:
    assert sees_padding(tiny_policy(kind)) == (kind == "recurrent-gemma")


def test_the_first_way_that_agrees_is_taken(policy: Policy) -> None:
    off, on = InPlace(OffBeyond(0)), InPlace(builtin_sampler, slow="slowly")
    assert _first_that_agrees(policy, [off, on], 32) is on
    little = InPlace(OffBeyond(0, by=0.005))  # more than a learner takes for its own, and no other policy
    assert _first_that_agrees(policy, [off, little], 32) is little
    assert _first_that_agrees(policy, [little, on], 32) is on
    with pytest.raises(ModelError, match="the sampler"):
        _first_that_agrees(policy, [off, off], 32)


@pytest.mark.parametrize(("name", "offered"), [("auto", False), ("transformers", False), ("builtin", True)])
def test_no_sampler_that_was_tried_is_offered(
    name: str, offered: bool, tiny_policy: TinyPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    off = InPlace(OffBeyond(0))
    monkeypatch.setattr("ftis.engines.samplers.opener", lambda name, options: lambda policy: off)
    with pytest.raises(ModelError, match="the sampler is") as caught:
        open_sampler(name, tiny_policy())
    assert ("sampling.sampler" in str(caught.value)) == offered


def test_a_learner_that_differs_runs_rows_as_they_are(policy: Policy) -> None:
    expected = policy.logps(rows_of((3, 9)), rows_of((4, 5)), 1.0)
    policy.forward = Scaled(policy.forward)
    open_sampler("auto", policy)
    for row, logp in zip(policy.logps(rows_of((3, 9)), rows_of((4, 5)), 1.0), expected, strict=True):
        np.testing.assert_allclose(row, logp, atol=1e-5)


DECODINGS = [Decoding(8), Decoding(8, 0.7), Decoding(8, 0.0), Decoding(8, top_k=5)]


@pytest.mark.parametrize(
    ("off", "decoding"),
    [
        *itertools.product(["sampler", "learner"], DECODINGS),
        *(("plain pass", decoding) for decoding in DECODINGS if not decoding.truncated),  # or nothing compares the two
    ],
)
def test_what_differs_is_named(
    off: str, decoding: Decoding, tiny_policy: TinyPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, prompts = tiny_policy(), rows_of((3, 9, 5))
    groups = builtin_sampler(policy, prompts, 2, decoding, 0)
    require_agreement(policy, prompts, groups, decoding)
    if off == "sampler":
        groups = [tuple(OffBeyond(0)._off(0, rollout) for rollout in group) for group in groups]
    elif off == "learner":
        policy.forward = Scaled(policy.forward)
    else:
        other = tiny_policy(model={"seed": 1})
        monkeypatch.setattr("ftis.engines.agreement.plain_forward", lambda policy: Scaled(other.forward))
    with pytest.raises(ModelError) as caught:
        require_agreement(policy, prompts, groups, decoding)
    told = str(caught.value).partition("one policy: ")[2].partition(" nats off")[0]
    assert off in told
    assert not any(other in told for other in {"sampler", "learner", "plain pass"} - {off})


@pytest.mark.parametrize("decoding", [Decoding(6, top_k=2), Decoding(6, 0.7, top_p=0.3), Decoding(6, 2.0, 20, 0.5)])
def test_a_token_that_top_k_or_top_p_leave_out_is_a_difference(decoding: Decoding, policy: Policy) -> None:
    prompts = rows_of((3, 9))
    policy.end_ids = frozenset()
    groups = builtin_sampler(policy, prompts, 1, decoding, 0)
    require_agreement(policy, prompts, groups, decoding, in_place=True)
    ids, logp = groups[1][0].completion_ids.copy(), groups[1][0].gen_logp.copy()
    row = np.concatenate([prompts[1], ids[:-1]])
    with torch.no_grad():
        logits_V = policy.model(torch.from_numpy(row)[None].long()).logits[0, -1]
    ids[-1], logp[-1] = int(logits_V.argmin()), -0.001
    with pytest.raises(ModelError, match="the sampler"):
        require_agreement(policy, prompts, [groups[0], (Rollout(ids, logp),)], decoding, in_place=True)


@pytest.mark.parametrize(
    ("decoding", "expected"),
    [
        (Decoding(1, top_k=2), np.log(0.15 / 0.95) - np.log(0.3 / 0.15) / 2),
        (Decoding(1, top_p=0.79), np.log(0.15 / 0.95) - np.log((0.8 / 0.2) / (0.79 / 0.21)) / 2),
        (Decoding(1, top_p=0.79, top_k=2), np.log(0.15 / 0.95) - np.log(0.3 / 0.15) / 2),
        (Decoding(1, top_k=3), np.log(0.15 / 0.95)),
        (Decoding(1, top_p=0.81), np.log(0.15 / 0.95)),
    ],
)
def test_a_token_counts_by_what_it_lacks(
    decoding: Decoding, expected: float, tiny_policy: TinyPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits_TV = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    monkeypatch.setattr("ftis.engines.agreement.plain_forward", lambda policy: lambda *rows: logits_TV)
    row = np.array([2], dtype=np.int32)
    ((found,),) = plain_logps(tiny_policy(), Rows([row], [row]), [decoding], take_in=True)
    assert found[0] == pytest.approx(expected, abs=1e-5)


FROZEN = {"train": "lora", "lora_r": 4, "lora_target_modules": ("q_proj", "v_proj"), "frozen_dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("kind", "peer"), [("qwen2", {}), ("mixtral", {}), ("gemma3", {}), ("qwen2", FROZEN), ("gemma3", FROZEN)]
)
def test_what_bfloat16_rounds_is_no_difference(kind: str, peer: dict[str, Any], tiny_policy: TinyPolicy) -> None:
    policy, prompts = tiny_policy(kind, dtype="bfloat16", **peer), rows_of((3, 9, 20, 5) * 4)
    sampler = open_sampler("auto", policy, longest=60)
    assert getattr(sampler, "slow", None) == ""
    groups = sampler(policy, prompts, 2, Decoding(30), 0)
    require_agreement(policy, prompts, groups, Decoding(30), in_place=True)
    found = gaps(policy, prompts, [group[0] for group in groups], Decoding(30))
    assert 1e-3 < found.sampler <= found.most[1]
    off = [tuple(OffBeyond(0, by=0.35)._off(0, rollout) for rollout in group) for group in groups]
    with pytest.raises(ModelError, match="the sampler"):
        require_agreement(policy, prompts, off, Decoding(30), in_place=True)
    require_agreement(policy, prompts, off, Decoding(30))  # another engine's rounding


@pytest.mark.parametrize(("explained", "limit"), [(0.0, 0.1), (0.05, 0.2)])
@pytest.mark.parametrize("count", [1, 3, 8, 200])
def test_a_short_row_of_bfloat16_may_differ_more_than_a_long_one(
    count: int, explained: float, limit: float, tiny_policy: TinyPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Differences of d in each of n tokens pass up to √(24 / n) times .1 nats, or four times what is rounding."""
    monkeypatch.setattr(agreement, "rounding", lambda *_: explained)
    policy = tiny_policy(dtype="bfloat16")
    (prompt, ids) = rows_of([4, count])
    plain = plain_logps(policy, Rows([prompt], [ids]), [Decoding(count)])[0][0]
    most = limit * (max(count, 24) / count) ** 0.5

    def check(by: float) -> None:
        require_agreement(policy, [prompt], [(Rollout(ids, plain - by),)], Decoding(count), in_place=True)

    check(most * 0.99)
    with pytest.raises(ModelError, match="the sampler"):
        check(most * 1.01)


def test_rounding_is_looked_at_over_some_rows_at_the_temperature_of_sampling(
    tiny_policy: TinyPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shortest and the longest row alone may hold a few tokens that happen to round little, or much."""
    monkeypatch.setattr(agreement, "rounding", looked := Mock(side_effect=[0.1, 0.02, 0.02, 0.1, 0.02, 0.02]))
    policy, prompts = tiny_policy(dtype="bfloat16"), rows_of(range(4, 44))
    ids = rows_of([30])[0]
    plain = plain_logps(policy, Rows(prompts, [ids] * 40), [Decoding(30, 0.7)])[0]
    groups = [(Rollout(ids, logp - 0.3),) for logp in plain]
    for passes in (True, True, False):  # the compared rows round most, the others, neither
        with nullcontext() if passes else pytest.raises(ModelError, match="the sampler"):
            require_agreement(policy, prompts, groups, Decoding(30, 0.7), in_place=True)
    for call in looked.call_args_list:
        _, rows, temperature = call.args
        assert len(rows.completions) == 2 or 8 <= len(rows.completions) <= 16
        assert temperature == 0.7
