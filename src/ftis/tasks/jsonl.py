"""Problems from JSON Lines files of the user's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ftis.config import TaskConfig, did_you_mean
from ftis.prompts import Task, TaskError
from ftis.tasks.problems import Problem, make_task, refuse_settings, require_disjoint
from ftis.tasks.reading import jsonl_rows, problem_of
from ftis.tasks.splitting import hold_out, subset


def load(config: TaskConfig) -> Task:
    """Problems from ``task.path``, a ``.jsonl`` file or a directory of them.

    Without a validation file, some problems are held out of training, with all their copies. With one, a question in
    both files is an error. A directory with only a validation file is a task for evaluation. A row has None for a
    column that other rows have.
    """
    refuse_settings(config, "options")
    question_field, answer_field = config.question_field or "question", config.answer_field or "answer"
    train_file, validation_file = files(config)

    def read(file: Path) -> list[Problem]:
        return [problem_of(row, question_field, answer_field, where) for row, where in jsonl_rows(file)]

    train = read(train_file) if train_file else []
    validation = read(validation_file) if validation_file else []
    copies = 0
    # A reward function that names a column would fail on the first row without it, in the middle of a run.
    columns: dict[str, Any] = dict.fromkeys(name for _, _, given in (*train, *validation) for name in given)
    train = [(question, answer, columns | dict(given)) for question, answer, given in train]
    validation = [(question, answer, columns | dict(given)) for question, answer, given in validation]
    if validation_file:
        require_disjoint((q for q, *_ in train), (q for q, *_ in validation), f"{train_file} and {validation_file}")
        validation = subset(validation, config.validation_size, config.seed, "validation")
    else:
        kept, validation = hold_out(train, config.validation_size, config.seed, str(train_file))
        train, copies = kept, len(train) - len(kept) - len(validation)
    if not train and config.train_size is not None:
        raise TaskError(
            f"task.train_size = {config.train_size}: {validation_file} is for evaluation only; leave it out"
        )
    task = make_task(config.name, subset(train, config.train_size, config.seed, "train"), validation, "exact")
    return replace(task, copies=copies)


def files(config: TaskConfig) -> tuple[Path | None, Path | None]:
    """The training and the validation file; one may be absent."""
    if config.path is None:
        raise TaskError("task.path is missing: name a .jsonl file or a directory of them")
    path = Path(config.path)
    if not path.exists():
        place = "" if path.is_absolute() else f" in {Path.cwd()}, where the command runs"
        hint = did_you_mean(path.name, [file.name for file in path.parent.glob("*.jsonl")])
        raise TaskError(f"task.path = {config.path!r}: there is no such file or directory{place}{hint}")
    if path.is_file() and config.train_file is not None:
        raise TaskError(
            f"task.train_file = {config.train_file!r}: task.path already names a file; leave one of them out"
        )
    directory = path if path.is_dir() else path.parent

    def named(key: str, name: str) -> Path:
        if not (directory / name).is_file():
            present = ", ".join(sorted(file.name for file in directory.glob("*.jsonl"))) or "none"
            raise TaskError(
                f"task.{key} = {name!r}: there is no such file in {directory}; .jsonl files there: {present}"
            )
        return directory / name

    validation_file = config.validation_file
    if validation_file is None and path.is_dir() and (path / "validation.jsonl").is_file():
        validation_file = "validation.jsonl"
    validation = None if validation_file is None else named("validation_file", validation_file)
    if path.is_file():
        return path, validation
    if config.train_file is None and validation is not None and not (path / "train.jsonl").is_file():
        return None, validation
    return named("train_file", config.train_file or "train.jsonl"), validation
