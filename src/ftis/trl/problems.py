"""A task's training problems as a data set for TRL, and a data set of the script's own as the swarm's task."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any, cast

from datasets import Dataset
from pyarrow import ArrowException

from ftis.config import PromptConfig
from ftis.member import PromptIds
from ftis.prompts import Task
from ftis.rollouts import Prompt
from ftis.tasks.rendering import conversation, dated, render_prompt
from ftis.trl.options import OptionError


def dataset_of(task: Task, config: PromptConfig, tokenizer: Any, chat: bool = False) -> Any:
    """A task's training problems as rows: ``prompt``, ``question``, ``answer``, and the columns of the problems.

    Prompts are text if TRL tokenizes it as the recipe does, or else conversations.

    Args:
        chat: let all be conversations, as environments need them.

    Raises:
        OptionError: TRL tokenizes neither as the recipe does, or a column's values are of several kinds.
    """
    prompts: list[Any] = [None if chat else _as_text(problem, config, tokenizer) for problem in task.train]
    if None in prompts:
        prompts = [_as_conversation(problem, config, tokenizer) for problem in task.train]
    pairs = zip(task.train, prompts, strict=True)
    rows = [{**p.columns, "prompt": t, "question": p.question, "answer": p.answer} for p, t in pairs]
    try:
        return Dataset.from_list(rows)
    except (ArrowException, TypeError) as error:
        raise OptionError(
            f"the problems of task {task.name!r} cannot be a data set ({error}): give each column values of one kind, "
            f"or give a train_dataset"
        ) from error


@dataclass(frozen=True)
class Problems:
    """The rows of a data set as problems, read when they are first asked for.

    Attributes:
        longest: the row with the longest prompt.
        columns: whether a problem has the row's columns, for an environment's ``reset``.
    """

    dataset: Any
    longest: int = 0
    columns: bool = False
    read: dict[int, Prompt] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, item: int) -> Prompt:
        if item not in self.read:
            row = self.dataset[item]
            prompt, of_row = row["prompt"], row if self.columns else {}
            question = prompt if isinstance(prompt, str) else str(prompt[-1]["content"])
            self.read[item] = Prompt(item, of_row.get("question", question), of_row.get("answer", ""), of_row)
        return self.read[item]


def task_of(dataset: Any, columns: bool = False) -> Task:
    """A data set of the script's own as a task, with the sha256 of its rows in order.

    Args:
        columns: as :class:`Problems` has it.

    Raises:
        OptionError: it has no column ``prompt``, or one that no digest can hold.
    """
    if "prompt" not in dataset.column_names:
        raise OptionError(
            f"train_dataset has the columns {', '.join(dataset.column_names)} and no prompt: rename one of them "
            f'(train_dataset.rename_column("{dataset.column_names[0]}", "prompt"))'
        )
    digest, lengths = hashlib.sha256(), []
    for rows in dataset.with_format(None).iter(batch_size=1000):
        digest.update(_written(rows))
        lengths += [len(str(prompt)) for prompt in rows["prompt"]]
    longest = lengths.index(max(lengths))
    return Task("train_dataset", cast(Any, Problems(dataset, longest, columns)), (), "exact", digest.hexdigest())


def _written(rows: Mapping[str, Sequence[Any]]) -> bytes:
    """Rows by column as JSON, in one way."""
    parts = []
    for column, values in sorted(rows.items()):
        try:
            parts.append(f"{json.dumps(column)}: {json.dumps(values, sort_keys=True, default=_plain)}")
        except TypeError as error:
            raise OptionError(
                f"train_dataset: column {column!r} holds {error}, and peers cannot tell whether theirs is the "
                f'same: leave it out (train_dataset.remove_columns("{column}"))'
            ) from None
    return f"{{{', '.join(parts)}}}".encode()


def _plain(value: Any) -> str:
    """The one text of a value that JSON lacks. Other objects are refused: their text may hold an address in memory."""
    if isinstance(value, bytes | date | time | timedelta | Decimal):
        return repr(value)
    raise TypeError(f"a {type(value).__name__}")


def require_prompts(
    given: Iterable[tuple[Prompt, Sequence[int]]], wanted: PromptIds, tokenizer: Any, where: str, remedy: str
) -> None:
    """Refuse the first of some prompts, as token ids beside their problem, that is not the recipe's, by an OptionError.

    Args:
        where: names who gave the prompt, with ``{item}`` for the problem's number.
    """
    for problem, ids in given:
        item, right = problem.item, wanted(problem.item, problem.round).tolist()
        if list(ids) != right:
            raise OptionError(
                f"{where.format(item=item)} has another prompt than the recipe's problem {item} "
                f"({tokenizer.decode(ids)!r} instead of {tokenizer.decode(right)!r}): {remedy}"
            )


def _as_text(problem: Prompt, config: PromptConfig, tokenizer: Any) -> str | None:
    ids = render_prompt(problem, config, tokenizer).tolist()
    for special in (True, False):
        text = str(tokenizer.decode(ids, skip_special_tokens=special))
        if list(tokenizer(text=text)["input_ids"]) == ids:
            return text
    return None


def _as_conversation(problem: Prompt, config: PromptConfig, tokenizer: Any) -> list[dict[str, str]]:
    messages = conversation(problem, config)
    ids = render_prompt(problem, config, tokenizer).tolist()
    how = {"add_generation_prompt": True, "return_dict": False, **config.template_options}
    template = dated(tokenizer.get_chat_template()) if tokenizer.chat_template else None
    if template is None or tokenizer.apply_chat_template(messages, chat_template=template, **how) != ids:
        raise OptionError(
            f"the prompt of problem {problem.item} cannot be given to TRL as text or as a conversation "
            f"({tokenizer.decode(ids)!r}): leave prompt.prefill out of the recipe, or give a train_dataset"
        )
    return messages
