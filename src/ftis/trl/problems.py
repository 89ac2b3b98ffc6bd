"""A task's training problems as a data set for TRL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from datasets import Dataset

from ftis.prompts import Task
from ftis.rollouts import Ints
from ftis.trl.options import OptionError


def dataset_of(task: Task, prompt_ids: Sequence[Ints], tokenizer: Any) -> Any:
    """A task's training problems as a data set: prompts in text that TRL tokenizes to ``prompt_ids``, and columns.

    Raises:
        OptionError: a prompt's tokens do not survive decoding; the caller needs a data set of their own.
    """
    rows = []
    for problem, ids in zip(task.train, prompt_ids, strict=True):
        wanted = ids.tolist()
        texts = [tokenizer.decode(wanted, skip_special_tokens=True), tokenizer.decode(wanted)]
        texts.append(texts[1].removeprefix(tokenizer.bos_token or ""))
        text = next((t for t in texts if list(tokenizer(text=t)["input_ids"]) == wanted), None)
        if text is None:
            raise OptionError(
                f"the prompt of problem {problem.item} cannot be given to TRL as text ({texts[1]!r}): give a "
                f"train_dataset whose prompts are conversations"
            )
        rows.append({**problem.columns, "prompt": text, "question": problem.question, "answer": problem.answer})
    return Dataset.from_list(rows)
