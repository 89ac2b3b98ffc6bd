"""The columns of a user's file of problems, and the kind of its answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ftis.check.plan import HELD_OUT
from ftis.config import RecipeError, TaskConfig, nearest
from ftis.prompts import AnswerKind, Task
from ftis.rewards.answers import graded
from ftis.tasks.jsonl import files
from ftis.tasks.problems import asks, load_task
from ftis.tasks.reading import jsonl_rows

QUESTIONS = ("question", "problem", "prompt", "instruction", "input", "query", "text")
ANSWERS = ("answer", "solution", "target", "output", "label", "response", "completion", "expected", "result")
"""Names under which data sets keep questions and answers, the commonest first."""


@dataclass(frozen=True)
class Problems:
    """The columns of a file of problems, and its answers' kind."""

    path: str
    question: str
    answer: str
    kind: AnswerKind
    task: Task


def problems_in(path: str, question: str | None = None, answer: str | None = None) -> Problems:
    """Look at a ``.jsonl`` file, or a directory of them.

    Args:
        question, answer: names of columns; guessed by default.

    Raises:
        FtisError: no such file, no such column, or rows that are no problems.
    """
    train, validation = files(TaskConfig(name="jsonl", path=path))
    rows = [row for row, _ in jsonl_rows(train or validation or Path(path))]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    asked = question or _guess(columns, QUESTIONS, "question", path)
    right = answer or _guess(columns, ANSWERS, "answer", path, asked)
    for name, option in ((asked, "question"), (right, "answer")):
        if name not in columns:
            raise RecipeError(f"--{option} {name}: {path} has no such column{nearest(name, columns)}")
    config = TaskConfig(name="jsonl", path=path, question_field=asked, answer_field=right)
    task = load_task(config)
    if not task.train:
        raise RecipeError(f"{path} has only problems to validate with: add some to train on, as train.jsonl")
    n = len({asks(problem.question) for problem in (*task.train, *task.validation)})
    if validation is None:
        task = load_task(config.model_copy(update={"validation_size": max(1, min(100, n // HELD_OUT))}))
    answers = [problem.answer for problem in (*task.train, *task.validation)]
    kind: AnswerKind = "exact"
    if all(graded(f" {text}", text, "number", extract="last_number")[1] for text in answers):
        kind = "number"
    elif any("\\" in text or "$" in text for text in answers):
        kind = "math"
    return Problems(path, asked, right, kind, task)


def _guess(columns: Sequence[str], usual: Sequence[str], option: str, path: str, taken: str = "") -> str:
    """The column, other than ``taken``, with the commonest usual name; without such a name the only column."""
    by_name = {name.lower(): name for name in columns if name != taken}
    found = [by_name[name] for name in usual if name in by_name] or list(by_name.values())[: len(by_name) == 1]
    if not found:
        one = f"one beside {taken!r}, which holds the question," if taken else "one"
        raise RecipeError(f"{path} has the columns {', '.join(columns) or 'none'}: name {one} by --{option}")
    return found[0]
