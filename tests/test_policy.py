"""A policy: its log-probabilities, its one optimiser step, what of it is trained, saved and refused."""

from __future__ import annotations

import gc
import itertools
import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import TinyModelDir, TinyPolicy, assert_one_line
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from policies import EACH_TRAIN, TRAINS, gradients, relative_difference, rows_of, weights, with_gpus
from test_decoder import model_of
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen2Config

from ftis.check.estimate import _shape
from ftis.config import ModelError, PeerConfig
from ftis.engines import kept, models
from ftis.engines.head import ChunkedHead
from ftis.engines.microbatches import Microbatches, cheapest, fit
from ftis.engines.models import load_model
from ftis.engines.tokenizers import load_tokenizer, tokenizer_fingerprint
from ftis.policy import Policy, resolve_device, resolve_dtype

PROMPTS = rows_of((3, 9, 1, 9, 5, 2, 7), seed=0)
COMPLETIONS = rows_of((6, 1, 12, 4, 9, 2, 6), seed=1)
WEIGHTS = torch.tensor([0.5, -1.0, 2.0, 0.25, -0.75, 1.5, -0.1])


def weighted(logp_nT: Tensor, mask_nT: Tensor, rows: np.ndarray) -> Tensor:
    """A loss that tells rows, and positions within them, apart, and divides by the step's number of sequences."""
    position = torch.linspace(0.5, 1.5, 12)[: logp_nT.shape[1]]
    per_row = torch.where(mask_nT, logp_nT * position, 0.0).sum(-1)
    return (per_row * WEIGHTS[torch.from_numpy(rows)]).sum() / len(WEIGHTS)


def ascend(policy: Policy, steps: int = 1) -> None:
    for _ in range(steps):
        policy.step(PROMPTS, COMPLETIONS, 1.0, weighted)


@torch.no_grad()
def naive_logps(policy: Policy, temperature: float) -> list[np.ndarray]:
    """Each row alone, without padding, by the definition of softmax in float64."""
    out = []
    for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
        ids = torch.from_numpy(np.concatenate([prompt, completion]).astype(np.int64))[None]
        logits = policy.model(input_ids=ids).logits[0].double().numpy() / temperature
        at = logits[len(prompt) - 1 : -1]
        norm = np.log(np.exp(at - at.max(-1, keepdims=True)).sum(-1)) + at.max(-1)
        out.append(at[np.arange(len(completion)), completion] - norm)
    return out


@pytest.mark.parametrize("kind", ["qwen2", "gemma3", "gptj"])  # in lines, with windows, in rows
def test_log_probabilities_are_those_of_each_row_alone(kind: str, tiny_policy: TinyPolicy) -> None:
    for temperature, budget in itertools.product((1.0, 0.6), (1, 40, 10_000)):
        policy = tiny_policy(kind, tokens_per_microbatch=budget)
        found = policy.logps(PROMPTS, COMPLETIONS, temperature)
        assert [len(row) for row in found] == [len(c) for c in COMPLETIONS]
        assert {row.dtype for row in found} == {np.dtype(np.float32)}
        for row, expected in zip(found, naive_logps(policy, temperature), strict=True):
            np.testing.assert_allclose(row, expected, atol=2e-5)
            assert (row <= 0).all()
    assert policy.logps([], [], 1.0) == []


@pytest.mark.parametrize(
    ("kind", "options"),
    [("gpt2", {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}), ("qwen2", {"attention_dropout": 0.5})],
)
def test_dropout_is_off_in_learner_and_step_alike(
    kind: str, options: dict[str, float], tiny_policy: TinyPolicy
) -> None:
    policy = tiny_policy(kind, model=options)
    before = policy.logps(PROMPTS, COMPLETIONS, 1.0)
    seen: dict[int, np.ndarray] = {}

    def recording(logp_nT: Tensor, mask_nT: Tensor, rows: np.ndarray) -> Tensor:
        seen.update({int(r): logp_nT[i].detach().numpy() for i, r in enumerate(rows)})
        return weighted(logp_nT, mask_nT, rows)

    policy.step(PROMPTS, COMPLETIONS, 1.0, recording)
    for i, row in enumerate(before):
        np.testing.assert_allclose(seen[i][: len(row)], row, atol=1e-5)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=8),
    st.integers(1, 120),
    st.sampled_from([0.0, 7.5, 1e6]),
    st.sampled_from([0.5, 19.0]),
)
def test_rows_of_a_prompt_are_split_where_it_costs_least(
    rows: list[tuple[int, int]], budget: int, overhead: float, again: float
) -> None:
    """Against every split of the rows, prompt after prompt; a prompt of number n has n + 2 tokens."""
    prompts = np.array([number for number, _ in rows])
    lengths = np.array([number + 2 + length for number, length in rows])
    numbers = np.unique(prompts, return_inverse=True)[1]
    longest = {number: lengths[prompts == number].max() for number in set(prompts.tolist())}
    order = sorted(range(len(rows)), key=lambda r: (-longest[prompts[r]], prompts[r], -lengths[r]))

    def cost(parts: list[list[int]]) -> float:
        total = 0.0
        seen: set[int] = set()
        for part in parts:
            padded = len(part) * int(max(lengths[r] for r in part))
            if len(part) > 1 and padded > budget:
                return float("inf")
            its = {int(prompts[r]) for r in part}
            total += padded + overhead + sum(again * (number + 2) for number in its & seen)
            seen |= its
        return total

    splits = [
        [order[start:end] for start, end in itertools.pairwise([0, *(i + 1 for i in cuts), len(rows)])]
        for n in range(len(rows))
        for cuts in itertools.combinations(range(len(rows) - 1), n)
    ]
    found = cheapest(lengths, numbers, again * (prompts + 2), budget, overhead)
    assert sorted(np.concatenate(found).tolist()) == list(range(len(rows)))
    assert all(lengths[part].tolist() == sorted(lengths[part], reverse=True) for part in found)
    assert np.isclose(cost([part.tolist() for part in found]), min(cost(split) for split in splits))


def test_rows_of_one_prompt_share_a_micro_batch_where_prompts_are_run_once() -> None:
    prompts = rows_of((40, 40), seed=0)
    rows = [prompts[i % 2] for i in range(8)]
    completions = rows_of((9, 8, 7, 6, 5, 4, 3, 2), seed=1)
    once = Microbatches(padding_cost=0.05, overhead=0.0)(rows, completions, budget=200)
    assert [sorted(batch.tolist()) for batch in once] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    each = Microbatches(padding_cost=1.0, overhead=0.0)(rows, completions, budget=200)
    assert [batch.tolist() for batch in each] == [[row] for row in range(8)]
    assert Microbatches(0.05, 0.0)([], [], 200) == []


SMOLLM2 = {"num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536}  # SmolLM2-135M


@pytest.mark.parametrize(
    ("sizes", "peer", "most"),
    [
        (SMOLLM2, {}, 1664),
        (SMOLLM2, {"dtype": "bfloat16"}, 3328),
        (SMOLLM2, {"gradient_checkpointing": True}, 16384),  # of 19,152
        ({"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}, {}, 16384),
        # 2³¹ / (30 (8 · 576 + 8 · 1536) 4)
        ({**SMOLLM2, "intermediate_size": [1536] * 30, "num_experts_per_tok": 2}, {}, 1059),
        ({"num_hidden_layers": None}, {}, 16384),
        ({"num_hidden_layers": 400, "hidden_size": 60_000, "intermediate_size": 240_000}, {}, 1),
        (SMOLLM2, {"device": "cuda", "gigabytes": 139}, 32_768),  # a quarter of a GPU's memory
        (SMOLLM2, {"device": "cuda", "gigabytes": 24}, 9_986),
        (SMOLLM2, {"device": "cuda", "gigabytes": 1}, 416),
    ],
)
def test_micro_batches_keep_no_more_than_fits_where_the_recipe_does_not_say(
    sizes: dict[str, Any], peer: dict[str, Any], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of 2³¹ bytes over layers x (8 widths + 4 of the feed-forward part) x bytes of a number.

    One more costs a big model the traffic of its gradient, and a small one its calls.
    """
    about = SimpleNamespace(total_memory=peer.get("gigabytes", 0) * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    with_gpus(monkeypatch, True)
    device, config = torch.device(peer.get("device", "cpu")), Qwen2Config()
    vars(config).update(sizes)
    keys = {key: value for key, value in peer.items() if key != "gigabytes"}
    found = fit(1.0, 10**6, device, config, PeerConfig(name="a", model="m", **keys))
    assert found.most == most
    if device.type == "cpu":
        assert found.overhead == 50 + 200
        rows = rows_of((5,) * 4, seed=0)
        assert [len(replace(found, most=20)(rows, rows, budget)) for budget in (0, 40)] == [2, 1]


@pytest.mark.parametrize("kind", ["qwen2", "sliding"])
def test_micro_batches_of_the_step_respect_the_peers_budget(kind: str, tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy(kind, tokens_per_microbatch=30)
    calls: list[int] = []
    seen: list[np.ndarray] = []
    policy.model.register_forward_hook(lambda *call: calls.append(1))

    def noting(logp_nT: Tensor, mask_nT: Tensor, rows: np.ndarray) -> Tensor:
        seen.append(rows)
        return weighted(logp_nT, mask_nT, rows)

    policy.step(PROMPTS, COMPLETIONS, 1.0, noting)
    assert len(calls) == len(seen) > 1
    assert sorted(np.concatenate(seen).tolist()) == list(range(len(PROMPTS)))
    for rows in seen:
        assert len(rows) * max(len(PROMPTS[r]) + len(COMPLETIONS[r]) for r in rows) <= 30


def storages(policy: Policy, trained: bool) -> set[int]:
    return {p.data_ptr() for p in policy.model.parameters() if p.requires_grad == trained}


def test_adapters_on_one_base_share_it_and_train_apart(tiny_policy: TinyPolicy) -> None:
    first, second = (tiny_policy(**TRAINS["lora"]) for _ in range(2))
    assert storages(first, False) == storages(second, False)
    assert not storages(first, True) & storages(second, True)
    before = second.logps(PROMPTS, COMPLETIONS, 1.0)
    ascend(first, steps=2)
    after = second.logps(PROMPTS, COMPLETIONS, 1.0)
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    shared = storages(second, False)
    assert not storages(tiny_policy(**TRAINS["full"]), True) & shared
    del first
    gc.collect()
    assert storages(tiny_policy(**TRAINS["lora"]), False) == shared  # though the first that used it is gone
    other = tiny_policy("qwen2", **TRAINS["lora"])
    weight = next(p for name, p in other.model.named_parameters() if "mlp" in name)
    weight.data = weight.data.clone()
    weight.data[0] += 1
    kept.share_frozen(other.model)
    assert weight.data_ptr() not in shared  # only what is equal
    assert len(shared & storages(other, False)) == len(shared) - 1


def with_adapters(policy: Policy) -> Policy:
    """Adapters that are drawn: with B = 0, half of their gradients are 0."""
    if policy.config.train == "lora":
        torch.manual_seed(0)
        for parameter in policy.trainable:
            torch.nn.init.normal_(parameter, std=0.2)
    return policy


@EACH_TRAIN
def test_the_gradient_is_that_of_the_loss_whatever_the_micro_batches(train: str, tiny_policy: TinyPolicy) -> None:
    """Against autograd on each row alone, by a way of its own. A step starts from no gradient."""
    reference = with_adapters(tiny_policy(**TRAINS[train]))
    total = torch.zeros(())
    for i, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        ids = torch.from_numpy(np.concatenate([prompt, completion]).astype(np.int64))[None]
        logp = torch.log_softmax(reference.model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / 0.8, -1)
        chosen = logp[torch.arange(len(completion)), torch.from_numpy(completion.astype(np.int64))]
        total = total + WEIGHTS[i] * (chosen * torch.linspace(0.5, 1.5, 12)[: len(completion)]).sum()
    (total / len(PROMPTS)).backward()
    for budget in (1, 17, 30, 60, 10_000):
        keys: dict[str, Any] = {"tokens_per_microbatch": budget, "max_grad_norm": 1e9, "learning_rate": 1e-12}
        policy = with_adapters(tiny_policy(**TRAINS[train], **keys))
        norm = policy.step(PROMPTS, COMPLETIONS, 0.8, weighted)
        assert relative_difference(gradients(reference), gradients(policy)) < 1e-5
        assert policy.step(PROMPTS, COMPLETIONS, 0.8, weighted) == pytest.approx(norm, rel=1e-3)


@pytest.mark.parametrize("max_grad_norm", [0.01, 1e6])
def test_gradients_are_clipped_and_the_norm_before_is_returned(max_grad_norm: float, tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy(max_grad_norm=max_grad_norm)
    unclipped = tiny_policy(max_grad_norm=1e9)
    norm = policy.step(PROMPTS, COMPLETIONS, 1.0, weighted)
    assert norm == pytest.approx(unclipped.step(PROMPTS, COMPLETIONS, 1.0, weighted))
    assert norm > 0.1
    after = float(torch.cat([g.flatten() for g in gradients(policy).values()]).norm())
    assert after == pytest.approx(min(norm, max_grad_norm), rel=1e-4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("budget", [10_000, 30])
def test_a_step_whose_gradient_is_not_finite_is_not_taken(bad: float, budget: int, tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy(learning_rate=1e-2, tokens_per_microbatch=budget)
    twin = tiny_policy(learning_rate=1e-2, tokens_per_microbatch=budget)
    ascend(policy)
    ascend(twin)
    before = weights(policy)

    def broken(logp_nT: Tensor, mask_nT: Tensor, rows: np.ndarray) -> Tensor:
        return weighted(logp_nT, mask_nT, rows) * (bad if 3 in rows else 1.0)

    with pytest.raises(ModelError, match=r"peer 'tiny': the gradient's norm is (nan|inf).*learning rate") as caught:
        policy.step(PROMPTS, COMPLETIONS, 1.0, broken)
    assert_one_line(caught)
    assert all(torch.equal(before[n], p) for n, p in policy.model.named_parameters())
    # Nor has it left a trace in the optimiser or the gradients: the next step is that of a policy that never met it.
    ascend(policy)
    ascend(twin)
    assert all(torch.equal(a, b) for a, b in zip(policy.trainable, twin.trainable, strict=True))


def test_bfloat16_arithmetic_with_float32_weights_and_log_probabilities(tiny_policy: TinyPolicy) -> None:
    half, single = (tiny_policy(dtype=dtype, learning_rate=1e-2) for dtype in ("bfloat16", "float32"))
    pairs = list(zip(half.logps(PROMPTS, COMPLETIONS, 1.0), single.logps(PROMPTS, COMPLETIONS, 1.0), strict=True))
    assert {a.dtype for a, _ in pairs} == {np.dtype(np.float32)}
    gap = np.concatenate([np.abs(a - b) for a, b in pairs])
    assert 0 < gap.mean() < 0.05  # really in another precision, and not far off
    before = weights(half)
    assert np.isfinite(half.step(PROMPTS, COMPLETIONS, 1.0, weighted))
    assert {p.dtype for p in half.model.parameters()} == {torch.float32}
    assert not any(torch.equal(before[n], p) for n, p in half.model.named_parameters())


class LargestTensor(TorchDispatchMode):
    """How many numbers the largest tensor made while this lasts holds."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return out


@pytest.mark.parametrize(
    ("kind", "model", "train"),
    [
        ("qwen2", {}, {}),
        ("llama", {"tie_word_embeddings": False}, {}),
        ("gpt2", {}, {}),
        ("gptj", {}, {}),  # a bias
        ("gemma", {}, {"gradient_checkpointing": True}),
        ("qwen2", {}, {"train": "lora", "lora_r": 4}),  # a frozen head
    ],
)
def test_logits_in_chunks_give_the_same_log_probabilities_and_gradient(
    kind: str, model: dict[str, Any], train: dict[str, Any], tiny_policy: Any
) -> None:
    whole, chunked = (tiny_policy(kind, model=model, tokens_per_microbatch=60, **train) for _ in range(2))
    assert isinstance(chunked.head, ChunkedHead)
    chunked.model.load_state_dict(whole.model.state_dict())  # an adapter's first weights are drawn
    whole.head = None
    for temperature, tokens_at_once in itertools.product((1.0, 0.7), (1, 5, 1000)):
        chunked.head.logits_at_once = tokens_at_once * chunked.vocab_size
        for a, b in zip(*(p.logps(PROMPTS, COMPLETIONS, temperature) for p in (whole, chunked)), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
        for policy in (whole, chunked):
            policy.backward(PROMPTS, COMPLETIONS, temperature, weighted)
        assert relative_difference(gradients(whole), gradients(chunked)) < 1e-6


def test_logits_in_chunks_in_bfloat16(tiny_policy: TinyPolicy) -> None:
    whole, chunked, exact = (tiny_policy(dtype=dtype) for dtype in ("bfloat16", "bfloat16", "float32"))
    assert isinstance(chunked.head, ChunkedHead)
    whole.head, chunked.head.logits_at_once = None, 5 * chunked.vocab_size
    for policy in (whole, chunked, exact):
        policy.backward(PROMPTS, COMPLETIONS, 1.0, weighted)
    errors = [relative_difference(gradients(exact), gradients(policy)) for policy in (whole, chunked)]
    assert 0 < errors[1] < 1.2 * errors[0]


@pytest.mark.parametrize("train", [{}, {"train": "lora", "lora_r": 4}, {"gradient_checkpointing": True}])
def test_no_tensor_holds_the_logits_of_all_tokens(train: dict[str, Any], tiny_policy: TinyPolicy) -> None:
    """Neither forward nor backward: the largest is a chunk's logits or the head's weights, however many rows."""
    vocab, hidden, tokens_at_once = 3000, 32, 8
    rows = 16
    prompts, completions = rows_of((4,) * rows, seed=3), rows_of((12,) * rows, seed=4)
    policy = tiny_policy(model={"vocab_size": vocab}, **train)
    assert isinstance(policy.head, ChunkedHead)
    policy.head.logits_at_once = tokens_at_once * vocab
    for body in (
        lambda: policy.backward(prompts, completions, 0.9, lambda logp, mask, rows: logp.sum()),
        lambda: policy.logps(prompts, completions, 0.9),
    ):
        with LargestTensor() as largest:
            body()
        assert largest.numbers <= vocab * max(hidden, tokens_at_once)
    policy.head = None  # and the count does notice
    with LargestTensor() as largest:
        policy.logps(prompts, completions, 0.9)
    assert largest.numbers >= rows * 12 * vocab


@pytest.mark.parametrize(
    ("model_type", "settings", "plain"),
    [
        ("qwen2", {}, True),
        ("gemma2", {"final_logit_softcapping": 30.0}, False),
        ("gemma2", {"final_logit_softcapping": None}, True),
        ("cohere", {"logit_scale": 0.25}, False),
        ("cohere", {"logit_scale": 1.0}, True),
        ("granite", {"logits_scaling": 8.0}, False),
        ("granite", {"logits_scaling": 1.0}, True),
    ],
)
def test_heads_of_models_that_process_their_logits_are_left_to_the_model(
    model_type: str, settings: dict[str, Any], plain: bool, tiny_tokenizer: Any
) -> None:
    peer = PeerConfig(name="tiny", model="x", device="cpu", dtype="float32")
    policy = Policy(model_of(model_type, **settings), tiny_tokenizer(), peer)
    assert isinstance(policy.head, ChunkedHead) == plain
    if isinstance(policy.head, ChunkedHead):
        policy.head.logits_at_once = 60
    for row, expected in zip(policy.logps(PROMPTS, COMPLETIONS, 0.7), naive_logps(policy, 0.7), strict=True):
        np.testing.assert_allclose(row, expected, atol=2e-5)


def test_an_adapter_on_the_head_leaves_it_to_the_model(tiny_policy: TinyPolicy) -> None:
    untied = {"tie_word_embeddings": False}
    policy = tiny_policy("llama", model=untied, train="lora", lora_r=4, lora_target_modules=("lm_head", "q_proj"))
    assert policy.head is None
    ascend(policy)
    for row, expected in zip(policy.logps(PROMPTS, COMPLETIONS, 0.7), naive_logps(policy, 0.7), strict=True):
        np.testing.assert_allclose(row, expected, atol=2e-5)


def forwards_of_a_layer(policy: Policy) -> list[bool]:
    """Fills up with one entry each time the first layer's MLP is called: whether gradients are on."""
    seen: list[bool] = []
    mlp = next(module for name, module in policy.model.named_modules() if name.endswith(".mlp"))
    mlp.register_forward_pre_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    return seen


@pytest.mark.parametrize(
    ("kind", "train", "dtype"),
    [("qwen2", "lora", "float32"), ("gpt2", "lora", "bfloat16"), ("sliding", "full", "bfloat16")],
)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out:UserWarning")  # peft, of GPT-2's transposed weights
def test_checkpointing_computes_twice_and_the_same(kind: str, train: str, dtype: str, tiny_policy: TinyPolicy) -> None:
    targets = ("c_attn",) if kind == "gpt2" else ("q_proj", "v_proj")
    settings = {**TRAINS[train], "lora_target_modules": targets, "dtype": dtype, "max_grad_norm": 1e9}
    plain, saving = (with_adapters(tiny_policy(kind, **settings, gradient_checkpointing=on)) for on in (False, True))
    runs = [forwards_of_a_layer(policy) for policy in (plain, saving)]
    for policy in (plain, saving):
        policy.step(PROMPTS, COMPLETIONS, 1.0, weighted)
    assert [len(r) for r in runs] == [1, 2]
    assert relative_difference(gradients(plain), gradients(saving)) < 1e-6


def test_gradient_checkpointing_of_a_model_that_cannot(tiny_policy: TinyPolicy, monkeypatch: Any) -> None:
    monkeypatch.setattr("ftis.engines.kept.GradientCheckpointingLayer", Mock)
    with pytest.raises(ModelError, match="set gradient_checkpointing = false") as caught:
        tiny_policy(gradient_checkpointing=True)
    assert_one_line(caught)


@EACH_TRAIN
def test_exactly_the_named_parameters_are_trained(train: str, tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy(**TRAINS[train], learning_rate=1e-2, weight_decay=0.1)
    before = weights(policy)
    ascend(policy, steps=2)
    changed = {n for n, p in policy.model.named_parameters() if not torch.equal(before[n], p)}
    assert changed == {n for n in before if train == "full" or ".lora_A." in n or ".lora_B." in n}
    assert len(changed) == len(policy.trainable)
    ranks = {p.shape[0] for n, p in policy.model.named_parameters() if ".lora_A." in n}
    assert ranks == ({4} if train == "lora" else set())
    assert changed == {n for n, p in policy.model.named_parameters() if p.requires_grad}


@EACH_TRAIN
def test_a_saved_policy_is_a_hugging_face_directory(train: str, tiny_policy: TinyPolicy, tmp_path: Path) -> None:
    policy = tiny_policy(**TRAINS[train], learning_rate=1e-2)
    untrained = policy.logps(PROMPTS, COMPLETIONS, 1.0)
    ascend(policy, steps=2)
    policy.save_pretrained(tmp_path)
    expected = policy.logps(PROMPTS, COMPLETIONS, 1.0)
    assert max(np.abs(a - b).max() for a, b in zip(untrained, expected, strict=True)) > 0.01

    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer_fingerprint(tokenizer) == tokenizer_fingerprint(policy.tokenizer)
    loaded = [AutoModelForCausalLM.from_pretrained(tmp_path)]
    if train == "lora":
        assert (tmp_path / "adapter_model.safetensors").exists()
        assert not (tmp_path / "model.safetensors").exists()
        loaded.append(AutoPeftModelForCausalLM.from_pretrained(tmp_path))
    else:
        assert (tmp_path / "model.safetensors").exists()
        found = dict(loaded[0].named_parameters())
        assert found.keys() == weights(policy).keys()
        assert all(torch.equal(found[n], p) for n, p in policy.model.named_parameters())
    again = Policy.load(policy.config, checkpoint=tmp_path)  # goes on being trained
    assert weights(again).keys() == weights(policy).keys()
    assert all(torch.equal(p, dict(policy.model.named_parameters())[n]) for n, p in again.model.named_parameters())
    assert [p.requires_grad for p in again.model.parameters()] == [p.requires_grad for p in policy.model.parameters()]
    assert again.end_ids == policy.end_ids
    for model in loaded:
        other = Policy(model, tokenizer, PeerConfig(name="other", model="x", device="cpu", dtype="float32"))
        for a, b in zip(expected, other.logps(PROMPTS, COMPLETIONS, 1.0), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.filterwarnings("default")  # transformers complains of the invalid defaults
def test_generation_defaults_survive_a_round_trip_even_invalid_ones(tiny_policy: TinyPolicy, tmp_path: Path) -> None:
    defaults = {"do_sample": False, "temperature": 0.3, "top_p": 0.5, "eos_token_id": [2, 9]}
    policy = tiny_policy(model={"generation_config": defaults})
    policy.save_pretrained(tmp_path)
    again = Policy.load(policy.config, checkpoint=tmp_path)
    assert again.end_ids == policy.end_ids == {2, 9}
    odd = GenerationConfig(do_sample=False, temperature=0.6, eos_token_id=[1, 2], pad_token_id=0)
    kept = models._storable(odd)  # what cannot be written leaves its tokens
    assert (kept.eos_token_id, kept.pad_token_id, kept.temperature) == ([1, 2], 0, GenerationConfig().temperature)
    fine = GenerationConfig(do_sample=True, temperature=0.6)
    assert models._storable(fine) is fine


def test_weights_of_a_file_lie_as_those_that_are_made(tiny_policy: TinyPolicy, tmp_path: Path) -> None:
    """Or a run that goes on from a checkpoint would differ in its last bits from one that never stopped."""
    policy = tiny_policy()
    policy.save_pretrained(tmp_path)
    file = next(tmp_path.glob("*.safetensors"))
    moved = file.read_bytes()
    length = int.from_bytes(moved[:8], "little")
    for more in range(8, 72, 8):  # the header may be padded with spaces, so tensors may begin anywhere
        file.write_bytes(
            (length + more).to_bytes(8, "little") + moved[8 : 8 + length] + b" " * more + moved[8 + length :]
        )
        again = Policy.load(policy.config, checkpoint=tmp_path)
        assert all(weights.data_ptr() % 64 == 0 for weights in again.model.parameters())
        for one, other in zip(policy.model.parameters(), again.model.parameters(), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("also", [None, ["embed_tokens", "lm_head"]])
def test_an_adapter_may_have_tokens_that_its_base_lacks(
    tied: bool, also: list[str] | None, tiny_model_dir: TinyModelDir, tmp_path: Path
) -> None:
    """As fine-tuning leaves it that adds tokens of a chat and trains their embeddings, or leaves them as drawn."""
    base = tiny_model_dir("llama", tie_word_embeddings=tied)
    tokenizer, model = load_tokenizer(str(base)), AutoModelForCausalLM.from_pretrained(base)
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    model.resize_token_embeddings(len(tokenizer))
    lora = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=also, task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft tells of both
        adapted = get_peft_model(model, lora)
        for weight in adapted.parameters():
            weight.data += 0.1 * torch.randn_like(weight) * weight.requires_grad
        adapted.save_pretrained(str(tmp_path / "adapter"))
    tokenizer.save_pretrained(tmp_path / "adapter")
    policy = Policy.load(PeerConfig(name="a", model=str(tmp_path / "adapter"), device="cpu", dtype="float32"))
    assert policy.vocab_size == len(tokenizer)
    shape = _shape(policy.config.model, policy.config)  # of a dry run
    assert shape.config.vocab_size == len(tokenizer)
    assert shape.parameters == policy.n_parameters or (tied and also)  # peft unties them
    ids = torch.arange(4, len(tokenizer))[None]
    torch.testing.assert_close(policy.model(ids).logits, adapted.eval()(ids).logits, atol=1e-3, rtol=1e-3)
    policy.save_pretrained(tmp_path / "saved")
    again = Policy.load(policy.config, checkpoint=tmp_path / "saved")
    assert torch.equal(policy.model(ids).logits, again.model(ids).logits)


def test_an_adapter_of_a_base_by_a_relative_path_loads_from_any_directory(
    tiny_model_dir: TinyModelDir, tiny_policy: TinyPolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that goes on from a checkpoint made where its base lay elsewhere, and one without a tokenizer."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "base").symlink_to(tiny_model_dir())
    monkeypatch.chdir(tmp_path)
    policy = tiny_policy(**TRAINS["lora"], model=Path("models/base"), learning_rate=1e-2)
    ascend(policy)
    expected = policy.logps(PROMPTS, COMPLETIONS, 1.0)
    policy.save_pretrained(tmp_path / "first")
    file = tmp_path / "first" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": "models/base"}))
    Policy.load(policy.config, checkpoint=tmp_path / "first").save_pretrained(tmp_path / "second")
    policy.save_pretrained(tmp_path / "third")
    for tokenizer in (tmp_path / "third").glob("token*"):
        tokenizer.unlink()
    monkeypatch.chdir("/")
    for name in ("second", "third"):
        loaded = tiny_policy(model=tmp_path / name)
        for a, b in zip(expected, loaded.logps(PROMPTS, COMPLETIONS, 1.0), strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5)
        assert not (tmp_path / name / "README.md").exists()  # peft's has blanks


def test_a_second_adapter_on_an_adapter_is_refused(tiny_policy: TinyPolicy, tmp_path: Path) -> None:
    adapter = tiny_policy(**TRAINS["lora"])
    tmp_path /= "checkpoint-3"
    adapter.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=rf"itself a LoRA adapter.*ftis export {tmp_path} --merge") as caught:
        tiny_policy(**TRAINS["lora"], model=tmp_path)
    assert_one_line(caught)
    with pytest.raises(ModelError, match="itself a LoRA adapter"):  # before a run, too
        models.require_trainable(PeerConfig(name="a", model=str(tmp_path), train="lora"), str(tmp_path))


def test_quantised_weights_are_refused_in_one_line(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    place = shutil.copytree(tiny_model_dir(), tmp_path / "quantised")
    described = json.loads((place / "config.json").read_text())
    described["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (place / "config.json").write_text(json.dumps(described))
    with pytest.raises(ModelError, match="quantised and cannot be trained in full"):
        models.require_trainable(PeerConfig(name="a", model=str(place)), str(place))
    with pytest.raises(ModelError, match="cannot be loaded") as caught:  # the library for it is not here
        Policy.load(PeerConfig(name="a", model=str(place), train="lora", device="cpu"))
    assert_one_line(caught)


@pytest.mark.parametrize(("kind", "target"), [("qwen2", "embed_tokens"), ("qwen2", "lm_head"), ("llama4", "router")])
def test_an_adapter_that_could_not_be_merged_is_refused(
    kind: str, target: str, tiny_model_dir: TinyModelDir, tmp_path: Path
) -> None:
    """On tied weights it would change both the embeddings and the output layer. A router returns which experts come
    next, and an adapter's product cannot be added to that."""
    model = tiny_model_dir(kind)
    peer: dict[str, Any] = {"name": "a", "train": "lora", "device": "cpu"}
    if target == "router":
        Policy.load(PeerConfig(model=str(model), lora_target_modules=("q_proj",), **peer))
    else:
        untied = tiny_model_dir(tie_word_embeddings=False)
        Policy.load(PeerConfig(model=str(untied), lora_target_modules=("q_proj", target), **peer))
    config = PeerConfig(model=str(model), lora_target_modules=("q_proj", target), **peer)
    for refused in (lambda: models.require_trainable(config, config.model), lambda: Policy.load(config)):
        with pytest.raises(ModelError) as caught:
            refused()
        assert_one_line(caught, "peer 'a'", target, "lora_target_modules")
    if target == "router":
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft tells of it
        lora = LoraConfig(r=4, target_modules=[target], task_type="CAUSAL_LM")
        get_peft_model(AutoModelForCausalLM.from_pretrained(model), lora).save_pretrained(str(tmp_path))
    with pytest.raises(ModelError) as caught:
        loaded(str(tmp_path))
    assert_one_line(caught, str(tmp_path), target)


def test_a_layer_of_a_class_of_its_own_may_be_a_product() -> None:
    class Product(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    class Groups(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.reshape(-1, 2, self.in_features))

    layers = (torch.nn.Linear(3, 4), Product(3, 4), Groups(3, 4))
    assert [models.is_product(layer) for layer in layers] == [True, True, False]


def test_adapters_load_their_base_once(
    tiny_policy: TinyPolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_policy(**TRAINS["lora"]).save_pretrained(tmp_path)
    load = Mock(wraps=AutoModelForCausalLM.from_pretrained)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)
    tiny_policy(model=tmp_path)
    assert load.call_count == 1


def test_fingerprints_are_equal_where_ids_mean_the_same(tiny_tokenizer: Any, tiny_model_dir: TinyModelDir) -> None:
    """A chat template changes the prompts alone. Other ends are equal if the recipe names the ends of both."""
    plain, base, *others = (tiny_tokenizer() for _ in range(5))
    fingerprint = tokenizer_fingerprint(plain)
    assert len(fingerprint) == 32
    assert int(fingerprint, 16) >= 0
    for same in (load_tokenizer(str(tiny_model_dir("gpt2", seed=5))), tiny_tokenizer(chat_template=True)):
        assert tokenizer_fingerprint(same) == fingerprint
    base.eos_token = "<unk>"
    for one, more in zip(others, ("zebra", "zébra", None), strict=True):
        if more:
            one.add_tokens([more])
    vocabulary = others[-1].get_vocab()
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    others[-1].get_vocab = lambda: vocabulary
    assert len({tokenizer_fingerprint(one) for one in (plain, base, *others)}) == 5
    both = ("<eos>", "<unk>")
    assert tokenizer_fingerprint(base, both) == tokenizer_fingerprint(plain, both[::-1])
    assert tokenizer_fingerprint(base, both[:1]) == tokenizer_fingerprint(plain, both)
    assert tokenizer_fingerprint(plain, both[:1]) == fingerprint


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=20))
def test_a_text_has_the_tokens_of_tokenizer_json(tiny_model_dir: TinyModelDir, text: str) -> None:
    """transformers gives a Qwen2 model Qwen2's rules, under which this tokenizer drops what it cannot spell."""
    model = tiny_model_dir("qwen2")
    assert type(AutoTokenizer.from_pretrained(model)).__name__ == "Qwen2Tokenizer"
    expected = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    assert load_tokenizer(str(model))(text, add_special_tokens=False)["input_ids"] == expected


def test_further_tokens_end_completions(tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy()
    policy.end_at(("<think>", "7"))
    vocabulary = policy.tokenizer.get_vocab()
    assert policy.end_ids == {2, vocabulary["<think>"], vocabulary["7"]}
    with pytest.raises(ModelError) as caught:
        policy.end_at(("7", "<|im_end|>"))
    assert_one_line(caught, "peer 'tiny'", "sampling.end_tokens names '<|im_end|>'", "write it as its tokenizer does")


def test_a_completion_is_decoded_without_special_tokens_but_with_its_tags(tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy()
    text = "<think>1+2=3;</think><answer>3</answer>"
    ids = policy.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert policy.detokenize([*ids, policy.tokenizer.eos_token_id]) == text
    assert policy.detokenize([policy.tokenizer.bos_token_id, *ids, policy.tokenizer.pad_token_id]) == text


def test_the_vocabulary_is_as_large_as_the_embedding(tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy(model={"vocab_size": 70})
    assert policy.vocab_size == 70
    assert len(policy.tokenizer) < 70
    assert np.isfinite(policy.logps(PROMPTS[:1], [np.array([69], np.int32)], 1.0)[0]).all()


def loaded(source: str) -> Any:
    return load_model(source, PeerConfig(name="a", model=source))


@pytest.mark.parametrize("load", [loaded, load_tokenizer])
def test_a_directory_that_is_missing_or_holds_no_model(load: Callable[[str], Any], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for place in ("absent", "empty"):
        with pytest.raises(ModelError, match=f"no model at .*{place}.*config.json.*starter:small") as caught:
            load(str(tmp_path / place))
        assert_one_line(caught)


@pytest.mark.parametrize(
    ("files", "content", "expected"),
    [
        ("config.json", b"{", "cannot be loaded"),
        ("config.json", b'{"model_type": "no-such-model"}', "cannot be loaded: .*no-such-model"),
        ("config.json", b'{"model_type": "t5"}', "cannot be loaded: .*[Tt]5"),
        ("config.json", lambda whole: whole.replace(b'"hidden_size": 32', b'"hidden_size": 64'), "cannot be loaded"),
        ("model.safetensors", None, "cannot be loaded: .*model.safetensors"),
        ("model.safetensors", b"", "cannot be loaded"),
        ("model.safetensors", b"\x00\x01\x02" * 50, "cannot be loaded"),
        ("model.safetensors", lambda whole: whole[: len(whole) // 2], "cannot be loaded"),
        ("tokenizer*.json", None, "tokenizer .*copy"),
        ("tokenizer*.json", b"", "tokenizer .*copy"),
        ("tokenizer*.json", b"{", "tokenizer .*copy"),
        ("tokenizer_config.json", b"{}", "no end-of-sequence token: set eos_token"),
    ],
)
def test_a_damaged_model(files: str, content: Any, expected: str, tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_model_dir(), tmp_path / "copy"))
    for path in copy.glob(files):
        whole = path.read_bytes()
        path.unlink()
        if content is not None:
            path.write_bytes(content(whole) if callable(content) else content)
    with pytest.raises(ModelError, match=expected) as caught:
        (load_tokenizer if files.startswith("tokenizer") else loaded)(str(copy))
    assert_one_line(caught, str(copy))


def test_lora_targets_that_do_not_exist(tiny_policy: TinyPolicy) -> None:
    with pytest.raises(ModelError, match=r"peer 'tiny': LoRA does not fit .*no_such_proj") as caught:
        tiny_policy(train="lora", lora_target_modules=("no_such_proj",))
    assert_one_line(caught)


def test_a_device_that_is_unknown_or_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    for device, count, said in (
        *((name, 4, "is unknown: use auto, cpu, cuda, cuda:<index> or mps") for name in ("quantum", "", "cpu:cpu")),
        ("cuda:x", 4, "is unknown"),
        *((name, 0, f"'{name}' is not here (0 CUDA devices): use auto or cpu") for name in ("cuda", "cuda:0")),
        ("cuda:1", 1, "1 CUDA"),
        ("cuda:7", 4, "4 CUDA"),
    ):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        with pytest.raises(ModelError) as caught:
            resolve_device(device)
        assert_one_line(caught, said)


def test_devices_and_dtypes_that_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == resolve_device("cpu") == torch.device("cpu")
    with_gpus(monkeypatch, True, False)  # as an A100 beside a T4
    assert resolve_device("auto") == resolve_device("cuda") == torch.device("cuda")
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert resolve_dtype("auto", cpu) == resolve_dtype("float32", cuda) == torch.float32
    assert resolve_dtype("bfloat16", cpu) == torch.bfloat16
    assert resolve_dtype("auto", cuda) == resolve_dtype("auto", torch.device("cuda:0")) == torch.bfloat16
    assert resolve_dtype("auto", torch.device("cuda:1")) == torch.float32
    assert resolve_dtype("bfloat16", torch.device("cuda:1")) == torch.bfloat16


def test_adamw_is_as_the_peer_says_and_in_one_kernel_takes_the_steps_of_the_plain_one(tiny_policy: TinyPolicy) -> None:
    keys: dict[str, Any] = {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6, "weight_decay": 0.1}
    ours, plain = (tiny_policy(learning_rate=1e-2, **keys) for _ in range(2))
    (group,) = plain.optimizer.param_groups
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (1e-2, (0.8, 0.95), 1e-6, 0.1)
    plain.optimizer = torch.optim.AdamW([{**group, "fused": False, "foreach": False}])
    assert ours.optimizer.param_groups[0]["fused"]
    before = weights(ours)
    for policy in (ours, plain):
        ascend(policy, steps=3)
    assert relative_difference(weights(ours), weights(plain)) < 1e-6
    assert relative_difference(weights(ours), before) > 1e-3
