"""What a run leaves in its directories, as tests compare it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

TIMES = ("step_time", "time/", "seconds", "peak_memory")
"""How the keys begin whose values depend on the clock or on what else the process did."""


def without_times(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in rows]


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(next(checkpoint.glob("*.safetensors")))
