"""The common part of this package's commands: ``python -m research.probe``, ``rates``, ``replay``, ``scaling``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import typer

from ftis.cli_options import errors
from ftis.config import FtisError
from ftis.machine.resources import keep_freed_memory
from ftis.recipe.own_code import error_of_own_code


def run(command: Callable[..., Any], arguments: Sequence[str] | None = None) -> None:
    """Run a function as a command. An error that names its remedy ends the program with exit code 1."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command()(command)
    keep_freed_memory()
    try:
        app(None if arguments is None else list(arguments))
    except Exception as error:
        if (own := error_of_own_code(error)) is None and not isinstance(error, (FtisError, OSError)):
            raise
        errors.print(f"error: {own or error}")
        sys.exit(1)
