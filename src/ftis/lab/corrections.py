"""What an arm's objective does about rollouts that other peers sampled, as far as the page tells it."""

from __future__ import annotations

from dataclasses import dataclass

from ftis.config import Recipe, RecipeError


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
    """The correction in a recipe, as :func:`ftis.lab.recipes.with_arm` gives it for an arm.

    An objective that is not importable here, as one of another participant's own, is described by what the recipe
    sets and the defaults.
    """
    from ftis.objectives import Objective, resolve  # loads torch

    try:
        objective = resolve(recipe.objective)
        weighted: bool | None = objective.weighted
        filtered: bool | None = objective.filtered
    except RecipeError:
        given = recipe.objective.model_dump(exclude={"name"}, exclude_none=True)
        objective, weighted, filtered = Objective(**given), None, None
    return Correction(
        name=recipe.objective.name,
        weighted=weighted,
        cap=objective.importance_sampling_clip_max,
        filtered=filtered,
        kl_estimator=objective.kl_estimator,
        kl_threshold=objective.kl_threshold,
        kl_reduction=objective.kl_reduction,
    )
