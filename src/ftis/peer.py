"""One peer: its round, which reads like the paper's algorithm, and the loop around it.

Start with :func:`train_round`.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ftis import checkpoint
from ftis.admission import Admission, Admitter, Terms
from ftis.checkpoint import Cursor
from ftis.codec import VERSION as WIRE_VERSION
from ftis.codec import Header, Message, encode
from ftis.config import PeerConfig, Recipe, RecipeError, agreement, run_id
from ftis.evaluate import evaluate
from ftis.events import Evaluated, PeerFinished, PeerStarted, PeerStopped, RoundEnded, Say
from ftis.exchange import Collected, Exchange, ExchangeError, Stopped
from ftis.objectives import OBJECTIVES, Diagnostics, Objective, group_advantages, order_preserved, policy_loss
from ftis.policy import ModelError, Policy, tokenizer_fingerprint
from ftis.records import Records
from ftis.rewards import Scorer, load_scorer
from ftis.rollouts import Batch, Group, Ints, Prompt, collate, draw_items, pad, share_of, take_turns
from ftis.sampling import Decoding, Sampler, sampler_for
from ftis.tasks import Task, load_task, render_prompt

CHECKED_ROLLOUTS = 8
LOGP_TOLERANCE = 1e-3
"""Own rollouts keep the log-probabilities of their sampler as log π_old where those of a few of them differ by no more
than this from the learner's: their first ratios are then wrong by at most 0.1%."""


def train_round(peer: Peer, round: int) -> dict[str, Any]:
    """One round of one peer, and its metrics. Raises Stopped if asked to stop before anything has changed."""
    clock = Stopwatch()
    own = peer.sample(round)
    scored = [peer.admitter.score_group(group) for group in own]
    clock.lap("sample")

    if peer.should_stop():
        raise Stopped
    wire = peer.recipe.wire  # own rollouts are learned from as sampled, whatever precision the others get
    message = encode(Message(replace(peer.header, round=round), tuple(own)), wire.format, wire.logp)
    peer.exchange.publish(round, message, [group.item for group in own])
    collected = peer.exchange.collect(round, peer.admitter.set_aside(round), peer.unread(round))
    clock.lap("exchange")

    received = [*sorted(collected.messages.items()), *collected.late]
    admissions = peer.within_limit([peer.admitter.admit(name, data, round) for name, data in received])
    admitted = [group for admission in admissions for group in admission.admitted]
    batch = collate([*scored, *admitted], peer.prompt_ids)
    clock.lap("admit")

    start = at_round_start(peer, batch, peer.advantages(batch))
    clock.lap("logp")

    update = learn(peer, batch, start, round)
    clock.lap("update")

    peer.advance(batch, clock.total)
    peer.record_rollouts(round, batch, start)
    return peer.round_metrics(batch, start, update, collected, admissions, len(message), clock)


@dataclass(frozen=True)
class RoundStart:
    """What is fixed before the round's first step.

    Attributes:
        advantage_N: float32 [N].
        rows: which of the N rollouts can carry gradient at all (Â ≠ 0); the others never meet the model.
        old_logp: log π_old of those rows, aligned with ``rows``.
        diagnostics: weights, KLs and the filter's verdict for those rows.
        gap: |log π_θ − log π_gen| of the own tokens that were looked at; none where π_gen was truncated.
        recomputed: whether the learner took the log-probabilities of own rollouts again instead of their sampler's.
    """

    advantage_N: Tensor
    rows: npt.NDArray[np.int64]
    old_logp: list[npt.NDArray[np.float32]]
    diagnostics: Diagnostics | None
    gap: npt.NDArray[np.float32]
    recomputed: bool

    @property
    def kept(self) -> npt.NDArray[np.bool_]:
        """Per entry of ``rows``: whether the filter keeps it."""
        if self.diagnostics is None:
            return np.zeros(0, dtype=bool)
        return self.diagnostics.keep_N.numpy()


def at_round_start(peer: Peer, batch: Batch, advantage_N: Tensor) -> RoundStart:
    """Score the rollouts that can matter under the policy as it is, and decide filter and weights from that."""
    rows = np.flatnonzero(advantage_N.numpy())
    if not len(rows):
        return RoundStart(advantage_N, rows, [], None, np.zeros(0, np.float32), recomputed=False)
    old, gap, recomputed = old_logps(peer, batch, rows)
    old_NT, gen_NT, mask_NT = _padded(old, [batch.rollouts[r].gen_logp for r in rows])
    group_N = torch.from_numpy(batch.group_N[rows])
    _, diagnostics = policy_loss(peer.objective, old_NT, old_NT, gen_NT, advantage_N[rows], mask_NT, group_N)
    return RoundStart(advantage_N, rows, old, diagnostics, gap, recomputed)


def old_logps(
    peer: Peer, batch: Batch, rows: npt.NDArray[np.int64]
) -> tuple[list[npt.NDArray[np.float32]], npt.NDArray[np.float32], bool]:
    """log π_old of ``rows``, and :class:`RoundStart`'s gap and recomputed.

    The learner is the policy that sampled its own rollouts, so their log π_gen are its log π_old, unless sampler and
    learner compute in ways that differ, or the sampler drew from a truncated distribution.
    """
    known: dict[int, npt.NDArray[np.float32]] = {}

    def learner(some: npt.NDArray[np.int64]) -> None:
        completions = [batch.rollouts[r].completion_ids for r in some]
        logps = peer.policy.logps([batch.prompt_ids[r] for r in some], completions, peer.decoding.temperature)
        known.update(zip(some.tolist(), logps, strict=True))

    def gap(some: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        gaps = [np.abs(known[r] - batch.rollouts[r].gen_logp) for r in some.tolist()]
        return np.concatenate(gaps) if gaps else np.zeros(0, np.float32)

    own = rows[peer._is_own(batch)[rows]]
    found, agree = np.zeros(0, np.float32), False
    if len(own) and not peer.decoding.truncated:
        checked = own[np.unique(np.linspace(0, len(own) - 1, CHECKED_ROLLOUTS).astype(np.int64))]
        learner(checked)
        found = gap(checked)
        agree = bool(found.max() <= LOGP_TOLERANCE)
    if agree:
        known.update((r, batch.rollouts[r].gen_logp) for r in own.tolist())
    learner(np.array([r for r in rows.tolist() if r not in known], dtype=np.int64))
    if not agree and not peer.decoding.truncated:
        found = gap(own)
    return [known[r] for r in rows.tolist()], found, bool(len(own)) and not agree


@dataclass(frozen=True)
class Update:
    """The round's optimiser steps.

    Attributes:
        rows: the rollouts run through the model, once per step that held them.
        diagnostics: of those rows under π_θ as it was in their step; None where no step was taken.
    """

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    rows: npt.NDArray[np.int64]
    diagnostics: Diagnostics | None


def learn(peer: Peer, batch: Batch, start: RoundStart, round: int) -> Update:
    """Improve the policy on the round's rollouts: ``num_iterations`` passes of ``steps_per_generation`` steps.

    A step's divisor counts all of its rollouts; only those that carry gradient are run through the model. A step
    in which none does is passed over.
    """
    training = peer.recipe.training
    peer.policy.set_learning_rate(peer.learning_rate(round))
    carries_gradient = set(start.rows[start.kept].tolist())
    losses: list[float] = []
    grad_norms: list[float] = []
    seen: list[tuple[npt.NDArray[np.int64], Diagnostics]] = []
    for iteration in range(training.num_iterations):
        shuffled = np.random.default_rng(peer.seed(round, f"steps-{iteration}")).permutation(len(batch))
        for part in np.array_split(shuffled, training.steps_per_generation):
            rows = np.array(sorted(carries_gradient.intersection(part.tolist())), dtype=np.int64)
            if not len(rows):
                continue
            loss = StepLoss(peer, batch, start, rows, divisor=len(part))
            completions = [batch.rollouts[r].completion_ids for r in rows]
            prompts = [batch.prompt_ids[r] for r in rows]
            grad_norms.append(peer.policy.step(prompts, completions, peer.decoding.temperature, loss))
            losses.append(loss.value)
            seen += loss.seen
    return Update(
        losses=tuple(losses),
        grad_norms=tuple(grad_norms),
        rows=np.concatenate([rows for rows, _ in seen]) if seen else np.zeros(0, dtype=np.int64),
        diagnostics=Diagnostics.concat([diagnostics for _, diagnostics in seen]) if seen else None,
    )


class StepLoss:
    """The loss of one optimiser step, called once per micro-batch with the rows of the step it holds."""

    def __init__(self, peer: Peer, batch: Batch, start: RoundStart, rows: npt.NDArray[np.int64], divisor: int) -> None:
        self.peer, self.batch, self.start, self.rows, self.divisor = peer, batch, start, rows, divisor
        self.old_of_row = dict(zip(start.rows.tolist(), start.old_logp, strict=True))
        self.value = 0.0
        self.seen: list[tuple[npt.NDArray[np.int64], Diagnostics]] = []

    def __call__(self, logp_nT: Tensor, mask_nT: Tensor, micro: npt.NDArray[np.int64]) -> Tensor:
        of_batch = self.rows[micro]
        old_nT, gen_nT, _ = _padded(
            [self.old_of_row[r] for r in of_batch.tolist()], [self.batch.rollouts[r].gen_logp for r in of_batch]
        )
        device = logp_nT.device
        loss, diagnostics = policy_loss(
            self.peer.objective,
            logp_nT,
            old_nT.to(device),
            gen_nT.to(device),
            self.start.advantage_N[of_batch].to(device),
            mask_nT,
            torch.from_numpy(self.batch.group_N[of_batch]).to(device),
            divisor=self.divisor,
        )
        self.value += float(loss.detach())
        self.seen.append((of_batch, diagnostics))
        return loss


@dataclass
class Peer:
    """One participant: its model, its view of the task, and its ends of the exchange and the records.

    ``recipe`` lists exactly the peers of this swarm: only this one when it trains alone.
    """

    config: PeerConfig
    recipe: Recipe
    policy: Policy
    sampler: Sampler
    task: Task
    ood: tuple[Task, ...]
    scorers: Mapping[str, Scorer]
    admitter: Admitter
    header: Header
    objective: Objective
    exchange: Exchange
    records: Records
    should_stop: Callable[[], bool] = lambda: False
    cursor: Cursor = field(default_factory=Cursor)

    def __post_init__(self) -> None:
        self.decoding = Decoding.of(self.recipe.sampling)
        self.prompt_ids = _PromptIds(self.task.train, self)

    def seed(self, round: int, purpose: str) -> int:
        return seed_of(self.recipe, self.config.name, round, purpose)

    def learning_rate(self, round: int) -> float:
        """The round's learning rate under the peer's schedule."""
        if self.config.lr_scheduler_type == "constant":
            return self.config.learning_rate
        return self.config.learning_rate * (1 - round / self.recipe.training.rounds)

    def unread(self, round: int) -> frozenset[str]:
        """The peers of whose rollouts none is learned from in the round."""
        turns = turns_of(self.recipe, self.config.name, round)
        return frozenset(p.name for p in self.recipe.peers if p.name != self.config.name and p.name not in turns)

    def within_limit(self, admissions: Sequence[Admission]) -> list[Admission]:
        """The same with no more groups admitted than ``max_foreign_rollouts`` allows: late ones take what is left."""
        limit = self.recipe.training.max_foreign_rollouts
        room = limit // self.recipe.rollouts_per_group if limit else sum(len(a.admitted) for a in admissions)
        kept = []
        for admission in admissions:
            inside, over = admission.admitted[:room], admission.admitted[room:]
            room -= len(inside)
            passed_over = (*admission.passed_over, *(scored.group for scored in over))
            kept.append(replace(admission, admitted=inside, passed_over=passed_over))
        return kept

    def sample(self, round: int) -> list[Group]:
        """This peer's own groups for the round."""
        items = sorted(share(self.recipe, len(self.task.train), self.config.name, round))
        return self.sample_items(items, self.recipe.rollouts_per_group, round, "sample")

    def sample_items(self, items: Sequence[int], repeats: int, round: int, purpose: str) -> list[Group]:
        """A group of ``repeats`` rollouts for each of ``items``; ``purpose`` seeds the draw."""
        ids = [self.prompt_ids[item] for item in items]
        room = getattr(self.policy.model.config, "max_position_embeddings", None)
        longest = max(len(i) for i in ids) + self.decoding.max_completion_length
        if room is not None and longest > room:
            raise ModelError(
                f"peer {self.config.name!r}: a prompt with its completion may take {longest} tokens, the model has "
                f"{room} positions: lower sampling.max_completion_length (now {self.decoding.max_completion_length})"
            )
        batch_size = self.recipe.sampling.batch_size
        seed = self.seed(round, purpose)
        groups = self.sampler(self.policy, ids, repeats, self.decoding, seed, batch_size)
        return [Group(self.config.name, round, item, group) for item, group in zip(items, groups, strict=True)]

    def advantages(self, batch: Batch) -> Tensor:
        """Â of the round's rollouts: float32 [N]."""
        reward_N, group_N = torch.from_numpy(batch.reward_N), torch.from_numpy(batch.group_N)
        return group_advantages(reward_N, group_N, self.recipe.training.scale_rewards).float()

    def render(self, prompt: Prompt) -> Ints:
        return render_prompt(prompt, self.recipe.prompt, self.policy.tokenizer)

    def evaluate(self) -> dict[str, float]:
        """Greedy pass@1 on validation and on every out-of-distribution task, recorded; accuracy by split."""
        accuracies: dict[str, float] = {}
        for split, task in [("validation", self.task), *self._ood_splits()]:
            problems = task.validation
            began = time.monotonic()
            evaluation = evaluate(
                self.policy,
                self.sampler,
                problems,
                [self.render(p) for p in problems],
                self.scorers[task.name],
                self.decoding.max_completion_length,
                self.recipe.sampling.batch_size,
            )
            summary = {
                "step": self.cursor.step,
                "split": split,
                "accuracy": evaluation.accuracy,
                "problems": len(problems),
                "mean_length": evaluation.mean_length,
                "seconds": time.monotonic() - began,
            }
            self.records.evaluation(summary, [vars(answered) for answered in evaluation.problems])
            accuracies[split] = evaluation.accuracy
        return accuracies

    def _ood_splits(self) -> list[tuple[str, Task]]:
        """Each out-of-distribution task under a name fit for files: ood-<task>, numbered where one occurs twice."""
        names = [f"ood-{task.name.replace(':', '-')}" for task in self.ood]
        return [
            (name if names.count(name) == 1 else f"{name}-{names[: i + 1].count(name)}", task)
            for i, (name, task) in enumerate(zip(names, self.ood, strict=True))
        ]

    def advance(self, batch: Batch, seconds: float) -> None:
        """Move the cursor past a finished round."""
        own = self._is_own(batch)
        sampled = sum(len(r) for r, mine in zip(batch.rollouts, own, strict=True) if mine)
        old = self.cursor
        self.cursor = Cursor(old.step + 1, old.seconds + seconds, old.tokens_sampled + sampled)

    def _foreign(self, batch: Batch, start: RoundStart) -> tuple[int, bool]:
        """How many foreign rollouts the round learned from, and whether it was a round without foreign work.

        Used are those with Â ≠ 0 that the filter kept. Where none is, the round still does not count as one without
        if foreign rollouts were there and not even own ones carried gradient: nobody had anything to teach.
        """
        foreign = ~self._is_own(batch)
        used = int((foreign[start.rows] & start.kept).sum())
        nothing_to_learn = bool(foreign.any()) and not len(start.rows)
        return used, len(self.recipe.peers) > 1 and used == 0 and not nothing_to_learn

    def record_rollouts(self, round: int, batch: Batch, start: RoundStart) -> None:
        if not self.recipe.training.record_rollouts:
            return
        position = {row: i for i, row in enumerate(start.rows.tolist())}
        kept, kl = start.kept, start.diagnostics.k1_N.tolist() if start.diagnostics else []
        rows = range(len(batch))
        self.records.rollouts(
            round,
            {
                "round": batch.round_N,
                "source": [batch.sources[s] for s in batch.source_N],
                "item": batch.item_N,
                "question": [self.task.train[item].question for item in batch.item_N],
                "completion": list(batch.completions),
                "reward": batch.reward_N,
                "advantage": start.advantage_N.numpy(),
                # Null where Â = 0: those rollouts are never scored by the learner.
                "kept": [bool(kept[position[r]]) if r in position else None for r in rows],
                "kl_k1": [kl[position[r]] if r in position else None for r in rows],
                "completion_ids": [r.completion_ids for r in batch.rollouts],
                "gen_logp": [r.gen_logp for r in batch.rollouts],
                "old_logp": [start.old_logp[position[r]] if r in position else None for r in rows],
            },
        )

    def round_metrics(
        self,
        batch: Batch,
        start: RoundStart,
        update: Update,
        collected: Collected,
        admissions: Sequence[Admission],
        bytes_sent: int,
        clock: Stopwatch,
    ) -> dict[str, Any]:
        """The round's line in metrics.jsonl; docs/metrics.md explains every key."""
        own = self._is_own(batch)
        own_rollouts = [r for r, mine in zip(batch.rollouts, own, strict=True) if mine]
        lengths = np.array([len(r) for r in own_rollouts])
        ended = np.array([int(r.completion_ids[-1]) in self.policy.end_ids for r in own_rollouts])
        groups = [batch.reward_N[batch.group_N == g] for g in np.unique(batch.group_N)]
        stds = np.array([g.std() for g in groups])
        metrics: dict[str, Any] = {
            "step": self.cursor.step,
            "reward": float(batch.reward_N[own].mean()),
            "reward_std": float(stds.mean()),
            "frac_reward_zero_std": float((stds == 0).mean()),
            "loss": float(np.mean(update.losses)) if update.losses else 0.0,
            "grad_norm": float(np.mean(update.grad_norms)) if update.grad_norms else 0.0,
            "optimizer_steps": len(update.losses),
            "learning_rate": self.learning_rate(self.cursor.step - 1),
            "entropy": float(-np.concatenate([r.gen_logp for r in own_rollouts]).mean()),
            "completions/mean_length": float(lengths.mean()),
            "completions/min_length": int(lengths.min()),
            "completions/max_length": int(lengths.max()),
            "completions/clipped_ratio": float((~ended).mean()),
            **_clip_ratios(update.diagnostics),
            "num_tokens": self.cursor.tokens_sampled,
            "step_time": clock.total,
            **{f"time/{name}": seconds for name, seconds in clock.laps.items()},
        }
        metrics["sampling/logp_recomputed"] = start.recomputed
        if len(start.gap):  # sampler and learner must see one policy
            metrics["sampling/sampling_logp_difference/mean"] = float(start.gap.mean())
            metrics["sampling/sampling_logp_difference/max"] = float(start.gap.max())
        metrics.update(self._participation(batch, start, update, collected, admissions, bytes_sent))
        return metrics

    def _participation(
        self,
        batch: Batch,
        start: RoundStart,
        update: Update,
        collected: Collected,
        admissions: Sequence[Admission],
        bytes_sent: int,
    ) -> dict[str, Any]:
        """Per peer: what came, what of it was admitted, rejected and why, kept, dropped, and with which weights."""
        if len(self.recipe.peers) == 1:
            return {}
        summaries: dict[str, dict[str, float]] = {}
        if start.diagnostics is not None:
            sources = torch.from_numpy(batch.source_N[start.rows])
            summaries = start.diagnostics.by_source(sources, batch.sources)
        if update.diagnostics is not None:  # clipping happens as the policy moves, the rest is fixed before
            sources = torch.from_numpy(batch.source_N[update.rows])
            for name, summary in update.diagnostics.by_source(sources, batch.sources).items():
                summaries[name].update({k: v for k, v in summary.items() if k.startswith("clip_ratio/")})
        rejected = [*collected.rejections, *(r for admission in admissions for r in admission.rejections)]
        counts = Counter(batch.source_N.tolist())
        passed_over = Counter(g.peer for admission in admissions for g in admission.passed_over)
        for name in collected.unread:
            passed_over[name] += len(share(self.recipe, len(self.task.train), name, self.cursor.step - 1))
        zero_N = start.advantage_N.numpy() == 0
        keep_N = torch.ones(len(batch), dtype=torch.bool)  # what carries no gradient meets no filter
        keep_N[torch.from_numpy(start.rows)] = torch.from_numpy(start.kept)
        metrics: dict[str, Any] = {}
        for peer in self.recipe.peers:
            name, key = peer.name, f"peer/{peer.name}"
            rejections = [r for r in rejected if r.peer == name]
            index = batch.sources.index(name) if name in batch.sources else -1
            late = [data for sender, data in collected.late if sender == name]
            received = sum(map(len, late)) + len(collected.messages.get(name, b""))
            heard = name in collected.messages or name in collected.unread
            metrics[f"{key}/delivered"] = name == self.config.name or heard
            metrics[f"{key}/late"] = len(late)
            metrics[f"{key}/admitted"] = counts.get(index, 0)
            metrics[f"{key}/passed_over"] = passed_over[name] * self.recipe.rollouts_per_group
            metrics[f"{key}/rejected"] = len(rejections)
            metrics[f"{key}/zero_advantage"] = int(zero_N[batch.source_N == index].sum())
            metrics[f"{key}/kept"], metrics[f"{key}/dropped"] = 0.0, 0.0
            metrics[f"{key}/bytes"] = bytes_sent if name == self.config.name else received
            if index >= 0:
                rows = batch.source_N == index
                metrics[f"{key}/reward"] = float(batch.reward_N[rows].mean())
                order = order_preserved(start.advantage_N[rows], keep_N[rows], torch.from_numpy(batch.group_N[rows]))
                if order.pairs:
                    metrics[f"{key}/advantage_sign_preserved"] = order.sign / order.pairs
                    metrics[f"{key}/advantage_rank_preserved"] = order.rank / order.pairs
            for reason, count in Counter(str(r.reason) for r in rejections).items():
                metrics[f"{key}/rejected/{reason}"] = count
            for rejection in rejections[:1]:
                metrics[f"{key}/first_rejection"] = rejection.detail
            for measure, value in summaries.get(name, {}).items():
                if measure not in ("rollouts", "zero_advantage"):
                    metrics[f"{key}/{measure}"] = value
        metrics["foreign_used"], metrics["without_foreign"] = self._foreign(batch, start)
        return metrics

    def _is_own(self, batch: Batch) -> npt.NDArray[np.bool_]:
        return np.array([batch.sources[s] == self.config.name for s in batch.source_N], dtype=bool)


def _clip_ratios(diagnostics: Diagnostics | None) -> dict[str, float]:
    if diagnostics is None:
        return {"clip_ratio/low_mean": 0.0, "clip_ratio/high_mean": 0.0}
    low, high = diagnostics.clipped_low.double().mean(), diagnostics.clipped_high.double().mean()
    return {"clip_ratio/low_mean": float(low), "clip_ratio/high_mean": float(high)}


class _PromptIds(dict[int, Ints]):
    """Token ids of training prompts, rendered once when first asked for."""

    def __init__(self, prompts: Sequence[Prompt], peer: Peer) -> None:
        super().__init__()
        self._prompts, self._peer = prompts, peer

    def __missing__(self, item: int) -> Ints:
        self[item] = self._peer.render(self._prompts[item])
        return self[item]


class Stopwatch:
    """Seconds per stage of a round."""

    def __init__(self) -> None:
        self._began = self._last = time.monotonic()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.laps[name], self._last = now - self._last, now

    @property
    def total(self) -> float:
        return self._last - self._began


def seed_of(recipe: Recipe, peer: str, round: int, purpose: str) -> int:
    """A seed for one use in one round: nothing random depends on what was drawn before it."""
    text = f"{recipe.seed}/{peer}/{round}/{purpose}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")


def share(recipe: Recipe, n_items: int, peer: str, round: int) -> list[int]:
    """The prompts that ``peer`` samples in ``round``: its slice of the round's, or all of them in horizontal mode."""
    count = recipe.training.prompts_per_round
    if count > n_items:
        raise RecipeError(
            f"training.prompts_per_round = {count}, but the task has only {n_items} training problems: lower it or "
            f"raise task.train_size"
        )
    items = draw_items(n_items, count, round, recipe.seed)
    if recipe.training.mode == "horizontal":
        return items
    names = [p.name for p in recipe.peers]
    return share_of(items, names.index(peer), len(names))


def turns_of(recipe: Recipe, own: str, round: int) -> dict[str, int]:
    """How many groups ``own`` learns from of each other peer in ``round``; who is not there is not read.

    In turn: over the rounds every peer is read equally often. The senders have no say in it.
    """
    others = [p.name for p in recipe.peers if p.name != own]
    limit = recipe.training.max_foreign_rollouts
    if not limit or not others:
        return dict.fromkeys(others, recipe.training.prompts_per_round)
    return take_turns(others, limit // recipe.rollouts_per_group, round, seed_of(recipe, own, 0, "turns"))


def chosen(recipe: Recipe, n_items: int, own: str, peer: str, round: int) -> list[int]:
    """The prompts of ``peer``'s share of ``round`` that ``own`` learns from."""
    items, count = share(recipe, n_items, peer, round), turns_of(recipe, own, round).get(peer, 0)
    if count >= len(items):
        return items
    rng = np.random.default_rng(seed_of(recipe, own, round, f"chosen-{peer}"))
    return [items[i] for i in rng.choice(len(items), count, replace=False)]


def resolve_objective(recipe: Recipe) -> Objective:
    return replace(OBJECTIVES[recipe.objective.name], **recipe.objective.model_dump(exclude={"name"}))


def load_peer(
    recipe: Recipe,
    name: str,
    directory: Path,
    exchange: Exchange,
    *,
    model_path: str | None = None,
    resume_step: int = 0,
    should_stop: Callable[[], bool] = lambda: False,
    records: Records | None = None,
    strangers: bool = False,
) -> Peer:
    """Everything a peer needs for its loop, from the recipe.

    Args:
        recipe: with exactly the peers of this swarm.
        directory: where its records and checkpoints go.
        model_path: where the model is, if not at the recipe's ``model`` (a starter made on the spot).
        resume_step: go on from ``checkpoint-<resume_step>``; 0 starts from the model.
        strangers: the others are on the network: they may be late, and are held to ``[network]``'s limits.
    """
    config = recipe.peer(name)
    if resume_step:
        policy, cursor = checkpoint.load(directory, resume_step, config, model_path or config.model)
    else:
        with torch.random.fork_rng(devices=[]):  # an adapter's first weights are drawn from this generator
            torch.default_generator.manual_seed(seed_of(recipe, name, 0, "adapter"))
            policy, cursor = Policy.load(config, model_path), Cursor()
    task, ood = load_task(recipe.task), tuple(load_task(o) for o in recipe.ood)
    scorers = {t.name: load_scorer(recipe.reward, recipe.prompt, t.answer_kind) for t in (task, *ood)}
    fingerprint = tokenizer_fingerprint(policy.tokenizer)
    run = run_id(agreement(recipe, task.digest, WIRE_VERSION))
    terms = Terms(
        run=run,
        tokenizer=fingerprint,
        temperature=recipe.sampling.temperature,
        vocab_size=policy.vocab_size,
        end_ids=frozenset({policy.tokenizer.eos_token_id}),
        group_size=recipe.rollouts_per_group,
        max_completion_length=recipe.sampling.max_completion_length,
        prompts=task.train,
        share=lambda peer, round: share(recipe, len(task.train), peer, round),
        roster=frozenset(p.name for p in recipe.peers),
    )
    if recipe.training.max_foreign_rollouts:
        terms = replace(terms, chosen=lambda peer, round: chosen(recipe, len(task.train), name, peer, round))
    if strangers:
        network = recipe.network
        terms = replace(
            terms,
            max_staleness=network.max_staleness,
            max_rejections=network.max_rejections,
            set_aside_rounds=network.set_aside_rounds,
            max_seconds=network.admission_seconds,
        )
    sampling = recipe.sampling
    return Peer(
        config=config,
        recipe=recipe,
        policy=policy,
        sampler=sampler_for(policy, sampling.sampler),
        task=task,
        ood=ood,
        scorers=scorers,
        admitter=Admitter(terms, scorers[task.name], policy.detokenize),
        header=Header(run, 0, name, fingerprint, sampling.temperature, sampling.top_k, sampling.top_p),
        objective=resolve_objective(recipe),
        exchange=exchange,
        records=records or Records(directory),
        should_stop=should_stop,
        cursor=cursor,
    )


def run_peer(peer: Peer, directory: Path, say: Say) -> None:
    """Train from the cursor to the recipe's last round: evaluate, train, record, checkpoint.

    Asked to stop, it saves the rounds it has finished and returns; the run can then be resumed.
    """
    training = peer.recipe.training
    peer.records.cut_back_to(peer.cursor.step)
    say(PeerStarted(peer.cursor.step))
    if peer.cursor.step == 0:
        say(Evaluated(0, peer.evaluate()))
    while peer.cursor.step < training.rounds:
        try:
            if peer.should_stop():
                raise Stopped
            round = peer.exchange.catch_up(peer.cursor.step)
            peer.cursor = replace(peer.cursor, step=round)  # later where the swarm went on without this peer
            metrics = train_round(peer, round)
        except (Stopped, ExchangeError) as reason:  # the round has changed nothing yet
            if peer.cursor.step and peer.cursor.step not in checkpoint.steps(directory):
                checkpoint.save(directory, peer.policy, peer.cursor, training.save_total_limit)
            if isinstance(reason, ExchangeError):
                raise
            say(PeerStopped(peer.cursor.step))
            return
        peer.records.metrics(metrics)
        step, last = peer.cursor.step, peer.cursor.step == training.rounds
        say(RoundEnded(metrics))
        if last or (training.eval_every and step % training.eval_every == 0):
            say(Evaluated(step, peer.evaluate()))
        if last or step % training.save_every == 0:
            checkpoint.save(directory, peer.policy, peer.cursor, training.save_total_limit)
    say(PeerFinished(peer.cursor.step))


def _padded(
    old: Sequence[npt.NDArray[np.float32]], gen: Sequence[npt.NDArray[np.float32]]
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows as [N, T] tensors of old_logp and gen_logp with their mask."""
    lengths = np.array([len(row) for row in gen])
    mask = np.arange(lengths.max())[None, :] < lengths[:, None]
    return torch.from_numpy(pad(old)), torch.from_numpy(pad(gen)), torch.from_numpy(mask)
