"""Answers scored by their own data set of reasoning-gym, in a process with limits (``python -m ftis.rewards.gym``).

Many problems have more than one right answer, and many answers more than one spelling. What scores them was not made
for hostile texts: some data sets evaluate an answer as Python. In the helper such an answer can be a literal or a
formula and nothing else.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any

from ftis.rewards.helper import Helper, Judge, serve

FUNCTIONS = frozenset({"Integer", "Float", "Rational", "Symbol", "sqrt", "exp", "log", "Abs", "sin", "cos", "tan"} | {
    f"{prefix}{name}" for prefix in ("a", "") for name in ("sinh", "cosh", "tanh")
} | {"asin", "acos", "atan", "sec", "csc", "cot", "erf"})  # fmt: skip
CONSTANTS = frozenset({"pi", "E", "I"})
"""What a formula may name beside its data set's own symbols."""

_ALLOWED = (
    *(ast.Expression, ast.Constant, ast.Name, ast.Load, ast.Call, ast.BinOp, ast.UnaryOp),
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.USub, ast.UAdd),
)


def score(dataset: str, options: str, entry: str, answer: str) -> float:
    """The data set's score of an answer, from 0 to 1; 0 also where scoring exceeds a limit or fails.

    Args:
        options: the data set's settings, as JSON.
        entry: question, answer and metadata of the problem, as JSON.
        answer: at most a few hundred characters; may be hostile.

    Raises:
        RewardError: the helper process cannot be started.
    """
    return _score(dataset, options, entry, answer)


@lru_cache(maxsize=4096)  # completions of a group often give the same answer
def _score(dataset: str, options: str, entry: str, answer: str) -> float:
    found = _helper.ask({"dataset": dataset, "options": options, "entry": entry, "answer": answer})
    return min(1.0, max(0.0, float(found))) if isinstance(found, (int, float)) else 0.0


_helper = Helper("ftis.rewards.gym", "scores answers", "'ftis[reasoning-gym]'")

# --- the helper process ---------------------------------------------------------------------------------------------


def _load_reasoning_gym() -> Judge:
    import json

    parser: Any = importlib.import_module("sympy.parsing.sympy_parser")
    importlib.import_module("reasoning_gym")
    evaluate = parser.eval_expr

    def evaluate_formula(code: str, local_dict: Mapping[str, Any], global_dict: Mapping[str, Any]) -> Any:
        require_formula(code, local_dict)
        return evaluate(code, local_dict, global_dict)

    def judge(request: dict[str, Any]) -> float:
        parser.eval_expr = evaluate  # making problems evaluates the data set's own formulas
        dataset = dataset_of(request["dataset"], request["options"])
        parser.eval_expr = evaluate_formula
        return float(dataset.score_answer(request["answer"], json.loads(request["entry"])))

    return judge


@cache
def dataset_of(name: str, options: str) -> Any:
    """A data set that scores, where ``eval`` reads literals only."""
    import json

    import reasoning_gym

    made = reasoning_gym.create_dataset(name, size=1, seed=0, **json.loads(options))
    for part in type(made).__mro__:
        module: Any = sys.modules[part.__module__]
        if part.__module__.startswith("reasoning_gym."):
            module.eval = ast.literal_eval
    return made


def require_formula(code: str, symbols: Mapping[str, Any]) -> None:
    """Refuse Python that is more than a formula of numbers, ``symbols`` and well-known functions.

    Raises:
        ValueError: it is more.
    """
    for node in ast.walk(ast.parse(code.strip(), mode="eval")):
        if not isinstance(node, _ALLOWED):
            raise ValueError(f"{type(node).__name__} is no part of a formula")
        if isinstance(node, ast.Call) and (node.keywords or not isinstance(node.func, ast.Name)):
            raise ValueError("only a function of formulas is called")
        if isinstance(node, ast.Name) and node.id not in FUNCTIONS | CONSTANTS | symbols.keys():
            raise ValueError(f"{node.id!r} is no name of a formula")
        if isinstance(node, ast.Constant) and not (isinstance(node.value, (int, float)) or _plain(node.value)):
            raise ValueError("a text is no formula")


def _plain(value: object) -> bool:
    """Whether a text is the name of a symbol or a number, as ``Symbol('x')`` and ``Float('1.5')`` have it."""
    return isinstance(value, str) and len(value) <= 64 and value.replace(".", "").replace("_", "").isalnum()


if __name__ == "__main__":
    serve(_load_reasoning_gym)
