"""The commands as functions, for scripts and notebooks: recipes with Python's values in them, and results to work with.

A callable may stand wherever a recipe takes a dotted path. A module's callable goes by its path. Any other (of
``__main__``, a lambda, a closure) is used as it is, in this process: the recipe names it ``given.<name>_<digest>``, and
its peers take turns here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from rich.console import Console

from ftis.check.plan import plan, to_join
from ftis.check.preflight import Sounding
from ftis.check.preflight import preflight as sound_peers
from ftis.config import Recipe, RecipeError
from ftis.engines.tokenizers import lacking
from ftis.experiment.runs import run
from ftis.experiment.workers import Stop, interrupts
from ftis.joining.join import join as join_swarm
from ftis.joining.join import ready
from ftis.objectives import Objective
from ftis.preparing.checks import check, check_to_train, owns_reward
from ftis.preparing.prompting import require_fit
from ftis.recipe.arms import arms_of, run_directory
from ftis.recipe.own_code import give
from ftis.recipe.parsing import dotted, parse, set_key, split_override, with_arm
from ftis.recipe.parsing import load as load_file
from ftis.records.events import Planned, Say, unheard
from ftis.records.files import checkpoint_path, saved_steps
from ftis.records.reading import read_run
from ftis.rewards.answers import require_rewardable
from ftis.run.assembly import examine
from ftis.run.evaluate import EvalSamples, Evaluation, Exam
from ftis.seams import GIVEN
from ftis.view.progress import Display

RecipeLike = str | Path | Mapping[str, Any] | Recipe
"""A recipe's path, its keys as a mapping, or a recipe."""
Overrides = Iterable[str] | Mapping[str, Any]
"""``key=value`` as the command line takes it, one or several, or dotted keys with their values."""
Rows = list[dict[str, Any]]
"""Rows of a table, as ``pandas.DataFrame`` takes them."""
SHORT = {"reward": "function", "task": "name", "objective": "name"}
"""The key of a section that a single value sets: ``reward=f`` sets ``reward.function``."""


@dataclass(frozen=True)
class Results:
    """The outcome of a run. It is true if the run came to its end.

    Attributes:
        directory: of the run, with all records.
        finished: False if it was stopped; ``resume=True`` goes on.
    """

    directory: Path
    finished: bool

    def __bool__(self) -> bool:
        return self.finished

    @property
    def accuracies(self) -> Rows:
        """A row for each evaluation: arm, peer, split, step (finished rounds), accuracy in 0 … 1, problems."""
        return [
            {"arm": arm, "peer": peer, **vars(row)}
            for (arm, peer), records in read_run(self.directory).peers.items()
            for row in records.evaluations
        ]

    @property
    def rounds(self) -> Rows:
        """A row for each round of a peer: arm, peer, and the keys of ``metrics.jsonl``."""
        return [
            {"arm": arm, "peer": peer, **row.measures}
            for (arm, peer), records in read_run(self.directory).peers.items()
            for row in records.rounds
        ]

    @property
    def models(self) -> dict[str, dict[str, Path]]:
        """The directory of each peer's newest model, by arm and peer."""
        found: dict[str, dict[str, Path]] = {}
        for (arm, peer), records in read_run(self.directory).peers.items():
            if steps := saved_steps(records.directory):
                found.setdefault(arm, {})[peer] = checkpoint_path(records.directory, max(steps))
        return found


def load(recipe: RecipeLike, overrides: Overrides = (), **keys: Any) -> Recipe:
    """A recipe, with some keys replaced.

    Args:
        recipe: its path (``recipes/demo.toml`` and its like come with ftis), its keys as a mapping, or a recipe.
        overrides: ``["training.rounds=5"]``, or ``{"training.rounds": 5, "peers.*.learning_rate": 1e-4}``.
        keys: keys of the recipe. A section is a mapping of the keys to replace, as in ``training={"rounds": 5}``.
            ``reward``, ``task`` and ``objective`` may be a callable, or an ``Objective``.

    Raises:
        RecipeError: no such file, an unknown key, a wrong value; the message names the place.
    """
    given, texts = (overrides, ()) if isinstance(overrides, Mapping) else ({}, overrides)
    texts = (texts,) if isinstance(texts, str) else tuple(texts)
    if isinstance(recipe, (str, Path)):
        loaded = load_file(recipe, texts)
    else:
        loaded = recipe if isinstance(recipe, Recipe) else parse(_sections(recipe))
        given = {**dict(map(split_override, texts)), **given}
    changes = dict(dotted(_sections({**given, **keys})))
    if changes:
        document = loaded.model_dump()
        for key, value in changes.items():
            set_key(document, key, value)
        loaded = parse(document, f"recipe with {', '.join(changes)}")
        for arm in loaded.arms:  # an arm's mistakes surface before anything is trained
            with_arm(loaded, arm)
    if _names_given(loaded):
        if loaded.processes == "parallel":
            raise RecipeError(
                'processes = "parallel": other processes have no function that is defined in a notebook or a script: '
                'write it into a module, or set processes = "inline"'
            )
        loaded = loaded.model_copy(update={"processes": "inline"})
    return loaded


def _names_given(recipe: Recipe) -> bool:
    """Whether a recipe names objects that are in this process alone."""
    text = recipe.model_dump_json()
    return any(f'"{name}"' in text for name in GIVEN)


def _sections(keys: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's keys with names instead of callables, and with sections instead of single values."""
    found = {key: _plain(value) for key, value in keys.items()}
    return {
        key: {SHORT[key]: value} if key in SHORT and not isinstance(value, dict) else value
        for key, value in found.items()
    }


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump()
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, Path):
        return str(value)
    return give(value) if callable(value) or isinstance(value, Objective) else value


@contextmanager
def _shown(quiet: bool, say: Say | None, resumes: bool = True) -> Iterator[Say]:
    """The listener to a run's events: ``say``, nobody, or the command's display."""
    if quiet or say is not None:
        yield say or unheard
        return
    display = Display(Console(markup=False, highlight=False))
    with display.live(resumes):
        yield display


def train(
    recipe: RecipeLike,
    overrides: Overrides = (),
    *,
    only: str | Iterable[str] = (),
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
    say: Say | None = None,
    stop: Stop | None = None,
    **keys: Any,
) -> Results:
    """Train a recipe's peers, arm by arm, as ``ftis train``. Ctrl-C ends it after the round it is in.

    Args:
        recipe, overrides, keys: as for :func:`load`.
        only: the arms to train; by default all.
        resume: go on with an earlier run.
        overwrite: delete an earlier run first.
        quiet: show no progress.
        say: a function that hears of the events instead.
        stop: an event that ends the run too.

    Raises:
        FtisError: something is wrong with the recipe, a model, a function or the run's directory.
    """
    loaded = load(recipe, overrides, **keys)
    with _shown(quiet, say) as shown:
        checked = check_to_train(arms_of(loaded, (only,) if isinstance(only, str) and only else tuple(only)))
        shown(Planned(tuple(plan(checked, arms_of(loaded)))))
        finished = run(loaded, resume=resume, overwrite=overwrite, say=shown, stop=stop, checked=checked)
    return Results(run_directory(loaded), finished)


def join(
    recipe: RecipeLike,
    peer: str,
    overrides: Overrides = (),
    *,
    arm: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
    say: Say | None = None,
    **keys: Any,
) -> Results:
    """Train one peer here with peers elsewhere, as ``ftis join``.

    Args:
        peer: the peer of the recipe that trains here.
        arm: the arm, if peers learn together in several.
        keys: as for :func:`load`; ``network={"connect": ["tcp/host:7447"]}`` says how to reach the others.

    Raises:
        FtisError: something is wrong with the recipe, the model, the keys, the network or the run's directory.
    """
    loaded = load(recipe, overrides, **keys)
    ending = threading.Event()
    with _shown(quiet, say) as shown, interrupts(shown, ending):
        able = ready(loaded, peer, arm=arm, resume=resume, overwrite=overwrite)
        shown(Planned(tuple(to_join(able))))
        finished = join_swarm(able, resume=resume, overwrite=overwrite, say=shown, should_stop=ending.is_set)
    return Results(able.directory, finished)


def preflight(
    recipe: RecipeLike,
    overrides: Overrides = (),
    *,
    arm: str | None = None,
    groups: int = 4,
    quiet: bool = False,
    say: Say | None = None,
    **keys: Any,
) -> list[Sounding]:
    """Predict whether each peer of an arm would learn, and the cost of a round, as ``ftis preflight``.

    Each result has a verdict and changes to make as ``advice``.

    Args:
        arm: by default the recipe's first.
        groups: the number that each peer samples.

    Raises:
        FtisError: as :func:`train`.
    """
    loaded = load(recipe, overrides, **keys)
    with _shown(quiet, say, resumes=False) as shown:
        checked = check(arms_of(loaded, (arm,) if arm else ())[:1])
        return sound_peers(checked, groups, shown, apart=not _names_given(loaded))


def evaluate(
    model: str | Path,
    recipe: RecipeLike,
    overrides: Overrides = (),
    *,
    peer: str | None = None,
    limit: int | None = None,
    samples: int = 0,
    **keys: Any,
) -> Evaluation | EvalSamples:
    """Answer a recipe's validation problems with a model, as ``ftis eval``: greedily, or ``samples`` times each.

    Args:
        model: a Hugging Face directory, a Hub id, or ``starter:<name>``.
        peer: run the model on this peer's device, in its dtype.
        limit: the number of problems, a seeded subset.

    Raises:
        FtisError: the model cannot be loaded or lacks something that the recipe names.
    """
    loaded = load(recipe, overrides, **keys)
    with open_exam(str(model), loaded, peer, limit) as (exam, _):
        return exam.sampled(samples, loaded.seed) if samples else exam.greedy()


@contextmanager
def open_exam(model: str, recipe: Recipe, peer: str | None, limit: int | None) -> Iterator[tuple[Exam, list[str]]]:
    """An exam that a model can take, and remarks on it. The arguments are those of :func:`evaluate`."""
    sampling = recipe.sampling
    with closing(examine(model, recipe, recipe.peer(peer) if peer is not None else None, limit)) as exam:
        policy, name = exam.policy, f"task {recipe.task.name!r}, validation problem"
        if not owns_reward(recipe.task.environment):
            require_rewardable(exam.score, exam.problems, name)
        named = [(f"{name} {problem.item}", problem) for problem in exam.problems]
        require_fit(model, policy.config.model, recipe.prompt, sampling.max_completion_length, policy.tokenizer, named)
        lacks = lacking(policy.tokenizer, sampling.end_tokens)
        remark = f"{model} has no {lacks} of sampling.end_tokens, so no completion of it ends there"
        yield exam, [remark] if lacks else []
