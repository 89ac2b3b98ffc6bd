"""The commands of a swarm over a network: ``join``, ``status``, ``router``, ``keys``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ftis.cli_options import (
    CHECKING,
    LOADING,
    MEASURING,
    DryRun,
    Overrides,
    Overwrite,
    Resume,
    busy,
    by_bare_resume,
    check_resume,
    conclude,
    console,
    go_back,
    step_of,
)
from ftis.config import NetworkConfig
from ftis.recipe.arms import arms_of
from ftis.recipe.parsing import load, network_settings, toml
from ftis.recipe.paths import require_paths
from ftis.records.events import Planned

Endpoints = Annotated[
    list[str] | None,
    typer.Option(
        "--connect", metavar="ENDPOINT", help="Endpoint of another: tcp/host:7447 or tls/host:7447. Repeatable."
    ),
]
Listeners = Annotated[
    list[str] | None,
    typer.Option("--listen", metavar="ENDPOINT", help="Own endpoint: tcp/0.0.0.0:7447. Repeatable."),
]
Certificates = Annotated[
    Path | None,
    typer.Option("--tls", metavar="DIR/NAME", help="The certificate of ftis keys new --tls, as certs/small."),
]


def join(
    recipe: Annotated[Path, typer.Argument(help="The recipe, the same for all peers.", show_default=False)],
    peer: Annotated[str, typer.Option("--peer", help="The peer of the recipe that runs here.", show_default=False)],
    connect: Endpoints = None,
    listen: Listeners = None,
    client: Annotated[
        bool, typer.Option("--client", help="Behind NAT: reached through the peers in --connect.")
    ] = False,
    key: Annotated[Path | None, typer.Option(help="This peer's private key (ftis keys new).")] = None,
    roster: Annotated[Path | None, typer.Option(help="The peers' public keys (ftis keys roster).")] = None,
    open_: Annotated[bool, typer.Option("--open", help="No roster: trust everybody who can connect.")] = False,
    tls: Certificates = None,
    arm: Annotated[str | None, typer.Option(help="The arm, if the recipe has several with partners.")] = None,
    set_: Overrides = None,
    dry_run: DryRun = False,
    resume: Resume = None,
    overwrite: Overwrite = False,
) -> None:
    """Train one peer on this machine, with peers elsewhere."""
    check_resume(resume, overwrite)
    files = {"key": key, "roster": roster}
    overrides = [f"network.{name}={toml(str(path))}" for name, path in files.items() if path]
    overrides += [f"network.{name}={toml(value)}" for name, value in settings_of(connect, listen, tls).items()]
    overrides += ['network.mode="client"'] * client + ["network.open=true"] * open_
    loaded = load(recipe, set_ or [], overrides)
    loaded.peer(peer)
    arms = arms_of(loaded, (arm,) if arm else ())
    require_paths(recipe, (one.recipe.of_swarm({peer}) for one in arms if len(one.swarms[0].peers) > 1))
    with busy(LOADING):
        from ftis import library
        from ftis.check.estimate import estimate
        from ftis.check.plan import compared, to_join
        from ftis.joining.join import ready
        from ftis.view.progress import Display

    step = step_of(resume)
    if dry_run or step is not None:
        with busy(CHECKING):
            able = ready(loaded, peer, arm=arm, resume=resume is not None, overwrite=overwrite, back_to=step)
        if step is not None:
            go_back(able.directory, step, (able.arm,), dry_run)
        if dry_run:
            with busy(MEASURING):
                lines = [*to_join(able), *estimate(able.own.arms), *compared(able)]
            for line in lines:
                console.print(line)
            return
    display = Display(console)
    with display.live():
        display(Planned((CHECKING,)))
        found = library.join(loaded, peer, arm=arm, resume=resume is not None, overwrite=overwrite, say=display)
    if not found.finished:
        how = by_bare_resume(overwrite)
        console.print(f"left the swarm; the same command {how} goes on from {found.directory}")
        raise typer.Exit(130)
    conclude(found.directory)


def status(
    connect: Endpoints = None,
    tls: Certificates = None,
    once: Annotated[bool, typer.Option("--once", help="Print once and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print once, a JSON object per peer.")] = False,
) -> None:
    """Print who is in a swarm, and in which round.

    The table also counts the others' rollouts that each peer took.
    """
    import time

    from rich.live import Live

    from ftis.swarm import session as network
    from ftis.view.tables import status_table

    port = NetworkConfig().port
    if not connect:
        network.require_listener(port)
    settings = network_settings(settings_of(connect or [f"tcp/127.0.0.1:{port}"], None, tls) | {"mode": "client"})
    with network.open_session(settings) as session:
        found = network.ask_status(session)
        if as_json:
            for peer in found:
                typer.echo(json.dumps(peer.keyed()))
        elif once or not console.is_terminal:
            console.print(status_table(found))
        else:
            with Live(status_table(found), console=console) as live:
                while True:
                    time.sleep(1)
                    live.update(status_table(network.ask_status(session)))


def router(listen: Listeners = None, tls: Certificates = None) -> None:
    """Relay between peers that cannot reach each other. The relay can change no message unnoticed."""
    import signal
    import threading

    from ftis.swarm import session as network

    if not listen:
        raise typer.BadParameter("--listen names its address, as tcp/0.0.0.0:7447")
    settings = network_settings(settings_of(None, listen, tls) | {"mode": "router"})
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda signum, frame: stop.set())
    with network.open_session(settings):
        console.print(f"relaying at {', '.join(listen)}; Ctrl-C ends it")
        stop.wait()


def settings_of(connect: list[str] | None, listen: list[str] | None, tls: Path | None) -> dict[str, Any]:
    """The keys of ``[network]`` that these options set."""
    settings: dict[str, Any] = {}
    if connect:
        settings["connect"] = connect
    if listen:
        settings["listen"] = listen
    if tls is not None:
        from ftis.swarm.certificates import network_keys

        settings |= network_keys(tls)
    return settings


keys = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Make the keys and the roster of a swarm.")


@keys.command("new")
def new_keys(
    names: Annotated[list[str], typer.Argument(help="Peers, as in the recipe.", show_default=False)],
    directory: Annotated[
        Path | None, typer.Option("--directory", "-d", help="By default keys/, with --tls certs/.")
    ] = None,
    tls: Annotated[
        bool, typer.Option("--tls", help="Make certificates for tls/ endpoints instead, of peers and routers.")
    ] = False,
    host: Annotated[
        list[str] | None, typer.Option("--host", help="With --tls: an address for the certificates. Repeatable.")
    ] = None,
) -> None:
    """Make a private and a public key for each name. The private one stays on its machine."""
    from ftis.swarm.certificates import new_certificates
    from ftis.swarm.identity import new_key, require_new

    if host and not tls:
        raise typer.BadParameter("--host goes with --tls: keys hold no address")
    place = directory or Path("certs" if tls else "keys")
    if tls:
        new_certificates(place, names, host or [])
        console.print(f"{place}: ca.pem and, for each of {', '.join(names)}, a .pem and a .tls.key; ca.key stays here")
        return
    require_new(place, names, (".key", ".pub"))  # before any is written
    for name in names:
        new_key(place, name)
        console.print(f"{place / name}.key (keep it to yourself), {place / name}.pub (give it to the others)")


@keys.command("roster")
def make_roster(
    public: Annotated[list[Path], typer.Argument(help="The peers' .pub files.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", dir_okay=False)] = Path("roster.toml"),
) -> None:
    """Collect the peers' public keys in one file, which every peer gets."""
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
