"""Another task, with some of its training problems as validation (``research.held_out.load``).

Its own validation stays unseen.
"""

from __future__ import annotations

from pydantic import ValidationError

from ftis.config import TaskConfig
from ftis.prompts import Task, TaskError
from ftis.tasks.problems import load_task, make_task, refuse_settings
from ftis.tasks.splitting import hold_out

LARGEST_PART = 5
"""At most a fifth of the training questions is held out, whatever ``validation_size`` asks for."""


def load(config: TaskConfig) -> Task:
    """The task of the ``[task]`` section in ``config.options``, with other validation problems.

    ``config.seed`` draws ``config.validation_size`` of its training problems; the default is the task's own number.

    Raises:
        TaskError: the options are no task's, or it has too few problems to train on.
    """
    refuse_settings(config, "path", "train_file", "validation_file", "question_field", "answer_field", "train_size")
    try:
        named = TaskConfig(**config.options)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise TaskError(f"task.options.{key} of {config.name!r}: {first['msg']}; give a task's own keys") from None
    task = load_task(named)
    different = len({prompt.question for prompt in task.train})
    if different < LARGEST_PART:
        raise TaskError(
            f"task {named.name!r} has {different} different problems to train on: to hold some out of them takes "
            f"{LARGEST_PART} or more; set task.train_size or name a training file"
        )
    size = min(config.validation_size or len(task.validation), different // LARGEST_PART)
    problems = [(prompt.question, prompt.answer, prompt.columns) for prompt in task.train]
    train, validation = hold_out(problems, size, config.seed, f"task {named.name!r}")
    return make_task(config.name, train, validation, task.answer_kind)
