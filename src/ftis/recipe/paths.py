"""The paths of a recipe's models and problems, looked for before torch is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ftis.config import Recipe, RecipeError
from ftis.engines.places import looks_local, no_model_at


def require_paths(file: Path, recipes: Iterable[Recipe]) -> None:
    """Refuse a recipe if one of its models or files of problems is not here.

    Args:
        file: the recipe's. The directory from which its paths are right is often above it.
        recipes: of the arms that will run.

    Raises:
        RecipeError: a path leads nowhere from where the command runs.
        TaskError: a file of problems is nowhere.
    """
    from ftis.tasks.jsonl import files  # loads numpy, and every command loads this module

    for recipe in recipes:
        models = {peer.model: f"peers.{peer.name}.model" for peer in recipe.peers if looks_local(peer.model)}
        named = {"task": recipe.task, **{f"ood[{i}]": task for i, task in enumerate(recipe.ood)}}
        tasks = {key: task for key, task in named.items() if task.name == "jsonl"}
        problems = {task.path: f"{key}.path" for key, task in tasks.items() if task.path}
        for path, key in {**models, **problems}.items():
            if Path(path).exists():
                continue
            if above := next((place for place in file.resolve().parents if (place / path).exists()), None):
                raise RecipeError(
                    f"{key} = {path!r} is not in {Path.cwd()}, where the command runs, but in {above}: cd {above} first"
                )
            if path in models:
                raise RecipeError(f"{key}: {no_model_at(path)}")
        for task in tasks.values():
            files(task)
