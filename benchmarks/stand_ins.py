"""Models of random weights with the shapes of real ones, a tokenizer of bytes, and a chat template with thoughts.

They stand in for models that cannot be fetched: for what a recipe takes, and for its rounds without learning.

    python benchmarks/stand_ins.py recipes/qwen3_family.toml

prints the ``--dry-run`` of a recipe with stand-ins for its models and made-up word problems for its data.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from ftis.cli import app
from ftis.recipe.parsing import load

transformers_logging.disable_progress_bar()

QWEN3 = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936}
SHAPES: dict[str, tuple[str, dict[str, int]]] = {
    "Qwen3-0.6B": (
        "qwen3",
        {**QWEN3, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    ),
    "Qwen3-1.7B": (
        "qwen3",
        {**QWEN3, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    ),
    "Qwen3-4B": (
        "qwen3",
        {**QWEN3, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    ),
    "Llama-3.2-1B": (
        "llama",
        {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
        | {"num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128_256},
    ),
}
"""Architecture and sizes, by the name of the real model."""
SMALLER = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "head_dim": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
"""By what a small stand-in's sizes are divided. It has two layers and few tokens."""

TEMPLATE = (
    "{%- set start, behind, end, thoughts = STRINGS -%}"
    "{%- for message in messages -%}"
    "{{- start + message['role'] + behind + '\\n' + message['content'] + end + '\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- start + 'assistant' + behind + '\\n' -}}"
    "{%- if enable_thinking is defined and not enable_thinking -%}{{- thoughts -}}{%- endif -%}{%- endif -%}"
)
TURNS = {
    "qwen3": ("<|im_start|>", "", "<|im_end|>", "<think>\n\n</think>\n\n"),
    "llama": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", ""),
}
"""What stands before a turn's role, behind it and behind the turn, and a block of thoughts that is closed at once."""
FREQUENT = {
    "qwen3": [("Ġ", "t"), ("h", "e"), ("i", "n"), ("Ġ", "a"), ("e", "r")],
    "llama": [("o", "n"), ("Ġ", "s"), ("r", "e"), ("t", "h")],
}
"""Pairs of letters that are one token in one family, so that tokenizers differ."""


def config_of(name: str, small: bool = False) -> PreTrainedConfig:
    """The configuration of a stand-in, with the real sizes or small ones of their ratios."""
    kind, sizes = SHAPES[name]
    if small:
        sizes = {key: size // SMALLER.get(key, 1) for key, size in sizes.items()}
        sizes |= {"num_hidden_layers": 2, "vocab_size": 300}
    ids = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    return AutoConfig.for_model(kind, **sizes, **ids, tie_word_embeddings=True, max_position_embeddings=4096)


def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes and a few pairs. A turn ends with id 1, a text with id 0, as a model's ends do."""
    turn = TURNS[kind]
    special = ["<|endoftext|>", turn[2], *filter(None, turn[:2])]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = FREQUENT[kind]
    tokens = [*special, *letters, *map("".join, pairs)]
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True) for token in special])
    core.add_tokens(["<think>", "</think>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=turn[2], pad_token="<|endoftext|>")
    tokenizer.chat_template = TEMPLATE.replace("STRINGS", repr(turn))
    return tokenizer


def stand_in(place: Path, name: str, small: bool = False, weights: bool = True, device: str = "cpu") -> Path:
    """Write a stand-in's directory, with random weights or without any. Returns ``place``."""
    config = config_of(name, small)
    config.save_pretrained(place)
    tokenizer_of(SHAPES[name][0]).save_pretrained(place)
    defaults = GenerationConfig(eos_token_id=[1, 0], pad_token_id=0, do_sample=True, temperature=0.6, top_k=20)
    if not weights:
        defaults.save_pretrained(place)
        return place
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = defaults
    model.to(torch.bfloat16).save_pretrained(place)
    return place


def share_of_even(
    prompts: object, completions: object, completion_ids: Sequence[Sequence[int]], **columns: object
) -> list[float]:
    """A reward that differs in every group of random completions."""
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]


def dry_run(recipe: str) -> None:
    with TemporaryDirectory() as place:
        settings = ["task.name=word_problems", "ood=[]"]
        for peer in load(recipe).peers:
            name = peer.model.rpartition("/")[2].removesuffix("-Instruct")
            settings.append(f"peers.{peer.name}.model={stand_in(Path(place) / name, name, weights=False)}")
        app(["train", recipe, "--dry-run", *(f"--set={setting}" for setting in settings)])


if __name__ == "__main__":
    dry_run(sys.argv[1])
