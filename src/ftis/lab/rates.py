"""Which learning rate serves each arm: the arms at several multiples of the recipe's rates, on problems held out.

An arm that trains on few rollouts a round takes noisier steps than one that trains on many, and often wants a lower
rate. Arms at one rate for all differ by that too, so a comparison says what it means to only where each arm has a rate
that serves it. Rates are compared on training problems that are held out from training, so that what a comparison
reports stays unseen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rich.box import SIMPLE_HEAD
from rich.table import Table

from ftis.config import ArmConfig, ExperimentConfig, Recipe, TaskConfig
from ftis.lab.arms import RunError, arms_of
from ftis.lab.formatting import counted, number
from ftis.lab.reading import read_study
from ftis.lab.results import finals
from ftis.prompts import Task
from ftis.rollouts import Prompt
from ftis.tasks.problems import Problem, load_task, make_task
from ftis.tasks.splitting import hold_out


@dataclass(frozen=True)
class Tried:
    """How far an arm's peers of one learning rate came at multiples of it.

    Attributes:
        rate: in the recipe, before it is multiplied.
        peers: whose rate it is.
        accuracy: for each multiple the final accuracy on held-out training problems, the mean over these peers, under
            each seed.
    """

    arm: str
    rate: float
    peers: tuple[str, ...]
    accuracy: dict[float, list[float]]

    @property
    def best(self) -> float:
        """The multiple with the highest mean over seeds."""
        return max(self.accuracy, key=lambda times: fmean(self.accuracy[times]))


def held_out(config: TaskConfig) -> Task:
    """The task of ``config.options``, with validation problems out of its training problems and none of its own."""
    task = load_task(TaskConfig(**config.options))
    train, validation = hold_out(
        [_problem(prompt) for prompt in task.train], config.validation_size, config.seed, f"task {task.name!r}"
    )
    return make_task(config.name, train, validation, task.answer_kind)


def _problem(prompt: Prompt) -> Problem:
    return prompt.question, prompt.answer, prompt.columns


def trials(recipe: Recipe, arms: Sequence[str], times: Sequence[float]) -> Recipe:
    """The experiment that compares rates: each arm once with each multiple of its peers' rates.

    It evaluates on problems held out from training, as many as the recipe validates with, and out of distribution on
    none.

    Args:
        arms: which arms; all where none is named.
        times: multiples of the rates.

    Raises:
        RunError: there is no such arm, or no multiple, or one that is not above 0.
    """
    if not times or min(times) <= 0:
        raise RunError(f"--times {','.join(f'{t:g}' for t in times)}: give multiples above 0, as in --times 0.5,1,2")
    configs = {config.name: config for config in recipe.arms or (ArmConfig(name=recipe.objective.name),)}
    compared = []
    for arm in arms_of(recipe, tuple(arms)):
        for multiple in sorted(set(times)):
            rates = {f"peers.{peer.name}.learning_rate": peer.learning_rate * multiple for peer in arm.recipe.peers}
            kept = {key: value for key, value in configs[arm.name].set.items() if key not in rates}
            changes = {"name": trial_name(arm.name, multiple), "set": kept | rates}
            compared.append(configs[arm.name].model_copy(update=changes))
    named = recipe.task.model_dump()
    task = TaskConfig(
        name=f"{held_out.__module__}.{held_out.__name__}",
        validation_size=recipe.task.validation_size,
        seed=recipe.task.seed,
        options=named,
    )
    question = f"Which multiple of its peers' learning rates serves each arm of {recipe.name}?"
    asked = ExperimentConfig(title="Learning rates", question=question, baselines=(compared[0].name,))
    return recipe.model_copy(
        update={
            "name": f"{recipe.name}-rates",
            "task": task,
            "ood": (),
            "arms": tuple(compared),
            "experiment": asked.model_copy(update={"sampling_cost": recipe.experiment.sampling_cost}),
        }
    )


def trial_name(arm: str, times: float) -> str:
    """What an arm at a multiple of its rates is called."""
    return f"{arm}-rate-x{times:g}"


def read_trials(recipe: Recipe, arms: Sequence[str], times: Sequence[float], directory: Path) -> list[Tried]:
    """What the runs in ``directory`` say of each arm, in a row for each learning rate that its peers have."""
    study = read_study(directory)
    found = []
    for arm in arms_of(recipe, tuple(arms)):
        for rate in dict.fromkeys(peer.learning_rate for peer in arm.recipe.peers):
            peers = tuple(peer.name for peer in arm.recipe.peers if peer.learning_rate == rate)
            accuracy = {}
            for multiple in sorted(set(times)):
                each = (finals(study, "validation", trial_name(arm.name, multiple), peer) for peer in peers)
                accuracy[multiple] = [fmean(of_seed) for of_seed in zip(*each, strict=True)]
            found.append(Tried(arm.name, rate, peers, accuracy))
    return found


def table(found: Sequence[Tried]) -> Table:
    """A row for each arm and rate: mean, lowest and highest accuracy over seeds at each multiple, the best one last."""
    of_all = len({peer for tried in found for peer in tried.peers})
    seeds = len(next(iter(found[0].accuracy.values())))
    title = f"accuracy on held-out training problems, means over peers: mean over {counted(seeds, 'seed')}"
    shown = Table(title=title + (", lowest and highest" if seeds > 1 else ""), title_justify="left", box=SIMPLE_HEAD)
    shown.add_column("arm", overflow="fold")
    shown.add_column("learning\nrate", justify="right", no_wrap=True)
    for multiple in found[0].accuracy:
        shown.add_column(f"× {multiple:g}", justify="right")
    shown.add_column("best", justify="right", no_wrap=True)
    for tried in found:
        whose = "" if len(tried.peers) == of_all else f" ({counted(len(tried.peers), 'peer')})"
        shown.add_row(
            tried.arm + whose,
            f"{tried.rate:g}",
            *(_spread(accuracies) for accuracies in tried.accuracy.values()),
            f"{tried.rate * tried.best:g}",
        )
    return shown


def _spread(accuracies: Sequence[float]) -> str:
    mean = number(fmean(accuracies))
    return mean if len(accuracies) == 1 else f"{mean} ({number(min(accuracies))}–{number(max(accuracies))})"


def advice(found: Sequence[Tried]) -> list[str]:
    """What to try next, and what to set."""
    lines = []
    for tried in found:
        lowest, highest = min(tried.accuracy), max(tried.accuracy)
        if tried.best in (lowest, highest):
            end, further = ("lowest", lowest / 2) if tried.best == lowest else ("highest", highest * 2)
            every = ",".join(f"{times:g}" for times in sorted({*tried.accuracy, further}))
            lines.append(
                f"{tried.arm}: {tried.rate * tried.best:g} is best and the {end} tried; go on with --times {every}"
            )
    lines.append(
        'set what serves an arm in it, as in set = { "peers.*.learning_rate" = 3e-4 }, or for all arms in '
        "peers.NAME.learning_rate; differences within the spread over seeds say nothing"
    )
    return lines
