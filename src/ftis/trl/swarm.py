"""The swarm of a TRL script, and the recipe that the script and its swarm amount to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ftis.admission import Collected
from ftis.config import Recipe
from ftis.joining.join import choose_arm
from ftis.member import Outgoing
from ftis.recipe.arms import arms_of
from ftis.recipe.own_code import give
from ftis.recipe.parsing import load, network_settings, parse, set_key
from ftis.swarm.identity import read_roster
from ftis.trl.options import SAMPLING, OptionError, steps_per_round


class Link(Protocol):
    """A carrier of a peer's messages, such as :class:`ftis.swarm.link.NetworkExchange`."""

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
        arm: the recipe's arm, if peers learn together in several.
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
        """The recipe with exactly the peers of this swarm, and its ``[network]`` with the keys given here.

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
        files = {name: str(path) for name, path in (("key", self.key), ("roster", self.roster)) if path is not None}
        more = {"listen": list(self.listen or ()), "connect": list(self.connect or ()), "open": self.open}
        network: dict[str, Any] = files | {name: value for name, value in more.items() if value}
        if self.recipe is None:
            recipe = self._of_script(args, dataset, environment, network)
        elif self.peers or self.settings:
            raise OptionError("peers and settings stand in the recipe: leave them out of Swarm, or give no recipe")
        else:
            recipe = self.recipe if isinstance(self.recipe, Recipe) else load(self.recipe)
            recipe = recipe.model_copy(update={"network": network_settings(recipe.network.model_dump() | network)})
        if recipe is None:
            return None
        known = recipe.network.open or (recipe.network.roster is not None and recipe.network.key is not None)
        if self.link is None and not known:
            raise OptionError(
                "Swarm: give key=… and roster=… (ftis keys makes them), or open=True to trust whoever can connect"
            )
        if self.recipe is None:
            return recipe
        if self.link is None:
            return choose_arm(recipe, self.peer, self.arm)[1]
        return arms_of(recipe, (self.arm,) if self.arm else ())[0].swarm_of(self.peer)

    def _of_script(self, args: Any, dataset: Any, environment: Any, network: Mapping[str, Any]) -> Recipe | None:
        """The recipe that a script's GRPOConfig, data set and environment amount to."""
        names = self.peers or (tuple(read_roster(Path(self.roster))) if self.roster else ())
        if names and self.peer not in names:
            where = "peers" if self.peers else "the roster"
            raise OptionError(
                f"Swarm: no peer {self.peer!r} in {where} ({', '.join(names)}): give all names there, this one's too"
            )
        if len(names) < 2 and network:
            raise OptionError("Swarm names nobody else: give roster=… (ftis keys), or peers=[…] with open=True")
        if len(names) < 2:
            return None
        if isinstance(dataset, dict):
            raise OptionError(f"train_dataset holds the splits {', '.join(dataset)}: give one, as train_dataset[…]")
        if not hasattr(dataset, "__len__"):
            remedy = "give all peers one data set whose rows can be asked for by number"
            raise OptionError(f"train_dataset is missing or has no length: {remedy}")
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


def adapted(recipe: Recipe, args: Any) -> Recipe:
    """The recipe with GRPOConfig's values of keys in which peers may differ: steps, passes, saving."""
    steps = max(1, args.steps_per_generation // args.gradient_accumulation_steps)
    update = {"num_iterations": args.num_iterations, "steps_per_generation": steps}
    return recipe.model_copy(update={"training": recipe.training.model_copy(update=update)})
