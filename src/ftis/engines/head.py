"""Log-probabilities from an output layer in chunks, so that a batch's logits never exist all at once.

With a vocabulary of 152,000, the float32 logits of 1,000 tokens take 608 MB. Here only those of a chunk exist.
:func:`fit` checks that a model's logits are its output layer's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ftis.engines.devices import device_kind
from ftis.engines.kept import callable_as_kept
from ftis.policy import arithmetic, selected_logp

TOKENS_AT_ONCE = {"cpu": 32, "cuda": 512}
LOGITS_AT_ONCE = {"cpu": 2**20, "cuda": 2**26}
"""The size of a chunk, by kind of device: as many logits as a cache holds, but at least so many tokens that reading the
head's weights is worth it."""


@dataclass
class ChunkedHead:
    """A linear output layer.

    Attributes:
        logits_at_once: the most logits that exist at a time. Tokens with no more logits take the plain way.
    """

    linear: Any
    logits_at_once: int

    def taken_off(self) -> contextlib.AbstractContextManager[None]:
        return _answering(self.linear, lambda hidden: hidden)

    def logp(self, hidden_MH: Tensor, target_M: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
        vocab_size = self.linear.out_features
        if len(target_M) * vocab_size <= self.logits_at_once:
            with arithmetic(dtype, hidden_MH.device):
                logits_MV = self.linear(hidden_MH)
            return selected_logp(logits_MV, target_M, temperature)
        given = hidden_MH.to(dtype), self.linear.weight, self.linear.bias, target_M, temperature
        logp_M: Tensor = _HeadLogp.apply(*given, max(1, self.logits_at_once // vocab_size))  # type: ignore[no-untyped-call]
        return logp_M


def fit(model: Any, device: torch.device) -> ChunkedHead | None:
    """The model's output layer, if its output is the model's logits unchanged; otherwise None.

    While the layer returns a ramp, the model must return the same ramp. A model that caps or scales its logits, or
    multiplies with the weights by itself, does not. Nor does a layer qualify that is more than linear, such as one
    with an adapter.
    """
    linear = model.get_output_embeddings()
    if type(linear) is not torch.nn.Linear:
        return None
    ramp = torch.linspace(-100.0, 100.0, 2 * linear.out_features, device=device).reshape(1, 2, linear.out_features)
    with torch.no_grad(), _answering(linear, lambda hidden: ramp), callable_as_kept(model):
        found = model(input_ids=torch.zeros(1, 2, dtype=torch.int64, device=device), use_cache=False).logits
    if not torch.equal(found, ramp):
        return None
    kind = device_kind(device)
    vocab_size = int(model.get_input_embeddings().weight.shape[0])
    return ChunkedHead(linear, max(TOKENS_AT_ONCE[kind] * vocab_size, LOGITS_AT_ONCE[kind]))


@contextlib.contextmanager
def _answering(head: Any, answer: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """A context in which ``head`` returns ``answer(its input)``."""
    forward, head.forward = head.forward, answer
    try:
        yield
    finally:
        head.forward = forward


class _HeadLogp(torch.autograd.Function):
    """log softmax((W h + b) / temperature) at one id for each row h: float32 [M].

    The logits of only ``chunk`` rows exist at a time. The backward pass recomputes them. Matrix products are in the
    dtype of ``hidden_MH``, sums over chunks in float32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        target_M: Tensor,
        temperature: float,
        chunk: int,
    ) -> Tensor:
        norm_M = hidden_MH.new_empty(len(hidden_MH), dtype=torch.float32)
        selected_M = torch.empty_like(norm_M)
        low_weight_VH = weight_VH.to(hidden_MH.dtype)
        for rows in _slices(len(hidden_MH), chunk):
            logits_mV = _head_logits(hidden_MH[rows], low_weight_VH, bias_V, temperature)
            selected_M[rows] = logits_mV.gather(1, target_M[rows, None]).squeeze(1)
            largest_m1 = logits_mV.amax(1, keepdim=True)
            norm_M[rows] = logits_mV.sub_(largest_m1).exp_().sum(1).log_().add_(largest_m1.squeeze(1))
        ctx.save_for_backward(hidden_MH, weight_VH, bias_V, target_M, norm_M)
        ctx.temperature, ctx.chunk = temperature, chunk
        return selected_M - norm_M

    @staticmethod
    def backward(ctx: Any, grad_M: Tensor) -> tuple[Tensor | None, ...]:
        hidden_MH, weight_VH, bias_V, target_M, norm_M = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        low_weight_VH = weight_VH.to(hidden_MH.dtype)
        grad_hidden_MH = torch.empty_like(hidden_MH) if wants_hidden else None
        grad_weight_VH = torch.zeros_like(weight_VH) if wants_weight else None
        grad_bias_V = torch.zeros_like(bias_V) if wants_bias else None
        for rows in _slices(len(hidden_MH), ctx.chunk):
            # ∂ log p(a) / ∂ logits = (1[a] − p) / temperature
            scale_m1 = grad_M[rows, None] / ctx.temperature
            grad_mV = _head_logits(hidden_MH[rows], low_weight_VH, bias_V, ctx.temperature)
            grad_mV.sub_(norm_M[rows, None]).exp_().mul_(-scale_m1)
            grad_mV.scatter_add_(1, target_M[rows, None], scale_m1)
            if grad_bias_V is not None:
                grad_bias_V += grad_mV.sum(0)
            low_grad_mV = grad_mV.to(hidden_MH.dtype)
            if grad_hidden_MH is not None:
                torch.mm(low_grad_mV, low_weight_VH, out=grad_hidden_MH[rows])
            if grad_weight_VH is not None and hidden_MH.dtype == weight_VH.dtype:
                grad_weight_VH.addmm_(low_grad_mV.t(), hidden_MH[rows])
            elif grad_weight_VH is not None:
                grad_weight_VH += low_grad_mV.t() @ hidden_MH[rows]
        return grad_hidden_MH, grad_weight_VH, grad_bias_V, None, None, None


def _head_logits(hidden_mH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, temperature: float) -> Tensor:
    """Logits / temperature: float32 [m, V], owned by the caller."""
    logits_mV = torch.nn.functional.linear(hidden_mH, weight_VH, None if bias_V is None else bias_V.to(hidden_mH.dtype))
    logits_mV = logits_mV.float()
    return logits_mV.div_(temperature) if temperature != 1.0 else logits_mV


def _slices(length: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, length, size)]
