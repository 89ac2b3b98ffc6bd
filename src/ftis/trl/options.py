"""Options of a TRL script that contradict the swarm, refused by name with the remedy. Imports no TRL.

A swarm's peers agree on the meaning of a rollout and the end of a round. GRPOConfig says how this peer learns: its
loss, clip, advantages, steps. Nothing is refused of a trainer that has nobody to learn with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ftis.advantages import within_group
from ftis.config import FtisError, Recipe
from ftis.objectives import Objective, clipped, over_old, sequence_mean


class OptionError(FtisError):
    """Options that contradict each other."""


FIXED: Mapping[str, tuple[Any, str]] = {
    "multi_objective_aggregation": ("sum_then_normalize", "advantages are taken from one reward per rollout"),
    "shuffle_dataset": (True, "the peers draw their prompts in an order of the swarm"),
    "vllm_structured_outputs_regex": (None, "it would change the distribution sampled, unseen by the other peers"),
    "neftune_noise_alpha": (None, "noise in the embeddings would change log-probabilities from one pass to the next"),
    "use_transformers_continuous_batching": (False, "it samples from a copy of the model in another precision"),
}
"""Options of GRPOConfig with the one value that goes with other peers, and why."""

DIVISORS = {
    **dict.fromkeys(("grpo", "dr_grpo", "sapo", "luspo"), "rollouts"),
    "bnpo": "tokens",
    **dict.fromkeys(("dapo", "cispo", "vespo"), "round"),
}
"""TRL's losses -> the divisor: rollouts or tokens of a micro-batch, or the round's tokens, which the batch names.

If the divisor is a micro-batch's tokens, a rollout's weight depends on those beside it. So none is left out then.
"""

SAMPLING = ("num_generations", "max_completion_length", "temperature", "top_k", "top_p")
"""Keys of GRPOConfig that a recipe has in ``[sampling]``."""

HARMLESS = (
    "bos_token_id", "cache_config", "cache_implementation", "compile_config", "decoder_start_token_id",
    "disable_compile", "eos_token_id", "max_cache_len", "max_length", "output_attentions", "output_hidden_states",
    "output_logits", "output_scores", "pad_token_id", "prefill_chunk_size", "return_dict_in_generate",
    "transformers_version", "use_cache", "_from_model_config",
)  # fmt: skip
"""Keys of a GenerationConfig that do not change the distribution sampled: a cache only if it is not :data:`COARSE`, and
ends only if they are TRL's."""

COARSE = "quantized"
"""A ``cache_implementation`` whose rounded keys and values sample from another distribution."""


def check_options(args: Any, more: Mapping[str, Any], recipe: Recipe, objective: Objective, peer: str) -> None:
    """Refuse options that contradict the swarm, by an OptionError with each of them, its value and the remedy.

    Args:
        args: a GRPOConfig.
        more: arguments of the trainer besides.
        recipe: with exactly the peers of this swarm.
    """
    faults = [*_fixed(args, more), *_of_sampling(args, recipe), *_of_batches(args, recipe), *_of_saving(args, recipe)]
    faults += _of_recipe(recipe, objective, peer)
    if faults:
        raise OptionError("options that a swarm cannot take:\n" + "\n".join(f"  {fault}" for fault in faults))


def check_generation(
    args: Any, effective: Mapping[str, Any], defaults: Mapping[str, Any], cut_at: Iterable[int]
) -> None:
    """Refuse every setting of generation by which a sample's log-probability would be another than the model's.

    Args:
        effective: the settings in force, those that the model's directory brings among them.
        defaults: transformers' own.
        cut_at: the tokens after which TRL cuts a completion off.

    Raises:
        OptionError: names every setting that is neither harmless nor the default, or tokens that end a completion in
            sampling alone, whose padding would be offered, or for TRL alone.
    """
    ends = effective.get("eos_token_id")
    sampled_to = {ends} if isinstance(ends, int) else set(ends or ())
    if ends is not None and sampled_to != set(cut_at):
        raise OptionError(
            f"eos_token_id = {sorted(sampled_to)}: completions end there in sampling, and at {sorted(cut_at)} for TRL: "
            f"leave it out of generation_kwargs, load the model and set its model.generation_config.eos_token_id"
        )
    wanted = {**defaults, "do_sample": True, "max_new_tokens": args.max_completion_length}
    wanted |= {name: getattr(args, name) for name in ("temperature", "top_k", "top_p")}
    faults = [
        f"  {name} = {value!r}"
        for name, value in effective.items()
        if (name not in HARMLESS or value == COARSE) and value is not None and value != wanted.get(name)
    ]
    if faults:
        raise OptionError(
            "settings of generation that change what is sampled, but not the log-probabilities that others weigh it "
            "by:\n" + "\n".join(faults) + "\n  leave them out of GRPOConfig (generation_kwargs too). If one comes "
            "with the model, load the model yourself, set model.generation_config.<name> = None, and pass the model"
        )


def steps_per_round(args: Any) -> int:
    """Optimiser steps that TRL takes in a round."""
    return max(1, int(args.steps_per_generation * args.num_iterations // args.gradient_accumulation_steps))


def _fixed(args: Any, more: Mapping[str, Any]) -> Iterator[str]:
    if more.get("tools"):
        yield "tools: a call's answer must be the same for every peer; make them methods of an environment_factory"
    if more.get("environment_factory") and more.get("rollout_func"):
        yield "rollout_func: with an environment_factory the swarm draws the turns; leave it out"
    if args.loss_type not in DIVISORS:
        yield f"loss_type = {args.loss_type!r}: its divisor is not known here; take one of {', '.join(DIVISORS)}"
    if args.beta and args.loss_type == "bnpo":
        why = "bnpo divides by the tokens of a micro-batch, those of dropped rollouts too, which have no KL"
        yield f"beta = {args.beta!r}: {why}; set beta=0.0, or another loss_type"
    for name, (wanted, why) in FIXED.items():
        if (value := getattr(args, name)) != wanted:
            yield f"{name} = {value!r}: set {name}={wanted!r}, since {why}"


def _of_sampling(args: Any, recipe: Recipe) -> Iterator[str]:
    sampling = recipe.sampling
    for name in SAMPLING:
        value, wanted = getattr(args, name), getattr(sampling, name)
        if value != wanted:
            yield f"{name} = {value!r}: the recipe's sampling.{name} is {wanted!r}; set {name}={wanted!r}"
    calls = args.max_tool_calling_iterations
    if recipe.task.environment and calls not in (None, sampling.max_turns - 1):
        why = f"the recipe's sampling.max_turns is {sampling.max_turns}, so it must be {sampling.max_turns - 1}"
        yield f"max_tool_calling_iterations = {calls}: {why}; leave it out"
    if (sampling.top_k or sampling.top_p < 1) and not args.use_vllm:
        why = "transformers' generate reports no log-probabilities of a truncated distribution"
        remedy = "sample with use_vllm=True, or set top_k=0 and top_p=1.0"
        yield f"top_k = {sampling.top_k}, top_p = {sampling.top_p}: {why}; {remedy}"


def _of_batches(args: Any, recipe: Recipe) -> Iterator[str]:
    processes = args.world_size
    prompts, each = recipe.training.prompts_per_round, recipe.sampling.num_generations
    own = recipe.prompts_per_peer * recipe.rollouts_per_group
    if args.generation_batch_size != prompts * each:
        why = f"a round has {prompts} prompts x {each} completions of all peers"
        remedy = f"let per_device_train_batch_size x {processes} processes x steps_per_generation be {prompts * each}"
        yield f"generation_batch_size = {args.generation_batch_size}: {why}; {remedy}"
    if own % processes:
        yield f"{processes} processes: they cannot share the {own} completions that this peer samples in a round"
    if (losses := args.steps_per_generation * args.num_iterations) % args.gradient_accumulation_steps:
        remedy = f"take a divisor of steps_per_generation x num_iterations = {losses}"
        why = "a round would end within an optimiser step"
        yield f"gradient_accumulation_steps = {args.gradient_accumulation_steps}: {why}; {remedy}"
    total = recipe.training.rounds * steps_per_round(args)
    if args.max_steps not in (-1, total):
        why = f"the {recipe.training.rounds} rounds take {total}"
        yield f"max_steps = {args.max_steps}: {why}; leave max_steps out, or set it to {total}"


def _of_saving(args: Any, recipe: Recipe) -> Iterator[str]:
    strategy = getattr(args.save_strategy, "value", args.save_strategy)
    steps, every = steps_per_round(args), recipe.training.save_every
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


def _of_recipe(recipe: Recipe, objective: Objective, peer: str) -> Iterator[str]:
    config, parts = recipe.peer(peer), (objective.advantage, objective.ratio, objective.surrogate, objective.reduction)
    if objective.beta:
        yield f"objective.beta = {objective.beta:g}: TRL computes the loss; leave it out, and set beta in GRPOConfig"
    if objective.clip_joint:
        yield "objective.clip_joint = true: TRL computes the loss; leave it out"
    if parts != (within_group, over_old, clipped, sequence_mean):
        yield (
            f'objective.name = "{recipe.objective.name}": TRL computes the loss; name one that differs from NoIS in '
            f"its weights and filter alone (TIS, F-TIS, F-TIS-lifted), and set loss_type, importance_sampling_level, "
            f"epsilon and scale_rewards in GRPOConfig"
        )
    if recipe.training.overlap:
        yield "training.overlap = 1: TRL decides when it samples; leave it out"
    if recipe.training.share == "speed":
        yield 'training.share = "speed": TRL decides what it samples; leave it out, in all peers\' recipes'
    if recipe.training.no_regret:
        yield f"training.no_regret = {recipe.training.no_regret}: TRL keeps the weights to go back to; leave it out"
    if recipe.sampling.stop:
        yield f"sampling.stop = {list(recipe.sampling.stop)}: TRL does not end completions at strings; use end_tokens"
    if config.attack:
        yield f"peers.{peer}.attack is for ftis train; leave it out"
