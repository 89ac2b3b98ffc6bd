"""A member's way into its network: its key, the count of its starts, and its end of the exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ftis.codec import VERSION as WIRE_VERSION
from ftis.config import Recipe, TaskConfig
from ftis.directory.provenance import module_digests
from ftis.engines.tokenizers import lacking
from ftis.environments.play import Player
from ftis.member import Member
from ftis.recipe.parsing import names_of
from ftis.records.events import NetworkEvent
from ftis.records.files import write_whole
from ftis.records.writing import EventLog
from ftis.swarm.facts import agreement, run_id
from ftis.swarm.identity import IdentityError, Roster, kept_key, load_key, public_hex, read_roster, roster_digest
from ftis.swarm.link import NetworkExchange
from ftis.swarm.outbox import OUTBOX
from ftis.swarm.session import ways_in
from ftis.tasks.jsonl import files


def identity_directory(run: Path) -> Path:
    """The directory beside a joined run, of files that outlive ``--overwrite``: the others still know the peer."""
    return run.with_name(f"{run.name}.identity")


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
        key = load_key(Path(network.key)) if network.key else kept_key(directory, peer)
        return key, None
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
        log: called with each event, from several threads.
        should_stop: asked while waiting.

    Raises:
        FtisError: the network cannot be opened, or the count cannot be read.
    """
    incarnation = next_incarnation(identity / "incarnation")
    recipe, limits = member.recipe, member.admitter.terms.limits
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
    with NetworkExchange(
        recipe,
        member.name,
        run=run_id(facts),
        facts=facts,
        key=key,
        roster=roster,
        max_bytes=limits.max_bytes,
        max_items=limits.max_groups,
        outbox=place / OUTBOX,
        incarnation=incarnation,
        should_stop=should_stop,
        say=log,
    ) as exchange:
        for line in ways_in(recipe.network):
            log(NetworkEvent("listens", line, member.cursor.step))
        if lacks := lacking(tokenizer, recipe.sampling.end_tokens):  # an exchange of ids would have been refused
            text = f"{member.name} has no {lacks} of sampling.end_tokens: another peer must have it, or it is mistyped"
            log(NetworkEvent("end_tokens", text, 0))
        yield exchange


def agreed_modules(recipe: Recipe) -> dict[str, dict[str, str]]:
    """The digests of the user's own reward and task modules, by which peers see that they score and ask alike.

    Modules that these import are not among them.
    """
    named = {"reward_modules": recipe.reward.function, "task_modules": names_of(recipe.task)}
    return {key: digests for key, names in named.items() if (digests := module_digests(names))}


def next_incarnation(counter: Path) -> int:
    """Count the starts of a peer, this one included; ``counter`` keeps the number.

    Raises:
        IdentityError: the file holds something else than a number.
    """
    counter.parent.mkdir(parents=True, exist_ok=True)
    try:
        number = int(counter.read_text(encoding="ascii")) + 1 if counter.exists() else 1
    except ValueError:
        raise IdentityError(f"{counter} does not hold a number: write one into it, larger than any before") from None
    write_whole(counter, f"{number}\n")
    return number


def _file_of(task: TaskConfig) -> str:
    """The name of the file with a task's training problems, or the task's name if there is none."""
    train = files(task)[0] if task.name == "jsonl" else Path(task.path or task.name)
    return train.name if train is not None else task.name
