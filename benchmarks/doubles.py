"""Light peers and small vocabularies of ``tests/``, for benchmarks: the one place that puts that folder on the path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from light_peer import TOKENIZER, light_admitter, light_recipe, made_up_groups
from light_swarm import Swarm, free_port
from twin import Twin
from vocabularies import byte_level

__all__ = ["TOKENIZER", "Swarm", "Twin", "byte_level", "free_port", "light_admitter", "light_recipe", "made_up_groups"]
