"""Different language models learn together: GRPO on everybody's completions, corrected by F-TIS.

The names below are the public ones; each is imported from its module when first used, so ``import ftis`` is quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftis.config import FtisError as FtisError
    from ftis.config import Recipe as Recipe
    from ftis.config import load as load
    from ftis.lab.runs import run as run
    from ftis.lab.summary import summarise as summarise
    from ftis.objectives import OBJECTIVES as OBJECTIVES
    from ftis.objectives import Objective as Objective
    from ftis.objectives import group_advantages as group_advantages
    from ftis.objectives import policy_loss as policy_loss
    from ftis.peer import Peer as Peer
    from ftis.peer import train_round as train_round
    from ftis.policy import Policy as Policy

_HOME = {
    "FtisError": "config",
    "Recipe": "config",
    "load": "config",
    "run": "lab.runs",
    "OBJECTIVES": "objectives",
    "Objective": "objectives",
    "group_advantages": "objectives",
    "policy_loss": "objectives",
    "Peer": "peer",
    "train_round": "peer",
    "Policy": "policy",
    "summarise": "lab.summary",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"ftis.{_HOME[name]}"), name)
    raise AttributeError(f"module 'ftis' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
