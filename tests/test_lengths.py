"""Lengths at which a model computes otherwise: named, found, and kept apart in learner and sampler."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TinyModelDir, TinyPolicy
from hypothesis import given
from hypothesis import strategies as st
from policies import gradients, relative_difference, rows_of
from transformers import Qwen2Config

import ftis
from ftis.config import ModelError
from ftis.engines.lengths import OneLength, named_lengths, switch_of
from ftis.metric_keys import by_peer
from ftis.policy import Policy, positions_of
from ftis.recipe.parsing import parse
from ftis.records.files import read_jsonl
from ftis.rollouts import Ints, Rollout
from ftis.sampling import Decoding
from recipes import pair_of

CPU = torch.device("cpu")
WITH = ["phi3-long", "llama-long"]


@given(st.integers(1, 99), st.sampled_from([lambda n: n, float, lambda n: {"scaling": [0.5, {"original": n}]}]))
def test_an_integer_anywhere_in_a_configuration_may_be_a_length(length: int, nested: Any) -> None:
    own: dict[str, Any] = {"of_its_own": nested(length), "on": True, "ratio": 0.5}
    config = Qwen2Config(max_position_embeddings=99, vocab_size=100, **own)
    found = named_lengths(config)
    assert length in found
    assert found == sorted(set(found))
    assert set(found) <= set(range(1, 100))
    assert 99 in found


def test_a_configuration_may_say_that_positions_have_no_end() -> None:
    assert positions_of(Qwen2Config(max_position_embeddings=-1)) is None  # as XLNet's


@pytest.mark.parametrize(
    ("kind", "expected"),
    [*zip(WITH, [16, 16], strict=True), *((kind, None) for kind in ("llama3", "ministral3", "gpt2", "gemma3"))],
)
def test_a_switch_is_found_where_there_is_one(kind: str, expected: int | None, tiny_policy: TinyPolicy) -> None:
    assert switch_of(tiny_policy(kind).model, CPU) == expected


@pytest.mark.parametrize("switch", [4096, 4097, 100_000])
def test_a_switch_is_found_wherever_it_is(switch: int, tiny_policy: TinyPolicy) -> None:
    model = tiny_policy("llama-long").model
    model.config.max_position_embeddings = 131_072
    model.model.rotary_emb.config.rope_parameters["original_max_position_embeddings"] = switch
    assert switch_of(model, CPU) == switch


def test_a_model_with_rules_of_its_own_for_each_length_is_refused(tiny_policy: TinyPolicy) -> None:
    """As dynamic NTK's beyond the positions of its training."""
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = tiny_policy("llama", model={"max_position_embeddings": 16, "rope_parameters": dynamic}).model
    assert switch_of(model, CPU) is None
    model.config = copy.copy(model.config)
    model.config.max_position_embeddings = 64
    with pytest.raises(ModelError, match="more than 16 tokens"):
        switch_of(model, CPU)


class OfPlaces:
    """A model that makes something else of four places far apart, and nothing else of a longer row."""

    config = Qwen2Config(max_position_embeddings=64)

    def get_input_embeddings(self) -> torch.nn.Embedding:
        return torch.nn.Embedding(8, 4)

    def parameters(self) -> list[torch.Tensor]:
        return []

    def __call__(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None, **kwargs: Any) -> Any:
        kept = kwargs.get("logits_to_keep", torch.arange(input_ids.shape[1]))
        logits = torch.nn.functional.one_hot(input_ids, 8).float()[:, kept]
        far = position_ids is not None and int(position_ids.max()) > 8
        return type("Output", (), {"logits": logits * (2.0 if far else 1.0)})


def test_whole_rows_deny_a_switch_that_only_places_far_apart_show() -> None:
    assert switch_of(OfPlaces(), CPU) is None


def test_two_peers_of_longrope_learn_with_own_kl_0(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    """Their rows pass the switch at 16 tokens, and the first step of each round has π_θ = π_gen."""
    models = {name: tiny_model_dir("phi3-long", seed=seed) for seed, name in enumerate("ab")}
    training = {"rounds": 2, "prompts_per_round": 4, "eval_every": 0}
    sampling = {"num_generations": 4, "max_completion_length": 24}
    more = {"reward": {"function": "recipes.evenness"}, "training": training, "sampling": sampling}
    assert ftis.train(parse(pair_of(models, tmp_path, 1e-3, **more)))
    for name in "ab":
        for record in read_jsonl(next(tmp_path.glob(f"**/{name}/metrics.jsonl"))):
            assert record["grad_norm"] > 0
            assert record["foreign_used"] > 0
            assert record["completions/mean_length"] > 16
            assert abs(by_peer(record)[name]["kl/k1"]) < 1e-5


@torch.no_grad()
def by_prefixes(policy: Policy, prompt: Ints, completion: Ints, temperature: float = 1.0) -> np.ndarray:
    """Each token's log-probability by a pass of the tokens before it alone."""
    ids, found = np.concatenate([prompt, completion]), []
    for n in range(len(prompt), len(ids)):
        logits = policy.model(input_ids=torch.from_numpy(ids[None, :n].astype(np.int64))).logits[0, -1]
        found.append(float((logits.double() / temperature).log_softmax(-1)[ids[n]]))
    return np.array(found)


def test_the_gradient_does_not_depend_on_the_micro_batch_size(tiny_policy: TinyPolicy) -> None:
    prompts, completions = rows_of((5, 5, 12, 20, 17), 0), rows_of((3, 15, 18, 9, 1), 1)
    found = []
    for budget in (1, 60, 10_000):
        policy = tiny_policy("phi3-long", tokens_per_microbatch=budget)
        policy.backward(prompts, completions, 1.0, lambda logp, mask, rows: -logp.where(mask, 0.0).sum())
        found.append(gradients(policy))
    assert max(relative_difference(found[0], other) for other in found[1:]) < 1e-5


END, SWITCH = 49, 16


class OneAtATime:
    """Draws ``length of the row so far`` as each token, up to an end that its seed decides, and looks at its calls."""

    def __call__(
        self, policy: Any, prompt_ids: Sequence[Ints], repeats: int, decoding: Decoding, seed: int, batch_size: int = 0
    ) -> list[tuple[Rollout, ...]]:
        (length,) = {len(prompt) for prompt in prompt_ids}
        assert decoding.kept is None  # keys from before a switch are not those behind it
        last = length + decoding.max_completion_length - 1  # the longest row that predicts a token
        assert not length <= SWITCH < last
        rng = np.random.default_rng(seed)
        return [tuple(self._row(length, last, rng) for _ in range(repeats)) for _ in prompt_ids]

    def _row(self, length: int, last: int, rng: np.random.Generator) -> Rollout:
        end = int(rng.integers(length, 40))
        ids = [*range(length, min(end, last + 1)), *([END] if end <= last else [])]
        return Rollout(np.array(ids, np.int32), -np.array(ids, np.float32))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 4), st.integers(1, 30), st.integers(0, 9))
def test_rows_of_one_length_are_drawn_together_and_begin_again_behind_a_switch(
    lengths: list[int], repeats: int, most: int, seed: int
) -> None:
    policy: Any = type("P", (), {"end_ids": frozenset({END})})
    groups = OneLength(OneAtATime(), SWITCH)(policy, rows_of(lengths), repeats, Decoding(most).keeping(), seed)
    assert [len(group) for group in groups] == [repeats] * len(lengths)
    for length, group in zip(lengths, groups, strict=True):
        for rollout in group:
            ids = rollout.completion_ids.tolist()
            ended = ids[-1] == END
            assert ids[: len(ids) - ended] == list(range(length, length + len(ids) - ended))
            assert ended or len(ids) == most
            assert rollout.gen_logp.tolist() == [-float(i) for i in ids]
