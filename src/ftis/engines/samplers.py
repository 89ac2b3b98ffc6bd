"""Opening the sampler that a recipe names, and checking it against a plain pass of the model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from ftis.config import ModelError, RecipeError, first_line
from ftis.engines.agreement import Gaps, plain_forward, sees_padding, trial
from ftis.engines.lengths import BySwitch, OneLength
from ftis.engines.models import UNABLE
from ftis.engines.stops import Stopping
from ftis.engines.texts import left_out
from ftis.policy import Policy
from ftis.rollouts import Rollout
from ftis.sampling import Decoding, Draw, Prompts, Sampler
from ftis.seams import SAMPLERS, look_up


@dataclass(frozen=True)
class InPlace(Sampler):
    """A sampler that draws from the policy itself. It holds no weights, so it needs no new ones.

    Attributes:
        uncached: the same without a cache.
    """

    draw: Draw
    slow: str = ""
    uncached: Draw | None = None
    in_place = True

    def __call__(
        self, policy: Policy, prompt_ids: Prompts, repeats: int, decoding: Decoding, seed: int, batch_size: int = 0
    ) -> list[tuple[Rollout, ...]]:
        return self.draw(policy, prompt_ids, repeats, decoding, seed, batch_size)


def check_stop(stop: Sequence[str], tokenizer: PreTrainedTokenizerBase, model: str) -> None:
    """Refuse stop strings that text never holds, since special tokens are left out of it.

    Raises:
        RecipeError: a stop string holds a special token of ``model``, whose tokenizer it is.
    """
    for token in sorted(left_out(tokenizer)):
        if found := [s for s in stop if token in s]:
            raise RecipeError(
                f"sampling.stop: {found[0]!r} holds {token!r}, a special token of {model} that text leaves out: put it "
                f"in sampling.end_tokens"
            )


def open_sampler(
    name: str, policy: Policy, options: Mapping[str, Any] = MappingProxyType({}), longest: int = 0
) -> Sampler:
    """The sampler that ``sampling.sampler`` names; ``auto`` is the built-in one wherever it supports the model.

    One that draws from the policy itself is tried out. It draws in the fastest way that gives its tokens the
    log-probabilities of a plain pass.

    Args:
        longest: the most tokens of a prompt with its completion; 0: unknown.

    Raises:
        ModelError: the recipe asks for the built-in one, which does not support the model, or sampler, learner and a
            plain pass do not see one policy.
        RecipeError: the name is neither built in nor the dotted path of a function of the policy, or it does not take
            ``sampling.options``.
    """
    if name == "auto" and not options:
        opened = {"transformers' generate": opener("transformers", options)(policy)}
        with suppress(ModelError):
            opened = {"": opener("builtin", options)(policy), **opened}
    else:
        opened = {"": opener(name, options)(policy, **options)}
        if not isinstance(opened[""], InPlace):
            return Stopping(opened[""])
    switch = policy.forward.switch if isinstance(policy.forward, BySwitch) else None
    ways = [InPlace(one.draw, how) for how, one in opened.items()]
    apart = [*ways, *(InPlace(one.uncached, f"{how} without a cache") for how, one in opened.items() if one.uncached)]
    by_length = [
        InPlace(OneLength(way.draw, switch), f"{way.slow}, prompts of one length at a time".removeprefix(", "))
        for way in apart
    ]
    padded: list[InPlace] = []
    with suppress(*UNABLE):
        padded = ways if switch is None and not sees_padding(policy) else []
    remedy = f"take another model than {policy.config.model}" if name in ("auto", "transformers") else ""
    return Stopping(_first_that_agrees(policy, [*padded, *by_length], longest, remedy))


def _first_that_agrees(policy: Policy, ways: Sequence[InPlace], longest: int, remedy: str = "") -> InPlace:
    tried: list[tuple[Gaps, InPlace]] = []
    for way in ways:
        try:
            found = trial(policy, way.draw, longest)
            if found.learner > found.enough:  # rows in one line may cause it
                policy.forward = plain_forward(policy)
                found = trial(policy, way.draw, longest)
        except UNABLE as error:
            if way is ways[-1] and not tried:
                config = policy.config
                raise ModelError(
                    f"peer {config.name!r}: no sampler runs {config.model} on rows of up to {longest} tokens "
                    f"({type(error).__name__}: {first_line(error)}): take another model or shorter rows"
                ) from error
            continue
        if found.learner > found.most[0]:  # no other sampler mends that
            found.refuse(policy, remedy)
        tried.append((found, way))
        if found.sampler <= found.enough:
            break
    found, way = min(tried, key=lambda one: one[0].sampler)
    found.refuse(policy, remedy)
    return way


def opener(name: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Find the function that opens the sampler ``name``; RecipeError if there is none, or it takes other options."""
    if name == "auto":
        raise RecipeError(
            f"sampling.options: {', '.join(options)} given, and sampling.sampler = 'auto' takes none: name the sampler "
            f"that they are for, or leave them out"
        )
    found = look_up(name, "sampling.sampler", SAMPLERS)
    if not callable(found):
        raise RecipeError(f"sampling.sampler = {name!r}: is a {type(found).__name__}, not a function of the policy")
    try:
        inspect.signature(found).bind("a policy", **options)
    except TypeError as error:
        if not options:
            raise RecipeError(
                f"sampling.sampler = {name!r}: cannot take a policy alone ({error}): name what opens a sampler"
            ) from None
        raise RecipeError(
            f"sampling.options: sampler {name!r} does not take {', '.join(options)} ({error}): mend or leave them out"
        ) from None
    return cast(Callable[..., Any], found)
