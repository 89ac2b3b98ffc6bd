"""A TRL script in a swarm: ``from ftis.trl import FTISTrainer, Swarm``. See docs/trl.md.

TRL is optional, so its trainer is imported when it is asked for.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

from ftis.version import extra

if TYPE_CHECKING:
    from ftis.trl.member import Swarm as Swarm
    from ftis.trl.ranks import end_processes as end_processes
    from ftis.trl.trainer import FTISTrainer as FTISTrainer

_HOME = {"FTISTrainer": "trainer", "Swarm": "member", "end_processes": "ranks"}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ftis.trl' has no attribute {name!r}")
    remedy = f"pip install {extra('trl')}"
    try:
        found = importlib.metadata.version("trl")
        if not (1, 16) <= tuple(map(int, found.split(".")[:2])) < (1, 18):
            raise ImportError(f"ftis.trl goes with TRL 1.16 and 1.17, and TRL here is {found}: {remedy}")
        return getattr(importlib.import_module(f"ftis.trl.{_HOME[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name not in ("trl", "datasets", "accelerate"):
            raise
        raise ImportError(f"ftis.trl needs TRL, and there is no module {error.name!r}: {remedy}") from error
