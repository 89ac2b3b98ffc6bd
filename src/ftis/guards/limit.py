"""Limits of this peer alone on others' rollouts: their number, failures, and short ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ftis.admission import Admission
from ftis.config import Recipe
from ftis.objectives import resolve, sequence_mean
from ftis.schedule import seed_of
from ftis.selection import Judged, OfShares, Selection


@dataclass(frozen=True)
class ForeignLimit(Selection):
    """At most ``training.max_foreign_rollouts`` foreign rollouts a round, in whole groups, from each peer in turn.

    The limit holds before anything is scored, so a round's cost does not grow with the number of peers. Late groups
    take the room that is left.
    """

    recipe: Recipe
    own: str
    name: str = "limit"

    def wanted(self, peer: str, round: int, items: Sequence[int]) -> Sequence[int]:
        count = groups_per_peer(self.recipe, self.own, round).get(peer, 0)
        if count >= len(items):
            return items
        if self.recipe.training.share == "speed":  # a sender samples as many as it chooses, the first ones
            return items[:count]
        rng = np.random.default_rng(seed_of(self.recipe, self.own, round, f"chosen-{peer}"))
        chosen = set(rng.choice(len(items), count, replace=False).tolist())
        return [item for place, item in enumerate(items) if place in chosen]

    def within_room(self, admissions: Sequence[Admission]) -> Sequence[Admission]:
        room = self.recipe.training.max_foreign_rollouts // self.recipe.rollouts_per_group
        kept = []
        for admission in admissions:
            inside, over = admission.admitted[:room], admission.admitted[room:]
            room -= len(inside)
            passed_over = (*admission.passed_over, *(scored.group for scored in over))
            kept.append(replace(admission, admitted=inside, passed_over=passed_over))
        return kept


def foreign_limit(recipe: Recipe, own: str) -> ForeignLimit | None:
    """The limit that ``[training]`` sets."""
    return ForeignLimit(recipe, own) if recipe.training.max_foreign_rollouts else None


def successes_only(recipe: Recipe, own: str) -> Selection | None:
    """A selection that drops others' rollouts with Â < 0, if ``training.foreign_failures`` is false.

    A failure pushes its tokens away. Wrong answers after right reasoning in the learner's style push that reasoning
    away, though their sender reports nothing false.
    """
    return OfShares(_successes, "failure") if recipe.training.foreign_failures is False else None


def _successes(judged: Judged) -> Tensor:
    own_R = torch.from_numpy(judged.batch.own_N[judged.rows])
    return (own_R | (judged.advantage_R >= 0)).float()


def by_length(recipe: Recipe, own: str) -> Selection | None:
    """A selection that counts others' shorter rollouts by length, if ``training.foreign_failures`` is false.

    The share is min(1, |a_i|/l), with l the mean length of own successes (Â > 0), or of all own rollouts if there are
    none. GRPO divides by |a_i|, so each token of a short answer counts more. Without these shares, short right answers
    drive reasoning out before it pays.
    """
    guarded = recipe.training.foreign_failures is False and resolve(recipe.objective).reduction is sequence_mean
    return OfShares(_length_shares, "short") if guarded else None


def _length_shares(judged: Judged) -> Tensor:
    own_N = torch.from_numpy(judged.batch.own_N)
    if not own_N.any():
        return torch.ones(len(judged.rows))
    length_N = torch.tensor([float(len(rollout)) for rollout in judged.batch.rollouts])
    success_N = own_N & (judged.advantage_N > 0)
    compared_N = success_N if success_N.any() else own_N
    share_N = (length_N / length_N[compared_N].mean()).clamp(max=1)
    return torch.where(own_N, 1.0, share_N)[judged.rows]


def take_turns(names: Sequence[str], count: int, round: int, seed: int) -> dict[str, int]:
    """The number of a round's ``count`` picks that each of ``names`` gets. A name without picks is left out.

    Picks go to the names in turn, in an order drawn from the seed. Each round continues where the round before ended.
    So within a round, and over any number of rounds, the names' totals differ by at most one.
    """
    order = np.random.default_rng(seed).permutation(len(names))
    each, rest = divmod(count, len(names))
    picks = dict.fromkeys(names, each) if each else {}
    for pick in range(count * round, count * round + rest):
        picks[names[order[pick % len(names)]]] = each + 1
    return picks


def groups_per_peer(recipe: Recipe, own: str, round: int) -> dict[str, int]:
    """The number of groups of each other peer that ``own`` learns from in ``round``. A peer without any is left out.

    ``training.max_foreign_rollouts`` goes to the peers in turn. Senders cannot influence whose turn it is.
    """
    others = [p.name for p in recipe.peers if p.name != own]
    limit = recipe.training.max_foreign_rollouts
    if not limit or not others:
        return dict.fromkeys(others, recipe.training.prompts_per_round)
    return take_turns(others, limit // recipe.rollouts_per_group, round, seed_of(recipe, own, 0, "turns"))
