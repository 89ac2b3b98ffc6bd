"""The two stages of a round that run the model on completions: judging a batch, and learning from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ftis.objectives import Diagnostics, Objective, StepSize, policy_loss
from ftis.policy import Policy
from ftis.rollouts import Batch, Floats, Rows, pad
from ftis.sampling import Decoding
from ftis.selection import Chosen, Judged, OwnOld

CHECKED_ROLLOUTS = 8
LOGP_TOLERANCE = 1e-3
"""The sampler's log-probabilities of own rollouts serve as log π_old if those of ``CHECKED_ROLLOUTS`` rollouts differ
from the learner's by at most this, in nats. The first ratios are then off by at most 0.1%."""
ROUNDING = 0.01
"""Sampler and learner in bfloat16 count as one policy in two arithmetics up to this KL a token: the mean of d²/2, with
d the difference in nats. Selections then see own rollouts as if d were 0."""


def judge(
    batch: Batch,
    advantage_N: Tensor,
    policy: Policy,
    decoding: Decoding,
    objective: Objective,
    steps: int,
    on_policy: bool = True,
) -> Judged:
    """Compute log π_old of the rollouts that can change the gradient, and from it their weights and KLs.

    With β = 0 these are the rollouts with Â ≠ 0, and the model never runs on others. With β > 0 they are all rollouts.

    Args:
        steps: the round's optimiser steps. A single one can compute log π_old itself, since π_θ is π_old then.
        on_policy: whether own rollouts were sampled by these weights. If not, they are judged as foreign ones are.
    """
    rows = np.flatnonzero(advantage_N.numpy()) if not objective.beta else np.arange(len(batch))
    old_logp, gap, own_old = old_logps(batch, rows, policy, decoding, steps, on_policy)
    return weighed(Judged(batch, advantage_N, rows, old_logp, None, gap, own_old), objective)


def weighed(judged: Judged, objective: Objective) -> Judged:
    """``judged`` with the weights and KLs that follow from its log π_old, if it has rows."""
    if not len(judged.rows):
        return judged
    known = known_tensors(judged.batch, judged.rows, judged.old_logp)
    _, diagnostics = policy_loss(objective, known["old_logp_NT"], advantage_N=judged.advantage_R, **known)
    return replace(judged, diagnostics=diagnostics)


def old_logps(
    batch: Batch, rows: Rows, policy: Policy, decoding: Decoding, steps: int, on_policy: bool
) -> tuple[list[Floats], Floats, OwnOld]:
    """log π_old of ``rows``, and the gap and own_old of :class:`~ftis.selection.Judged`.

    The learner sampled its own rollouts, so their log π_gen is log π_old, unless the weights have moved, the sampler
    computes differently or its distribution is truncated.
    """
    known: dict[int, Floats] = {}

    def score(some: Rows) -> None:
        logps = policy.logps(batch.prompts(some), batch.completion_ids(some), decoding.temperature, batch.drawn(some))
        known.update(zip(some.tolist(), logps, strict=True))

    def gap_of(some: Rows) -> Floats:
        return np.concatenate([np.abs(known[r] - batch.rollouts[r].gen_logp) for r in some.tolist()])

    own = rows[batch.own_N[rows]]
    gap, own_old = np.zeros(0, np.float32), OwnOld.RECOMPUTED if len(own) else OwnOld.SAMPLED
    comparable = on_policy and not decoding.truncated
    if len(own) and comparable:
        checked = own[np.unique(np.linspace(0, len(own) - 1, CHECKED_ROLLOUTS).astype(np.int64))]
        score(checked)
        gap = gap_of(checked)
        if gap.max() <= LOGP_TOLERANCE:
            own_old = OwnOld.SAMPLED
        elif steps == 1 and policy.compute_dtype != torch.float32 and (gap**2).mean() / 2 <= ROUNDING:
            own_old = OwnOld.IN_STEP
    if own_old != OwnOld.RECOMPUTED:
        known.update((r, batch.rollouts[r].gen_logp) for r in own.tolist())
    score(np.array([r for r in rows.tolist() if r not in known], dtype=np.int64))
    if own_old == OwnOld.RECOMPUTED and comparable:
        gap = gap_of(own)
    return [known[r] for r in rows.tolist()], gap, own_old


@dataclass(frozen=True)
class Update:
    """The round's optimiser steps.

    Attributes:
        losses, grad_norms: of each step; a norm is before clipping.
        rows: the rollouts that the model ran on, once per step that held them.
        diagnostics: of these rows under their step's π_θ; None if no step was taken.
    """

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    rows: Rows
    diagnostics: Diagnostics | None

    @classmethod
    def of(cls, losses: Sequence[float], norms: Sequence[float], seen: Sequence[tuple[Rows, Diagnostics]]) -> Update:
        """From the rows and diagnostics of each micro-batch."""
        rows = np.concatenate([rows for rows, _ in seen]) if seen else np.zeros(0, dtype=np.int64)
        diagnostics = Diagnostics.concat([diagnostics for _, diagnostics in seen]) if seen else None
        return cls(tuple(losses), tuple(norms), rows, diagnostics)


def learn(
    policy: Policy,
    judged: Judged,
    chosen: Chosen,
    objective: Objective,
    decoding: Decoding,
    minibatches: Sequence[Rows],
    reference: Callable[..., list[Floats]] | None = None,
) -> tuple[Update, Judged]:
    """Take one optimiser step for each of ``minibatches``, which hold indices into the batch.

    A step's size counts all of its rollouts. The model runs only on the rollouts that carry gradient, and a step
    without such rollouts is skipped. The returned ``judged`` has log π_old of own rollouts too, if the step had to
    compute it. With β > 0, ``reference`` is :meth:`Policy.logps` of the reference model.
    """
    kept, batch = judged.rows[chosen.kept_R], judged.batch
    if reference is not None:
        found = reference(batch.prompts(kept), batch.completion_ids(kept), decoding.temperature, batch.drawn(kept))
        judged = replace(judged, ref_logp=dict(zip(kept.tolist(), found, strict=True)))
    losses: list[float] = []
    grad_norms: list[float] = []
    seen: list[tuple[Rows, Diagnostics]] = []
    for minibatch in minibatches:
        rows = np.intersect1d(kept, minibatch)
        if not len(rows):
            continue
        loss = StepLoss(judged, chosen, objective, rows, step_size(batch, minibatch, decoding))
        prompts, completions = batch.prompts(rows), batch.completion_ids(rows)
        grad_norms.append(policy.step(prompts, completions, decoding.temperature, loss, batch.drawn(rows)))
        losses.append(loss.value)
        seen += loss.seen
        if judged.own_old == OwnOld.IN_STEP:
            judged = weighed(replace(judged, old_logp=[loss.old_logp_N[r] for r in judged.rows.tolist()]), objective)
    return Update.of(losses, grad_norms, seen), judged


def step_size(batch: Batch, minibatch: Rows, decoding: Decoding) -> StepSize:
    """The size of the optimiser step on all of ``minibatch``, indices into the batch."""
    tokens = sum(len(batch.rollouts[r]) for r in minibatch.tolist())
    return StepSize(len(minibatch), tokens, decoding.max_completion_length)


class StepLoss:
    """The loss of one optimiser step, called once per micro-batch."""

    def __init__(self, judged: Judged, chosen: Chosen, objective: Objective, rows: Rows, step: StepSize) -> None:
        self.judged, self.objective, self.rows, self.step = judged, objective, rows, step
        self.old_logp_N = judged.spread(judged.old_logp, np.zeros(0, np.float32))
        self.share_N = torch.tensor(judged.spread(chosen.share_R.tolist(), 0.0))
        self.value = 0.0
        self.seen: list[tuple[Rows, Diagnostics]] = []

    def __call__(self, logp_nT: Tensor, mask_nT: Tensor, micro: Rows) -> Tensor:
        rows, batch = self.rows[micro], self.judged.batch
        if self.judged.own_old == OwnOld.IN_STEP:
            for i in np.flatnonzero(batch.own_N[rows]):
                self.old_logp_N[rows[i]] = logp_nT[i, : len(batch.rollouts[rows[i]])].detach().cpu().numpy()
        known = known_tensors(batch, rows, [self.old_logp_N[r] for r in rows.tolist()])
        known |= {"advantage_N": self.judged.advantage_N[rows], "share_N": self.share_N[rows]}
        if (ref := self.judged.ref_logp) is not None:
            known["ref_logp_NT"] = torch.from_numpy(pad([ref[r] for r in rows.tolist()]))
        on_device = {name: tensor.to(logp_nT.device) for name, tensor in known.items()}
        loss, diagnostics = policy_loss(self.objective, logp_nT, **on_device, step=self.step)
        self.value += float(loss.detach())
        self.seen.append((rows, Diagnostics(**{name: found.cpu() for name, found in vars(diagnostics).items()})))
        return loss


def known_tensors(batch: Batch, rows: Rows, old_logp: Sequence[Floats]) -> dict[str, Any]:
    """The arguments of :func:`~ftis.objectives.policy_loss` that describe rollouts, by name.

    ``unit_NT`` is left out if each token is a unit of its own.
    """
    rollouts = [batch.rollouts[r] for r in rows]
    lengths = np.array([len(rollout) for rollout in rollouts])
    known = {
        "old_logp_NT": pad(old_logp),
        "gen_logp_NU": pad([rollout.gen_logp for rollout in rollouts]),
        "mask_NT": np.arange(lengths.max())[None, :] < lengths[:, None],
        "own_N": batch.own_N[rows],
    }
    if any(rollout.unit is not None for rollout in rollouts):
        known["unit_NT"] = pad([np.arange(len(r)) if r.unit is None else r.unit.astype(np.int64) for r in rollouts])
    return {name: torch.from_numpy(array) for name, array in known.items()}
