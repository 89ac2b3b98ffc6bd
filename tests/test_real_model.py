"""Real pretrained models, where they are: SmolLM2-135M-Instruct by ``make models``, Gemma 3 270M by ``ftis models``."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from commands import ftis

from ftis.config import PeerConfig, PromptConfig
from ftis.engines.builtin import builtin_sampler
from ftis.engines.decoder import fuses
from ftis.engines.generate import generate_sampler
from ftis.engines.lines import Lines
from ftis.engines.stops import stopped_at
from ftis.policy import Policy
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
RECIPE = """
name = "first-reward"
output_dir = "{place}"
processes = "inline"

[task]
name = "reasoning_gym:chain_sum"
options = {{ min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1 }}
train_size = 60
validation_size = 2

[prompt]
system_prompt = ""
chat_template = "never"
template = "Question: {{question}}\\nAnswer:"

[[prompt.examples]]
question = "State the final answer to the following arithmetic problem: 3 + 4 ="
completion = " 7"

[[prompt.examples]]
question = "State the final answer to the following arithmetic problem: 9 - 5 ="
completion = " 4"

[reward]
extract = "last_number"

[sampling]
num_generations = 4
max_completion_length = 8
stop = ["\\n"]

[training]
rounds = 1
prompts_per_round = 8
eval_every = 0
record_rollouts = true

[[peers]]
name = "full"
model = "{model}"
learning_rate = 1e-5

[[peers]]
name = "lora"
model = "{model}"
train = "lora"
lora_r = 16
lora_alpha = 32
learning_rate = 1e-4
"""


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
    logps = policy.logps(prompts, [rollout.completion_ids for rollout in ours], 1.0)
    for one, other, logp in zip(ours, theirs, logps, strict=True):
        ids = one.completion_ids.tolist()
        assert ids == other.completion_ids.tolist()
        assert len(ids) == stopped_at(stop, ids, policy.detokenize)
        np.testing.assert_allclose(one.gen_logp, logp, atol=1e-4)
        np.testing.assert_allclose(one.gen_logp, other.gen_logp, atol=1e-4)
    if model == MODEL:
        policy.end_at(("<|im_end|>", "<|endoftext|>"))
        assert policy.end_ids == {0, 2}


def test_a_full_and_a_lora_peer_earn_reward_from_the_first_round(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With examples, a stop string and the last number as the answer; with the default prompt it earns none."""
    (tmp_path / "recipe.toml").write_text(RECIPE.format(place=tmp_path / "runs", model=MODEL))
    assert ftis("train", str(tmp_path / "recipe.toml")) == 0, capsys.readouterr().err
    for peer in ("full", "lora"):
        lines = (tmp_path / "runs" / "first-reward-seed0" / "F-TIS" / peer / "metrics.jsonl").read_text().splitlines()
        rounds = [json.loads(line) for line in lines]
        assert len(rounds) == 1
        assert min(row["reward"] for row in rounds) > 0.1
        assert all(row["foreign_used"] > 0 for row in rounds)
        assert max(row["completions/clipped_ratio"] for row in rounds) < 0.5  # they stop
        assert max(row["sampling/checked_logp_difference/max"] for row in rounds) < 1e-3
