"""Options of a TRL script that contradict the method or the recipe, refused by name with the remedy. Imports no TRL.

A swarm's recipe says what its peers agreed on: what a rollout means and when a round closes. GRPOConfig says how this
peer samples and learns. Keys that both have must agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ftis.config import FtisError, Recipe
from ftis.objectives import Objective


class OptionError(FtisError):
    """Options that contradict each other."""


FIXED: Mapping[str, tuple[Any, str]] = {
    "fp16": (False, "its gradient scaling ends in an error at a step without gradient; take bf16, or neither"),
    "loss_type": ("grpo", "F-TIS is a mean over the tokens of a rollout, then over rollouts"),
    "importance_sampling_level": ("token", "F-TIS weighs tokens; name a sequence-level objective in the recipe"),
    "beta": (0.0, "F-TIS has no reference model; its filter bounds the KL"),
    "sync_ref_model": (False, "F-TIS has no reference model"),
    "delta": (None, "the recipe's objective clips"),
    "off_policy_mask_threshold": (None, "the KL filter of the recipe's objective does this"),
    "top_entropy_quantile": (1.0, "F-TIS learns from every token of a rollout that it keeps"),
    "entropy_coef": (0.0, "F-TIS has no entropy bonus"),
    "use_adaptive_entropy": (False, "F-TIS has no entropy bonus"),
    "mask_truncated_completions": (False, "the other peers learn from truncated completions, and so must this one"),
    "multi_objective_aggregation": ("sum_then_normalize", "advantages are taken from one reward per rollout"),
    "min_p": (None, "log-probabilities must be of the distribution sampled, which a message cannot say of min_p"),
    "repetition_penalty": (1.0, "log-probabilities must be of the distribution sampled"),
    "generation_kwargs": (None, "they would change the distribution sampled, unseen by the other peers"),
    "vllm_structured_outputs_regex": (None, "it would change the distribution sampled, unseen by the other peers"),
    "neftune_noise_alpha": (None, "noise in the embeddings would change log-probabilities from one pass to the next"),
    "use_transformers_continuous_batching": (False, "it samples from a copy of the model in another precision"),
}
"""Options of GRPOConfig with the one value that goes with the method, and why."""


def check_options(args: Any, recipe: Recipe, objective: Objective, peer: str, processes: int) -> None:
    """Refuse what contradicts the method or the recipe.

    Args:
        args: a GRPOConfig.
        recipe: with exactly the peers of this swarm.
        processes: of this peer.

    Raises:
        OptionError: names every such option, its value and the remedy.
    """
    faults = [
        *_fixed(args),
        *_of_sampling(args, recipe),
        *_of_learning(args, recipe, objective),
        *_of_batches(args, recipe, processes),
        *_of_saving(args, recipe),
        *_of_recipe(args, recipe, peer),
    ]
    if faults:
        raise OptionError("options that contradict the swarm's:\n" + "\n".join(f"  {fault}" for fault in faults))


def steps_per_round(args: Any) -> int:
    """Optimiser steps that TRL takes in a round."""
    return int(args.steps_per_generation * args.num_iterations // args.gradient_accumulation_steps)


def _fixed(args: Any) -> Iterator[str]:
    for name, (wanted, why) in FIXED.items():
        value = getattr(args, name)
        if value != wanted and not (wanted is None and value == {}):
            yield f"{name} = {value!r}: set {name}={wanted!r}, since {why}"
    if args.use_vllm and args.vllm_importance_sampling_correction:
        yield (
            "vllm_importance_sampling_correction = True: set vllm_importance_sampling_correction=False, since F-TIS "
            "itself weighs own rollouts by π_old/π_gen"
        )


def _of_sampling(args: Any, recipe: Recipe) -> Iterator[str]:
    sampling = recipe.sampling
    for name in ("num_generations", "max_completion_length", "temperature", "top_k", "top_p"):
        value, wanted = getattr(args, name), getattr(sampling, name)
        if value != wanted:
            yield f"{name} = {value!r}: the recipe's sampling.{name} is {wanted!r}; set {name}={wanted!r}"
    if (sampling.top_k or sampling.top_p < 1) and not args.use_vllm:
        yield (
            f"top_k = {sampling.top_k}, top_p = {sampling.top_p}: transformers' generate reports no log-probabilities "
            f"of a truncated distribution; sample with use_vllm=True, or set top_k = 0 and top_p = 1.0 in the recipe"
        )


def _of_learning(args: Any, recipe: Recipe, objective: Objective) -> Iterator[str]:
    high = objective.epsilon if objective.epsilon_high is None else objective.epsilon_high
    wanted = {"epsilon": objective.epsilon, "epsilon_high": high}
    given = {"epsilon": args.epsilon, "epsilon_high": args.epsilon if args.epsilon_high is None else args.epsilon_high}
    for name, value in given.items():
        if value != wanted[name]:
            yield f"{name} = {value!r}: the recipe's objective has {wanted[name]!r}; set {name}={wanted[name]!r}"
    if args.scale_rewards != recipe.training.scale_rewards:
        said = recipe.training.scale_rewards
        yield f'scale_rewards = {args.scale_rewards!r}: the recipe says "{said}"; set scale_rewards="{said}"'


def _of_batches(args: Any, recipe: Recipe, processes: int) -> Iterator[str]:
    prompts, each = recipe.training.prompts_per_round, recipe.sampling.num_generations
    own = recipe.prompts_per_peer * each
    if args.generation_batch_size != prompts * each:
        yield (
            f"generation_batch_size = {args.generation_batch_size}: a round has {prompts} prompts x {each} completions "
            f"of all peers; let per_device_train_batch_size x {processes} processes x steps_per_generation be "
            f"{prompts * each}"
        )
    if own % processes:
        yield f"{processes} processes: they cannot share the {own} completions that this peer samples in a round"
    if args.steps_per_generation * args.num_iterations % args.gradient_accumulation_steps:
        yield (
            f"gradient_accumulation_steps = {args.gradient_accumulation_steps}: a round would end within an optimiser "
            f"step; take a divisor of steps_per_generation = {args.steps_per_generation}"
        )
    elif args.steps_per_generation % args.gradient_accumulation_steps:
        yield (
            f"gradient_accumulation_steps = {args.gradient_accumulation_steps}: a step would hold rollouts twice; take "
            f"a divisor of steps_per_generation = {args.steps_per_generation}"
        )
    total = recipe.training.rounds * steps_per_round(args)
    if args.max_steps not in (-1, total):
        yield (
            f"max_steps = {args.max_steps}: the recipe's {recipe.training.rounds} rounds take {total}; leave max_steps "
            f"out, or set training.rounds"
        )


def _of_saving(args: Any, recipe: Recipe) -> Iterator[str]:
    strategy = getattr(args.save_strategy, "value", args.save_strategy)
    steps, every = max(1, steps_per_round(args)), recipe.training.save_every
    if strategy == "no":
        return
    if strategy != "steps":
        yield f'save_strategy = "{strategy}": a checkpoint belongs at the end of a round; set save_strategy="steps"'
    elif args.save_steps != int(args.save_steps) or args.save_steps < 1 or args.save_steps % steps:
        yield f"save_steps = {args.save_steps}: a round takes {steps} optimiser steps; take a multiple of {steps}"
    elif args.save_steps > steps * every:
        yield (
            f"save_steps = {args.save_steps}: that is every {args.save_steps // steps} rounds, but the others keep "
            f"messages for a peer that saves every training.save_every = {every}; set save_steps={steps * every}, or "
            f'save_strategy="no" to go without'
        )


def _of_recipe(args: Any, recipe: Recipe, peer: str) -> Iterator[str]:
    config = recipe.peer(peer)
    if recipe.training.mode != "vertical":
        yield 'training.mode = "horizontal": TRL samples whole groups; set training.mode = "vertical"'
    if recipe.training.resample != "off":
        yield 'training.resample = "fill": TRL samples a round once; set training.resample = "off"'
    if recipe.sampling.stop:
        yield f"sampling.stop = {list(recipe.sampling.stop)}: TRL does not end completions at strings; use end_tokens"
    given, options = args.chat_template_kwargs or {}, recipe.prompt.template_options
    if given != options:
        yield f"chat_template_kwargs = {given!r}: the recipe's prompt.template_options is {options!r}; set that"
    if config.attack or config.rounds_late:
        yield f"peers.{peer}.attack, rounds_late: they are for ftis train; leave them out"
