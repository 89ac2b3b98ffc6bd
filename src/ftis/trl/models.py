"""Checks of a model: its log-probabilities within TRL must be those of the distribution that it samples from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from ftis.engines.hub import only_here
from ftis.rollouts import Floats
from ftis.trl.options import OptionError

STORED = (
    "bad_words_ids",
    "begin_suppress_tokens",
    "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "epsilon_cutoff",
    "eta_cutoff",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "guidance_scale",
    "min_length",
    "min_new_tokens",
    "no_repeat_ngram_size",
    "num_beams",
    "sequence_bias",
    "stop_strings",
    "suppress_tokens",
    "typical_p",
    "watermarking_config",
)
"""Generation defaults that a model's directory may hold, that change what is sampled, and that TRL does not reset."""

SHIFTED, SHIFTED_IN_16_BITS = 0.02, 0.2
"""Nats a token by which padding may move log-probabilities: rounding moves them less, other positions by more."""


def tokenizer_of(model: Any, args: Any) -> Any:
    """The tokenizer of a GRPOTrainer's model, padded on the left, from where GRPOConfig has the model loaded."""
    place = model if isinstance(model, str) else model.config._name_or_path
    given = {key: value for key, value in (args.model_init_kwargs or {}).items() if key in ("revision", "token")}
    given |= {"trust_remote_code": args.trust_remote_code, "local_files_only": only_here(place)}
    return AutoTokenizer.from_pretrained(place, padding_side="left", truncation_side="left", **given)


def check_model(model: Any) -> None:
    """Refuse a model that samples from another distribution than it learns.

    Raises:
        OptionError: it has dropout, or generation defaults that change what is sampled.
    """
    dropping = any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in model.modules())
    if dropping or getattr(model.config.get_text_config(), "attention_dropout", None):
        raise OptionError(
            "the model has dropout, so that it samples from another distribution than it learns: set "
            "disable_dropout=True, and attention_dropout = 0.0 in its config"
        )
    defaults = {name: getattr(model.generation_config, name, None) for name in STORED}
    for name, value in defaults.items():
        if value not in (None, False, 0, 1, []):
            raise OptionError(
                f"the model's generation_config has {name} = {value!r}, which changes what is sampled but not the "
                f"log-probabilities: set model.generation_config.{name} = None"
            )


def check_server(client: Any) -> None:
    """Refuse a vLLM server whose log-probabilities are not those of the distribution that it samples.

    TRL itself asks the server only with its own correction, which a swarm leaves out.

    Raises:
        OptionError: the server's ``logprobs_mode`` is another one.
    """
    mode = client.get_server_info()["model_config"]["logprobs_mode"]
    if mode != "processed_logprobs":
        raise OptionError(
            f"the vLLM server reports log-probabilities as {mode!r}, which are not of the distribution sampled: start "
            f"it with --logprobs-mode processed_logprobs"
        )


def check_positions(alone: Sequence[Floats], padded: Sequence[Floats], in_16_bits: bool) -> None:
    """Refuse a model that takes padding before a prompt for positions.

    Args:
        alone, padded: log-probabilities of the same completions, without and with padding before their prompts.

    Raises:
        OptionError: they differ by more than rounding.
    """
    moved = float(np.abs(np.concatenate(alone) - np.concatenate(padded)).mean())
    if not moved <= (SHIFTED_IN_16_BITS if in_16_bits else SHIFTED):
        raise OptionError(
            f"padding moves the model's log-probabilities within TRL by {moved:.2g} nats a token: it has absolute "
            f"positions, and TRL counts padding among them; take a model with rotary or relative ones"
        )
