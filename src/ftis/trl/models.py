"""Checks of a model: its log-probabilities within TRL must be those of the distribution that it samples from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, GenerationConfig

from ftis.engines.hub import only_here
from ftis.rollouts import Floats
from ftis.trl.options import OptionError

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
        OptionError: it has dropout.
    """
    dropping = any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in model.modules())
    if dropping or getattr(model.config.get_text_config(), "attention_dropout", None):
        raise OptionError(
            "the model has dropout, so that it samples from another distribution than it learns: set "
            "disable_dropout=True, and attention_dropout = 0.0 in its config"
        )


def generation_of(trainer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings by which a GRPOTrainer samples, and transformers' defaults.

    ``generate`` takes what the trainer leaves open from the model's directory. vLLM is given all of them.
    """
    args = trainer.args
    if args.use_vllm:
        given = {"min_p": args.min_p, "repetition_penalty": args.repetition_penalty, **(args.generation_kwargs or {})}
    else:
        of_model, of_trainer = trainer.model.generation_config.to_dict(), trainer.generation_config.to_dict()
        given = of_model | {name: value for name, value in of_trainer.items() if value is not None}
    return given, GenerationConfig._get_default_generation_params()


def check_server(client: Any) -> None:
    """Refuse a vLLM server whose log-probabilities are not those of the distribution that it samples.

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
