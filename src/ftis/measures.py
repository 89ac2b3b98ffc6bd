"""A round's metrics, from its judged values: docs/metrics.md explains every key."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ftis import metric_keys as keys
from ftis.admission import Admission, Collected
from ftis.config import Recipe
from ftis.learning import Update
from ftis.objectives import Diagnostics
from ftis.rollouts import Prompt, Rollout
from ftis.selection import Chosen, Judged, OwnOld

QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}


class Stopwatch:
    """Seconds per stage of a round."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self.laps: dict[str, float] = {}

    def lap(self, stage: str, besides: float = 0.0) -> None:
        """End a stage, by its key in metrics; ``besides`` are seconds that belong to a stage of another round."""
        now = time.monotonic()
        self.laps[stage], self._last = now - self._last - besides, now

    @property
    def total(self) -> float:
        return sum(self.laps.values())

    def metrics(self) -> dict[str, float]:
        """``step_time``, and the seconds of each stage."""
        return {keys.STEP_TIME: self.total, **self.laps}


@dataclass(frozen=True)
class RoundExchange:
    """The messages of a round's exchange, as they were admitted.

    Attributes:
        sent_bytes: size of this peer's own message.
        admissions: the outcome of each message.
    """

    collected: Collected
    sent_bytes: int
    admissions: Sequence[Admission]


@dataclass(frozen=True)
class RoundRecord:
    """One round of one peer, as it is recorded.

    Attributes:
        metrics: the line in metrics.jsonl; ``metrics["step"]`` counts finished rounds.
        rollouts: the columns of :data:`ftis.records.rollouts.ROLLOUTS`.
    """

    metrics: Mapping[str, Any]
    rollouts: Mapping[str, Any]

    def with_more(self, metrics: Mapping[str, Any]) -> RoundRecord:
        """The record with these metrics, in the place of those of the same key."""
        return replace(self, metrics={**self.metrics, **metrics})


def round_record(
    judged: Judged,
    chosen: Chosen,
    update: Update,
    heard: RoundExchange,
    *,
    recipe: Recipe,
    own: str,
    end_ids: Collection[int],
    prompts: Sequence[Prompt],
    about: Mapping[str, Any],
    about_peers: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> RoundRecord:
    """Compile the record of a round.

    Args:
        recipe: with exactly the peers of this swarm.
        own: the learner's name.
        end_ids: ids that end a completion of the learner.
        about: metrics from elsewhere: finished rounds, learning rate, tokens sampled, seconds.
        about_peers: measures that selections have of each peer.
    """
    metrics = {**about, **own_metrics(judged, update, end_ids, recipe.sampling.stop, recipe.training.num_iterations)}
    if len(recipe.peers) > 1:
        metrics.update(participation(judged, chosen, update, heard, recipe, own, about_peers))
    elif recipe.training.overlap:
        of_own = weights_by_source(judged, chosen, update).get(own, {})
        metrics.update({keys.peer_key(own, measure): value for measure, value in of_own.items()})
    return RoundRecord(metrics, rollout_columns(judged, chosen, prompts))


def own_metrics(
    judged: Judged, update: Update, end_ids: Collection[int], stop: tuple[str, ...] = (), num_iterations: int = 1
) -> dict[str, Any]:
    """Metrics of the learner's own rollouts and optimiser steps."""
    batch = judged.batch
    own = [batch.rollouts[i] for i in np.flatnonzero(batch.own_N)]
    texts = [batch.completions[i] for i in np.flatnonzero(batch.own_N)]
    lengths = np.array([len(r) for r in own])
    ended = [has_ended(rollout, text, end_ids, stop) for rollout, text in zip(own, texts, strict=True)]
    starts = np.unique(batch.group_N, return_index=True)[1]  # a group's rollouts stand together
    lowest, highest = (ufunc.reduceat(batch.reward_N, starts) for ufunc in (np.minimum, np.maximum))
    own_reward = batch.reward_N[batch.own_N]
    metrics: dict[str, Any] = {
        "reward": float(own_reward.mean()),
        "reward_std": float(own_reward.std(ddof=1)) if len(own_reward) > 1 else 0.0,
        keys.ZERO_STD: float(np.mean(lowest == highest)),
        "loss": float(np.mean(update.losses)) if update.losses else 0.0,
        "grad_norm": float(np.mean(update.grad_norms)) if update.grad_norms else 0.0,
        keys.OPTIMIZER_STEPS: len(update.losses),
        "sampled_entropy": float(-np.concatenate([r.gen_logp for r in own]).mean()),
        keys.MEAN_LENGTH: float(lengths.mean()),
        "completions/min_length": int(lengths.min()),
        "completions/max_length": int(lengths.max()),
        keys.CLIPPED_RATIO: float(np.mean(np.logical_not(ended))),
        **_clip_ratios(update.diagnostics, num_iterations * sum(len(r) for r in batch.rollouts)),
        keys.LOGP_RECOMPUTED: judged.own_old == OwnOld.RECOMPUTED,
        keys.LOGP_IN_STEP: judged.own_old == OwnOld.IN_STEP,
    }
    if update.diagnostics is not None and len(update.diagnostics.ref_kl):
        metrics["kl"] = float(update.diagnostics.ref_kl.mean())
    if any(rollout.observed for rollout in batch.rollouts):
        metrics["completions/mean_turns"] = float(np.mean([len(rollout.observed) + 1 for rollout in own]))
        metrics["completions/mean_observed"] = float(np.mean([sum(len(ids) for _, ids in r.observed) for r in own]))
    if len(judged.gap):  # sampler and learner must see one policy
        metrics["sampling/checked_logp_difference/mean"] = float(judged.gap.mean())
        metrics[keys.LOGP_GAP] = float(judged.gap.max())
    return metrics


def has_ended(rollout: Rollout, text: str, end_ids: Collection[int], stop: tuple[str, ...]) -> bool:
    """Whether a completion ends in an end-of-sequence id or a stop string, and not at the longest length."""
    return int(rollout.completion_ids[-1]) in end_ids or text.endswith(stop)


def participation(
    judged: Judged,
    chosen: Chosen,
    update: Update,
    heard: RoundExchange,
    recipe: Recipe,
    own: str,
    about_peers: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> dict[str, Any]:
    """Metrics per peer: rollouts received, admitted, rejected by reason, kept and dropped, and importance weights."""
    batch, collected = judged.batch, heard.collected
    kept_R, signal_R = chosen.kept_R, judged.advantage_R.numpy() != 0
    weights = weights_by_source(judged, chosen, update)
    rejected = [*collected.rejections, *(r for admission in heard.admissions for r in admission.rejections)]
    counts = Counter(batch.source_N.tolist())
    passed_over = Counter(g.peer for admission in heard.admissions for g in admission.passed_over)
    for name, groups in collected.offered_only.items():
        passed_over[name] += groups or recipe.prompts_per_peer  # an offer from before a restart names none
    sources, dropped_R = judged.source_names(), signal_R & ~kept_R
    kept_of = Counter(name for name, kept in zip(sources, kept_R & signal_R, strict=True) if kept)
    reasons = zip(sources, chosen.reason_R, dropped_R, strict=True)
    dropped = Counter((source, reason) for source, reason, is_dropped in reasons if is_dropped)
    zero_N = judged.advantage_N.numpy() == 0
    metrics: dict[str, Any] = {}
    for name in (peer.name for peer in recipe.peers):
        rejections = [r for r in rejected if r.peer == name]
        index = batch.sources.index(name) if name in batch.sources else -1
        late = [data for sender, _, data in collected.late if sender == name]
        received = sum(map(len, late)) + len(collected.messages.get(name, b""))
        of_peer: dict[str, Any] = {
            keys.DELIVERED: name == own or name in collected.messages or name in collected.offered_only,
            "late": len(late),
            keys.ADMITTED: counts.get(index, 0),
            keys.PASSED_OVER: passed_over[name] * recipe.rollouts_per_group,
            "rejected": len(rejections),
            keys.ZERO_ADVANTAGE: int(zero_N[batch.source_N == index].sum()),
            keys.KEPT: float(kept_of[name]),
            "dropped": 0.0,
            "bytes": heard.sent_bytes if name == own else received,
        }
        if name in collected.waited:
            of_peer["waited"] = collected.waited[name]
        if index >= 0:
            of_peer["reward"] = float(batch.reward_N[batch.source_N == index].mean())
        of_peer |= {f"{keys.DROPPED}{reason}": n for (source, reason), n in dropped.items() if source == name}
        of_peer |= {f"{keys.REJECTED}{reason}": n for reason, n in Counter(str(r.reason) for r in rejections).items()}
        for rejection in rejections[:1]:
            of_peer[keys.FIRST_REJECTION] = rejection.detail
        of_peer.update(weights.get(name, {}))
        of_peer.update(about_peers.get(name, {}))
        metrics.update({keys.peer_key(name, measure): value for measure, value in of_peer.items()})
    foreign_R = ~batch.own_N[judged.rows]
    used = int((foreign_R & kept_R & signal_R).sum())
    # A round in which no rollout, own or foreign, carried gradient does not count as one without foreign rollouts.
    nothing_to_learn = bool((~batch.own_N).any()) and not signal_R.any()
    metrics[keys.FOREIGN_USED], metrics[keys.WITHOUT_FOREIGN] = used, used == 0 and not nothing_to_learn
    return metrics


def weights_by_source(judged: Judged, chosen: Chosen, update: Update) -> dict[str, dict[str, float]]:
    """Importance weights, KLs, clipping and dropped rollouts of each source peer with judged rollouts."""
    if judged.diagnostics is None:
        return {}
    batch, dropped_R = judged.batch, ~chosen.kept_R & (judged.advantage_R.numpy() != 0)
    found = by_source(judged.diagnostics, torch.from_numpy(batch.source_N[judged.rows]), batch.sources)
    for name, summary in found.items():
        summary["dropped"] = float(dropped_R[[source == name for source in judged.source_names()]].sum())
    if update.diagnostics is not None:  # clipping depends on π_θ; the rest was fixed before
        source_M = torch.from_numpy(batch.source_N[update.rows]).repeat_interleave(update.diagnostics.length_N)
        for index in source_M.unique().tolist():
            found[batch.sources[index]].update(_clipped(update.diagnostics, source_M == index))
    return found


def rollout_columns(judged: Judged, chosen: Chosen, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """The round's rollouts as the columns of :data:`ftis.records.rollouts.ROLLOUTS`."""
    batch = judged.batch
    kl_R = judged.diagnostics.k1_N.tolist() if judged.diagnostics else []
    return {
        "round": batch.round_N,
        "source": [batch.sources[s] for s in batch.source_N],
        "item": batch.item_N,
        "question": [prompts[item].question for item in batch.item_N],
        "completion": list(batch.completions),
        "reward": batch.reward_N,
        "advantage": judged.advantage_N.numpy(),
        # Null where Â = 0, unless β > 0: the model never runs on these rollouts.
        "kept": judged.spread(chosen.kept_R.tolist(), None),
        "kl_k1": judged.spread(kl_R, None),
        "completion_ids": [r.completion_ids for r in batch.rollouts],
        "observed": [[{"at": at, "ids": ids} for at, ids in r.observed] or None for r in batch.rollouts],
        "gen_logp": [r.gen_logp for r in batch.rollouts],
        "old_logp": judged.spread(judged.old_logp, None),
        "unit": [r.unit for r in batch.rollouts],
        "sent": [None if r.sent is None else vars(r.sent) for r in batch.rollouts],
    }


def by_source(diagnostics: Diagnostics, source_N: Tensor, sources: Sequence[str]) -> dict[str, dict[str, float]]:
    """Summaries per source peer; ``source_N`` [N] indexes ``sources``. A peer without rollouts is left out.

    KLs are means over rollouts; the rest is over tokens. The effective sample size is (Σw)² / (n Σw²) of the n
    untruncated weights, in (0, 1].
    """
    token_source = source_N.repeat_interleave(diagnostics.length_N)
    summaries: dict[str, dict[str, float]] = {}
    for index, name in enumerate(sources):
        rows, tokens = source_N == index, token_source == index
        if not bool(rows.any()):
            continue
        raw, weight = diagnostics.raw_weight[tokens].double(), diagnostics.weight[tokens].double()
        summaries[name] = {
            keys.K1: float(diagnostics.k1_N[rows].double().mean()),
            keys.K3: float(diagnostics.k3_N[rows].double().mean()),
            **_distribution(keys.RATIO, raw),
            **_distribution(keys.WEIGHT, weight),
            "sampling/truncated_fraction": float((raw > weight).double().mean()),
            keys.EFFECTIVE: float(raw.sum() ** 2 / (len(raw) * (raw**2).sum())),
            **_clipped(diagnostics, tokens),
        }
    return summaries


def _clipped(diagnostics: Diagnostics, tokens: Tensor) -> dict[str, float]:
    """Fractions of the masked ``tokens`` whose gradient is clipped."""
    low, high = diagnostics.clipped_low[tokens].double(), diagnostics.clipped_high[tokens].double()
    return {"clip_ratio/low_mean": float(low.mean()), "clip_ratio/high_mean": float(high.mean())}


def _distribution(name: str, values: Tensor) -> dict[str, float]:
    ordered = values.sort().values
    summary = {
        f"{name}/min": float(ordered[0]),
        f"{name}/max": float(ordered[-1]),
        f"{name}/mean": float(values.mean()),
    }
    for label, quantile in QUANTILES.items():  # nearest rank: torch.quantile refuses more than 2^24 values
        summary[f"{name}/{label}"] = float(ordered[math.ceil(quantile * len(ordered)) - 1])
    return summary


def _clip_ratios(diagnostics: Diagnostics | None, tokens: int) -> dict[str, float]:
    """Fractions of all ``tokens`` of a round's steps. Tokens that the model did not run on have no gradient to clip."""
    clipped = (0, 0) if diagnostics is None else (diagnostics.clipped_low.sum(), diagnostics.clipped_high.sum())
    low, high = (float(count) / tokens for count in clipped)
    return {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low + high}
