"""GSM8K: grade-school word problems whose answers are numbers. Validation is the test split."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ftis.config import TaskConfig
from ftis.prompts import Task, TaskError
from ftis.tasks.problems import Problem, make_task, refuse_settings, require_disjoint
from ftis.tasks.reading import data_directory, split_rows, text_field
from ftis.tasks.splitting import subset


def load(config: TaskConfig) -> Task:
    """GSM8K from ``task.path`` or from the Hub."""
    refuse_settings(config, "train_file", "validation_file", "question_field", "answer_field", "options")
    root = data_directory(config, "openai/gsm8k", ["main/train-*.parquet", "main/test-*.parquet"])
    train, validation = (
        [_problem(row, where) for row, where in split_rows(root, split, "main/")] for split in ("train", "test")
    )
    require_disjoint((q for q, *_ in train), (q for q, *_ in validation), f"{root}: train and test")
    train = subset(train, config.train_size, config.seed, "train")
    validation = subset(validation, config.validation_size, config.seed, "validation")
    return make_task(config.name, train, validation, "number")


def _problem(row: Mapping[str, Any], where: str) -> Problem:
    question, solution = text_field(row, "question", where), text_field(row, "answer", where)
    _, mark, answer = solution.rpartition("####")
    answer = answer.strip().replace(",", "")
    if not mark or not answer:
        raise TaskError(f"{where}: 'answer' has no final answer after '####'; is this file GSM8K?")
    return question, answer, {"solution": solution}
