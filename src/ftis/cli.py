"""The command line: parse → call → exit code.

Exit codes: 0 done; 1 an error that names its remedy; 2 wrong usage; 3 the run ended but some peer of a collaborative
arm never used a foreign rollout; 130 stopped by a signal, resumable.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated

import typer

from ftis import cli_swarm
from ftis.cli_options import (
    CHECKING,
    LOADING,
    MEASURING,
    NEWEST,
    DryRun,
    Overrides,
    Overwrite,
    RecipeFile,
    Resume,
    Resuming,
    busy,
    by_bare_resume,
    check_resume,
    conclude,
    console,
    errors,
    fail_if_alone,
    go_back,
    step_of,
)
from ftis.config import FtisError, Recipe, RunError, did_you_mean, nearest
from ftis.machine.resources import keep_freed_memory, memory_ran_out, name_places_of_crashes, share_cores
from ftis.recipe.arms import arms_of, run_directory
from ftis.recipe.own_code import error_of_own_code
from ftis.recipe.parsing import load, ready_made, split_override, toml
from ftis.recipe.paths import require_paths
from ftis.records.events import Planned
from ftis.version import version

if TYPE_CHECKING:
    from ftis.comparison.values import StudyResults
    from ftis.records.reading import Study

app = typer.Typer(
    name="ftis",
    context_settings={"max_content_width": 120},
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Different language models learn together, exchanging only completions and log-probabilities.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ftis {version()}")
        raise typer.Exit


Arms = Annotated[list[str] | None, typer.Option("--arm", help="Only this arm. Repeatable.")]
Jobs = Annotated[
    int,
    typer.Option(
        min=0,
        help="With --seeds: swarms at a time. 0: one per core, as memory allows, and large models on a GPU in turn.",
    ),
]


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of the program itself; each command has its own."""


@app.command()
def doctor() -> None:
    """Print the parts of this machine, and how to get others."""
    from ftis.check.doctor import diagnose

    problems = 0
    for name, state, found, remedy in diagnose():
        mark = {"ok": "ok     ", "absent": "absent ", "problem": "PROBLEM"}[state]
        problems += state == "problem"
        console.print(f"{mark} {name}: {found}" + (f" → {remedy}" if remedy else ""))
    raise typer.Exit(1 if problems else 0)


@app.command()
def demo(
    seed: Annotated[int, typer.Option(min=0, help="Another seed is another run.")] = 0,
    output_dir: Annotated[Path, typer.Option(help="The run's place is OUTPUT_DIR/demo-seed<seed>.")] = Path("runs"),
    set_: Overrides = None,
    dry_run: DryRun = False,
) -> None:
    """Train four small models, alone and together. Run it again to resume it."""
    options = [f"seed={seed}", f"output_dir={toml(str(output_dir))}"]
    loaded = load(ready_made(Path("recipes/demo.toml")), set_ or [], options)
    arms = ("alone-spread", "F-TIS", "F-TIS-lifted", "alone")  # the recipe has more baselines
    if dry_run:
        _print_plan(loaded, arms)
    else:
        _train(loaded, arms, NEWEST)


@app.command()
def models(
    names: Annotated[list[str] | None, typer.Argument(help="Names from the list.", show_default=False)] = None,
    directory: Annotated[Path, typer.Option("--directory", "-d", help="The directory of pretrained models.")] = Path(
        "models"
    ),
) -> None:
    """List the models with a short name, or fetch some."""
    from ftis.models import pretrained, starters

    if not names:
        here = [f"{starters.PREFIX}{name}: here: {starters.path_of(name)}" for name in starters.SHIPPED]
        for line in [*here, *pretrained.listed(directory)]:
            console.print(line)
        return
    known = [*starters.SHIPPED, *pretrained.MODELS]
    bare = [name.removeprefix(starters.PREFIX) for name in names]
    if unknown := [name for name in bare if name not in known]:
        raise FtisError(
            f"no model {unknown[0]!r} here{nearest(unknown[0], known)}; a recipe fetches any other by its Hub id as a "
            f"peer's model"
        )
    for name in bare:
        if name in starters.SHIPPED:
            console.print(f'{starters.path_of(name)}: in a recipe, model = "{starters.PREFIX}{name}"')
        else:
            path = pretrained.get(name, directory, console.print)
            console.print(f'{path}: in a recipe, model = "{path}"')


@app.command()
def new(
    directory: Annotated[Path, typer.Argument(metavar="[DIR]", help="For the recipe; made if absent.")] = Path("mine"),
    model: Annotated[
        list[str] | None, typer.Option(help="Trained in full: a directory, a Hub id, starter:<name>. Repeatable.")
    ] = None,
    lora: Annotated[list[str] | None, typer.Option(metavar="MODEL", help="Trained through LoRA. Repeatable.")] = None,
    problems: Annotated[
        str | None, typer.Option(metavar="FILE", help="A .jsonl file, or a directory with train.jsonl.")
    ] = None,
    reward: Annotated[
        str | None, typer.Option(metavar="exact|number|math|own", help="How answers are compared. By default guessed.")
    ] = None,
    question: Annotated[str | None, typer.Option(metavar="COLUMN", help="Of questions. By default guessed.")] = None,
    answer: Annotated[str | None, typer.Option(metavar="COLUMN", help="Of answers. By default guessed.")] = None,
) -> None:
    """Write a recipe for your models and problems.

    --reward own adds a reward to edit. On a terminal the command asks for missing values.
    """
    with busy(LOADING):
        from ftis.check.plan import split
        from ftis.draft.problems import problems_in
        from ftis.draft.sections import REWARDS, Train
        from ftis.draft.writing import begin
        from ftis.models import pretrained

    on_terminal = sys.stdin.isatty() and console.is_terminal

    def asked(option: str, given: str | None, question: str, default: str | None = None) -> str:
        if given is None and not on_terminal:
            raise typer.BadParameter(f"--{option} is missing: {question}")
        return typer.prompt(question, default=default) if given is None else given

    path = asked("problems", problems, "the .jsonl file with your problems")
    found = problems_in(path, question, answer)
    console.print(
        f"{path}: {split(found.task)}; the question is in {found.question!r}, the answer in {found.answer!r} "
        f"(--question and --answer name others)"
    )
    if not model and not lora:
        model = asked("model", None, "models, with a space between two", "smollm2-135m").split()
    peers: list[tuple[str, Train]] = [(name, "full") for name in model or ()]
    peers += [(name, "lora") for name in lora or ()]
    local = {
        name: str(pretrained.get(name, Path("models"), console.print)) for name, _ in peers if name in pretrained.MODELS
    }
    if reward is None:
        reward = asked("reward", None if on_terminal else found.kind, f"reward ({', '.join(REWARDS)})", found.kind)
    if reward not in REWARDS:
        raise typer.BadParameter(f"--reward {reward}: take one of {', '.join(REWARDS)}")
    with busy("looking at the models") as doing:
        files, lines = begin(directory, [(local.get(name, name), how) for name, how in peers], found, reward, doing)
    for line in [*lines, *(f"wrote {file}" for file in files)]:
        console.print(line)
    for command in ("train {} --dry-run", "preflight {}", "train {}"):
        console.print(f"next: ftis {command.format(shlex.quote(str(files[0])))}")


@app.command()
def preflight(
    recipe: RecipeFile,
    set_: Overrides = None,
    arm: Annotated[str | None, typer.Option(help="The arm. By default the recipe's first.")] = None,
    groups: Annotated[int, typer.Option(min=1, help="Groups that each peer samples.")] = 4,
) -> None:
    """Predict whether a recipe would learn, and the cost of a round."""
    loaded = load(recipe, set_ or [])
    chosen = arms_of(loaded, (arm,) if arm else ())[:1]
    require_paths(recipe, [chosen[0].recipe])
    with busy(LOADING):
        from ftis import library
        from ftis.check.estimate import totals
        from ftis.check.quantities import counted
        from ftis.records.events import Stopped
        from ftis.view import tables
        from ftis.view.progress import Display

    display = Display(console)
    which = f"{chosen[0].name}, the first (--arm names another)" if len(loaded.arms) > 1 and not arm else chosen[0].name
    console.print(
        f"arm {which}: one after the other each peer loads its model, samples up to {counted(groups, 'group')} and "
        f"learns from some; nothing of it is kept; Ctrl-C ends it"
    )
    try:
        with display.live(resumes=False):
            display(Planned((CHECKING,)))
            soundings = library.preflight(loaded, arm=arm, groups=groups, say=display)
    except Stopped:
        console.print("stopped: nothing of it is kept")
        raise typer.Exit(130) from None
    tables.print_soundings(soundings, chosen[0].recipe, console)
    for line in totals(chosen).lines:
        console.print(line)
    teaching = {one.peer for one in soundings if one.signal}
    if any(teaching.isdisjoint(peer.name for peer in swarm.peers) for swarm in chosen[0].swarms):
        errors.print("error: with this recipe nothing would be learned")
        raise typer.Exit(3)
    if len(teaching) == len(soundings):
        command = ["ftis", "train", str(recipe)] + (["--arm", arm] if arm else [])
        for given in set_ or []:
            command += ["--set", given]
        console.print(f"next: {shlex.join(command)}")


@app.command(cls=Resuming)
def train(
    recipe: RecipeFile,
    set_: Overrides = None,
    arm: Arms = None,
    seeds: Annotated[
        str | None,
        typer.Option(metavar="N|FIRST-LAST", help="Compare under seeds 0 … N−1, or those of a range such as 5-9."),
    ] = None,
    jobs: Jobs = 0,
    dry_run: DryRun = False,
    resume: Resume = None,
    overwrite: Overwrite = False,
) -> None:
    """Train a recipe's peers, arm by arm, and compare them. With --seeds, run it again to resume it."""
    arms = tuple(arm or ())
    check_resume(resume, overwrite)
    if seeds is not None:
        if overwrite or step_of(resume) is not None:
            raise typer.BadParameter(
                "--seeds resumes by itself. To go back in one of its runs, name that run's recipe.json, as in ftis "
                "train runs/demo/demo-seed0/recipe.json --resume 20. To begin anew, give another --set name=…"
            )
        chosen = for_seeds(recipe, set_ or [])
        require_paths(recipe, (one.recipe for one in arms_of(chosen, arms)))
        _compare(chosen, arms, seeds, jobs, dry_run)
        return
    if jobs:
        raise typer.BadParameter("--jobs goes with --seeds")
    loaded = load(recipe, set_ or [])
    require_paths(recipe, (one.recipe for one in arms_of(loaded, arms)))
    directory = run_directory(loaded)
    if dry_run:
        _print_plan(loaded, arms)
    if (step := step_of(resume)) is not None:
        with busy(CHECKING):
            from ftis.directory.claiming import may_claim
            from ftis.preparing.checks import check_to_train

            tasks = check_to_train(arms_of(loaded, arms)).tasks
            may_claim(directory, True, loaded, tasks=tasks, back_to=step, only=arms)
        go_back(directory, step, arms, dry_run)
    if dry_run:
        return
    if resume and not directory.exists():
        from ftis.records.plan import RECIPE

        there = [place.name for place in directory.parent.glob("[!.]*") if (place / RECIPE).exists()]
        near = did_you_mean(directory.name, there)
        console.print(f"--resume: there is no {directory} to resume, so the run begins{near}")
    _train(loaded, arms, resume, overwrite)


def _train(loaded: Recipe, only: tuple[str, ...], resume: str | None, overwrite: bool = False) -> None:
    with busy(LOADING):
        from ftis import library
        from ftis.view.progress import Display

    display = Display(console)
    with display.live():
        display(Planned((CHECKING,)))
        found = library.train(loaded, only=only, resume=resume is not None, overwrite=overwrite, say=display)
    if not found.finished:
        how = "" if resume == NEWEST else f" {by_bare_resume(overwrite)}"
        console.print(f"stopped; the same command{how} goes on with {found.directory}")
        raise typer.Exit(130)
    conclude(found.directory)


SET_ELSEWHERE = {
    "seed": "--seeds names the seeds, as in --seeds {value}-{value}",
    "processes": "with --seeds each swarm has a process of its own; --jobs says how many run at a time",
}
"""Keys that a comparison over seeds does not take from its recipe, and the options that set them instead."""


def for_seeds(recipe: Path, overrides: Sequence[str]) -> Recipe:
    """A recipe to be trained under several seeds. An override without effect there is refused."""
    for override in overrides:
        key, value = split_override(override)
        if (instead := SET_ELSEWHERE.get(key)) is not None:
            raise typer.BadParameter(f"--set {override}: {instead.format(value=value)}")
    return load(recipe, overrides)


def seeds_of(text: str) -> range:
    """The seeds 0 to 4 of ``5``, and 5 to 9 of ``5-9``."""
    first, dash, last = text.partition("-")
    if not (first.isdecimal() and (not dash or last.isdecimal())):
        raise typer.BadParameter(f"{text!r} is neither a number of seeds nor a first and a last one: give 5 or 5-9")
    seeds = range(int(first), int(last) + 1) if dash else range(int(first))
    if not seeds:
        raise typer.BadParameter(f"{text!r} has no seed: give at least 1, or a last seed not below the first")
    return seeds


@app.command(hidden=True)
def experiment(
    recipe: RecipeFile,
    seeds: Annotated[str, typer.Option(metavar="N|FIRST-LAST")] = "5",
    jobs: Jobs = 0,
    arm: Arms = None,
    set_: Overrides = None,
    dry_run: DryRun = False,
) -> None:
    """Do what ``ftis train --seeds`` does. The name is gone in the next release."""
    console.print(f"ftis experiment is called ftis train --seeds {seeds} now; the next release has no experiment")
    _compare(for_seeds(recipe, set_ or []), tuple(arm or ()), seeds, jobs, dry_run)


def _compare(recipe: Recipe, only: tuple[str, ...], seeds: str, jobs: int, dry_run: bool) -> None:
    """Train the arms under every seed; print and write their comparison."""
    from ftis.recipe.arms import experiment_directory, keep_arms
    from ftis.records.plan import experiment_before
    from ftis.view import tables

    before = experiment_before(experiment_directory(recipe))
    if only and before:
        there = {arm.name for arm in before.arms}
        only += tuple(arm.name for arm in recipe.arms if arm.name in there)
    kept = keep_arms(recipe, only)
    if dry_run:
        _print_plan(kept, ())
    directory = carry_out(kept, seeds, jobs, dry_run)
    if directory is None:
        return
    report, study, results = report_on(directory)
    tables.print_comparison(results, console)
    console.print(f"report: {report}")
    fail_if_alone(study.runs.values())


def carry_out(recipe: Recipe, seeds: str, jobs: int, dry_run: bool) -> Path | None:
    """Print the jobs to train under these seeds, and train them. Returns their directory; None with ``dry_run``.

    Ctrl-C ends the program.
    """
    wanted = seeds_of(seeds)
    with busy(LOADING):
        from ftis.check.estimate import fitting_jobs
        from ftis.check.plan import alone, of_jobs, problems, remarks
        from ftis.check.rates import rates
        from ftis.experiment.seeds import jobs_of, run_experiment
        from ftis.machine.resources import cores
        from ftis.preparing.checks import check_to_train
        from ftis.recipe.arms import experiment_directory
        from ftis.view.progress import Display

    arms, directory = arms_of(recipe), experiment_directory(recipe)
    at_a_time = jobs or fitting_jobs(recipe, cores())
    for line in of_jobs(recipe, jobs_of(recipe, wanted), at_a_time):
        console.print(line)
    if dry_run:
        return None
    display = Display(console)
    with display.live():
        display(Planned((CHECKING,)))
        checked = check_to_train(arms)
        display(Planned((*problems(checked), *alone(arms), *remarks(checked), *rates(arms))))
        finished = run_experiment(recipe, wanted, at_a_time, display, checked=checked)
    if not finished:
        console.print(f"stopped; the same command goes on with {directory}")
        raise typer.Exit(130)
    return directory


def report_on(directory: Path) -> tuple[Path, Study, StudyResults]:
    """Write the page of a run or of a comparison over seeds. A large one takes a minute or two.

    Returns:
        the page, and the records and results that it shows.
    """
    from ftis.view.report import draw_page, read_and_compare

    with busy("reading the records, drawing the report"):
        study, results = read_and_compare(directory)
        return draw_page(study, results), study, results


def _print_plan(recipe: Recipe, only: tuple[str, ...]) -> None:
    with busy(LOADING) as doing:
        from ftis.check.estimate import estimate
        from ftis.check.plan import plan
        from ftis.preparing.checks import check_to_train

        doing(CHECKING)
        checked = check_to_train(arms_of(recipe, only))
        lines = plan(checked, arms_of(recipe))
        doing(MEASURING)
        lines += estimate(checked.arms)
    for line in [*lines, "next: ftis preflight predicts whether it would learn, and how long a round takes"]:
        console.print(line)


@app.command("eval")
def evaluate_model(
    model: Annotated[
        str, typer.Argument(help="A Hugging Face directory (a checkpoint too), a Hub id, or starter:<name>.")
    ],
    recipe: Annotated[Path, typer.Option(help="Gives task, prompt, reward and sampling.", show_default=False)],
    set_: Overrides = None,
    peer: Annotated[str | None, typer.Option(help="Run the model on this peer's device, in its dtype.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Number of problems, a seeded subset.")] = None,
    samples: Annotated[
        int, typer.Option(min=0, help="Also sample so many completions of each problem: pass@k and mean reward.")
    ] = 0,
    output: Annotated[
        Path | None, typer.Option(dir_okay=False, readable=False, help="Write per-problem records here (JSONL).")
    ] = None,
) -> None:
    """Measure one model on the validation problems of a recipe.

    Greedy pass@1, and with --samples pass@k and the mean reward of sampled completions.
    """
    loaded = load(recipe, set_ or [])
    sampling = loaded.sampling
    if output:  # a place that cannot be written is refused before the answers
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=output.parent):
                pass
        except OSError as error:
            raise RunError(f"{output} cannot be written ({error.strerror}): name another file as --output") from error
    with busy(LOADING) as doing:
        from ftis.check.quantities import counted, in_time
        from ftis.library import open_exam
        from ftis.records.files import write_jsonl
        from ftis.view.progress import WORTH_WAITING

        doing("loading the model, trying its sampler")
        with open_exam(model, loaded, peer, limit) as (exam, remarks):
            for line in remarks:
                console.print(line)
            doing(f"answering {counted(len(exam.problems), 'validation problem')}")
            began = time.monotonic()

            def answered(done: int) -> None:
                seconds = (time.monotonic() - began) / done * (len(exam.problems) - done)
                if seconds >= WORTH_WAITING:
                    doing(f"{done:,} of {len(exam.problems):,} answered, about {in_time(seconds)} left")

            result = exam.greedy(answered)
            of_samples = (time.monotonic() - began) * samples  # seconds
            console.print(f"{loaded.task.name}: {result}, mean length {result.mean_length:.1f} tokens")
            rows = [vars(problem) for problem in result.problems]
            if samples:
                lasting = f", about {in_time(of_samples)}" if of_samples >= WORTH_WAITING else ""
                doing(f"sampling {counted(samples, 'completion')} of each{lasting}")
                drawn = exam.sampled(samples, loaded.seed)
                console.print(
                    f"{loaded.task.name}: mean reward {drawn.mean_reward:.3f} and pass@{samples} "
                    f"{drawn.pass_at(samples):.3f} of {samples} samples at temperature {sampling.temperature:g}"
                )
                for row, completions, rewards in zip(rows, drawn.completions, drawn.rewards, strict=True):
                    row |= {"samples": completions, "sample_rewards": rewards}
    if output:
        write_jsonl(output, rows)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run's directory, or a checkpoint in it.", show_default=False)],
    peer: Annotated[str | None, typer.Option(help="The peer, if several have checkpoints.")] = None,
    arm: Annotated[str | None, typer.Option(help="The arm, if several have checkpoints.")] = None,
    step: Annotated[
        int | None, typer.Option(min=1, help="The round. By default the last; the best if the run kept it.")
    ] = None,
    to: Annotated[Path | None, typer.Option(help="A new directory, by default models/<run>-<arm>-<peer>.")] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Merge a LoRA adapter into its base.")] = False,
    dtype: Annotated[
        str, typer.Option(metavar="float32|bfloat16|float16", help="The weights' type. Training has float32.")
    ] = "float32",
    gguf: Annotated[
        Path | None, typer.Option(metavar="CONVERTER", help="Add a GGUF file by llama.cpp's convert_hf_to_gguf.py.")
    ] = None,
    push_to_hub: Annotated[str | None, typer.Option(metavar="OWNER/NAME", help="Upload it too, as private.")] = None,
) -> None:
    """Write a trained model as a directory with a model card.

    transformers, vLLM and the converter of llama.cpp load it.
    """
    if dtype not in ("float32", "bfloat16", "float16"):
        raise typer.BadParameter(f"--dtype {dtype}: take float32, bfloat16 or float16")
    with busy(LOADING):
        from ftis.run import export as exporting
        from ftis.view.card import card

    found = exporting.find(run, peer, arm, step)
    place = to or Path("models") / f"{run_directory(found.recipe).name}-{found.arm}-{found.peer.name}"
    adapter = found.is_adapter and not merge
    if gguf and not gguf.is_file():
        raise typer.BadParameter(f"--gguf {gguf}: no such file; it is llama.cpp's convert_hf_to_gguf.py")
    if adapter and gguf:
        raise typer.BadParameter("--gguf: a GGUF file holds a whole model; add --merge")
    if adapter and push_to_hub:
        exporting.require_base_on_hub(found)
    with busy("writing the model"):
        exporting.write(found, place, found.is_adapter and merge, card(found, merge), dtype)
    console.print(f"{place}: {found.peer.name} of {found.arm} after round {found.step}, with a model card (README.md)")
    if adapter:
        console.print("it is a LoRA adapter, which needs its base; --merge and another --to make a model of both")
    if gguf:
        with busy("writing the GGUF file"):
            file = exporting.to_gguf(place, gguf, dtype)
        console.print(f"{file}, for llama.cpp")
    if push_to_hub:
        console.print(f"uploaded to {exporting.push(place, push_to_hub)}")


@app.command("report")
def make_report(
    directory: Annotated[Path, typer.Argument(help="Of a run, or of a comparison over seeds.", show_default=False)],
) -> None:
    """Write a page of a run or a comparison."""
    console.print(f"report: {report_on(directory)[0]}")


@app.command()
def watch(
    directory: Annotated[Path, typer.Argument(help="Of a run, or of a comparison over seeds.", show_default=False)],
    host: Annotated[
        str, typer.Option(help="Address to serve at; one other than this machine's own needs the token in its URL.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free one.")] = 8730,
) -> None:
    """Show a run or a comparison in the browser. Ctrl-C ends it."""
    from ftis.view.watch import serve

    serve(directory, host, port, lambda at: console.print(f"watching {directory}: {at}", soft_wrap=True))


app.command(cls=Resuming)(cli_swarm.join)
app.command()(cli_swarm.status)
app.command()(cli_swarm.router)
app.add_typer(cli_swarm.keys, name="keys")


def main(arguments: list[str] | None = None) -> None:
    """Run the ``ftis`` command. Neither it nor a process that it starts looks for modules in the current directory."""
    os.environ["PYTHONSAFEPATH"] = "1"  # else multiprocessing's servers would, since Python starts them with -c
    share_cores()
    keep_freed_memory()
    name_places_of_crashes()
    if isinstance(sys.stdout, TextIOWrapper):  # a terminal or a file in another encoding than UTF-8 lacks some signs
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app(arguments)
    except Exception as error:
        known = error_of_own_code(error) or memory_ran_out(error)
        if known is None and not isinstance(error, (FtisError, OSError)):
            raise
        errors.print(f"error: {known or error}")
        sys.exit(1)
