"""Samplers: what was drawn, with which probability, from exactly which distribution."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import TinyPolicy, assert_one_line, make_tokenizer
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from policies import check_drawn, drawn_rows, ids_of, rows_of
from scipy.stats import chi2
from transformers import Qwen2Config, Qwen2ForCausalLM

from ftis.config import ModelError, PeerConfig, RecipeError, SamplingConfig
from ftis.engines import devices, slots
from ftis.engines.builtin import BLOCK, WORTH_DROPPING, _inverse_cdf, _Rows, builtin_sampler
from ftis.engines.decoder import FusedDecoder, StepGraph, fuses
from ftis.engines.generate import generate_sampler
from ftis.engines.rows import SHARED_FROM, whole_rows
from ftis.engines.samplers import open_sampler
from ftis.engines.slots import Room, SlotCache
from ftis.policy import Policy
from ftis.rollouts import Rollout
from ftis.sampling import Decoding, Draw, Sampler

SAMPLERS = pytest.mark.parametrize("sampler", [builtin_sampler, generate_sampler])
KINDS = ("qwen2", "qwen3", "llama", "gemma", "gpt2", "sliding", "gemma3")
WIDE_WINDOW = {"sliding_window": 24}

ENDS = frozenset({2, 11, 13, 17, 23, 29, 31, 37, 41, 43})
"""More end-of-sequence ids than usual, so that random models end their rows soon, at different steps."""

POISON = {
    "do_sample": True,
    "temperature": 0.05,
    "top_k": 2,
    "top_p": 0.3,
    "repetition_penalty": 4.0,
    "no_repeat_ngram_size": 1,
    "min_new_tokens": 9,
    "max_length": 3,
    "suppress_tokens": list(range(20, 40)),
    "eos_token_id": 2,
}
"""Generation defaults that would change every completion if any of them were heeded."""


PROMPTS = rows_of((3, 9, 5, 9, 1, 7))


def flat(groups: list[tuple[Rollout, ...]]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group]


def capture_steps(patch: pytest.MonkeyPatch) -> None:
    """Let steps be those that a GPU would capture, over all slots, here taken as they are."""
    patch.setattr(_Rows, "captures", property(lambda rows: True, lambda rows, value: None), raising=False)


def check_ends(rollout: Rollout, ends: frozenset[int], longest: int) -> None:
    """A rollout stops at its first end-of-sequence id, which it includes, or else at the maximum length."""
    ids = rollout.completion_ids.tolist()
    assert 1 <= len(ids) <= longest
    assert not ends.intersection(ids[:-1])
    assert ids[-1] in ends or len(ids) == longest


@settings(max_examples=24, deadline=None)
@given(
    st.sampled_from([builtin_sampler, generate_sampler]),
    st.sampled_from([*((kind, {}) for kind in KINDS), ("sliding", WIDE_WINDOW), ("gemma3", WIDE_WINDOW)]),
    st.lists(st.integers(1, 12), min_size=1, max_size=8),
    st.integers(1, 3),
    st.integers(0, 30),
    st.sampled_from([1, 3, 8, 1000]),
    st.sampled_from([1, 1000]),
    st.sampled_from([0.0, 1e12]),
    st.booleans(),
    st.sampled_from([0, 20]),
)
def test_greedy_text_is_the_same_however_it_is_drawn(
    tiny_policy: TinyPolicy,
    sampler: Draw,
    kind: tuple[str, dict[str, Any]],
    lengths: list[int],
    repeats: int,
    batch_size: int,
    rows_that_fit: int,
    prefilled: int,
    worth_dropping: float,
    captured: bool,
    shared: int,
) -> None:
    """In batches and parts, prefilled together, rows dropped and their places taken, over used slots or over all, and
    with a beginning that all prompts share.

    Rows of 24 tokens fit the wider windows, while slots, as rows take the places of others, are more.
    """
    policy = tiny_policy(kind[0], model=kind[1])
    policy.end_ids = ENDS
    beginning, decoding = rows_of([shared], seed=1)[0], Decoding(12, temperature=0.0)
    prompts = [np.concatenate([beginning, own]) for own in rows_of(lengths)]
    expected = [generate_sampler(policy, [prompt], 1, decoding, 0)[0][0].completion_ids.tolist() for prompt in prompts]
    config = policy.model.config
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(WORTH_DROPPING, "cpu", worth_dropping)
        patch.setattr(devices, "CPU_BYTES", rows_that_fit * slots.row_bytes(config, 36, 4))
        within = devices.CPU_BYTES // slots.prefill_bytes(config, prefilled * max(lengths), 4)
        patch.setattr(slots, "PREFILL_PARTS", max(1, within))
        if captured and (kind[0] not in ("sliding", "gemma3") or (kind[1] and not shared)):
            capture_steps(patch)
        groups = sampler(policy, prompts, repeats, decoding, 0, batch_size)
    assert ids_of(groups) == [[ids] * repeats for ids in expected]
    check_drawn(policy, prompts, groups)
    for rollout in flat(groups):
        check_ends(rollout, ENDS, 12)


@SAMPLERS
def test_a_lora_policy_is_sampled_with_its_adapter(sampler: Sampler, tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy(train="lora", lora_r=4, learning_rate=0.05)
    untrained = ids_of(sampler(policy, PROMPTS, 2, Decoding(10), 0))
    completions = rows_of((4,) * len(PROMPTS), seed=1)
    policy.step(PROMPTS, completions, 1.0, lambda logp, mask, rows: -logp.sum())
    groups = sampler(policy, PROMPTS, 2, Decoding(10), 0)
    assert ids_of(groups) != untrained
    check_drawn(policy, PROMPTS, groups)


@SAMPLERS
@pytest.mark.parametrize("train", ["full", "lora"])
def test_the_output_layer_gets_no_slice(sampler: Sampler, train: str, tiny_policy: TinyPolicy) -> None:
    """Of a slice torch may copy the layer's weights for each row."""
    policy, seen = tiny_policy(train=train, dtype="bfloat16"), list[bool]()
    policy.model.get_output_embeddings().register_forward_pre_hook(
        lambda head, given: seen.append(given[0].is_contiguous())
    )
    sampler(policy, PROMPTS, 2, Decoding(3), 0)
    policy.logps(PROMPTS, rows_of((4,) * len(PROMPTS)), 1.0)
    assert seen
    assert all(seen)


@torch.no_grad()
def full_logits(policy: Policy, prompt: np.ndarray, rollout: Rollout) -> np.ndarray:
    """Logits [T, V] of each completion token, from one plain forward."""
    ids = torch.from_numpy(np.concatenate([prompt, rollout.completion_ids]).astype(np.int64))[None]
    logits: torch.Tensor = policy.model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    return logits.double().numpy()


def warped(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Probabilities [V] after temperature, top-k and nucleus truncation, from their definitions."""
    scaled = logits / temperature
    p: np.ndarray = np.exp(scaled - scaled.max())
    p /= p.sum()
    if top_k:
        p[np.argsort(-p, kind="stable")[top_k:]] = 0
        p /= p.sum()
    if top_p < 1:
        order = np.argsort(-p, kind="stable")
        before = np.cumsum(p[order]) - p[order]  # mass of the strictly likelier ones
        p[order[before >= top_p]] = 0
        p /= p.sum()
    return p


@SAMPLERS
def test_log_probabilities_are_those_of_the_truncated_distribution(sampler: Sampler, policy: Policy) -> None:
    policy.end_ids = ENDS
    settings = [(1.0, 3, 1.0), (1.0, 0, 0.8), (0.7, 5, 0.9), (1.5, 4, 0.5), (1.0, 1, 1.0), (1.0, 1000, 1.0)]
    for temperature, top_k, top_p in [*settings, (0.5, 0, 1.0)]:
        decoding = Decoding(8, temperature, top_k, top_p)
        assert decoding.truncated == (temperature != 0.5)
        changed = 0.0
        for prompt, group in zip(PROMPTS, sampler(policy, PROMPTS, 3, decoding, 0), strict=True):
            for rollout in group:
                logits = full_logits(policy, prompt, rollout)
                for row, token, logp in zip(logits, rollout.completion_ids, rollout.gen_logp, strict=True):
                    expected = warped(row, temperature, top_k, top_p)[token]
                    assert expected > 0
                    assert logp == pytest.approx(np.log(expected), abs=1e-4)
                    changed = max(changed, expected - warped(row, temperature, 0, 1.0)[token])
        assert (changed > 0.02) == (0 < top_k < 1000 or top_p < 1)
    greedy = sampler(policy, PROMPTS, 1, Decoding(6, 0.0, top_k=1, top_p=0.1), 0)
    for prompt, rollout in zip(PROMPTS, flat(greedy), strict=True):
        logits = full_logits(policy, prompt, rollout)
        assert rollout.completion_ids.tolist() == logits.argmax(-1).tolist()
        assert (rollout.gen_logp < -1e-3).any()  # those of temperature 1, not of a point mass


N_STATES = 8
END = 2


def known_policy() -> tuple[Policy, np.ndarray]:
    """A real Qwen2 with weights set by hand so that the next token depends on the last one alone.

    Attention and MLP write nothing, the embedding is the identity, and the normalisation turns e_i into √V e_i (up to
    its epsilon): so the logits after token i are column i of the head, scaled back.

    Returns:
        the policy, and its table of probabilities [last token, next token].
    """
    sizes: dict[str, Any] = {"vocab_size": N_STATES, "hidden_size": N_STATES, "intermediate_size": 4}
    heads: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    special: dict[str, Any] = {"eos_token_id": END, "pad_token_id": 0, "bos_token_id": 1, "tie_word_embeddings": False}
    config = Qwen2Config(**sizes, **heads, **special, max_position_embeddings=64)
    model = Qwen2ForCausalLM(config)
    table = np.random.default_rng(0).normal(0, 1.2, size=(N_STATES, N_STATES)).astype(np.float32)
    scale = np.sqrt(N_STATES / (1 + N_STATES * config.rms_norm_eps))
    with torch.no_grad():
        layer = model.model.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(N_STATES))
        model.lm_head.weight.copy_(torch.from_numpy(table.T / scale))
    policy = Policy(model, make_tokenizer(), PeerConfig(name="known", model="known", device="cpu", dtype="float32"))
    assert policy.end_ids == {END}
    logits = table.astype(np.float64)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return policy, p / p.sum(-1, keepdims=True)


def transitions(prompts: list[np.ndarray], groups: list[tuple[Rollout, ...]]) -> dict[int, Counter[int]]:
    """How often each state came after each."""
    counts: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for prompt, ids, _ in zip(*drawn_rows(prompts, groups), strict=True):
        for before, after in itertools.pairwise([int(prompt[-1]), *ids.tolist()]):
            counts[before][after] += 1
    return counts


@SAMPLERS
@pytest.mark.parametrize("decoding", [Decoding(3), Decoding(3, 0.6, top_k=4, top_p=0.9)])
@pytest.mark.parametrize("race_up_to", [0, 2**30])
def test_tokens_are_drawn_as_often_as_they_are_probable(
    sampler: Sampler, decoding: Decoding, race_up_to: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftis.engines.builtin.RACE_UP_TO", race_up_to)
    policy, p = known_policy()
    table = np.stack([warped(np.log(row), decoding.temperature, decoding.top_k, decoding.top_p) for row in p])
    # Two prompts of unequal length, so that padding and compaction are in play.
    prompts = [np.array([1, 4], np.int32), np.array([1, 3, 3, 5], np.int32)]
    groups = sampler(policy, prompts, 3000, decoding, 7)
    firsts = {int(p[-1]): Counter(int(r.completion_ids[0]) for r in g) for p, g in zip(prompts, groups, strict=True)}
    by_state = transitions(prompts, groups)
    assert END not in by_state
    assert len(by_state) >= 4
    assert p_value(firsts, table) > 1e-3
    assert p_value(by_state, table) > 1e-3
    assert p_value(by_state, np.roll(table, 1, axis=0)) < 1e-9  # so many counts do notice a wrong distribution


@given(
    st.integers(1, 3).flatmap(lambda n: st.lists(st.integers(0, 5), min_size=n * 7 - 3, max_size=n * 7)),
    st.integers(0, 63),
)
def test_a_number_finds_the_token_whose_share_it_falls_in(counts: list[int], number: int) -> None:
    """Shares are small integers, so that every sum is exact; vocabularies of whole blocks and of broken ones."""
    assume(any(counts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ftis.engines.builtin.BLOCK", 7)
        u = number / 64
        found = _inverse_cdf(torch.tensor([counts], dtype=torch.float32), torch.tensor([[u]], dtype=torch.float64))
    passed = [token for token in range(len(counts)) if sum(counts[: token + 1]) > u * sum(counts)]
    assert found.tolist() == [[passed[0]]]


def test_numbers_find_possible_tokens_only() -> None:
    """Rows of rounded numbers, half of them 0, at the ends of [0, 1) too."""
    generator = torch.Generator().manual_seed(0)
    for vocab_size in (100, BLOCK, 3 * BLOCK + 1, 20 * BLOCK):
        p = torch.rand(64, vocab_size, generator=generator) ** 8
        p[torch.rand(p.shape, generator=generator) < 0.5] = 0.0
        p /= p.sum(-1, keepdim=True)
        cdf = p.double().cumsum(-1)
        for u in (torch.zeros(64, 1), torch.full((64, 1), 1 - 2.0**-53), torch.rand(64, 1, generator=generator)):
            token = _inverse_cdf(p, u.double())
            assert bool((p.gather(1, token) > 0).all())
            share = cdf.gather(1, token) / cdf[:, -1:]
            assert bool((share >= u.double() - 1e-6).all())
            assert bool((share - p.gather(1, token) <= u.double() + 1e-6).all())


def p_value(counts: dict[int, Counter[int]], table: np.ndarray) -> float:
    """Pearson's test that each state's counts were drawn from its row of the table."""
    statistic, freedom = 0.0, 0
    for before, row in counts.items():
        observed = np.array([row[after] for after in range(N_STATES)])
        possible = table[before] > 0
        if observed[~possible].any():
            return 0.0
        expected = observed.sum() * table[before][possible]
        if expected.min() >= 5:
            statistic += float(((observed[possible] - expected) ** 2 / expected).sum())
            freedom += int(possible.sum()) - 1
    assert freedom > 0
    return float(chi2.sf(statistic, freedom))


@SAMPLERS
@pytest.mark.parametrize("batch_size", [0, 400])
def test_rollouts_of_one_prompt_are_independent_draws(sampler: Sampler, batch_size: int) -> None:
    """Not one draw repeated, nor the same draw in every group or batch."""
    policy, p = known_policy()
    prompt = np.array([1, 4], np.int32)
    first, second = sampler(policy, [prompt, prompt], 400, Decoding(1), 5, batch_size)
    a = np.array([r.completion_ids[0] for r in first])
    b = np.array([r.completion_ids[0] for r in second])
    agreement = float((p[4] ** 2).sum())
    for x, y in ((a, b), (a[:-1], a[1:])):
        assert abs((x == y).mean() - agreement) < 5 * np.sqrt(agreement * (1 - agreement) / len(x))


@SAMPLERS
def test_a_row_ends_at_any_end_or_at_once_and_may_have_one_token(sampler: Sampler, tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy(model={"generation_config": {"eos_token_id": sorted(ENDS - {2})}})
    assert policy.end_ids == ENDS  # those of the directory and the tokenizer's
    rollouts = flat(sampler(policy, PROMPTS, 12, Decoding(24), 0))
    assert len({int(r.completion_ids[-1]) for r in rollouts} & ENDS) > 1
    for rollout in rollouts:
        check_ends(rollout, ENDS, 24)
    policy, _ = known_policy()
    prompts = [np.array([1, 4], np.int32), np.array([3], np.int32)]
    for ends, longest in ((range(N_STATES), 9), ([END], 1)):
        policy.end_ids = frozenset(ends)
        groups = sampler(policy, prompts, 3, Decoding(longest), 0)
        assert [[len(r) for r in group] for group in groups] == [[1, 1, 1], [1, 1, 1]]


@SAMPLERS
def test_groups_come_in_the_order_of_their_prompts(sampler: Sampler) -> None:
    """A model that repeats its last token shows which prompt a rollout belongs to."""
    policy, _ = known_policy()
    with torch.no_grad():
        policy.model.lm_head.weight.copy_(40 * torch.eye(N_STATES))
    lasts = (5, 3, 7, 4, 6)
    prompts = [np.array([1] * (i % 3) + [last], np.int32) for i, last in enumerate(lasts)]
    groups = sampler(policy, prompts, 3, Decoding(4), 0)
    assert ids_of(groups) == [[[last] * 4] * 3 for last in lasts]
    assert sampler(policy, [], 4, Decoding(10), 0) == []


@pytest.mark.parametrize("rope", ["default", "dynamic"])
def test_a_policy_learns_after_sampling_beyond_its_models_positions(rope: str, tiny_policy: TinyPolicy) -> None:
    """Sampling records nothing for gradients, which a model that adapts its rotations keeps some of."""
    parameters = {"rope_type": rope, "rope_theta": 1e4, **({"factor": 2.0} if rope == "dynamic" else {})}
    policy = tiny_policy("llama", model={"max_position_embeddings": 8, "rope_parameters": parameters})
    prompts = rows_of((5, 7))
    groups = builtin_sampler(policy, prompts, 2, Decoding(16), 0)
    prompts, completions, _ = drawn_rows(prompts, groups)
    assert max(len(prompt) + len(completion) for prompt, completion in zip(prompts, completions, strict=True)) > 8
    assert policy.step(prompts, completions, 1.0, lambda logp_nT, mask_nT, of: (logp_nT * mask_nT).sum()) > 0


@SAMPLERS
def test_sampling_depends_on_its_seed_alone(sampler: Sampler, policy: Policy) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = sampler(policy, PROMPTS, 3, Decoding(10), 5)
    assert torch.equal(torch.get_rng_state(), before)  # whoever else draws numbers is not disturbed
    torch.manual_seed(2)
    again = sampler(policy, PROMPTS, 3, Decoding(10), 5)
    assert ids_of(again) == ids_of(first)
    for a, b in zip(flat(first), flat(again), strict=True):
        assert a.gen_logp.tobytes() == b.gen_logp.tobytes()
    others = [ids_of(sampler(policy, PROMPTS, 3, Decoding(10), seed)) for seed in (6, 2**31, 0)]
    assert all(other != ids_of(first) for other in others)
    assert others[0] != others[1] != others[2]


@SAMPLERS
def test_no_more_are_drawn_at_a_time_than_fit(sampler: Draw, policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, largest = rows_of((3, 9, 5, 9, 1, 7)), [0]
    policy.model.register_forward_hook(lambda _, __, output: largest.append(len(output.logits)))
    monkeypatch.setattr("ftis.engines.builtin.fuses", lambda model: False)  # its steps do not call the model
    expected = ids_of(sampler(policy, prompts, 2, Decoding(16, 0.0), 0))
    assert max(largest) == 12
    places = 9 + 16 if sampler is generate_sampler else 9 + 2 * 16  # whose batches follow one another
    monkeypatch.setattr(devices, "CPU_BYTES", 5 * slots.row_bytes(policy.model.config, places, 4))
    for batch_size, most in ((0, 4), (2, 2), (12, 4)):
        largest[:] = [0]
        assert ids_of(sampler(policy, prompts, 2, Decoding(16, 0.0), 0, batch_size)) == expected
        assert max(largest) == most
    monkeypatch.setattr(devices, "CPU_BYTES", 1)
    assert ids_of(sampler(policy, prompts, 2, Decoding(16, 0.0), 0)) == expected


def test_a_cache_whose_rows_are_taken_over_stays_within_bytes(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of prompts that waited begin behind those still being drawn, so all rows have more places."""
    prompts, taken, places = rows_of((3, 9, 5, 9, 1, 7, 2, 9, 4, 6)), [0], [0]
    policy.end_ids = ENDS
    put_before, caches = SlotCache.put_before, list[SlotCache]()
    zeros = torch.Tensor.new_zeros

    def weighed(self: torch.Tensor, *shape: Any, **kwargs: Any) -> torch.Tensor:
        """Beside a tensor that is about to be allocated, what the caches hold."""
        made = zeros(self, *shape, **kwargs)
        held = [tensor for cache in caches for tensors in cache.all_slots() for tensor in tensors]
        taken.append(sum(tensor.numel() * tensor.element_size() for tensor in [made, *held]) if caches else 0)
        return made

    def watched(self: SlotCache, old: SlotCache, span: int, width: int) -> None:
        caches[:] = [self, old]
        put_before(self, old, span, width)
        assert old.all_slots() == ([], [])
        places.append(self.capacity)
        caches.clear()

    monkeypatch.setattr(SlotCache, "put_before", watched)
    monkeypatch.setattr(torch.Tensor, "new_zeros", weighed)
    within = 6 * slots.row_bytes(policy.model.config, 9 + 2 * 16, 4)
    monkeypatch.setattr(devices, "CPU_BYTES", within)
    builtin_sampler(policy, prompts, 2, Decoding(16), 0)
    assert 9 + 16 < max(places) <= 9 + 2 * 16
    assert within / 2 < max(taken) <= within


def test_what_completions_take_and_how_many_of_them_fit() -> None:
    sizes: dict[str, Any] = {"vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 3}
    config = Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2)
    room = Room(config, longest=10, steps=20, number=4, within=0)
    short, long = slots.row_bytes(config, 10 + 20, 4), slots.row_bytes(config, 10 + 2 * 20, 4)
    for groups, repeats, most, within, expected in (
        (8, 1, 8, 8 * short, (8, short)),
        (9, 1, 9, 8 * short, (8 * short // long, long)),  # rows that wait for a place take more of them
        (9, 1, 4, 8 * long, (4, long)),
        (9, 1, 9, 1, (1, long)),
        (3, 4, 12, 12 * short, (3, short)),
        (3, 4, 7, 12 * short, (1, long)),
        (3, 4, 2, 12 * short, (1, long)),  # batch_size parts no group
    ):
        assert replace(room, within=within).at_a_time(groups, repeats, most) == expected
    assert replace(room, within=8 * short, refills=False).at_a_time(9, 1, 9) == (8, short)
    for repeats, within, parts in (
        (12, 12 * short, 1),
        (12, 12 * short - 1, 2),
        (12, 5 * long, 3),
        (12, 3 * long, 4),
        (12, long, 12),
        (12, 1, 12),
        (7, 4 * long, 2),  # of four and three
        (7, 3 * long, 3),
        (1, 1, 1),
    ):
        assert replace(room, within=within).parts(repeats) == parts
    assert replace(room, within=6 * short, refills=False).parts(12) == 2
    kept = slots.row_bytes(config, 10 + 20 - 1, 4)
    assert [replace(room, within=8 * kept - spare).keeps(4) for spare in (0, 1)] == [True, False]

    config.intermediate_size = 40
    assert slots.prefill_bytes(config, 10, 4) == 10 * (6 * 24 + 3 * 40) * 4
    within = slots.PREFILL_PARTS * slots.prefill_bytes(config, 16, 4)
    assert [slots.prompts_prefilled(config, longest, 4, within) for longest in (1, 2, 5, 100)] == [16, 8, 3, 1]
    assert slots.row_bytes(config, 10, 4) == 10 * 3 * 2 * 6 * 2 * 4 + 3 * 4 * 50
    config.head_dim = 6
    config.per_layer_config = {1: {"head_dim": 16}, 2: {"num_key_value_heads": 1}}  # as Gemma 4's
    assert slots.row_bytes(config, 10, 4) == 10 * (2 * 6 + 2 * 16 + 1 * 6) * 2 * 4 + 3 * 4 * 50


def test_what_is_in_a_slot_before_it_is_used_plays_no_part(policy: Policy) -> None:
    decoder = FusedDecoder(policy.model, torch.float32, torch.arange(8))
    n_layers, shape = len(decoder.layers), (3, decoder.n_key, 8, decoder.width)
    token, position, shown = torch.tensor([5, 9, 30]), torch.tensor([4, 4, 4]), torch.zeros(3, 1, 1, 8)
    generator = torch.Generator().manual_seed(0)
    used = [torch.randn(shape, generator=generator) for _ in range(2 * n_layers)]
    keys, values = ([t[:, :, :5].clone() for t in used[i::2]] for i in range(2))
    expected = decoder.step(token, position, keys, values, bias=None).detach()
    for tensor in used:
        tensor[:, :, 4:] = torch.nan
    with torch.no_grad():
        found = StepGraph(decoder, used[0::2], used[1::2], shown, 4)(token, position)
    torch.testing.assert_close(found, expected)


def test_sampling_goes_on_where_steps_cannot_be_captured(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: StepGraph, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("operation not permitted when stream is capturing")

    prompts = rows_of((3, 9, 5))
    expected = builtin_sampler(policy, prompts, 2, Decoding(20, 0.0), 0)
    capture_steps(monkeypatch)
    monkeypatch.setattr(StepGraph, "__call__", failing)
    with pytest.warns(UserWarning, match="CUDA graphs are left out: operation not permitted"):
        found = builtin_sampler(policy, prompts, 2, Decoding(20, 0.0), 0)
    assert ids_of(found) == ids_of(expected)


def test_waiting_prompts_take_the_place_of_rows_that_ended(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    policy.end_ids = ENDS
    prompts = rows_of((3, 9, 5, 9, 1, 7) * 5)
    batches: list[int] = []  # rows of each step
    step = _Rows.step

    def counted(self: _Rows, token: torch.Tensor) -> torch.Tensor:
        batches.append(len(token))
        return step(self, token)

    monkeypatch.setattr(_Rows, "step", counted)
    groups = builtin_sampler(policy, prompts, 3, Decoding(20), 0, 24)
    assert max(batches) == 24
    assert batches[: len(batches) // 2].count(24) < len(batches) // 2  # it shrinks between admissions
    in_turn = sum(max(len(r) for g in groups[i : i + 8] for r in g) for i in range(0, 30, 8))
    assert len(batches) < 0.8 * in_turn
    check_drawn(policy, prompts, groups)
    for rollout in flat(groups):
        check_ends(rollout, ENDS, 20)


@settings(max_examples=24, deadline=None)
@given(
    sampler=st.sampled_from([builtin_sampler, generate_sampler]),
    kind=st.sampled_from([*((kind, {}) for kind in KINDS), ("sliding", WIDE_WINDOW), ("gemma3", WIDE_WINDOW)]),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    repeats=st.integers(1, 3),
    batch_size=st.sampled_from([0, 3]),
    worth_dropping=st.sampled_from([0.0, 1e12]),
    random=st.randoms(use_true_random=False),
)
def test_turns_that_go_on_are_those_that_are_read_again(
    sampler: Draw,
    tiny_policy: TinyPolicy,
    kind: tuple[str, dict[str, Any]],
    lengths: list[int],
    repeats: int,
    batch_size: int,
    worth_dropping: float,
    random: Random,
) -> None:
    """Answers of any length stand between, some rows end, and the others come in another order."""
    policy, decoding = tiny_policy(kind[0], model=kind[1]), Decoding(4, temperature=0.0).keeping()
    policy.end_ids = ENDS
    prompts = rows_of(lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(WORTH_DROPPING, "cpu", worth_dropping)
        for turn in range(3):
            groups = sampler(policy, prompts, repeats if turn == 0 else 1, decoding, 0, batch_size)
            if turn:
                again = sampler(policy, prompts, 1, Decoding(4, temperature=0.0), 0)
                assert ids_of(groups) == ids_of(again)
                for one, other in zip(flat(groups), flat(again), strict=True):
                    np.testing.assert_allclose(one.gen_logp, other.gen_logp, atol=1e-4)
            rows = whole_rows(prompts, groups)
            random.shuffle(rows)
            answers = rows_of([random.randrange(5) for _ in rows], turn)
            going = zip(rows[: random.randint(1, len(rows))], answers, strict=False)
            prompts = [np.concatenate(pair) for pair in going]


def test_kept_keys_and_values_may_differ_in_heads_and_width() -> None:
    """As those of DeepSeek's and Gemma 4's models do, from layer to layer too."""
    layers = [
        (torch.rand(2, heads, 5, keys), torch.rand(2, heads, 5, values))
        for heads, keys, values in ((2, 3, 2), (1, 4, 4))
    ]
    part = slots.KeptPart(torch.tensor([0, 1]), torch.tensor([1, 2]), layers)
    rows = slots.KeptRows([part], rows_of([4, 3]))
    for kept, filled in zip(layers, rows.taken([(0, 1, 2), (0, 0, 3)], [1, 0], 3, capacity=6), strict=True):
        for held, put in zip(kept, filled, strict=True):
            assert torch.equal(put[0, :, 1:3], held[1, :, 2:4])
            assert torch.equal(put[1, :, :3], held[0, :, 1:4])
            assert not put[:, :, 3:].any()


def test_a_turn_reads_the_answer_and_the_token_before_it(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one pass, by the weights that the turn before joined."""
    decoding, read, made = Decoding(5).keeping(), list[int](), list[FusedDecoder]()
    assert fuses(policy.model)
    monkeypatch.setattr(
        FusedDecoder, "read", noted(FusedDecoder.read, lambda of, token_M, *_: read.append(len(token_M)))
    )
    monkeypatch.setattr(FusedDecoder, "__init__", noted(FusedDecoder.__init__, lambda of, *_: made.append(of)))
    groups = builtin_sampler(policy, PROMPTS, 2, decoding, 0)
    turns = [np.concatenate(pair) for pair in zip(whole_rows(PROMPTS, groups), rows_of([1, 3] * 6), strict=True)]
    builtin_sampler(policy, turns, 1, decoding, 0)
    builtin_sampler(policy, rows_of([8]), 1, decoding, 0)  # whose beginning nobody drew
    assert read == [len(turns) * (1 + 2)]
    assert len(set(made)) == 1


def test_a_beginning_that_all_prompts_share_is_read_once(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    by_decoder, by_model = list[int](), list[tuple[int, ...]]()
    assert fuses(policy.model)
    monkeypatch.setattr(
        FusedDecoder, "read", noted(FusedDecoder.read, lambda of, token_M, *_: by_decoder.append(len(token_M)))
    )
    policy.model.model.layers[0].mlp.register_forward_hook(lambda of, args, out: by_model.append(tuple(out.shape[:2])))
    in_parts, at_once = 10**9, slots.PREFILL_PARTS
    for parts, shared, read, passed in (
        (at_once, SHARED_FROM, [3 + 9 + 5 + 3], (1, SHARED_FROM - 1)),
        (in_parts, SHARED_FROM, [3 + 1, 9 + 1, 5 + 1], (1, SHARED_FROM - 1)),
        (at_once, 4, [], (3, 4 + 9)),
    ):
        monkeypatch.setattr(slots, "PREFILL_PARTS", parts)
        (beginning,), own = rows_of([shared], seed=1), rows_of([3, 9, 5])
        builtin_sampler(policy, [np.concatenate([beginning, ids]) for ids in own], 2, Decoding(5), 0)
        assert (by_decoder, by_model) == (read, [passed])
        by_decoder.clear()
        by_model.clear()


@pytest.mark.parametrize(("kind", "alone"), [("llama", True), ("qwen3.5", False), ("sliding", False)])
def test_generate_reads_answers_alone_if_the_model_keeps_keys_and_values_of_all_tokens(
    kind: str, alone: bool, tiny_policy: TinyPolicy
) -> None:
    policy, decoding, widths = tiny_policy(kind), Decoding(5).keeping(), list[int]()
    policy.end_ids = ENDS
    groups = generate_sampler(policy, PROMPTS, 2, decoding, 0, 4)
    rows = whole_rows(PROMPTS, groups)
    assert len({len(rollout) for rollout in flat(groups)}) > 1
    turns = [np.concatenate(pair) for pair in zip(rows, rows_of([1, 3] * 6), strict=True)]
    policy.model.register_forward_pre_hook(
        lambda _, __, given: widths.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    found = generate_sampler(policy, turns, 1, decoding, 0)
    assert widths[0] == (3 + 1 if alone else max(map(len, turns)))
    assert set(widths[1:]) <= {1}
    check_drawn(policy, turns, found)


def noted(function: Callable[..., Any], note: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*given: Any) -> Any:
        note(*given)
        return function(*given)

    return wrapped


def test_with_places_taken_over_tokens_are_drawn_as_often_as_they_are_probable() -> None:
    policy, p = known_policy()
    prompts = [np.array([1] * (i % 4) + [4], np.int32) for i in range(300)]
    counts = transitions(prompts, builtin_sampler(policy, prompts, 10, Decoding(6), 3, 100))
    assert p_value(counts, p) > 1e-3
    assert p_value(counts, np.roll(p, 1, axis=0)) < 1e-9


@SAMPLERS
@pytest.mark.parametrize("train", ["full", "lora"])
@pytest.mark.filterwarnings("default")  # transformers may well complain of such defaults
def test_generation_defaults_of_the_directory_never_leak(sampler: Sampler, train: str, tiny_policy: TinyPolicy) -> None:
    clean = tiny_policy(train=train, lora_r=4)
    poisoned = tiny_policy(train=train, lora_r=4, model={"generation_config": POISON})
    inner = poisoned.model.get_base_model() if train == "lora" else poisoned.model
    stored = inner.generation_config
    assert stored.repetition_penalty == 4.0
    for temperature in (0.0, 1.0):
        decoding = Decoding(12, temperature)
        expected, found = sampler(clean, PROMPTS, 3, decoding, 1), sampler(poisoned, PROMPTS, 3, decoding, 1)
        assert ids_of(found) == ids_of(expected)
        for a, b in zip(flat(expected), flat(found), strict=True):
            np.testing.assert_array_equal(a.gen_logp, b.gen_logp)
        assert inner.generation_config is stored  # hidden, not lost
    with pytest.raises(IndexError):  # an id outside the vocabulary
        sampler(poisoned, [np.array([10_000], np.int32)], 1, Decoding(3), 0)
    assert inner.generation_config is stored


def test_the_built_in_sampler_refuses_what_it_cannot_draw(tiny_policy: TinyPolicy) -> None:
    with pytest.raises(ModelError) as caught:
        open_sampler("builtin", tiny_policy("gptj"))
    assert_one_line(caught, "peer 'tiny'", "GPTJForCausalLM", "set sampling.sampler = ")
    opened: Any = open_sampler("auto", tiny_policy(train="lora"))  # which gets the sampler of its base
    assert opened.sampler.draw is builtin_sampler


@pytest.mark.parametrize(
    ("name", "words"),
    [("auto", "width given, and sampling.sampler = 'auto' takes none"), ("builtin", "'builtin' does not take width")],
)
def test_options_that_a_sampler_does_not_take_are_named(tiny_policy: TinyPolicy, name: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        open_sampler(name, tiny_policy(), {"width": 3})


@pytest.mark.parametrize(("length", "by_generate"), [(1, False), (2, True)])
def test_rows_beyond_a_window_are_generated_where_steps_are_the_models_own(
    length: int, by_generate: bool, tiny_policy: TinyPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that is not fused attends to every slot there is. The window has 4 tokens, the longest prompt 3."""
    called: list[int] = []

    def generated(*arguments: Any) -> Any:
        called.append(1)
        return generate_sampler(*arguments)

    monkeypatch.setattr("ftis.engines.builtin.fuses", lambda model: False)
    monkeypatch.setattr("ftis.engines.builtin.generate_sampler", generated)
    policy = tiny_policy("gemma3")
    prompts = [np.array([1, 9, 30], np.int32), np.array([1, 9], np.int32)]
    groups = builtin_sampler(policy, prompts, 2, Decoding(length), 0)
    assert bool(called) == by_generate
    check_drawn(policy, prompts, groups)


def test_decoding_is_read_from_the_recipe() -> None:
    config = SamplingConfig(max_completion_length=9, temperature=0.5, top_k=3, top_p=0.4, stop=("\n", "Q:"))
    assert Decoding.of(config) == Decoding(9, 0.5, 3, 0.4, ("\n", "Q:"))
    assert Decoding.of(SamplingConfig()).truncated is False
    assert [Decoding(1).greedy, Decoding(1, 0.0).greedy] == [False, True]
    assert [Decoding(1, top_k=1).truncated, Decoding(1, top_p=0.99).truncated] == [True, True]


def test_the_policys_precision_is_in_force_while_sampling(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "precision", counted := Mock(wraps=policy.precision))
    for times, sampler in enumerate((builtin_sampler, generate_sampler), 1):
        sampler(policy, PROMPTS, 1, Decoding(5), 0)
        assert counted.call_count == times
