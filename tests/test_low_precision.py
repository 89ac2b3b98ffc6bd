"""What is not trained in bfloat16 or 4 bits, and moments in 8 bits."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TinyPolicy, assert_one_line
from policies import drawn_rows, weights

from ftis.check.memory import Shape, _weights, checkpoint_bytes
from ftis.config import ModelError, PeerConfig, RecipeError
from ftis.engines.builtin import _Rows, builtin_sampler
from ftis.engines.decoder import fuses
from ftis.engines.head import ChunkedHead
from ftis.engines.kept import holds_as_kept, share_frozen
from ftis.engines.lines import Lines
from ftis.engines.optimizers import load_state
from ftis.member import Cursor
from ftis.policy import Policy
from ftis.recipe.parsing import parse
from ftis.run import checkpoint
from ftis.sampling import Decoding

LORA: dict[str, Any] = {"train": "lora", "lora_r": 4, "lora_alpha": 8, "learning_rate": 1e-2}
WIDE = {"hidden_size": 64, "intermediate_size": 128}
"""bitsandbytes packs blocks of 64 numbers, and keeps moments of fewer than 4,096 in float32."""
PROMPTS = [np.arange(4, 4 + n, dtype=np.int32) for n in (3, 6)]
COMPLETIONS = [np.array([7, 8, 2], np.int32)] * 2


def learner_gap(policy: Policy) -> float:
    """The mean difference between log-probabilities of the sampler and of the learner."""
    prompts, ids, drawn = drawn_rows(PROMPTS, builtin_sampler(policy, PROMPTS, 4, Decoding(8), 0))
    return float(np.abs(np.concatenate(policy.logps(prompts, ids, 1.0)) - np.concatenate(drawn)).mean())


def one_step(policy: Policy) -> None:
    policy.step(PROMPTS, COMPLETIONS, 1.0, lambda logp, mask, rows: -torch.where(mask, logp, 0.0).sum())


def changed(before: dict[str, torch.Tensor], policy: Policy) -> set[str]:
    return {name for name, value in weights(policy).items() if not torch.equal(value, before[name])}


@pytest.mark.parametrize(("exact_from", "holds"), [(8, True), (11, True), (24, False)])
def test_a_check_that_bfloat16_is_too_coarse_for_is_tried_in_float16(
    exact_from: int, holds: bool, tiny_policy: TinyPolicy
) -> None:
    bits, tried = {torch.bfloat16: 8, torch.float16: 11}, list[torch.dtype]()

    def check() -> bool:
        tried.append(torch.get_autocast_dtype("cpu"))
        return bits[tried[-1]] >= exact_from

    low = tiny_policy(**LORA, dtype="bfloat16", frozen_dtype="bfloat16").model
    assert holds_as_kept(low, check) == holds
    assert tried == list(bits)[: 1 if exact_from == 8 else 2]
    assert holds_as_kept(tiny_policy(**LORA).model, lambda: not torch.is_autocast_enabled("cpu"))


@pytest.mark.parametrize("packed_from", [0, 2**18])
@pytest.mark.parametrize("kind", ["qwen2", "gemma3", "llama"])
def test_frozen_matrices_in_bfloat16(
    kind: str, packed_from: int, tiny_policy: TinyPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftis.engines.linear.PACKED_FROM", packed_from)
    policy = tiny_policy(kind, **LORA, dtype="bfloat16", frozen_dtype="bfloat16")
    for name, parameter in policy.model.named_parameters():
        assert (parameter.dtype == torch.bfloat16) == (not parameter.requires_grad and parameter.dim() > 1), name
    assert isinstance(policy.forward, Lines)
    assert isinstance(policy.head, ChunkedHead)
    assert fuses(policy.model)
    rounded = tiny_policy(kind, **LORA, dtype="bfloat16")
    with torch.no_grad():
        for parameter in rounded.model.parameters():
            if not parameter.requires_grad and parameter.dim() > 1:
                parameter.copy_(parameter.to(torch.bfloat16))
    for low, full in zip(*(p.logps(PROMPTS, COMPLETIONS, 1.0) for p in (policy, rounded)), strict=True):
        np.testing.assert_allclose(low, full, atol=0.05)  # the embeddings are cast once more or less
    assert learner_gap(policy) < 0.1
    before = weights(policy)
    one_step(policy)
    assert {name for name in before if "lora_B" in name} <= changed(before, policy)
    assert all("lora_" in name for name in changed(before, policy))


def test_only_what_is_under_an_adapter_is_frozen() -> None:
    peer = {"name": "a", "model": "m", "frozen_dtype": "nf4"}
    with pytest.raises(RecipeError, match='frozen_dtype wants train = "lora", not "full": leave it out'):
        parse({"name": "r", "task": {"name": "clock"}, "peers": [peer]})


def test_linear_layers_in_four_bits(tiny_policy: TinyPolicy, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    policy = tiny_policy(model=WIDE, **LORA, frozen_dtype="nf4")
    assert policy.n_parameters == sum(p.numel() for p in tiny_policy(model=WIDE, **LORA).model.parameters())
    packed = {name for name, p in policy.model.named_parameters() if p.dtype == torch.uint8}
    assert len(packed) == 14  # seven of each layer, and not the embeddings
    assert not fuses(policy.model)
    exact = tiny_policy(model=WIDE, **LORA)
    low, full = (np.concatenate(p.logps(PROMPTS, COMPLETIONS, 1.0)) for p in (policy, exact))
    assert 0 < np.abs(low - full).mean() < 2  # random weights: coarse, and the same model
    assert learner_gap(policy) < 1e-3
    before = weights(policy)
    one_step(policy)
    assert all("lora_" in name for name in changed(before, policy))
    assert changed(before, policy)
    checkpoint.save(tmp_path, policy, Cursor(step=1), keep=1)
    again, _, _ = checkpoint.load(tmp_path, 1, policy.config, policy.config.model)
    assert not changed(weights(policy), again)


def test_adapters_on_one_base_in_four_bits_share_it_and_train_apart(tiny_policy: TinyPolicy) -> None:
    pytest.importorskip("bitsandbytes")
    first, second = (tiny_policy(model=WIDE, **LORA, frozen_dtype="nf4") for _ in range(2))
    frozen, others = ([p for p in policy.model.parameters() if not p.requires_grad] for policy in (first, second))
    assert [p.data_ptr() for p in frozen] == [p.data_ptr() for p in others]
    packed = [(p, o) for p, o in zip(frozen, others, strict=True) if p.dtype == torch.uint8]
    assert len(packed) == 14
    assert all(p.quant_state.absmax is o.quant_state.absmax for p, o in packed)
    before = second.logps(PROMPTS, COMPLETIONS, 1.0)
    one_step(first)
    for was, now in zip(before, second.logps(PROMPTS, COMPLETIONS, 1.0), strict=True):
        np.testing.assert_array_equal(was, now)
    weight = packed[0][1]  # equal bits under other scales are another base
    weight.data = weight.data.clone()
    weight.quant_state.absmax = doubled = 2 * weight.quant_state.absmax
    share_frozen(second.model)
    assert weight.data_ptr() not in {p.data_ptr() for p in frozen}
    assert torch.equal(weight.quant_state.absmax, doubled)


def test_moments_in_eight_bits_step_as_adamw_does(tiny_policy: TinyPolicy) -> None:
    pytest.importorskip("bitsandbytes")
    eight, full = (tiny_policy(model=WIDE, optim=o, learning_rate=1e-3) for o in ("adamw_8bit", "adamw"))
    before = weights(full)
    for _ in range(3):
        one_step(eight)
        one_step(full)
    moved, expected = (
        torch.cat([(value - before[name]).flatten() for name, value in weights(p).items()]) for p in (eight, full)
    )
    assert float((moved - expected).norm() / expected.norm()) < 0.1
    states = eight.optimizer.state.values()
    assert torch.uint8 in {state["state1"].dtype for state in states}
    assert not torch.equal(moved, expected)


def test_moments_in_eight_bits_are_resumed_and_paged_ones_into_pages(tiny_policy: TinyPolicy, tmp_path: Path) -> None:
    library = pytest.importorskip("bitsandbytes")
    policy = tiny_policy(model=WIDE, optim="adamw_8bit", learning_rate=1e-3)
    one_step(policy)
    checkpoint.save(tmp_path, policy, Cursor(step=1), keep=1)
    resumed, again = (checkpoint.load(tmp_path, 1, policy.config, policy.config.model)[0] for _ in range(2))
    pages: list[torch.Tensor] = []

    class Paged(library.optim.AdamW8bit):  # type: ignore[misc, name-defined]
        is_paged = True

        def get_state_buffer(self, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
            pages.append(torch.zeros_like(parameter, dtype=dtype))
            return pages[-1]

    again.optimizer = Paged(again.trainable, lr=1e-3, weight_decay=0.0)
    again.optimizer.is_paged = True
    load_state(again.optimizer, torch.load(tmp_path / "checkpoint-1" / "trainer_state" / "optimizer.pt"))
    moments = [of[moment] for of in again.optimizer.state.values() for moment in ("state1", "state2")]
    assert len(pages) == len(moments) == 2 * len(again.trainable)
    assert all(one is other for one, other in zip(pages, moments, strict=True))
    for one in (policy, resumed, again):
        one_step(one)
    assert not changed(weights(policy), resumed)
    assert not changed(weights(policy), again)


@pytest.mark.parametrize(
    ("peer", "words"),
    [
        ({**LORA, "frozen_dtype": "bfloat16"}, ('dtype = "bfloat16"',)),  # with arithmetic in float32
        ({"optim": "paged_adamw_8bit"}, ('optim = "adamw_8bit"', "device is cpu")),
    ],
)
def test_a_precision_that_this_device_lacks_is_refused(
    peer: dict[str, Any], words: tuple[str, ...], tiny_policy: TinyPolicy
) -> None:
    with pytest.raises(ModelError) as caught:
        tiny_policy(**peer)
    assert_one_line(caught, "peer 'tiny'", *words)


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_slots_have_the_compute_dtype(kind: str, tiny_policy: TinyPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("bitsandbytes")
    policy = tiny_policy(kind, model=WIDE, **LORA, dtype="bfloat16", frozen_dtype="nf4")
    kept: set[torch.dtype] = set()
    refill = _Rows.refill

    def looked_at(self: _Rows, n_prompts: int) -> torch.Tensor:
        logits = refill(self, n_prompts)
        kept.update(tensor.dtype for tensors in self.cache.all_slots() for tensor in tensors)
        return logits

    monkeypatch.setattr(_Rows, "refill", looked_at)
    assert not fuses(policy.model)
    assert learner_gap(policy) < 0.1
    assert kept == {torch.bfloat16}


@pytest.mark.parametrize("setting", [{"optim": "adamw_8bit"}, {"frozen_dtype": "nf4", **LORA}])
def test_no_bitsandbytes(setting: dict[str, Any], tiny_policy: TinyPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ModelError) as caught:
        tiny_policy(**setting)
    assert_one_line(caught, "peer 'tiny'", next(iter(setting)), "pip install 'ftis-rl[bitsandbytes]'")


def test_what_weights_and_checkpoints_take() -> None:
    shape = Shape(config=None, tokenizer=None, parameters=1_000, trained=200)
    sizes = {}
    for kept in ("float32", "bfloat16", "nf4"):
        peer = PeerConfig(name="a", model="m", train="lora", frozen_dtype=kept)
        sizes[kept] = _weights(shape, peer, ends=160)
    assert sizes == {"float32": 4000, "bfloat16": 800 + 1600, "nf4": 800 + 640 + 640 * 9 // 16}
    full, eight = (PeerConfig(name="a", model="m", optim=o) for o in ("adamw", "adamw_8bit"))
    assert (checkpoint_bytes(full, 100, 100), checkpoint_bytes(eight, 100, 100)) == (1200, 600)
    adapter = PeerConfig(name="a", model="m", train="lora")
    assert checkpoint_bytes(adapter, 100, 10) == 120
