"""Sampling completions, with the log-probabilities of the distribution they were drawn from.

Two samplers with one signature: the built-in one for decoder-only models with full attention, which prefills each
prompt once per group, keeps keys and values in preallocated slots, drops finished rows from the batch, lets waiting
prompts take their place and steps in few operations (:mod:`ftis.engines.decoder`); and transformers' ``generate`` for
everything else. Both give the same greedy text and the same log-probabilities.

π_gen is softmax(logits / temperature) restricted to the top k and top p and renormalised: exactly what was
drawn from. Generation defaults stored with a model (repetition penalties and the like) play no part.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.cache_utils import Cache, DynamicLayer
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from ftis.config import SamplingConfig
from ftis.engines.decoder import FusedDecoder, StepGraph, fuses
from ftis.engines.lines import full_attention_decoder
from ftis.policy import ModelError, Policy
from ftis.rollouts import Ints, Rollout

COMPACT_BELOW = 0.75
"""The batch is compacted once fewer than this share of its rows are unfinished: copying the cache costs about as
much as a decoding step, so it must pay for itself."""

WORTH_DROPPING = {"cpu": 2e6, "cuda": 0.0}
"""Few rows of a small model cost less to carry along than to drop: it pays from so many on, as rows x parameters."""

ADMIT_FROM = 0.5
"""Waiting prompts are admitted once this share of the batch is vacant: a prefill and a copy of the cache cost several
steps, so some groups must share them."""

RACE_UP_TO = 2**16
"""Above so many probabilities a CPU draws one random number a row instead of one for each of them."""


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
    """Draws ``repeats`` completions for each prompt; deterministic in ``seed`` on one machine.

    At most ``batch_size`` completions are under way at a time (0: all at once), whole groups together.
    """

    def __call__(
        self,
        policy: Policy,
        prompt_ids: Sequence[Ints],
        repeats: int,
        decoding: Decoding,
        seed: int,
        batch_size: int = 0,
    ) -> list[tuple[Rollout, ...]]: ...


def sampler_for(policy: Policy, kind: str = "auto") -> Sampler:
    """The sampler a recipe asks for; ``auto`` is the built-in one wherever it can serve the model."""
    if kind == "transformers":
        return generate_sampler
    if full_attention_decoder(policy.model):
        return builtin_sampler
    if kind == "builtin":
        raise ModelError(
            f"peer {policy.config.name!r}: the built-in sampler needs a decoder with full attention in every layer "
            f"(torch's, without ALiBi), which {type(policy.model).__name__} is not: set sampling.sampler = "
            f'"auto" or "transformers"'
        )
    return generate_sampler


@torch.inference_mode()
def builtin_sampler(
    policy: Policy, prompt_ids: Sequence[Ints], repeats: int, decoding: Decoding, seed: int, batch_size: int = 0
) -> list[tuple[Rollout, ...]]:
    """The fast sampler; see the module's docstring and :class:`Sampler`."""
    if not prompt_ids:
        return []
    device, steps = policy.device, decoding.max_completion_length
    generator = torch.Generator(device).manual_seed(seed)
    warpers = decoding.warpers()
    ends_V = torch.zeros(policy.vocab_size, dtype=torch.bool, device=device)
    ends_V[sorted(end for end in policy.end_ids if end < policy.vocab_size)] = True
    at_a_time = max(1, batch_size // repeats) if batch_size else len(prompt_ids)
    rows = _Rows(policy, prompt_ids, repeats, steps)
    worth_dropping = WORTH_DROPPING[policy.device_kind] / policy.n_parameters
    drawn: list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]] = []
    with policy.precision():
        logits = rows.admit(at_a_time)
        while True:
            token, logp = _draw(logits, decoding, warpers, generator)
            ended = ends_V[token] | (rows.length == steps - 1)
            drawn.append((rows.number, rows.length, token, logp, ended))
            rows.length, rows.active = rows.length + 1, rows.active & ~ended
            remaining = int(rows.active.sum())
            if not remaining and not rows.waiting:
                break
            pays = bool(rows.waiting) or len(rows.active) - remaining >= worth_dropping
            if pays and remaining < COMPACT_BELOW * len(rows.active):
                token = token[rows.active]
                rows.compact()
            if remaining:
                logits = rows.step(token)
            vacant = at_a_time - math.ceil(len(rows.active) / repeats)
            if rows.waiting and vacant >= max(1, ADMIT_FROM * at_a_time):
                logits = torch.cat([logits[: len(rows.active)], rows.admit(vacant)])
    number, length, token, logp, ended = (torch.cat(column) for column in zip(*drawn, strict=True))
    # A row that has ended may go on for some steps until it is dropped; what it draws there is cut off.
    within = length < steps
    at = number[within], length[within]
    tokens_NT = torch.zeros(len(prompt_ids) * repeats, steps, dtype=torch.int64, device=device)
    logp_NT, ended_NT = torch.zeros_like(tokens_NT, dtype=torch.float32), torch.zeros_like(tokens_NT)
    tokens_NT[at], logp_NT[at], ended_NT[at] = token[within], logp[within].clamp(max=0.0), ended[within].long()
    return _as_groups(tokens_NT, logp_NT, ended_NT.argmax(-1) + 1, repeats)


class _Rows:
    """The rows being completed, in the batch's order, and the keys and values of their tokens.

    All rows write to one slot at a time; a row's first slot is ``start``. Once rows have ended and are dropped,
    waiting prompts can be admitted in their place, their prompts ending where the others are.

    Attributes:
        waiting: numbers of the prompts not admitted yet.
        number: int64 [n], a row's number among all rollouts.
        length: int64 [n], how many tokens were drawn for it.
        active: bool [n], whether it has not ended.
    """

    def __init__(self, policy: Policy, prompt_ids: Sequence[Ints], repeats: int, steps: int) -> None:
        self.policy, self.prompt_ids, self.repeats, self.steps = policy, prompt_ids, repeats, steps
        self.positions = max(len(p) for p in prompt_ids) + steps
        fused = fuses(policy.model)
        self.decoder = FusedDecoder(policy.model, policy.compute_dtype, self.positions) if fused else None
        self.captures = fused and policy.config.cuda_graphs and policy.device.type == "cuda"
        self.graph: StepGraph | None = None
        self.waiting = list(range(len(prompt_ids)))
        none = torch.zeros(0, dtype=torch.int64, device=policy.device)
        self.number, self.length, self.start, self.position, self.active = none, none, none, none, none.bool()
        self.cache = _SlotCache(policy.model, capacity=0)
        self.visible: Tensor | None = None

    def admit(self, n_prompts: int) -> Tensor:
        """Groups of rows for the next waiting prompts, each prompt prefilled once; logits [new rows, V]."""
        chosen, self.waiting = self.waiting[:n_prompts], self.waiting[n_prompts:]
        input_PT, mask_PT = _left_padded([self.prompt_ids[i] for i in chosen], self.policy.device)
        length_P, longest = mask_PT.sum(-1), input_PT.shape[1]
        cache = _SlotCache(self.policy.model, longest + self.steps)
        logits: Tensor = self.policy.model(
            input_ids=input_PT,
            attention_mask=mask_PT.long() if bool((~mask_PT).any()) else None,
            position_ids=(mask_PT.long().cumsum(-1) - 1).clamp(min=0),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        if self.decoder is not None:
            cache.map(lambda prompts: prompts.to(self.policy.compute_dtype))
        cache.map(lambda prompts: prompts.repeat_interleave(self.repeats, 0))

        used = self.cache.get_seq_length()
        span = used - int(self.start.min()) if len(self.start) else 0
        width = max(span, longest)
        if len(self.start):
            cache.put_before(self.cache, span, width)
        self.cache = cache
        length_n = length_P.repeat_interleave(self.repeats)
        first = torch.tensor(chosen, device=self.policy.device) * self.repeats
        number_n = (first[:, None] + torch.arange(self.repeats, device=first.device)).flatten()
        self.number = torch.cat([self.number, number_n])
        self.length = torch.cat([self.length, torch.zeros_like(number_n)])
        self.start = torch.cat([self.start - (used - width), width - length_n])
        self.position = torch.cat([self.position, length_n])
        self.active = torch.cat([self.active, torch.ones_like(number_n, dtype=torch.bool)])
        self._see()
        return logits.repeat_interleave(self.repeats, 0)

    def compact(self) -> None:
        """Drop the rows that have ended."""
        kept = self.active.nonzero().squeeze(-1)
        self.cache.select(kept)
        self.number, self.length, self.start, self.position, self.active = (
            of_rows[kept] for of_rows in (self.number, self.length, self.start, self.position, self.active)
        )
        self._see()

    def step(self, token: Tensor) -> Tensor:
        """Logits [n, V] after one more token in each row."""
        used, position = self.cache.get_seq_length() + 1, self.position
        # A row that has ended may go on until it is dropped, but not beyond the positions a model may have.
        self.position = (position + 1).clamp(max=self.positions - 1)
        seen = self.visible[..., :used] if self.visible is not None else None
        if self.decoder is not None:
            keys, values = self.cache.grown()
            if self.captures:
                try:
                    return self._captured(token, position)
                except RuntimeError as error:
                    warnings.warn(f"CUDA graphs are left out: {error}", stacklevel=2)
                    self.captures = False
            return self.decoder.step(token, position, keys, values, seen)
        logits: Tensor = self.policy.model(
            input_ids=token.unsqueeze(-1),
            attention_mask=seen,
            position_ids=position.unsqueeze(-1),
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        return logits

    def _captured(self, token: Tensor, position: Tensor) -> Tensor:
        """The same step as a CUDA graph, captured anew for each batch of rows."""
        if self.graph is None:
            assert self.decoder is not None
            keys, values = self.cache.all_slots()
            shown = self.visible
            if shown is None:
                shown = keys[0].new_zeros(len(token), 1, 1, self.cache.capacity)
            self.graph = StepGraph(self.decoder, keys, values, shown, self.cache.get_seq_length() - 1)
        return self.graph(token, position)

    def _see(self) -> None:
        """Which slots each row may attend to, if not all of them: what a step of either kind takes for it."""
        self.visible, self.graph = None, None
        if len(self.start) and bool(self.start.any()):
            slots = torch.arange(self.cache.capacity, device=self.start.device)
            visible = (slots >= self.start[:, None])[:, None, None, :]
            if self.decoder is not None:
                zero = torch.zeros(visible.shape, dtype=self.policy.compute_dtype, device=self.start.device)
                visible = zero.masked_fill(~visible, -torch.inf)
            self.visible = visible


@torch.no_grad()
def generate_sampler(
    policy: Policy, prompt_ids: Sequence[Ints], repeats: int, decoding: Decoding, seed: int, batch_size: int = 0
) -> list[tuple[Rollout, ...]]:
    """transformers' ``generate``, for any model it supports, one batch after the other; see :class:`Sampler`."""
    at_a_time = max(1, batch_size // repeats) if batch_size else max(1, len(prompt_ids))
    groups: list[tuple[Rollout, ...]] = []
    for number, start in enumerate(range(0, len(prompt_ids), at_a_time)):
        groups += _generated(policy, prompt_ids[start : start + at_a_time], repeats, decoding, seed + number)
    return groups


def _generated(
    policy: Policy, prompt_ids: Sequence[Ints], repeats: int, decoding: Decoding, seed: int
) -> list[tuple[Rollout, ...]]:
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
        self.capacity = capacity
        self.slots = [_SlotLayer(capacity) for _ in range(n_layers)]
        super().__init__(layers=list(self.slots))

    def map(self, of_rows: Callable[[Tensor], Tensor]) -> None:
        """Replace keys and values: ``of_rows`` takes and returns [rows, heads, slots, width]."""
        for layer in self.slots:
            layer.map(of_rows)

    def select(self, kept: Tensor) -> None:
        """Only the rows of these numbers, in their order."""
        used = self.get_seq_length()

        def of(rows: Tensor) -> Tensor:
            out = rows.new_empty(len(kept), *rows.shape[1:])
            out[:, :, :used] = rows[:, :, :used].index_select(0, kept)
            return out

        self.map(of)

    def grown(self) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of each layer with one more slot used."""
        for layer in self.slots:
            layer.used += 1
        used = self.get_seq_length()
        keys, values = self.all_slots()
        return [tensor[:, :, :used] for tensor in keys], [tensor[:, :, :used] for tensor in values]

    def all_slots(self) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of each layer, in all slots."""
        keys = [layer.keys for layer in self.slots if layer.keys is not None]
        values = [layer.values for layer in self.slots if layer.values is not None]
        return keys, values

    def put_before(self, old: _SlotCache, span: int, width: int) -> None:
        """Add the rows of ``old`` in front, the last ``span`` slots of each; all rows then end at slot ``width``."""
        self.capacity += width - self.get_seq_length()
        for mine, theirs in zip(self.slots, old.slots, strict=True):
            of_both = [(theirs.keys, mine.keys), (theirs.values, mine.values)]
            joined = []
            for before, after in of_both:
                assert before is not None
                assert after is not None
                both = after.new_zeros(len(before) + len(after), after.shape[1], self.capacity, after.shape[3])
                both[: len(before), :, width - span : width] = before[:, :, theirs.used - span : theirs.used]
                both[len(before) :, :, width - mine.used : width] = after[:, :, : mine.used]
                joined.append(both)
            (mine.keys, mine.values), mine.capacity, mine.used = joined, self.capacity, width


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
    """One token per row and its log-probability under π_gen, which rounding may have left a little above 0."""
    scores_NV = logits_NV.float()
    for warper in warpers:
        scores_NV = warper(None, scores_NV)
    if decoding.greedy:
        token_N = scores_NV.argmax(-1)
        selected_N = scores_NV.gather(1, token_N.unsqueeze(-1)).squeeze(-1)
        return token_N, selected_N - scores_NV.logsumexp(-1)
    all_logp_NV = torch.log_softmax(scores_NV, -1)
    p_NV = all_logp_NV.exp()
    if p_NV.device.type == "cpu" and p_NV.numel() > RACE_UP_TO:
        cdf_NV = p_NV.cumsum(-1, dtype=torch.float64)
        at_N1 = torch.rand(len(p_NV), 1, dtype=torch.float64, generator=generator) * cdf_NV[:, -1:]
        token_N1 = torch.searchsorted(cdf_NV, at_N1, right=True).clamp(max=p_NV.shape[1] - 1)
    else:  # p / q with q ~ Exp(1) is largest for each token as often as it is probable
        token_N1 = p_NV.div_(torch.empty_like(p_NV).exponential_(generator=generator)).argmax(-1, keepdim=True)
    return token_N1.squeeze(-1), all_logp_NV.gather(1, token_N1).squeeze(-1)


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


@contextmanager
def _without_generation_defaults(model: Any) -> Iterator[None]:
    """``generate`` fills what a caller leaves open from the model's own defaults; hide them while it runs."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    stored, inner.generation_config = inner.generation_config, GenerationConfig()
    try:
        yield
    finally:
        inner.generation_config = stored
