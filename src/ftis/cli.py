"""The command line: parse → call → exit code.

Exit codes: 0 done; 1 an error that names its remedy, or evidence that proves nothing; 2 wrong usage; 3 the run ended
but some peer of a collaborative arm never used a foreign rollout; 130 stopped by Ctrl-C, resumable.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ftis.cli_groups import (
    InOrder,
    Jobs,
    Overrides,
    Seeds,
    announce,
    carry_out,
    compare_rates,
    console,
    evaluate_model,
    keys,
    load_experiment,
    models,
    probe_bias,
    report_on,
    roll_back_run,
)
from ftis.config import FtisError, NetworkConfig, Recipe, did_you_mean, run_directory
from ftis.recipe.own_code import told_as_own
from ftis.recipe.parsing import load, network_settings
from ftis.records.events import WarmUp

app = typer.Typer(
    name="ftis",
    cls=InOrder,
    context_settings={"max_content_width": 120},
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Different language models learn together, exchanging only token ids and log-probabilities.",
)
errors = Console(stderr=True, soft_wrap=True, markup=False, highlight=False)
app.add_typer(keys, name="keys")
app.add_typer(models, name="models")
app.command("eval")(evaluate_model)
app.command("rates")(compare_rates)
app.command("probe")(probe_bias)
app.command("rollback")(roll_back_run)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ftis {importlib.metadata.version('ftis')}")
        raise typer.Exit


DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done and what it takes; train nothing.")]
Resolved = Annotated[bool, typer.Option("--resolved", help="As --dry-run, and print every key of the recipe.")]


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of the program itself; each command has its own."""


@app.command()
def demo(
    seed: Annotated[int, typer.Option(min=0, help="Another seed is another run.")] = 0,
    output_dir: Annotated[Path, typer.Option(help="The run is written to OUTPUT_DIR/demo-seed<seed>.")] = Path("runs"),
    set_: Overrides = None,
    dry_run: DryRun = False,
    resolved: Resolved = False,
) -> None:
    """Train four small models, alone and together. Run it again to resume it."""
    options = [f"seed={seed}", f"output_dir={json.dumps(str(output_dir))}"]
    loaded = load(_ready_made("demo"), set_ or [], options)
    if dry_run or resolved:
        _print_plan(loaded, (), resolved)
        return
    _train(loaded, (), resume=True)


def _ready_made(name: str) -> Path:
    """A recipe that comes with ftis: in the installed package, or in the clone that an editable install runs from."""
    places = (Path(__file__).parents[0], Path(__file__).parents[2])
    return next(p for p in (place / "recipes" / f"{name}.toml" for place in places) if p.exists())


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="A recipe, as in recipes/demo.toml.", show_default=False)],
    set_: Overrides = None,
    arm: Annotated[list[str] | None, typer.Option("--arm", help="Run only this arm. Repeatable.")] = None,
    dry_run: DryRun = False,
    resolved: Resolved = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where the run stopped (or start it).")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete an earlier run of this name and seed first.")
    ] = False,
) -> None:
    """Train a recipe's peers, arm by arm, and compare them."""
    loaded = load(recipe, set_ or [])
    if dry_run or resolved:
        _print_plan(loaded, tuple(arm or ()), resolved)
        return
    directory = run_directory(loaded)
    if resume and not directory.exists():
        there = [place.name for place in directory.parent.glob("*") if (place / "recipe.json").exists()]
        near = did_you_mean(directory.name, there)
        console.print(f"--resume: there is no {directory} to resume, so it begins{near}")
    _train(loaded, tuple(arm or ()), resume, overwrite)


def _train(loaded: Recipe, only: tuple[str, ...], resume: bool, overwrite: bool = False) -> None:
    from ftis.run.runs import run
    from ftis.view.progress import Display

    _check_resume(resume, overwrite)
    directory = run_directory(loaded)
    display = Display(console)
    with display.live():
        finished = run(loaded, resume=resume, overwrite=overwrite, only=only, say=display)
    if not finished:
        console.print(f"stopped; the same command{'' if resume else ' with --resume'} goes on with {directory}")
        raise typer.Exit(130)
    _conclude(directory)


@app.command()
def preflight(
    recipe: Annotated[Path, typer.Argument(help="A recipe, as in recipes/demo.toml.", show_default=False)],
    set_: Overrides = None,
    arm: Annotated[str | None, typer.Option(help="By default the recipe's first.")] = None,
    groups: Annotated[int, typer.Option(min=1, help="Groups that each peer samples.")] = 4,
) -> None:
    """Say from a few groups whether a recipe would learn. It says what a round costs and what to change, too."""
    from ftis.check.estimate import totals
    from ftis.check.formatting import counted
    from ftis.check.preflight import preflight as look
    from ftis.recipe.arms import arms_of
    from ftis.records.events import Stopped
    from ftis.run.prepare import exchanges
    from ftis.view import tables
    from ftis.view.progress import Display

    loaded = load(recipe, set_ or [])
    display = Display(console)
    chosen = arms_of(loaded, (arm,) if arm else ())[:1]
    which = f"{chosen[0].name}, the first (--arm names another)" if len(loaded.arms) > 1 and not arm else chosen[0].name
    most = max(swarm.training.prompts_per_round for swarm in chosen[0].swarms)
    console.print(
        f"arm {which}: one after the other each peer loads its model, samples {counted(min(groups, most), 'group')}"
        f"{', as a round has no more,' * (groups > most)} and learns from some; nothing of it is kept; Ctrl-C ends it"
    )
    try:
        with display.live(resumes=False):
            soundings = look(loaded, arm, groups, display)
    except Stopped:
        console.print("stopped: nothing of it is kept")
        raise typer.Exit(130) from None
    tables.print_soundings(soundings, chosen[0].recipe, console)
    for line in [*totals(loaded, chosen[0].name), *exchanges(chosen)]:
        console.print(line)
    if soundings and all(one.signal for one in soundings):
        console.print(f"next: ftis train {recipe}, with the same --set")


@app.command()
def experiment(
    recipe: Annotated[
        Path, typer.Argument(help="A recipe with arms, as in recipes/paper/starter/.", show_default=False)
    ],
    seeds: Seeds = "5",
    jobs: Jobs = 0,
    arm: Annotated[list[str] | None, typer.Option("--arm", help="Run only this arm. Repeatable.")] = None,
    set_: Overrides = None,
    dry_run: DryRun = False,
    resolved: Resolved = False,
) -> None:
    """Train every arm under several seeds and compare them. Run it again to resume it."""
    from ftis.recipe.arms import keep_arms
    from ftis.view import tables

    loaded = keep_arms(load_experiment(recipe, set_ or []), tuple(arm or ()))
    if dry_run or resolved:
        _print_plan(loaded, (), resolved)
    at_a_time = announce(loaded, seeds, jobs)
    if dry_run or resolved:
        return
    directory = carry_out(loaded, seeds, at_a_time)
    report = report_on(directory)  # which leaves what it compared in results.json
    tables.print_comparison(json.loads((directory / "results.json").read_text(encoding="utf-8")), console)
    console.print(f"report: {report}")


Endpoints = Annotated[
    list[str] | None,
    typer.Option("--connect", metavar="ENDPOINT", help="As tcp/host:7447 or tls/host:7447. Repeatable."),
]
Listeners = Annotated[
    list[str] | None, typer.Option("--listen", metavar="ENDPOINT", help="As tcp/0.0.0.0:7447. Repeatable.")
]
Certificates = Annotated[
    Path | None,
    typer.Option("--tls", metavar="DIR/NAME", help="Certificate that ftis keys certs made, as certs/small."),
]


@app.command()
def join(
    recipe: Annotated[Path, typer.Argument(help="The recipe, the same for all peers.", show_default=False)],
    peer: Annotated[str, typer.Option("--peer", help="Which of its peers this machine is.", show_default=False)],
    connect: Endpoints = None,
    listen: Listeners = None,
    client: Annotated[
        bool, typer.Option("--client", help="Behind NAT: reached through the peers in --connect.")
    ] = False,
    key: Annotated[Path | None, typer.Option(help="This peer's private key (ftis keys new).")] = None,
    roster: Annotated[Path | None, typer.Option(help="The peers' public keys (ftis keys roster).")] = None,
    open_: Annotated[bool, typer.Option("--open", help="No roster: trust whoever can connect.")] = False,
    tls: Certificates = None,
    arm: Annotated[str | None, typer.Option(help="Which arm, where several let peers learn together.")] = None,
    set_: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where this peer stopped (or start it).")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete this peer's earlier run first.")] = False,
) -> None:
    """Train one peer on this machine, with peers elsewhere."""
    import signal
    import threading

    from ftis.run.join import join as join_swarm
    from ftis.run.join import peer_directory
    from ftis.run.workers import interrupts
    from ftis.view.progress import Display

    _check_resume(resume, overwrite)
    files = {"key": key, "roster": roster}
    overrides = [f"network.{name}={json.dumps(str(path))}" for name, path in files.items() if path]
    overrides += _network_overrides(connect, listen, tls)
    overrides += ['network.mode="client"'] * client + ["network.open=true"] * open_
    loaded = load(recipe, set_ or [], overrides)
    stop = threading.Event()
    display = Display(console)
    with display.live(), interrupts(display, stop, (signal.SIGINT, signal.SIGTERM)):
        finished = join_swarm(loaded, peer, arm=arm, resume=resume, overwrite=overwrite, say=display, stop=stop)
    directory = peer_directory(loaded, peer)
    if not finished:
        console.print(f"left the swarm; the same command with --resume goes on from {directory}")
        raise typer.Exit(130)
    _conclude(directory)


@app.command()
def status(
    connect: Endpoints = None,
    tls: Certificates = None,
    once: Annotated[bool, typer.Option("--once", help="Print once and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print once, a JSON object per peer.")] = False,
) -> None:
    """Print who is in a swarm, and in which round. The table has what they took from each other, too."""
    import time

    from rich.live import Live

    from ftis.swarm import session as network
    from ftis.view.progress import status_table

    connect = connect or [f"tcp/127.0.0.1:{NetworkConfig().port}"]
    settings = network_settings(_network_settings(connect, None, tls) | {"mode": "client"})
    with network.open_session(settings) as session:
        found = network.ask_status(session)
        if as_json:
            for peer in found:
                typer.echo(json.dumps(peer))
        elif once or not console.is_terminal:
            console.print(status_table(found))
        else:
            with Live(status_table(found), console=console) as live:
                while True:
                    time.sleep(1)
                    live.update(status_table(network.ask_status(session)))


@app.command()
def router(listen: Listeners = None, tls: Certificates = None) -> None:
    """Relay between peers that cannot reach each other. It sees what passes and can change none of it unnoticed."""
    import signal
    import threading

    from ftis.swarm import session as network

    if not listen:
        raise typer.BadParameter("--listen says where, as tcp/0.0.0.0:7447")
    settings = network_settings(_network_settings(None, listen, tls) | {"mode": "router"})
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda signum, frame: stop.set())
    with network.open_session(settings):
        console.print(f"relaying at {', '.join(listen)}; Ctrl-C ends it")
        stop.wait()


def _network_settings(connect: list[str] | None, listen: list[str] | None, tls: Path | None) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    if connect:
        settings["connect"] = connect
    if listen:
        settings["listen"] = listen
    if tls is not None:
        settings["tls_authority"] = str(tls.parent / "ca.pem")
        settings["tls_certificate"] = f"{tls}.pem"
        settings["tls_key"] = f"{tls}.tls.key"
    return settings


def _network_overrides(connect: list[str] | None, listen: list[str] | None, tls: Path | None) -> list[str]:
    return [f"network.{name}={json.dumps(value)}" for name, value in _network_settings(connect, listen, tls).items()]


@app.command("report")
def make_report(
    directory: Annotated[Path, typer.Argument(help="A run's or an experiment's directory.", show_default=False)],
) -> None:
    """Write a page, figures and tables of a run or experiment."""
    console.print(f"report: {report_on(directory)}")


@app.command()
def watch(
    directory: Annotated[
        Path | None, typer.Argument(help="A run's or an experiment's directory.", show_default=False)
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to serve at; one other than this machine's own needs the token in its URL.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free one.")] = 8730,
    connect: Endpoints = None,
    client: Annotated[bool, typer.Option("--client", help="Reach the swarm only through --connect.")] = False,
    roster: Annotated[Path | None, typer.Option(help="The swarm's public keys: whose offers are whose.")] = None,
    tls: Certificates = None,
) -> None:
    """Show a run, an experiment or a swarm in the browser. Nothing is changed; Ctrl-C ends it."""
    from ftis.view.watch import serve

    def say(at: str) -> None:
        console.print(f"watching {directory or ', '.join(connect or ())}: {at}", soft_wrap=True)

    if (directory is None) == (connect is None):
        raise typer.BadParameter("name a directory, or a peer of a swarm with --connect")
    if directory is not None:
        if client or roster or tls:
            raise typer.BadParameter("--client, --roster and --tls are about a swarm: give --connect, and no directory")
        serve(directory, host, port, say)
        return
    from ftis.swarm.identity import read_roster
    from ftis.swarm.lookout import Lookout
    from ftis.swarm.onlooker import Onlooker

    onlooker = Onlooker(read_roster(roster) if roster else None)
    mode = {"mode": "client"} if client else {}
    with Lookout(network_settings(_network_settings(connect, None, tls) | mode), onlooker):
        serve(onlooker, host, port, say)


@app.command("replay")
def replay_run(
    run: Annotated[Path, typer.Argument(help="A run directory, as runs/demo-seed0.", show_default=False)],
    objective: Annotated[
        str | None, typer.Option(help="As a recipe's objective.name, e.g. TIS; by default the recorded one.")
    ] = None,
    arm: Annotated[str | None, typer.Option(help="Whose rollouts; needed where the run has several arms.")] = None,
    peer: Annotated[list[str] | None, typer.Option("--peer", help="Only this peer. Repeatable.")] = None,
    from_step: Annotated[int, typer.Option(min=0, help="Start from this checkpoint; 0 is the untrained model.")] = 0,
    rounds: Annotated[int | None, typer.Option(min=1, help="How many; by default all there are.")] = None,
    set_: Overrides = None,
    output: Annotated[Path | None, typer.Option(help="Where to; by default RUN/replay/<objective>-on-<arm>…")] = None,
) -> None:
    """Train again on recorded rollouts, by another objective."""
    from ftis.lab.replay import replay
    from ftis.view.progress import Display

    display = Display(console)
    with display.live(resumes=False):
        directory = replay(
            run,
            objective,
            arm=arm,
            peers=peer or (),
            from_step=from_step,
            rounds=rounds,
            overrides=set_ or (),
            output=output,
            say=display,
        )
    console.print(f"records and final checkpoints in {directory}")


@app.command("starters")
def make_starters(
    names: Annotated[list[str] | None, typer.Argument(help="Also NAME@SEED; by default the shipped ones.")] = None,
) -> None:
    """Say where the small ready-to-train models are. NAME@SEED is warmed up here first."""
    from ftis.models import starters
    from ftis.view.progress import Display

    chosen = [starters.PREFIX + name.removeprefix(starters.PREFIX) for name in names or starters.STARTERS]
    for model in chosen:
        starters.lookup(model)
    display = Display(console)
    with display.live():
        for model in chosen:
            path = starters.make(model, lambda name, step, most: display(WarmUp(name, step, most)))
            card = json.loads((path / "starter.json").read_text(encoding="utf-8"))
            console.print(f"{model}: {path} (right when reasoned: {card['right_when_reasoned']:.2f})")


@app.command()
def doctor(
    recipe: Annotated[
        Path | None, typer.Argument(help="Say what its peers would exchange.", show_default=False)
    ] = None,
) -> None:
    """Print what this machine has, and how to get the rest."""
    from ftis.check.doctor import diagnose, of_recipe

    problems = 0
    for name, state, found, remedy in [*diagnose(), *(of_recipe(load(recipe, own_code=False)) if recipe else [])]:
        mark = {"ok": "ok     ", "absent": "absent ", "problem": "PROBLEM"}[state]
        problems += state == "problem"
        console.print(f"{mark} {name}: {found}" + (f" → {remedy}" if remedy else ""))
    raise typer.Exit(1 if problems else 0)


def _check_resume(resume: bool, overwrite: bool) -> None:
    if resume and overwrite:
        raise typer.BadParameter("--resume and --overwrite exclude each other")


def _conclude(directory: Path) -> None:
    """Print a run's results and directory. Exit code 3 if a peer that was to collaborate used no foreign rollout."""
    from ftis.comparison import results, summary
    from ftis.view import tables
    from ftis.view.figures import plot_learning_curves

    found = summary.summarise(directory)
    console.print(tables.closing_table(found))
    for warning in summary.warnings(found):
        console.print(f"note: {warning}")
    plot_learning_curves(directory)
    for line in [*tables.headlines(results.compare(directory)), tables.whereabouts(directory, found)]:
        console.print(line)
    if summary.somebody_learned_alone(found):
        errors.print("error: a peer that was to collaborate used no foreign rollout in any round")
        raise typer.Exit(3)


def _print_plan(recipe: Recipe, only: tuple[str, ...], resolved: bool) -> None:
    from ftis.check.estimate import estimate
    from ftis.check.plan import plan
    from ftis.recipe.arms import arms_of
    from ftis.run.prepare import check, exchanges

    arms = arms_of(recipe, only)
    tasks, of_prompts = check(arms)
    exchanged = exchanges(arms)
    if resolved:
        console.print_json(recipe.model_dump_json())
    after = "next: ftis preflight says whether it would learn, and how long a round takes"
    for line in [*plan(arms, tasks, of_prompts, arms_of(recipe)), *estimate(recipe, only), *exchanged, after]:
        console.print(line)


def main(arguments: list[str] | None = None) -> None:
    """Run the ``ftis`` command. Neither it nor a process that it starts looks for modules in the current directory."""
    os.environ["PYTHONSAFEPATH"] = "1"  # else multiprocessing's servers would, since Python starts them with -c
    try:
        app(arguments)
    except Exception as error:
        if (own := told_as_own(error)) is None and not isinstance(error, (FtisError, OSError)):
            raise
        errors.print(f"error: {own or error}")
        sys.exit(1)
