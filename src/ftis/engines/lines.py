"""Rows that begin with the same prompts, run through a model as one line of tokens.

Only a decoder's attention mixes tokens. So the tokens of a micro-batch's rows can go through the rest in one line [1,
S], without padding, and with each distinct prompt once, however many completions it has. A long beginning that all
prompts share, such as worked examples, is there once too. Attention lays the tokens out as rows, and puts its results
back into the line. The gradients are those of the rows.

:func:`runs_lines` checks whether a model can be run like this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding, scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ftis.engines.kept import callable_as_kept, holds_as_kept, within_tolerance
from ftis.engines.lengths import BySwitch, Window, attention_windows, switch_of
from ftis.engines.models import UNABLE
from ftis.engines.rows import PaddedRows, shared_beginning
from ftis.policy import Forward
from ftis.rollouts import Ints

WEIGHTS_AT_ONCE = 2**22
"""The most attention weights for which plain products are faster on a CPU than torch's kernel, which never stores them
all."""

ATTENTION = "ftis_line"


@dataclass(frozen=True)
class Line:
    """The S tokens of a line, prompts first, and their places in n rows of at most L places.

    A completion's last token predicts nothing, so it is left out. Rows are padded on the right; under causal attention
    no token sees the padding.

    Attributes:
        input_ids_1S: int64.
        position_1S: int64, each token's position in its rows.
        token_nL: int64, the index in the line of the token at each place of the rows; 0 beyond a row's end.
        place_S: int64, the first place of each token, counted through all rows.
        source_Q: int64, the tokens that predict a completion token; a prompt's last token predicts several.
        source_M: int64, the index in ``source_Q`` of the token that predicts each completion token, row after row.
        windows: of each layer.
    """

    input_ids_1S: Tensor
    position_1S: Tensor
    token_nL: Tensor
    place_S: Tensor
    source_Q: Tensor
    source_M: Tensor
    windows: tuple[Window, ...]


def lay_out(
    prompt_ids: Sequence[Ints], completion_ids: Sequence[Ints], device: torch.device, windows: tuple[Window, ...]
) -> Line:
    """The rows ``prompt_ids[i] + completion_ids[i]`` in one line."""
    numbers: dict[bytes, int] = {}
    prompt_n = np.array([numbers.setdefault(ids.astype(np.int64).tobytes(), len(numbers)) for ids in prompt_ids])
    prompts = [prompt_ids[row] for row in np.unique(prompt_n, return_index=True)[1]]
    inputs = [ids[:-1] for ids in completion_ids]
    shared = shared_beginning(prompts)
    own = [prompt[shared:] for prompt in prompts]
    own_length, own_start = _extents(own, shared)
    length_n, start_n = _extents(inputs, shared + int(own_length.sum()))
    before_n = shared + own_length[prompt_n]
    end_n = before_n + length_n

    n, longest = len(inputs), int(end_n.max())
    t = np.arange(longest)
    within_prompt, within = t < before_n[:, None], t < end_n[:, None]
    in_prompt = np.where(t < shared, t, (own_start - shared)[prompt_n][:, None] + t)
    in_completion = (start_n - before_n)[:, None] + t
    token_nL = np.where(within_prompt, in_prompt, np.where(within, in_completion, 0))

    token, place = token_nL[within], np.arange(n * longest).reshape(n, longest)[within]
    place_S = np.empty(shared + own_length.sum() + length_n.sum(), dtype=np.int64)
    place_S[token[::-1]] = place[::-1]  # the first of several places, since it is written last
    source_Q, source_M = np.unique(token_nL[within & (t >= before_n[:, None] - 1)], return_inverse=True)

    def tensor(array: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return Line(
        input_ids_1S=tensor(np.concatenate([prompts[0][:shared], *own, *inputs]).astype(np.int64))[None],
        position_1S=tensor(place_S % longest)[None],
        token_nL=tensor(token_nL),
        place_S=tensor(place_S),
        source_Q=tensor(source_Q),
        source_M=tensor(source_M),
        windows=windows,
    )


def _extents(rows: Sequence[Ints], start: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Lengths of rows laid end to end from ``start`` on, and where each begins."""
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    return lengths, start + np.cumsum(lengths) - lengths


@contextmanager
def line_attention(model: Any) -> Iterator[None]:
    """A context in which ``model(..., line=...)`` runs lines. It must span the backward pass too."""
    config = model.config.get_text_config(decoder=True)
    usual, config._attn_implementation = config._attn_implementation, ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = usual


def run_line(model: Any, line: Line) -> Tensor:
    """The output of ``model`` at the token that predicts each completion token: [M, X]."""
    output = model(
        input_ids=line.input_ids_1S,
        position_ids=line.position_1S,
        use_cache=False,
        logits_to_keep=line.source_Q,
        line=line,
    ).logits[0]
    return _taken(output, line.source_M)


def _taken(x: Tensor, index: Tensor) -> Tensor:
    """``x[index]`` along the first axis, with a deterministic gradient where entries are taken several times.

    Indexing, and index_select on a GPU, add such gradients in the order in which threads come.
    """
    return embedding(index, x)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    line: Line | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each row: query, key and value [1, heads, S, width] → [1, S, heads, width].

    Raises:
        TypeError: the model has other attention.
    """
    more = [name for name in ("softcap", "position_bias", "s_aux") if kwargs.get(name) is not None]
    if line is None or attention_mask is not None or more:
        raise TypeError("the model does not pass its keyword arguments to its attention, or needs more of it")
    window = line.windows[module.layer_idx] if any(line.windows) else None
    if window is not None and kwargs.get("sliding_window") != window:
        raise TypeError(f"a layer with a window of {window} tokens passes another to its attention")
    (heads, _, width), kv_heads = query.shape[1:], key.shape[1]
    # Under autocast, rotations leave queries and keys in float32, and torch's attention would cast them.
    # [S, heads, width]: queries, keys and values are laid out in rows together.
    joined = torch.cat([query[0].to(value.dtype), key[0].to(value.dtype), value[0]]).transpose(0, 1)
    n, length = line.token_nL.shape
    rows = _taken(joined.flatten(1), line.token_nL.flatten()).view(n, length, -1, width)
    q, k, v = rows.split([heads, kv_heads, kv_heads], 2)
    if rows.device.type == "cpu" and n * heads * length**2 <= WEIGHTS_AT_ONCE:
        out = _plain_attention(q, k, v, width**-0.5 if scaling is None else scaling, window)
    else:
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        seen = None
        if window is not None and window < length:
            seen = torch.ones(length, length, dtype=torch.bool, device=q.device).tril().triu(1 - window)
        # For grouped heads with a mask, or in float32, a GPU would store all weights.
        if seen is not None or (q.device.type == "cuda" and q.dtype == torch.float32):
            k, v = (part.repeat_interleave(heads // kv_heads, 1) for part in (k, v))
        causal, grouped = seen is None, q.shape[1] != k.shape[1]
        out = scaled_dot_product_attention(q, k, v, seen, is_causal=causal, scale=scaling, enable_gqa=grouped)
        out = out.transpose(1, 2)
    of_tokens = out.reshape(n * length, -1).index_select(0, line.place_S)  # no place occurs twice
    return of_tokens.view(1, -1, heads, width), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)


def _plain_attention(q: Tensor, k: Tensor, v: Tensor, scaling: float, window: Window) -> Tensor:
    """Causal attention by two products and a softmax; q, k, v and the result are [n, L, heads, width]."""
    n, length, heads, width = q.shape
    kv_heads = k.shape[2]
    # To the products, the queries of one key head are one head's queries.
    q = q.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).reshape(n * kv_heads, -1, width)
    k, v = (part.transpose(1, 2).reshape(n * kv_heads, length, width) for part in (k, v))
    weight = torch.bmm(q * scaling, k.transpose(1, 2)).view(n * kv_heads, -1, length, length)
    unseen = torch.full((length, length), -torch.inf, dtype=weight.dtype).triu_(1)
    if window is not None and window < length:
        unseen += torch.full_like(unseen, -torch.inf).tril_(-window)
    out = torch.bmm((weight + unseen).softmax(-1).view(n * kv_heads, -1, length), v)
    return out.view(n, kv_heads, -1, length, width).permute(0, 3, 1, 2, 4).reshape(n, length, heads, width)


@dataclass(frozen=True)
class Lines(Forward):
    """Rows run as one line of tokens, each distinct prompt once."""

    model: Any
    device: torch.device
    windows: tuple[Window, ...]
    padding_cost: float = 0.05
    """Only attention computes padded places."""

    def held(self) -> AbstractContextManager[None]:
        return line_attention(self.model)

    def __call__(self, prompts: Sequence[Ints], completions: Sequence[Ints]) -> Tensor:
        return run_line(self.model, lay_out(prompts, completions, self.device, self.windows))


def fit(model: Any, device: torch.device) -> Forward:
    """The way in which a model's rows are run: in lines where it can be, and each row as if it were alone.

    Raises:
        ModelError: a row's numbers depend on its very length.
    """
    line = holds_as_kept(model, lambda: runs_lines(model, device))
    with callable_as_kept(model):
        switch = switch_of(model, device)
    forward = Lines(model, device, attention_windows(model)) if line else PaddedRows(model, device)
    return forward if switch is None else BySwitch(forward, switch, forward.padding_cost)


@torch.no_grad()
def runs_lines(model: Any, device: torch.device) -> bool:
    """Whether ``model`` is a decoder of known windows, and a line gives two short rows the logits they have alone."""
    windows = attention_windows(model)
    if not windows:
        return False
    vocab_size = model.get_input_embeddings().weight.shape[0]
    prompt, ends = np.arange(5) % vocab_size, [np.arange(5, 9) % vocab_size, np.arange(9, 12) % vocab_size]
    try:
        with line_attention(model):
            found = run_line(model, lay_out([prompt, prompt], ends, device, windows)).float()
    except UNABLE:
        return False
    alone = []
    for end in ends:
        ids = torch.from_numpy(np.concatenate([prompt, end[:-1]]))[None].to(device)
        alone.append(model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :])
    expected = torch.cat(alone).float()
    if found.shape != expected.shape:
        return False
    return within_tolerance(model, found, expected)
