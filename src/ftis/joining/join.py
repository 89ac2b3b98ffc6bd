"""``ftis join``: one peer of a recipe on this machine, the others wherever they are.

<output_dir>/<name>-seed<seed>-<peer>/
    recipe.json, provenance.json as of any run
    <arm>/<peer>/                records and checkpoints, as of any run, and besides
        events.jsonl             who came, left, was late or refused, with the time
        outbox/                  own messages on offer; in an open swarm, the key of each name

<output_dir>/<name>-seed<seed>-<peer>.identity/
    incarnation                  how often this peer has been started
    <peer>.key                   in an open swarm: the key that it made for itself
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from ftis.config import ArmConfig, Recipe, RecipeError
from ftis.directory.claiming import claim, delete_run, may_claim, require_free, swarm_lock
from ftis.directory.resuming import repeats, require_checkpoint
from ftis.joining.network import credentials, identity_directory, in_network
from ftis.machine.resources import cores
from ftis.preparing.checks import Checked, check
from ftis.recipe.arms import Arm, arms_of, run_directory, threads_of
from ftis.records.events import ArmBegun, NetworkEvent, Planned, Say, placed, unheard
from ftis.records.files import locked, saved_steps
from ftis.records.reading import PeerRun
from ftis.records.writing import EventLog
from ftis.run import accusations
from ftis.run.assembly import assemble
from ftis.run.together import go_on
from ftis.swarm.session import check_endpoints

NO_REGRET = 0.05
"""``training.no_regret`` of a joined peer, if its recipe leaves it open."""


def peer_directory(recipe: Recipe, peer: str) -> Path:
    """The run directory of one joined peer. Several peers of a recipe may be on the same machine, each with its own."""
    return run_directory(recipe).with_name(f"{run_directory(recipe).name}-{peer}")


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
    return arms[0].name, _unless_said(arms[0].swarm_of(peer), "foreign_failures", False)


def _unless_said(swarm: Recipe, key: str, value: object) -> Recipe:
    """The recipe with ``value`` as its key of ``training``, unless the recipe sets that key."""
    if getattr(swarm.training, key) is not None:
        return swarm
    return swarm.model_copy(update={"training": swarm.training.model_copy(update={key: value})})


class Ready(NamedTuple):
    """A peer that can join its swarm.

    Attributes:
        swarm: the recipe of the peers that it learns with, itself among them.
        own: an arm of this peer alone in that swarm, checked: nobody needs the others' models.
        directory: of its run.
    """

    arm: str
    swarm: Recipe
    own: Checked
    directory: Path

    @property
    def recipe(self) -> Recipe:
        """The recipe of this peer alone."""
        return self.own.arms[0].recipe


def ready(
    recipe: Recipe,
    name: str,
    *,
    arm: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    back_to: int | None = None,
) -> Ready:
    """The peer ``name``, ready to join its swarm. Nothing is written.

    Args:
        arm: by default the only one whose peers learn together.
        resume, overwrite: as for :func:`join`.
        back_to: the step to which the run is about to go back.

    Raises:
        FtisError: something is wrong with the recipe, the model, the keys, the endpoints or the run directory.
    """
    arm_name, swarm = choose_arm(recipe, name, arm)
    swarm = _unless_said(swarm, "no_regret", NO_REGRET)
    # The number goes into recipe.json: sums over another number of threads differ in their last bits, and a replay has
    # to use the same.
    on_one_machine = not swarm.network.listen and not swarm.network.connect
    threads = threads_of(swarm, cores()) if on_one_machine else swarm.threads or cores()
    swarm = swarm.model_copy(update={"threads": threads})
    check_endpoints(swarm.network)  # before the check of models and problems, which takes a while
    directory = peer_directory(recipe, name)
    if swarm.network.roster is not None or swarm.network.key is not None or not swarm.network.open:
        credentials(swarm, name, identity_directory(directory))
    own = check([Arm(ArmConfig(name=arm_name), swarm.of_swarm({name}), (swarm,))])
    require_free([swarm_lock(directory / arm_name, swarm)])
    if not overwrite:
        may_claim(directory, resume, swarm, tasks=own.tasks, back_to=back_to, only=(arm_name,))
        if back_to is None:
            require_checkpoint(directory / arm_name, own.arms[0].recipe)
    return Ready(arm_name, swarm, own, directory)


def join(
    able: Ready,
    *,
    resume: bool = False,
    overwrite: bool = False,
    say: Say = unheard,
    should_stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Train a peer with the others of its swarm, over the network. Returns False if stopped before the end.

    Args:
        overwrite: delete an earlier run first.

    Raises:
        FtisError: something is wrong with the keys, the network or the run directory. Earlier records stay.
    """
    arm_name, swarm, (config,), directory = able.arm, able.swarm, able.recipe.peers, able.directory
    name, identity = config.name, identity_directory(directory)
    key, roster = credentials(swarm, name, identity)
    if overwrite:
        delete_run(directory)
    place = directory / arm_name / name
    with locked(lock := swarm_lock(directory / arm_name, swarm)):
        if goes_on := claim(directory, resume, swarm, tasks=able.own.tasks, joined=name, held=[lock]):
            say(Planned((goes_on,)))
        place.mkdir(parents=True, exist_ok=True)
        placed(say, arm=arm_name)(ArmBegun((name,), swarm.training.rounds, swarm.exchange == "text"))
        torch.set_num_threads(swarm.threads or cores())
        log = EventLog(place, placed(say, arm=arm_name, peer=name))
        if config.attack:
            log(NetworkEvent("attack", f"{name} attacks the others: peers.{name}.attack = {config.attack!r}", 0))
        step = max(saved_steps(place), default=0)
        if again := repeats(directory / arm_name, able.recipe, step):
            say(Planned((again,)))
        accusations.keep_undone(place, step)  # a liar cannot repeat the rounds in which it was found
        trainer = assemble(swarm, name, place, resume_step=step, tracked_as=directory.name, networked=True)
        member, tokenizer = trainer.peer.member, trainer.peer.policy.tokenizer
        with trainer, in_network(member, tokenizer, place, identity, key, roster, log, should_stop) as network:
            if member.cursor.step == swarm.training.rounds:  # others may have come back for its messages
                network.catch_up(member.cursor.step)
            member.share = network.own_share
            if not network.share.is_equal:
                network.share.resume(PeerRun.read(place).rounds, step)
            rounds = trainer.train(network.hear, should_stop, network.catch_up, network.offer)
            go_on(rounds, network.collected)
    return member.cursor.step == swarm.training.rounds
