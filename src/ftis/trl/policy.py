"""TRL's trainer as a peer's policy: its draws, its log-probabilities of any completions, and checks of its model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, LogitsProcessorList

from ftis.config import PeerConfig
from ftis.engines.generate import LogpRecorder
from ftis.engines.places import only_here
from ftis.engines.rows import PaddedRows
from ftis.engines.tokenizers import load_tokenizer
from ftis.rollouts import Bools, Floats, Ints, Rollout
from ftis.sampling import Decoding
from ftis.trl.batches import padded, tokens_of
from ftis.trl.options import OptionError

REMEDY = (
    "TRL pads rows on the left and runs them together: take a model with rotary positions that no row's length "
    "changes, or train this one with ftis join. A rollout_func or vLLM must report the log-probabilities of its draws"
)


@contextlib.contextmanager
def changed(owner: Any, **values: Any) -> Iterator[None]:
    """A context in which attributes that TRL reads have other values."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


class HostPolicy:
    """The model and the sampler of a GRPOTrainer: a :class:`~ftis.policy.Policy` that TRL trains.

    Attributes:
        compute_dtype: float32, or else bfloat16, which stands for any lower precision.
        generates: whether transformers' ``generate`` samples.
        in_place: whether the sampler has exactly the learner's arithmetic. ``generate`` has not, under autocast.
    """

    def __init__(self, trainer: Any, config: PeerConfig) -> None:
        self.trainer, self.config = trainer, config
        self.model, self.tokenizer, accelerator = trainer.model, trainer._tokenizer, trainer.accelerator
        self.device, self.precision = accelerator.device, accelerator.autocast
        self.end_ids = frozenset[int](trainer.eos_token_ids)
        embedding = self.model.get_input_embeddings().weight
        self.vocab_size = int(getattr(embedding, "ds_shape", embedding.shape)[0])  # DeepSpeed's ZeRO-3 leaves it empty
        floating = (parameter for parameter in self.model.parameters() if parameter.is_floating_point())
        precise = accelerator.mixed_precision == "no" and all(one.element_size() >= 4 for one in floating)
        self.compute_dtype = torch.float32 if precise else torch.bfloat16
        self.generates = not trainer.args.use_vllm and trainer.rollout_func is None
        self.in_place = self.generates and precise

    @property
    def forward(self) -> PaddedRows:
        return PaddedRows(self.model, self.device)

    def detokenize(self, completion_ids: Sequence[int]) -> str:
        """A completion's text, without special tokens, as TRL gives own ones to reward functions."""
        return str(self.tokenizer.decode(list(completion_ids), skip_special_tokens=True))

    @contextlib.contextmanager
    def recorded(self, decoding: Decoding) -> Iterator[list[Tensor]]:
        """A context in which ``generate`` notes the log-probabilities [N, T] of the tokens that it draws."""
        model, heard = self.trainer.accelerator.unwrap_model(self.trainer.model_wrapped), list[Tensor]()
        generate = model.generate

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

    def without_checkpointing(self) -> contextlib.AbstractContextManager[None]:
        """A context without gradient checkpointing, which transformers takes for a sign of training."""
        from trl.models.utils import disable_gradient_checkpointing  # members are known where TRL is not

        options = self.trainer.args.gradient_checkpointing_kwargs
        context: Any = disable_gradient_checkpointing(self.trainer.model, options)
        return cast("contextlib.AbstractContextManager[None]", context)

    @contextlib.contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """A context whose draws follow from the seed."""
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(seed)
            yield

    def draw(
        self,
        of_swarm: Decoding,
        policy: Any,
        prompt_ids: Sequence[Ints],
        repeats: int,
        decoding: Decoding,
        seed: int,
        batch_size: int = 0,
    ) -> list[tuple[Rollout, ...]]:
        """Draw as TRL does, or random tokens if another engine samples: the first round compares that one.

        Args:
            of_swarm: the decoding of training rounds.
            policy: this one, given since every sampler is called with a policy.
        """
        prompts, most = [ids for ids in prompt_ids for _ in range(repeats)], decoding.max_completion_length
        if self.generates:
            rollouts = self._generated(prompts, most, of_swarm, seed)
        else:
            rng = np.random.default_rng(seed)
            drawn = [*rng.integers(0, self.vocab_size, (len(prompts), most)).astype(np.int32)]
            rollouts = [Rollout(*pair) for pair in zip(drawn, self.logps(prompts, drawn), strict=True)]
        return [tuple(rollouts[at : at + repeats]) for at in range(0, len(rollouts), repeats)]

    def _generated(self, prompt_ids: Sequence[Ints], most: int, decoding: Decoding, seed: int) -> list[Rollout]:
        """A completion of each prompt, of at most ``most`` tokens, and its log-probabilities."""
        trainer, ends = self.trainer, sorted(self.end_ids)
        limits = changed(trainer.generation_config, max_new_tokens=most, eos_token_id=ends)
        with limits, changed(trainer, eos_token_ids=ends), self.seeded(seed), self.recorded(decoding) as heard:
            drawn, _ = trainer._generate_single_turn([ids.tolist() for ids in prompt_ids], None, {}, 1)
        logps = heard[0].cpu().numpy()
        return [Rollout(np.array(ids, np.int32), logp[: len(ids)]) for ids, logp in zip(drawn, logps, strict=True)]

    def ref_logps(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """log π_ref [n, T] of TRL's reference: a model, the base below an adapter, or the adapter as it was."""
        if self.trainer.ref_model is not None:
            return self.logps_of(inputs, self.trainer.ref_model)
        from trl.trainer.utils import use_adapter

        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        with use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None):
            return self.logps_of(inputs)

    @torch.no_grad()
    def logps_of(self, inputs: Mapping[str, Tensor], model: Any = None) -> Tensor:
        """log π [n, T] of the policy or another model on rows of TRL's batch, under TRL's temperature, no gradient."""
        trainer = self.trainer
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        width, size = inputs["completion_ids"].shape[1], trainer.args.per_device_train_batch_size
        with self.without_checkpointing():
            logp_nT: Tensor = trainer._get_per_token_logps_and_entropies(
                trainer.model if model is None else model, ids, mask, width, size
            )[0]
        return logp_nT

    def logps(
        self,
        prompt_ids: Sequence[Ints],
        completion_ids: Sequence[Ints],
        temperature: float = 0.0,
        drawn: Sequence[Bools] | None = None,
    ) -> list[Floats]:
        """As :meth:`ftis.policy.Policy.logps`. Another temperature than TRL's is never asked for."""
        inputs = padded(prompt_ids, completion_ids, self.device, self.trainer.pad_to_multiple_of)
        logps = tokens_of(self.logps_of(inputs), inputs["completion_mask"])
        return logps if drawn is None else [logp[mask] for logp, mask in zip(logps, drawn, strict=True)]


def tokenizer_of(model: Any, args: Any, always: bool = False) -> Any:
    """The tokenizer of a GRPOTrainer's model, padded on the left, from where GRPOConfig has the model loaded.

    None, unless ``always``, for a model that also sees: TRL gives it a processor.
    """
    place = model if isinstance(model, str) else model.config._name_or_path
    given = {key: value for key, value in (args.model_init_kwargs or {}).items() if key in ("revision", "token")}
    given |= {"trust_remote_code": args.trust_remote_code}
    with contextlib.suppress(OSError, ValueError):  # load_tokenizer has the better error
        described = AutoConfig.from_pretrained(place, local_files_only=only_here(place), **given)
        if described.get_text_config() is not described and not always:
            return None
    return load_tokenizer(place, padding_side="left", truncation_side="left", **given)


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
