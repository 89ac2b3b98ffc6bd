"""The bias of the update that each objective takes from foreign rollouts, measured at a checkpoint of a run.

The learner is restored to its state after S rounds. An objective's direction f is then the gradient of its loss over
round S's recorded *foreign* rollouts alone. It should point along the on-policy direction: the gradient of the
uncorrected loss over rollouts that the learner samples itself, for the same prompts, in groups of the same size. The
on-policy direction is known only from K fresh batches o_1 … o_K, each as large as the foreign batch::

    ō, ō_−k           the mean of all fresh batches; without o_k
    U                 mean over k ≠ l of ⟨o_k, o_l⟩

    cosine            mean over k of cos(f, ō_−k)
    norm ratio        |f| / √(mean over k of |o_k|²)
    corrected cosine  ⟨f, ō⟩ / (|f| √U)
    projection        ⟨f, ō⟩ / U

A batch is small and its gradient noisy, so f would not reach a cosine of 1 even without bias. The *ceiling* is the
score of a fresh batch in f's place against the others: an unbiased estimate from as many rollouts. |ō|² contains noise.
U contains none, since the noise of different batches averages to zero, so it estimates the squared length of the true
on-policy direction μ. The corrected cosine is therefore that of this foreign batch with μ. The projection estimates
⟨E f, μ⟩ / |μ|², the part of the true direction that the objective takes: 1 without bias, whatever the noise in f.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from scipy import stats
from torch import Tensor

from ftis.cli_options import console
from ftis.config import ObjectiveConfig, RecipeError, RunError
from ftis.learning import StepLoss, judge, step_size
from ftis.machine.resources import with_threads
from ftis.measures import by_source
from ftis.objectives import resolve
from ftis.peer import Peer
from ftis.records.files import write_json
from ftis.rollouts import Batch, Floats, Group, collate
from ftis.schedule import seed_of
from ftis.selection import Chosen, Judged, KLFilter, select
from research import commands, cuts
from research.replay import recordings

RESAMPLES = 2000
CONFIDENCE = 0.95
PAPERS = ("NoIS", "VIS", "TIS", "F-NoIS", "F-VIS", "F-TIS")
"""The objectives that are compared unless others are named."""

MIN_FRESH = 3
"""U needs two different batches, after one has been left out."""
CHUNK = 1 << 24
"""Numbers multiplied at a time, so that float64 sums need no float64 copy of a whole gradient."""

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval. None is undefined: a gradient has length 0, or U ≤ 0."""

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
"""(products, weight_BK) → [B], nan where undefined. A row of weights says how often each fresh batch is taken."""


def cosine(products: Products, weight_BK: Array) -> Array:
    """Mean over the batches taken of cos(f, mean of the others taken)."""
    fresh, toward = products.fresh_KK, products.toward_K
    product_BK = weight_BK @ fresh  # ⟨o_k, Σ⟩, with Σ the sum of all that are taken
    squared_BK = (product_BK * weight_BK).sum(1, keepdims=True) - 2 * product_BK + fresh.diagonal()  # |Σ − o_k|²
    with np.errstate(divide="ignore", invalid="ignore"):
        cosine_BK = ((weight_BK @ toward)[:, None] - toward) / np.sqrt(products.squared * squared_BK)
    taken_BK = np.where(weight_BK > 0, cosine_BK, 0)
    return np.asarray((weight_BK * taken_BK).sum(1) / weight_BK.sum(1))


def norm_ratio(products: Products, weight_BK: Array) -> Array:
    """|f| over the root mean square of |o_k|."""
    return np.asarray(np.sqrt(products.squared / (weight_BK @ products.fresh_KK.diagonal() / weight_BK.sum(1))))


def corrected_cosine(products: Products, weight_BK: Array) -> Array:
    """⟨f, ō⟩ / (|f| √U)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return projection(products, weight_BK) * np.sqrt(_true_square(products, weight_BK) / products.squared)


def projection(products: Products, weight_BK: Array) -> Array:
    """⟨f, ō⟩ / U."""
    toward_B = weight_BK @ products.toward_K / weight_BK.sum(1)
    return np.asarray(toward_B / _true_square(products, weight_BK))


def _true_square(products: Products, weight_BK: Array) -> Array:
    """U, from products of different batches only, since copies of one have the same noise; nan where U ≤ 0."""
    fresh = products.fresh_KK
    pairs_B = weight_BK.sum(1) ** 2 - (weight_BK**2).sum(1)
    sum_B = ((weight_BK @ fresh) * weight_BK).sum(1) - (weight_BK**2) @ fresh.diagonal()
    with np.errstate(divide="ignore", invalid="ignore"):
        u_B = sum_B / pairs_B
        return np.asarray(np.where(u_B > 0, u_B, np.nan))


STATISTICS: dict[str, Statistic] = {
    "cosine": cosine,
    "corrected_cosine": corrected_cosine,
    "projection": projection,
    "norm_ratio": norm_ratio,
}


def with_interval(statistic: Statistic, products: Products, rng: np.random.Generator) -> Estimate:
    """A statistic with its bootstrap interval over the fresh batches.

    A resample holds some batches twice, so its mean is noisier than the real one, and its cosines are lower, all by
    about as much. The resampled values are therefore shifted until their mean is the statistic's value. Foreign
    rollouts are not resampled: the interval is for this foreign batch. There is none where 5 % of the resamples are
    undefined.
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
    """The mean score of each fresh batch against the others, and the 95 % range of the score of one more batch.

    The range is mean ± t s √(1 + 1/K), with s the K scores' standard deviation. An objective whose value lies in it
    does as well as a batch of the learner's own rollouts could.
    """
    k = len(fresh_KK)
    scores = []
    for left_out in range(k):
        others = np.delete(np.arange(k), left_out)
        products = Products(fresh_KK[np.ix_(others, others)], fresh_KK[left_out, others], fresh_KK[left_out, left_out])
        # A fresh batch is compared with the mean of all others, as a direction is with ō_−k.
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
    objectives: Sequence[str] = PAPERS,
    seed: int = 0,
) -> dict[str, Any]:
    """Compare objectives at ``checkpoint-<step>`` of a recorded peer. The module explains the numbers.

    Memory holds ``fresh`` + 2 gradients, each as large as the trained parameters in float32.

    Args:
        arm: may be None if the run has one.
        step: S, finished rounds, and the round whose foreign rollouts are used; 0 is the untrained model.
        fresh: K, the number of fresh batches.
        seed: of the fresh batches and the resampling.

    Raises:
        RunError: a checkpoint or rollouts are missing, or no foreign rollout carries gradient.
    """
    if fresh < MIN_FRESH:
        raise RunError(f"--fresh {fresh}: at least {MIN_FRESH} fresh batches are needed, 16 make a useful interval")
    if not objectives:
        raise RecipeError(f"no objective to compare: name some of {', '.join(PAPERS)}")
    for name in objectives:
        resolve(ObjectiveConfig(name=name))
    (recording,) = recordings(run, arm, (peer,))
    finished = recording.rounds()
    if not 0 <= step < finished:
        raise RunError(
            f"{recording.directory} has rollouts after steps 0 to {finished - 1}, and none after {step}: choose 0 or a "
            f"checkpoint before the last (training.save_total_limit says how many are kept)"
        )
    recording.check_recorded(step, step + 1)
    with with_threads(recording.threads), recording.examined(step) as loaded:
        return {
            "run": str(run),
            "arm": recording.arm,
            "peer": peer,
            "step": step,
            "fresh": fresh,
            "seed": seed,
            **_compare(loaded, recording.batch, step, fresh, objectives, seed),
        }


def _compare(
    peer: Peer, batch_of: Callable[[Peer, int], Batch], round: int, fresh: int, objectives: Sequence[str], seed: int
) -> dict[str, Any]:
    batch = batch_of(peer, round)
    foreign_N = ~batch.own_N
    on_policy = as_learning_by(peer, "NoIS")
    if not bool(_only(on_policy.member.advantages(batch), foreign_N).any()):
        raise RunError(
            f"round {round + 1} of peer {peer.name!r}: none of its {int(foreign_N.sum())} foreign rollouts "
            f"carries gradient, so there is nothing to compare: choose another step, or an arm whose peers collaborate"
        )
    used = int(foreign_N.sum())
    own: list[Tensor] = []
    for k in range(fresh):
        own_batch, used_N = _fresh_batch(peer, batch, foreign_N, round, f"probe-{seed}-{k}")
        own.append(direction(on_policy, own_batch, used_N)[0])
    fresh_KK = np.array([[dot(a, b) for b in own] for a in own])
    if not fresh_KK.diagonal().all():
        raise RunError(
            f"round {round + 1} of peer {peer.name!r}: a fresh batch of its own carries no gradient (all "
            f"rewards of a group are equal, in every group), so there is nothing to compare with: choose another step"
        )

    rng = np.random.default_rng(seed_of(peer.recipe, peer.name, round, f"probe-{seed}-resamples"))
    results: dict[str, Any] = {}
    for name in objectives:
        learner = as_learning_by(peer, name)
        f, judged, chosen = direction(learner, batch, foreign_N)
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
    """The peer with another objective under its recipe's options. The objective's filter is the only selection."""
    resolved = resolve(peer.recipe.objective.model_copy(update={"name": objective}))
    selections = (KLFilter(resolved),) if resolved.filtered else ()
    return replace(peer, member=replace(peer.member, objective=resolved, selections=selections))


def direction(peer: Peer, batch: Batch, used_N: npt.NDArray[np.bool_]) -> tuple[Tensor, Judged, Chosen]:
    """The gradient of the peer's objective over the used rollouts of the batch: flat, float32, on the CPU."""
    member = peer.member
    advantage_N = _only(member.advantages(batch), used_N)
    judged = judge(batch, advantage_N, peer.policy, peer.decoding, member.objective, steps=1)
    chosen = select(judged, member.selections)
    rows = judged.rows[chosen.kept_R]
    if len(rows):
        step = step_size(batch, np.flatnonzero(used_N), peer.decoding)
        loss = StepLoss(judged, chosen, member.objective, rows, step)
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
    """Own rollouts instead of the foreign ones, and which of them contribute to the gradient: bool [N].

    Each prompt's group is as large as before, since advantages depend on it, and as many of its rollouts contribute as
    were foreign. In vertical mode that is the whole group.
    """
    items = sorted({int(item) for item in batch.item_N[foreign_N]})
    sizes = {item: int((batch.item_N == item).sum()) for item in items}
    taking_part = {item: int((batch.item_N[foreign_N] == item).sum()) for item in items}
    sampled = peer.sample_items(items, max(sizes.values()), round, purpose)
    groups = [Group(g.peer, g.round, g.item, g.rollouts[: sizes[g.item]]) for g in sampled]
    own = collate([peer.member.admitter.score_group(group) for group in groups], peer.member.prompt_ids, peer.name)
    return own, np.concatenate([np.arange(sizes[item]) < taking_part[item] for item in items])


def _only(advantage_N: Tensor, used_N: npt.NDArray[np.bool_]) -> Tensor:
    """Advantages with those of unused rollouts set to 0, so that the model does not run on them."""
    return torch.where(torch.from_numpy(used_N), advantage_N, torch.zeros_like(advantage_N))


def _filtered(judged: Judged, chosen: Chosen, foreign_N: npt.NDArray[np.bool_]) -> dict[str, float | None]:
    keep_N = np.array(judged.spread(chosen.kept_R.tolist(), True))[foreign_N]
    pairs, sign, rank = order_preserved(judged.advantage_N.numpy()[foreign_N], keep_N, judged.batch.group_N[foreign_N])
    return {
        "kept_share": float(chosen.kept_R.mean()),
        "advantage_sign_preserved": sign / pairs if pairs else None,
        "advantage_rank_preserved": rank / pairs if pairs else None,
    }


def order_preserved(
    advantage_N: Floats, keep_N: npt.NDArray[np.bool_], group_N: npt.NDArray[np.int64]
) -> tuple[int, int, int]:
    """Count the pairs of a group with Â_i ≠ Â_j, and those of them that keep their signs, and their order.

    A dropped rollout's Â' is 0, a kept one's is Â. The KL filter drops only Â ≤ 0, so with two levels of reward it can
    cost signs but no order.
    """
    used_N = np.where(keep_N, advantage_N, 0)
    same_sign_N = np.sign(used_N) == np.sign(advantage_N)
    i, j = np.nonzero(np.triu(group_N[:, None] == group_N) & (advantage_N[:, None] != advantage_N))
    same_order = np.sign(used_N[i] - used_N[j]) == np.sign(advantage_N[i] - advantage_N[j])
    return len(i), int((same_sign_N[i] & same_sign_N[j]).sum()), int(same_order.sum())


FILTER_MEASURES = ("kept_share", "advantage_sign_preserved", "advantage_rank_preserved")


def table(result: Mapping[str, Any]) -> Table:
    """A probe's result for a terminal: the ceiling, then the objectives by descending cosine."""
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
    cosines = {name: values["cosine"]["value"] for name, values in result["objectives"].items()}
    ranked = sorted(result["objectives"].items(), key=lambda one: (cosines[one[0]] is None, -(cosines[one[0]] or 0)))
    for name, values in ranked:
        printed.add_row(name, *(_estimate_text(values[key]) for key in STATISTICS))
    lines = [
        "below each value: its 95 % interval; below the ceiling: the 95 % range of one more fresh batch",
        f"foreign: effective sample size {foreign['effective_sample_size']:.2f}, truncated "
        f"{foreign['truncated_fraction']:.2f}, KL {foreign['kl/k1']:.2f} (k1) {foreign['kl/k3']:.2f} (k3)",
    ]
    filtered = next((values for name, values in ranked if resolve(ObjectiveConfig(name=name)).filtered), None)
    if filtered is not None:  # one filter serves all F- variants
        kept, sign, rank = ("–" if filtered[key] is None else f"{filtered[key]:.2f}" for key in FILTER_MEASURES)
        lines.append(f"filter: keeps {kept} of the rollouts with Â ≠ 0, signs {sign} and ranks {rank} of the pairs")
    printed.caption = "\n".join(lines)
    return printed


def _estimate_text(estimate: Mapping[str, float | None]) -> str:
    if estimate["value"] is None:
        return "–"
    if estimate["low"] is None:
        return f"{estimate['value']:.2f}"
    return f"{estimate['value']:.2f}\n{estimate['low']:.2f} … {estimate['high']:.2f}"


def probe_bias(
    run: Annotated[Path, typer.Argument(help="A run directory, as runs/demo-seed0.", show_default=False)],
    peer: Annotated[str, typer.Option(help="The learner.", show_default=False)],
    arm: Annotated[str | None, typer.Option(help="Whose rollouts; needed where the run has several arms.")] = None,
    step: Annotated[int, typer.Option(min=0, help="The checkpoint; 0 is the untrained model.")] = 0,
    fresh: Annotated[int, typer.Option(help="Batches of own rollouts to estimate the on-policy direction from.")] = 16,
    objectives: Annotated[
        str | None, typer.Option(metavar="NAME,…", help="Which to compare; by default all six.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the fresh batches.")] = 0,
    alignment: Annotated[
        bool, typer.Option("--alignment", help="Measure how weights depend on the sender's tokenizer instead.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="The JSON file; by default RUN/probe/<arm>-<peer>-<step>.json.")
    ] = None,
) -> None:
    """Measure how far objectives point from on-policy updates.

    Each objective's update on foreign rollouts is compared with updates on fresh rollouts of the peer's own.
    """
    names = [name.strip() for name in objectives.split(",")] if objectives is not None else list(PAPERS)
    if alignment:
        result = cuts.probe_cuts(run, arm, peer, step)
    else:
        with console.status(f"sampling {fresh} fresh batches and comparing {len(names)} objectives"):
            result = probe(run, arm, peer, step, fresh=fresh, objectives=names, seed=seed)
    path = output or run / "probe" / f"{result['arm']}-{peer}-{step}{'-alignment' * alignment}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, result)
    console.print((cuts.table if alignment else table)(result))
    console.print(f"written to {path}")


if __name__ == "__main__":
    commands.run(probe_bias)
