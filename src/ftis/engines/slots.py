"""A cache of keys and values in preallocated slots, and its size. A new token copies nothing."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from ftis.engines.devices import working_bytes
from ftis.engines.models import inner_width, layers_of
from ftis.policy import Policy
from ftis.rollouts import Ints

PREFILL_PARTS = 16
"""The parts of a device's working bytes, one of them for activations while prompts are prefilled."""


def cached_number(compute_dtype: torch.dtype, slots: bool) -> int:
    """Bytes of a number in the cache: slots have the compute dtype, and ``generate`` may keep keys in float32."""
    return compute_dtype.itemsize if slots else torch.float32.itemsize


def row_bytes(config: Any, places: int, number: int) -> int:
    """Count the bytes of a completion that is drawn: keys and values of ``places`` tokens, ``number`` bytes each, and
    three copies of a token's float32 logits."""
    text = config.get_text_config(decoder=True)
    numbers = 0
    for layer in layers_of(text):
        heads = getattr(layer, "num_attention_heads", None) or 0  # models without attention keep no keys
        head_dim = getattr(layer, "head_dim", None) or text.hidden_size // max(1, heads)
        numbers += (getattr(layer, "num_key_value_heads", None) or heads) * head_dim
    return int(places * numbers * 2 * number + 3 * 4 * text.vocab_size)


def prefill_bytes(config: Any, tokens: int, number: int) -> int:
    """Count the bytes of activations while ``tokens`` tokens are prefilled without gradients: in one layer the residual
    stream, attention's inputs and outputs, and the three vectors of a gated feed-forward."""
    text = config.get_text_config(decoder=True)
    return int(tokens * (6 * text.hidden_size + 3 * inner_width(text)) * number)


def attention_bytes(heads: int, width: int, tokens: int, places: int, number: int) -> int:
    """Count the bytes of a layer's attention while one row reads ``tokens`` more tokens after those that it keeps, at
    ``places`` in all: scores, their softmax, at most two biases, and three copies of its queries."""
    return heads * tokens * (4 * places + 3 * width) * number


def rows_attending(heads: int, width: int, tokens: int, places: int, number: int, device: torch.device) -> int:
    """The rows whose attention is computed at a time, as :data:`PREFILL_PARTS` says: one at least. Arguments are those
    of :func:`attention_bytes`."""
    return max(1, working_bytes(device) // PREFILL_PARTS // attention_bytes(heads, width, tokens, places, number))


def prompts_prefilled(config: Any, longest: int, number: int, within: int) -> int:
    """The number of prompts of ``longest`` tokens that are prefilled at a time, as :data:`PREFILL_PARTS` says: one at
    least."""
    return max(1, within // PREFILL_PARTS // max(1, prefill_bytes(config, longest, number)))


@dataclass(frozen=True)
class Room:
    """The memory for the completions that are drawn at a time.

    Attributes:
        config: the model's.
        longest: tokens of the longest prompt.
        steps: the most tokens of a completion.
        number: bytes of a number in the cache.
        within: bytes for all completions.
        refills: whether later groups take the rows of completions that ended. They begin at the slot that the others
            have reached, so a row may have as many places again as a completion.
    """

    config: Any
    longest: int
    steps: int
    number: int
    within: int
    refills: bool = True

    @staticmethod
    def of(policy: Policy, prompt_ids: Sequence[Ints], steps: int, slots: bool = True) -> Room:
        """The room of a policy's sampler: the built-in one with ``slots``, or ``generate``."""
        number, longest = cached_number(policy.compute_dtype, slots), max(map(len, prompt_ids))
        return Room(policy.model.config, longest, steps, number, working_bytes(policy.device), slots)

    def parts(self, repeats: int) -> int:
        """The number of parts, drawn as groups of their own, in which ``repeats`` completions of a prompt fit.

        A part has ⌈repeats / parts⌉ completions. If not even one fits, each is a part.
        """
        if repeats * self._row(self.steps) <= self.within:
            return 1
        return math.ceil(repeats / max(1, self.within // self._row_in_turns()))

    def at_a_time(self, groups: int, repeats: int, most: int) -> tuple[int, int]:
        """The number of ``groups``, each of ``repeats`` completions, drawn at a time, and the bytes of a completion.

        These are at most ``most`` completions, but one group at least.
        """
        a_row = self._row(self.steps)
        if groups * repeats > min(most, self.within // a_row):
            a_row = self._row_in_turns()
        return max(1, min(groups, min(most, self.within // a_row) // repeats)), a_row

    def keeps(self, rows: int) -> bool:
        """Whether so many completions take at most half, so that keys and values stay for another turn."""
        return rows * self._row(self.steps - 1) <= self.within // 2  # a row's last token is fed to nothing

    def _row(self, drawn: int) -> int:
        return row_bytes(self.config, self.longest + drawn, self.number)

    def _row_in_turns(self) -> int:
        return self._row(2 * self.steps if self.refills else self.steps)


class SlotLayer(DynamicLayer):
    """The slots of one layer: [rows, heads, capacity, width], the first ``used`` of them filled."""

    keys: Any
    values: Any

    def __init__(self, capacity: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.capacity, self.used = capacity, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        keys, values = (x.new_zeros(*x.shape[:2], self.capacity, x.shape[3]) for x in (key_states, value_states))
        self.take(keys, values, 0)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, self.used = self.used, self.used + key_states.shape[2]
        self.keys[:, :, start : self.used] = key_states
        self.values[:, :, start : self.used] = value_states
        return self.keys[:, :, : self.used], self.values[:, :, : self.used]

    def get_seq_length(self) -> int:
        return self.used

    def take(self, keys: Tensor, values: Tensor, used: int) -> None:
        """Take these as the slots: [rows, heads, capacity, width]."""
        self.dtype, self.device = keys.dtype, keys.device
        self.keys, self.values, self.used = keys, values, used
        self.is_initialized = True

    def map(self, of_rows: Callable[[Tensor], Tensor]) -> None:
        self.keys, self.values = of_rows(self.keys), of_rows(self.values)


class SlotCache(Cache):
    """The slots of all layers of a model, ``capacity`` per row."""

    def __init__(self, model: Any, capacity: int) -> None:
        n_layers = model.config.get_text_config(decoder=True).num_hidden_layers
        self.capacity = capacity
        self.slots = [SlotLayer(capacity) for _ in range(n_layers)]
        super().__init__(layers=list(self.slots))

    def map(self, of_rows: Callable[[Tensor], Tensor]) -> None:
        """Replace keys and values: ``of_rows`` takes and returns [rows, heads, slots, width]."""
        for layer in self.slots:
            layer.map(of_rows)

    def select(self, kept: Tensor) -> None:
        """Keep only the rows of these indices, in their order."""
        used = self.get_seq_length()

        def selected(rows: Tensor) -> Tensor:
            out = rows.new_empty(len(kept), *rows.shape[1:])
            out[:, :, :used] = rows[:, :, :used].index_select(0, kept)
            return out

        self.map(selected)

    def grown(self, by: int = 1) -> tuple[list[Tensor], list[Tensor]]:
        """Use so many more slots. Returns the used keys and values of each layer."""
        for layer in self.slots:
            layer.used += by
        used = self.get_seq_length()
        keys, values = self.all_slots()
        return [tensor[:, :, :used] for tensor in keys], [tensor[:, :, :used] for tensor in values]

    def all_slots(self) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of each layer, unused slots included."""
        keys = [layer.keys for layer in self.slots if layer.keys is not None]
        values = [layer.values for layer in self.slots if layer.values is not None]
        return keys, values

    def put_before(self, old: SlotCache, span: int, width: int) -> None:
        """Move the rows of ``old``, the last ``span`` slots of each, before these. All rows then end at slot
        ``width``, and ``old`` is empty."""
        self.capacity += width - self.get_seq_length()
        for mine, theirs in zip(self.slots, old.slots, strict=True):
            joined = []
            for before, after in ((theirs.keys, mine.keys), (theirs.values, mine.values)):
                both = after.new_zeros(len(before) + len(after), after.shape[1], self.capacity, after.shape[3])
                both[: len(before), :, width - span : width] = before[:, :, theirs.used - span : theirs.used]
                both[len(before) :, :, width - mine.used : width] = after[:, :, : mine.used]
                joined.append(both)
            (mine.keys, mine.values), mine.capacity, mine.used = joined, self.capacity, width
            theirs.keys = theirs.values = None  # layer by layer, so that no cache lies in memory twice


class KeptRows:
    """Keys and values of completions that may go on, by their tokens.

    Args:
        parts: each has some rows: their numbers, their first slots, and per layer keys and values of the slots used.
        rows: the tokens of each row, by number: its prompt and its completion, whose last token is fed to nothing.
    """

    def __init__(self, parts: Sequence[KeptPart], rows: Sequence[Ints]) -> None:
        self.parts = parts
        places = [(part, row, n) for part, kept in enumerate(parts) for row, n in enumerate(kept.number.tolist())]
        self.place = {rows[n].tobytes(): (part, row) for part, row, n in places}
        self.lengths = sorted({len(rows[n]) for _, _, n in places}, reverse=True)

    def find(self, prompts: Sequence[Ints]) -> list[tuple[int, int, int]] | None:
        """The longest row that begins each prompt: its part, place and tokens with keys; None if one has none."""
        found = []
        for ids in prompts:
            begun = (n for n in self.lengths if n <= len(ids) and ids[:n].tobytes() in self.place)
            if not (n := next(begun, 0)):
                return None
            found.append((*self.place[ids[:n].tobytes()], n - 1))
        return found

    def taken(
        self, found: Sequence[tuple[int, int, int]], skipped_N: Sequence[int], n: int, capacity: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values of each layer, [rows, heads, capacity, width], with the first ``n`` slots filled.

        Args:
            skipped_N: the slots before each row's first token.
        """
        part_N, row_N, _ = np.array(found).T
        device = self.parts[0].start.device
        skipped = torch.tensor(skipped_N, device=device)
        moves = []
        for at, part in enumerate(self.parts):
            mine = torch.from_numpy(np.flatnonzero(part_N == at)).to(device)
            if len(mine):
                rows = torch.from_numpy(row_N).to(device)[mine]
                slot = torch.arange(n, device=device) + (part.start[rows] - skipped[mine])[:, None]
                moves.append((part, mine, rows[:, None, None], slot[:, None]))

        @functools.cache
        def lines(move: int, n_heads: int, most: int) -> Tensor:
            """The places of a part's slots in keys or values of ``n_heads`` heads and ``most`` slots."""
            _, _, rows, slot = moves[move]
            heads = torch.arange(n_heads, device=device)[:, None]
            return ((rows * n_heads + heads) * most + slot.clamp(0, most - 1)).flatten()

        for number, layer in enumerate(self.parts[0].layers):
            sides = []
            for side, like in enumerate(layer):  # keys and values differ in shape, and so do layers
                n_heads, width = like.shape[1::2]
                slots = like.new_zeros(len(found), n_heads, capacity, width)
                for move, (part, mine, _, _) in enumerate(moves):
                    held = part.layers[number][side]
                    moved = held.view(-1, width).index_select(0, lines(move, n_heads, held.shape[2]))
                    slots[:, :, :n].index_copy_(0, mine, moved.view(len(mine), n_heads, n, width))
                sides.append(slots)
            yield sides[0], sides[1]


class KeptPart(NamedTuple):
    """Rows that left a batch together."""

    number: Tensor
    start: Tensor
    layers: list[tuple[Tensor, Tensor]]
