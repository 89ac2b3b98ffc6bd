"""Parts that commands share: the console, their options, going back, and the results at the end."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand

if TYPE_CHECKING:
    from ftis.records.reading import Run


class Output(Console):
    """A console whose reader may leave, as ``head`` does.

    A command that handles SIGTERM then ends as at SIGTERM, so peers save first. Any other exits with status 1.
    """

    def on_broken_pipe(self) -> None:
        if self.quiet:  # another thread has met it
            return
        try:
            super().on_broken_pipe()
        except SystemExit:
            handler = signal.getsignal(signal.SIGTERM)
            if handler in (signal.SIG_DFL, None):
                raise
            if handler is not signal.SIG_IGN:  # a command that is asked to end already ignores it
                signal.raise_signal(signal.SIGTERM)


on_terminal = sys.stdout.isatty()
console = Output(
    force_terminal=None if on_terminal else False,  # FORCE_COLOR alone would draw bars into a file
    width=None if on_terminal else 120,
    soft_wrap=not on_terminal,
    markup=False,
    highlight=False,
)
errors = Console(stderr=True, soft_wrap=True, markup=False, highlight=False)

LOADING = "loading torch and transformers"
CHECKING = "looking at the models, problems and rewards"
MEASURING = "measuring the memory of an update"


@contextmanager
def busy(doing: str) -> Iterator[Callable[[str], None]]:
    """Show a command's work before its results: by a spinner on a terminal, elsewhere in lines.

    Yields:
        a function that is called with the command's next work.
    """
    if console.is_terminal:
        with console.status(doing) as status:
            yield status.update
    else:
        console.print(f"{doing} …")
        yield lambda text: console.print(f"{text} …")


RecipeFile = Annotated[Path, typer.Argument(help="A recipe, as recipes/demo.toml.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Replace a key, e.g. peers.small.learning_rate=1e-4. Repeatable."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and its cost; train nothing.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Delete the earlier run first.")]

NEWEST = "newest"
"""The value of a bare ``--resume``."""


class Resuming(TyperCommand):
    """A command whose ``--resume`` may stand without a value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        following = [*args, ""][1:]
        bare = [word == "--resume" and not after.isdecimal() for word, after in zip(args, following, strict=True)]
        return super().parse_args(
            ctx, [f"--resume={NEWEST}" if alone else word for word, alone in zip(args, bare, strict=True)]
        )


def _resume(value: str | None) -> str | None:
    if value is None or value == NEWEST or value.isdecimal():
        return value
    raise typer.BadParameter(f"{value!r} is no step: give a number, or nothing for the newest checkpoint")


Resume = Annotated[
    str | None,
    typer.Option(
        "--resume",
        metavar="[STEP]",
        callback=_resume,
        help="Go on where the run stopped, or start it. With STEP: first undo what came after that checkpoint.",
    ),
]


def step_of(resume: str | None) -> int | None:
    """The step that ``--resume`` names, if it names one."""
    return None if resume in (None, NEWEST) else int(resume)


def go_back(directory: Path, step: int, arms: tuple[str, ...], dry_run: bool) -> None:
    """Undo the rounds after ``step``, and print the removed files."""
    from ftis.directory.rollback import roll_back

    for line in roll_back(directory, step, arms, dry_run).lines(with_files=dry_run):
        console.print(line)


def by_bare_resume(overwrite: bool) -> str:
    """The options with which a stopped command goes on: it could go back, or delete the run, once more."""
    return f"with a bare --resume{' instead of --overwrite' if overwrite else ''}"


def check_resume(resume: str | None, overwrite: bool) -> None:
    if resume and overwrite:
        raise typer.BadParameter("--resume and --overwrite exclude each other")


def conclude(directory: Path) -> None:
    """Print a run's results and directory. The exit code is that of :func:`fail_if_alone`."""
    from ftis.comparison import results, summary
    from ftis.records.reading import read_study
    from ftis.view import tables
    from ftis.view.arm import troubles
    from ftis.view.comparison import headlines
    from ftis.view.figures import write_learning_curves
    from ftis.view.formatting import visible

    study = read_study(directory)
    (run,) = study.runs.values()
    found, notes = summary.summarise(run), troubles(study)
    console.print(tables.closing_table(found))
    for note in notes:
        console.print(f"note: {visible(note)}")
    compared = results.compare(study, notes)
    write_learning_curves(directory, compared)
    for line in [*headlines(compared), tables.whereabouts(directory, found)]:
        console.print(line)
    fail_if_alone([run])


def fail_if_alone(runs: Iterable[Run]) -> None:
    """Exit code 3 if a peer of a collaborative arm used no foreign rollout."""
    from ftis.comparison import summary

    if summary.somebody_learned_alone(runs):
        errors.print("error: a peer that was to collaborate used no foreign rollout in any round")
        raise typer.Exit(3)
