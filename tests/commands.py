"""``ftis`` command lines: run in this process, written for another, or only parsed."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer

from ftis.cli import app, main
from research.commands import run

ROOT = Path(__file__).parents[1]
DATA = Path(os.environ.get("FTIS_DATA") or ROOT / "data")
"""The place of ``gsm8k/`` and ``math500/`` as their authors publish them, for the tests that read real problems."""


def real_problems(name: str) -> Path:
    """A file below :data:`DATA`. Without it the test is skipped."""
    if not (DATA / name).is_file():
        pytest.skip(f"needs {name} in {DATA}; FTIS_DATA names another directory")
    return DATA / name


def ftis(*arguments: str) -> int:
    """Run the command in this process; its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONSAFEPATH", "1")  # which the command sets for good
        with pytest.raises(SystemExit) as exit_:
            main(list(arguments))
    return int(exit_.value.code or 0)


def research(of: Callable[..., None], *arguments: str) -> int:
    """Run a command of ``research`` in this process; its exit code."""
    with pytest.raises(SystemExit) as exit_:
        run(of, arguments)
    return int(exit_.value.code or 0)


def trained(place: Path) -> Path:
    """``place``, after the recipe there was trained in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.syspath_prepend(str(place))
        assert ftis("train", "recipe.toml") == 0
    return place


PROGRAM = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
from ftis.cli import main
main()
"""


def command(*arguments: str) -> list[str]:
    """The command line of ``ftis`` in a process of its own, started as from a terminal."""
    return [sys.executable, "-P", "-c", PROGRAM, *arguments]


def parsed(arguments: Sequence[str]) -> dict[str, Any]:
    """The values of a command's parameters, from what stands behind ``ftis``. Raises typer's usage errors."""
    command: Any = typer.main.get_command(app)
    rest = list(arguments)
    if rest and set(rest) <= {name for option in command.params for name in option.opts}:
        return dict.fromkeys(rest, True)  # of the program itself, as --version
    while hasattr(command, "commands"):
        assert set(rest[:1]) & set(command.commands), f"{rest[:1]} is none of {sorted(command.commands)}"
        command = command.commands[rest.pop(0)]
    values: dict[str, Any] = command.make_context("ftis", rest).params
    return values


def shell_commands(text: str) -> list[list[str]]:
    """The arguments of each ``ftis`` command in shell text: one a line, or several joined by && and the like."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        for part in re.split("&&|[|][|]|;", line):
            words = shlex.split(part, comments=True)
            if words[:1] == ["ftis"]:
                found.append(words[1:])
    return found


def make_targets() -> set[str]:
    """What ``make`` can be asked for."""
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
