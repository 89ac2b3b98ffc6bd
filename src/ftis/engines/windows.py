"""The reach of a decoder's layers: each attends to all earlier tokens, or within a sliding window."""

from __future__ import annotations

from typing import Any

from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

Window = int | None
"""The most tokens that a token attends to, itself included; None: all up to itself."""


def attention_windows(model: Any) -> tuple[Window, ...]:
    """Each layer's window; empty for a model with other attention than torch's causal one, as ALiBi or chunks."""
    config = model.config
    if config._attn_implementation != "sdpa":  # others treat a mask in their own ways, or ignore it
        return ()
    text = config.get_text_config(decoder=True)
    kinds = set(getattr(text, "layer_types", None) or ())
    layers = DynamicCache(config=config).layers
    if kinds - {"full_attention", "sliding_attention"} or getattr(text, "use_bidirectional_attention", False):
        return ()
    if any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers):
        return ()
    return tuple(getattr(layer, "sliding_window", None) for layer in layers)


def rows_fit(windows: tuple[Window, ...], length: int) -> bool:
    """Whether rows of so many tokens lie within every window, so that each layer attends to all earlier tokens."""
    return all(window is None or length <= window for window in windows)
