"""Experiment trackers: their protocol, opening those that ``report_to`` names, and the built-in ones.

A package is imported when a recipe names it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from ftis.config import FtisError, RecipeError
from ftis.seams import TRACKERS, look_up
from ftis.version import extra


class Tracker(Protocol):
    """A display of a run's numbers elsewhere. ``report_to`` names ``f(project, run, directory) -> Tracker``."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Take the numbers after ``step`` finished rounds."""

    def finish(self) -> None:
        """Close the tracker: the run has ended or stopped."""


class TrackerError(FtisError):
    """A tracker raised an error. The numbers that it got are recorded and saved."""


@contextmanager
def named(tracker: str) -> Iterator[None]:
    """Name the tracker in the error that it raises."""
    try:
        yield
    except FtisError:  # of another tracker, or with a remedy of its own
        raise
    except Exception as error:  # the user's code, or a service that is not there
        raise TrackerError(
            f"report_to: {tracker} raised {type(error).__name__}: {error}; mend it or leave it out "
            f"(--set 'report_to=[]'), then run the same command with a bare --resume"
        ) from error


def open_trackers(names: Sequence[str], project: str, run: str, directory: Path) -> list[Tracker]:
    """The trackers that ``report_to`` names.

    Raises:
        RecipeError: a tracker does not exist, or its package is not installed.
        TrackerError: it raised an error.
    """
    with ExitStack() as opened:  # an error in a later one closes the earlier ones
        trackers = []
        for name in names:
            open_one = look_up(name, "report_to", TRACKERS)
            opened.enter_context(named(name))  # of its errors at once, and in finish
            trackers.append(tracker := open_one(project, run, directory))
            opened.callback(tracker.finish)
        opened.pop_all()
        return trackers


MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "trackio": "trackio"}


def package(name: str) -> Any:
    """The module of a built-in tracker.

    Raises:
        RecipeError: it is not installed.
    """
    try:
        return importlib.import_module(MODULES[name])
    except ImportError:
        raise RecipeError(f"report_to: {name} is not installed; run pip install {extra(name)}") from None


class TensorBoard:
    """Event files in ``<directory>/tensorboard``."""

    def __init__(self, project: str, run: str, directory: Path) -> None:
        self._writer = package("tensorboard").SummaryWriter(str(directory / "tensorboard"))

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def finish(self) -> None:
        self._writer.close()


class OfPackage:
    """A run of Weights & Biases or of Trackio.

    Numbers go to the run itself: the package's log and finish mean the run that began last, and peers share a process.
    """

    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def finish(self) -> None:
        self._run.finish()


def wandb(project: str, run: str, directory: Path) -> OfPackage:
    return OfPackage(package("wandb").init(project=project, name=run, dir=str(directory), reinit="create_new"))


def trackio(project: str, run: str, directory: Path) -> OfPackage:
    return OfPackage(package("trackio").init(project=project, name=run))
