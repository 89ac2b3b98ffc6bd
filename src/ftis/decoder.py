"""One decoding step of a decoder such as Llama's or Qwen's in few operations.

A step of one token a row does little arithmetic in many small operations, and transformers' modules take longer to
call them than the operations themselves run on small models. Here the weights of a layer are joined and cast once per
batch of completions (queries, keys and values in one matrix; gate and up in another; adapters merged in), and a layer
is some twenty operations.

Whether a model is of this kind is found out by asking: by its layers' parts, and by comparing one step's logits with
the model's own.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, scaled_dot_product_attention
from transformers import DynamicCache

TOLERANCE = 1e-3
"""How far the logits of a step may be from the model's own, of their largest, for the model to be of this kind."""

PARTS = {
    "": {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"},
    "self_attn": {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"},
    "mlp": {"gate_proj", "up_proj", "down_proj", "act_fn"},
}
"""The parts of a layer, of its attention and of its MLP that a step takes account of."""

FIXED_ROTATIONS = {"default", "linear", "llama3", "yarn"}
"""Rotary embeddings whose angles do not depend on how long a sequence has become."""


@dataclass(frozen=True)
class _Layer:
    norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


class FusedDecoder:
    """The weights of ``model`` as they are now, joined and cast to ``dtype``, and the step they make.

    The residual stream, norms and rotations stay in float32, as under autocast.
    """

    def __init__(self, model: Any, dtype: torch.dtype, positions: int) -> None:
        inner, head = _inner(model), model.get_output_embeddings()
        attention = inner.layers[0].self_attn
        self.dtype = dtype
        self.width = int(attention.head_dim)
        self.n_query = _base(attention.q_proj).out_features // self.width
        self.n_key = _base(attention.k_proj).out_features // self.width
        self.scale = float(attention.scaling)
        self.activation = inner.layers[0].mlp.act_fn
        self.epsilon = float(inner.norm.variance_epsilon)
        self.embedding = inner.embed_tokens.weight
        self.norm = inner.norm.weight
        self.head, self.head_bias = _joined([head], dtype)
        self.layers = [self._layer(layer) for layer in inner.layers]
        device = self.embedding.device
        cos, sin = inner.rotary_emb(self.embedding[:1], torch.arange(positions, device=device)[None])
        # rotate_half(x) is x rolled by half with its first half negated; here the sine bears the sign.
        sign = torch.ones(self.width, device=device)
        sign[: self.width // 2] = -1
        self.cos, self.sin = cos[0].float().unsqueeze(1), (sin[0].float() * sign).unsqueeze(1)

    def _layer(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        return _Layer(
            layer.input_layernorm.weight,
            *_joined([attention.q_proj, attention.k_proj, attention.v_proj], self.dtype),
            getattr(getattr(attention, "q_norm", None), "weight", None),
            getattr(getattr(attention, "k_norm", None), "weight", None),
            *_joined([attention.o_proj], self.dtype),
            layer.post_attention_layernorm.weight,
            *_joined([mlp.gate_proj, mlp.up_proj], self.dtype),
            *_joined([mlp.down_proj], self.dtype),
        )

    def step(
        self, token_N: Tensor, position_N: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], bias: Tensor | None
    ) -> Tensor:
        """Logits [N, V] after one more token in each row.

        Args:
            position_N: the token's place in its row.
            keys, values: per layer [N, heads, slots, width], of which the last slot is this token's, yet to be filled.
            bias: [N, 1, 1, slots], 0 on slots that the row may attend to and −∞ elsewhere; None: to all of them.
        """
        n, n_query, n_turned = len(token_N), self.n_query, self.n_query + self.n_key
        width, half = self.width, self.width // 2
        x_NH = embedding(token_N, self.embedding).float()
        cos, sin = self.cos[position_N], self.sin[position_N]
        for layer, key, value in zip(self.layers, keys, values, strict=True):
            qkv = linear(self._normed(x_NH, layer.norm), layer.qkv, layer.qkv_bias).view(n, -1, width)
            turned = qkv[:, :n_turned].float()
            if layer.q_norm is not None and layer.k_norm is not None:
                query, of_key = turned[:, :n_query], turned[:, n_query:]
                query = _rms_norm(query, layer.q_norm, self.epsilon)
                of_key = _rms_norm(of_key, layer.k_norm, self.epsilon)
                turned = torch.cat([query, of_key], 1)
            turned = torch.addcmul(turned * cos, turned.roll(half, -1), sin).to(self.dtype)
            key[:, :, -1] = turned[:, n_query:]
            value[:, :, -1] = qkv[:, n_turned:]
            # The queries that share a key are to attention one row's queries at several places.
            query = turned[:, :n_query].reshape(n, self.n_key, -1, width)
            read = _attend(query, key, value, bias, self.scale)
            x_NH = x_NH + linear(read.reshape(n, -1), layer.out, layer.out_bias)
            gate, up = linear(self._normed(x_NH, layer.mlp_norm), layer.gate_up, layer.gate_up_bias).chunk(2, -1)
            x_NH = x_NH + linear(self.activation(gate) * up, layer.down, layer.down_bias)
        return linear(self._normed(x_NH, self.norm), self.head, self.head_bias)

    def _normed(self, x_NH: Tensor, weight: Tensor) -> Tensor:
        return _rms_norm(x_NH, weight, self.epsilon).to(self.dtype)


def _rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / √(mean x² + ε) · weight over the last axis; torch's own takes twice as long on a CPU."""
    root = torch.linalg.vector_norm(x, dim=-1, keepdim=True).mul_(x.shape[-1] ** -0.5)
    normed: Tensor = x * root.square_().add_(epsilon).rsqrt_()
    return normed.mul_(weight)


def _attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """softmax(scale · query keyᵀ + bias) value, per row and key head: [N, heads, queries, width]."""
    if query.device.type != "cpu":
        return scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)
    # On a CPU torch's kernel for it takes twice as long as two products where heads are small, and no less elsewhere.
    weight = torch.bmm(query.flatten(0, 1), key.flatten(0, 1).transpose(1, 2)).mul_(scale)
    if bias is not None:
        weight.view(*query.shape[:3], -1).add_(bias)
    return torch.bmm(weight.softmax(-1), value.flatten(0, 1)).view_as(query)


def fuses(model: Any) -> bool:
    """Whether :class:`FusedDecoder` computes what ``model`` does; found out once a model."""
    if model not in _FUSES:
        _FUSES[model] = _computes_the_same(model)
    return _FUSES[model]


_FUSES: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


@torch.no_grad()
def _computes_the_same(model: Any) -> bool:
    inner = _inner(model)
    layers = getattr(inner, "layers", None)
    if not layers or not all(_has_the_parts(layer) for layer in layers):
        return False
    if {name for name, _ in inner.named_children()} != {"embed_tokens", "layers", "norm", "rotary_emb"}:
        return False
    if getattr(inner.rotary_emb, "rope_type", "") not in FIXED_ROTATIONS:
        return False
    device = inner.embed_tokens.weight.device
    ids = torch.arange(12, device=device).reshape(2, 6) % inner.embed_tokens.num_embeddings
    cache: Any = DynamicCache(config=model.config)
    model(input_ids=ids[:, :-1], past_key_values=cache, use_cache=True)
    pairs = [(layer.keys, layer.values) for layer in cache.layers]
    one_more = [[torch.cat([t, torch.zeros_like(t[:, :, :1])], 2) for t in pair] for pair in pairs]
    expected = model(input_ids=ids[:, -1:], past_key_values=cache, use_cache=True).logits[:, -1].float()
    try:
        decoder = FusedDecoder(model, torch.float32, positions=6)
        keys, values = zip(*one_more, strict=True)
        found = decoder.step(ids[:, -1], torch.full((2,), 5, device=device), keys, values, None)
    except (AttributeError, RuntimeError):
        return False
    return bool((found - expected).abs().max() <= TOLERANCE * expected.abs().max())


def _has_the_parts(layer: Any) -> bool:
    children = {name for name, _ in layer.named_children()}
    return children == PARTS[""] and all(
        {name for name, _ in getattr(layer, part).named_children()} <= PARTS[part] for part in ("self_attn", "mlp")
    )


def _inner(model: Any) -> Any:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return getattr(base, "model", None)


def _base(module: Any) -> Any:
    """The linear layer under an adapter."""
    return module.get_base_layer() if hasattr(module, "get_base_layer") else module


def _joined(modules: Sequence[Any], dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The weights of linear layers under one another, adapters merged in, and their biases."""
    weights, biases = [], []
    for module in modules:
        base = _base(module)
        weight = base.weight
        for adapter in getattr(module, "active_adapters", ()):
            if adapter in module.lora_A:
                weight = weight + module.get_delta_weight(adapter)
        weights.append(weight.to(dtype))
        biases.append(base.bias)
    weight = torch.cat(weights) if len(weights) > 1 else weights[0]
    if all(bias is None for bias in biases):
        return weight, None
    zeros = [w.new_zeros(len(w)) if b is None else b.to(dtype) for w, b in zip(weights, biases, strict=True)]
    return weight, torch.cat(zeros)
