"""Rows that begin with the same prompts, run through a model as one line of tokens.

All of a decoder but its attention treats each token by itself. So the tokens of a micro-batch's rows can go through
it in one line [1, M], without padding and with each distinct prompt once, however many completions it has; attention
alone lays them out as rows, and gives its results back to the line. The gradients are those of the rows.

Whether a model can be run like this is found out by asking: see :func:`packs`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ftis.rollouts import Ints

TOLERANCE = 1e-3
"""How far logits may be from those of rows by themselves, of their largest, for a model to be run in one line."""

WEIGHTS_AT_ONCE = 2**22
"""Up to so many attention weights a CPU is faster with plain products than with torch's kernel, which spares them."""

ATTENTION = "ftis_packed"


@dataclass(frozen=True)
class Packed:
    """Where the M tokens of a line, prompts first, are in n rows of at most L places, and the other way round.

    A completion's last token predicts nothing, and is not there. Rows are padded on the right, where under causal
    attention nothing that counts sees the padding.

    Attributes:
        input_ids_1M: int64.
        position_1M: int64, each token's position in its rows.
        token_nL: int64, the token at each place of the rows; any beyond a row's end.
        place_M: int64, the first place of each token, numbered through all rows.
        place_QK, counts_QK: all places of the Q tokens of prompts, and which of the K entries are such places.
        source_T: int64, for each token of all completions, row after row, the token that predicts it.
    """

    input_ids_1M: Tensor
    position_1M: Tensor
    token_nL: Tensor
    place_M: Tensor
    place_QK: Tensor
    counts_QK: Tensor
    source_T: Tensor


def pack(prompt_ids: Sequence[Ints], completion_ids: Sequence[Ints], device: torch.device) -> Packed:
    """The rows ``prompt_ids[i] + completion_ids[i]`` in one line."""
    numbers: dict[bytes, int] = {}
    prompt_n = np.array([numbers.setdefault(ids.tobytes(), len(numbers)) for ids in prompt_ids])
    first_row = np.unique(prompt_n, return_index=True)[1]
    prompts = [prompt_ids[row] for row in first_row]
    inputs = [ids[:-1] for ids in completion_ids]
    prompt_length, prompt_start = _extents(prompts, 0)
    length_n, start_n = _extents(inputs, int(prompt_length.sum()))
    before_n = prompt_length[prompt_n]
    end_n = before_n + length_n

    n, longest = len(inputs), int(end_n.max())
    t = np.arange(longest)
    within_prompt, within = t < before_n[:, None], t < end_n[:, None]
    in_prompt, in_completion = prompt_start[prompt_n][:, None] + t, (start_n - before_n)[:, None] + t
    token_nL = np.where(within_prompt, in_prompt, np.where(within, in_completion, 0))

    place_nL = np.arange(n * longest).reshape(n, longest)
    place_M = np.empty(prompt_length.sum() + length_n.sum(), dtype=np.int64)
    place_M[token_nL[within][::-1]] = place_nL[within][::-1]  # of several the first, being written last
    repeats = np.bincount(prompt_n)
    place_QK = np.zeros((prompt_length.sum(), repeats.max()), dtype=np.int64)
    counts_QK = np.zeros(place_QK.shape, dtype=bool)
    nth_n = np.empty(n, dtype=np.int64)  # a row is the how manyth of its prompt
    nth_n[np.argsort(prompt_n, kind="stable")] = np.concatenate([np.arange(k) for k in repeats])
    of_prompt = token_nL[within_prompt], np.broadcast_to(nth_n[:, None], token_nL.shape)[within_prompt]
    place_QK[of_prompt], counts_QK[of_prompt] = place_nL[within_prompt], True

    position_M = np.empty_like(place_M)
    position_M[token_nL[within]] = np.broadcast_to(t, token_nL.shape)[within]
    predicts = within & (t >= before_n[:, None] - 1)

    def tensor(array: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return Packed(
        input_ids_1M=tensor(np.concatenate([*prompts, *inputs]).astype(np.int64))[None],
        position_1M=tensor(position_M)[None],
        token_nL=tensor(token_nL),
        place_M=tensor(place_M),
        place_QK=tensor(place_QK),
        counts_QK=tensor(counts_QK),
        source_T=tensor(token_nL[predicts]),
    )


def _extents(rows: Sequence[Ints], start: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Lengths of rows laid end to end from ``start`` on, and where each begins."""
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    return lengths, start + np.cumsum(lengths) - lengths


@contextmanager
def packed_attention(model: Any) -> Iterator[None]:
    """While this lasts, ``model(..., packed=...)`` runs lines; hold it around the backward pass too."""
    config = model.config
    usual, config._attn_implementation = config._attn_implementation, ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = usual


def run(model: Any, packed: Packed) -> Tensor:
    """What ``model`` gives for each completion token at the one that predicts it: its logits [T, V]."""
    output: Tensor = model(
        input_ids=packed.input_ids_1M,
        position_ids=packed.position_1M,
        use_cache=False,
        logits_to_keep=packed.source_T,
        packed=packed,
    ).logits[0]
    return output


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    packed: Packed | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each row: query, key and value [1, heads, M, width] → [1, M, heads, width]."""
    if packed is None:
        raise TypeError("the model does not hand its keyword arguments to its attention")
    (heads, _, width), kv_heads = query.shape[1:], key.shape[1]
    # Under autocast rotations leave queries and keys in float32, and torch's attention would cast them.
    line_MhD = torch.cat([query[0].to(value.dtype), key[0].to(value.dtype), value[0]]).transpose(0, 1)
    n, length = packed.token_nL.shape
    rows = _ToRows.apply(line_MhD.flatten(1), packed).view(n, length, -1, width)  # type: ignore[no-untyped-call]
    q, k, v = rows.split([heads, kv_heads, kv_heads], 2)
    if rows.device.type == "cpu" and n * heads * length**2 <= WEIGHTS_AT_ONCE:
        out = _plain_attention(q, k, v, width**-0.5 if scaling is None else scaling)
    else:
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=heads != kv_heads)
        out = out.transpose(1, 2)
    line = _ToLine.apply(out.reshape(n * length, -1), packed)  # type: ignore[no-untyped-call]
    return line.view(1, -1, heads, width), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)


def _plain_attention(q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
    """The same by two products and a softmax; all [n, L, heads, width]."""
    n, length, heads, width = q.shape
    kv_heads = k.shape[2]
    # The queries that share a key are to the products one head's queries.
    q = q.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).reshape(n * kv_heads, -1, width)
    k, v = (part.transpose(1, 2).reshape(n * kv_heads, length, width) for part in (k, v))
    weight = torch.bmm(q * scaling, k.transpose(1, 2)).view(n * kv_heads, -1, length, length)
    later = torch.full((length, length), -torch.inf, dtype=weight.dtype).triu_(1)
    out = torch.bmm((weight + later).softmax(-1).view(n * kv_heads, -1, length), v)
    return out.view(n, kv_heads, -1, length, width).permute(0, 3, 1, 2, 4).reshape(n, length, heads, width)


class _ToRows(torch.autograd.Function):
    """[M, ·] → [n · L, ·]: each token to all its places. Backward, a prompt's token gets the sum over its rows.

    Written by hand since index_select's own backward pass adds with atomics on a GPU: another sum each time.
    """

    @staticmethod
    def forward(ctx: Any, line: Tensor, packed: Packed) -> Tensor:
        ctx.packed = packed
        return line.index_select(0, packed.token_nL.flatten())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        packed: Packed = ctx.packed
        of_rows = grad.index_select(0, packed.place_QK.flatten()).view(*packed.place_QK.shape, -1)
        of_prompts = (of_rows * packed.counts_QK.unsqueeze(-1)).sum(1)
        return torch.cat([of_prompts, grad.index_select(0, packed.place_M[len(of_prompts) :])]), None


class _ToLine(torch.autograd.Function):
    """[n · L, ·] → [M, ·]: each token from its first place."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, packed: Packed) -> Tensor:
        ctx.packed, ctx.places = packed, len(rows)
        return rows.index_select(0, packed.place_M)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.new_zeros(ctx.places, grad.shape[1]).index_copy_(0, ctx.packed.place_M, grad), None


def full_attention_decoder(model: Any) -> bool:
    """Whether every layer of ``model`` attends to all that came before, by torch's attention and without ALiBi."""
    config = model.config
    if config.is_encoder_decoder or getattr(config, "alibi", False):
        return False
    if config._attn_implementation != "sdpa":  # others read a mask of visible places in their own ways, if at all
        return False
    layers = DynamicCache(config=config).layers
    return bool(layers) and all(type(layer) is DynamicLayer for layer in layers)


@torch.no_grad()
def packs(model: Any, device: torch.device) -> bool:
    """Whether lines give what rows by themselves do: a decoder with full attention, and asked on two short rows."""
    if not full_attention_decoder(model):
        return False
    vocab_size = model.get_input_embeddings().weight.shape[0]
    prompt, ends = np.arange(5) % vocab_size, [np.arange(5, 9) % vocab_size, np.arange(9, 12) % vocab_size]
    try:
        with packed_attention(model):
            found = run(model, pack([prompt, prompt], ends, device))
    except (TypeError, ValueError, AttributeError, RuntimeError):
        return False
    alone = []
    for end in ends:
        ids = torch.from_numpy(np.concatenate([prompt, end[:-1]]))[None].to(device)
        alone.append(model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :])
    expected = torch.cat(alone).float()
    return bool((found.float() - expected).abs().max() <= TOLERANCE * expected.abs().max())
