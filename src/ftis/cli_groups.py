"""The commands ``rates``, ``replay``, ``probe``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ftis.cli import Jobs, carry_out, for_seeds, report_on
from ftis.terminal import Overrides, console

Seeds = Annotated[str, typer.Option(metavar="N|FIRST-LAST", help="Seeds 0 … N−1, or those of a range such as 5-9.")]


def compare_rates(
    recipe: Annotated[Path, typer.Argument(help="A recipe, as in recipes/demo.toml.", show_default=False)],
    arm: Annotated[list[str] | None, typer.Option("--arm", help="Only this arm. Repeatable.")] = None,
    times: Annotated[str, typer.Option(metavar="NUMBER,…", help="Multiples of the recipe's rates.")] = "0.5,1,2",
    peer: Annotated[
        list[str] | None,
        typer.Option("--peer", help="Multiply only this peer's rate; '*-lora' for several. Repeatable."),
    ] = None,
    seeds: Seeds = "2",
    jobs: Jobs = 0,
    set_: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what there is to do; train nothing.")] = False,
) -> None:
    """Find the learning rate that serves each arm.

    It is tried on training problems that are held out. Run it again to resume it.
    """
    from ftis.recipe.arms import experiment_directory
    from ftis.study import rates

    try:
        multiples = sorted({float(multiple) for multiple in times.split(",")})
    except ValueError:
        multiples = []
    if not multiples or not all(0 < multiple < float("inf") for multiple in multiples):
        raise typer.BadParameter(f"--times {times}: give numbers above 0 with commas between them, as in 0.5,1,2")
    loaded = for_seeds(recipe, set_ or [])
    compared = rates.trials(loaded, arm or (), multiples, peer or ())
    compared = rates.with_earlier(compared, experiment_directory(compared))
    directory = carry_out(compared, seeds, jobs, dry_run)
    if directory is None:
        return
    tried = rates.multiples(loaded, arm or (), compared, peer or ())
    found = rates.read_trials(loaded, arm or (), tried, directory, peer or ())
    console.print(rates.table(found, loaded))
    for line in rates.advice(found):
        console.print(line)
    console.print(f"report: {report_on(directory)}")


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


def probe_bias(
    run: Annotated[Path, typer.Argument(help="A run directory, as runs/demo-seed0.", show_default=False)],
    peer: Annotated[str, typer.Option(help="The learner.", show_default=False)],
    arm: Annotated[str | None, typer.Option(help="Whose rollouts; needed where the run has several arms.")] = None,
    step: Annotated[int, typer.Option(min=0, help="The checkpoint; 0 is the untrained model.")] = 0,
    fresh: Annotated[int, typer.Option(help="Batches of own rollouts to estimate the on-policy direction from.")] = 16,
    objectives: Annotated[
        str | None, typer.Option(metavar="NAME,…", help="Which to compare; by default all six.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the fresh batches.")] = 0,
    alignment: Annotated[
        bool, typer.Option("--alignment", help="Measure how weights depend on the sender's tokenizer instead.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="The JSON file; by default RUN/probe/<arm>-<peer>-<step>.json.")
    ] = None,
) -> None:
    """Measure how far objectives point from on-policy updates.

    Each objective's update on foreign rollouts is compared with updates on fresh rollouts of the peer's own.
    """
    from ftis.lab import cuts, probe

    if alignment:
        found = cuts.probe_cuts(run, arm, peer, step)
        probe.write(found, path := output or run / "probe" / f"{found['arm']}-{peer}-{step}-alignment.json")
        console.print(cuts.table(found))
        console.print(f"written to {path}")
        return
    names = [name.strip() for name in objectives.split(",")] if objectives is not None else list(probe.PAPERS)
    with console.status(f"sampling {fresh} fresh batches and comparing {len(names)} objectives"):
        result = probe.probe(run, arm, peer, step, fresh=fresh, objectives=names, seed=seed)
    probe.write(result, path := output or run / "probe" / f"{result['arm']}-{peer}-{step}.json")
    console.print(probe.table(result))
    console.print(f"written to {path}")
