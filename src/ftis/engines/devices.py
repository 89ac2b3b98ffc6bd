"""The kind of a device, which decides costs, and the most memory that a process has used on it."""

from __future__ import annotations

import torch

from ftis.rewards import helper


def device_kind(device: torch.device) -> str:
    """``cpu`` or ``cuda``: the key of costs that depend on the device."""
    return "cpu" if device.type == "cpu" else "cuda"


def peak_bytes(device: torch.device) -> int:
    """The most memory that this process has used: on its GPU, else its resident size; 0 if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return helper.peak_bytes(resource)
