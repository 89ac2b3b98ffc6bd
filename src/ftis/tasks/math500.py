"""MATH-500: competition problems whose answers are LaTeX, for evaluation only."""

from __future__ import annotations

from ftis.config import TaskConfig
from ftis.prompts import Task
from ftis.tasks.problems import make_task, refuse_settings
from ftis.tasks.reading import data_directory, problem_of, split_rows
from ftis.tasks.splitting import subset


def load(config: TaskConfig) -> Task:
    """MATH-500 from ``task.path`` or from the Hub."""
    refuse_settings(config, "train_file", "validation_file", "question_field", "answer_field", "train_size", "options")
    root = data_directory(config, "HuggingFaceH4/MATH-500", ["test.jsonl"])
    problems = [problem_of(row, "problem", "answer", where) for row, where in split_rows(root, "test")]
    return make_task(config.name, [], subset(problems, config.validation_size, config.seed, "validation"), "math")
