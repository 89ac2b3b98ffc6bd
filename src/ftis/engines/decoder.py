"""A decoding step of a decoder such as Llama's, Qwen's or Gemma's in few operations.

A decoding step adds one token to each row. It does little arithmetic in many small operations, and on small models
calling transformers' modules takes longer than the operations. Here a layer's weights are joined and cast once per
batch of completions (queries, keys and values in one matrix; gate and up in another; adapters merged in), and a layer
takes some twenty operations.

:func:`fuses` checks the parts of a model's layers, and compares one step's logits with the model's own.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, scaled_dot_product_attention
from transformers import DynamicCache

from ftis.engines.kept import holds_as_kept, within_tolerance
from ftis.engines.lengths import Window, attention_windows, named_lengths
from ftis.engines.linear import Linear
from ftis.engines.slots import rows_attending
from ftis.policy import positions_of

BLOCKS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
OUTPUT_NORMS = {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
"""The other norms of Gemma's layers: attention and MLP have a norm before them and one after them."""

PARTS = {
    "self_attn": {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"},
    "mlp": {"gate_proj", "up_proj", "down_proj", "act_fn"},
}
"""The parts of a layer's attention and of its MLP that :class:`FusedDecoder` computes."""

CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


@dataclass(frozen=True)
class _Layer:
    """A layer's weights. The weight and √n of a norm over n numbers are multiplied into the weights after it.

    Attributes:
        out_norm, down_norm: norms of attention's and the MLP's output; None without such a norm.
        rotation: index of the layer's rotary embedding.
    """

    window: Window
    rotation: int
    out_norm: Tensor | None
    down_norm: Tensor | None
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear
    gate_up: Linear
    down: Linear


class FusedDecoder:
    """A copy of the weights of ``model``, joined and cast to ``dtype``, and its decoding step.

    The residual stream, norms and rotations stay in float32, as under autocast.

    Args:
        place_P: the places in a row at which tokens are added, int64 [P].
    """

    def __init__(self, model: Any, dtype: torch.dtype, place_P: Tensor) -> None:
        inner, head = _inner(model), model.get_output_embeddings()
        attention = inner.layers[0].self_attn
        self.dtype = dtype
        self.width = int(attention.head_dim)
        self.n_query = _base(attention.q_proj).out_features // self.width
        self.n_key = _base(attention.k_proj).out_features // self.width
        self.activation = inner.layers[0].mlp.act_fn
        self.embedding = inner.embed_tokens.weight
        self.embedding_scale = getattr(inner.embed_tokens, "embed_scale", None)
        device = self.embedding.device
        epsilon = float(getattr(inner.norm, "variance_epsilon", None) or inner.norm.eps)
        hidden = self.embedding.shape[1]
        self.floors = {n: torch.tensor((epsilon * n) ** 0.5, device=device) for n in (hidden, self.width)}
        self.norm = _scale_of(inner.norm)
        self.head = _joined([head], dtype)
        kinds = _rotations(inner)
        rotations = [(layer.self_attn.layer_type,) if len(kinds) > 1 else kinds[0] for layer in inner.layers]
        self.layers = [
            self._layer(layer, window, kinds.index(rotation))
            for layer, window, rotation in zip(inner.layers, attention_windows(model), rotations, strict=True)
        ]
        self.rotary, self.kinds = inner.rotary_emb, kinds
        self.reach(place_P)

    def reach(self, place_P: Tensor) -> None:
        """Take other places than those given at first."""
        # rotate_half(x) is x rolled by half with its first half negated; here the sine has the sign.
        sign = torch.ones(self.width, device=self.embedding.device)
        sign[: self.width // 2] = -1
        places = place_P[None].to(self.embedding.device)
        angles = [self.rotary(self.embedding[:1].float(), places, *kind) for kind in self.kinds]
        self.turns = [(cos[0].float().unsqueeze(1), (sin[0].float() * sign).unsqueeze(1)) for cos, sin in angles]

    def _layer(self, layer: Any, window: Window, rotation: int) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        scale = float(attention.scaling)  # of the queries: in their norm's weight if they have one
        q_norm = _scale_of(getattr(attention, "q_norm", None), scale)
        qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
        before, after = _scale_of(layer.input_layernorm), _scale_of(layer.post_attention_layernorm)
        out_norm = down_norm = None
        if hasattr(layer, "pre_feedforward_layernorm"):
            out_norm, after = after, _scale_of(layer.pre_feedforward_layernorm)
            down_norm = _scale_of(layer.post_feedforward_layernorm)
        return _Layer(
            window,
            rotation,
            out_norm,
            down_norm,
            _joined(qkv, self.dtype, before, 1.0 if q_norm is not None else scale),
            q_norm,
            _scale_of(getattr(attention, "k_norm", None)),
            _joined([attention.o_proj], self.dtype),
            _joined([mlp.gate_proj, mlp.up_proj], self.dtype, after),
            _joined([mlp.down_proj], self.dtype),
        )

    def step(
        self,
        token_N: Tensor,
        position_N: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        bias: Tensor | None,
        slot_1: Tensor | None = None,
    ) -> Tensor:
        """Logits [N, V] after one more token in each row.

        Args:
            position_N: the index of the token's place in ``place_P``.
            keys, values: per layer [N, heads, slots, width]; this fills the token's slot.
            bias: [N, 1, 1, slots], 0 on slots that the row may attend to and −∞ elsewhere; None: 0 throughout.
            slot_1: the index of this token's slot, int64 [1]; None: the last one.
        """
        n, x_NH, turns = len(token_N), self._embedded(token_N), self._turned(position_N)
        for layer, key, value in zip(self.layers, keys, values, strict=True):
            query, of_key, of_value = self._attending(layer, x_NH, turns)
            if slot_1 is None:
                key.select(2, -1).copy_(of_key)
                value.select(2, -1).copy_(of_value)
            else:
                key.index_copy_(2, slot_1, of_key.to(key.dtype).unsqueeze(2))
                value.index_copy_(2, slot_1, of_value.unsqueeze(2))
            # To attention, the queries of one key head are one row's queries at several places.
            query = query.reshape(n, self.n_key, -1, self.width)
            seen = bias
            # A row's slots are in its tokens' order. A captured step attends to all slots: its rows fit the window.
            if layer.window is not None and slot_1 is None and key.shape[2] > layer.window:
                key, value = key[:, :, -layer.window :], value[:, :, -layer.window :]
                seen = None if bias is None else bias[..., -layer.window :]
            x_NH = self._attended(layer, x_NH, _attend(query, key, value, seen).reshape(n, -1))
        return self._logits(x_NH)

    def read(
        self,
        token_M: Tensor,
        position_M: Tensor,
        row_M: Tensor,
        slot_M: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        start_N: Tensor,
    ) -> Tensor:
        """Logits [N, V] after one or more tokens in each row, which may have different numbers of them.

        Args:
            position_M: as in :meth:`step`.
            row_M, slot_M: each token's row and slot, in the order of both. The last token of a row is in the last slot.
            start_N: each row's first slot.
        """
        slot_S = torch.arange(keys[0].shape[2], device=slot_M.device)
        first = int(slot_M.min())
        n, t, groups = len(start_N), len(slot_S) - first, self.n_query // self.n_key
        back_TS = slot_S[first:, None] - slot_S
        most = rows_attending(self.n_query, self.width, t, len(slot_S), self.dtype.itemsize, slot_M.device)
        parts = [(begin, min(begin + most, n)) for begin in range(0, n, most)]
        tokens_N = [0, *torch.bincount(row_M, minlength=n).cumsum(0).tolist()]  # in the rows before each row

        @lru_cache(maxsize=2)  # one for each window of a model; if all rows are one part, both stay
        def bias(window: Window, begin: int, end: int) -> Tensor:
            seen_nTS = (slot_S >= start_N[begin:end, None, None]) & (back_TS >= 0) & (back_TS < (window or len(slot_S)))
            zero = torch.zeros(seen_nTS.shape, dtype=self.dtype, device=slot_M.device)
            return zero.masked_fill(~seen_nTS, -torch.inf).repeat_interleave(groups, 1)[:, None]

        x_MH, turns = self._embedded(token_M), self._turned(position_M)
        for layer, key, value in zip(self.layers, keys, values, strict=True):
            query, of_key, of_value = self._attending(layer, x_MH, turns)
            key.transpose(1, 2)[row_M, slot_M] = of_key.to(key.dtype)
            value.transpose(1, 2)[row_M, slot_M] = of_value
            of_parts = []
            for begin, end in parts:
                tokens = slice(tokens_N[begin], tokens_N[end])
                at = row_M[tokens] - begin, slot_M[tokens] - first
                query_nT = query.new_zeros(end - begin, t, *query.shape[1:])
                query_nT[at] = query[tokens]
                by_head = query_nT.unflatten(2, (self.n_key, groups)).transpose(1, 2).flatten(2, 3)
                attended = _attend(by_head, key[begin:end], value[begin:end], bias(layer.window, begin, end))
                of_parts.append(attended.unflatten(2, (t, groups)).transpose(1, 2).flatten(2)[at])
            x_MH = self._attended(layer, x_MH, torch.cat(of_parts))
        return self._logits(x_MH[slot_M == len(slot_S) - 1])

    def _embedded(self, token_N: Tensor) -> Tensor:
        x_NH = embedding(token_N, self.embedding)
        if self.embedding_scale is not None:
            x_NH = x_NH * self.embedding_scale.to(x_NH.dtype)
        return x_NH.float()

    def _turned(self, position_N: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Cosine and sine of the places, for each rotary embedding."""
        return [(cos[position_N], sin[position_N]) for cos, sin in self.turns]

    def _attending(
        self, layer: _Layer, x_NH: Tensor, turns: Sequence[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A layer's queries, keys and values [N, heads, width]."""
        n_query, n_turned = self.n_query, self.n_query + self.n_key
        cos, sin = turns[layer.rotation]
        qkv = layer.qkv(self._unit(x_NH)).view(len(x_NH), -1, self.width)
        turned = qkv[:, :n_turned]
        if layer.q_norm is not None and layer.k_norm is not None:
            query, of_key = self._unit(turned[:, :n_query]), self._unit(turned[:, n_query:])
            turned = torch.cat([query * layer.q_norm, of_key * layer.k_norm], 1)
        turned = torch.addcmul(turned * cos, turned.roll(self.width // 2, -1), sin)
        return turned[:, :n_query].to(self.dtype), turned[:, n_query:], qkv[:, n_turned:]

    def _attended(self, layer: _Layer, x_NH: Tensor, attended: Tensor) -> Tensor:
        """The residual stream after a layer, whose attention gave ``attended`` [N, heads · width]."""
        x_NH = self._plus(x_NH, layer.out, attended, layer.out_norm)
        gate, up = layer.gate_up(self._unit(x_NH)).chunk(2, -1)
        return self._plus(x_NH, layer.down, self.activation(gate) * up, layer.down_norm)

    def _logits(self, x_NH: Tensor) -> Tensor:
        return self.head((self._unit(x_NH) * self.norm).to(self.dtype))

    def _unit(self, x: Tensor) -> Tensor:
        """x / √(|x|² + n ε) over the last axis, of length n: RMS norm over √n, in few operations."""
        dtype = None if x.dtype == torch.float32 else torch.float32
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype)
        unit = x / torch.hypot(length, self.floors[x.shape[-1]])
        return unit if unit.dtype == self.dtype else unit.to(self.dtype)

    def _plus(self, x_NH: Tensor, layer: Linear, y: Tensor, norm: Tensor | None) -> Tensor:
        if norm is None:
            return layer.added_to(x_NH, y)
        return torch.addcmul(x_NH, self._unit(layer(y)).float(), norm)


class StepGraph:
    """:meth:`FusedDecoder.step` for one batch of rows and one set of slots, on a GPU as one CUDA graph.

    A graph needs the same shapes and addresses each time. So a step attends to all slots, with a bias that hides unused
    ones, and reads the index of its token's slot from a tensor. On other devices the step is not captured.

    Args:
        shown: [N, 1, 1, slots], 0 on slots that a row may attend to once they are used, −∞ on others.
        used: the number of slots used so far.
    """

    def __init__(
        self, decoder: FusedDecoder, keys: Sequence[Tensor], values: Sequence[Tensor], shown: Tensor, used: int
    ) -> None:
        self.decoder, self.keys, self.values, self.shown, self.used = decoder, keys, values, shown, used
        for tensor in (*keys, *values):
            tensor[:, :, used:] = 0  # their weight is 0, but 0 · NaN is NaN
        self.bias = shown.clone()
        self.bias[..., used:] = -torch.inf
        self.token = torch.zeros(len(shown), dtype=torch.int64, device=shown.device)
        self.position, self.slot = torch.zeros_like(self.token), torch.zeros_like(self.token[:1])
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits: Tensor | None = None

    def __call__(self, token_N: Tensor, position_N: Tensor) -> Tensor:
        """Logits [N, V] after one more token in each row. The next call overwrites them.

        Raises:
            RuntimeError: the step cannot be captured, or the captured step gives other logits.
        """
        self.token.copy_(token_N)
        self.position.copy_(position_N)
        self.slot.fill_(self.used)
        self.bias[..., self.used] = self.shown[..., self.used]
        self.used += 1
        if self.token.device.type != "cuda":
            return self._step()
        if self.graph is None:
            return self._capture()
        self.graph.replay()
        assert self.logits is not None
        return self.logits

    def _step(self) -> Tensor:
        return self.decoder.step(self.token, self.position, self.keys, self.values, self.bias, self.slot)

    def _capture(self) -> Tensor:
        device = self.token.device
        usual, side = torch.cuda.current_stream(device), _side_stream(device)
        with torch.cuda.stream(usual):  # restores the current device and stream, even after an error
            side.wait_stream(usual)
            with torch.cuda.stream(side):
                expected = self._step().clone()
            usual.wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=side):
                self.logits = self._step()
            self.logits.zero_()  # so that an empty graph shows
            self.graph.replay()
            if not torch.allclose(self.logits, expected, rtol=0.0, atol=float(expected.abs().max()) * 1e-2):
                raise RuntimeError("a captured step gives other logits than the step itself")
        return self.logits


@cache
def _side_stream(device: torch.device) -> Any:
    """The stream on which steps are tried and captured: one for all, since each stream takes a workspace."""
    return torch.cuda.Stream(device)


def _attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    """softmax(query keyᵀ + bias) value, per row and key head: [N, heads, queries, width]."""
    if query.device.type != "cpu":
        return scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=1.0)
    # On a CPU, torch's attention takes twice as long as two products where heads are small, and as long elsewhere.
    weight = torch.bmm(query.flatten(0, 1), key.flatten(0, 1).transpose(1, 2))
    if bias is not None:
        weight.view(*query.shape[:3], -1).add_(bias)
    return torch.bmm(weight.softmax(-1), value.flatten(0, 1)).view_as(query)


def fuses(model: Any) -> bool:
    """Whether :class:`FusedDecoder` computes as ``model`` does. Each model is checked once."""
    if model not in _FUSES:
        _FUSES[model] = holds_as_kept(model, lambda: _computes_the_same(model))
    return _FUSES[model]


_FUSES: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


@torch.no_grad()
def _computes_the_same(model: Any) -> bool:
    inner = _inner(model)
    layers = getattr(inner, "layers", None)
    if not layers or not all(_has_the_parts(layer) for layer in layers) or not attention_windows(model):
        return False
    if getattr(inner.config, "quantization_config", None):  # joined weights would be in full size
        return False
    if any(getattr(inner.config, cap, None) for cap in CAPS):  # small logits would not show a cap
        return False
    if {name for name, _ in inner.named_children()} != {"embed_tokens", "layers", "norm", "rotary_emb"}:
        return False
    if type(inner.embed_tokens).__module__.startswith("peft."):  # an adapter on the embeddings is no part of a step
        return False
    device = inner.embed_tokens.weight.device
    place_N = torch.tensor(sorted({5, *(n - back for n in named_lengths(model.config) for back in (0, 1) if n > 6)}))
    place_N = place_N[place_N < (positions_of(model.config) or sys.maxsize)].to(device)
    ids = torch.arange(6 * len(place_N), device=device).reshape(-1, 6) % inner.embed_tokens.num_embeddings
    cache: Any = DynamicCache()
    model(input_ids=ids[:, :-1], past_key_values=cache, use_cache=True)
    pairs = [(layer.keys, layer.values) for layer in cache.layers]
    one_more = [[torch.cat([t, torch.zeros_like(t[:, :, :1])], 2).float() for t in pair] for pair in pairs]
    more = {"position_ids": place_N[:, None], "past_key_values": cache, "use_cache": True}
    expected = model(input_ids=ids[:, -1:], **more).logits[:, -1].float()
    try:
        with torch.autocast(device.type, enabled=False):
            places = torch.cat([place_N, place_N.new_tensor([4])])
            decoder, row_N = FusedDecoder(model, torch.float32, places), torch.arange(len(place_N), device=device)
            keys, values = zip(*one_more, strict=True)
            found = decoder.step(ids[:, -1], row_N, keys, values, None)
            # The first row reads its last token again, and each other row its last two.
            row_M = row_N.repeat_interleave(2)[1:]
            at = torch.stack([torch.full_like(row_N, len(place_N)), row_N], 1).flatten()[1:]
            slot_M = torch.tensor([4, 5], device=device).repeat(len(place_N))[1:]
            read = decoder.read(ids[:, -2:].flatten()[1:], at, row_M, slot_M, keys, values, torch.zeros_like(row_N))
    except (AttributeError, RuntimeError):
        return False
    return within_tolerance(model, found, expected) and within_tolerance(model, read, expected)


def _has_the_parts(layer: Any) -> bool:
    children = {name for name, _ in layer.named_children()}
    return children in (BLOCKS, BLOCKS | OUTPUT_NORMS) and all(
        {name for name, _ in getattr(layer, part).named_children()} <= PARTS[part] for part in ("self_attn", "mlp")
    )


def _rotations(inner: Any) -> list[tuple[str, ...]]:
    """List the arguments that a decoder's rotary embedding takes beside positions, for each way to call it."""
    kinds = getattr(inner.rotary_emb, "rope_type", None)
    return [(kind,) for kind in sorted(kinds)] if isinstance(kinds, dict) else [()]


def _scale_of(norm: Any, scale: float = 1.0) -> Any:
    """The factor of x / √(|x|² + n ε) in an RMS norm over n numbers: √n times its weight (Gemma keeps it less 1).

    None for no norm. ``scale`` is multiplied in.
    """
    if norm is None:
        return None
    weight, ones = norm.weight, torch.ones_like(norm.weight)
    kept_less_one = bool((norm(ones) - weight).mean() > 0.5)
    return (weight + 1 if kept_less_one else weight) * (scale * len(weight) ** 0.5)


def _inner(model: Any) -> Any:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return getattr(base, "model", None)


def _base(module: Any) -> Any:
    """The linear layer under an adapter."""
    return module.get_base_layer() if hasattr(module, "get_base_layer") else module


def _joined(modules: Sequence[Any], dtype: torch.dtype, norm: Tensor | None = None, first_scale: float = 1.0) -> Linear:
    """Linear layers side by side.

    Adapters and the weight of a ``norm`` before the layers are merged in; ``first_scale`` scales the first layer.
    """
    weights, biases = [], []
    for i, module in enumerate(modules):
        base, scale = _base(module), first_scale if i == 0 else 1.0
        weight = base.weight
        for adapter in getattr(module, "active_adapters", ()):
            if adapter in module.lora_A:
                weight = weight + module.get_delta_weight(adapter)
        if norm is not None:
            weight = weight * norm
        weights.append((weight * scale if scale != 1.0 else weight).to(dtype))
        biases.append(None if base.bias is None else (base.bias * scale).to(dtype))
    weight = torch.cat(weights) if len(weights) > 1 else weights[0]
    if all(bias is None for bias in biases):
        return Linear.of(weight, None)
    each = [w.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)]
    return Linear.of(weight, torch.cat(each))
