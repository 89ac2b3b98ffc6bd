"""The built-in sampler, for decoders with full attention, or within a sliding window, in every layer.

It prefills each prompt once per group, and a long beginning that all prompts share once. It keeps keys and values in
preallocated slots, drops finished rows from the batch and refills it with waiting prompts. For most models a decoding
step takes few operations (:mod:`ftis.engines.decoder`). For the others transformers' ``generate`` draws all rows, if
some may reach beyond a window.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessorList

from ftis.config import ModelError
from ftis.engines.decoder import FusedDecoder, StepGraph, fuses
from ftis.engines.devices import device_kind
from ftis.engines.generate import generate_sampler
from ftis.engines.lengths import attention_windows, rows_fit
from ftis.engines.rows import as_groups, in_parts, left_padded, shared_beginning, whole_rows
from ftis.engines.samplers import InPlace
from ftis.engines.slots import KeptPart, KeptRows, Room, SlotCache, prompts_prefilled
from ftis.engines.stops import StopStrings
from ftis.policy import Policy
from ftis.rollouts import Ints, Rollout
from ftis.sampling import Decoding, Sampler

COMPACT_BELOW = 0.75
"""Finished rows are dropped once fewer than this fraction of the batch's rows are unfinished: dropping copies the
cache, which costs about as much as a decoding step."""

WORTH_DROPPING = {"cpu": 2e6, "cuda": 0.0}
"""The fewest rows to drop at a time, as rows x parameters: a few rows of a small model cost less to keep than to
drop."""

REFILL_FROM = 0.5
"""Waiting prompts refill the batch once this fraction of it is vacant: a prefill and a copy of the cache cost several
decoding steps, so several groups must be prefilled together."""

RACE_UP_TO = 2**16
"""The most probabilities for which a CPU draws a random number each. Above it draws one number per row."""

BLOCK = 512
"""Tokens whose probabilities are summed before a token among them is looked for."""


def open_sampler(policy: Policy) -> Sampler:
    """The built-in sampler for a policy.

    Raises:
        ModelError: the model has a layer with other attention.
    """
    if not attention_windows(policy.model):
        raise ModelError(
            f"peer {policy.config.name!r}: the built-in sampler needs a decoder with full or sliding attention in "
            f"every layer (torch's, without ALiBi), which {type(policy.model).__name__} is not: set sampling.sampler = "
            f'"auto" or "transformers"'
        )
    return InPlace(builtin_sampler)


@torch.inference_mode()
def builtin_sampler(
    policy: Policy, prompt_ids: Sequence[Ints], repeats: int, decoding: Decoding, seed: int, batch_size: int = 0
) -> list[tuple[Rollout, ...]]:
    """Draw completions as :class:`~ftis.sampling.Draw` says."""
    if not prompt_ids:
        return []
    device, steps = policy.device, decoding.max_completion_length
    rows_fit_windows = rows_fit(attention_windows(policy.model), max(map(len, prompt_ids)) + steps)
    if not (rows_fit_windows or fuses(policy.model)):
        again = replace(decoding, kept=None)  # the state kept here knows of no window
        return generate_sampler(policy, prompt_ids, repeats, again, seed, batch_size)
    room = Room.of(policy, prompt_ids, steps)
    if (parts := room.parts(repeats)) > 1:
        return in_parts(builtin_sampler, parts, policy, prompt_ids, repeats, decoding, seed, batch_size)
    generator = torch.Generator(device).manual_seed(seed)
    warpers = decoding.warpers()
    ends_V = torch.zeros(policy.vocab_size, dtype=torch.bool, device=device)
    ends_V[sorted(end for end in policy.end_ids if end < policy.vocab_size)] = True
    at_a_time, _ = room.at_a_time(len(prompt_ids), repeats, batch_size or len(prompt_ids) * repeats)
    rows = _Rows(policy, prompt_ids, repeats, decoding, room)
    worth_dropping = WORTH_DROPPING[device_kind(policy.device)] / policy.n_parameters
    stops = StopStrings(policy, decoding.stop)
    drawn: list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]] = []
    with policy.precision():
        logits = rows.refill(at_a_time)
        while True:
            token, logp = _draw(logits, decoding, warpers, generator)
            ended = ends_V[token] | (rows.length == steps - 1)
            if decoding.stop:
                numbered = zip(rows.number.tolist(), token.tolist(), rows.active.tolist(), strict=True)
                stopped = [active and stops.complete(number, drawn_id) for number, drawn_id, active in numbered]
                ended = ended | torch.tensor(stopped, device=device)
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
            if rows.waiting and vacant >= max(1, REFILL_FROM * at_a_time):
                logits = torch.cat([logits[: len(rows.active)], rows.refill(vacant)])
    number, length, token, logp, ended = (torch.cat(column) for column in zip(*drawn, strict=True))
    # A row that has ended goes on until it is dropped; the tokens that it draws then are cut off.
    within = length < steps
    at = number[within], length[within]
    tokens_NT = torch.zeros(len(prompt_ids) * repeats, steps, dtype=torch.int64, device=device)
    logp_NT, ended_NT = torch.zeros_like(tokens_NT, dtype=torch.float32), torch.zeros_like(tokens_NT)
    tokens_NT[at], logp_NT[at], ended_NT[at] = token[within], logp[within].clamp(max=0.0), ended[within].long()
    groups = as_groups(tokens_NT, logp_NT, ended_NT.argmax(-1) + 1, repeats)
    if decoding.kept is not None and rows.keeps:
        rows.keep(torch.arange(len(rows.number), device=device))
        decoding.kept.rows = KeptRows(rows.left, whole_rows(prompt_ids, groups))
    return groups


class _Rows:
    """The rows being completed, in the batch's order, and the keys and values of their tokens.

    All rows write to the same slot in a decoding step. Prompts that refill the batch end at the slot that the other
    rows have reached.

    Attributes:
        waiting: indices of the prompts that are not in the batch yet.
        number: int64 [n], a row's index among all rollouts.
        length: int64 [n], the number of tokens drawn for the row.
        start: int64 [n], the row's first slot.
        position: int64 [n], the position of the row's next token.
        active: bool [n], whether the row has not ended.
    """

    def __init__(
        self, policy: Policy, prompt_ids: Sequence[Ints], repeats: int, decoding: Decoding, room: Room
    ) -> None:
        self.policy, self.prompt_ids, self.repeats, self.room = policy, prompt_ids, repeats, room
        self.positions = room.longest + room.steps - 1  # a row's last token is fed to nothing
        fused, places = fuses(policy.model), torch.arange(self.positions)
        self.decoder: FusedDecoder | None = decoding.kept.weights if decoding.kept is not None else None
        if self.decoder is not None:
            self.decoder.reach(places)
        elif fused:
            self.decoder = FusedDecoder(policy.model, policy.compute_dtype, places)
        self.captures = fused and policy.config.cuda_graphs and policy.device.type == "cuda"
        self.captures &= rows_fit(attention_windows(policy.model), self.positions)  # such a step attends to all slots
        self.graph: StepGraph | None = None
        self.waiting = list(range(len(prompt_ids)))
        none = torch.zeros(0, dtype=torch.int64, device=policy.device)
        self.number, self.length, self.start, self.position, self.active = none, none, none, none, none.bool()
        self.cache = SlotCache(policy.model, capacity=0)
        self.visible: Tensor | None = None
        self.left: list[KeptPart] = []
        self.kept: KeptRows | None = None
        self.keeps = False
        if decoding.kept is not None:
            self.kept, decoding.kept.rows, decoding.kept.weights = decoding.kept.rows, None, self.decoder
            self.keeps = room.keeps(len(prompt_ids) * repeats)
        if self.kept is None:
            self.kept = self._shared(prompt_ids)

    def refill(self, n_prompts: int) -> Tensor:
        """Add groups of rows for the next waiting prompts, each prefilled once. Returns their logits [new rows, V]."""
        chosen, self.waiting = self.waiting[:n_prompts], self.waiting[n_prompts:]
        longest, room = max(len(self.prompt_ids[i]) for i in chosen), self.room
        together = prompts_prefilled(room.config, longest, room.number, room.within)
        parts = [chosen[at : at + together] for at in range(0, len(chosen), together)]
        return torch.cat([self._prefill(part) for part in parts])

    def _prefill(self, chosen: Sequence[int]) -> Tensor:
        """Add groups of rows for prompts by index. Returns their logits."""
        prompts = [self.prompt_ids[i] for i in chosen]
        longest = max(map(len, prompts))
        cache = SlotCache(self.policy.model, longest + self.room.steps)
        found = self.kept.find(prompts) if self.kept is not None else None
        if found is None or self.kept is None:
            logits = self._read(cache, prompts, 0)
        else:
            start_P = np.array([longest - len(ids) for ids in prompts])
            known_P = start_P + np.array([n for _, _, n in found])
            read = int(known_P.min() if self.decoder is None else known_P.max())
            of_layers = self.kept.taken(found, start_P.tolist(), read, cache.capacity)
            for layer, (keys, values) in zip(cache.slots, of_layers, strict=True):
                layer.take(keys, values, read)
            logits = (
                self._read(cache, prompts, read)
                if self.decoder is None
                else self._read_on(self.decoder, cache, prompts, start_P, known_P)
            )
        cache.map(lambda prompts: prompts.to(self.policy.compute_dtype))  # under autocast models keep keys in float32
        if self.repeats > 1:
            cache.map(lambda prompts: prompts.repeat_interleave(self.repeats, 0))

        used = self.cache.get_seq_length()
        span = used - int(self.start.min()) if len(self.start) else 0
        width = max(span, longest)
        if len(self.start):
            self.graph = None  # it holds the old keys and values
            cache.put_before(self.cache, span, width)
        self.cache = cache
        length_P = torch.tensor([len(ids) for ids in prompts], device=self.policy.device)
        length_n = length_P.repeat_interleave(self.repeats)
        first = torch.tensor(chosen, device=self.policy.device) * self.repeats
        number_n = (first[:, None] + torch.arange(self.repeats, device=first.device)).flatten()
        self.number = torch.cat([self.number, number_n])
        self.length = torch.cat([self.length, torch.zeros_like(number_n)])
        self.start = torch.cat([self.start - (used - width), width - length_n])
        self.position = torch.cat([self.position, length_n])
        self.active = torch.cat([self.active, torch.ones_like(number_n, dtype=torch.bool)])
        self._update_visible()
        return logits.repeat_interleave(self.repeats, 0)

    def _shared(self, prompts: Sequence[Ints]) -> KeptRows | None:
        """Keys and values of the common beginning of all prompts; None if it is short, or under half of the longest.

        The fused decoder reads on after it. It stores all attention weights, so it reads no long rest.
        """
        shared = shared_beginning(prompts)
        if self.decoder is None or 2 * shared < max(map(len, prompts)):
            return None
        beginning = prompts[0][:shared]
        cache = SlotCache(self.policy.model, shared - 1)
        with self.policy.precision():
            self._read(cache, [beginning[:-1]], 0)
        cache.map(lambda rows: rows.to(self.policy.compute_dtype))
        only = torch.zeros(1, dtype=torch.int64, device=self.policy.device)
        return KeptRows([KeptPart(only, only, list(zip(*cache.all_slots(), strict=True)))], [beginning])

    def _read(self, cache: SlotCache, prompts: Sequence[Ints], read: int) -> Tensor:
        """Fill a cache with prompts after its first ``read`` slots. Returns their logits."""
        input_PT, mask_PT = left_padded(prompts, self.policy.device)
        position_PT = (mask_PT.long().cumsum(-1) - 1).clamp(min=0)
        logits: Tensor = self.policy.model(
            input_ids=input_PT[:, read:],
            attention_mask=mask_PT.long() if bool((~mask_PT).any()) else None,
            position_ids=position_PT[:, read:],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        return logits

    def _read_on(
        self, decoder: FusedDecoder, cache: SlotCache, prompts: Sequence[Ints], start_P: Ints, known_P: Ints
    ) -> Tensor:
        """As :meth:`_read`, but each row is read from its slot ``known`` on; its first token is at slot ``start``."""
        device, longest = self.policy.device, start_P[0] + len(prompts[0])
        slots = [np.arange(known, longest) for known in known_P]
        row_M, slot_M = np.repeat(np.arange(len(prompts)), longest - known_P), np.concatenate(slots)
        token_M = np.concatenate([ids[known - longest :] for ids, known in zip(prompts, known_P, strict=True)])
        each = (token_M.astype(np.int64), slot_M - start_P[row_M], row_M, slot_M)
        token, position, row, slot = (torch.from_numpy(of_M).to(device) for of_M in each)
        keys, values = cache.grown(longest - cache.get_seq_length())
        return decoder.read(token, position, row, slot, keys, values, torch.from_numpy(start_P).to(device))

    def keep(self, rows: Tensor) -> None:
        """Keep keys and values of rows that leave the batch."""
        keys, values, used = *self.cache.all_slots(), self.cache.get_seq_length()
        layers = [
            (key[:, :, :used].index_select(0, rows), value[:, :, :used].index_select(0, rows))
            for key, value in zip(keys, values, strict=True)
        ]
        self.left.append(KeptPart(self.number[rows], self.start[rows], layers))

    def compact(self) -> None:
        """Drop the rows that have ended."""
        if self.keeps:
            self.keep((~self.active).nonzero().squeeze(-1))
        kept = self.active.nonzero().squeeze(-1)
        self.cache.select(kept)
        self.number, self.length, self.start, self.position, self.active = (
            of_rows[kept] for of_rows in (self.number, self.length, self.start, self.position, self.active)
        )
        self._update_visible()

    def step(self, token: Tensor) -> Tensor:
        """Logits [n, V] after one more token in each row."""
        used, position = self.cache.get_seq_length() + 1, self.position
        # A row that has ended goes on until it is dropped, but not beyond the model's positions.
        self.position = (position + 1).clamp(max=self.positions - 1)
        seen = self.visible[..., :used] if self.visible is not None else None
        if self.decoder is not None:
            keys, values = self.cache.grown()
            if self.captures:
                try:
                    return self._captured(token, position)
                except RuntimeError as error:
                    warnings.warn(f"CUDA graphs are left out: {error}", stacklevel=2)
                    self.captures, self.graph = False, None
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
        """The same decoding step as a CUDA graph, captured again after each change of the batch's rows."""
        if self.graph is None:
            assert self.decoder is not None
            keys, values = self.cache.all_slots()
            shown = keys[0].new_zeros(len(token), 1, 1, self.cache.capacity) if self.visible is None else self.visible
            self.graph = StepGraph(self.decoder, keys, values, shown, self.cache.get_seq_length() - 1)
        return self.graph(token, position)

    def _update_visible(self) -> None:
        """Set the slots that each row may attend to, as a decoding step takes them; None is all."""
        self.visible, self.graph = None, None
        if len(self.start) and bool(self.start.any()):
            slots = torch.arange(self.cache.capacity, device=self.start.device)
            visible = (slots >= self.start[:, None])[:, None, None, :]
            if self.decoder is not None:
                zero = torch.zeros(visible.shape, dtype=self.policy.compute_dtype, device=self.start.device)
                visible = zero.masked_fill(~visible, -torch.inf)
            self.visible = visible


def _draw(
    logits_NV: Tensor, decoding: Decoding, warpers: LogitsProcessorList, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """A token per row and its log-probability under π_gen; rounding may leave it a little above 0."""
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
        token_N1 = _inverse_cdf(p_NV, torch.rand(len(p_NV), 1, dtype=torch.float64, generator=generator))
    else:  # with q ~ Exp(1) per token, p / q is largest for a token with probability p
        token_N1 = p_NV.div_(torch.empty_like(p_NV).exponential_(generator=generator)).argmax(-1, keepdim=True)
    return token_N1.squeeze(-1), all_logp_NV.gather(1, token_N1).squeeze(-1)


def _inverse_cdf(p_NV: Tensor, u_N1: Tensor) -> Tensor:
    """Find the token at which a row's cumulative probability passes u, in [0, 1): first its block, then the token."""
    n, vocab_size = p_NV.shape
    whole = vocab_size // BLOCK
    p_of_blocks = p_NV[:, : whole * BLOCK].view(n, whole, BLOCK).sum(-1)
    p_NB = torch.cat([p_of_blocks, p_NV[:, whole * BLOCK :].sum(-1, keepdim=True)], 1)
    cdf_NB = p_NB.cumsum(-1, dtype=torch.float64)
    at_N1 = (u_N1 * cdf_NB[:, -1:]).minimum(_just_below(cdf_NB[:, -1:]))
    block_N1 = torch.searchsorted(cdf_NB, at_N1, right=True).clamp(max=whole)
    before_N1 = cdf_NB.gather(1, block_N1) - p_NB.gather(1, block_N1)
    token_NK = block_N1 * BLOCK + torch.arange(BLOCK)
    p_NK = p_NV.gather(1, token_NK.clamp(max=vocab_size - 1)).masked_fill(token_NK >= vocab_size, 0.0)
    cdf_NK = p_NK.cumsum(-1, dtype=torch.float64)
    # A block's sum is rounded differently from its cumulative one, which must not be passed.
    within_N1 = (at_N1 - before_N1).clamp(min=0.0).minimum(_just_below(cdf_NK[:, -1:]))
    place_N1 = torch.searchsorted(cdf_NK, within_N1, right=True).clamp(max=BLOCK - 1)
    return block_N1 * BLOCK + place_N1


def _just_below(x: Tensor) -> Tensor:
    return torch.nextafter(x, torch.zeros_like(x))
