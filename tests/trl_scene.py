"""A TRL trainer in a swarm of two, whose other peer is made up: its messages follow from the round alone.

Run as a program it trains on rollouts that are given, in as many processes as the launcher starts, and saves the
weights and metrics that come of it::

    python tests/trl_scene.py MODEL OUT [--against-trl]
"""

from __future__ import annotations

import copy
import json
import logging
import os
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ftis.admission import Collected
from ftis.codec import Message, encode
from ftis.config import Recipe
from ftis.member import Member, Outgoing
from ftis.recipe.parsing import parse
from ftis.rollouts import Group, Rollout
from ftis.schedule import assigned
from ftis.selection import Judged
from recipes import SECTIONS, evenness

GROUP, LENGTH = 4, 8


def scene_recipe(rounds: int = 3, **sections: Mapping[str, Any]) -> Recipe:
    given: dict[str, Mapping[str, Any]] = {"training": {"rounds": rounds, "save_every": 1}}
    given["honesty"] = {"action": "off"}  # what is made up is not drawn from the log-probabilities that it claims
    of_all = (SECTIONS, given, sections)
    document = {name: {k: v for of in of_all for k, v in of.get(name, {}).items()} for of in of_all for name in of}
    return parse({"name": "scene", **document, "peers": [{"name": n, "model": "none"} for n in ("a", "b")]})


def made_up(seed: int, vocabulary: int) -> Rollout:
    draw = np.random.default_rng(seed)
    ids = draw.integers(8, vocabulary, int(draw.integers(2, LENGTH + 1))).astype(np.int32)
    return Rollout(ids, -draw.uniform(1.0, 6.0, len(ids)).astype(np.float32))


def always(token: int, logp: float, rollout: Rollout) -> Rollout:
    """A rollout whose first token is ``token``, with a log-probability that its sender claims."""
    ids, claimed = rollout.completion_ids.copy(), rollout.gen_logp.copy()
    ids[0], claimed[0] = token, logp
    return Rollout(ids, claimed)


def own_alone(judged: Judged) -> Any:
    """A selection that drops all foreign rollouts."""
    import torch

    return torch.from_numpy(judged.batch.own_N[judged.rows]).float()


class Nobody:
    """The link of a peer that hears nobody."""

    def catch_up(self, round: int) -> int:
        return round

    def exchange(self, outgoing: Outgoing) -> Collected:
        return Collected({}, missing=("b",))


def message_of_b(member: Member, groups: Sequence[Group]) -> Collected:
    """What ``b`` offers in the groups' round, beside ``a``."""
    header = replace(member.header, peer="b", round=groups[0].round)
    return Collected({"b": encode(Message(header, tuple(groups)))})


@dataclass
class MadeUp(Nobody):
    """The link of ``a`` with a ``b`` that is not there.

    Attributes:
        member: set once the trainer has one.
        published: ``a``'s message of each round, in the order in which it was offered.
        fails_in: the round in which waiting raises, as if the process were killed there.
        lie: the log-probability that ``b`` reports of a token that it always writes.
    """

    member: Member | None = None
    published: list[tuple[int, bytes]] = field(default_factory=list)
    fails_in: int = -1
    lie: float | None = None

    def items(self, round: int) -> Sequence[int]:
        """The prompts of ``b``."""
        assert self.member is not None
        return assigned(self.member.recipe, len(self.member.task.train), "b", round)

    def exchange(self, outgoing: Outgoing) -> Collected:
        round = outgoing.round
        self.published.append((round, outgoing.message))
        if round == self.fails_in:
            raise KeyboardInterrupt
        assert self.member is not None
        groups, each = [], self.member.recipe.rollouts_per_group
        for item in self.items(round):
            first = GROUP * item + 10_000 * round
            rollouts = [made_up(first + n, self.member.admitter.terms.vocab_size) for n in range(each)]
            if self.lie is not None:
                rollouts = [always(9, self.lie, rollout) for rollout in rollouts]
            groups.append(Group("b", round, item, tuple(rollouts)))
        return message_of_b(self.member, groups)


def config(out: Path, **options: Any) -> Any:
    """A GRPOConfig that agrees with the scene's recipe."""
    from trl import GRPOConfig

    settings = {
        "output_dir": str(out),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        "per_device_train_batch_size": 8,
        "steps_per_generation": 2,
        "gradient_accumulation_steps": 1,
        "num_generations": GROUP,
        "max_completion_length": LENGTH,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "report_to": "none",
        "save_steps": 2,
        "save_total_limit": None,
        "logging_steps": 2,
        "disable_tqdm": True,
        **options,
    }
    return GRPOConfig(**settings)


def trainer_of(
    model: Any, args: Any, recipe: Recipe | None = None, exchange: Any = None, reward: Any = evenness, **options: Any
) -> Any:
    from ftis.trl import FTISTrainer, Swarm

    exchange = MadeUp() if exchange is None else exchange
    swarm = Swarm(recipe or scene_recipe(), "a", link=exchange)
    trainer = FTISTrainer(str(model) if isinstance(model, Path) else model, reward, args, swarm=swarm, **options)
    if isinstance(exchange, MadeUp):
        exchange.member = trainer.member
    return trainer


def drawn(model: Any, prompt_ids: Sequence[int], place: int) -> Rollout:
    """A rollout that follows from its prompt and its place in the group, with the model's log-probabilities.

    Every other one ends before the longest length.
    """
    import torch

    rollout = made_up(sum(prompt_ids) + 1000 * place, model.config.vocab_size)
    ids = rollout.completion_ids
    if place % 2:
        ids[-1] = model.config.eos_token_id
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt_ids, *ids.tolist()]])).logits[0, len(prompt_ids) - 1 : -1]
    logp = logits.log_softmax(-1)[torch.arange(len(ids)), torch.from_numpy(ids).long()]
    return Rollout(ids, logp.float().numpy())


Draw = Callable[[Any, Sequence[int], int], Rollout]
"""(trainer, token ids of a prompt, place in its group) → a rollout."""


def sampled_by(draw: Draw, prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
    """What a rollout_func gives."""
    ids = trainer.processing_class(text=list(prompts))["input_ids"]
    rollouts = [draw(trainer, row, ids[:n].count(row)) for n, row in enumerate(ids)]
    return {
        "prompt_ids": ids,
        "completion_ids": [rollout.completion_ids.tolist() for rollout in rollouts],
        "logprobs": [rollout.gen_logp.tolist() for rollout in rollouts],
    }


def draws(prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
    """A rollout_func of :func:`drawn` completions."""
    return sampled_by(lambda trainer, ids, place: drawn(trainer.model, ids, place), prompts, trainer)


def given(prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
    """A rollout_func: completions that follow from the prompt and the place in its group."""

    def seeded(trainer: Any, ids: Sequence[int], place: int) -> Rollout:
        return made_up(sum(ids) + 1000 * place, trainer.policy.vocab_size)

    return sampled_by(seeded, prompts, trainer)


@dataclass
class Twin(Nobody):
    """The link of ``a`` with a ``b`` that has the same model, and draws what ``a`` alone would draw besides."""

    trainer: Any = None

    def exchange(self, outgoing: Outgoing) -> Collected:
        member, round = self.trainer.member, outgoing.round
        places = range(GROUP - member.recipe.rollouts_per_group, GROUP)  # those in a group that are left
        groups = []
        for item in member.assigned("b", round):
            ids = member.prompt_ids(item, round).tolist()
            groups.append(Group("b", round, item, tuple(drawn(self.trainer.model, ids, place) for place in places)))
        return message_of_b(member, groups)


class Vllm:
    """In place of TRL's VLLMGeneration: a copy of the model, which draws nothing but scores what :func:`drawn` gives.

    To the first half of a group it gives log-probabilities that are off by ``ROUNDED`` nats a token.
    """

    made: ClassVar[list[Vllm]] = []
    logprobs_mode = "processed_logprobs"
    ROUNDED = 0.1

    def __init__(self, *, model: Any, mode: str, **settings: Any) -> None:
        self.model, self.copy, self.handed_over = model, copy.deepcopy(model).eval(), 0
        self.vllm_client = self if mode == "server" else None
        self.generation_kwargs: dict[str, Any] = {}
        self.made.append(self)

    def get_server_info(self) -> dict[str, Any]:
        return {"model_config": {"logprobs_mode": self.logprobs_mode}}

    def sync_weights(self) -> None:
        self.copy.load_state_dict(self.model.state_dict())
        self.handed_over += 1

    def generate(self, *, prompts: Sequence[Sequence[int]], **settings: Any) -> tuple[Any, ...]:
        ids, logps = [], []
        for n, prompt in enumerate(prompts):
            place = list(prompts[:n]).count(prompt)
            rollout = drawn(self.copy, prompt, place)
            ids.append(rollout.completion_ids.tolist())
            logps.append([[logp - self.ROUNDED * (place < GROUP // 2)] for logp in rollout.gen_logp.tolist()])
        return None, ids, logps, None


def take_cpus_for_devices() -> None:
    """Let accelerate 1.15 use FSDP on CPUs. By itself it leaves FSDP out there without a word."""
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    begin = AcceleratorState.__init__

    def begin_as_on_gpus(self: Any, *args: Any, **options: Any) -> None:
        if PartialState(cpu=True).distributed_type == DistributedType.MULTI_CPU:
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        begin(self, *args, **options)

    AcceleratorState.__init__ = begin_as_on_gpus


def constant_of_some(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
    """All completions of every other prompt have one reward, so that nothing is learned from them."""
    rewards = evenness(prompts, completions, completion_ids)
    return [reward if sum(map(ord, prompt)) % 2 else 0.5 for prompt, reward in zip(prompts, rewards, strict=True)]


def differences(model: Path, out: Path) -> dict[str, Any]:
    """Train on the rollouts of two peers, and as GRPOTrainer on all of them as its own, in the same processes.

    In float64, with so small a rate that the two optimiser steps of a round add up. Without TRL's shuffling within a
    process, so that micro-batches hold the same rollouts if none is left out.

    Returns:
        By loss: the relative difference of the change of the weights, the largest of all, and how many rows were used.
    """
    import torch
    import trl.trainer.grpo_trainer as of_trl
    from transformers import AutoModelForCausalLM

    shuffle, of_trl.shuffle_sequence_dict = of_trl.shuffle_sequence_dict, lambda batch: batch
    processes = int(os.environ["WORLD_SIZE"])
    found: dict[str, Any] = {}
    for loss_type in ("grpo", "bnpo"):
        options = {"optim": "sgd", "learning_rate": 1e-8, "max_grad_norm": 0.0, "save_strategy": "no", "max_steps": 2}
        options |= {"loss_type": loss_type, "steps_per_generation": 4, "gradient_accumulation_steps": 2}
        options |= {"per_device_train_batch_size": 4 // processes}
        loaded = [AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64) for _ in range(2)]
        before = [parameter.detach().clone() for parameter in loaded[0].parameters()]
        recipe = scene_recipe(1, training={"mode": "horizontal"}, objective={"kl_threshold": 50.0})
        args = config(out / loss_type / "ours", **options)
        twin, more = Twin(), {"reward": constant_of_some, "rollout_func": draws}
        trainer = trainer_of(loaded[0], args, recipe, twin, **more)
        twin.trainer = trainer
        rows = trainer.train_dataset.select(sorted(trainer.member.assigned("a", 0)))
        kept: list[int] = []
        trainer.foreign.joined = partial(noting, trainer.foreign.joined, kept)
        trainer.train()
        args = config(out / loss_type / "theirs", shuffle_dataset=False, **options)
        theirs = of_trl.GRPOTrainer(loaded[1], constant_of_some, args, train_dataset=rows, rollout_func=draws)
        theirs.train()
        moved, expected = (
            torch.cat([(now - then).flatten() for now, then in zip(one.model.cpu().parameters(), before, strict=True)])
            for one in (trainer, theirs)
        )
        found[loss_type] = [float((moved - expected).norm() / expected.norm()), float(expected.norm()), *kept]
    of_trl.shuffle_sequence_dict = shuffle
    return found


def noting(joined: Any, kept: list[int], *given: Any) -> Any:
    """A process's part of TRL's batch and its factor; ``kept`` then holds how many rollouts are in it."""
    batch, factor = joined(*given)
    kept.append(int((batch["completion_mask"].sum(-1) > 0).sum()))
    return batch, factor


def main(model: Path, out: Path, against_trl: bool = False) -> None:
    import torch

    from ftis.trl import end_processes

    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        take_cpus_for_devices()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    if against_trl:
        found = differences(model, out)
        if os.environ["RANK"] == "0":
            (out / "differences.json").write_text(json.dumps(found))
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    # In one step: each process shuffles its own rows, so that those of two steps depend on their number.
    args = config(out, per_device_train_batch_size=16 // processes, steps_per_generation=1, save_strategy="no")
    exchange = MadeUp()
    trainer = trainer_of(model, args, exchange=exchange, rollout_func=given)
    trainer.agreed = True  # what is given is not drawn from the model
    trainer.train()
    trainer.save_model()
    if trainer.accelerator.is_main_process:
        (out / "logged.json").write_text(json.dumps(trainer.state.log_history))
        kind = trainer.accelerator.distributed_type.value
        (out / "processes.json").write_text(json.dumps([trainer.accelerator.num_processes, kind]))
        (out / "published.bin").write_bytes(b"".join(data for _, data in exchange.published))
    wrapper = weakref.ref(trainer.model_wrapped) if trainer.model_wrapped is not trainer.model else None
    end_processes(trainer)
    assert wrapper is None or wrapper() is None  # it goes before the group of processes


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), "--against-trl" in sys.argv)
