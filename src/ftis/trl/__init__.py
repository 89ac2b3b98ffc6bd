"""A TRL script in a swarm: ``from ftis.trl import FTISTrainer, Swarm``. See docs/trl.md.

TRL is optional, so its trainer is imported when it is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftis.trl.member import Swarm as Swarm
    from ftis.trl.trainer import FTISTrainer as FTISTrainer

_HOME = {"FTISTrainer": "trainer", "Swarm": "member"}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ftis.trl' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"ftis.trl.{_HOME[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name not in ("trl", "datasets", "accelerate"):
            raise
        raise ImportError(
            f'ftis.trl needs TRL, and there is no module {error.name!r}: pip install "ftis[trl]"'
        ) from error
