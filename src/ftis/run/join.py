"""``ftis join``: one peer of a recipe on this machine, the others wherever they are.

<output_dir>/<name>-seed<seed>-<peer>/
    recipe.json, provenance.json as of any run
    <arm>/<peer>/                records and checkpoints, as of any run, and besides
        events.jsonl             who came, left, was late or refused, with the time
        outbox/                  own messages that others may still ask for

<output_dir>/<name>-seed<seed>-<peer>.identity/
    incarnation                  how often this peer has been started
    <peer>.key                   in an open swarm: the key that it made for itself
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ftis.admission import Collected
from ftis.codec import VERSION as WIRE_VERSION
from ftis.config import ArmConfig, Recipe, RecipeError, TaskConfig
from ftis.engines.machine import cores, in_background
from ftis.environments.play import Player
from ftis.member import Member
from ftis.recipe.arms import Arm, arms_of, run_directory, threads_of
from ftis.records.events import (
    ArmBegun,
    Event,
    NetworkEvent,
    Planned,
    RoundEnded,
    Say,
    placed,
    unheard,
)
from ftis.records.files import locked, saved_steps, write_whole
from ftis.records.reading import PeerRun
from ftis.records.writing import EventLog, Records, open_trackers
from ftis.run import accusations
from ftis.run.assembly import assemble
from ftis.run.prepare import Checked, check
from ftis.run.provenance import agreed_modules, claim, delete_run, may_claim
from ftis.run.runs import repeats
from ftis.swarm.facts import agreement, run_id
from ftis.swarm.identity import IdentityError, Roster, load_key, new_key, public_hex, read_roster, roster_digest
from ftis.swarm.link import NetworkExchange
from ftis.swarm.session import check_endpoints, ways_in
from ftis.tasks.jsonl import files

NO_REGRET = 0.05
"""``training.no_regret`` of a joined peer, if its recipe leaves it open."""


def peer_directory(recipe: Recipe, peer: str) -> Path:
    """The run directory of one joined peer. Several peers of a recipe may be on the same machine, each with its own."""
    return run_directory(recipe).with_name(f"{run_directory(recipe).name}-{peer}")


def identity_directory(recipe: Recipe, peer: str) -> Path:
    """The directory of files that outlive ``--overwrite``, so that the others still know the peer."""
    run = peer_directory(recipe, peer)
    return run.with_name(f"{run.name}.identity")


def choose_arm(recipe: Recipe, peer: str, name: str | None) -> tuple[str, Recipe]:
    """The arm to join, and this peer's swarm in it. Without ``name``, the only arm whose peers learn together.

    Raises:
        RecipeError: no such peer, no such arm, or several arms to choose from.
    """
    recipe.peer(peer)
    named = {arm.name for arm in arms_of(recipe, (name,) if name else ())}
    together = [arm for arm in arms_of(recipe) if len(arm.swarms[0].peers) > 1]
    arms = [arm for arm in together if arm.name in named]
    if len(arms) != 1:
        there = ", ".join(arm.name for arm in together) or "none"
        alone = f"the peers of arm {name!r} train alone; " if name else ""
        raise RecipeError(f"{alone}arms whose peers learn together: {there}; name one of them as the arm (--arm)")
    swarm = next(swarm for swarm in arms[0].swarms if peer in {p.name for p in swarm.peers})
    if swarm.training.foreign_failures is None:  # the others may be strangers
        training = swarm.training.model_copy(update={"foreign_failures": False})
        swarm = swarm.model_copy(update={"training": training})
    return arms[0].name, swarm


def guarded(swarm: Recipe) -> Recipe:
    """The recipe with the no-regret guard of a peer among strangers, unless it says otherwise."""
    if swarm.training.no_regret is not None:
        return swarm
    training = swarm.training.model_copy(update={"no_regret": NO_REGRET})
    return swarm.model_copy(update={"training": training})


def own_part(arm: str, swarm: Recipe, peer: str) -> Arm:
    """An arm of this peer alone in its swarm, since nobody needs the others' models."""
    return Arm(ArmConfig(name=arm), swarm.of_swarm({peer}), (swarm,))


class Ready(NamedTuple):
    """A peer that can join its swarm.

    Attributes:
        arm: the name of the arm.
        swarm: the recipe of the peers that it learns with, itself among them.
        own: :func:`own_part` of it, checked.
        directory: of its run.
    """

    arm: str
    swarm: Recipe
    own: Checked
    directory: Path

    @property
    def recipe(self) -> Recipe:
        """Of this peer alone."""
        return self.own.arms[0].recipe


def ready(recipe: Recipe, name: str, *, arm: str | None = None, resume: bool = False, overwrite: bool = False) -> Ready:
    """Refuse what :func:`join` refuses before it connects, and write nothing. The arguments are the same.

    Raises:
        FtisError: something is wrong with the recipe, the model, the keys, the endpoints or the run directory.
    """
    arm_name, swarm = choose_arm(recipe, name, arm)
    swarm = guarded(swarm)
    # The number goes into recipe.json: sums over another number of threads differ in their last bits, and a replay has
    # to use the same.
    on_one_machine = not swarm.network.listen and not swarm.network.connect
    threads = threads_of(swarm, cores()) if on_one_machine else swarm.threads or cores()
    swarm = swarm.model_copy(update={"threads": threads})
    check_endpoints(swarm.network)  # before the check of models and problems, which takes a while
    if swarm.network.roster is not None or swarm.network.key is not None or not swarm.network.open:
        credentials(swarm, name, identity_directory(recipe, name))
    own, directory = check([own_part(arm_name, swarm, name)]), peer_directory(recipe, name)
    if (lock := directory / arm_name / ".lock").exists():
        with locked(lock, 0):
            pass
    if not overwrite:
        may_claim(directory, resume, swarm, tasks=own.tasks)
    return Ready(arm_name, swarm, own, directory)


def credentials(recipe: Recipe, peer: str, directory: Path) -> tuple[Ed25519PrivateKey, Roster | None]:
    """This peer's key and the run's roster. In an open swarm the roster is None, and a missing key is made.

    Raises:
        IdentityError: one of them is missing, or does not fit the recipe.
    """
    network = recipe.network
    if network.roster is None:
        if not network.open:
            raise IdentityError(
                "the run has no roster of public keys: give --roster and --key (ftis keys new, ftis keys roster), or "
                "--open where whoever can connect is trusted (docs/threat-model.md says what that costs)"
            )
        path = Path(network.key) if network.key else directory / f"{peer}.key"
        if not network.key and not path.exists():
            new_key(directory, peer)
        return load_key(path), None
    roster = read_roster(Path(network.roster))
    if network.key is None:
        raise IdentityError(f"peer {peer!r} has no key: give --key (ftis keys new makes one)")
    key = load_key(Path(network.key))
    absent = [p.name for p in recipe.peers if p.name not in roster]
    if absent:
        raise IdentityError(f"{network.roster} lacks {', '.join(absent)}: a roster names every peer of the recipe")
    if roster[peer] != public_hex(key):
        raise IdentityError(
            f"{network.key} is not the key that {network.roster} has for {peer!r}: give that peer's own key, or make "
            f"the roster again"
        )
    return key, roster


def join(
    recipe: Recipe,
    name: str,
    *,
    arm: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    say: Say = unheard,
    stop: threading.Event | None = None,
    able: Ready | None = None,
) -> bool:
    """Train peer ``name`` with the others of its swarm, over the network. Returns False if stopped before the end.

    Args:
        able: of :func:`ready`, if the caller has called it.

    Raises:
        FtisError: something is wrong with the recipe, the model, the keys, the network or the run directory.
            Earlier records stay.
    """
    stop = stop or threading.Event()
    able = able or ready(recipe, name, arm=arm, resume=resume, overwrite=overwrite)
    arm_name, swarm, directory = able.arm, able.swarm, able.directory
    config = swarm.peer(name)
    key, roster = credentials(swarm, name, identity_directory(recipe, name))
    if overwrite:
        delete_run(directory)
    place = directory / arm_name / name
    goes_on = claim(directory, resume, swarm, tasks=able.own.tasks, joined=name)
    if goes_on:
        say(Planned((goes_on,)))
    with locked(directory / arm_name / ".lock", 0):
        place.mkdir(parents=True, exist_ok=True)
        placed(say, arm=arm_name)(ArmBegun((name,), swarm.training.rounds, swarm.exchange == "text"))
        torch.set_num_threads(swarm.threads or cores())
        log = EventLog(place, placed(say, arm=arm_name, peer=name))
        if config.attack:
            log(NetworkEvent("attack", f"{name} attacks the others: peers.{name}.attack = {config.attack!r}", 0))
        trackers = open_trackers(swarm.report_to, swarm.name, directory.name, place)
        records = Records(place, trackers, swarm.training.record_rollouts)
        step = max(saved_steps(place), default=0)
        if again := repeats(directory / arm_name, able.recipe, step):
            say(Planned((again,)))
        accusations.keep_undone(place, step)  # who lied cannot repeat the rounds in which it was found
        trainer = assemble(
            swarm,
            name,
            place,
            resume_step=step,
            records=records,
            networked=True,
        )
        member, tokenizer = trainer.peer.member, trainer.peer.policy.tokenizer
        identity = identity_directory(recipe, name)
        with (
            closing(trainer),
            in_network(member, tokenizer, place, identity, key, roster, log, stop.is_set) as network,
        ):
            if member.cursor.step == swarm.training.rounds:  # others may have come back for its messages
                network.catch_up(member.cursor.step)
            member.share = network.own_share
            network.share.resume(PeerRun.read(place).rounds, step)
            arriving: list[Future[Collected | None]] = []

            def hear(event: Event) -> None:
                log(event)
                if isinstance(event, RoundEnded):
                    network.share.took(event.metrics)

            rounds = trainer.train(
                hear,
                stop.is_set,
                network.catch_up,
                # Messages arrive while the peer samples ahead.
                lambda sent: arriving.append(in_background(partial(network.offer_and_collect, sent), "exchange")),
            )
            with suppress(StopIteration):
                next(rounds)
                while True:
                    rounds.send(network.wait_for(arriving.pop().result))
    return member.cursor.step == swarm.training.rounds


@contextmanager
def in_network(
    member: Member,
    tokenizer: Any,
    place: Path,
    identity: Path,
    key: Ed25519PrivateKey,
    roster: Roster | None,
    log: EventLog,
    should_stop: Callable[[], bool],
) -> Iterator[NetworkExchange]:
    """A context with a member's exchange with the others.

    Args:
        place: the peer's directory; its own messages are kept under ``outbox``.
        identity: the directory that counts how often the peer was started.
        key, roster: as of :func:`credentials`.

    Raises:
        FtisError: the network cannot be opened, or the count cannot be read.
    """
    incarnation = next_incarnation(identity / "incarnation")
    recipe = member.recipe
    log.status["tokenizer"] = member.header.tokenizer
    with network_exchange(member, place, key, roster, incarnation, log, should_stop) as exchange:
        for line in ways_in(recipe.network):
            log(NetworkEvent("listens", line, member.cursor.step))
        lacks = set(recipe.sampling.end_tokens) - tokenizer.get_vocab().keys()
        if lacks:  # where ids are exchanged it would have been refused
            tokens = ", ".join(map(repr, sorted(lacks)))
            text = f"{member.name} has no {tokens} of sampling.end_tokens: another peer must, else it is mistyped"
            log(NetworkEvent("end_tokens", text, 0))
        yield exchange


def next_incarnation(counter: Path) -> int:
    """Count the starts of a peer, this one included; ``counter`` keeps the number.

    Raises:
        IdentityError: the file holds something else than a number.
    """
    counter.parent.mkdir(parents=True, exist_ok=True)
    try:
        number = int(counter.read_text(encoding="ascii")) + 1 if counter.exists() else 1
    except ValueError:
        raise IdentityError(f"{counter} does not hold a number: write a larger one into it than it held") from None
    write_whole(counter, f"{number}\n")
    return number


def _file_of(task: TaskConfig) -> str:
    """The name of the file with a task's training problems, or the task's name if there is none."""
    train = files(task)[0] if task.name == "jsonl" else Path(task.path or task.name)
    return train.name if train is not None else task.name


def network_exchange(
    member: Member,
    place: Path,
    key: Ed25519PrivateKey,
    roster: Roster | None,
    incarnation: int,
    log: EventLog,
    should_stop: Callable[[], bool],
) -> NetworkExchange:
    """A member's end of its run's network, not yet opened.

    Args:
        place: the peer's directory; its own messages are kept under ``outbox``.
        roster: public keys by name; None in an open swarm.
        log: called with each event, from several threads.
        should_stop: asked while waiting.
    """
    recipe = member.recipe
    facts = agreement(recipe, member.task.digest, WIRE_VERSION) | agreed_modules(recipe)
    facts["problems"] = f"{_file_of(recipe.task)}, {len(member.task.train)} problems"
    if recipe.network.allow_other_code:
        facts["allow_other_code"] = True
    # Peers with other keys are another swarm. So is the same recipe when it is run again with new keys.
    facts["roster"] = roster_digest(roster)
    if recipe.exchange != "text":
        facts["tokenizer"] = member.header.tokenizer
        if isinstance(player := member.admitter.episodes, Player):
            facts["answers"] = player.spelling
    limits = member.admitter.terms.limits
    return NetworkExchange(
        recipe,
        member.name,
        run=run_id(facts),
        facts=facts,
        key=key,
        roster=roster,
        max_bytes=limits.max_bytes,
        max_items=limits.max_groups,
        outbox=place / "outbox",
        incarnation=incarnation,
        should_stop=should_stop,
        say=log,
        status=log.status,
    )
