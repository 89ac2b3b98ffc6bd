"""Procedural data sets of reasoning-gym, made in a process of their own (``python -m ftis.tasks.gym``).

Some data sets depend on the order of Python's sets of strings, which differs from process to process. The generating
process runs with a fixed order (``PYTHONHASHSEED``). It needs no limits, because it reads no stranger's text.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from ftis.config import TaskConfig, excerpt, nearest
from ftis.prompts import Task, TaskError
from ftis.rewards.gym_judge import OwnScore, scores_itself
from ftis.tasks.problems import Problem, make_task, refuse_settings
from ftis.version import extra

VALIDATION, FEWEST = 200, 50
"""Validation problems without task.validation_size, and the fewest then. On 50 an accuracy of .5 has a standard error
of .07."""


def load(config: TaskConfig) -> Task:
    """Problems of the data set named after the colon, with ``task.options`` as its settings.

    Validation problems come from another seed than training problems and leave out those of training. Many data sets
    make problem i from seed + i, so near seeds would share problems: the seeds here are far apart.
    """
    refuse_settings(config, "path", "train_file", "validation_file", "question_field", "answer_field")
    _, _, dataset = config.name.partition(":")
    if not dataset:
        raise TaskError(f"task.name = {config.name!r}: name a data set of it, as in 'reasoning_gym:basic_arithmetic'")
    for reserved in {"size", "seed"} & set(config.options):
        raise TaskError(f"task.options.{reserved}: set task.train_size, task.validation_size and task.seed instead")
    train_size, wanted = config.train_size or 2000, config.validation_size or VALIDATION

    def part(name: str, size: int) -> tuple[int, int]:
        digest = hashlib.sha256(f"{config.seed}/{name}".encode()).digest()
        return size, int.from_bytes(digest[:4], "big") >> 1

    made, own = _generate(dataset, config.options, [part("train", train_size), part("validation0", wanted)])
    scorer = (dataset, json.dumps(dict(config.options))) if own else None
    train = list(_problems(made[0], f"{config.name}, training problem", scorer))
    trained = {question for question, _, _ in train}
    fresh: dict[str, Problem] = {}

    def add(entries: list[dict[str, Any]]) -> None:
        for problem in _problems(entries, f"{config.name}, validation problem", scorer):
            if problem[0] not in trained:
                fresh.setdefault(problem[0], problem)

    add(made[1])
    if len(fresh) < wanted:  # training has most of the problems, so few were new: make more
        most = max(wanted, VALIDATION)  # also if fewer are wanted: the error below counts them
        for more in _generate(dataset, config.options, [part(f"validation{n}", most) for n in range(4)])[0]:
            add(more)
    if len(fresh) < (config.validation_size or FEWEST):
        default = "" if config.train_size else ", the default"
        fewer = f" or set task.validation_size = {len(fresh)}," if fresh else ""
        raise TaskError(
            f"{config.name}: of {4 * most} problems made for validation only {len(fresh)} are different and not "
            f"among the {train_size} for training (task.train_size{default}; {len(trained)} are different); lower "
            f"task.train_size, as to {max(1, len(trained) // 2)},{fewer} or widen the problems with task.options"
        )
    return make_task(config.name, train, list(fresh.values())[:wanted], "reasoning_gym" if own else "exact")


def _problems(entries: list[dict[str, Any]], where: str, scorer: tuple[str, str] | None) -> Iterator[Problem]:
    """Problems with the columns ``metadata`` and, if the data set scores answers itself, ``reasoning_gym``."""
    for number, entry in enumerate(entries):
        question, answer = entry["question"], entry["answer"]
        if answer is None and scorer is not None:
            answer = ""  # any solution is scored
        if not isinstance(question, str) or not isinstance(answer, str):
            raise TaskError(
                f"{where} {number}: its answer is {excerpt(answer)}, not a text to compare with; "
                "take a data set with one right answer"
            )
        columns: dict[str, Any] = {"metadata": entry["metadata"]} if "metadata" in entry else {}
        if scorer is not None:
            columns["reasoning_gym"] = OwnScore(dataset=scorer[0], options=scorer[1], entry=json.dumps(entry))
        yield question, answer, columns


def _generate(dataset: str, options: Any, parts: list[tuple[int, int]]) -> tuple[list[list[dict[str, Any]]], bool]:
    """The entries of each part (number, seed), from a process, and whether the data set scores answers itself."""
    try:
        request = json.dumps({"dataset": dataset, "options": options, "parts": parts})
    except (TypeError, ValueError) as error:
        raise TaskError(f"task.options: {error}; use numbers, strings, booleans and lists of them") from None
    done = subprocess.run(
        # -P: a file in the working directory that is named like a library must not be imported instead of it.
        [sys.executable, "-P", "-W", "ignore", "-m", "ftis.tasks.gym"],
        input=request,
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=os.environ | {"PYTHONHASHSEED": "0", "PYTHONIOENCODING": "utf-8"},
        check=False,
    )
    try:
        reply = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise TaskError(f"reasoning_gym:{dataset}: making problems failed: {last}") from None
    if "error" in reply:
        raise TaskError(reply["error"])
    return reply["parts"], reply["own"]


def _serve() -> None:
    """Read a request from stdin; write entries or an error to stdout."""
    request = json.loads(sys.stdin.read())
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # a library may print, and must not spoil the reply
    sys.path[:] = map(os.path.abspath, sys.path)
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):  # codeio's problems write files
        try:
            dataset, options = request["dataset"], request["options"]
            made = [_entries(dataset, options, *part) for part in request["parts"]]
            reply: dict[str, Any] = {"parts": made, "own": scores_itself(dataset, options, made[0])}
        except TaskError as error:
            reply = {"error": str(error)}
    with output:
        json.dump(reply, output)


def _entries(dataset: str, options: Mapping[str, Any], size: int, seed: int) -> list[dict[str, Any]]:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise TaskError(f"reasoning_gym:{dataset}: {error}; pip install {extra('reasoning-gym')}") from error
    if dataset not in DATASETS:
        raise TaskError(f"reasoning_gym:{dataset}: there is no such data set{nearest(dataset, list(DATASETS))}")
    try:
        made = reasoning_gym.create_dataset(dataset, size=size, seed=seed, **options)
    except (TypeError, ValueError, AssertionError) as error:
        raise TaskError(f"reasoning_gym:{dataset}: {error or type(error).__name__}; check task.options") from error
    entries = []
    for entry in map(made.__getitem__, range(size)):
        kept = {"question": entry["question"], "answer": entry["answer"]}
        with contextlib.suppress(TypeError, ValueError, RecursionError):  # metadata are not always JSON
            json.dumps(metadata := entry.get("metadata"), allow_nan=False)
            kept["metadata"] = metadata
        if not isinstance(kept["answer"], str | None):
            kept |= {"answer": repr(kept["answer"]), "question": None}
        entries.append(kept)
    return entries


if __name__ == "__main__":
    _serve()
