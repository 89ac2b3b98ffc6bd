"""Text to number: the built-in reward function, and the modules that it is made of.

``answers.py`` has the function, :func:`format_and_answer`. ``grammar.py`` lists the ways to write an answer; ``words``,
``numbers``, ``formulas`` and ``shapes`` read answers with it. ``latex.py`` compares formulas and ``gym.py`` scores
answers, each in a process with limits. ``scoring.py`` calls a reward function, this or a recipe's own.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftis.rewards.answers import answers_equal, extract_answer, format_and_answer, graded

__all__ = ["answers_equal", "extract_answer", "format_and_answer", "graded"]


def __getattr__(name: str) -> Any:  # the helper's process imports this package and needs none of its modules
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("ftis.rewards.answers"), name)
