"""A guess of the seconds that training takes, before any round is measured: by parameters and likely tokens."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from ftis.config import Recipe
from ftis.recipe.arms import rollouts_per_round

SAMPLING_RATE, TRAINING_RATE = 1.5e10, 3e10
"""Floating-point operations a second on one core: measured on the starters, which sample at 1.2 to 2.2 · 10¹⁰ and train
at 2.3 to 4 · 10¹⁰. A parameter and token counts as 2 operations to sample and 8 to train: a forward pass that gives old
log-probabilities, and another with its backward pass."""

LIKELY_SIGNAL, LIKELY_LENGTH = 0.5, 0.5
"""Assumed: the probability that a group has signal, and the mean completion's fraction of the maximum."""

UNKNOWN_PROBLEMS = 300
"""The assumed number of validation problems of a task whose section gives none."""


def guess_seconds(swarm: Recipe, parameters: Mapping[str, int]) -> float:
    """A guess of the seconds of one round of one peer on one core: sampling, training, and its part of evaluations.

    Args:
        swarm: with exactly the peers of the swarm.
        parameters: of each model.
    """
    training = swarm.training
    evaluations = 2 + (training.rounds // training.eval_every if training.eval_every else 0)
    problems = sum(task.validation_size or UNKNOWN_PROBLEMS for task in (swarm.task, *swarm.ood))
    sampled, trained = rollouts_per_round(swarm)
    sampled_and_evaluated = sampled + problems * evaluations / training.rounds
    tokens = LIKELY_LENGTH * swarm.sampling.max_completion_length
    operations_each = 2 * sampled_and_evaluated / SAMPLING_RATE + 8 * trained / TRAINING_RATE
    return fmean(parameters[peer.model] for peer in swarm.peers) * tokens * operations_each
