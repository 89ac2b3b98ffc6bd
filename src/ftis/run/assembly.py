"""Assembly of a peer from its recipe, the same for local, joined and replayed runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ftis.config import PeerConfig, Recipe, SamplingConfig, as_name
from ftis.engines.models import reference_of
from ftis.engines.samplers import check_stop, open_sampler
from ftis.environments.play import player_of
from ftis.member import Cursor
from ftis.models import starters
from ftis.objectives import resolve
from ftis.peer import Peer
from ftis.policy import Policy
from ftis.prompts import Task
from ftis.recipe.own_code import staying
from ftis.records.reading import VALIDATION
from ftis.records.trackers import open_trackers
from ftis.records.writing import Records
from ftis.rewards.scoring import load_scorer
from ftis.rollouts import Ints, Prompt
from ftis.run import accusations, checkpoint
from ftis.run.evaluate import Exam
from ftis.run.membership import end_tokens_of, member_of
from ftis.run.training import Trainer
from ftis.sampling import Decoding
from ftis.schedule import seed_of
from ftis.seams import look_up
from ftis.selection import selections_of
from ftis.tasks.problems import load_task, require_validation
from ftis.tasks.rendering import render_prompt
from ftis.tasks.splitting import subset


def assemble(
    recipe: Recipe,
    name: str,
    directory: Path,
    *,
    resume_step: int = 0,
    records: Records | None = None,
    tracked_as: str | None = None,
    networked: bool = False,
) -> Trainer:
    """The peer ``name`` of the recipe, ready to train.

    Args:
        recipe: with exactly the peers of this swarm.
        directory: holds the checkpoint to go on from, and new records and checkpoints.
        resume_step: go on from ``checkpoint-<resume_step>``; 0 starts from the model.
        records: by default new ones under ``directory``; new checkpoints go to the same place.
        tracked_as: the run's name in the trackers of ``report_to``, which new records report to; None: to none.
        networked: the others run on their own machines, so messages may be late and admission has a time limit.

    Raises:
        FtisError: the model, the task, a checkpoint or a name of the recipe cannot be loaded.
    """
    config = recipe.peer(name)
    model = starters.place_of(config.model)
    policy, cursor, states = loaded(recipe, config, directory, resume_step)
    tasks = [load_task(one) for one in (recipe.task, *recipe.ood)]
    scores = [load_scorer(recipe.reward, recipe.prompt, task.answer_kind) for task in tasks]
    objective = resolve(recipe.objective)
    selections = selections_of(recipe, name, objective)
    checkpoint.restore(selections, states)
    accusations.accuse_again(directory, resume_step, selections)
    # The recipe of a replay says "auto" still, also where text was exchanged.
    end_tokens = end_tokens_of(recipe, policy.tokenizer, text=recipe.exchange != "ids" and not networked)
    own_ends = policy.end_ids
    policy.end_at(end_tokens)
    check_stop(recipe.sampling.stop, policy.tokenizer, config.model)
    sampling = recipe.sampling
    plain = partial(render_prompt, config=recipe.prompt, tokenizer=policy.tokenizer)
    with ExitStack() as opened:  # an error in a later part closes the earlier ones
        players = []
        for task_config in (recipe.task, *recipe.ood):
            players.append(player := player_of(task_config, recipe, policy))
            if player is not None:
                opened.callback(player.close)
        renders = [plain if player is None else player.render for player in players]
        member = member_of(
            recipe,
            name,
            tasks[0],
            policy,
            own_ends,
            renders[0],
            scores[0],
            selections,
            cursor=cursor,
            max_staleness=recipe.network.max_staleness if networked else 0,
            max_seconds=recipe.network.admission_seconds if networked else math.inf,
            episodes=players[0],
        )
        asked = [[*tasks[0].train, *tasks[0].validation], *(task.validation for task in tasks[1:])]
        longest = max(longest_row(*of_task, sampling) for of_task in zip(asked, renders, strict=True))
        sampler = open_sampler(sampling.sampler, policy, sampling.options, longest)
        opened.callback(sampler.close)
        attack = look_up(config.attack, f"peers.{name}.attack") if config.attack else None
        reference = reference_of(policy, config, model) if objective.beta else (None, None)
        peer = Peer(member, policy, sampler, attack, *reference)
        if recipe.training.overlap:
            checkpoint.go_on(peer, directory, resume_step)
        splits = {
            split: Exam(policy, sampler, task.validation, render, score, peer.decoding, sampling.batch_size, player)
            for split, task, render, score, player in zip(
                splits_of(tasks[1:]), tasks, renders, scores, players, strict=True
            )
        }
        if records is None:  # opened last: a tracker shows a run from then on
            trackers = open_trackers(recipe.report_to, recipe.name, tracked_as, directory) if tracked_as else ()
            records = Records(directory, trackers, recipe.training.record_rollouts)
        beside, place = to_go_back(config, policy), records.directory
        opened.pop_all()
        return Trainer(peer, splits, records, lambda step: loaded(recipe, beside, place, step)[0])


def splits_of(ood: Sequence[Task]) -> list[str]:
    """``validation``, and ``ood-<task>`` of each task out of distribution, with a number if a task occurs twice."""
    kinds = [f"ood-{as_name(task.name)}" for task in ood]
    names = [VALIDATION]
    for end, kind in enumerate(kinds, 1):
        number = kinds[:end].count(kind)
        names.append(f"{kind}-{number}" if kinds.count(kind) > 1 else kind)
    return names


def to_go_back(config: PeerConfig, policy: Policy) -> PeerConfig:
    """The settings of a second policy, whose weights a peer takes to go back. It is on the CPU: the device may be full.

    A CPU resolves ``dtype = "auto"`` otherwise, and pages no moments.
    """
    dtype, optim = str(policy.compute_dtype).removeprefix("torch."), config.optim.removeprefix("paged_")
    return config.model_copy(update={"device": "cpu", "dtype": dtype, "optim": optim})


def loaded(
    recipe: Recipe, config: PeerConfig, directory: Path, step: int
) -> tuple[Policy, Cursor, dict[str, dict[str, Any]]]:
    """A peer's policy, cursor and selections' states after ``step`` rounds: of its checkpoint, or untrained for 0.

    Raises:
        FtisError: the model or the checkpoint cannot be loaded.
    """
    model = starters.place_of(config.model)
    if step:
        return checkpoint.load(directory, step, config, model)
    with torch.random.fork_rng(devices=[]):  # an adapter's first weights are drawn from this generator
        torch.default_generator.manual_seed(seed_of(recipe, config.name, 0, "adapter"))
        return Policy.load(config, model), Cursor(), {}


def longest_row(problems: Sequence[Prompt], render: Callable[[Prompt], Ints], sampling: SamplingConfig) -> int:
    """The tokens of the longest question's prompt with the longest completion."""
    longest = max(problems, key=lambda problem: len(problem.question))
    return len(render(longest)) + sampling.max_completion_length


def examine(model: str, recipe: Recipe, run_as: PeerConfig | None = None, limit: int | None = None) -> Exam:
    """A model and the validation problems of a recipe, ready to be answered.

    Args:
        model: a Hugging Face directory, a Hub id, or ``starter:<name>``.
        run_as: a peer with the device and the precision of the model; by default those of ``auto``.
        limit: the most problems, a seeded subset.

    Raises:
        FtisError: the model cannot be loaded, or lacks something that the recipe names.
    """
    config, sampling, task = PeerConfig(name="model", model=starters.place_of(model)), recipe.sampling, recipe.task
    if run_as is not None:
        config = config.model_copy(update={"device": run_as.device, "dtype": run_as.dtype})
    with staying():
        asked = load_task(task)
        score = load_scorer(recipe.reward, recipe.prompt, asked.answer_kind)
    require_validation(asked, task.name)
    problems = asked.validation
    if limit is not None and limit < len(problems):  # another split than the recipe's may hold training problems
        problems = tuple(subset(problems, limit, task.seed, VALIDATION))
    policy = Policy.load(config)
    policy.end_at(end_tokens_of(recipe, policy.tokenizer, text=True))
    check_stop(sampling.stop, policy.tokenizer, model)
    with ExitStack() as opened:
        render: Callable[[Prompt], Ints] = partial(render_prompt, config=recipe.prompt, tokenizer=policy.tokenizer)
        if (player := player_of(task, recipe, policy)) is not None:
            opened.callback(player.close)
            render = player.render
        sampler = open_sampler(sampling.sampler, policy, sampling.options, longest_row(problems, render, sampling))
        opened.pop_all()
    return Exam(policy, sampler, problems, render, score, Decoding.of(sampling), sampling.batch_size, player)
