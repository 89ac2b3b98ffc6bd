"""A member of a swarm whose model belongs to TRL's trainer: all of a peer except sampling and learning.

<output_dir>/ftis/
    recipe.json, provenance.json like any run's
    <arm>/<peer>/                records, events.jsonl and outbox/, like a joined peer's
<output_dir>/ftis.identity/
    incarnation, <peer>.key      files that outlive the run's directory
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from ftis.config import FtisError, Recipe, RecipeError
from ftis.environments.play import Player
from ftis.joining.network import credentials, identity_directory, in_network
from ftis.member import Cursor, Member
from ftis.objectives import resolve
from ftis.prompts import Task
from ftis.recipe.arms import arm_configs
from ftis.records.events import ArmBegun, PeerStarted, Say, placed
from ftis.records.files import EVENTS, checkpoint_path, saved_steps
from ftis.records.reading import PeerRun
from ftis.records.writing import EventLog
from ftis.rollouts import Ints, Prompt
from ftis.run import checkpoint
from ftis.run.membership import end_tokens_of, member_of
from ftis.selection import selections_of
from ftis.trl.policy import HostPolicy
from ftis.trl.swarm import Link, Swarm
from ftis.view.progress import Display


class AloneError(FtisError):
    """A peer that was to collaborate learned from nobody else."""


def member_for(
    recipe: Recipe, policy: HostPolicy, task: Task, render: Callable[[Prompt], Ints], episodes: Player | None
) -> Member:
    """The member of a recipe. Its admission scores nothing: all processes of the trainer score the admitted groups.

    Raises:
        RecipeError: the tokenizer lacks one of ``sampling.end_tokens``, or the model does not end at all of its ends.
    """
    vocabulary, name = policy.tokenizer.get_vocab(), policy.config.name
    ends = [str(policy.tokenizer.eos_token), *end_tokens_of(recipe, policy.tokenizer)]
    if unknown := [token for token in ends if vocabulary.get(token) not in policy.end_ids]:
        raise RecipeError(
            f"peer {name!r}: completions must end at {unknown[0]!r} (sampling.end_tokens), and TRL ends them at "
            f"{sorted(policy.end_ids)}: put its id into model.generation_config.eos_token_id"
        )
    return member_of(
        recipe,
        name,
        task,
        policy,
        policy.end_ids,
        render,
        lambda prompt, completions, completion_ids: (0.0,) * len(completions),
        selections_of(recipe, name, resolve(recipe.objective)),
        max_staleness=recipe.network.max_staleness,
        max_seconds=recipe.network.admission_seconds,
        episodes=episodes,
    )


@contextlib.contextmanager
def connected(member: Member, tokenizer: Any, swarm: Swarm, place: Path) -> Iterator[tuple[Link, Say]]:
    """A context with the link that carries the member's messages, and the listener to its rounds.

    Raises:
        FtisError: keys are missing or wrong, or the network cannot be opened.
    """
    recipe = member.recipe
    place.mkdir(parents=True, exist_ok=True)
    arm = arm_configs(recipe)[0].name
    display = Display(Console(stderr=True, soft_wrap=True, markup=False, highlight=False))  # as ftis join
    placed(display, arm=arm)(ArmBegun((member.name,), recipe.training.rounds, recipe.exchange == "text"))
    log = EventLog(place, placed(display, arm=arm, peer=member.name))
    if swarm.link is not None:
        log(PeerStarted(member.cursor.step))
        yield swarm.link, log
        return
    identity = identity_directory(place.parents[1])
    key, roster = credentials(recipe, member.name, identity)
    with in_network(member, tokenizer, place, identity, key, roster, log, lambda: False) as link:
        link.hear(PeerStarted(member.cursor.step))
        yield link, link.hear


def newest_checkpoint(output_dir: str) -> str | None:
    """The newest checkpoint that was written whole, if there is one: transformers writes trainer_state.json last."""
    for step in reversed(saved_steps(Path(output_dir))):
        folder = checkpoint_path(Path(output_dir), step)
        with contextlib.suppress(OSError, ValueError):
            json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
            return str(folder)
    return None


def alone_in_all_rounds(place: Path) -> str | None:
    """A message if the records in ``place`` have no round with a foreign rollout, though one could have, else None."""
    peer = PeerRun.read(place)
    if not peer.learned_alone:
        return None
    why = f"{place / EVENTS} says why; the model is saved, and it learned alone"
    return f"no foreign rollout was used in any of {len(peer.rounds)} rounds: {why}"


def state_of(member: Member) -> str:
    """The cursor and the states of the selections, as JSON for a checkpoint."""
    return json.dumps({"cursor": vars(member.cursor), "selections": checkpoint.states_of(member.selections)})


def restore(member: Member, state: Path) -> None:
    """Go on from a file with what :func:`state_of` wrote.

    Raises:
        CheckpointError: it is damaged, or of another version.
    """
    with checkpoint.errors_named(state, "resume from a checkpoint before it"):
        saved = json.loads(state.read_text(encoding="utf-8"))
        member.cursor = Cursor(**saved["cursor"])
        checkpoint.restore(member.selections, saved["selections"])
