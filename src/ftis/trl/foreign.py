"""The others' rollouts within a trainer: scored by its reward functions, judged by its model, joined to its batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from trl.chat_template_utils import parse_response
from trl.data_utils import is_conversational

from ftis.episodes import EpisodeError, UnplayableError
from ftis.learning import weighed
from ftis.rollouts import Batch, Floats, Prompt, ScoredGroup
from ftis.selection import Chosen, Judged, OwnOld
from ftis.trl.batches import advantages, rows_of, strengths
from ftis.trl.options import DIVISORS
from ftis.trl.rewards import sparing

Ratios = Mapping[int, tuple[Floats, Floats]]
"""log π_old of each own rollout, and TRL's π_old/π_gen, by its ``id``."""


class Foreign:
    """The others' rollouts in each round of an :class:`~ftis.trl.trainer.FTISTrainer`."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self._scoring = trainer, False
        trainer.reward_funcs = [sparing(one, lambda: self._scoring) for one in trainer.reward_funcs]

    def totals(self, rewards_NF: Tensor) -> list[float]:
        """The reward of each rollout [N] by its functions [N, F]; NaN where there is no finite number."""
        weights = self.trainer.reward_weights.to(rewards_NF.device)
        unknown = rewards_NF.isnan().all(dim=1) | rewards_NF.isinf().any(dim=1)
        totals: list[float] = (rewards_NF * weights).nansum(dim=1).double().where(~unknown, math.nan).tolist()
        return totals

    def scored(self, admitted: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        """Admitted groups with this trainer's rewards. Each process computes a part.

        A reward is NaN where a function fails on a completion, or gives no number.
        """
        trainer, stage, member = self.trainer, self.trainer.stage, self.trainer.member
        each = [
            (member.problem(scored.group.item, scored.group.round), text, rollout)
            for scored in admitted
            for text, rollout in zip(scored.completions, scored.group.rollouts, strict=True)
        ]
        if not each:
            return []
        trainer.check_prompts([problem for problem, _, _ in each])
        mine = trainer.ranks.evenly(each)
        problems = [problem for problem, _, _ in mine]
        inputs = trainer.rows(problems)
        prompts, ids = trainer.begun(problems, inputs), [rollout.read_ids.tolist() for _, _, rollout in mine]
        texts, unplayed = list[Any](text for _, text, _ in mine), [False] * len(mine)
        if stage is not None:
            trainer.environments = stage.environments(len(mine))
            for n, ((problem, _, rollout), environment) in enumerate(zip(mine, trainer.environments, strict=True)):
                try:
                    played = stage.finished(environment, problem, rollout)
                except (EpisodeError, UnplayableError):
                    unplayed[n], texts[n] = True, [{"role": "assistant", "content": texts[n]}]
                else:
                    texts[n] = stage.messages(member.prompt_ids(problem.item, problem.round).tolist(), rollout, played)
        elif is_conversational({"prompt": prompts[0]}):
            texts = [[self._message(problem, text, one)] for (problem, text, _), one in zip(mine, ids, strict=True)]
        self._scoring = True
        try:
            rewards_NF = trainer._calculate_rewards(inputs, prompts, texts, ids)
        finally:
            self._scoring = False
        trainer._pending_extra_logs.clear()  # TRL's table of completions has own ones only
        trainer._pending_metrics.clear()
        totals = zip(self.totals(rewards_NF), trainer.ranks.together(unplayed), strict=True)
        rewards = iter([math.nan if no else total for total, no in totals])
        return [replace(one, rewards=tuple(next(rewards) for _ in one.completions)) for one in admitted]

    def _message(self, problem: Prompt, text: str, ids: list[int]) -> dict[str, Any]:
        """A completion as the answer in a conversation: parsed, where TRL parses own ones."""
        tokenizer = self.trainer._tokenizer
        if any(getattr(tokenizer, name, None) for name in ("response_template", "response_schema")):
            prompt_ids = self.trainer.member.prompt_ids(problem.item, problem.round).tolist()
            parsed: dict[str, Any] = parse_response(tokenizer, ids, prefix=prompt_ids)
            return parsed
        return {"role": "assistant", "content": text}

    def judged(self, batch: Batch, own: Ratios, reported: bool) -> Judged:
        """As ``ftis.learning.judge``; each process runs TRL's model on a part of the foreign rollouts with Â ≠ 0, or of
        all if β > 0. ``reported``: the sampler gave log π_gen, and log π_old was computed."""
        trainer = self.trainer
        advantage_N = advantages(batch.reward_N, batch.group_N, trainer.scale_rewards)
        batch = replace(batch, reward_N=np.nan_to_num(batch.reward_N))  # own ones without a reward; records have 0
        rows = np.arange(len(batch)) if trainer.beta else np.flatnonzero(advantage_N.numpy())
        known = {r: own[id(batch.rollouts[r])][0] for r in rows[batch.own_N[rows]].tolist()}
        foreign = rows[~batch.own_N[rows]].tolist()
        if foreign:
            mine = trainer.ranks.evenly(foreign)
            logps = trainer.policy.logps(batch.prompts(mine), batch.completion_ids(mine), drawn=batch.drawn(mine))
            known |= dict(zip(foreign, trainer.ranks.together(logps), strict=False))
        gaps = [np.abs(known[r] - batch.rollouts[r].gen_logp) for r in known if batch.own_N[r]]
        gap = np.concatenate(gaps) if gaps and reported else np.zeros(0, np.float32)
        own_old = OwnOld.RECOMPUTED if reported else OwnOld.SAMPLED
        old_logp = [known[r] for r in rows.tolist()]
        return weighed(Judged(batch, advantage_N, rows, old_logp, None, gap, own_old), trainer.member.objective)

    def joined(
        self, judged: Judged, chosen: Chosen, out: dict[str, Tensor], own: Ratios
    ) -> tuple[dict[str, Tensor], float]:
        """TRL's batch ``out`` of own rollouts as it is, or else a batch of all rollouts that carry gradient.

        TRL divides by this batch's rows, not the round's. Advantages make up for it; the second result is β's factor.
        """
        trainer, batch, masks = self.trainer, judged.batch, self.trainer.mask_truncated_completions
        steps = int(trainer.args.steps_per_generation)
        if batch.own_N.all() and not masks and len(out["prompt_ids"]) % steps == 0:
            return out, 1.0
        ends = [*trainer.policy.end_ids, trainer._tokenizer.pad_token_id]
        cut = [masks and rollout.completion_ids[-1] not in ends for rollout in batch.rollouts]
        masked = set(np.flatnonzero(cut).tolist())
        strength_N = strengths(judged, chosen, trainer.member.objective)
        whole = trainer.entropy_coef or trainer.use_adaptive_entropy or trainer.aux_loss_enabled
        # All these learn from rollouts without Â, too.
        whole = whole or trainer.top_entropy_quantile < 1 or trainer.beta or DIVISORS[trainer.loss_type] == "tokens"
        taken = [row for row in range(len(batch)) if whole or (row not in masked and strength_N[row].any())]
        rows = trainer.ranks.part(np.array(taken, dtype=np.int64), steps)
        tokens_N = [len(rollout) * (row not in masked) for row, rollout in enumerate(batch.rollouts)]
        by_rollouts = DIVISORS[trainer.loss_type] == "rollouts"  # TRL's divisor of its batch over that of the round
        factor = len(rows) * trainer.ranks.size / len(batch) if by_rollouts else 1.0
        strength_N = [strength * np.float32(factor) for strength in strength_N]
        ratios = {row: own[id(batch.rollouts[row])][1] for row in np.flatnonzero(batch.own_N).tolist()}
        device, multiple = trainer.accelerator.device, trainer.pad_to_multiple_of
        dropped = judged.rows[~chosen.kept_R].tolist() if trainer.beta else []  # these have no KL, and still count
        tensors = rows_of(judged, rows, strength_N, masked.union(dropped), ratios, device, multiple)
        if trainer.beta:
            tensors["ref_per_token_logps"] = trainer.policy.ref_logps(tensors)
        if trainer.off_policy_mask_threshold is not None:
            out["sampling_per_token_logps"] = tensors["sampling_per_token_logps"]
        tensors["num_items_in_batch"] = torch.tensor(sum(tokens_N), device=device)
        return {name: tensors[name] for name in out}, factor
