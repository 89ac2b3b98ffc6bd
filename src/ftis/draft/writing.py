"""A first recipe from a few answers, for ``ftis new``: written, tried, and fitted into this machine's memory."""

from __future__ import annotations

import re
import shutil
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ftis.check.estimate import totals
from ftis.check.plan import remarks
from ftis.config import RecipeError, as_name
from ftis.draft.problems import Problems
from ftis.draft.sections import Line, Section, Train, sections_of
from ftis.machine.resources import nearest_existing
from ftis.preparing.checks import check
from ftis.recipe.arms import arms_of
from ftis.recipe.parsing import load, parse, toml
from ftis.rewards.scoring import RewardError

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


def begin(
    directory: Path,
    peers: Sequence[tuple[str, Train]],
    problems: Problems,
    reward: str,
    doing: Callable[[str], None] = lambda text: None,
) -> tuple[list[Path], list[str]]:
    """Write the files of a first recipe, and check that it can run.

    Args:
        doing: called with the name of each step, since steps take a while.

    Returns:
        the files, and remarks on the recipe, one of them about its memory.

    Raises:
        FtisError: a file is there already, or the recipe cannot run; then nothing is left behind.
    """
    name = as_name(directory.resolve().name)[:48] or "mine"
    module = re.sub(r"\W", "_", f"_{name}_reward" if name[0].isdigit() else f"{name}_reward")
    recipe = directory / "recipe.toml"
    files = [recipe, *[directory / f"{module}.py"] * (reward == "own")]
    if there := [file for file in files if file.exists()]:
        raise RecipeError(f"{there[0]} is there already: name another directory, or move the file away")
    doing("reading the models' tokenizers")
    sections = sections_of(name, peers, problems, reward, module)
    before = nearest_existing(directory)
    directory.mkdir(parents=True, exist_ok=True)
    try:
        for stub in files[1:]:
            stub.write_text(_stub(name, problems), encoding="utf-8")
        recipe.write_text(_toml(sections), encoding="utf-8")
        doing("trying the prompts and the reward")
        try:
            checked = check(arms_of(load(recipe)))
        except RewardError as error:
            instead = "" if reward == "own" else "; or give --reward own, and write the reward yourself"
            raise RewardError(f"{error}{instead}") from None
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
    """A value in TOML, a small number as 1e-5."""
    if isinstance(value, float):
        number, exponent = f"{value:e}".split("e")
        return f"{value:g}" if value >= 0.01 else f"{float(number):g}e{int(exponent)}"
    return toml(value)
