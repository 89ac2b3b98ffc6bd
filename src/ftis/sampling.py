"""Sampling completions, with the log-probabilities of the distribution they were drawn from.

Two samplers with one signature: the built-in one for decoder-only models with full attention, which prefills each
prompt once per group, keeps keys and values in preallocated slots and drops finished rows from the batch; and
transformers' ``generate`` for everything else. Both give the same greedy text and the same log-probabilities.

π_gen is softmax(logits / temperature) restricted to the top k and top p and renormalised: exactly what was
drawn from. Generation defaults stored with a model (repetition penalties and the like) play no part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from ftis.config import SamplingConfig
from ftis.policy import ModelError, Policy
from ftis.rollouts import Ints, Rollout

COMPACT_BELOW = 0.75
"""The batch is compacted once fewer than this share of its rows are unfinished: copying the cache costs about as
much as a decoding step, so it must pay for itself."""


@dataclass(frozen=True)
class Decoding:
    """How completions are drawn. ``temperature`` 0 is greedy; then log-probabilities are those of temperature 1."""

    max_completion_length: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    @staticmethod
    def of(config: SamplingConfig) -> Decoding:
        return Decoding(config.max_completion_length, config.temperature, config.top_k, config.top_p)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def truncated(self) -> bool:
        """Whether π_gen differs from softmax(logits / temperature)."""
        return self.top_k > 0 or self.top_p < 1

    def warpers(self) -> LogitsProcessorList:
        """logits → logits of π_gen, in the order transformers applies them."""
        warpers = LogitsProcessorList()
        if not self.greedy:
            if self.temperature != 1.0:
                warpers.append(TemperatureLogitsWarper(self.temperature))
            if self.top_k > 0:
                warpers.append(TopKLogitsWarper(self.top_k))
            if self.top_p < 1:
                warpers.append(TopPLogitsWarper(self.top_p))
        return warpers


class Sampler(Protocol):
    """Draws ``repeats`` completions for each prompt; deterministic in ``seed`` on one machine."""

    def __call__(
        self, policy: Policy, prompt_ids: Sequence[Ints], repeats: int, decoding: Decoding, seed: int
    ) -> list[tuple[Rollout, ...]]: ...


def sampler_for(policy: Policy, kind: str = "auto") -> Sampler:
    """The sampler a recipe asks for; ``auto`` is the built-in one wherever it can serve the model."""
    if kind == "transformers":
        return generate_sampler
    if _full_attention_decoder(policy.model):
        return builtin_sampler
    if kind == "builtin":
        raise ModelError(
            f"peer {policy.config.name!r}: the built-in sampler needs a decoder with full attention in every layer "
            f"(torch's, without ALiBi), which {type(policy.model).__name__} is not: set sampling.sampler = "
            f'"auto" or "transformers"'
        )
    return generate_sampler


def in_chunks(
    sampler: Sampler,
    policy: Policy,
    prompt_ids: Sequence[Ints],
    repeats: int,
    decoding: Decoding,
    seed: int,
    batch_size: int,
) -> list[tuple[Rollout, ...]]:
    """Sample at most ``batch_size`` completions at a time (0: all at once), whole groups together."""
    prompts_at_a_time = max(1, batch_size // repeats) if batch_size else max(1, len(prompt_ids))
    groups: list[tuple[Rollout, ...]] = []
    for number, start in enumerate(range(0, len(prompt_ids), prompts_at_a_time)):
        chunk = prompt_ids[start : start + prompts_at_a_time]
        groups += sampler(policy, chunk, repeats, decoding, seed + number)
    return groups


@torch.no_grad()
def builtin_sampler(
    policy: Policy, prompt_ids: Sequence[Ints], repeats: int, decoding: Decoding, seed: int
) -> list[tuple[Rollout, ...]]:
    """The fast sampler; see the module's docstring and :class:`Sampler`."""
    if not prompt_ids:
        return []
    device, longest = policy.device, max(len(p) for p in prompt_ids)
    generator = torch.Generator(device).manual_seed(seed)
    ends = torch.tensor(sorted(policy.end_ids), device=device)
    warpers = decoding.warpers()
    n_rows, steps = len(prompt_ids) * repeats, decoding.max_completion_length

    input_PT, mask_PT = _left_padded(prompt_ids, device)
    positions_PT = (mask_PT.long().cumsum(-1) - 1).clamp(min=0)
    padded = bool((~mask_PT).any())
    cache = _SlotCache(policy.model, capacity=longest + steps)
    with policy.precision():
        logits = policy.model(
            input_ids=input_PT,
            attention_mask=mask_PT.long() if padded else None,
            position_ids=positions_PT,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
    cache.repeat(repeats)
    logits = logits.repeat_interleave(repeats, 0)
    next_position = (positions_PT[:, -1:] + 1).repeat_interleave(repeats, 0)
    visible = None
    if padded:  # slots a row may attend to; those of its completion all become visible
        prompt_visible = mask_PT.repeat_interleave(repeats, 0)
        visible = torch.cat([prompt_visible, prompt_visible.new_ones(n_rows, steps)], 1)[:, None, None, :]

    tokens_NT = torch.zeros(n_rows, steps, dtype=torch.int32, device=device)
    logp_NT = torch.zeros(n_rows, steps, dtype=torch.float32, device=device)
    length_N = torch.full((n_rows,), steps, dtype=torch.int64, device=device)
    rows = torch.arange(n_rows, device=device)  # the unfinished-or-not-yet-dropped rows, in the batch's order
    active = torch.ones(n_rows, dtype=torch.bool, device=device)
    for t in range(steps):
        token, logp = _draw(logits, decoding, warpers, generator)
        tokens_NT[rows, t] = token.int()
        logp_NT[rows, t] = logp
        ended = torch.isin(token, ends) & active
        length_N[rows[ended]] = t + 1
        active = active & ~ended
        remaining = int(active.sum())
        if remaining == 0 or t + 1 == steps:
            break
        if remaining < COMPACT_BELOW * len(rows):
            cache.select(active)
            rows, token, next_position = rows[active], token[active], next_position[active]
            visible = visible[active] if visible is not None else None
            active = active[active]
        with policy.precision():
            logits = policy.model(
                input_ids=token.unsqueeze(-1),
                attention_mask=visible[..., : longest + t + 1] if visible is not None else None,
                position_ids=next_position,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]
        next_position = next_position + 1
    return _as_groups(tokens_NT, logp_NT, length_N, repeats)


@torch.no_grad()
def generate_sampler(
    policy: Policy, prompt_ids: Sequence[Ints], repeats: int, decoding: Decoding, seed: int
) -> list[tuple[Rollout, ...]]:
    """transformers' ``generate``, for any model it supports; see :class:`Sampler`."""
    if not prompt_ids:
        return []
    input_PT, mask_PT = _left_padded(prompt_ids, policy.device)
    input_NT, mask_NT = input_PT.repeat_interleave(repeats, 0), mask_PT.long().repeat_interleave(repeats, 0)
    recorder = _LogpRecorder(input_NT.shape[1])
    ends = sorted(policy.end_ids)
    settings = GenerationConfig(
        max_new_tokens=decoding.max_completion_length,
        do_sample=not decoding.greedy,
        eos_token_id=ends,
        pad_token_id=ends[0],
        # Neutral: the recipe's own temperature and truncation are the warpers below, ahead of the recorder.
        **({} if decoding.greedy else {"temperature": 1.0, "top_k": 0, "top_p": 1.0}),
    )
    devices = [policy.device] if policy.device.type == "cuda" else []
    with torch.random.fork_rng(devices), _without_generation_defaults(policy.model), policy.precision():
        torch.manual_seed(seed)
        output_NT = policy.model.generate(
            input_ids=input_NT,
            attention_mask=mask_NT,
            generation_config=settings,
            logits_processor=LogitsProcessorList([*decoding.warpers(), recorder]),
        )
    tokens_NT = output_NT[:, input_NT.shape[1] :]
    logp_NT = recorder.finish(output_NT)
    ended_NT = torch.isin(tokens_NT, torch.tensor(ends, device=tokens_NT.device))
    first_end_N = torch.where(ended_NT.any(-1), ended_NT.int().argmax(-1) + 1, tokens_NT.shape[1])
    return _as_groups(tokens_NT.int(), logp_NT, first_end_N, repeats)


class _SlotLayer(DynamicLayer):
    """Keys and values of one layer in preallocated slots, so that growing by a token copies nothing."""

    def __init__(self, capacity: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.capacity, self.used = capacity, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = self._slots(key_states)
        self.values = self._slots(value_states)
        self.is_initialized = True

    def _slots(self, states: Tensor) -> Tensor:
        return states.new_zeros(*states.shape[:2], self.capacity, states.shape[3])

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, self.used = self.used, self.used + key_states.shape[2]
        assert self.keys is not None
        assert self.values is not None
        self.keys[:, :, start : self.used] = key_states
        self.values[:, :, start : self.used] = value_states
        return self.keys[:, :, : self.used], self.values[:, :, : self.used]

    def get_seq_length(self) -> int:
        return self.used

    def map(self, of_rows: Callable[[Tensor], Tensor]) -> None:
        """Replace the batch's rows: ``of_rows`` takes and returns [rows, heads, slots, width]."""
        assert self.keys is not None
        assert self.values is not None
        self.keys, self.values = of_rows(self.keys), of_rows(self.values)


class _SlotCache(Cache):
    def __init__(self, model: Any, capacity: int) -> None:
        n_layers = model.config.get_text_config(decoder=True).num_hidden_layers
        self.slots = [_SlotLayer(capacity) for _ in range(n_layers)]
        super().__init__(layers=list(self.slots))

    def repeat(self, repeats: int) -> None:
        """Each row ``repeats`` times, next to each other: a prompt's cache becomes its group's."""
        for layer in self.slots:
            layer.map(lambda rows: rows.repeat_interleave(repeats, 0))

    def select(self, active: Tensor) -> None:
        """Only the active rows, in their order."""
        for layer in self.slots:
            layer.map(lambda rows: rows[active])


class _LogpRecorder(LogitsProcessor):
    """Last in the list of processors: sees each step's final logits, and one step later the token drawn from them."""

    def __init__(self, prompt_length: int) -> None:
        self.prompt_length = prompt_length
        self.pending: Tensor | None = None
        self.columns: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._settle(input_ids)
        self.pending = torch.log_softmax(scores.float(), -1)
        return scores

    def finish(self, output_ids: Tensor) -> Tensor:
        self._settle(output_ids)
        return torch.stack(self.columns, 1).clamp(max=0.0)

    def _settle(self, input_ids: Tensor) -> None:
        if self.pending is not None:
            # A finished row is filled with the pad id, whose probability may be 0; those positions are cut off.
            self.columns.append(self.pending.gather(1, input_ids[:, -1:]).squeeze(1))


def _draw(
    logits_NV: Tensor, decoding: Decoding, warpers: LogitsProcessorList, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """One token per row and its log-probability under π_gen."""
    scores_NV = logits_NV.float()
    for warper in warpers:
        scores_NV = warper(None, scores_NV)
    all_logp_NV = torch.log_softmax(scores_NV, -1)
    if decoding.greedy:
        token_N = all_logp_NV.argmax(-1)
    else:
        token_N = torch.multinomial(all_logp_NV.exp(), 1, generator=generator).squeeze(-1)
    logp_N = all_logp_NV.gather(1, token_N.unsqueeze(-1)).squeeze(-1)
    return token_N, logp_N.clamp(max=0.0)


def _left_padded(prompt_ids: Sequence[Ints], device: torch.device) -> tuple[Tensor, Tensor]:
    longest = max(len(p) for p in prompt_ids)
    ids = np.zeros((len(prompt_ids), longest), dtype=np.int64)
    mask = np.zeros((len(prompt_ids), longest), dtype=bool)
    for i, prompt in enumerate(prompt_ids):
        ids[i, longest - len(prompt) :] = prompt
        mask[i, longest - len(prompt) :] = True
    return torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)


def _as_groups(tokens_NT: Tensor, logp_NT: Tensor, length_N: Tensor, repeats: int) -> list[tuple[Rollout, ...]]:
    tokens, logps, lengths = tokens_NT.cpu().numpy(), logp_NT.float().cpu().numpy(), length_N.cpu().numpy()
    rollouts = [
        Rollout(completion_ids=tokens[n, :length].astype(np.int32), gen_logp=logps[n, :length].copy())
        for n, length in enumerate(lengths)
    ]
    return [tuple(rollouts[start : start + repeats]) for start in range(0, len(rollouts), repeats)]


def _full_attention_decoder(model: Any) -> bool:
    config = model.config
    if config.is_encoder_decoder or getattr(config, "alibi", False):
        return False
    if config._attn_implementation != "sdpa":  # others read a mask of visible slots in their own ways, if at all
        return False
    layers = DynamicCache(config=model.config).layers
    return bool(layers) and all(type(layer) is DynamicLayer for layer in layers)


@contextmanager
def _without_generation_defaults(model: Any) -> Iterator[None]:
    """``generate`` fills what a caller leaves open from the model's own defaults; hide them while it runs."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    stored, inner.generation_config = inner.generation_config, GenerationConfig()
    try:
        yield
    finally:
        inner.generation_config = stored
