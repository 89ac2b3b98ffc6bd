"""How biased is the update that each objective takes from foreign rollouts? Measured at a checkpoint of a run.

With the learner as it was after S rounds, an objective's direction f is the gradient of its loss over round S's
recorded *foreign* rollouts alone. It should point along the on-policy direction: the gradient of the loss without
correction over rollouts that the learner samples itself, for the same prompts, in groups of the same size. That one
is known only from K fresh batches o_1 … o_K, each as large as the foreign one::

    ō_−k              the mean of all fresh batches but o_k
    U                 mean over k ≠ l of ⟨o_k, o_l⟩

    cosine            mean over k of cos(f, ō_−k)
    norm ratio        |f| / √(mean over k of |o_k|²)
    corrected cosine  ⟨f, ō⟩ / (|f| √U)
    projection        ⟨f, ō⟩ / U

A batch is small and its gradient noisy, so f would not reach a cosine of 1 even without bias. The *ceiling* is what a
fresh batch scores in f's place against the others: an unbiased estimate from as many rollouts. |ō|² holds noise
too; U does not, since the noise of different batches averages to zero, and estimates the squared length of the
true on-policy direction μ. So the corrected cosine is that of this foreign batch with μ, and the projection is
⟨E f, μ⟩ / |μ|²: how much of the true direction the objective takes, 1 without bias, whatever the noise in f.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from scipy import stats
from torch import Tensor

from ftis.config import RecipeError, nearest
from ftis.files import write_json
from ftis.lab.arms import RunError
from ftis.lab.replay import recordings, with_threads
from ftis.learning import StepLoss, judge
from ftis.measures import by_source, order_preserved
from ftis.objectives import OBJECTIVES, resolve
from ftis.peer import Peer
from ftis.rollouts import Batch, Group, collate
from ftis.schedule import seed_of
from ftis.selection import Chosen, Judged, KLFilter, select

RESAMPLES = 2000
CONFIDENCE = 0.95
MIN_FRESH = 3
"""Leaving one out must leave two, or there are no two different batches to estimate U from."""
CHUNK = 1 << 24
"""Numbers multiplied at a time, so that sums in float64 need no float64 copy of a whole gradient."""

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval. None is undefined: a gradient of length 0, or U ≤ 0."""

    value: float | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Products:
    """One direction against K fresh batches: all that the statistics need.

    Attributes:
        fresh_KK: ⟨o_k, o_l⟩.
        toward_K: ⟨f, o_k⟩.
        squared: |f|².
    """

    fresh_KK: Array
    toward_K: Array
    squared: float


Statistic = Callable[[Products, Array], Array]
"""(products, weight_RK) → [R], nan where undefined. A row of weights counts how often each fresh batch is taken."""


def cosine(products: Products, weight_RK: Array) -> Array:
    """Mean over the batches taken of cos(f, mean of the others taken)."""
    fresh, toward = products.fresh_KK, products.toward_K
    product_RK = weight_RK @ fresh  # ⟨o_k, Σ⟩, with Σ the sum of all that are taken
    squared_RK = (product_RK * weight_RK).sum(1, keepdims=True) - 2 * product_RK + fresh.diagonal()  # |Σ − o_k|²
    with np.errstate(divide="ignore", invalid="ignore"):
        cosine_RK = ((weight_RK @ toward)[:, None] - toward) / np.sqrt(products.squared * squared_RK)
    taken_RK = np.where(weight_RK > 0, cosine_RK, 0)
    return np.asarray((weight_RK * taken_RK).sum(1) / weight_RK.sum(1))


def norm_ratio(products: Products, weight_RK: Array) -> Array:
    """|f| over the root mean square of |o_k|."""
    return np.asarray(np.sqrt(products.squared / (weight_RK @ products.fresh_KK.diagonal() / weight_RK.sum(1))))


def corrected_cosine(products: Products, weight_RK: Array) -> Array:
    """⟨f, ō⟩ / (|f| √U)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return projection(products, weight_RK) * np.sqrt(_true_square(products, weight_RK) / products.squared)


def projection(products: Products, weight_RK: Array) -> Array:
    """⟨f, ō⟩ / U."""
    toward_R = weight_RK @ products.toward_K / weight_RK.sum(1)
    return np.asarray(toward_R / _true_square(products, weight_RK))


def _true_square(products: Products, weight_RK: Array) -> Array:
    """U, from products of different batches only (copies of one share their noise); nan where it is not above 0."""
    fresh = products.fresh_KK
    pairs_R = weight_RK.sum(1) ** 2 - (weight_RK**2).sum(1)
    sum_R = ((weight_RK @ fresh) * weight_RK).sum(1) - (weight_RK**2) @ fresh.diagonal()
    with np.errstate(divide="ignore", invalid="ignore"):
        u_R = sum_R / pairs_R
        return np.asarray(np.where(u_R > 0, u_R, np.nan))


STATISTICS: dict[str, Statistic] = {
    "cosine": cosine,
    "corrected_cosine": corrected_cosine,
    "projection": projection,
    "norm_ratio": norm_ratio,
}


def with_interval(statistic: Statistic, products: Products, rng: np.random.Generator) -> Estimate:
    """A statistic with its bootstrap interval over the fresh batches.

    A resample holds some batches twice, so its mean is noisier than the real one and its cosines are lower, all by
    about as much; the resampled values are therefore shifted until their mean is the statistic's value. Foreign
    rollouts are not resampled: the interval is about these. No interval where 5 % of the resamples are undefined.
    """
    k = len(products.fresh_KK)
    value = float(statistic(products, np.ones((1, k)))[0])
    if np.isnan(value):
        return Estimate(None)
    drawn = statistic(products, rng.multinomial(k, [1 / k] * k, size=RESAMPLES).astype(np.float64))
    drawn = drawn[~np.isnan(drawn)]
    if len(drawn) < 0.95 * RESAMPLES:
        return Estimate(value)
    low, high = np.quantile(drawn - drawn.mean() + value, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Estimate(value, float(low), float(high))


def ceiling(statistic: Statistic, fresh_KK: Array) -> Estimate:
    """The mean of what each fresh batch scores against the others, and the range where one more would, with 95 %.

    The range is mean ± t s √(1 + 1/K) with s the K scores' standard deviation: an objective whose value lies in
    it does as well as one batch of the learner's own could.
    """
    k = len(fresh_KK)
    scores = []
    for left_out in range(k):
        others = np.delete(np.arange(k), left_out)
        products = Products(fresh_KK[np.ix_(others, others)], fresh_KK[left_out, others], fresh_KK[left_out, left_out])
        # A fresh batch is measured against the whole mean of the others, as ō_−k is for a direction.
        score = _cosine_with_mean(products) if statistic is cosine else statistic(products, np.ones((1, k - 1)))[0]
        scores.append(float(score))
    if np.isnan(scores).any():
        return Estimate(None)
    mean = float(np.mean(scores))
    reach = float(stats.t.ppf((1 + CONFIDENCE) / 2, k - 1) * np.std(scores, ddof=1) * np.sqrt(1 + 1 / k))
    return Estimate(mean, mean - reach, mean + reach)


def _cosine_with_mean(products: Products) -> float:
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(products.toward_K.sum() / np.sqrt(products.squared * products.fresh_KK.sum()))


def probe(
    run: Path,
    arm: str | None,
    peer: str,
    step: int,
    *,
    fresh: int = 16,
    objectives: Sequence[str] = tuple(OBJECTIVES),
    seed: int = 0,
) -> dict[str, Any]:
    """Compare objectives at ``checkpoint-<step>`` of a recorded peer; docs/diagnostics.md explains the result.

    Memory holds fresh + 2 gradients, each as large as the trained parameters in float32.

    Args:
        arm: may be None where the run has one.
        step: finished rounds; round ``step`` is the one whose foreign rollouts are used. 0 is the untrained model.
        fresh: K, batches of own rollouts.
        seed: of the fresh batches and the resampling.

    Raises:
        RunError: no such checkpoint or rollouts; no foreign rollout, or none that carries gradient.
    """
    if fresh < MIN_FRESH:
        raise RunError(f"--fresh {fresh}: at least {MIN_FRESH} fresh batches are needed, 16 make a useful interval")
    if not objectives:
        raise RecipeError(f"no objective to compare: name some of {', '.join(OBJECTIVES)}")
    for name in objectives:
        if name not in OBJECTIVES:
            raise RecipeError(f"unknown objective {name!r}{nearest(name, list(OBJECTIVES))}")
    (recording,) = recordings(run, arm, (peer,))
    finished = recording.rounds()
    if not 0 <= step < finished:
        raise RunError(
            f"{recording.directory} has rounds 0 to {finished - 1}: at step {step} no rollouts follow; choose a "
            f"checkpoint before the last (training.save_total_limit says how many are kept) or 0"
        )
    recording.check_recorded(step, step + 1)
    with with_threads(recording.threads):
        return {
            "run": str(run),
            "arm": recording.arm,
            "peer": peer,
            "step": step,
            "fresh": fresh,
            "seed": seed,
            **_compare(recording.load(step), recording.batch, step, fresh, objectives, seed),
        }


def _compare(
    peer: Peer,
    batch_of: Callable[[Peer, int], Batch],
    round: int,
    fresh: int,
    objectives: Sequence[str],
    seed: int,
) -> dict[str, Any]:
    batch = batch_of(peer, round)
    foreign_N = ~batch.own_N
    advantage_N = _only(peer.advantages(batch), foreign_N)
    if not bool(advantage_N.any()):
        raise RunError(
            f"round {round} of peer {peer.config.name!r}: none of its {int(foreign_N.sum())} foreign rollouts carries "
            f"gradient, so there is nothing to compare: choose another step, or an arm whose peers collaborate"
        )
    used = int(foreign_N.sum())
    on_policy = as_learning_by(peer, "NoIS")
    own: list[Tensor] = []
    for k in range(fresh):
        own_batch, used_N = _fresh_batch(peer, batch, foreign_N, round, f"probe-{seed}-{k}")
        own.append(direction(on_policy, own_batch, _only(peer.advantages(own_batch), used_N), used)[0])
    fresh_KK = np.array([[dot(a, b) for b in own] for a in own])
    if not fresh_KK.diagonal().all():
        raise RunError(
            f"round {round} of peer {peer.config.name!r}: a fresh batch of its own carries no gradient (all rewards of "
            f"a group are equal, in every group), so there is nothing to compare with: choose another step"
        )

    rng = np.random.default_rng(seed_of(peer.recipe, peer.name, round, f"probe-{seed}-resamples"))
    results: dict[str, Any] = {}
    for name in objectives:
        f, judged, chosen = direction(as_learning_by(peer, name), batch, advantage_N, used)
        products = Products(fresh_KK, np.array([dot(f, o) for o in own]), dot(f, f))
        results[name] = {
            **{key: asdict(with_interval(statistic, products, rng)) for key, statistic in STATISTICS.items()},
            **_filtered(judged, chosen, foreign_N),
        }
    assert judged.diagnostics is not None
    (summary,) = by_source(judged.diagnostics, torch.zeros(len(judged.rows), dtype=torch.int64), ["foreign"]).values()
    return {
        "foreign": {
            "sources": sorted({batch.sources[s] for s in batch.source_N[foreign_N]}),
            "prompts": len(np.unique(batch.item_N[foreign_N])),
            "rollouts": used,
            "zero_advantage": used - len(judged.rows),
            "effective_sample_size": summary["sampling/effective_sample_size"],
            "truncated_fraction": summary["sampling/truncated_fraction"],
            "kl/k1": summary["kl/k1"],
            "kl/k3": summary["kl/k3"],
        },
        "trained_parameters": sum(p.numel() for p in peer.policy.trainable),
        "ceiling": {key: asdict(ceiling(statistic, fresh_KK)) for key, statistic in STATISTICS.items()},
        "objectives": results,
    }


def as_learning_by(peer: Peer, objective: str) -> Peer:
    """The peer under another objective with its recipe's options. The objective's filter is the only selection."""
    resolved = resolve(peer.recipe.objective.model_copy(update={"name": objective}))
    selections = (KLFilter(resolved),) if resolved.filtered else ()
    return replace(peer, objective=resolved, selections=selections)


def direction(peer: Peer, batch: Batch, advantage_N: Tensor, divisor: int) -> tuple[Tensor, Judged, Chosen]:
    """The gradient of the peer's objective over the batch's rollouts with Â ≠ 0: flat, float32, on the CPU."""
    judged = judge(batch, advantage_N, peer.policy, peer.decoding, peer.objective)
    chosen = select(judged, peer.selections)
    rows = judged.rows[chosen.kept_R]
    if len(rows):
        loss = StepLoss(judged, chosen, peer.objective, rows, divisor)
        peer.policy.backward(batch.prompts(rows), batch.completion_ids(rows), peer.decoding.temperature, loss)
    else:
        peer.policy.optimizer.zero_grad(set_to_none=True)
    gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in peer.policy.trainable]
    return torch.cat([g.detach().flatten().float().cpu() for g in gradients]), judged, chosen


def dot(a: Tensor, b: Tensor) -> float:
    """⟨a, b⟩ summed in float64."""
    return sum(float(torch.dot(x.double(), y.double())) for x, y in zip(a.split(CHUNK), b.split(CHUNK), strict=True))


def _fresh_batch(
    peer: Peer, batch: Batch, foreign_N: npt.NDArray[np.bool_], round: int, purpose: str
) -> tuple[Batch, npt.NDArray[np.bool_]]:
    """Own rollouts in the place of the foreign ones, and which of them take part in the gradient.

    Per prompt, as many as its whole group had (which advantages are relative to), of which as many take part as were
    foreign. In vertical mode both are all of the group.
    """
    items = sorted({int(item) for item in batch.item_N[foreign_N]})
    sizes = {item: int((batch.item_N == item).sum()) for item in items}
    taking_part = {item: int((batch.item_N[foreign_N] == item).sum()) for item in items}
    sampled = peer.sample_items(items, max(sizes.values()), round, purpose)
    groups = [Group(g.peer, g.round, g.item, g.rollouts[: sizes[g.item]]) for g in sampled]
    own = collate([peer.admitter.score_group(group) for group in groups], peer.prompt_ids, peer.name)
    return own, np.concatenate([np.arange(sizes[item]) < taking_part[item] for item in items])


def _only(advantage_N: Tensor, used_N: npt.NDArray[np.bool_]) -> Tensor:
    """Advantages with those of unused rollouts set to 0, so that they never meet the model."""
    return torch.where(torch.from_numpy(used_N), advantage_N, torch.zeros_like(advantage_N))


def _filtered(judged: Judged, chosen: Chosen, foreign_N: npt.NDArray[np.bool_]) -> dict[str, float | None]:
    keep_N = torch.ones(len(judged.batch), dtype=torch.bool)
    keep_N[torch.from_numpy(judged.rows)] = torch.from_numpy(chosen.kept_R)
    group_N = torch.from_numpy(judged.batch.group_N[foreign_N])
    order = order_preserved(judged.advantage_N[foreign_N], keep_N[foreign_N], group_N)
    return {
        "kept_share": float(chosen.kept_R.mean()),
        "advantage_sign_preserved": order.sign / order.pairs if order.pairs else None,
        "advantage_rank_preserved": order.rank / order.pairs if order.pairs else None,
    }


FILTER_MEASURES = ("kept_share", "advantage_sign_preserved", "advantage_rank_preserved")


def table(result: Mapping[str, Any]) -> Table:
    """A probe's result for a terminal: the ceiling, then the objectives, the highest cosine first."""
    foreign = result["foreign"]
    title = (
        f"{result['arm']}/{result['peer']} after {result['step']} rounds: {foreign['rollouts']} rollouts of "
        f"{', '.join(foreign['sources'])} against {result['fresh']} fresh batches of its own"
    )
    printed = Table(title=title, title_justify="left", box=SIMPLE_HEAD, caption_justify="left")
    printed.add_column("objective", no_wrap=True)
    for heading in STATISTICS:
        printed.add_column(heading.replace("_", " "), justify="right")
    printed.add_row("own (ceiling)", *(_estimate_text(result["ceiling"][key]) for key in STATISTICS))
    printed.add_section()
    ranked = sorted(result["objectives"].items(), key=lambda named: _cosine(named[1]), reverse=True)
    for name, values in ranked:
        printed.add_row(name, *(_estimate_text(values[key]) for key in STATISTICS))
    lines = [
        "below each value: its 95 % interval; the ceiling's is where one more batch of its own would lie",
        f"foreign: effective sample size {foreign['effective_sample_size']:.2f}, truncated "
        f"{foreign['truncated_fraction']:.2f}, KL {foreign['kl/k1']:.2f} (k1) {foreign['kl/k3']:.2f} (k3)",
    ]
    filtered = next((values for name, values in ranked if OBJECTIVES[name].filtered), None)
    if filtered is not None:  # one filter serves all F- variants
        kept, sign, rank = ("–" if filtered[key] is None else f"{filtered[key]:.2f}" for key in FILTER_MEASURES)
        lines.append(f"filter: keeps {kept} of the rollouts with Â ≠ 0, signs {sign} and ranks {rank} of the pairs")
    printed.caption = "\n".join(lines)
    return printed


def _cosine(values: Mapping[str, Any]) -> float:
    """The cosine to rank by; an undefined one comes last."""
    cosine = values["cosine"]["value"]
    return -math.inf if cosine is None else float(cosine)


def _estimate_text(estimate: Mapping[str, float | None]) -> str:
    if estimate["value"] is None:
        return "–"
    if estimate["low"] is None:
        return f"{estimate['value']:.2f}"
    return f"{estimate['value']:.2f}\n{estimate['low']:.2f} … {estimate['high']:.2f}"


def write(result: Mapping[str, Any], path: Path) -> None:
    """Write a probe's result as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, result)
