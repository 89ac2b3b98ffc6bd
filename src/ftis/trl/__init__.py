"""A TRL script in a swarm: ``from ftis.trl import FTISTrainer, Swarm``. See docs/trl.md.

TRL is optional, so its trainer is imported when it is asked for.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import warnings
from typing import TYPE_CHECKING, Any

from ftis.version import extra

if TYPE_CHECKING:
    from ftis.trl.ranks import end_processes as end_processes
    from ftis.trl.swarm import Swarm as Swarm
    from ftis.trl.trainer import FTISTrainer as FTISTrainer

_HOME = {"FTISTrainer": "trainer", "Swarm": "swarm", "end_processes": "ranks"}

TRIED = (1, 16)
"""The version of TRL that the tests ran with."""

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ftis.trl' has no attribute {name!r}")
    remedy = f"pip install {extra('trl')}"
    try:
        found = importlib.metadata.version("trl")
        version = tuple(map(int, re.findall(r"\d+", found)[:2]))  # 1.17rc1 too
        if not TRIED <= version < (2,):
            raise ImportError(f"ftis.trl goes with TRL from 1.16 on and below 2, and TRL here is {found}: {remedy}")
        if version > TRIED:  # once, as Python shows one warning of one place
            warnings.warn(f"ftis.trl was tried with TRL 1.16 and not with {found}", stacklevel=1)
        return getattr(importlib.import_module(f"ftis.trl.{_HOME[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name not in ("trl", "datasets", "accelerate"):
            raise
        raise ImportError(f"ftis.trl needs TRL, and there is no module {error.name!r}: {remedy}") from None
