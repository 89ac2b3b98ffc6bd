"""Tiny Hugging Face models, made on the spot and once a session; torch is imported by the tests that ask for one."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from ftis.policy import Policy

os.environ.setdefault("OMP_NUM_THREADS", "1")  # small models are fastest on one thread, and sums then have one order

# A change fails, not a draw (other draws: CONTRIBUTING.md) and not a busy machine.
settings.register_profile("steady", derandomize=True, deadline=None)
settings.load_profile("steady")


def pytest_collection_finish() -> None:
    """Let collections of garbage pass over what was imported: a LoRA peer asks for one, and it takes a second here."""
    gc.collect()
    gc.freeze()


SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
CHARACTERS = "0123456789+-*=;abcdefghijklmnopqrstuvwxyz .,:?![]\n"
CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)

LONGROPE = {
    **{"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16},
    **{"short_factor": [1.0, 1.0, 1.0, 1.0], "long_factor": [1.0, 2.0, 4.0, 8.0]},
}
"""In a row of more than 16 tokens the long factors hold for all of its tokens."""
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "rope_theta": 1e4, "original_max_position_embeddings": 16},
    **{"high_freq_factor": 4.0, "low_freq_factor": 1.0},
}
MINISTRAL3 = {
    **{"rope_type": "yarn", "factor": 8.0, "rope_theta": 1e4, "original_max_position_embeddings": 16},
    **{"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 8}),  # norms of queries and keys
    "llama": ("llama", {}),
    "gemma": ("gemma", {"head_dim": 8}),
    "gpt2": ("gpt2", {"n_inner": 48}),  # learned absolute positions
    "sliding": ("mistral", {"sliding_window": 4}),
    "gemma3": (  # both windows, two rotary embeddings, norms of what attention and MLP put out
        "gemma3_text",
        {
            "head_dim": 8,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
            "tie_word_embeddings": False,  # its embeddings are scaled, and tied ones would always repeat a token
        },
    ),
    "mixtral": ("mixtral", {"num_local_experts": 2, "output_router_logits": True}),  # an auxiliary loss
    "gptj": ("gptj", {"rotary_dim": 4, "n_inner": 48}),  # attention by eager code
    "falcon-alibi": ("falcon", {"alibi": True, "multi_query": False}),
    "phi3-long": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16}),
    "llama-long": ("llama", {"rope_parameters": LONGROPE}),
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "ministral3": ("ministral3", {"head_dim": 8, "rope_parameters": MINISTRAL3}),  # queries scaled by their positions
    "gemma4": (  # heads of two widths, shared by layers of either window
        "gemma4_text",
        {
            **{"head_dim": 8, "global_head_dim": 16, "num_hidden_layers": 3, "sliding_window": 8},
            **{"layer_types": ["sliding_attention", "full_attention", "full_attention"], "num_kv_shared_layers": 0},
            **{"vocab_size_per_layer_input": 60, "hidden_size_per_layer_input": 8},
        },
    ),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}),
    "qwen3.5": (
        "qwen3_5_text",
        {
            **{"head_dim": 8, "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 8},
            **{"linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
        },
    ),
    "granite4": (
        "granitemoehybrid",
        {
            **{"num_local_experts": 0, "shared_intermediate_size": 48, "layer_types": ["mamba", "attention"]},
            **{"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_expand": 2, "mamba_chunk_size": 8},
        },
    ),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"]}),
    "llama4": (
        "llama4_text",
        {
            **{"head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": 8},
            "num_hidden_layers": 4,
        },
    ),
    "minimax": (
        "minimax",
        {
            **{"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "block_size": 8},
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "recurrent-gemma": (
        "recurrent_gemma",
        {
            **{"lru_width": 32, "attention_window_size": 8, "num_hidden_layers": 3, "head_dim": 8},
            "block_types": ["recurrent", "recurrent", "attention"],
        },
    ),
    "zamba2": (
        "zamba2",
        {
            **{"mamba_d_state": 8, "mamba_expand": 2, "mamba_ngroups": 1, "n_mamba_heads": 2, "mamba_headdim": 32},
            **{"num_mem_blocks": 1, "layers_block_type": ["mamba", "hybrid"], "hybrid_layer_ids": [1]},
            **{"adapter_rank": 4, "chunk_size": 8, "time_step_min": 1.0},  # a bound that its steps with a cache lack
        },
    ),
}


class TinyModelDir(Protocol):
    """Makes (or finds again) a Hugging Face directory with a random model and a tokenizer."""

    def __call__(
        self,
        kind: str = "qwen2",
        *,
        seed: int = 0,
        hidden_size: int = 32,
        chat_template: bool = False,
        generation_config: dict[str, Any] | None = None,
        **overrides: Any,
    ) -> Path: ...


class TinyPolicy(Protocol):
    """A fresh policy on the CPU in float32. ``model``: a directory, or options for making one; the rest: the peer's."""

    def __call__(self, kind: str = "qwen2", *, model: Path | dict[str, Any] | None = None, **peer: Any) -> Policy: ...


def make_tokenizer(chat_template: bool = False) -> PreTrainedTokenizerFast:
    """One token per character and per tag; tags are not special, so they stay in decoded text."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *TAGS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )
    if chat_template:
        fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(kind: str, seed: int, **overrides: Any) -> PreTrainedModel:
    """Random weights, large enough that the next token's distribution is far from uniform. The caller's seed stays."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, settings = KINDS[kind]
    settings = {
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **settings,
        **overrides,
    }
    if model_type in ("gpt2", "gptj"):
        for name in ("num_key_value_heads", "intermediate_size"):
            settings.pop(name)
    with torch.random.fork_rng(devices=()):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings))
    generator = torch.Generator().manual_seed(seed)
    embedding = model.get_input_embeddings().weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter is embedding:
                parameter.normal_(0, 0.3, generator=generator)
            elif parameter.dim() > 1 or name.endswith("bias"):
                parameter.normal_(0, 0.4, generator=generator)
    return model


def assert_one_line(error: pytest.ExceptionInfo[BaseException], *parts: str) -> None:
    """The error says something, all of ``parts`` too, in one line."""
    message = str(error.value)
    assert message.strip()
    assert "\n" not in message
    assert all(part in message for part in parts), message


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    return make_tokenizer


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> TinyModelDir:
    made: dict[str, Path] = {}

    def directory(
        kind: str = "qwen2",
        *,
        seed: int = 0,
        hidden_size: int = 32,
        chat_template: bool = False,
        generation_config: dict[str, Any] | None = None,
        **overrides: Any,
    ) -> Path:
        key = repr((kind, seed, hidden_size, chat_template, generation_config, sorted(overrides.items())))
        if key not in made:
            path = tmp_path_factory.mktemp(f"tiny-{kind}")
            tokenizer = make_tokenizer(chat_template)
            settings = {"vocab_size": len(tokenizer), "hidden_size": hidden_size, **overrides}
            make_model(kind, seed, **settings).save_pretrained(path)
            tokenizer.save_pretrained(path)
            if generation_config is not None:
                (path / "generation_config.json").write_text(json.dumps(generation_config))
            made[key] = path
        return made[key]

    return directory


def save_qwen2(
    directory: Path, tokenizer: PreTrainedTokenizerFast, seed: int, *, hidden_size: int, **settings: Any
) -> Path:
    """A model of random weights with its tokenizer. Returns the directory."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    config = Qwen2Config(hidden_size=hidden_size, intermediate_size=2 * hidden_size, **{**heads, **settings})
    Qwen2ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random models of the starters' family, of different sizes."""
    from make_starters import make_tokenizer

    root = tmp_path_factory.mktemp("models")
    tokenizer = make_tokenizer()
    tokens = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": True,
    }
    return {
        name: save_qwen2(root / name, tokenizer, seed, hidden_size=width, num_hidden_layers=2, **tokens)
        for seed, (name, width) in enumerate({"a": 16, "b": 24, "c": 32}.items())
    }


@pytest.fixture(scope="session")
def tiny_policy(tiny_model_dir: TinyModelDir) -> TinyPolicy:
    def policy(kind: str = "qwen2", *, model: Path | dict[str, Any] | None = None, **peer: Any) -> Policy:
        from ftis.config import PeerConfig
        from ftis.policy import Policy

        directory = model if isinstance(model, Path) else tiny_model_dir(kind, **(model or {}))
        settings = {"name": "tiny", "model": str(directory), "device": "cpu", "dtype": "float32", **peer}
        return Policy.load(PeerConfig(**settings))

    return policy


@pytest.fixture
def policy(tiny_policy: TinyPolicy) -> Policy:
    return tiny_policy()
