"""A model in memory: the precision of its weights, shared frozen weights, and activations that are computed again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from ftis.config import ModelError
from ftis.machine.resources import return_freed_memory


def keep_frozen_in_bfloat16(model: Any) -> None:
    """Cast frozen matrices. Norms and the residual stream stay in float32, as under autocast."""
    for parameter in model.parameters():
        if not parameter.requires_grad and parameter.dim() > 1:
            parameter.data = parameter.data.to(torch.bfloat16)
    model.get_input_embeddings().register_forward_hook(lambda module, ids, embedded: embedded.float())


def callable_as_kept(model: Any, dtype: torch.dtype = torch.bfloat16) -> AbstractContextManager[None]:
    """A context in which a model can be called by itself: one with weights in bfloat16 needs autocast, to ``dtype``."""
    if not in_bfloat16(model):
        return nullcontext()
    return torch.autocast(model.get_input_embeddings().weight.device.type, dtype=dtype)


def holds_as_kept(model: Any, check: Callable[[], bool]) -> bool:
    """Whether a check of a model's logits holds. Many layers round more in bfloat16 than :func:`tolerance` has room
    for. So weights in bfloat16 have a second try in float16, with three bits more."""

    def holds(dtype: torch.dtype) -> bool:
        with callable_as_kept(model, dtype):
            return check()

    return holds(torch.bfloat16) or (in_bfloat16(model) and holds(torch.float16))


def in_bfloat16(model: Any) -> bool:
    return any(parameter.dtype == torch.bfloat16 for parameter in model.parameters())


def tolerance(model: Any) -> float:
    """The largest difference from the model's own logits, relative to the largest of them, with which a fast way is
    taken: enough for rounding, too little for another computation."""
    return 5e-2 if is_coarse(model) else 1e-3


def within_tolerance(model: Any, found: Tensor, expected: Tensor) -> bool:
    """Whether logits are the model's own up to :func:`tolerance`."""
    return bool((found - expected).abs().max() <= tolerance(model) * expected.abs().max())


def is_coarse(model: Any) -> bool:
    """Whether weights are kept in few bits, so that products are rounded whatever the arithmetic is."""
    return in_bfloat16(model) or is_quantised(model)


def is_quantised(model: Any) -> bool:
    return getattr(model.config, "quantization_config", None) is not None


def share_frozen(model: Any) -> None:
    """Keep one copy of frozen parameters that equal those of an earlier model of this process.

    So several LoRA peers of one base take its memory once. Nothing writes to a frozen parameter.
    """
    gc.collect()  # else models out of use would count as earlier ones
    for name, parameter in model.named_parameters():
        scales = getattr(parameter, "quant_state", None)  # 4-bit weights have theirs beside them
        if parameter.requires_grad or not (parameter.is_floating_point() or scales is not None):
            continue
        key = (name, parameter.shape, parameter.dtype, parameter.device)
        sharers: Any = _FROZEN.get(key)
        earlier: Any = None if sharers is None else next(iter(sharers.values()), None)
        is_here = earlier is not None and earlier.untyped_storage().nbytes() > 0  # its peer is on the device
        equal = is_here and torch.equal(earlier, parameter)
        if equal and scales is not None:
            equal = torch.equal(earlier.quant_state.absmax, scales.absmax)
        if equal:
            parameter.data = earlier.data
            if scales is not None:
                scales.absmax = earlier.quant_state.absmax
        else:
            sharers = _FROZEN[key] = weakref.WeakValueDictionary()
        parameter.sharers = sharers  # known as long as one of them is in use
        sharers[id(parameter)] = parameter
    return_freed_memory()


def is_shared(parameter: Any) -> bool:
    """Whether a parameter shares memory, by :func:`share_frozen`, with one of another model that is still in use."""
    return len(getattr(parameter, "sharers", ())) > 1


_FROZEN: weakref.WeakValueDictionary[tuple[Any, ...], Any] = weakref.WeakValueDictionary()
"""(name, shape, dtype, device) → the parameters that share one place, by ``id``."""


def contiguous_to_head(model: Any) -> None:
    """Copy a slice before the output layer gets it, such as the last token of each row.

    torch 2.13 multiplies a slice row by row, and in bfloat16 on a CPU it copies the weights for each row: for 24 rows
    and a vocabulary of 65,536 the product took 7.4 s instead of .02 s.
    """
    head = model.get_output_embeddings()
    if head is not None:
        head.register_forward_pre_hook(lambda module, given: tuple(map(_contiguous, given)))


def _contiguous(given: Any) -> Any:
    return given.contiguous() if isinstance(given, Tensor) else given


def checkpoint_layers(model: Any, peer: str) -> None:
    """Make each layer discard its activations and recompute them in the backward pass.

    transformers' own switch works only in train mode, where dropout is on.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ModelError(
            f"peer {peer!r}: {type(model).__name__} has no layers for gradient checkpointing: set "
            f"gradient_checkpointing = false"
        )
    for layer in layers:
        layer.forward = partial(_recomputed, layer.forward)


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
