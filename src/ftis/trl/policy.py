"""TRL's trainer as an engine: its draws, and its log-probabilities of any completions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import use_adapter

from ftis.rollouts import Bools, Floats, Ints, Rollout
from ftis.sampling import Decoding
from ftis.trl.batches import padded, tokens_of
from ftis.trl.models import recorded


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


class Engine:
    """The model and the sampler of a GRPOTrainer."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    @property
    def vocab_size(self) -> int:
        embedding = self.trainer.model.get_input_embeddings().weight
        return int(getattr(embedding, "ds_shape", embedding.shape)[0])  # DeepSpeed's ZeRO-3 leaves it empty

    @property
    def compute_dtype(self) -> torch.dtype:
        """float32, or else bfloat16, which stands for any lower precision."""
        precise = self.trainer.accelerator.mixed_precision == "no" and all(
            parameter.element_size() >= 4
            for parameter in self.trainer.model.parameters()
            if parameter.is_floating_point()
        )
        return torch.float32 if precise else torch.bfloat16

    @property
    def generates(self) -> bool:
        """Whether transformers' ``generate`` samples."""
        return not self.trainer.args.use_vllm and self.trainer.rollout_func is None

    @property
    def in_place(self) -> bool:
        """Whether the sampler has exactly the learner's arithmetic. ``generate`` has not, under autocast."""
        return self.generates and self.compute_dtype == torch.float32

    def recorded(self, decoding: Decoding) -> contextlib.AbstractContextManager[list[Tensor]]:
        """A context in which ``generate`` notes the log-probabilities of its draws, by the swarm's decoding."""
        return recorded(self.trainer.accelerator.unwrap_model(self.trainer.model_wrapped), decoding)

    def without_checkpointing(self) -> contextlib.AbstractContextManager[None]:
        """A context without gradient checkpointing, which transformers takes for a sign of training."""
        options = self.trainer.args.gradient_checkpointing_kwargs
        context: Any = disable_gradient_checkpointing(self.trainer.model, options)
        return cast("contextlib.AbstractContextManager[None]", context)

    @contextlib.contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """A context whose draws follow from the seed."""
        device = self.trainer.accelerator.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
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
            of_swarm: by which a training round draws.
        """
        prompts, most = [ids for ids in prompt_ids for _ in range(repeats)], decoding.max_completion_length
        if self.generates:
            rollouts = self._generated(prompts, most, sorted(policy.end_ids), of_swarm, seed)
        else:
            rng = np.random.default_rng(seed)
            drawn = [*rng.integers(0, policy.vocab_size, (len(prompts), most)).astype(np.int32)]
            rollouts = [
                Rollout(*pair) for pair in zip(drawn, policy.logps(prompts, drawn, decoding.temperature), strict=True)
            ]
        return [tuple(rollouts[at : at + repeats]) for at in range(0, len(rollouts), repeats)]

    def _generated(
        self, prompt_ids: Sequence[Ints], most: int, ends: list[int], decoding: Decoding, seed: int
    ) -> list[Rollout]:
        """A completion of each prompt, of at most ``most`` tokens up to ``ends``, and its log-probabilities."""
        trainer = self.trainer
        limits = changed(trainer.generation_config, max_new_tokens=most, eos_token_id=ends)
        with limits, changed(trainer, eos_token_ids=ends), self.seeded(seed), self.recorded(decoding) as heard:
            drawn, _ = trainer._generate_single_turn([ids.tolist() for ids in prompt_ids], None, {}, 1)
        logps = heard[0].cpu().numpy()
        return [Rollout(np.array(ids, np.int32), logp[: len(ids)]) for ids, logp in zip(drawn, logps, strict=True)]

    def ref_logps(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """log π_ref [n, T] of TRL's reference: a model, the base below an adapter, or the adapter as it was."""
        if self.trainer.ref_model is not None:
            return self.logps(inputs, self.trainer.ref_model)
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        with use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None):
            return self.logps(inputs)

    @torch.no_grad()
    def logps(self, inputs: Mapping[str, Tensor], model: Any = None) -> Tensor:
        """log π [n, T] of the policy or another model under TRL's temperature, no gradient."""
        trainer = self.trainer
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        width, size = inputs["completion_ids"].shape[1], trainer.args.per_device_train_batch_size
        with self.without_checkpointing():
            logp_nT: Tensor = trainer._get_per_token_logps_and_entropies(
                trainer.model if model is None else model, ids, mask, width, size
            )[0]
        return logp_nT

    def logps_of(
        self,
        prompt_ids: Sequence[Ints],
        completion_ids: Sequence[Ints],
        temperature: float = 0.0,
        drawn: Sequence[Bools] | None = None,
    ) -> list[Floats]:
        """The same of each completion's drawn tokens: float32 [T]. Another temperature than TRL's is never asked for.

        Args:
            drawn: as :meth:`ftis.policy.Policy.logps` takes it.
        """
        trainer = self.trainer
        inputs = padded(prompt_ids, completion_ids, trainer.accelerator.device, trainer.pad_to_multiple_of)
        logps = tokens_of(self.logps(inputs), inputs["completion_mask"])
        return logps if drawn is None else [logp[mask] for logp, mask in zip(logps, drawn, strict=True)]
