"""The kind of a device, and the memory that work may take or has taken on it."""

from __future__ import annotations

import torch

from ftis.machine import resources

CPU_BYTES = 2**31


def device_kind(device: torch.device) -> str:
    """``cpu`` or ``cuda``: the key of costs that depend on the device."""
    return "cpu" if device.type == "cpu" else "cuda"


def working_bytes(device: torch.device) -> int:
    """The most for the completions drawn at a time, and for a micro-batch: a quarter of a GPU's memory, 2 GB on a CPU.

    Free memory does not matter: batches of another size give other completions and other last bits.
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory // 4)
    return CPU_BYTES


def peak_bytes(device: torch.device) -> int:
    """The most memory that this process has used: on its GPU, else its resident size; 0 if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resources.peak_bytes(resource)
