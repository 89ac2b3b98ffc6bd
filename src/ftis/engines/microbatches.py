"""The split of a step's rows into micro-batches: within a budget, at the least cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ftis.config import PeerConfig
from ftis.engines.devices import device_kind, working_bytes
from ftis.engines.models import inner_width
from ftis.policy import resolve_dtype
from ftis.rollouts import Ints, Rows

FIXED_COST = {"cpu": 2e8, "cuda": 8e12}
"""The cost of a micro-batch without tokens, in parameters x tokens, by kind of device. On a CPU that is 2,000
tokens of a model of 100,000 parameters, or 14 tokens of a model of 14 million. On an H200 launches take 0.16 s a
micro-batch of SmolLM2-135M: as long as 59,000 tokens at 300 TFLOP/s."""

GRADIENT_COST = 50.0
"""The cost of adding to every weight's gradient, in tokens: measured with 135 million parameters on a CPU."""

MOST_TOKENS = {"cpu": 16384, "cuda": 32768}
"""Padded tokens of a micro-batch, if the recipe gives no number and memory holds more."""


@dataclass(frozen=True)
class Microbatches:
    """The :data:`~ftis.policy.TokenSplit` of least cost for a model that runs each prompt once, or once per row.

    Attributes:
        padding_cost: of a padded place, in tokens. Below 1 a micro-batch has each distinct prompt once, and
            only attention computes padded places.
        overhead: the fixed cost of a micro-batch, in padded places.
        most: padded tokens of a micro-batch if no budget is given.
    """

    padding_cost: float
    overhead: float
    most: int = MOST_TOKENS["cpu"]

    def __call__(self, prompt_ids: Sequence[Ints], completion_ids: Sequence[Ints], budget: int) -> list[Rows]:
        prompt_length_N = np.array([len(ids) for ids in prompt_ids], dtype=np.int64)
        length_N = prompt_length_N + np.array([len(ids) for ids in completion_ids], dtype=np.int64)
        if self.padding_cost < 1:
            numbers: dict[bytes, int] = {}
            prompt_N = np.array([numbers.setdefault(ids.tobytes(), len(numbers)) for ids in prompt_ids], dtype=np.int64)
        else:
            prompt_N = np.arange(len(prompt_ids))
        again_N = prompt_length_N * (1 / self.padding_cost - 1)  # each row counts its prompt at the cost of padding
        return cheapest(length_N, prompt_N, again_N, budget or self.most, self.overhead)


def fit(padding_cost: float, n_parameters: int, device: torch.device, model: Any, peer: PeerConfig) -> Microbatches:
    """The split for a model of this configuration that pays ``padding_cost`` for a padded place."""
    kind = device_kind(device)
    most = max(1, min(MOST_TOKENS[kind], working_bytes(device) // (kept_bytes(model, peer, device) or 1)))
    return Microbatches(padding_cost, (GRADIENT_COST + FIXED_COST[kind] / n_parameters) / padding_cost, most)


def kept_bytes(model: Any, peer: PeerConfig, device: torch.device) -> int:
    """Estimate the bytes a token keeps for the backward pass of a model trained in full. An adapter keeps a third less.

    A layer keeps about eight vectors of its width, and four of its feed-forward width for each expert of the token.
    With gradient checkpointing it keeps one vector of its width, and one layer at a time keeps the rest. 0 if the
    configuration has other names for these.
    """
    text = model.get_text_config(decoder=True)
    width, layers = getattr(text, "hidden_size", None), getattr(text, "num_hidden_layers", None)
    if not isinstance(width, int) or not isinstance(layers, int):
        return 0
    inner = inner_width(text)
    experts = getattr(text, "num_experts_per_tok", None) or 1
    a_layer = 8 * width + 4 * inner * int(experts)
    numbers = layers * width + a_layer if peer.gradient_checkpointing else layers * a_layer
    return numbers * resolve_dtype(peer.dtype, device).itemsize


def cheapest(
    length_N: npt.NDArray[np.int64],
    prompt_N: npt.NDArray[np.int64],
    again_N: npt.NDArray[np.floating],
    budget: int,
    overhead: float,
) -> list[Rows]:
    """Split rows, prompt after prompt, the prompts with the longest rows first, into the cheapest micro-batches.

    A micro-batch costs its padded tokens, ``overhead``, and what it costs to run a prompt again that the micro-batch
    before it has too. A row longer than the budget is a micro-batch alone.

    Args:
        length_N: of each row, its prompt included.
        prompt_N: the number of its prompt, below N.
        again_N: the cost of running its prompt in one more micro-batch.
        budget: the most padded tokens of a micro-batch.

    Returns the rows of each micro-batch, longest first.
    """
    n = len(length_N)
    together = n * int(length_N.max(initial=0))
    if 0 < together <= budget and together - int(length_N.sum()) < overhead:  # no split saves what it costs
        return [np.lexsort((np.arange(n), -length_N))]
    longest_P = np.zeros(n, dtype=np.int64)
    np.maximum.at(longest_P, prompt_N, length_N)
    order = np.lexsort((-length_N, prompt_N, -longest_P[prompt_N]))
    length, prompt = length_N[order], prompt_N[order]
    again = np.where(prompt == np.append(-1, prompt[:-1])[:n], again_N[order], 0.0)
    cost = np.zeros(n + 1)  # of the best split of the rows from i on
    count = np.zeros(n, dtype=np.int64)  # rows in that split's first micro-batch
    for i in range(n - 1, -1, -1):
        ahead = np.maximum.accumulate(length[i : i + max(1, budget // max(1, int(length[i])))])
        padded = np.arange(1, len(ahead) + 1) * ahead
        most = max(1, int(np.searchsorted(padded, budget, side="right")))
        costs = padded[:most] + cost[i + 1 : i + most + 1]
        best = most - 1 - int(np.argmin(costs[::-1]))  # ties: the largest
        cost[i], count[i] = costs[best] + overhead + again[i], best + 1
    batches: list[Rows] = []
    start = 0
    while start < n:
        rows = order[start : start + count[start]]
        batches.append(rows[np.lexsort((rows, -length_N[rows]))])
        start += count[start]
    return batches
