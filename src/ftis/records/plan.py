"""The documents at the top of a run's or an experiment's directory. Only this module writes and reads them.

recipe.json         a run's recipe
provenance.json     everything beside the recipe on which its numbers depend
experiment.json     recipe, seeds and provenance of the runs beside it, one per seed
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, cast

from ftis.config import Recipe, RecipeError
from ftis.recipe.arms import Arm, arms_of, run_directory
from ftis.recipe.parsing import parse
from ftis.records.files import read_json, write_json, write_whole
from ftis.records.lines import RecordsError, damaged
from ftis.version import VERSION

RECIPE, PROVENANCE, EXPERIMENT = "recipe.json", "provenance.json", "experiment.json"
SUMMARY, RESULTS, CURVES, REPORT = "summary.json", "results.json", "learning_curves.svg", "report.html"
"""Files made from the records beside these documents."""


class Provenance(TypedDict, total=False):
    """The parts of provenance.json. Each may be absent; :mod:`ftis.directory.provenance` writes them.

    An entry of ``continued`` has ``arms`` that were added, and keys of the recipe that ``changed``, before and after.
    """

    started: str
    seed: int
    commit: str | None
    starters: dict[str, str]
    objectives: dict[str, dict[str, Any]]
    modules: dict[str, str]
    versions: dict[str, str]
    machine: dict[str, Any]
    problems: dict[str, list[str]]
    joined: str
    continued: list[Provenance]
    arms: list[str]
    changed: dict[str, list[Any]]
    rollbacks: list[dict[str, Any]]


@dataclass(frozen=True)
class Plan:
    """The plan of a directory: one run, or the runs of an experiment, one per seed.

    Attributes:
        joined: of a joined run, the peer whose records are here; the others' are on their own machines.
    """

    directory: Path
    recipe: Recipe
    seeds: tuple[int, ...]
    arms: tuple[Arm, ...]
    is_experiment: bool
    joined: str | None = None

    def run_of(self, seed: int) -> Path:
        run = run_directory(self.recipe.model_copy(update={"seed": seed})).name
        return self.directory / run if self.is_experiment else self.directory

    def here(self, names: Sequence[str]) -> tuple[str, ...]:
        """The peers among ``names`` whose records are here."""
        return tuple(name for name in names if self.joined in (None, name))


def read_plan(directory: Path) -> Plan:
    """The recipe, seeds and arms of a directory.

    Raises:
        RecordsError: the directory holds neither a run nor an experiment, or one of another version of ftis.
    """
    file = next((f for name in (EXPERIMENT, RECIPE) if (f := directory / name).exists()), None)
    if file is None:
        raise RecordsError(
            f"{directory} holds neither a run nor an experiment (no {RECIPE}, no {EXPERIMENT}): give the directory "
            f"that ftis train or ftis join named, once it has begun"
        )
    document, is_experiment = read_json(file), file.name == EXPERIMENT
    about = cast(Provenance, document) if is_experiment else read_provenance(directory)
    try:
        recipe = parse(document["recipe"] if is_experiment else document, str(file), recorded=True)
        seeds = tuple(map(int, document["seeds"])) if is_experiment else (recipe.seed,)
    except RecipeError as error:
        raise RecordsError(_of_another_version(about, str(error))) from None
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(file, f"{type(error).__name__}: {error}") from None
    joined = next((peer.name for peer in recipe.peers if peer.name == about.get("joined")), None)
    return Plan(directory, recipe, seeds, tuple(arms_of(recipe)), is_experiment, joined)


def experiment_before(directory: Path) -> Plan | None:
    """The plan of the experiment in a directory; None if none has begun."""
    return read_plan(directory) if (directory / EXPERIMENT).exists() else None


def _of_another_version(about: Provenance, why: str) -> str:
    """The error text for a recipe that this version cannot read, with the version that wrote it."""
    versions = about.get("versions")
    wrote = versions.get("ftis") if isinstance(versions, dict) else None
    if wrote not in (None, VERSION):
        return f"{why}. The run was recorded by ftis {wrote}, this is ftis {VERSION}: read it with ftis {wrote}"
    recorded = f", recorded at commit {str(about['commit'])[:12]}" if about.get("commit") else ""
    return f"{why}. The recipe may be of another version than this, ftis {VERSION}{recorded}: read it with that one"


def write_run(directory: Path, provenance: Mapping[str, object], recipe: Recipe | None = None) -> None:
    """Write a run's documents; by default the recipe that is there stays. A run without a recipe has not begun."""
    write_json(directory / PROVENANCE, provenance)
    if recipe is not None:
        write_whole(directory / RECIPE, recipe_text(recipe))


def recipe_text(recipe: Recipe) -> str:
    """A recipe as a run records it."""
    return recipe.model_dump_json(indent=1) + "\n"


def recorded_recipe(run: Path) -> bytes:
    """A run's recipe as the file has it."""
    return (run / RECIPE).read_bytes()


def write_experiment(directory: Path, recipe: Recipe, seeds: Sequence[int], provenance: Provenance) -> None:
    """Write an experiment's document."""
    document = {**provenance, "recipe": recipe.model_dump(mode="json"), "seeds": list(seeds)}
    write_json(directory / EXPERIMENT, document)


def read_provenance(run: Path) -> Provenance:
    """A run's provenance; {} without one.

    Raises:
        RecordsError: it is damaged.
    """
    return cast(Provenance, read_json(run / PROVENANCE) if (run / PROVENANCE).exists() else {})


def provenances(run: Path) -> list[Provenance]:
    """The provenances of a run: of its start, and of each time that it was continued by other means or with more arms.

    Raises:
        RecordsError: as :func:`read_provenance`.
    """
    of_run = read_provenance(run)
    return [of_run, *of_run.get("continued", ())]
