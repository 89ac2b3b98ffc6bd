"""The plan of a run in lines for people: its problems, its arms, and remarks on it."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import torch

from ftis.advantages import Rewards
from ftis.check.estimate import disk_of, too_much_for
from ftis.check.prompts import about_prompts
from ftis.check.quantities import counted, in_bytes, in_time
from ftis.check.rates import rates
from ftis.check.reward import about_reward
from ftis.config import PeerConfig, Recipe
from ftis.experiment.seeds import SwarmJob
from ftis.joining.join import Ready
from ftis.joining.network import agreed_modules
from ftis.objectives import resolve
from ftis.preparing.checks import Checked
from ftis.prompts import Task
from ftis.recipe.arms import Arm, arm_configs, rollouts_per_round
from ftis.rewards.scoring import is_built_in
from ftis.swarm.facts import MODULES
from ftis.swarm.session import ways_in

FEW_PROBLEMS, HELD_OUT = 50, 4
"""With fewer validation problems one moves an accuracy by more than .02. ``ftis new`` holds one of ``HELD_OUT`` out."""
OF_LORA = ("lora_r", "lora_alpha", "lora_target_modules")


def plan(checked: Checked, every: Sequence[Arm]) -> list[str]:
    """The lines before a run of these arms.

    Args:
        every: all arms of the recipe. Another one may use settings that these do not.
    """
    lines = [*_of_arms(checked), *alone(checked.arms), *without_effect(every)]
    return [*lines, *remarks(checked), *rates(checked.arms)]


def alone(arms: Sequence[Arm]) -> list[str]:
    """A line if only one arm is trained."""
    how = '"Compare arms" in docs/own-models.md shows further [[arms]]'
    return [f"one arm, so nothing is compared; {how}"] if len(arms) == 1 else []


def to_join(able: Ready) -> list[str]:
    """The lines before a peer joins its swarm."""
    return [*_of_arms(able.own), *remarks(able.own), *rates(able.own.arms)]


def _of_arms(checked: Checked) -> list[str]:
    """Lines on the problems, the rounds and each arm."""
    training = checked.arms[0].recipe.training
    between = f", every {training.eval_every}" if 0 < training.eval_every < training.rounds else ""
    lines = [
        *problems(checked),
        f"{counted(training.rounds, 'round')}, evaluated before the first{between} and after the last",
    ]
    for arm in checked.arms:
        rounds = arm.recipe.training.rounds
        other = "" if rounds == training.rounds else f" for {counted(rounds, 'round')}"
        lines.append(f"{arm.name}: {_swarms(arm)}{_exchanged(arm)}{other}; {budget(arm)}")
    return lines


def compared(able: Ready) -> list[str]:
    """Lines on the peer's addresses for the others, and on the user's own modules that the others must have too."""
    modules = [
        f"{MODULES[key]} {name}, which the others must have too: sha256 {digest[:8]}…"
        for key, digests in agreed_modules(able.swarm).items()
        for name, digest in digests.items()
    ]
    return [*ways_in(able.swarm.network), *modules]


def of_jobs(recipe: Recipe, found: Sequence[SwarmJob], at_a_time: int) -> list[str]:
    """The lines before a comparison over seeds: its jobs by arm, their disk, and a guess of the time."""
    done = sum(job.finished for job in found)
    lines = [f"{counted(len(found), 'job')}, {done} of them finished before; {at_a_time} at a time, the longest first"]
    for arm in (config.name for config in arm_configs(recipe)):
        own = [job for job in found if job.part.name == arm]
        each = fmean(job.part.recipe.training.rounds * len(job.part.peers) * job.guess for job in own)
        lines.append(
            f"{arm}: {counted(len(own), 'job')} of {counted(len(own[0].part.peers), 'peer')}; {budget(own[0].part)}; "
            f"guess {in_time(each)} a job"
        )
    on_disk, unknown = disk_of([job.part.recipe for job in found if not job.finished])
    without = f" (without {', '.join(unknown)}, not on this machine yet)" if unknown else ""
    lines.append(
        f"disk: {in_bytes(on_disk)} in all for checkpoints of jobs not yet finished{without}"
        f"{too_much_for(recipe.output_dir, on_disk)}"
    )
    seconds = [job.rounds_left * job.guess for job in found]
    total = max(max(seconds), sum(seconds) / at_a_time)
    lines.append(
        f"guess {in_time(total)} in all: from parameters × tokens, with a CPU core for each of {at_a_time} "
        f"jobs, so it may be off threefold and says nothing about GPUs; the time left appears once rounds are measured"
    )
    return lines


def remarks(checked: Checked) -> list[str]:
    """The remarks on the arms' prompts and objectives, and one on their own reward."""
    first = checked.arms[0]
    task = checked.tasks[first.name][0]
    return [*about_prompts(checked.prompts), *about_own(checked.arms), *about_reward(first.recipe, task)]


def about_own(arms: Sequence[Arm]) -> list[str]:
    """Lines on arms whose peers learn nothing from their own completions."""
    return [
        f"{arm.name}: a peer learns nothing from its own completions, since it samples one of each prompt and "
        f'objective.name = "{arm.recipe.objective.name}" compares it with no other: raise '
        f'sampling.num_generations, or set training.mode = "vertical"'
        for arm in arms
        if arm.config.collaborate and arm.swarms[0].rollouts_per_group == 1 and not _compares_one(arm.recipe)
    ]


def without_effect(arms: Sequence[Arm]) -> list[str]:
    """Lines on peers with LoRA's settings that have LoRA in no arm, and on numbers that are compared as text."""
    peers = [peer for arm in arms for peer in arm.recipe.peers]
    adapted = {peer.name for peer in peers if peer.train == "lora"}
    found: dict[str, list[str]] = {}
    for peer in peers:
        keys = [key for key in OF_LORA if getattr(peer, key) != PeerConfig.model_fields[key].default]
        if peer.name not in adapted and keys:
            found.setdefault(peer.name, []).extend(keys)
    lines = [
        f"{name}: {', '.join(dict.fromkeys(keys))} without effect, since it has no adapter: leave out, or set "
        f'peers.{name}.train = "lora"'
        for name, keys in found.items()
    ]
    if any(_compares_numbers_as_text(arm.recipe) for arm in arms):
        lines.append(
            'reward.extract = "last_number" finds numbers, and answers of a jsonl task are compared as text, so 1,000 '
            'is not 1000: set reward.answer = "number"'
        )
    return lines


def _compares_one(recipe: Recipe) -> bool:
    """Whether the objective compares an own rollout with another peer's of the same prompt."""
    rewards = Rewards(
        reward_N=torch.tensor([1.0, 0.0]),
        group_N=torch.tensor([0, 0]),
        source_N=torch.tensor([0, 1]),
        own_N=torch.tensor([True, False]),
    )
    return bool(resolve(recipe.objective).advantage(rewards)[0] != 0)


def _compares_numbers_as_text(recipe: Recipe) -> bool:
    as_text = recipe.reward.answer == "auto" and any(t.name == "jsonl" for t in (recipe.task, *recipe.ood))
    return as_text and recipe.reward.extract == "last_number" and is_built_in(recipe.reward)


def split(task: Task) -> str:
    """The numbers of a task's problems."""
    copies = "copy of a held-out one" if task.copies == 1 else "copies of held-out ones"
    without = f" ({task.copies:,} {copies} left out)" if task.copies else ""
    return f"{len(task.train):,} problems to train on{without}, {len(task.validation)} to validate on"


def problems(checked: Checked) -> list[str]:
    """Lines on the number of problems, and on a validation split with few; for arms with other problems, too."""
    of_first, *others = (_problems(checked.tasks[arm.name]) for arm in checked.arms)
    more = [(arm.name, line) for arm, lines in zip(checked.arms[1:], others, strict=True) for line in lines]
    return [*of_first, *(f"{name}: {line}" for name, line in more if line not in of_first)]


def _problems(tasks: Sequence[Task]) -> list[str]:
    task, *ood = tasks
    more = "".join(f", {len(one.validation)} out of distribution ({one.name})" for one in ood)
    lines = [f"task {task.name}: {split(task)}{more}"]
    if 0 < (n := len(task.validation)) < FEW_PROBLEMS:
        enough = len(task.train) + n >= HELD_OUT * FEW_PROBLEMS
        remedy = f"set task.validation_size to {FEW_PROBLEMS} or more, or add problems" if enough else "add problems"
        lines.append(
            f"{counted(n, 'validation problem')}: one of them moves an accuracy by {1 / n:.3f}, and small gains cannot "
            f"be told from luck; {remedy}"
        )
    return lines


def _swarms(arm: Arm) -> str:
    size, n = len(arm.swarms[0].peers), len(arm.swarms)
    if size == 1:
        return f"{', '.join(arm.peers)}{', each alone' if n > 1 else ' alone'}"
    return f"{', '.join(arm.peers)} together" if n == 1 else f"{n} swarms of {size}"


def _exchanged(arm: Arm) -> str:
    kinds = {swarm.exchange for swarm in arm.swarms if len(swarm.peers) > 1}
    words = [word for kind, word in {"ids": "token ids", "text": "text"}.items() if kind in kinds]
    return f", exchanging {' and '.join(words)}" if words else ""


def budget(arm: Arm) -> str:
    """A sentence on the rollouts that a peer of the arm samples and trains on in a round."""
    sampled, trained = rollouts_per_round(arm.swarms[0])
    return f"in a round a peer samples {sampled} rollouts and trains on {trained}"
