"""Learning rates that hardly move a model, or break it, by how a peer trains and by the model's parameters."""

from __future__ import annotations

from collections.abc import Sequence

from ftis.config import PeerConfig
from ftis.models.sizes import SMALL, UNKNOWN_PARAMETERS, known_parameters
from ftis.recipe.arms import Arm

LOW_FOR_LORA, HIGH_FOR_LORA = 1e-5, 3e-3
"""The learning rate below which an adapter hardly moves, and the one above which it breaks: it wants ten to a hundred
times the rate of full training."""
LOW_FOR_FULL, LARGE = 2e-6, 1e9
"""A learning rate below which full training is slow, for models with fewer parameters than ``LARGE``."""
HIGH_FOR_FULL = 1e-4
"""A learning rate above which the full training of a pretrained model breaks it."""
LOW_FOR_TINY, HIGH_FOR_TINY = 2e-5, 2.5e-3
"""The same for models below :data:`ftis.models.sizes.SMALL`. On sums modulo 10 a starter of 88,000 parameters
learned at 3e-3, and one of 206,000 fell from .32 to .15 in six rounds; at 1e-2 both earned nothing from the third round
on."""
TINY_LORA = 10
"""The factor by which such a model's adapter takes a higher rate than a pretrained one's: starters learned at 3e-3."""
TRIED = 2e8
"""Parameters up to which a pretrained model took SmolLM2-135M's rates."""
BEGIN_LORA = "begin with 1e-4 (3e-4 broke Gemma 3 270M on sums)"
LEARNED_AT = (
    "SmolLM2-135M learned at 1e-5, Gemma 3 270M at 2e-6 (1e-5 lowered its reward), and models of 200,000 parameters at "
    "3e-4"
)


def rates(arms: Sequence[Arm]) -> list[str]:
    """A line for each peer's learning rate that would hardly move its model, or break it."""
    lines, parameters = list[str](), known_parameters(arms[0].recipe, arms)
    for arm in arms:
        for peer in arm.recipe.peers:
            if parameters[peer.model] != UNKNOWN_PARAMETERS:
                lines += [f"{peer.name}: {line}" for line in rate_advice(peer, parameters[peer.model])]
    return list(dict.fromkeys(lines))


def first_rate(train: str, parameters: int) -> float:
    """A learning rate to begin with, in full or through LoRA, by the models that were tried: see docs/own-models.md."""
    if train == "lora":
        return 3e-3 if parameters < SMALL else 3e-4 if parameters < TRIED else 1e-4
    if parameters >= LARGE:
        return float(PeerConfig.model_fields["learning_rate"].default)
    return 3e-4 if parameters < SMALL else 1e-5 if parameters < TRIED else 2e-6


def rate_advice(peer: PeerConfig, parameters: int) -> list[str]:
    """A better learning rate for a peer whose rate does not fit the way it trains; empty if none is known."""
    rate, key = peer.learning_rate, f"set peers.{peer.name}.learning_rate"
    tiny, million = parameters < SMALL, f"models of {parameters / 1e6:,.3g} million parameters"
    if peer.train == "lora" and not LOW_FOR_LORA <= rate <= HIGH_FOR_LORA * (TINY_LORA if tiny else 1):
        wants = (
            f"about {first_rate('lora', parameters):g} on {million}" if tiny else f"about 1e-4 to 3e-4; {BEGIN_LORA}"
        )
        return [f"the learning rate is {rate:g}, and LoRA wants {wants}: {key}"]
    low, high = (LOW_FOR_TINY, HIGH_FOR_TINY) if tiny else (LOW_FOR_FULL, HIGH_FOR_FULL)
    if peer.train == "full" and parameters < LARGE and rate < low:
        return [f"the learning rate is {rate:g}, and {million} want more: {LEARNED_AT}: {key}"]
    if peer.train == "full" and rate > high:
        return [f"the learning rate is {rate:g}, and {million} break at such rates: {LEARNED_AT}: {key}"]
    return []
