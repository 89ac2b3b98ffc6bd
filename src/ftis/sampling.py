"""Sampling completions, with the log-probabilities of the distribution they were drawn from.

π_gen is softmax(logits / temperature), restricted to the top k and top p and renormalised: exactly the distribution
drawn from. Generation defaults stored with a model, such as repetition penalties, play no part.

Samplers are engines (:data:`ftis.seams.SAMPLERS`), or your own; see docs/extending.md. All give the same greedy text
and the same log-probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from transformers import LogitsProcessorList
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from ftis.config import SamplingConfig
from ftis.policy import Policy
from ftis.rollouts import Ints, Rollout

Prompts = Sequence[Ints]
"""Token ids of some prompts."""


@dataclass
class Kept:
    """A sampler's state between two turns, in its own form: the rows that it has read, and its copy of the weights.

    The weights must not move meanwhile. The state is forgotten with the decoding that holds it.
    """

    rows: Any = None
    weights: Any = None


@dataclass(frozen=True)
class Decoding:
    """The settings of a draw. ``temperature`` 0 is greedy, with the log-probabilities of temperature 1.

    Attributes:
        kept: the sampler's state, if prompts may continue completions that were drawn under this object; else None.
    """

    max_completion_length: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    kept: Kept | None = field(default=None, compare=False)

    @staticmethod
    def of(config: SamplingConfig) -> Decoding:
        return Decoding(config.max_completion_length, config.temperature, config.top_k, config.top_p, config.stop)

    def keeping(self) -> Decoding:
        """The same decoding, for all turns of a completion."""
        return replace(self, kept=Kept())

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def truncated(self) -> bool:
        """Whether π_gen differs from softmax(logits / temperature)."""
        return self.top_k > 0 or self.top_p < 1

    def warpers(self) -> LogitsProcessorList:
        """Processors that turn logits into those of π_gen, in transformers' order."""
        warpers = LogitsProcessorList()
        if not self.greedy:
            if self.temperature != 1.0:
                warpers.append(TemperatureLogitsWarper(self.temperature))
            if self.top_k > 0:
                warpers.append(TopKLogitsWarper(self.top_k))
            if self.top_p < 1:
                warpers.append(TopPLogitsWarper(self.top_p))
        return warpers


class Draw(Protocol):
    """A function that draws ``repeats`` completions for each prompt, and returns a tuple of rollouts per prompt.

    The same ``seed`` gives the same completions on one machine. At most ``batch_size`` completions are drawn at a time
    (0: all), whole groups together where memory allows.
    """

    def __call__(
        self, policy: Policy, prompt_ids: Prompts, repeats: int, decoding: Decoding, seed: int, batch_size: int = 0
    ) -> list[tuple[Rollout, ...]]: ...


class Sampler(Draw, Protocol):
    """A peer's sampler. ``f(policy)`` opens it; it learns of new weights, and is closed at the end."""

    slow: str = ""
    """Its way in words, if faster ones do not fit the model; otherwise empty."""
    in_place: bool = False
    """Whether it draws from the policy itself, in its arithmetic."""

    def weights_moved(self, policy: Policy) -> None:
        """The policy was updated. A sampler with a copy of the weights replaces it here."""
        return None

    def close(self) -> None:
        """The peer samples no more."""
        return None
