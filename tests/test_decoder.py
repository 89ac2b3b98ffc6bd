"""The fused step: the logits of the model's own, and refused where it would not give them."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from conftest import TinyPolicy
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from ftis.engines import decoder, devices, slots
from ftis.engines.decoder import FusedDecoder, fuses
from ftis.engines.linear import Linear


def model_of(kind: str, **settings: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    special = {"vocab_size": 60, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **{**sizes, "num_key_value_heads": 2, "head_dim": 8, **special, **settings})
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    return model.eval()


MINISTRAL3 = {
    **{"rope_type": "yarn", "factor": 16.0, "rope_theta": 1e6, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0},
    **{"mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "llama_4_scaling_beta": 0.1},
}
"""Queries are scaled by their positions, from the 4,096th on."""

FUSED: list[tuple[str, dict[str, Any]]] = [
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    ("qwen3", {}),
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    ("llama", {"hidden_act": "gelu", "head_dim": 16}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}}),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    ("granite", {}),
    ("mistral", {"sliding_window": 4}),
    ("gemma", {}),
    ("gemma3_text", {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}),
    ("gemma3_text", {"sliding_window": 20, "query_pre_attn_scalar": 3, "rms_norm_eps": 0.1}),
]


@torch.no_grad()
@pytest.mark.parametrize("packed_from", [0, 2**18])
@pytest.mark.parametrize(("kind", "settings"), FUSED)
def test_steps_give_the_models_logits(
    kind: str, settings: dict[str, Any], packed_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over several steps, from several rows' places, the first row's leading slots being padding."""
    monkeypatch.setattr("ftis.engines.linear.PACKED_FROM", packed_from)
    model = model_of(kind, **settings)
    assert fuses(model)
    fused = FusedDecoder(model, torch.float32, torch.arange(12))
    ids = torch.randint(0, 60, (3, 9), generator=torch.Generator().manual_seed(1))
    pads = torch.tensor([3, 0, 1])
    shape = (3, model.config.num_key_value_heads, 9, fused.width)
    keys, values = ([torch.zeros(shape) for _ in fused.layers] for _ in range(2))
    found = []
    for t in range(9):
        used = slice(0, t + 1)
        # A row that has not begun sees its own slot alone, which nobody reads later.
        hidden = torch.arange(t + 1) < pads.clamp(max=t)[:, None, None, None]
        found.append(
            fused.step(
                ids[:, t],
                (t - pads).clamp(min=0),
                [k[:, :, used] for k in keys],
                [v[:, :, used] for v in values],
                torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf),
            )
        )
    for row, pad in enumerate(pads.tolist()):
        expected = model(input_ids=ids[row : row + 1, pad:]).logits[0]
        torch.testing.assert_close(torch.stack(found)[pad:, row], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("gemma2", {}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}),
        ("gemma3_text", {"use_bidirectional_attention": True}),
        ("cohere", {}),
        ("granite", {"residual_multiplier": 0.5}),
        ("granite", {"embedding_multiplier": 2.0}),
        ("granite", {"logits_scaling": 2.0}),
        ("gpt2", {"n_head": 4, "n_embd": 32}),
        ("olmo2", {}),
        ("starcoder2", {}),
        ("qwen3_moe", {}),
        ("ministral3", {"rope_parameters": MINISTRAL3}),
    ],
)
def test_models_of_other_kinds_step_by_themselves(kind: str, settings: dict[str, Any]) -> None:
    assert not fuses(model_of(kind, **settings))


UNTIED = {"tie_word_embeddings": False}


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("k_proj", "o_proj", "gate_proj", "down_proj", "lm_head")])
def test_adapters_are_merged_in(targets: tuple[str, ...], tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy(model=UNTIED, train="lora", lora_r=4, lora_target_modules=targets)
    before = FusedDecoder(policy.model, torch.float32, torch.arange(8))
    for parameter in policy.trainable:
        torch.nn.init.normal_(parameter, std=0.3)
    assert decoder._computes_the_same(policy.model)
    after = FusedDecoder(policy.model, torch.float32, torch.arange(8))
    assert not torch.equal(before.layers[0].qkv.weight, after.layers[0].qkv.weight)


def test_a_model_with_an_adapter_on_its_embeddings_steps_by_itself(tiny_policy: TinyPolicy) -> None:
    targets = ("q_proj", "embed_tokens")
    assert not fuses(tiny_policy(model=UNTIED, train="lora", lora_r=4, lora_target_modules=targets).model)


def test_a_processor_without_bfloat16_packs_no_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftis.engines.linear.PACKED_FROM", 0)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False, raising=False)
    assert not Linear.of(torch.ones(4, 4, dtype=torch.bfloat16), None).packed
    assert not Linear.of(torch.ones(4, 4, dtype=torch.float64), None).packed


@torch.no_grad()
@pytest.mark.parametrize(("kind", "settings"), [("qwen2", {}), ("gemma3_text", {"sliding_window": 4})])
def test_rows_that_read_on_are_as_many_at_a_time_as_memory_allows(
    kind: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes as the allocator has them. The rows keep 40 to 71 of 104 tokens."""
    n, places = 32, 104
    model, random = model_of(kind, max_position_embeddings=128, **settings), torch.Generator().manual_seed(0)
    fused, known_N = FusedDecoder(model, torch.float32, torch.arange(places)), torch.arange(40, 40 + n)
    unread = torch.arange(places) >= known_N[:, None]
    row_M, slot_M = unread.nonzero(as_tuple=True)
    token_M = torch.randint(0, 60, row_M.shape, generator=random)
    shape = (n, model.config.num_key_value_heads, places, fused.width)
    kept = [torch.randn(shape, generator=random) for _ in (*fused.layers, *fused.layers)]

    def read(within: int) -> tuple[Tensor, int]:
        """Logits, and the most bytes at once beside those from before."""
        monkeypatch.setattr(devices, "CPU_BYTES", within)
        keys, values = [k.clone() for k in kept[: len(fused.layers)]], [v.clone() for v in kept[len(fused.layers) :]]
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            logits = fused.read(token_M, slot_M, row_M, slot_M, keys, values, torch.zeros(n, dtype=torch.int64))
        events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
        sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
        return logits, max(accumulate(sizes))

    activations = slots.prefill_bytes(model.config, len(row_M), 4)
    a_row = slots.attention_bytes(fused.n_query, fused.width, places - 40, places, 4)
    whole, measured = read(2**31)
    assert 1 / 2 < measured / (activations + n * a_row) < 2
    for at_once in (5, 1):
        logits, less = read(slots.PREFILL_PARTS * a_row * at_once)
        assert torch.equal(logits, whole)
        assert 1 / 2 < less / (activations + at_once * a_row) < 2
        assert less < measured / 2
