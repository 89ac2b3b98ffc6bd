"""A model within TRL: its tokenizer, and checks that it samples from the distribution that it learns."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, LogitsProcessorList

from ftis.engines.generate import LogpRecorder
from ftis.engines.models import load_tokenizer
from ftis.engines.places import only_here
from ftis.sampling import Decoding
from ftis.trl.options import OptionError

REMEDY = (
    "TRL pads rows on the left and runs them together: take a model with rotary positions that no row's length "
    "changes, or train this one with ftis join. A rollout_func or vLLM must report the log-probabilities of its draws"
)


def tokenizer_of(model: Any, args: Any) -> Any:
    """The tokenizer of a GRPOTrainer's model, padded on the left, from where GRPOConfig has the model loaded.

    None for a model that also sees: TRL gives it a processor.
    """
    place = model if isinstance(model, str) else model.config._name_or_path
    given = {key: value for key, value in (args.model_init_kwargs or {}).items() if key in ("revision", "token")}
    given |= {"trust_remote_code": args.trust_remote_code}
    with contextlib.suppress(OSError, ValueError):  # load_tokenizer has the better error
        described = AutoConfig.from_pretrained(place, local_files_only=only_here(place), **given)
        if described.get_text_config() is not described:
            return None
    return load_tokenizer(place, padding_side="left", truncation_side="left", **given)


@contextlib.contextmanager
def recorded(model: Any, decoding: Decoding) -> Iterator[list[Tensor]]:
    """A context in which ``model.generate`` notes the log-probabilities [N, T] of the tokens that it draws."""
    generate, heard = model.generate, []

    def noting(**inputs: Any) -> Any:
        recorder = LogpRecorder(decoding.warpers())
        drawn = generate(logits_processor=LogitsProcessorList([recorder]), **inputs)
        heard.append(recorder.finish(drawn))
        return drawn

    model.generate = noting
    try:
        yield heard
    finally:
        del model.generate


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

    ``generate`` takes settings that the trainer leaves open from the model's directory. vLLM is given all of them.
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
