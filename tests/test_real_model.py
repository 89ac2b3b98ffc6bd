"""Real pretrained models, where they are: SmolLM2-135M-Instruct by ``make models``, Gemma 3 270M by ``ftis models``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from policies import check_drawn

from ftis import train
from ftis.config import PeerConfig, PromptConfig
from ftis.engines.builtin import builtin_sampler
from ftis.engines.decoder import fuses
from ftis.engines.generate import generate_sampler
from ftis.engines.lines import Lines
from ftis.engines.stops import stopped_at
from ftis.policy import Policy
from ftis.recipe.parsing import parse
from ftis.records.files import read_jsonl
from ftis.rollouts import Prompt
from ftis.sampling import Decoding
from ftis.tasks.rendering import render_prompt

MODELS = Path(__file__).parents[1] / "models"
MODEL, GEMMA = MODELS / "smollm2-135m", MODELS / "gemma3-270m"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (MODEL / "config.json").exists(), reason="models/smollm2-135m is absent: make models"),
]

QUESTIONS = ("What is 3 + 4?", "Name the capital of France.", "A pen costs 2 dollars. What do 3 pens cost?")
SUM = "State the final answer to the following arithmetic problem: "
RECIPE: dict[str, Any] = {
    "name": "first-reward",
    "processes": "inline",
    "task": {
        "name": "reasoning_gym:chain_sum",
        "options": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        **{"train_size": 60, "validation_size": 2},
    },
    "prompt": {
        **{"system_prompt": "", "chat_template": "never", "template": "Question: {question}\nAnswer:"},
        "examples": [{"question": f"{SUM}{q} =", "completion": f" {a}"} for q, a in (("3 + 4", 7), ("9 - 5", 4))],
    },
    "reward": {"extract": "last_number"},
    "sampling": {"num_generations": 4, "max_completion_length": 8, "stop": ["\n"]},
    "training": {"rounds": 1, "prompts_per_round": 8, "eval_every": 0, "record_rollouts": True},
    "peers": [
        {"name": "full", "model": str(MODEL), "learning_rate": 1e-5},
        {"name": "lora", "model": str(MODEL), "train": "lora", "lora_r": 16, "lora_alpha": 32, "learning_rate": 1e-4},
    ],
}


def without_gemma() -> pytest.MarkDecorator:
    missing = not (GEMMA / "config.json").exists()
    return pytest.mark.skipif(missing, reason="models/gemma3-270m is absent: ftis models gemma3-270m")


@pytest.mark.parametrize("model", [MODEL, pytest.param(GEMMA, marks=without_gemma())])
def test_greedy_text_is_that_of_generate_and_log_probabilities_are_the_learners(model: Path) -> None:
    policy = Policy.load(PeerConfig(name=model.name, model=str(model), device="cpu", dtype="float32"))
    assert isinstance(policy.forward, Lines)
    assert fuses(policy.model)
    config = PromptConfig(system_prompt="")
    prompts = [render_prompt(Prompt(i, q, ""), config, policy.tokenizer) for i, q in enumerate(QUESTIONS)]
    stop = (".", "\n")
    decoding = Decoding(16, temperature=0.0, stop=stop)
    ours = [rollout for (rollout,) in builtin_sampler(policy, prompts, 1, decoding, 0)]
    theirs = [rollout for (rollout,) in generate_sampler(policy, prompts, 1, decoding, 0)]
    check_drawn(policy, prompts, [(rollout,) for rollout in ours])
    for one, other in zip(ours, theirs, strict=True):
        ids = one.completion_ids.tolist()
        assert ids == other.completion_ids.tolist()
        assert len(ids) == stopped_at(stop, ids, policy.detokenize)
        np.testing.assert_allclose(one.gen_logp, other.gen_logp, atol=1e-4)
    if model == MODEL:
        policy.end_at(("<|im_end|>", "<|endoftext|>"))
        assert policy.end_ids == {0, 2}


def test_a_full_and_a_lora_peer_earn_reward_from_the_first_round(tmp_path: Path) -> None:
    """With examples, a stop string and the last number as the answer; with the default prompt it earns none."""
    assert train(parse(RECIPE | {"output_dir": str(tmp_path)}))
    for peer in ("full", "lora"):
        (round,) = read_jsonl(tmp_path / "first-reward-seed0" / "F-TIS" / peer / "metrics.jsonl")
        assert round["reward"] > 0.1
        assert round["foreign_used"] > 0
        assert round["completions/clipped_ratio"] < 0.5  # they stop
        assert round["sampling/checked_logp_difference/max"] < 1e-3
