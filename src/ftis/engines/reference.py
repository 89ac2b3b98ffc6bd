"""The reference model of β's KL: the model as it was before training."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ftis.config import PeerConfig
from ftis.policy import Policy
from ftis.rollouts import Bools, Floats, Ints


def reference_of(policy: Policy, config: PeerConfig, model: str) -> Callable[..., list[Floats]]:
    """log π_ref: of a LoRA policy with its adapter off, else of a frozen copy in float32, which stays on the device.

    Args:
        model: the untrained model's place.

    Raises:
        ModelError: as :meth:`Policy.load <ftis.policy.Policy.load>`.
    """
    if config.train != "lora":
        as_it_was = {"train": "full", "gradient_checkpointing": False, "optim": "adamw"}
        return Policy.load(config.model_copy(update=as_it_was), model).logps

    def without_adapter(
        prompts: Sequence[Ints],
        completions: Sequence[Ints],
        temperature: float,
        drawn: Sequence[Bools] | None = None,
    ) -> list[Floats]:
        with policy.model.disable_adapter():
            return policy.logps(prompts, completions, temperature, drawn)

    return without_adapter
