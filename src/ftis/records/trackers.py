"""The experiment trackers that ``report_to`` knows by name. A package is imported when a recipe names it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ftis.config import RecipeError
from ftis.version import extra


class TensorBoard:
    """Event files in ``<directory>/tensorboard``."""

    @staticmethod
    def package() -> Any:
        return _import("torch.utils.tensorboard", "tensorboard")

    def __init__(self, project: str, run: str, directory: Path) -> None:
        self._writer = self.package().SummaryWriter(str(directory / "tensorboard"))

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def finish(self) -> None:
        self._writer.close()


class WandB:
    """A run of Weights & Biases."""

    @staticmethod
    def package() -> Any:
        return _import("wandb", "wandb")

    def __init__(self, project: str, run: str, directory: Path) -> None:
        self._run = self.package().init(project=project, name=run, dir=str(directory), reinit="create_new")

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def finish(self) -> None:
        self._run.finish()


class Trackio:
    """A run of Trackio."""

    @staticmethod
    def package() -> Any:
        return _import("trackio", "trackio")

    def __init__(self, project: str, run: str, directory: Path) -> None:
        # Not the module's own log and finish: those are of whichever run began last, and peers share a process.
        self._run = self.package().init(project=project, name=run)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def finish(self) -> None:
        self._run.finish()


def _import(module: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise RecipeError(f"report_to: {name} is not installed; run pip install {extra(name)}") from None
