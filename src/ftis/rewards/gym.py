"""The process in which reasoning-gym scores answers itself, with limits (``python -m ftis.rewards.gym``)."""

from __future__ import annotations

import json
from functools import lru_cache

from ftis.machine.helper import Helper, Judge, serve
from ftis.rewards.gym_judge import judge
from ftis.version import extra


@lru_cache(maxsize=4096)  # completions of a group often give the same answer
def score(dataset: str, options: str, entry: str, answer: str) -> float:
    """The score, from 0 to 1, of an answer that may be hostile; 0 also if scoring fails or exceeds a limit."""
    found = _helper.ask({"dataset": dataset, "options": options, "entry": entry, "answer": answer})
    return float(found) if isinstance(found, (int, float)) else 0.0


_helper = Helper("ftis.rewards.gym", "scores answers", extra("reasoning-gym"))


def _load_judge() -> Judge:
    import reasoning_gym  # noqa: F401  # its absence must show before the first answer

    return lambda asked: judge(asked["dataset"], asked["options"], json.loads(asked["entry"]), asked["answer"])


if __name__ == "__main__":
    serve(_load_judge)
