"""What an arm's objective does about rollouts that other peers sampled, as far as the page tells it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftis.config import Recipe

if TYPE_CHECKING:
    from ftis.objectives import Objective


@dataclass(frozen=True)
class Correction:
    """How an objective corrects for who sampled a rollout.

    Attributes:
        name: of the objective.
        weighted: whether the truncated weight multiplies the gradient; None where the objective is not importable here.
        cap: C.
        filtered: whether the KL filter drops rollouts; None as above.
        kl_estimator, kl_threshold, kl_reduction: the filter's.
    """

    name: str
    weighted: bool | None
    cap: float
    filtered: bool | None
    kl_estimator: str
    kl_threshold: float
    kl_reduction: str

    @property
    def threshold(self) -> tuple[str, float] | None:
        """The estimator that the filter looks at, and g; None without a filter."""
        return (self.kl_estimator, self.kl_threshold) if self.filtered else None


def correction_of(recipe: Recipe) -> Correction:
    """The correction in a recipe, as :meth:`ftis.config.Recipe.arm` gives it for an arm."""
    settings, objective = recipe.objective, _objective(recipe)
    return Correction(
        name=settings.name,
        weighted=_weighted(objective),
        cap=settings.importance_sampling_clip_max,
        filtered=None if objective is None else objective.filtered,
        kl_estimator=settings.kl_estimator,
        kl_threshold=settings.kl_threshold,
        kl_reduction=settings.kl_reduction,
    )


def _objective(recipe: Recipe) -> Objective | None:
    """The recipe's objective; None where it is not importable here, as on the machine of another participant."""
    from ftis.objectives import OBJECTIVES  # loads torch

    return OBJECTIVES.get(recipe.objective.name)


def _weighted(objective: Objective | None) -> bool | None:
    return None if objective is None else objective.correction == "tis"
