"""Selections: which rollouts a peer learns from, and how much of each. F-TIS's filter is the first.

A selection may act at any of these places of a round; the earlier, the cheaper::

    skipped ─ collect ─ wanted ─ admit ─ heard ─ within_room ─ judge ─ shares ─ learn

A share in [0, 1] multiplies a rollout's advantage; the shares of several selections multiply. A rollout with share 0 is
**dropped**: the model does not run on it again, but it counts in its group's mean and in the divisor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ftis.admission import Admission
from ftis.config import Recipe, RecipeError
from ftis.objectives import Diagnostics, Objective
from ftis.rollouts import Batch, Decode, Floats
from ftis.seams import SELECTIONS, look_up

Value = TypeVar("Value")


class OwnOld(StrEnum):
    """The source of log π_old of own rollouts.

    ``SAMPLED``: the sampler, by its log π_gen. ``RECOMPUTED``: a pass of the model before the first step.
    ``IN_STEP``: the round's only optimiser step, at which π_θ is π_old.
    """

    SAMPLED, RECOMPUTED, IN_STEP = "sampled", "recomputed", "in_step"


@dataclass(frozen=True, eq=False)
class Judged:
    """A batch and its values under π_old. With ``IN_STEP``, log π_gen stands for own log π_old until the step.

    Attributes:
        advantage_N: float32 [N].
        rows: int64 [R], the rollouts with Â ≠ 0; with β > 0 all. The model never runs on other rollouts: they carry no
            gradient.
        old_logp: log π_old of each of ``rows``, float32 [T] each.
        diagnostics: weights and KLs of ``rows``; None if R is 0.
        gap: |log π_old − log π_gen| of the own tokens that were compared; empty if none were.
        own_old: the source of log π_old of own rollouts.
        ref_logp: with β > 0, log π_ref of the rows that are learned from.
    """

    batch: Batch
    advantage_N: Tensor
    rows: npt.NDArray[np.int64]
    old_logp: list[Floats]
    diagnostics: Diagnostics | None
    gap: Floats
    own_old: OwnOld = OwnOld.SAMPLED
    ref_logp: Mapping[int, Floats] | None = None

    @property
    def advantage_R(self) -> Tensor:
        return self.advantage_N[self.rows]

    def spread(self, values_R: Iterable[Value], elsewhere: Value) -> list[Value]:
        """A value for each rollout of the batch, [N]: ``values_R`` at ``rows``, ``elsewhere`` at the others."""
        values_N = [elsewhere] * len(self.batch)
        for row, value in zip(self.rows.tolist(), values_R, strict=True):
            values_N[row] = value
        return values_N

    def source_names(self) -> list[str]:
        """The name of the peer that sampled each of ``rows``."""
        return [self.batch.sources[source] for source in self.batch.source_N[self.rows]]


@dataclass(frozen=True, eq=False)
class Chosen:
    """The selections' decision.

    Attributes:
        share_R: float32 [R], in [0, 1], of each judged row.
        reason_R: the selection that set the share to 0, else the first that lowered it; None if the share is 1.
    """

    share_R: Tensor
    reason_R: tuple[str | None, ...]

    @property
    def kept_R(self) -> npt.NDArray[np.bool_]:
        kept: npt.NDArray[np.bool_] = (self.share_R > 0).numpy()
        return kept


class Selection(Protocol):
    """One reason to learn less, or nothing, from a rollout. The default of every method changes nothing."""

    name: str
    """The reason for a drop in records, and the key of its state in checkpoints."""

    def skipped(self, round: int) -> Collection[str]:
        """Peers that are neither waited for nor heard in ``round``."""
        return ()

    def wanted(self, peer: str, round: int, items: Sequence[int]) -> Sequence[int]:
        """The part of ``items``, the prompts assigned to ``peer``, whose groups are worth scoring."""
        return items

    def heard(self, admission: Admission, round: int) -> None:
        """Take note of the outcome of one message in ``round``."""
        return None

    def within_room(self, admissions: Sequence[Admission]) -> Sequence[Admission]:
        """The round's admissions; groups beyond a limit have moved to ``passed_over``."""
        return admissions

    def examine(self, judged: Judged) -> None:
        """Take note of a round's judged batch, even if no row carries gradient. Called before ``shares``."""
        return None

    def shares(self, judged: Judged) -> Tensor:
        """A share in [0, 1] for each of ``judged.rows``: float [R]."""
        return torch.ones(len(judged.rows))

    def about(self, peer: str, decode: Decode) -> Mapping[str, Any]:
        """Measures of another peer, for the round's record."""
        return {}

    def state(self) -> Mapping[str, Any]:
        """A JSON object for the checkpoint, with which a resumed peer decides as before."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the state that a checkpoint held."""
        return None


def select(judged: Judged, selections: Sequence[Selection]) -> Chosen:
    """The product of all selections' shares, and for each row the selection that dropped or first lowered it.

    Raises:
        RecipeError: a selection returned a wrong number of shares, or one outside [0, 1].
    """
    n = len(judged.rows)
    share_R = torch.ones(n)
    reason_R: list[str | None] = [None] * n
    if not n:
        return Chosen(share_R, ())
    for selection in selections:
        of_this_R = torch.as_tensor(selection.shares(judged)).detach().to("cpu", torch.float32)
        if of_this_R.shape != (n,) or not bool(((of_this_R >= 0) & (of_this_R <= 1)).all()):
            raise RecipeError(
                f"selection {selection.name!r} returned {list(of_this_R.shape)} shares from "
                f"{float(of_this_R.min()) if of_this_R.numel() else 'none'} to "
                f"{float(of_this_R.max()) if of_this_R.numel() else 'none'} for {n} rollouts: return one in [0, 1] for "
                f"each of judged.rows"
            )
        for row in torch.nonzero(of_this_R < 1).flatten().tolist():
            drops = bool(share_R[row] > 0) and bool(of_this_R[row] == 0)
            reason_R[row] = selection.name if drops else reason_R[row] or selection.name
        share_R = share_R * of_this_R
    return Chosen(share_R, tuple(reason_R))


@dataclass(frozen=True)
class KLFilter(Selection):
    """F-TIS's filter: share 1 if Â > 0 or KL < g, else 0.

    KL is estimated at the round's start by ``objective.kl_estimator`` and ``kl_reduction``. NaN drops.
    """

    objective: Objective
    name: str = "kl"

    def shares(self, judged: Judged) -> Tensor:
        assert judged.diagnostics is not None
        k1, k3 = judged.diagnostics.k1_N, judged.diagnostics.k3_N
        kl_R = k1 if self.objective.kl_estimator == "k1" else k3
        return ((judged.advantage_R > 0) | (kl_R < self.objective.kl_threshold)).to(judged.advantage_R.dtype)


@dataclass(frozen=True)
class OfShares(Selection):
    """A selection that is one function: judged → shares [R]."""

    function: Callable[[Judged], Tensor]
    name: str

    def shares(self, judged: Judged) -> Tensor:
        return self.function(judged)


def selections_of(recipe: Recipe, own: str, objective: Objective) -> tuple[Selection, ...]:
    """The objective's filter, those of :data:`SELECTIONS` that apply, the objective's own, ``training.selections``.

    A dotted path names a function ``f(judged) -> shares``, or a class that takes (recipe, own peer's name).

    Raises:
        RecipeError: a path leads nowhere, or to neither a function nor a class.
    """
    selections: list[Selection] = [KLFilter(objective)] if objective.filtered else []
    selections += [made for name in SELECTIONS if (made := look_up(name, "selection", SELECTIONS)(recipe, own))]
    key = "training.selections"
    added: list[tuple[str, Any]] = [(getattr(f, "__name__", type(f).__name__), f) for f in objective.selections]
    added += [(path.rpartition(".")[2], look_up(path, key)) for path in recipe.training.selections]
    for name, found in added:
        if not callable(found):
            raise RecipeError(f"{key}, or an objective's: {name!r} is a {type(found).__name__}, no function or class")
        if inspect.isclass(found):
            selections.append(cast(Callable[[Recipe, str], Selection], found)(recipe, own))
        else:
            selections.append(OfShares(found, name))
    return tuple(selections)
