"""What an arm's objective does about rollouts that other peers sampled, as far as the page tells it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftis.config import Recipe

if TYPE_CHECKING:
    from ftis.objectives import Objective
    from ftis.records.following import ArmOfRun


@dataclass(frozen=True)
class Correction:
    """How an objective corrects for who sampled a rollout.

    Attributes:
        name: of the objective.
        objective: of somebody's own, one with its settings.
        known: whether it is built in.
    """

    name: str
    objective: Objective
    known: bool

    @property
    def weighted(self) -> bool | None:
        """Whether a weight multiplies the gradient; None where the objective is not built in."""
        return self.objective.weighted if self.known else None

    @property
    def truncated(self) -> bool:
        """Whether that weight is all there is, rather than one of the objective's own that follows from it."""
        from ftis.objectives import truncated  # loads torch

        return self.known and self.objective.weight is truncated

    @property
    def filtered(self) -> bool | None:
        """Whether the KL filter drops rollouts; None as above."""
        return self.objective.filtered if self.known else None

    @property
    def cap(self) -> float:
        """C."""
        return self.objective.importance_sampling_clip_max

    @property
    def threshold(self) -> tuple[str, float] | None:
        """The estimator that the filter looks at, and g; None without a filter."""
        of = self.objective
        return (of.kl_estimator, of.kl_threshold) if self.filtered else None


def correction_of(recipe: Recipe) -> Correction:
    """The correction in a recipe, as :func:`ftis.recipe.parsing.with_arm` gives it for an arm.

    Reading records runs nobody's code: an objective by its dotted path is described by what the recipe sets and the
    defaults.
    """
    from ftis.objectives import Objective, resolve  # loads torch

    if "." not in recipe.objective.name:
        return Correction(recipe.objective.name, resolve(recipe.objective), known=True)
    given = recipe.objective.model_dump(exclude={"name"}, exclude_none=True)
    return Correction(recipe.objective.name, Objective(**given), known=False)


def cap_seen(arm: ArmOfRun) -> float | None:
    """C without loading the objective: the recipe's, or a weight that its ratio was above. None if none ever was."""
    said = arm.recipe.objective.importance_sampling_clip_max
    if said is not None:
        return float(said)
    for peer in arm.peers.values():
        for row in reversed(peer.recent):
            for measures in row.by_peer.values():
                ratio = measures.get("sampling/importance_sampling_ratio/max")
                weight = measures.get("sampling/importance_sampling_weight/max")
                if ratio is not None and weight is not None and ratio > weight:
                    return float(weight)
    return None
