"""The parts that only a GPU has: graphs, bfloat16, AdamW and weights in fewer bits, the same numbers as a CPU's.

``make gpu`` runs these first. ``FTIS_TEST_DEVICE=cpu`` runs their code without a GPU. They need no other test file.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from policies import ids_of
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from ftis.config import PeerConfig
from ftis.engines.builtin import builtin_sampler
from ftis.engines.decoder import fuses
from ftis.engines.generate import generate_sampler
from ftis.engines.models import load_model
from ftis.engines.offload import Offload
from ftis.policy import Policy
from ftis.rollouts import Ints, Rollout
from ftis.sampling import Decoding

DEVICE = os.environ.get("FTIS_TEST_DEVICE", "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a GPU"),
]
VOCABULARY = 320


def a_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models

    core = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="t1", pad_token="t2", unk_token="t0")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Qwen3 of random weights whose next token is far from certain and far from uniform."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "head_dim": 32}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, vocab_size=VOCABULARY, eos_token_id=1))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, 0.15)
    place = tmp_path_factory.mktemp("qwen3")
    model.save_pretrained(place)
    return str(place)


def policy_of(directory: str, **peer: Any) -> Policy:
    config = PeerConfig(name="p", model=directory, **{"device": DEVICE, "dtype": "float32", **peer})
    torch.manual_seed(0)
    return Policy(load_model(directory, config), a_tokenizer(), config)


def prompts() -> list[Ints]:
    """Prompts of unequal length."""
    rng = np.random.default_rng(0)
    return [rng.integers(3, VOCABULARY, 20 + 3 * n).astype(np.int32) for n in range(6)]


def rows_of(groups: Sequence[Sequence[Rollout]]) -> tuple[list[Ints], list[Ints]]:
    prompted = [
        (ids, rollout.completion_ids) for ids, group in zip(prompts(), groups, strict=True) for rollout in group
    ]
    return [ids for ids, _ in prompted], [ids for _, ids in prompted]


def learned(policy: Policy, groups: Sequence[Sequence[Rollout]]) -> np.ndarray[Any, Any]:
    return np.concatenate(policy.logps(*rows_of(groups), 1.0))


def gaps(policy: Policy, groups: Sequence[Sequence[Rollout]]) -> np.ndarray[Any, Any]:
    sampled = np.concatenate([rollout.gen_logp for group in groups for rollout in group])
    return np.asarray(np.abs(sampled - learned(policy, groups)))


def a_step(policy: Policy, groups: Sequence[Sequence[Rollout]]) -> float:
    policy.set_learning_rate(1e-3)
    return policy.step(*rows_of(groups), 1.0, lambda logp, mask, part: -torch.where(mask, logp, 0.0).sum() / 1000)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_greedy_text_is_that_of_generate_with_graphs_and_without(dtype: str, directory: str) -> None:
    greedy = Decoding(24, 0.0)
    policy = policy_of(directory, dtype=dtype, cuda_graphs=False)
    assert fuses(policy.model)
    plain = ids_of(builtin_sampler(policy, prompts(), 2, greedy, 0))
    if dtype == "float32":
        assert plain == ids_of(generate_sampler(policy, prompts(), 2, greedy, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the sampler warns when it leaves graphs out
        captured = ids_of(builtin_sampler(policy_of(directory, dtype=dtype), prompts(), 2, greedy, 0))
    same = np.mean([one == other for one, other in zip(captured, plain, strict=True)])
    assert same == 1.0 if dtype == "float32" else same > 0.8


def test_sampled_log_probabilities_are_the_learners(directory: str) -> None:
    policy = policy_of(directory)
    assert gaps(policy, builtin_sampler(policy, prompts(), 4, Decoding(24), 0)).max() < 1e-3
    coarse = policy_of(directory, dtype="bfloat16")
    assert gaps(coarse, builtin_sampler(coarse, prompts(), 4, Decoding(24), 0)).mean() < 0.05


def test_a_gradient_is_that_of_a_cpu(directory: str) -> None:
    here, cpu = policy_of(directory), policy_of(directory, device="cpu")
    groups = builtin_sampler(cpu, prompts(), 2, Decoding(24), 0)
    for policy in (here, cpu):
        a_step(policy, groups)
    pairs = [(a.grad, b.grad) for a, b in zip(here.trainable, cpu.trainable, strict=True)]
    apart = sum(float((a.cpu() - b).square().sum()) for a, b in pairs if a is not None and b is not None)
    norm = sum(float(b.square().sum()) for _, b in pairs if b is not None)
    assert apart < 1e-6 * norm


def test_the_same_seed_gives_the_same_bits(directory: str) -> None:
    ends = []
    for _ in range(2):
        policy = policy_of(directory, dtype="bfloat16")
        groups = builtin_sampler(policy, prompts(), 4, Decoding(24), 0)
        a_step(policy, groups)
        ends.append((ids_of(groups), [p.detach().cpu().numpy().tobytes() for p in policy.trainable]))
    assert ends[0] == ends[1]


WAYS: dict[str, dict[str, Any]] = {
    "AdamW in 8 bits": {"optim": "adamw_8bit"},
    "paged": {"optim": "paged_adamw_8bit"},
    "base in bfloat16": {"train": "lora", "frozen_dtype": "bfloat16"},
    "base in 4 bits": {"train": "lora", "frozen_dtype": "nf4"},
}


def skip_where_it_lacks(way: str) -> None:
    """Skip a way to keep a model that needs what is not here."""
    if find_spec("bitsandbytes") is None and ("bits" in way or way == "paged"):
        pytest.skip("needs bitsandbytes")
    if way == "paged" and DEVICE == "cpu":
        pytest.skip("needs a GPU")


@pytest.mark.parametrize("way", WAYS)
def test_each_way_to_keep_a_model_samples_and_learns(directory: str, way: str) -> None:
    skip_where_it_lacks(way)
    policy = policy_of(directory, dtype="bfloat16", **WAYS[way])
    groups = builtin_sampler(policy, prompts(), 4, Decoding(24), 0)
    assert gaps(policy, groups).mean() < 0.05
    before = learned(policy, groups).mean()
    for _ in range(3):
        assert a_step(policy, groups) > 0
    assert learned(policy, groups).mean() > before


@pytest.mark.parametrize("way", ["in full", "LoRA", *WAYS])
def test_a_policy_that_waits_in_main_memory_keeps_its_bits(directory: str, way: str) -> None:
    skip_where_it_lacks(way)
    keys = {"in full": {}, "LoRA": {"train": "lora"}, **WAYS}[way]
    ends, offload = [], Offload()
    for leaves in (False, True):
        policy = policy_of(directory, dtype="bfloat16", **keys)
        if leaves:
            offload.add("p", policy, keeps_base=False)
        for _ in range(3):
            offload.take_turn("p")
            groups = builtin_sampler(policy, prompts(), 2, Decoding(24), 0)
            a_step(policy, groups)
            policy.optimizer.zero_grad()
            offload.clear()
            here = [p.untyped_storage().nbytes() for p in policy.model.parameters()]
            assert (sum(here) == 0) == leaves
        offload.take_turn("p")
        ends.append((ids_of(groups), [p.detach().clone() for p in policy.model.parameters()]))
        del policy
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(stayed, left) for stayed, left in zip(ends[0][1], ends[1][1], strict=True))
