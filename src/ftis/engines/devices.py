"""What costs depend on."""

from __future__ import annotations

import torch


def device_kind(device: torch.device) -> str:
    """``cpu`` or ``cuda``: the key of costs that depend on the device."""
    return "cpu" if device.type == "cpu" else "cuda"
