"""The process that compares LaTeX formulas by math-verify, with limits (``python -m ftis.rewards.latex``)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from ftis.machine.helper import Helper, Judge, serve


@lru_cache(maxsize=4096)  # completions of a group often give the same answer
def holds(question: tuple[Any, ...]) -> bool:
    """Whether the answer to a ``shapes.Question`` is yes: one request, so one time limit for an answer."""
    return bool(_helper.ask({"question": question}))


_helper = Helper("ftis.rewards.latex", "compares LaTeX", "math-verify")


def _load_judge() -> Judge:
    from ftis.rewards.formula_judge import open_judge

    decide = open_judge()
    # These comparisons, one of numbers and one of symbols, load what later ones need.
    if not decide(("all", ("equal", "\\frac{1}{2}", "0.5", 6), ("equal", "x^2=1", "(x-1)(x+1)=0", 6))):
        raise ImportError("this math-verify cannot tell that 1/2 is 0.5")
    return lambda request: decide(request["question"])


if __name__ == "__main__":
    serve(_load_judge)
