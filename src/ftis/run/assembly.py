"""Assembly of a peer from its recipe, the same for local, joined and replayed runs."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from ftis.admission import Admitter, Score, Terms
from ftis.codec import MOST_BYTES, Header
from ftis.codec import VERSION as WIRE_VERSION
from ftis.config import PeerConfig, PromptConfig, Recipe, RecipeError, RewardConfig, SamplingConfig
from ftis.engines.models import tokenizer_fingerprint, tokens_of
from ftis.engines.replicas import ReplicaSpec, lead, open_shared
from ftis.engines.samplers import check_stop, open_sampler, opener
from ftis.engines.stops import cut_at
from ftis.exchange import Exchange
from ftis.lab.attacks import ATTACKS
from ftis.models import starters
from ftis.objectives import resolve
from ftis.peer import Cursor, Peer
from ftis.policy import Policy
from ftis.prompts import Task
from ftis.records.writing import Records
from ftis.rewards.scoring import load_scorer
from ftis.rollouts import Ints, Prompt
from ftis.run import accusations, checkpoint
from ftis.run.evaluate import EvalSamples, Evaluation, evaluate, sample
from ftis.run.local import Delayed
from ftis.run.training import EvalSplit, Trainer
from ftis.sampling import Decoding, Sampler
from ftis.schedule import assigned, seed_of
from ftis.seams import TRACKERS, look_up
from ftis.selection import selections_of
from ftis.swarm.facts import agreement, run_id
from ftis.tasks.problems import load_task
from ftis.tasks.rendering import render_prompt
from ftis.text.messages import TextReader, end_of_text, spoken, terms_of_text, write_groups
from ftis.text.token_bytes import TokenBytes

LONGER = 2
"""A completion of another tokenizer may take this many times as many of a peer's own tokens."""


def check_names(recipe: Recipe) -> None:
    """Look up every dotted path of the recipe, so that a mistake shows before anything is loaded.

    Raises:
        RecipeError: a name leads nowhere, or to an object of the wrong kind.
    """
    objective = resolve(recipe.objective)
    for peer in recipe.peers:
        checkpoint.states_of(selections_of(recipe, peer.name, objective))
        if peer.attack:
            look_up(peer.attack, f"peers.{peer.name}.attack", ATTACKS)
    if recipe.sampling.sampler != "auto" or recipe.sampling.options:
        opener(recipe.sampling.sampler, recipe.sampling.options)
    for peer in recipe.peers:
        if recipe.sampling.sampler == "vllm" and peer.data_parallel_size > 1 and "url" not in recipe.sampling.options:
            raise RecipeError(
                f"peers.{peer.name}.data_parallel_size = {peer.data_parallel_size}: vLLM in the learner's process has "
                f"torch's process group for itself: run vllm serve, and give its address as sampling.options.url"
            )
    for tracker in recipe.report_to:
        look_up(tracker, "report_to", TRACKERS)


def assemble(
    recipe: Recipe,
    name: str,
    directory: Path,
    exchange: Exchange,
    *,
    model_path: str | None = None,
    resume_step: int = 0,
    should_stop: Callable[[], bool] = lambda: False,
    records: Records | None = None,
    networked: bool = False,
) -> Trainer:
    """The peer ``name`` of the recipe, ready to train.

    Args:
        recipe: with exactly the peers of this swarm.
        directory: holds the checkpoint to go on from, and new records and checkpoints.
        model_path: the model's place; by default the recipe's ``model``, made on the spot if it is a starter.
        resume_step: go on from ``checkpoint-<resume_step>``; 0 starts from the model.
        records: in place of new ones under ``directory``; they say where new checkpoints go.
        networked: the others run on their own machines, so messages may be late and admission has a time limit.

    Raises:
        FtisError: the model, the task, a checkpoint or a name of the recipe cannot be loaded.
    """
    config = recipe.peer(name)
    opened = partial(open_policy, recipe.sampling)
    if model_path is None and starters.is_starter(config.model):
        model_path = str(starters.make(config.model))
    if resume_step:
        policy, cursor, states = checkpoint.load(directory, resume_step, config, model_path or config.model, opened)
    else:
        with torch.random.fork_rng(devices=[]):  # an adapter's first weights are drawn from this generator
            torch.default_generator.manual_seed(seed_of(recipe, name, 0, "adapter"))
            policy, cursor, states = opened(config, model_path, None), Cursor(), {}
    task, ood = load_task(recipe.task), tuple(load_task(o) for o in recipe.ood)
    scores = [load_scorer(recipe.reward, recipe.prompt, t.answer_kind) for t in (task, *ood)]
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
    header, terms = agreed(recipe, name, task, policy.tokenizer, policy.end_ids, policy.vocab_size)
    late = {p.name: p.rounds_late for p in recipe.peers if p.rounds_late and p.name != name}
    peer = Peer(
        config=config,
        recipe=recipe,
        policy=policy,
        sampler=open_shared(sampling.sampler, policy, sampling.options),
        task=task,
        render=lambda prompt: render_prompt(prompt, recipe.prompt, policy.tokenizer),
        admitter=Admitter(
            replace(
                terms,
                wanted=lambda sender, round: peer.wanted(sender, round),
                max_staleness=recipe.network.max_staleness if networked else max(late.values(), default=0),
                max_seconds=recipe.network.admission_seconds if networked else math.inf,
            ),
            scores[0],
            lambda ids: cut_at(sampling.stop, policy.detokenize(ids)),
        ),
        header=header,
        objective=objective,
        selections=selections,
        exchange=Delayed(exchange, late, directory / "late") if late and not networked else exchange,
        attack=look_up(config.attack, f"peers.{name}.attack", ATTACKS) if config.attack else None,
        should_stop=should_stop,
        cursor=cursor,
    )
    if recipe.exchange == "text" and len(recipe.peers) > 1:
        exchange_text(peer, own_ends)
    records = records or Records(directory, keep_rollouts=recipe.training.record_rollouts)
    return Trainer(peer, EvalSplit.of(task, ood, scores), records)


def open_policy(sampling: SamplingConfig, config: PeerConfig, model_path: str | None, source: Path | None) -> Policy:
    """A peer's policy, in as many processes as it asks for; ``source`` is a checkpoint to go on from."""
    if config.data_parallel_size == 1:
        return checkpoint.open_policy(config, model_path, source)
    threads = max(1, torch.get_num_threads() // config.data_parallel_size)
    opened = partial(checkpoint.open_policy, model_path=model_path, checkpoint=source)
    return lead(ReplicaSpec(opened, config, sampling.sampler, sampling.options, threads))


def end_tokens_of(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, *, text: bool = False) -> list[str]:
    """The recipe's end tokens for a peer. Where ``text`` is exchanged, those that its vocabulary lacks are others'."""
    vocabulary = tokenizer.get_vocab()
    text = text or recipe.exchange == "text"
    return [token for token in recipe.sampling.end_tokens if token in vocabulary or not text]


def agreed(
    recipe: Recipe, name: str, task: Task, tokenizer: PreTrainedTokenizerBase, end_ids: frozenset[int], vocab_size: int
) -> tuple[Header, Terms]:
    """What a peer says of itself in each message, and what the peers of a recipe agreed on.

    Args:
        end_ids: all ids by which the peer ends completions: its model's own and those of the recipe.
        vocab_size: ids that the peer's model can embed.
    """
    run = run_id(agreement(recipe, task.digest, WIRE_VERSION))
    sampling, fingerprint = recipe.sampling, tokenizer_fingerprint(tokenizer, tokens_of(tokenizer, end_ids))
    terms = Terms(
        run=run,
        tokenizer=fingerprint,
        temperature=sampling.temperature,
        vocab_size=vocab_size,
        end_ids=end_ids,
        group_size=recipe.rollouts_per_group,
        max_completion_length=sampling.max_completion_length,
        stop=sampling.stop,
        prompts=task.train,
        assigned=lambda peer, round: assigned(recipe, len(task.train), peer, round),
        roster=frozenset(p.name for p in recipe.peers),
        max_groups=recipe.prompts_per_peer,
    )
    return Header(run, 0, name, fingerprint, sampling.temperature, sampling.top_k, sampling.top_p), terms


def exchange_text(peer: Peer, own_ends: Collection[int]) -> None:
    """Let a peer write and read text in place of token ids.

    Args:
        own_ends: the ids by which its model ends completions, whatever the recipe says.

    Raises:
        AlignmentError: it is not known which bytes its tokens stand for, or by which its model ends.
    """
    policy, sampling = peer.policy, peer.recipe.sampling
    text = policy.model.config.get_text_config(decoder=True)
    positions = getattr(text, "max_position_embeddings", None) or sys.maxsize

    def most_tokens(item: int) -> int:
        return min(LONGER * sampling.max_completion_length, positions - len(peer.prompt_ids[item]))

    known, own = TokenBytes.of(policy.tokenizer), peer.admitter
    vocabulary = policy.tokenizer.get_vocab()
    named = [vocabulary[token] for token in end_tokens_of(peer.recipe, policy.tokenizer)]
    end_id = end_of_text(f"peer {peer.name!r}", known, own_ends, named)
    # An end with bytes is sent as text. Peers of one fingerprint have the same ends, so they number them alike.
    ends = [end for end in sorted(own.terms.end_ids) if not known.sizes(np.array([end]))[0]]
    reader = TextReader(own.terms.tokenizer, known, end_id, ends, most_tokens)
    peer.admitter = Admitter(
        terms_of_text(own.terms), own.score, own.detokenize, lambda ids: cut_at(sampling.stop, spoken(ids)), reader
    )
    most_bytes = MOST_BYTES * sampling.max_completion_length
    peer.write = partial(write_groups, known=known, end_ids=ends, most_bytes=most_bytes)


@dataclass(frozen=True)
class Examinee:
    """A model, ready to answer the validation problems of a task as a recipe says."""

    policy: Policy
    sampler: Sampler
    problems: Sequence[Prompt]
    prompt_ids: Sequence[Ints]
    score: Score
    sampling: SamplingConfig

    def greedy(self) -> Evaluation:
        """Greedy pass@1."""
        asked = (self.policy, self.sampler, self.problems, self.prompt_ids, self.score)
        return evaluate(*asked, Decoding.of(self.sampling), self.sampling.batch_size)

    def sampled(self, samples: int, seed: int = 0) -> EvalSamples:
        """``samples`` completions of each problem at the recipe's temperature."""
        asked = (self.policy, self.sampler, self.problems, self.prompt_ids, self.score)
        return sample(*asked, Decoding.of(self.sampling), samples, seed, self.sampling.batch_size)


def examine(
    model: str,
    task: Task,
    prompt: PromptConfig,
    reward: RewardConfig,
    sampling: SamplingConfig,
    run_as: PeerConfig | None = None,
) -> Examinee:
    """A model and a task's validation problems.

    Args:
        model: a Hugging Face directory, a Hub id, or ``starter:<name>``.
        run_as: a peer on whose device, and in whose precision, the model runs; by default as ``auto`` has it.

    Raises:
        FtisError: the model cannot be loaded, or has not what the recipe names.
    """
    source = str(starters.make(model)) if starters.is_starter(model) else model
    config = PeerConfig(name="model", model=source)
    if run_as is not None:
        config = config.model_copy(update={"device": run_as.device, "dtype": run_as.dtype})
    policy = Policy.load(config)
    policy.end_at([token for token in sampling.end_tokens if token in policy.tokenizer.get_vocab()])
    check_stop(sampling.stop, policy.tokenizer, model)
    return Examinee(
        policy,
        open_sampler(sampling.sampler, policy, sampling.options),
        task.validation,
        [render_prompt(problem, prompt, policy.tokenizer) for problem in task.validation],
        load_scorer(reward, prompt, task.answer_kind),
        sampling,
    )
