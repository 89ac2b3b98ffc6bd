"""The objects behind a recipe's names: a built-in by its name, anything else by its dotted path.

Each seam of docs/extending.md has a table here, from its built-in names to their places. Objectives have theirs in
:mod:`ftis.objectives`. The core reaches its wings through these tables only, and imports none of them.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from ftis.config import RecipeError, did_you_mean

TASKS: Mapping[str, str] = {
    "gsm8k": "ftis.tasks.gsm8k.load",
    "math500": "ftis.tasks.math500.load",
    "jsonl": "ftis.tasks.jsonl.load",
    "clock": "ftis.tasks.clock.load",
    "word_problems": "ftis.tasks.words.load",
    "reasoning_gym:<dataset>": "ftis.tasks.gym.load",
}
"""``task.name`` -> ``f(TaskConfig) -> Task``; ``<dataset>`` stands for any name. See :mod:`ftis.prompts`."""

SAMPLERS: Mapping[str, str] = {
    "builtin": "ftis.engines.builtin.open_sampler",
    "transformers": "ftis.engines.generate.open_sampler",
    "vllm": "ftis.engines.vllm.open_sampler",
}
"""``sampling.sampler`` -> ``f(policy, **sampling.options) -> Sampler``; see :mod:`ftis.sampling`."""

ENGINES: Mapping[str, str] = {
    "model": "ftis.engines.models.load_model",
    "tokenizer": "ftis.engines.tokenizers.load_tokenizer",
    "texts": "ftis.engines.texts.texts_of",
    "trainable": "ftis.engines.models.with_trainable",
    "optimizer": "ftis.engines.optimizers.adamw",
    "learning_rate": "ftis.engines.optimizers.learning_rate",
    "forward": "ftis.engines.lines.fit",
    "head": "ftis.engines.head.fit",
    "microbatches": "ftis.engines.microbatches.fit",
    "agreement": "ftis.engines.agreement.require_agreement",
}
"""The parts of a policy. ``head`` is a fast way: ``f(model, device)`` returns None if the model does not allow it."""

SELECTIONS: Mapping[str, str] = {
    "limit": "ftis.guards.limit.foreign_limit",
    "failure": "ftis.guards.limit.successes_only",
    "short": "ftis.guards.limit.by_length",
    "penalty": "ftis.guards.penalties.penalties",
    "regret": "ftis.guards.regret.no_regret",
    "honesty": "ftis.honesty.selection.honesty_test",
    "alignment": "ftis.text.alignment.readable",
}
"""Selections beside the core's -> ``f(recipe, own peer's name) -> Selection | None``."""

ENVIRONMENTS: Mapping[str, str] = {
    "guess": "ftis.environments.guess.Guess",
    "calculator": "ftis.environments.calculator.Calculator",
}
"""``task.environment`` -> a class with the contract of :mod:`ftis.environments.contract`."""

TRACKERS: Mapping[str, str] = {
    "tensorboard": "ftis.records.trackers.TensorBoard",
    "wandb": "ftis.records.trackers.wandb",
    "trackio": "ftis.records.trackers.trackio",
}
"""``report_to`` -> ``f(project, run, directory) -> Tracker``; see :mod:`ftis.records.trackers`."""

FORMS: Mapping[str, str] = {"ids": "ftis.wire.ids.IDS", "text": "ftis.wire.text.TEXT"}
"""Layouts of a message's groups in bytes -> :class:`ftis.codec.Form`. A form's number on the wire is its place here."""


GIVEN: dict[str, Any] = {}
"""Objects that a program gave instead of a dotted path, by their names in the recipe, ``given.…``. See
:func:`ftis.recipe.own_code.give`."""


def look_up(name: str, key: str, table: Mapping[str, str] | None = None) -> Any:
    """The object that ``name`` means in the recipe's ``key``: an entry of ``table``, or an object by its dotted path.

    Raises:
        RecipeError: the word is not in the table, the module cannot be imported, or it has no such name.
    """
    table = table or {}
    where = f"{key} = {name!r}"
    if name in GIVEN:
        return GIVEN[name]
    if name.startswith("given."):
        raise RecipeError(
            f"{where}: was given to ftis in Python, and not in this process: give it again, or write it into a "
            f"module beside the recipe and name that"
        )
    path = table.get(name, name)
    module_name, dot, attribute = path.rpartition(".")
    if not dot or not all(part.isidentifier() for part in path.split(".")):
        hint = did_you_mean(name, table) or (f"; built in: {', '.join(table)}" if table else "")
        raise RecipeError(f"{where}: write a dotted path, as in 'my_module.my_function'{hint}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise RecipeError(
                f"{where}: there is no module {error.name!r}; check the spelling, install it, or add its directory to "
                f"PYTHONPATH"
            ) from None
        raise RecipeError(f"{where}: importing {module_name!r} failed: {error}; install what it needs") from error
    except Exception as error:  # the user's code: whatever it raises while it is imported is named as its own
        kind = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
        raise RecipeError(f"{where}: importing {module_name!r} failed: {kind}{error}; mend that module") from error
    if not hasattr(module, attribute):
        public = [n for n, v in vars(module).items() if not n.startswith("_") and not inspect.ismodule(v)]
        own = [n for n in public if inspect.getmodule(getattr(module, n)) is module]
        hint = did_you_mean(attribute, public) or f"; it defines {', '.join(own[:10]) or 'nothing'}"
        raise RecipeError(f"{where}: module {module_name!r} has no {attribute!r}{hint}")
    return getattr(module, attribute)
