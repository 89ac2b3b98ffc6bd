"""Different language models learn together: GRPO on everybody's completions, corrected by F-TIS.

The names below are the public ones; each is imported from its module when first used, so ``import ftis`` is quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftis.advantages import group_advantages as group_advantages
    from ftis.comparison.results import compare as compare
    from ftis.comparison.summary import summarise as summarise
    from ftis.config import FtisError as FtisError
    from ftis.config import PeerConfig as PeerConfig
    from ftis.config import Recipe as Recipe
    from ftis.config import RewardConfig as RewardConfig
    from ftis.engines.supervised import supervised_step as supervised_step
    from ftis.experiment.seeds import run_experiment as run_experiment
    from ftis.library import Results as Results
    from ftis.library import evaluate as evaluate
    from ftis.library import join as join
    from ftis.library import load as load
    from ftis.library import preflight as preflight
    from ftis.library import train as train
    from ftis.objectives import OBJECTIVES as OBJECTIVES
    from ftis.objectives import Objective as Objective
    from ftis.objectives import policy_loss as policy_loss
    from ftis.peer import Peer as Peer
    from ftis.policy import Policy as Policy
    from ftis.recipe.arms import experiment_directory as experiment_directory
    from ftis.recipe.arms import run_directory as run_directory
    from ftis.records.files import read_jsonl as read_jsonl
    from ftis.view.progress import Display as Display
    from ftis.view.report import write_page as write_page
    from ftis.view.tables import print_comparison as print_comparison

_HOME = {
    "FtisError": "config",
    "PeerConfig": "config",
    "Recipe": "config",
    "RewardConfig": "config",
    "load": "library",
    "train": "library",
    "Results": "library",
    "preflight": "library",
    "evaluate": "library",
    "join": "library",
    "run_directory": "recipe.arms",
    "read_jsonl": "records.files",
    "OBJECTIVES": "objectives",
    "Objective": "objectives",
    "group_advantages": "advantages",
    "policy_loss": "objectives",
    "Policy": "policy",
    "Peer": "peer",
    "run_experiment": "experiment.seeds",
    "experiment_directory": "recipe.arms",
    "supervised_step": "engines.supervised",
    "compare": "comparison.results",
    "print_comparison": "view.tables",
    "summarise": "comparison.summary",
    "write_page": "view.report",
    "Display": "view.progress",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"ftis.{_HOME[name]}"), name)
    raise AttributeError(f"module 'ftis' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
