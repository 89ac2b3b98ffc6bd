"""The clock calculator: arithmetic from left to right modulo 10, made on the spot."""

from __future__ import annotations

import itertools
import re
import zlib
from functools import lru_cache

import numpy as np

from ftis.config import TaskConfig, excerpt
from ftis.prompts import Task, TaskError
from ftis.tasks.problems import Problem, make_task, refuse_settings
from ftis.tasks.splitting import Split, draw, subset

_QUESTION = re.compile(r"[0-9](?:[+*-][1-9])+")
_STEPS = [sign + digit for sign in "+-*" for digit in "123456789"]  # times 0 would make 0 too common
_ENUMERATED = 2
"""Problems of up to this many operators are listed; those of more are drawn."""


OPTIONS = {"operators": 2}
"""Defaults of ``task.options``, which advice makes smaller."""


def clock_problem(rng: np.random.Generator, operators: int) -> str:
    """A random question like ``3+8*7``: a digit, then ``operators`` times a sign and a digit from 1 to 9."""
    steps = rng.integers(len(_STEPS), size=operators)
    return str(rng.integers(10)) + "".join(_STEPS[step] for step in steps)


def clock_solution(question: str) -> tuple[tuple[str, ...], str]:
    """The steps from left to right modulo 10, and the answer: ``3+8*7`` gives ``("3+8=1", "1*7=7"), "7"``."""
    if not _QUESTION.fullmatch(question):
        raise TaskError(
            f"{excerpt(question)} is not a clock problem; write a digit and then signs and digits, as in 3+8*7"
        )
    value, steps = int(question[0]), []
    for sign, digit in zip(question[1::2], question[2::2], strict=True):
        operand = int(digit)
        result = (value + operand if sign == "+" else value - operand if sign == "-" else value * operand) % 10
        steps.append(f"{value}{sign}{digit}={result}")
        value = result
    return tuple(steps), str(value)


def clock_held_out(question: str) -> bool:
    """Whether a problem is kept for validation: a tenth of all, chosen by the question alone, whatever the seed.

    Training data made elsewhere for this task can thus leave out exactly the validation problems.
    """
    return zlib.crc32(question.encode()) % 10 == 0


def load(config: TaskConfig) -> Task:
    """Clock problems of ``task.options.operators`` operators, 2 by default."""
    refuse_settings(config, "path", "train_file", "validation_file", "question_field", "answer_field")
    if unknown := set(config.options) - OPTIONS.keys():
        raise TaskError(f"task.options.{min(unknown)}: clock has one option, 'operators'")
    operators = {**OPTIONS, **config.options}["operators"]
    if type(operators) is not int or not 1 <= operators <= 32:
        raise TaskError(f"task.options.operators = {operators!r}: use a whole number from 1 to 32")
    return _problems(config.name, operators, config.train_size, config.validation_size, config.seed)


@lru_cache(maxsize=8)
def _problems(name: str, operators: int, train_size: int | None, validation_size: int | None, seed: int) -> Task:
    """The task, made once a process: a run asks for it before it starts, and again for each of its peers."""
    if operators <= _ENUMERATED:
        steps = itertools.product(_STEPS, repeat=operators)
        every = [start + "".join(rest) for rest in steps for start in "0123456789"]
        kept = [question for question in every if not clock_held_out(question)]
        held_out = [question for question in every if clock_held_out(question)]
        few = validation_size or min(300, len(held_out))
        train = [_solved(question) for question in subset(kept, train_size, seed, "train")]
        validation = [_solved(question) for question in subset(held_out, few, seed, "validation")]
    else:
        train = _draw(train_size or 5000, operators, seed, "train")
        validation = _draw(validation_size or 300, operators, seed, "validation")
    return make_task(name, train, validation, "exact")


def _solved(question: str) -> Problem:
    steps, answer = clock_solution(question)
    return question, answer, {"solution": ";".join(steps)}


def _draw(size: int, operators: int, seed: int, split: Split) -> list[Problem]:
    def problem(rng: np.random.Generator) -> Problem | None:
        question = clock_problem(rng, operators)
        return _solved(question) if clock_held_out(question) == (split == "validation") else None

    few = f"clock with {operators} operators has too few different problems"
    return draw(problem, size, seed, split, f"{few}; ask for fewer or raise task.options.operators")
