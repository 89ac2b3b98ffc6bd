"""transformers' ``generate`` as a sampler, for any model it supports."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.cache_utils import DynamicLayer

from ftis.engines.rows import as_groups, in_parts, left_padded, whole_rows
from ftis.engines.samplers import InPlace
from ftis.engines.slots import KeptPart, KeptRows, Room
from ftis.engines.stops import StopStrings
from ftis.policy import Policy
from ftis.rollouts import Ints, Rollout
from ftis.sampling import Decoding, Sampler


def open_sampler(policy: Policy) -> Sampler:
    """``generate`` as the policy's sampler."""
    return InPlace(generate_sampler, uncached=partial(generate_sampler, cache=False))


@torch.no_grad()
def generate_sampler(
    policy: Policy,
    prompt_ids: Sequence[Ints],
    repeats: int,
    decoding: Decoding,
    seed: int,
    batch_size: int = 0,
    cache: bool = True,
) -> list[tuple[Rollout, ...]]:
    """Draw completions as :class:`~ftis.sampling.Draw` says, one batch after the other.

    Args:
        cache: keep keys, values and states. Without it each token takes a pass of all tokens before it.
    """
    if not prompt_ids:
        return []
    rows, room = len(prompt_ids) * repeats, Room.of(policy, prompt_ids, decoding.max_completion_length, slots=False)
    if (parts := room.parts(repeats)) > 1:
        draw = partial(generate_sampler, cache=cache)
        return in_parts(draw, parts, policy, prompt_ids, repeats, decoding, seed, batch_size)
    at_a_time, _ = room.at_a_time(len(prompt_ids), repeats, batch_size or rows)
    groups: list[tuple[Rollout, ...]] = []
    kept, before, held = decoding.kept if cache else None, None, list[KeptPart]()
    if kept is not None:
        before, kept.rows = kept.rows, None
        kept = kept if room.keeps(rows) else None
    for number, start in enumerate(range(0, len(prompt_ids), at_a_time)):
        some = prompt_ids[start : start + at_a_time]
        drawn, part = _generated(policy, some, repeats, decoding, seed + number, cache, before)
        groups += drawn
        if kept is None or part is None:
            kept = None
        else:
            held.append(part._replace(number=part.number + start * repeats))
        del part  # else two batches' keys would be in memory
    if kept is not None:
        kept.rows = KeptRows(held, whole_rows(prompt_ids, groups))
    return groups


def _generated(
    policy: Policy,
    prompt_ids: Sequence[Ints],
    repeats: int,
    decoding: Decoding,
    seed: int,
    cache: bool = True,
    before: KeptRows | None = None,
) -> tuple[list[tuple[Rollout, ...]], KeptPart | None]:
    """Draw one batch. Returns its rows' keys and values, too, if the model keeps these alone."""
    rows = [ids for ids in prompt_ids for _ in range(repeats)]
    known = None if before is None else _known(before, rows)
    input_NT, mask_NT = left_padded(rows, policy.device)
    recorder, stops = LogpRecorder(), _Stops(policy, decoding.stop, input_NT.shape[1])
    ends = sorted(policy.end_ids)
    settings = GenerationConfig(
        max_new_tokens=decoding.max_completion_length,
        do_sample=not decoding.greedy,
        eos_token_id=ends,
        pad_token_id=ends[0],
        use_cache=cache,
        return_dict_in_generate=True,
        # Neutral: the warpers below apply the recipe's temperature and truncation, ahead of the recorder.
        **({} if decoding.greedy else {"temperature": 1.0, "top_k": 0, "top_p": 1.0}),
    )
    devices = [policy.device] if policy.device.type == "cuda" else []
    with torch.random.fork_rng(devices), _without_generation_defaults(policy.model), policy.precision():
        torch.manual_seed(seed)
        found = policy.model.generate(
            input_ids=input_NT,
            attention_mask=mask_NT.long(),
            generation_config=settings,
            logits_processor=LogitsProcessorList([*decoding.warpers(), recorder]),
            stopping_criteria=StoppingCriteriaList([stops]),
            **({} if known is None else {"past_key_values": known}),
        )
    output_NT = found.sequences
    tokens_NT = output_NT[:, input_NT.shape[1] :]
    logp_NT = recorder.finish(output_NT)
    ended_NT = torch.isin(tokens_NT, torch.tensor(ends, device=tokens_NT.device))
    first_end_N = torch.where(ended_NT.any(-1), ended_NT.int().argmax(-1) + 1, tokens_NT.shape[1])
    for row, length in stops.length.items():  # after it stands padding, which may be an end-of-sequence id
        first_end_N[row] = min(int(first_end_N[row]), length)
    return as_groups(tokens_NT.int(), logp_NT, first_end_N, repeats), _part(found.past_key_values, rows)


def _known(before: KeptRows, rows: Sequence[Ints]) -> DynamicCache | None:
    """The keys and values of rows up to the first place at which some row has none; None if there are none at all."""
    found = before.find(rows)
    if found is None:
        return None
    skipped = _skipped(rows)
    n = min(places + known for places, (_, _, known) in zip(skipped, found, strict=True))
    return DynamicCache(before.taken(found, skipped, n, n)) if n else None


def _part(past: Any, rows: Sequence[Ints]) -> KeptPart | None:
    """A batch's keys and values; None if its cache holds states, or drops keys, as a window does."""
    plain = type(past) is DynamicCache and all(type(layer) is DynamicLayer for layer in past.layers)
    if not plain:
        return None
    layers = [(layer.keys, layer.values) for layer in past.layers]
    return KeptPart(torch.arange(len(rows)), torch.tensor(_skipped(rows), device=layers[0][0].device), layers)


def _skipped(rows: Sequence[Ints]) -> list[int]:
    """The places before each row's first token, as :func:`~ftis.engines.rows.left_padded` places it."""
    longest = max(map(len, rows))
    return [longest - len(ids) for ids in rows]


class _Stops(StoppingCriteria):
    """A criterion that ends a row whose text holds a stop string; ``length`` has the row's tokens up to there."""

    def __init__(self, policy: Policy, stop: Sequence[str], prompt_length: int) -> None:
        self.stops, self.prompt_length = StopStrings(policy, stop), prompt_length
        self.length: dict[int, int] = {}

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        for row, token in enumerate(input_ids[:, -1].tolist() if self.stops.stop else ()):
            if row not in self.length and self.stops.complete(row, token):
                self.length[row] = input_ids.shape[1] - self.prompt_length
        return torch.tensor([row in self.length for row in range(len(input_ids))], device=input_ids.device)


class LogpRecorder(LogitsProcessor):
    """The last processor before ``warpers``: it sees logits, and at its next call the drawn token."""

    def __init__(self, warpers: Sequence[Callable[[Any, Tensor], Tensor]] = ()) -> None:
        self.warpers = warpers
        self.pending: Tensor | None = None
        self.columns: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._settle(input_ids)
        final = scores
        for warper in self.warpers:
            final = warper(input_ids, final)
        self.pending = torch.log_softmax(final.float(), -1)
        return scores

    def finish(self, output_ids: Tensor) -> Tensor:
        self._settle(output_ids)
        return torch.stack(self.columns, 1).clamp(max=0.0)

    def _settle(self, input_ids: Tensor) -> None:
        if self.pending is not None:
            # A finished row gets the pad id, whose probability may be 0; those positions are cut off.
            self.columns.append(self.pending.gather(1, input_ids[:, -1:]).squeeze(1))


@contextmanager
def _without_generation_defaults(model: Any) -> Iterator[None]:
    """Hide the model's generation defaults, from which ``generate`` fills in what a caller leaves open."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    stored, inner.generation_config = inner.generation_config, GenerationConfig()
    try:
        yield
    finally:
        inner.generation_config = stored
