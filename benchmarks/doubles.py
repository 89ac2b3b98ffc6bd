"""The light peers of ``tests/``, for the benchmarks: the one place that puts that folder on the path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from light_peer import TOKENIZER, light_admitter, light_recipe, made_up_groups
from light_swarm import Swarm, free_port

__all__ = ["TOKENIZER", "Swarm", "free_port", "light_admitter", "light_recipe", "made_up_groups"]
