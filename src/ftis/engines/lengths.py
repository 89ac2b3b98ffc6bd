"""The lengths of rows at which a model may change its arithmetic: its positions, windows, chunks, scalings.

Some models have a *switch*, as rotary embeddings of longrope: in a row beyond some length all tokens are computed
otherwise, the earlier ones too. transformers decides by the longest row of a pass. Here each token follows the rules
for the length of its row up to there, as in a row that is drawn alone. So rows on either side of a switch never share a
pass, and a row that passes one is run in two parts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ftis.config import ModelError
from ftis.engines.kept import within_tolerance
from ftis.engines.rows import PaddedRows
from ftis.policy import Forward, Policy, positions_of
from ftis.rollouts import Ints, Rollout
from ftis.sampling import Decoding, Draw, Prompts

Window = int | None
"""The most tokens that a token attends to, itself included; None: all up to itself."""
CONFIRMED = 4096
"""The most tokens of a whole row that confirms a switch."""


def attention_windows(model: Any) -> tuple[Window, ...]:
    """Each layer's window; empty for a model with other attention than torch's causal one, as ALiBi or chunks."""
    config = model.config
    if config._attn_implementation != "sdpa":  # others treat a mask in their own ways, or ignore it
        return ()
    text = config.get_text_config(decoder=True)
    kinds = set(getattr(text, "layer_types", None) or ())
    layers = DynamicCache(config=config).layers
    if kinds - {"full_attention", "sliding_attention"} or getattr(text, "use_bidirectional_attention", False):
        return ()
    if any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers):
        return ()
    return tuple(getattr(layer, "sliding_window", None) for layer in layers)


def rows_fit(windows: tuple[Window, ...], length: int) -> bool:
    """Whether rows of so many tokens lie within every window, so that each layer attends to all earlier tokens."""
    return all(window is None or length <= window for window in windows)


def named_lengths(config: Any) -> list[int]:
    """The integers of a model's configuration that may be lengths, from 1 up to its positions, in ascending order.

    No list of names says which of them are lengths: each architecture has names of its own.
    """
    text = config.get_text_config(decoder=True)
    most = positions_of(config) or sys.maxsize
    return sorted({number for number in _integers(text.to_dict()) if 0 < number <= most})


def _integers(value: Any) -> Iterator[int]:
    if isinstance(value, Mapping):
        yield from _integers(list(value.values()))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for part in value:
            yield from _integers(part)
    elif isinstance(value, float) and value.is_integer():
        yield int(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value


@torch.no_grad()
def switch_of(model: Any, device: torch.device) -> int | None:
    """The most tokens of a row before a model's switch; None if it has none, as most models.

    Three tokens far apart, and a fourth at the end of a short or a long row, show it in some passes of four tokens. Two
    whole rows confirm it if they are short, since a model may make something else of places that are far apart.

    Raises:
        ModelError: there are several switches, as for factors that grow with every token.
    """
    most = positions_of(model.config) or 0
    size = len(model.get_input_embeddings().weight)
    ids = torch.arange(4, device=device)[None] % size

    def predicted(near: int, length: int) -> Tensor:
        places = torch.tensor([[0, near // 2, near - 1, length - 1]], device=device)
        run = {"attention_mask": torch.ones_like(ids), "position_ids": places, "use_cache": False}
        logits: Tensor = model(input_ids=ids, **run).logits[:, :3]
        return logits.float()

    def alike(near: int, length: int) -> bool:
        """Whether tokens in the first ``near`` places have the same logits in rows of ``near + 1`` and ``length``."""
        predicted(4, 5)  # dynamic scaling keeps a longer row's frequencies until a short one comes
        short, long = predicted(near, near + 1), predicted(near, length)
        return within_tolerance(model, long, short)

    near = 4
    try:
        while near < most - 1 and alike(near, most):
            near *= 8
    except TypeError:  # the model takes no position_ids
        return None
    if near >= most - 1:
        return None
    low, high = near + 1, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if alike(near, middle) else (low, middle)
    if low <= CONFIRMED:
        row, forward = np.arange(low + 2, dtype=np.int32) % size, PaddedRows(model, device)
        ends = (forward([row[: low - 4]], [row[low - 4 : end]]) for end in (low + 1, low + 2))
        short, long = (outputs[:5].float() for outputs in ends)
        if within_tolerance(model, long, short):
            return None
    if not alike(low, most):
        raise ModelError(
            f"{type(model).__name__} computes all of a row of more than {low} tokens by its very length, or by what "
            f"follows, so that a token has no probability of its own: take another model"
        )
    return low


@dataclass(frozen=True)
class BySwitch(Forward):
    """Rows of a model with a switch, in a pass before it and one after it."""

    forward: Forward
    switch: int
    padding_cost: float

    def held(self) -> AbstractContextManager[None]:
        return self.forward.held()

    def __call__(self, prompts: Sequence[Ints], completions: Sequence[Ints]) -> Tensor:
        rows = [np.concatenate(row) for row in zip(prompts, completions, strict=True)]
        place_n = np.cumsum([0, *map(len, completions)])
        outputs, places = [], []
        for first, last in ((0, self.switch), (self.switch + 1, sys.maxsize)):  # a token's place in its row
            parts = []
            for i, prompt in enumerate(prompts):
                start, end = max(len(prompt), first), min(len(rows[i]), last + 1)
                if start < end:
                    parts.append((rows[i][:start], rows[i][start:end]))
                    places.append(place_n[i] + np.arange(start, end) - len(prompt))
            if parts:
                outputs.append(self.forward([before for before, _ in parts], [after for _, after in parts]))
        return torch.cat(outputs)[torch.from_numpy(np.argsort(np.concatenate(places)))]


@dataclass(frozen=True)
class OneLength(Draw):
    """A draw for prompts of one length at a time, without padding. It begins rows again after a switch."""

    draw: Draw
    switch: int | None

    def __call__(
        self, policy: Policy, prompt_ids: Prompts, repeats: int, decoding: Decoding, seed: int, batch_size: int = 0
    ) -> list[tuple[Rollout, ...]]:
        drawn: dict[int, tuple[Rollout, ...]] = {}
        decoding = replace(decoding, kept=None)  # beyond a switch, kept keys are wrong
        for length in sorted({len(prompt) for prompt in prompt_ids}):
            chosen = [i for i, prompt in enumerate(prompt_ids) if len(prompt) == length]
            prompts = [prompt_ids[i] for i in chosen]
            few, most = decoding.max_completion_length, decoding.max_completion_length
            if self.switch is not None and length <= self.switch:
                few = min(most, self.switch + 1 - length)
            groups = self.draw(
                policy, prompts, repeats, replace(decoding, max_completion_length=few), seed + length, batch_size
            )
            if few < most:
                rest = replace(decoding, max_completion_length=most - few)
                groups = self._gone_on(policy, prompts, groups, rest, seed, batch_size)
            drawn.update(zip(chosen, groups, strict=True))
        return [drawn[i] for i in range(len(prompt_ids))]

    def _gone_on(
        self,
        policy: Policy,
        prompts: Sequence[Ints],
        groups: Sequence[tuple[Rollout, ...]],
        decoding: Decoding,
        seed: int,
        batch_size: int,
    ) -> list[tuple[Rollout, ...]]:
        """Complete the rows that have not ended, each as a prompt of its own."""
        rows = [(prompt, rollout) for prompt, group in zip(prompts, groups, strict=True) for rollout in group]
        going = [i for i, (_, rollout) in enumerate(rows) if int(rollout.completion_ids[-1]) not in policy.end_ids]
        longer = [np.concatenate([rows[i][0], rows[i][1].completion_ids]) for i in going]
        whole = [rollout for _, rollout in rows]
        for i, (more,) in zip(going, self(policy, longer, 1, decoding, seed, batch_size), strict=True):
            whole[i] = _joined(whole[i], more)
        repeats = len(whole) // len(prompts)
        return [tuple(whole[at : at + repeats]) for at in range(0, len(whole), repeats)]


def _joined(one: Rollout, other: Rollout) -> Rollout:
    ids = np.concatenate([one.completion_ids, other.completion_ids])
    return Rollout(ids, np.concatenate([one.gen_logp, other.gen_logp]))
