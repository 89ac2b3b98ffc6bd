"""The learning rate that serves each arm: the arms at several multiples of the recipe's rates, on problems held out.

An arm that trains on few rollouts a round takes noisier steps than one that trains on many, and often wants a lower
rate. At one rate for all, arms differ by how well it serves them, too. Rates are compared on training problems that are
held out, so that a comparison's own problems stay unseen.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated

import numpy as np
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from ftis.check.quantities import counted
from ftis.cli import Jobs, carry_out, for_seeds
from ftis.cli_options import Overrides, console
from ftis.comparison.results import finals
from ftis.comparison.summary import accuracy_is
from ftis.config import PEER_NAME, ArmConfig, ExperimentConfig, Recipe, RunError, TaskConfig
from ftis.recipe.arms import arm_configs, arms_of, experiment_directory
from ftis.recipe.parsing import matches
from ftis.records.plan import EXPERIMENT, read_plan
from ftis.records.reading import read_study
from ftis.view.formatting import number
from research import commands

FEW = 3
"""So many peers are named, more are counted."""


@dataclass(frozen=True)
class TriedRate:
    """The accuracies that an arm's peers of one learning rate reached at multiples of it.

    Attributes:
        rate: in the recipe, before it is multiplied.
        peers: the peers with that rate.
        start: the mean over these peers of their accuracy before training, on held-out training problems.
        accuracy: for each multiple the final accuracy there, the mean over these peers, under each seed.
        whole: whether these are all of the arm's peers.
        together: whether rates of others were multiplied with theirs.
    """

    arm: str
    rate: float
    peers: tuple[str, ...]
    start: float
    accuracy: dict[float, list[float]]
    whole: bool = True
    together: bool = False

    @property
    def best(self) -> float:
        """The multiple with the highest mean over seeds; of several the one nearest to 1."""
        return max(self.accuracy, key=lambda times: (fmean(self.accuracy[times]), -abs(math.log(times))))

    @property
    def name(self) -> str:
        """The arm, and the peers with the rate if they are not all of its peers."""
        return self.arm if self.whole else f"{self.arm} ({self.whose} at {self.rate:g})"

    @property
    def whose(self) -> str:
        return ", ".join(self.peers) if len(self.peers) <= FEW else counted(len(self.peers), "peer")


def trials(recipe: Recipe, arms: Sequence[str], times: Sequence[float], peers: Sequence[str] = ()) -> Recipe:
    """The experiment that compares rates: each arm once with each multiple of its peers' rates.

    It evaluates on problems held out from training, as many as the recipe validates with, and out of distribution on
    none. Every arm is a baseline, so it comes without verdicts.

    Args:
        arms: which arms; all where none is named.
        times: multiples of the rates, above 0.
        peers: whose rates are multiplied, by name or pattern (``*-lora``); all peers' where none is named.

    Raises:
        RunError: there is no such arm, an arm has a task of its own, or a name gets too long.
        RecipeError: there is no such peer.
    """
    peers = _multiplied(recipe, peers)
    configs = {config.name: config for config in arm_configs(recipe)}
    compared: dict[str, ArmConfig] = {}
    for arm in arms_of(recipe, tuple(arms)):
        config = configs[arm.name]
        if own := {key.partition(".")[0] for key in config.set} & {"task", "ood"}:
            raise RunError(
                f"arm {arm.name!r} sets {min(own)}, and problems are held out of the recipe's own task: name the other "
                f"arms with --arm"
            )
        for multiple in times:
            name = trial_name(arm.name, multiple, peers)
            if not PEER_NAME.fullmatch(name):
                raise RunError(
                    f"arm {arm.name!r}: {name!r} is too long a name for its runs, which have at most 64 letters: "
                    f"shorten the arm's, or the peers'"
                )
            rates = {
                f"peers.{p.name}.learning_rate": _times(p.learning_rate, multiple)
                if not peers or p.name in peers
                else p.learning_rate
                for p in arm.recipe.peers
            }
            kept = {key: value for key, value in config.set.items() if key not in rates}
            compared[name] = config.model_copy(update={"name": name, "set": kept | rates})
    task = TaskConfig(
        name="research.held_out.load",
        validation_size=recipe.task.validation_size,
        seed=recipe.task.seed,
        options=recipe.task.model_dump(),
    )
    changes = {"name": f"{recipe.name}-rates", "task": task, "ood": ()}
    return _with_arms(recipe.model_copy(update=changes), list(compared.values()))


def with_earlier(trial: Recipe, directory: Path) -> Recipe:
    """``trial`` with the arms that its directory has already, which stay as they are."""
    if not (directory / EXPERIMENT).exists():
        return trial
    earlier = {config.name: config for config in read_plan(directory).recipe.arms}
    return _with_arms(trial, list((earlier | {config.name: config for config in trial.arms}).values()))


def multiples(recipe: Recipe, arms: Sequence[str], compared: Recipe, peers: Sequence[str] = ()) -> list[float]:
    """The multiples at which ``compared``, with the arms that were tried earlier, has each of these arms."""
    peers = _multiplied(recipe, peers)
    names = {config.name for config in compared.arms}
    found = {float(multiple) for name in names for multiple in re.findall(r"-rate-x([0-9]+(?:\.[0-9]+)?)", name)}
    chosen = [arm.name for arm in arms_of(recipe, tuple(arms))]
    return sorted(times for times in found if all(trial_name(arm, times, peers) in names for arm in chosen))


def _with_arms(recipe: Recipe, arms: Sequence[ArmConfig]) -> Recipe:
    experiment = ExperimentConfig(
        title="Learning rates",
        question="Which learning rate serves each arm?",
        baselines=tuple(config.name for config in arms),
    )
    return recipe.model_copy(update={"arms": tuple(arms), "experiment": experiment})


def trial_name(arm: str, times: float, peers: Sequence[str] = ()) -> str:
    """The name of an arm at a multiple of its rates, or of these peers'; at their own rates it is the arm's name."""
    name = f"{arm}-rate-x{np.format_float_positional(times, trim='-')}"
    return f"{name}-of-{'-'.join(peers)}" if peers and times != 1 else name


def _multiplied(recipe: Recipe, peers: Sequence[str]) -> tuple[str, ...]:
    """The peers named, or matched by a pattern, once each and in the recipe's order; () stands for all."""
    named = {
        found
        for name in peers
        for found in [p.name for p in recipe.peers if matches(p.name, name)] or [recipe.peer(name).name]
    }
    return tuple(p.name for p in recipe.peers if p.name in named) if len(named) < len(recipe.peers) else ()


def _times(rate: float, multiple: float) -> float:
    """Their product without the last digits, which are noise: three times 1e-4 is 3e-4."""
    return float(f"{rate * multiple:.12g}")


def read_trials(
    recipe: Recipe, arms: Sequence[str], times: Sequence[float], directory: Path, peers: Sequence[str] = ()
) -> list[TriedRate]:
    """The results of the runs in ``directory``: a row for each arm and learning rate that was multiplied."""
    peers = _multiplied(recipe, peers)
    study = read_study(directory)
    found = []
    for arm in arms_of(recipe, tuple(arms)):
        rates = {peer.name: peer.learning_rate for peer in arm.recipe.peers}
        moved = {name: rate for name, rate in rates.items() if not peers or name in peers}
        for rate in dict.fromkeys(moved.values()):
            of_rate = tuple(name for name in moved if moved[name] == rate)
            accuracy = {}
            for multiple in times:
                tried = trial_name(arm.name, multiple, peers)
                accuracy[multiple] = list(finals(study, "validation", tried, *of_rate).values())
            first = trial_name(arm.name, times[0], peers)
            start = fmean(study.peer(study.seeds[0], first, peer).on("validation")[0].accuracy for peer in of_rate)
            together = len(of_rate) < len(moved)
            found.append(TriedRate(arm.name, rate, of_rate, start, accuracy, len(of_rate) == len(rates), together))
    return found


def table(found: Sequence[TriedRate], recipe: Recipe) -> Table:
    """A row for each arm and rate: before training, after it at each multiple, and the rate that was best."""
    seeds = len(next(iter(found[0].accuracy.values())))
    title = f"{accuracy_is(recipe)} on held-out training problems: means over peers and {counted(seeds, 'seed')}"
    spread = " (the lowest and highest seed's)" if seeds > 1 else ""
    shown = Table(title=title + spread, title_justify="left", box=SIMPLE_HEAD)
    shown.add_column("arm", overflow="fold")
    for heading in ("start", "rate", *(f"× {multiple:g}" for multiple in found[0].accuracy), "best rate"):
        shown.add_column(heading, justify="right", no_wrap=not heading.startswith("×"))
    for tried in found:
        after = (_spread(accuracies) for accuracies in tried.accuracy.values())
        arm = tried.arm if tried.whole else f"{tried.arm} ({tried.whose})"
        shown.add_row(arm, number(tried.start), f"{tried.rate:g}", *after, f"{tried.rate * tried.best:g}")
    return shown


def _spread(accuracies: Sequence[float]) -> str:
    mean = number(fmean(accuracies))
    return mean if len(accuracies) == 1 else f"{mean} ({number(min(accuracies))}–{number(max(accuracies))})"


def advice(found: Sequence[TriedRate]) -> list[str]:
    """Lines on the multiples to try next, and the rates to set."""
    lines = []
    for tried in found:
        means = {times: fmean(accuracies) for times, accuracies in tried.accuracy.items()}
        lowest, highest = min(means), max(means)
        if len(means) > 1 and len(set(means.values())) == 1:
            lines.append(f"{tried.name}: the same at each rate, so none is shown to serve it")
        elif len(means) > 1 and tried.best in (lowest, highest):
            end, further = ("lowest", lowest / 2) if tried.best == lowest else ("highest", highest * 2)
            lines.append(
                f"{tried.name}: {tried.rate * tried.best:g} is best and the {end} that was tried: try --times "
                f"{','.join(f'{times:g}' for times in sorted({*means, further}))} too"
            )
    if any(tried.together for tried in found):
        lines.append(
            "an arm's rates were multiplied together: what serves some of its peers was not tried with others' as "
            "they are; --peer NAME multiplies that peer's alone"
        )
    lines.append(
        "set what serves all arms in peers.NAME.learning_rate, and what serves one in its set; differences no wider "
        "than those between seeds say nothing"
    )
    return lines


def compare_rates(
    recipe: Annotated[Path, typer.Argument(help="A recipe, as in recipes/demo.toml.", show_default=False)],
    arm: Annotated[list[str] | None, typer.Option("--arm", help="Only this arm. Repeatable.")] = None,
    times: Annotated[str, typer.Option(metavar="NUMBER,…", help="Multiples of the recipe's rates.")] = "0.5,1,2",
    peer: Annotated[
        list[str] | None,
        typer.Option("--peer", help="Multiply only this peer's rate; '*-lora' for several. Repeatable."),
    ] = None,
    seeds: Annotated[str, typer.Option(metavar="N|FIRST-LAST", help="Seeds 0 … N−1, or those of a range.")] = "2",
    jobs: Jobs = 0,
    set_: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what there is to do; train nothing.")] = False,
) -> None:
    """Find the learning rate that serves each arm.

    It is tried on training problems that are held out. Run it again to resume it.
    """
    try:
        chosen = sorted({float(multiple) for multiple in times.split(",")})
    except ValueError:
        chosen = []
    if not chosen or not all(0 < multiple < math.inf for multiple in chosen):
        raise typer.BadParameter(f"--times {times}: give numbers above 0 with commas between them, as in 0.5,1,2")
    loaded = for_seeds(recipe, set_ or [])
    compared = trials(loaded, arm or (), chosen, peer or ())
    compared = with_earlier(compared, experiment_directory(compared))
    directory = carry_out(compared, seeds, jobs, dry_run)
    if directory is None:
        return
    tried = multiples(loaded, arm or (), compared, peer or ())
    found = read_trials(loaded, arm or (), tried, directory, peer or ())
    console.print(table(found, loaded))
    for line in advice(found):
        console.print(line)


if __name__ == "__main__":
    commands.run(compare_rates)
