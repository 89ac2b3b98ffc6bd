"""Problems: where they come from, how they are split, and how one becomes a prompt's token ids.

A task has problems to train on and problems to validate with, disjoint by question. Everything random about a
split follows from the task's own seed, so peers that read the same recipe hold the same problems in the same
order; :attr:`Task.digest` is how they make sure.

===========================  ====================================================  ==============
name                         problems                                              answers are
===========================  ====================================================  ==============
``gsm8k``                    GSM8K, train and test split                           ``number``
``math500``                  MATH-500, for evaluation only                         ``math``
``jsonl``                    your own, from JSON Lines files                       ``exact``
``clock``                    left-to-right arithmetic modulo 10, made on the spot  ``exact``
``reasoning_gym:<dataset>``  a procedural data set of reasoning-gym                ``exact``
===========================  ====================================================  ==============
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from ftis.config import FtisError, PromptConfig, TaskConfig, nearest
from ftis.rollouts import Prompt

_T = TypeVar("_T")
_Problem = tuple[str, str, Mapping[str, Any]]
"""Question, answer, further columns."""


class TaskError(FtisError):
    """Problems that cannot be read or split."""


@dataclass(frozen=True)
class Task:
    name: str
    train: tuple[Prompt, ...]
    """Empty for a task that is for evaluation only."""
    validation: tuple[Prompt, ...]
    answer_kind: str
    """How answers are compared unless the recipe says otherwise: ``number``, ``math`` or ``exact``."""
    digest: str
    """sha256 of the training questions and answers in order, which peers must agree on."""


def load_task(config: TaskConfig) -> Task:
    """The problems that a recipe's ``[task]`` or ``[[ood]]`` section names.

    Raises:
        TaskError: there is no such task, or its problems cannot be read or split as asked.
    """
    family, _, dataset = config.name.partition(":")
    if family == "reasoning_gym":
        if not dataset:
            raise TaskError(
                f"task.name = {config.name!r}: name one of its data sets, as in 'reasoning_gym:basic_arithmetic'"
            )
        return _reasoning_gym(config, dataset)
    if config.name not in _LOADERS:
        known = [*_LOADERS, "reasoning_gym:<dataset>"]
        raise TaskError(f"task.name = {config.name!r}: there is no such task{nearest(config.name, known)}")
    return _LOADERS[config.name](config)


def render_prompt(prompt: Prompt, config: PromptConfig, tokenizer: Any) -> npt.NDArray[np.int32]:
    """Token ids of the text a model continues, int32 [prompt length].

    With a chat template (and ``chat_template = "auto"``): a system message, unless the system prompt is empty,
    and a user message, up to where the assistant's turn begins. Otherwise the system prompt, a blank line and
    the user's turn as plain text, with the special tokens that the tokenizer puts around a text.

    Args:
        tokenizer: a tokenizer of transformers.

    Raises:
        TaskError: no tokens, or the chat template refuses the messages.
    """
    user = config.template.replace("{question}", prompt.question)
    if config.chat_template == "auto" and tokenizer.chat_template:
        from jinja2 import TemplateError

        messages = [{"role": "user", "content": user}]
        if config.system_prompt:
            messages.insert(0, {"role": "system", "content": config.system_prompt})
        try:
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        except TemplateError as error:
            raise TaskError(
                f"the tokenizer's chat template refuses the prompt of problem {prompt.item}: {error}; set "
                'prompt.system_prompt = "" if it takes no system message, or prompt.chat_template = "never"'
            ) from error
    else:
        text = f"{config.system_prompt}\n\n{user}" if config.system_prompt else user
        ids = tokenizer(text, add_special_tokens=True, verbose=False)["input_ids"]
    if len(ids) == 0:
        raise TaskError(
            f"the prompt of problem {prompt.item} ({_short(prompt.question)}) has no tokens; "
            "put some text into prompt.template or prompt.system_prompt"
        )
    return np.array(ids, dtype=np.int32)


# --- GSM8K and MATH-500 ---------------------------------------------------------------------------------------------


def _gsm8k(config: TaskConfig) -> Task:
    _refuse(config, "train_file", "validation_file", "question_field", "answer_field", "options")
    root = _data_directory(config, "openai/gsm8k", ["main/train-*.parquet", "main/test-*.parquet"])

    def problem(row: Mapping[str, Any], where: str) -> _Problem:
        question, solution = _text(row, "question", where), _text(row, "answer", where)
        _, mark, answer = solution.rpartition("####")
        answer = answer.strip().replace(",", "")
        if not mark or not answer:
            raise TaskError(f"{where}: 'answer' has no final answer after '####'; is this file GSM8K?")
        return question, answer, {"solution": solution}

    train, validation = ([problem(row, at) for row, at in _split(root, split, "main/")] for split in ("train", "test"))
    _require_disjoint(train, validation, f"{root}: train and test")
    return _task(
        config,
        _subset(train, config.train_size, config.seed, 0, "task.train_size"),
        _subset(validation, config.validation_size, config.seed, 1, "task.validation_size"),
        "number",
    )


def _math500(config: TaskConfig) -> Task:
    _refuse(config, "train_file", "validation_file", "question_field", "answer_field", "train_size", "options")
    root = _data_directory(config, "HuggingFaceH4/MATH-500", ["test.jsonl"])
    problems = [
        (_text(row, "problem", at), _answer(row, "answer", at), _columns(row, "problem", "answer"))
        for row, at in _split(root, "test", "")
    ]
    validation = _subset(problems, config.validation_size, config.seed, 1, "task.validation_size")
    return _task(config, [], validation, "math")


def _data_directory(config: TaskConfig, hub_id: str, patterns: list[str]) -> Path:
    """The local directory that holds the data: the one named, or what the Hub has under that id."""
    path = config.path
    if path is not None:
        if Path(path).is_dir():
            return Path(path)
        if Path(path).exists():
            raise TaskError(f"task.path = {path!r}: is a file; name the directory it is in")
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", path):
            raise TaskError(f"task.path = {path!r}: there is no such directory; leave it out to use {hub_id!r}")
        hub_id = path
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(hub_id, repo_type="dataset", allow_patterns=patterns))
    except (OSError, ValueError) as error:  # what the Hub's own errors are subclasses of
        first_line = str(error).strip().partition("\n")[0]
        raise TaskError(
            f"data set {hub_id!r} cannot be fetched from the Hub: {first_line}; "
            "check the connection, or download it and set task.path to its directory"
        ) from error


def _split(root: Path, split: str, subset: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Rows of one split with their places: JSON Lines, or Parquet as laid out on the Hub."""
    patterns = [f"{split}.jsonl", f"{subset}{split}.jsonl", f"{subset}{split}-*.parquet", f"{split}-*.parquet"]
    for pattern in dict.fromkeys([*patterns, f"data/{split}-*.parquet"]):
        files = sorted(root.glob(pattern))
        if files:
            for file in files:
                yield from _read_jsonl(file) if file.suffix == ".jsonl" else _read_parquet(file)
            return
    raise TaskError(f"{root}: holds no {split!r} split; put {split}.jsonl or {subset}{split}-*.parquet there")


# --- JSON Lines -----------------------------------------------------------------------------------------------------


def _jsonl(config: TaskConfig) -> Task:
    """Problems from files of the user's own.

    Without a validation file, problems are held out by question: copies of a held-out problem leave training
    too. With one, a question in both files is an error, because a validation that was trained on is none. A
    directory with a validation file only is a task for evaluation.
    """
    _refuse(config, "options")
    question_field, answer_field = config.question_field or "question", config.answer_field or "answer"
    train_file, validation_file = _jsonl_files(config)

    def read(file: Path) -> list[_Problem]:
        return [
            (
                _text(row, question_field, at),
                _answer(row, answer_field, at),
                _columns(row, question_field, answer_field),
            )
            for row, at in _read_jsonl(file)
        ]

    train = read(train_file) if train_file else []
    if validation_file:
        validation = read(validation_file)
        _require_disjoint(train, validation, f"{train_file} and {validation_file}")
        validation = _subset(validation, config.validation_size, config.seed, 1, "task.validation_size")
    else:
        train, validation = _hold_out(train, config, str(train_file))
    if not train and config.train_size is not None:
        raise TaskError(
            f"task.train_size = {config.train_size}: {validation_file} is for evaluation only; leave it out"
        )
    return _task(config, _subset(train, config.train_size, config.seed, 0, "task.train_size"), validation, "exact")


def _jsonl_files(config: TaskConfig) -> tuple[Path | None, Path | None]:
    if config.path is None:
        raise TaskError("task.path is missing: name a .jsonl file or a directory of them")
    path = Path(config.path)
    if not path.exists():
        raise TaskError(f"task.path = {config.path!r}: there is no such file or directory")
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

    validation = None
    if config.validation_file is not None:
        validation = named("validation_file", config.validation_file)
    elif path.is_dir() and (path / "validation.jsonl").is_file():
        validation = path / "validation.jsonl"
    if path.is_file():
        return path, validation
    if config.train_file is None and validation is not None and not (path / "train.jsonl").is_file():
        return None, validation
    return named("train_file", config.train_file or "train.jsonl"), validation


def _hold_out(problems: list[_Problem], config: TaskConfig, where: str) -> tuple[list[_Problem], list[_Problem]]:
    firsts = {question: index for index, (question, _, _) in reversed(list(enumerate(problems)))}
    questions = sorted(firsts, key=firsts.__getitem__)
    size = config.validation_size or max(1, min(100, len(questions) // 10))
    if size >= len(questions):
        raise TaskError(
            f"{where}: holding out {size} of {len(questions)} different problems leaves none to train on; "
            "lower task.validation_size or add problems"
        )
    chosen = set(_subset(questions, size, config.seed, 1, "task.validation_size"))
    train = [problem for problem in problems if problem[0] not in chosen]
    return train, [problems[firsts[question]] for question in questions if question in chosen]


# --- clock ----------------------------------------------------------------------------------------------------------

_CLOCK_QUESTION = re.compile(r"[0-9](?:[+*-][1-9])+")
_CLOCK_STEPS = [sign + digit for sign in "+-*" for digit in "123456789"]  # times 0 would make 0 too common
_CLOCK_ENUMERATED = 2
"""Up to this many operators all problems are listed; beyond, they are drawn."""


def clock_problem(rng: np.random.Generator, operators: int) -> str:
    """A random question like ``3+8*7``: a digit, then ``operators`` times a sign and a digit from 1 to 9."""
    steps = rng.integers(len(_CLOCK_STEPS), size=operators)
    return str(rng.integers(10)) + "".join(_CLOCK_STEPS[step] for step in steps)


def clock_solution(question: str) -> tuple[tuple[str, ...], str]:
    """Steps from left to right modulo 10, and the answer: ``3+8*7`` gives ``("3+8=1", "1*7=7"), "7"``."""
    if not _CLOCK_QUESTION.fullmatch(question):
        raise TaskError(
            f"{_short(question)} is not a clock problem; write a digit and then signs and digits, as in 3+8*7"
        )
    value, steps = int(question[0]), []
    for sign, digit in zip(question[1::2], question[2::2], strict=True):
        operand = int(digit)
        result = (value + operand if sign == "+" else value - operand if sign == "-" else value * operand) % 10
        steps.append(f"{value}{sign}{digit}={result}")
        value = result
    return tuple(steps), str(value)


def clock_held_out(question: str) -> bool:
    """Whether a problem is kept for validation: a tenth of all, by the problem itself, whatever the seed.

    So whoever makes training data for the task elsewhere can leave out just what will be validated.
    """
    return zlib.crc32(question.encode()) % 10 == 0


def _clock(config: TaskConfig) -> Task:
    _refuse(config, "path", "train_file", "validation_file", "question_field", "answer_field")
    unknown = set(config.options) - {"operators"}
    if unknown:
        raise TaskError(f"task.options.{sorted(unknown)[0]}: clock has one option, 'operators'")
    operators = config.options.get("operators", 2)
    if type(operators) is not int or not 1 <= operators <= 32:
        raise TaskError(f"task.options.operators = {operators!r}: use a whole number from 1 to 32")
    if operators <= _CLOCK_ENUMERATED:
        steps = itertools.product(_CLOCK_STEPS, repeat=operators)
        every = [start + "".join(rest) for rest in steps for start in "0123456789"]
        kept = [q for q in every if not clock_held_out(q)]
        held_out = [q for q in every if clock_held_out(q)]
        train = _subset(kept, config.train_size, config.seed, 0, "task.train_size")
        size = config.validation_size or min(300, len(held_out))
        validation = _subset(held_out, size, config.seed, 1, "task.validation_size")
    else:
        train = _draw_clock(config.train_size or 5000, operators, config.seed, held_out=False)
        validation = _draw_clock(config.validation_size or 300, operators, config.seed, held_out=True)

    def solved(question: str) -> _Problem:
        steps, answer = clock_solution(question)
        return question, answer, {"solution": ";".join(steps)}

    return _task(config, [solved(q) for q in train], [solved(q) for q in validation], "exact")


def _draw_clock(size: int, operators: int, seed: int, *, held_out: bool) -> list[str]:
    rng = _generator(seed, int(held_out))
    drawn: dict[str, None] = {}
    for _ in range(100 * size):  # a tenth is held out; the rest of the factor is for problems met again
        question = clock_problem(rng, operators)
        if clock_held_out(question) == held_out:
            drawn[question] = None
            if len(drawn) == size:
                return list(drawn)
    key = "validation_size" if held_out else "train_size"
    raise TaskError(
        f"task.{key} = {size}: clock with {operators} operators has too few different problems; "
        "ask for fewer or raise task.options.operators"
    )


# --- reasoning-gym --------------------------------------------------------------------------------------------------


def _reasoning_gym(config: TaskConfig, dataset: str) -> Task:
    """Problems of a reasoning-gym data set; the validation problems come from another seed.

    Many of its data sets make problem i from seed + i, so near seeds share problems: ours are far apart. Some
    depend on the order of Python's sets of strings, which differs from process to process: problems are made
    in a process of their own with that order fixed.
    """
    _refuse(config, "path", "train_file", "validation_file", "question_field", "answer_field")
    train_size, wanted = config.train_size or 2000, config.validation_size or 200
    for reserved in {"size", "seed"} & set(config.options):
        raise TaskError(f"task.options.{reserved}: set task.train_size, task.validation_size and task.seed instead")

    where = f"reasoning_gym:{dataset}"

    def part(name: str, size: int) -> tuple[int, int]:
        digest = hashlib.sha256(f"{config.seed}/{name}".encode()).digest()
        return size, int.from_bytes(digest[:4], "big") >> 1

    made = _generate(dataset, config.options, [part("train", train_size), part("validation0", wanted)])
    train = [_gym_problem(entry, f"{where}, training problem {i}") for i, entry in enumerate(made[0])]
    seen = {question for question, _, _ in train}
    fresh: dict[str, _Problem] = {}

    def add(entries: list[dict[str, Any]]) -> None:
        for i, entry in enumerate(entries):
            problem = _gym_problem(entry, f"{where}, validation problem {i}")
            if problem[0] not in seen:
                fresh.setdefault(problem[0], problem)

    add(made[1])
    if len(fresh) < wanted:  # training has met most problems, so few were new: look at more
        for more in _generate(dataset, config.options, [part(f"validation{n}", wanted) for n in (1, 2, 3)]):
            add(more)
    if not fresh or (config.validation_size is not None and len(fresh) < wanted):
        raise TaskError(
            f"reasoning_gym:{dataset}: of {4 * wanted} validation problems only {len(fresh)} are different and not "
            f"among the {train_size} for training; lower task.train_size or task.validation_size, or widen the "
            "problems with task.options"
        )
    return _task(config, train, list(fresh.values())[:wanted], "exact")


def _gym_problem(entry: Mapping[str, Any], where: str) -> _Problem:
    question, answer = entry["question"], entry["answer"]
    if not isinstance(question, str) or not isinstance(answer, str):
        raise TaskError(
            f"{where}: its answer is {_short(answer)}, not a text to compare with; "
            "take a data set with one right answer"
        )
    return question, answer, {"metadata": entry["metadata"]} if "metadata" in entry else {}


def _generate(dataset: str, options: Mapping[str, Any], parts: list[tuple[int, int]]) -> list[list[dict[str, Any]]]:
    """Problems of each part, which is (how many, from which seed)."""
    try:
        request = json.dumps({"dataset": dataset, "options": options, "parts": parts})
    except (TypeError, ValueError) as error:
        raise TaskError(f"task.options: {error}; use numbers, strings, booleans and lists of them") from None
    done = subprocess.run(
        # -P: a file named like a library in the working directory must not be imported instead of it.
        [sys.executable, "-P", "-W", "ignore", "-m", "ftis.tasks"],
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
    made: list[list[dict[str, Any]]] = reply["parts"]
    return made


def _serve() -> None:
    """The generating process's side: a request on stdin, problems or an error on stdout."""
    request = json.loads(sys.stdin.read())
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints is no part of the reply
    try:
        dataset, options = request["dataset"], request["options"]
        reply: dict[str, Any] = {"parts": [_gym_entries(dataset, options, *part) for part in request["parts"]]}
    except TaskError as error:
        reply = {"error": str(error)}
    with output:
        json.dump(reply, output)


def _gym_entries(dataset: str, options: Mapping[str, Any], size: int, seed: int) -> list[dict[str, Any]]:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise TaskError(f"reasoning_gym:{dataset}: {error}; pip install 'ftis[reasoning-gym]'") from error
    if dataset not in DATASETS:
        raise TaskError(f"reasoning_gym:{dataset}: there is no such data set{nearest(dataset, list(DATASETS))}")
    try:
        made = reasoning_gym.create_dataset(dataset, size=size, seed=seed, **options)
    except (TypeError, ValueError, AssertionError) as error:
        raise TaskError(f"reasoning_gym:{dataset}: {error or type(error).__name__}; check task.options") from error
    entries = []
    for i in range(size):
        entry = made[i]
        kept = {"question": entry["question"], "answer": entry["answer"]}
        if _is_json(entry.get("metadata")):
            kept["metadata"] = entry["metadata"]
        if not isinstance(kept["answer"], str):
            kept["answer"] = None if kept["answer"] is None else repr(kept["answer"])
            kept["question"] = None
        entries.append(kept)
    return entries


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


# --- reading and splitting ------------------------------------------------------------------------------------------


def _read_jsonl(file: Path) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Objects of a JSON Lines file with their places; blank lines are skipped."""
    count = number = 0
    try:
        with file.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                where = f"{file}, line {number}"
                try:
                    row = json.loads(line, parse_constant=_not_json)
                except (ValueError, RecursionError) as error:
                    raise TaskError(f"{where}: is not JSON: {error}; write one object a line") from None
                if not isinstance(row, dict):
                    raise TaskError(f"{where}: is a {type(row).__name__}, not an object; write one object a line")
                count += 1
                yield row, where
    except UnicodeDecodeError as error:
        raise TaskError(f"{file}, after line {number}: is not UTF-8: {error}; convert it") from None
    except OSError as error:
        raise TaskError(f"{file} cannot be read: {error.strerror or error}") from error
    if not count:
        raise TaskError(f"{file}: holds no problems; write one JSON object a line")


def _not_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON value")


def _read_parquet(file: Path) -> Iterator[tuple[Mapping[str, Any], str]]:
    import pyarrow
    from pyarrow import parquet

    try:
        rows = parquet.read_table(file).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise TaskError(f"{file} cannot be read as Parquet: {first_line}; download it again") from error
    if not rows:
        raise TaskError(f"{file}: holds no problems; download it again")
    for number, row in enumerate(rows, 1):
        yield row, f"{file}, row {number}"


def _field(row: Mapping[str, Any], field: str, where: str) -> Any:
    if field not in row:
        there = ", ".join(sorted(map(str, row))) or "none"
        raise TaskError(
            f"{where}: has no field {field!r}; fields there: {there} "
            "(jsonl: name them with task.question_field and task.answer_field)"
        )
    return row[field]


def _text(row: Mapping[str, Any], field: str, where: str) -> str:
    value = _field(row, field, where)
    if not isinstance(value, str) or not value.strip():
        raise TaskError(f"{where}: {field!r} is {_short(value)}; write a text that is not blank")
    return value


def _answer(row: Mapping[str, Any], field: str, where: str) -> str:
    """The answer as text; a number is written as JSON writes it."""
    value = _field(row, field, where)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            return json.dumps(value, allow_nan=False)
        except ValueError:  # 1e999 is read as infinity
            raise TaskError(f"{where}: {field!r} is {value}, not a finite number; write it as a string") from None
    if not isinstance(value, str) or not value.strip():
        raise TaskError(f"{where}: {field!r} is {_short(value)}; write a string that is not blank, or a number")
    return value.strip()


def _columns(row: Mapping[str, Any], *used: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in used}


def _refuse(config: TaskConfig, *fields: str) -> None:
    """A setting that this task would ignore is a mistake in the recipe."""
    for field in fields:
        if getattr(config, field):
            raise TaskError(
                f"task.{field} = {getattr(config, field)!r}: means nothing to {config.name!r}; leave it out"
            )


def require_unseen(task: Task, ood: Task) -> None:
    """Refuse an out-of-distribution task some of whose problems are trained on.

    Raises:
        TaskError: how many questions they share, and one of them.
    """
    trained = {prompt.question for prompt in task.train}
    both = sorted(prompt.question for prompt in ood.validation if prompt.question in trained)
    if both:
        raise TaskError(
            f"ood task {ood.name!r}: {len(both)} of its questions are trained on, the first of them {_short(both[0])}; "
            "remove them from one, or the evaluation measures memory"
        )


def _require_disjoint(train: Sequence[_Problem], validation: Sequence[_Problem], where: str) -> None:
    both = {question for question, _, _ in train} & {question for question, _, _ in validation}
    if both:
        raise TaskError(
            f"{where}: share {len(both)} questions, the first of them {_short(min(both))}; "
            "remove them from one, or validation measures memory"
        )


def _generator(seed: int, stream: int) -> np.random.Generator:
    return np.random.default_rng([abs(seed), int(seed < 0), stream])


def _subset(items: Sequence[_T], size: int | None, seed: int, stream: int, key: str) -> list[_T]:
    """A seeded choice in the order of ``items``; all of them without a size."""
    if size is None:
        return list(items)
    if size > len(items):
        raise TaskError(f"{key} = {size}: there are only {len(items)} problems; ask for at most {len(items)}")
    return [items[i] for i in sorted(_generator(seed, stream).permutation(len(items))[:size])]


def _task(config: TaskConfig, train: Sequence[_Problem], validation: Sequence[_Problem], answer_kind: str) -> Task:
    def prompts(problems: Sequence[_Problem]) -> tuple[Prompt, ...]:
        return tuple(Prompt(i, q, a, MappingProxyType(dict(columns))) for i, (q, a, columns) in enumerate(problems))

    canonical = json.dumps([[question, answer] for question, answer, _ in train], separators=(",", ":"))
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    return Task(config.name, prompts(train), prompts(validation), answer_kind, digest)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


_LOADERS: Mapping[str, Callable[[TaskConfig], Task]] = {
    "gsm8k": _gsm8k,
    "math500": _math500,
    "jsonl": _jsonl,
    "clock": _clock,
}


if __name__ == "__main__":
    _serve()
