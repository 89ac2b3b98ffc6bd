"""Different language models learn together: GRPO on everybody's completions, corrected by F-TIS.

The names below are the public ones; each is imported from its module when first used, so ``import ftis`` is quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftis.config import FtisError as FtisError
    from ftis.config import PeerConfig as PeerConfig
    from ftis.config import Recipe as Recipe
    from ftis.config import RewardConfig as RewardConfig
    from ftis.config import run_directory as run_directory
    from ftis.lab.arms import experiment_directory as experiment_directory
    from ftis.lab.experiments import run_experiment as run_experiment
    from ftis.lab.recipes import load as load
    from ftis.lab.runs import run as run
    from ftis.lab.starters import supervised_step as supervised_step
    from ftis.loop.files import read_jsonl as read_jsonl
    from ftis.objectives import OBJECTIVES as OBJECTIVES
    from ftis.objectives import Objective as Objective
    from ftis.objectives import group_advantages as group_advantages
    from ftis.objectives import policy_loss as policy_loss
    from ftis.page.report import write_page as write_page
    from ftis.peer import Peer as Peer
    from ftis.peer import train_round as train_round
    from ftis.policy import Policy as Policy
    from ftis.study.progress import Display as Display
    from ftis.study.results import compare as compare
    from ftis.study.summary import summarise as summarise
    from ftis.study.tables import print_comparison as print_comparison

_HOME = {
    "FtisError": "config",
    "PeerConfig": "config",
    "Recipe": "config",
    "RewardConfig": "config",
    "load": "lab.recipes",
    "run_directory": "config",
    "read_jsonl": "loop.files",
    "OBJECTIVES": "objectives",
    "Objective": "objectives",
    "group_advantages": "objectives",
    "policy_loss": "objectives",
    "Policy": "policy",
    "Peer": "peer",
    "train_round": "peer",
    "run": "lab.runs",
    "run_experiment": "lab.experiments",
    "experiment_directory": "lab.arms",
    "supervised_step": "lab.starters",
    "compare": "study.results",
    "print_comparison": "study.tables",
    "summarise": "study.summary",
    "write_page": "page.report",
    "Display": "study.progress",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"ftis.{_HOME[name]}"), name)
    raise AttributeError(f"module 'ftis' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
