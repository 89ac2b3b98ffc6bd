"""A member of a swarm whose model belongs to TRL's trainer: all of a peer except sampling and learning.

<output_dir>/ftis/
    recipe.json                  the recipe as this peer runs it
    provenance.json              as of any run
    metrics.jsonl, rollouts/     records, as of any peer
    events.jsonl                 who came, left, was late or refused, with the time
    outbox/                      own messages that others may still ask for
<output_dir>/ftis.identity/
    incarnation, <peer>.key      what outlives the run's directory
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console

from ftis.admission import Collected
from ftis.config import FtisError, PeerConfig, Recipe, RecipeError
from ftis.engines.rows import PaddedRows
from ftis.environments.play import Player
from ftis.member import Member, Outgoing
from ftis.objectives import resolve
from ftis.prompts import Task
from ftis.recipe.arms import arm_configs, arms_of
from ftis.recipe.own_code import give
from ftis.recipe.parsing import load, network_settings, parse, set_key
from ftis.records.events import ArmBegun, PeerStarted, Say, placed
from ftis.records.files import checkpoint_path, saved_steps
from ftis.records.reading import PeerRun
from ftis.records.writing import EventLog
from ftis.rollouts import Floats, Ints, Prompt
from ftis.run import checkpoint
from ftis.run.join import choose_arm, credentials, in_network
from ftis.run.membership import end_tokens_of, member_of
from ftis.selection import selections_of
from ftis.swarm.identity import read_roster
from ftis.trl.options import SAMPLING, OptionError, steps_per_round
from ftis.view.progress import Display


class AloneError(FtisError):
    """A peer that was to collaborate learned from nobody else."""


class Link(Protocol):
    """Carries a peer's messages, as :class:`ftis.swarm.link.NetworkExchange` does."""

    def catch_up(self, round: int) -> int:
        """The round to train next: ``round``, or a later one if the others have gone on without this peer."""

    def exchange(self, outgoing: Outgoing) -> Collected | None:
        """Offer a round's message, and wait for the others'. None: stop."""


@dataclass(frozen=True)
class Swarm:
    """The swarm of a trainer: the other peers, and the trainer's own name.

    Without a recipe the script's data set is the task, the values are GRPOConfig's, and the arm is F-TIS-lifted over
    shared prompts. ``Swarm()`` has nobody else.

    Attributes:
        recipe: the swarm's recipe, or its TOML file.
        peer: the name of this trainer.
        arm: which of the recipe's arms, where several let peers learn together.
        key, roster: files of this peer's private key and of all public keys (``ftis keys``).
        open: no roster: trust whoever can connect.
        listen, connect: endpoints, as ``tcp/192.168.1.20:7447``; they replace the recipe's.
        peers: the names of all peers, if neither a recipe nor a roster has them.
        settings: without a recipe, keys of one and their values, as ``{"objective.name": "F-TIS"}``.
        link: carries messages instead of the network, for trainers in one process.
    """

    recipe: Recipe | str | Path | None = None
    peer: str = "own"
    arm: str | None = None
    key: str | Path | None = None
    roster: str | Path | None = None
    open: bool = False
    listen: Sequence[str] = ()
    connect: Sequence[str] = ()
    peers: Sequence[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    link: Link | None = None

    def resolved(self, args: Any, dataset: Any, environment: Any = None) -> Recipe | None:
        """The recipe with exactly the peers of this swarm, and its ``[network]`` with what was given here.

        Args:
            args: a GRPOConfig.
            dataset: the script's, or None.
            environment: the script's ``environment_factory``, or None.

        Returns:
            None: nobody else is named.

        Raises:
            FtisError: no such recipe, peer or arm, or a data set that no swarm can share.
        """
        for name in ("peers", "listen", "connect"):
            if isinstance(value := getattr(self, name), str):
                raise OptionError(f"Swarm: {name} = {value!r}: give a list, as {name}={value.split(',')!r}")
        given = {"key": self.key, "roster": self.roster}
        network: dict[str, Any] = {name: str(path) for name, path in given.items() if path is not None}
        network |= {"listen": list(self.listen)} if self.listen else {}
        network |= {"connect": list(self.connect)} if self.connect else {}
        network |= {"open": True} if self.open else {}
        if self.recipe is None:
            found = self._of_script(args, dataset, environment, network)
            self._require_trust(found)
            return found
        if self.peers or self.settings:
            raise OptionError("peers and settings stand in the recipe: leave them out of Swarm, or give no recipe")
        recipe = self.recipe if isinstance(self.recipe, Recipe) else load(self.recipe)
        recipe = recipe.model_copy(update={"network": network_settings(recipe.network.model_dump() | network)})
        self._require_trust(recipe)
        if self.link is None:
            return choose_arm(recipe, self.peer, self.arm)[1]
        swarms = arms_of(recipe, (self.arm,) if self.arm else ())[0].swarms
        recipe.peer(self.peer)
        return next(swarm for swarm in swarms if self.peer in {p.name for p in swarm.peers})

    def _require_trust(self, recipe: Recipe | None) -> None:
        """Refuse a network in which nobody says who is trusted."""
        if recipe is None or self.link is not None or recipe.network.open:
            return
        if recipe.network.roster is None or recipe.network.key is None:
            raise OptionError(
                "Swarm: give key=… and roster=… (ftis keys makes them), or open=True to trust whoever can connect"
            )

    def _of_script(self, args: Any, dataset: Any, environment: Any, network: Mapping[str, Any]) -> Recipe | None:
        """The recipe that a script's GRPOConfig, data set and environment amount to."""
        names = self.peers or (tuple(read_roster(Path(self.roster))) if self.roster else ())
        if not names and network:
            raise OptionError("Swarm names nobody else: give roster=… (ftis keys), or peers=[…] with open=True")
        if len(names) < 2:
            return None
        if isinstance(dataset, dict):
            raise OptionError(f"train_dataset holds the splits {', '.join(dataset)}: give one, as train_dataset[…]")
        if not hasattr(dataset, "__len__"):
            raise OptionError(
                "train_dataset is missing or has no length: give all peers one data set whose rows can be asked for by "
                "number"
            )
        if isinstance(environment, dict):
            raise OptionError("environment_factory holds several classes: a swarm's task has one; give it alone")
        prompts, steps = args.generation_batch_size // args.num_generations, steps_per_round(args)
        passes = args.num_train_epochs * (len(dataset) // prompts)
        if len(dataset) < prompts:
            raise OptionError(
                f"train_dataset has {len(dataset)} rows, and a round has {prompts} prompts (generation_batch_size / "
                f"num_generations): take more rows, or a smaller per_device_train_batch_size x steps_per_generation"
            )
        document: dict[str, Any] = {
            "name": "trl",
            "seed": args.seed,
            "task": {"name": "train_dataset"} | ({"environment": give(environment)} if environment else {}),
            "prompt": {"template_options": args.chat_template_kwargs or {}},
            "sampling": {name: getattr(args, name) for name in SAMPLING},
            "training": {
                "rounds": math.ceil(args.max_steps / steps if args.max_steps > 0 else passes),
                "prompts_per_round": prompts,
                "mode": "horizontal",
                "save_every": max(1, math.ceil(args.save_steps / steps)),
                "record_rollouts": args.log_completions,
            },
            "objective": {"name": "F-TIS-lifted"},
            "network": dict(network),
            "peers": [{"name": name, "model": "of its script"} for name in sorted(names)],
        }
        if environment:  # a turn has one token at least
            calls = args.max_tool_calling_iterations
            document["sampling"]["max_turns"] = args.max_completion_length if calls is None else calls + 1
        for key, value in self.settings.items():
            set_key(document, key, value)
        recipe = parse(document, "Swarm")
        recipe.peer(self.peer)
        return recipe


@dataclass(eq=False)
class HostPolicy:
    """The model of a member, in the hands of TRL's trainer: a :class:`~ftis.policy.Policy` that TRL trains.

    Attributes:
        logps: log-probabilities of completions as the trainer computes them, under its own temperature.
    """

    model: Any
    tokenizer: Any
    vocab_size: int
    end_ids: frozenset[int]
    config: PeerConfig
    device: torch.device
    compute_dtype: torch.dtype
    precision: Callable[[], contextlib.AbstractContextManager[None]]
    logps: Callable[[Sequence[Ints], Sequence[Ints], float], list[Floats]]

    @property
    def forward(self) -> PaddedRows:
        return PaddedRows(self.model, self.device)

    def detokenize(self, completion_ids: Sequence[int]) -> str:
        """A completion's text, without special tokens, as TRL gives own ones to reward functions."""
        return str(self.tokenizer.decode(list(completion_ids), skip_special_tokens=True))


def member_for(
    recipe: Recipe,
    name: str,
    policy: HostPolicy,
    task: Task,
    render: Callable[[Prompt], Ints],
    episodes: Player | None = None,
) -> Member:
    """The member ``name`` of a recipe.

    Its admission scores nothing: all processes of the trainer score what was admitted.

    Args:
        render: a problem → the token ids of its prompt.
        episodes: of the task's environment, if it has one.

    Raises:
        RecipeError: the tokenizer lacks one of ``sampling.end_tokens``, or the model does not end at all of its ends.
    """
    vocabulary = policy.tokenizer.get_vocab()
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
        _unscored,
        selections_of(recipe, name, resolve(recipe.objective)),
        max_staleness=recipe.network.max_staleness,
        max_seconds=recipe.network.admission_seconds,
        episodes=episodes,
    )


def _unscored(prompt: Prompt, completions: Sequence[str], completion_ids: Sequence[Sequence[int]]) -> tuple[float, ...]:
    return (0.0,) * len(completions)


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
    identity = place.with_name(f"{place.name}.identity")
    key, roster = credentials(recipe, member.name, identity)
    with in_network(member, tokenizer, place, identity, key, roster, log, lambda: False) as link:
        log(PeerStarted(member.cursor.step))
        yield link, log


def newest_checkpoint(output_dir: str) -> str | None:
    """The newest checkpoint that was written whole, if there is one: transformers writes trainer_state.json last."""
    for step in reversed(saved_steps(Path(output_dir))):
        folder = checkpoint_path(Path(output_dir), step)
        with contextlib.suppress(OSError, ValueError):
            json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
            return str(folder)
    return None


def alone_in_all_rounds(place: Path) -> str | None:
    """A message if the records in ``place`` have no round with a foreign rollout, else None."""
    rows = PeerRun.read(place).rounds
    if not rows or not all(row.measures.get("without_foreign") for row in rows):
        return None
    return (
        f"no foreign rollout was used in any of {len(rows)} rounds: {place / 'events.jsonl'} says why; the model is "
        f"saved, and it learned alone"
    )


def state_of(member: Member) -> str:
    """The cursor and the states of the selections, as JSON for a checkpoint."""
    return json.dumps({"cursor": vars(member.cursor), "selections": checkpoint.states_of(member.selections)})


def restore(member: Member, state: str) -> None:
    """Go on from what :func:`state_of` wrote."""
    saved = json.loads(state)
    member.cursor = replace(member.cursor, **saved["cursor"])
    checkpoint.restore(member.selections, saved["selections"])


def adapted(recipe: Recipe, args: Any) -> Recipe:
    """The recipe with what GRPOConfig decides of those keys in which peers may differ: steps, passes, saving."""
    steps = max(1, args.steps_per_generation // args.gradient_accumulation_steps)
    update: dict[str, Any] = {"num_iterations": args.num_iterations, "steps_per_generation": steps}
    return recipe.model_copy(update={"training": recipe.training.model_copy(update=update)})
