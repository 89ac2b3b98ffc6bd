"""A first recipe from a few answers, for ``ftis new``. It fits the problems and this machine's memory."""

from __future__ import annotations

import json
import math
import re
import shutil
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ftis.check.estimate import totals
from ftis.check.plan import HELD_OUT, remarks
from ftis.check.rates import first_rate
from ftis.config import RecipeError, TaskConfig, nearest
from ftis.engines.devices import device_kind
from ftis.engines.machine import nearest_existing
from ftis.engines.models import load_tokenizer
from ftis.models import starters
from ftis.models.sizes import parameters_of
from ftis.policy import resolve_device
from ftis.preparing.checks import check
from ftis.preparing.exchange import vocabulary
from ftis.prompts import AnswerKind, Task
from ftis.recipe.arms import arms_of
from ftis.recipe.parsing import load, parse
from ftis.rewards.numbers import read_number
from ftis.tasks.jsonl import files
from ftis.tasks.problems import asks, load_task
from ftis.tasks.reading import jsonl_rows

Train = Literal["full", "lora"]
REWARDS = ("exact", "number", "math", "own")
QUESTIONS = ("question", "problem", "prompt", "instruction", "input", "query", "text")
ANSWERS = ("answer", "solution", "target", "output", "label", "response", "completion", "expected", "result")
"""Names under which data sets keep questions and answers, the commonest first."""

LARGE = 1e9
"""Parameters from which an instruct model is asked in its chat template to think first. Smaller ones are shown how."""
GENERATIONS, PROMPTS = 8, {"cpu": 12, "cuda": 24}
"""Completions of a prompt, and prompts of a round by kind of device."""
THINKING, OF_STARTERS = 512, 40
"""Tokens in which a large instruct model, and a starter, thinks and answers."""
SHORT = 64
"""Completions of up to so many tokens need a lower threshold of the KL filter: longer ones can reach 50 nats."""
EXAMPLES = 2
WIDTH = 48
"""The column at which comments begin, unless a value reaches beyond it."""
SAVERS: tuple[tuple[str, Any, str], ...] = (
    ("tokens_per_microbatch", 4096, "padded tokens in a pass of learning: fewer take less memory"),
    ("tokens_per_microbatch", 1024, "padded tokens in a pass of learning: fewer take less memory"),
    ("gradient_checkpointing", True, "computes activations twice instead of keeping them: less memory, slower"),
    ("tokens_per_microbatch", 256, "padded tokens in a pass of learning: fewer take less memory"),
)
"""Keys of a peer that save memory, each tried together with those before it."""
SPARE = 0.8
"""The part of the free memory that a recipe may take."""

Line = tuple[str, Any, str]
"""A key, its value, and its comment."""
Section = tuple[str, list[Line]]
"""A header, and its lines."""


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
    n = len({asks(problem.question) for problem in (*task.train, *task.validation)})
    if validation is None:
        task = load_task(config.model_copy(update={"validation_size": max(1, min(100, n // HELD_OUT))}))
    answers = [problem.answer for problem in (*task.train, *task.validation)]
    kind: AnswerKind = "exact"
    if all(read_number(text) is not None for text in answers):
        kind = "number"
    elif any("\\" in text or "$" in text for text in answers):
        kind = "math"
    return Problems(path, asked, right, kind, task)


def _guess(columns: Sequence[str], usual: Sequence[str], option: str, path: str, taken: str = "") -> str:
    """The column with a usual name, or the only one there is, other than the one that is taken."""
    by_name = {name.lower(): name for name in columns if name != taken}
    found = [by_name[name] for name in usual if name in by_name] or list(by_name.values())[: len(by_name) == 1]
    if not found:
        one = f"one beside {taken!r}, which holds the question," if taken else "one"
        raise RecipeError(f"{path} has the columns {', '.join(columns) or 'none'}: name {one} by --{option}")
    return found[0]


def begin(
    directory: Path,
    peers: Sequence[tuple[str, Train]],
    problems: Problems,
    reward: str,
    doing: Callable[[str], None] = lambda text: None,
) -> tuple[list[Path], list[str]]:
    """Write the files of a first recipe, and check that it can run.

    Args:
        doing: hears each thing that is done, since it takes a while.

    Returns:
        the files, and remarks on the recipe with a line about its memory.

    Raises:
        FtisError: a file is there already, or the recipe cannot run; then nothing is left behind.
    """
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", directory.resolve().name).lstrip("_.-")[:48] or "mine"
    module = re.sub(r"\W", "_", f"_{name}_reward" if name[0].isdigit() else f"{name}_reward")
    recipe = directory / "recipe.toml"
    files = [recipe, *[directory / f"{module}.py"] * (reward == "own")]
    if there := [file for file in files if file.exists()]:
        raise RecipeError(f"{there[0]} is there already: name another directory, or move the file away")
    doing("reading the models' tokenizers")
    sections = _sections(name, peers, problems, reward, module)
    before = nearest_existing(directory)
    directory.mkdir(parents=True, exist_ok=True)
    try:
        for stub in files[1:]:
            stub.write_text(_stub(name, problems), encoding="utf-8")
        recipe.write_text(_toml(sections), encoding="utf-8")
        doing("trying the prompts and the reward")
        checked = check(arms_of(load(recipe)))
        doing("measuring the memory of an update")
        sections, needs = _fitting(sections)
        recipe.write_text(_toml(sections), encoding="utf-8")
        return files, [*remarks(checked), *needs]
    except BaseException:
        for file in files:
            file.unlink(missing_ok=True)
        shutil.rmtree(directory / "__pycache__", ignore_errors=True)  # of the reward, which was tried
        while directory.absolute() != before:
            directory.rmdir()
            directory = directory.absolute().parent
        raise


def _stub(name: str, problems: Problems) -> str:
    """A reward function to edit."""
    others = ", ".join(sorted({column for problem in problems.task.train for column in problem.columns}))
    return STUB.format(name=name, columns=others or "this file has none")


STUB = '''"""The reward of {name}. Edit it; ftis preflight shows what completions earn."""

import re


def reward(prompts, completions, completion_ids, answer, **columns):
    """One number for each completion of a problem: the more, the better.

    Every argument is a list with an entry for each completion. prompts: the question. completions: the texts.
    completion_ids: their tokens. answer: the right answer. columns: the other columns of the problems ({columns}).
    """
    return [float(ends_with(completion, right)) for completion, right in zip(completions, answer)]


def ends_with(completion, right):
    """Whether a completion ends with the answer, as "so it is <answer>7</answer>." with 7."""
    words = re.sub("<[^>]*>", " ", completion).split()
    return f" {{' '.join(words).rstrip(' .')}}".endswith(f" {{right}}")
'''


def _sections(
    name: str, peers: Sequence[tuple[str, Train]], problems: Problems, reward: str, module: str
) -> list[Section]:
    m, train = len(peers), problems.task.train
    models = list(dict.fromkeys(model for model, _ in peers))
    sizes = {model: parameters_of(model) for model in models}
    tokenizers = {model: load_tokenizer(starters.place_of(model)) for model in models}
    ends = {vocabulary(model, ()).own_ends for model in models}
    longest = max(
        len(tokenizer(problem.answer, add_special_tokens=False)["input_ids"])
        for tokenizer in tokenizers.values()
        for problem in train
    )
    if all(map(starters.is_starter, models)):
        form, tokens = "starter", OF_STARTERS
    elif all(sizes[model] >= LARGE and tokenizers[model].chat_template for model in models):
        form, tokens = "chat", THINKING
    else:
        form, tokens = "shown", 8 * math.ceil((2 * longest + 8) / 8)
    stop = "\nQuestion:" if any("\n" in problem.answer for problem in train) else "\n"
    prompts = math.ceil(PROMPTS[device_kind(resolve_device("auto"))] / m) * m
    short: list[Line] = [
        ("kl_estimator", "k3", "how the distance of a foreign completion is estimated; for short ones"),
        ("kl_threshold", 0.5, "in nats; foreign failures further away than that are dropped"),
    ]
    return [
        ("", [("name", name, "runs are in runs/<name>-seed<seed>")]),
        (
            "[task]",
            [
                ("name", "jsonl", "JSON Lines: a problem a line"),
                ("path", problems.path, "as seen from where ftis runs"),
                ("question_field", problems.question, "the column with the question"),
                ("answer_field", problems.answer, "the column with the right answer"),
                ("validation_size", len(problems.task.validation), "problems that measure accuracy"),
            ],
        ),
        *_prompt(form, problems, reward),
        ("[reward]", _reward(form, reward, module)),
        (
            "[sampling]",
            [
                ("num_generations", GENERATIONS, "completions of a problem, compared with each other"),
                ("max_completion_length", tokens, f"in tokens; the longest answer has {longest}"),
                *([("stop", [stop], "a completion ends here")] if form == "shown" else []),
                *([("end_tokens", sorted(frozenset().union(*ends)), "and at each model's end")] * (len(ends) > 1)),
            ],
        ),
        (
            "[training]",
            [
                ("rounds", 20, "for more later: --set training.rounds=40 --resume"),
                ("prompts_per_round", max(m, min(prompts, len(train) // m * m)), "problems of a round, of all peers"),
                *([("mode", "horizontal", "all peers answer the same problems")] * (m > 1 and not GENERATIONS % m)),
                ("eval_every", 5, "rounds between evaluations"),
                ("save_every", 10, "rounds between checkpoints"),
            ],
        ),
        *([("[objective]", short)] if m > 1 and tokens <= SHORT else []),
        *(
            ("[[peers]]", _peer(peer, model, how, first_rate(how, sizes[model])))
            for (model, how), peer in zip(peers, _names(peers), strict=True)
        ),
    ]


def _peer(name: str, model: str, how: Train, rate: float) -> list[Line]:
    adapter: list[Line] = [
        ("train", "lora", "an adapter learns; the model stays as it is"),
        ("lora_r", 16, "the adapter's rank"),
        ("lora_alpha", 32, "alpha / rank scales the adapter"),
    ]
    return [
        ("name", name, "in tables and directories"),
        ("model", model, "a directory, a Hub id or starter:<name>"),
        *(adapter if how == "lora" else []),
        ("learning_rate", rate, "the first thing to lower if the reward falls"),
    ]


def _names(peers: Sequence[tuple[str, Train]]) -> list[str]:
    """A name for each peer, from its model's."""
    names: list[str] = []
    for model, how in peers:
        last = re.sub(r"[^A-Za-z0-9_.-]", "-", re.split(r"[/:]", model.rstrip("/"))[-1]).lstrip("_.-")[:48]
        name = f"{last or 'peer'}{'-lora' if how == 'lora' else ''}"
        numbered = [name, *(f"{name}-{n}" for n in range(2, len(peers) + 1))]
        names.append(next(one for one in numbered if one not in names))
    return names


def _prompt(form: str, problems: Problems, reward: str) -> list[Section]:
    if form == "chat":  # the default system prompt asks for a thought and an answer between tags
        plain: list[Line] = [("system_prompt", "", "none")] if reward == "own" else []
        return [("[prompt]", [*plain, ("template", "{question}", "the user's turn")])]
    lines: list[Line] = [("system_prompt", "", "none")]
    if form == "starter":
        equals = "" if all(problem.question.rstrip().endswith("=") for problem in problems.task.train) else "="
        return [("[prompt]", [*lines, ("template", f"{{question}}{equals}", "starters go on from an equals sign")])]
    boxed = reward in ("exact", "math")
    lines += [
        ("chat_template", "never", "small models go on from plain text best"),
        ("template", "Question: {question}\nAnswer:", "the text around a question"),
        *([("prefill", " \\boxed{", "begins every completion; the model closes the box")] * boxed),
    ]
    shown: dict[str, str] = {}
    for problem in sorted(problems.task.train, key=lambda one: len(one.question) + len(one.answer)):
        if len(shown) < EXAMPLES:
            shown.setdefault(problem.answer, problem.question)
    examples: list[Section] = [
        (
            "[[prompt.examples]]",
            [
                ("question", question, "a solved problem that stands in every prompt"),
                ("completion", f" \\boxed{{{answer}}}" if boxed else f" {answer}", "how every completion should look"),
            ],
        )
        for answer, question in shown.items()
    ]
    return [("[prompt]", lines), *examples]


def _reward(form: str, reward: str, module: str) -> list[Line]:
    if reward == "own":
        return [("function", f"{module}.reward", f"in {module}.py beside this file")]
    compared = {"exact": "letter by letter", "number": "as numbers, 7 as 7.0", "math": "as formulas, 0.5 as 1/2"}
    extract, place = ("last_number", "its last number") if reward == "number" else ("boxed", "in \\boxed{}")
    if form != "shown":
        extract, place = "tags", "between <answer> and </answer>"
    return [
        ("answer", reward, f"answers are compared {compared[reward]}"),
        ("extract", extract, f"the answer of a completion is {place}"),
    ]


def _fitting(sections: list[Section]) -> tuple[list[Section], list[str]]:
    """The sections, with as many of :data:`SAVERS` in each peer as the recipe needs to fit into the free memory.

    Returns:
        the sections, and lines about their memory and disk.
    """
    chosen: dict[str, Line] = {}
    for saver in (*SAVERS, None):
        added = {"[[peers]]": chosen.values()}
        found = [(header, [*lines, *added.get(header, ())]) for header, lines in sections]
        needs = totals(arms_of(parse(tomllib.loads(_toml(found)))))
        if saver is None or not needs.likely or not needs.free or needs.likely <= SPARE * needs.free:
            break
        chosen[saver[0]] = saver
    return found, needs.lines


def _toml(sections: Sequence[Section]) -> str:
    parts = []
    for header, lines in sections:
        pairs = [(f"{key} = {_value(value)}", comment) for key, value, comment in lines]
        width = min(WIDTH, max(len(pair) for pair, _ in pairs))
        parts.append("\n".join([*[header] * bool(header), *(f"{pair:<{width}}  # {text}" for pair, text in pairs)]))
    return "\n\n".join(parts) + "\n"


def _value(value: Any) -> str:
    """A value in TOML, which writes texts, booleans and lists as JSON does."""
    if isinstance(value, float):
        number, exponent = f"{value:e}".split("e")
        return f"{value:g}" if value >= 0.01 else f"{float(number):g}e{int(exponent)}"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
