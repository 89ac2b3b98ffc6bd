"""An engine with weights of its own that needs nothing else: a second policy. It can be told to go wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ftis.engines.agreement import Rows, plain_logps
from ftis.engines.builtin import builtin_sampler
from ftis.engines.handover import Completion, Copied, Engine
from ftis.policy import Policy
from ftis.rollouts import MIN_LOGP, Floats, Ints
from ftis.sampling import Decoding


@dataclass
class Twin(Engine):
    """Samples with the built-in sampler.

    Attributes:
        deaf: takes no new weights.
        misses: takes all but parameters with this in their names.
        draws: replaces these fields of what it is asked to draw.
        reports: replaces these fields in the distribution whose log-probabilities it reports.
        scored: how many rows it has scored.
    """

    policy: Policy
    dtype: torch.dtype = torch.float32
    name: str = "the twin"
    remedy: str = "Mend the twin"
    deaf: bool = False
    misses: str = "no parameter at all"
    draws: dict[str, Any] = field(default_factory=dict)
    reports: dict[str, Any] = field(default_factory=dict)
    scored: int = 0
    closed: bool = False

    def complete(
        self, prompt_ids: Sequence[Ints], repeats: int, decoding: Decoding, seeds: Sequence[int], ends: Sequence[int]
    ) -> list[list[Completion]]:
        assert list(ends) == sorted(self.policy.end_ids)
        drawn = replace(decoding, **self.draws)
        reported = replace(drawn, **self.reports)
        groups = []
        for prompt, seed in zip(prompt_ids, seeds, strict=True):
            (group,) = builtin_sampler(self.policy, [prompt], repeats, drawn, seed)
            logps = [rollout.gen_logp for rollout in group]
            if self.reports:
                rows = [Rows([prompt], [rollout.completion_ids]) for rollout in group]
                logps = [plain_logps(self.policy, row, [reported])[0][0].clip(MIN_LOGP) for row in rows]
            ids = [rollout.completion_ids.tolist() for rollout in group]
            groups.append([Completion(i, p.tolist(), "length") for i, p in zip(ids, logps, strict=True)])
        return groups

    def score(self, rows: Rows) -> list[Floats]:
        self.scored += len(rows.prompts)
        return self.policy.logps(rows.prompts, rows.completions, 1.0)

    def load(self, policy: Policy) -> None:
        if self.deaf:
            return
        mine = dict(self.policy.model.named_parameters())
        with torch.no_grad():
            for name, parameter in policy.model.named_parameters():
                if self.misses not in name:
                    mine[name].copy_(parameter)

    def close(self) -> None:
        self.closed = True


def twin_of(policy: Policy) -> Twin:
    return Twin(Policy.load(policy.config))


def with_twin(policy: Policy) -> Copied:
    """A sampler as recipes name one."""
    return Copied(twin_of(policy), policy)


def with_deaf_twin(policy: Policy) -> Copied:
    """A sampler whose engine takes the first weights and no others."""
    sampler = Copied(twin := twin_of(policy), policy)
    twin.deaf = True
    return sampler


def with_hot_twin(policy: Policy) -> Copied:
    """A sampler whose engine draws at another temperature."""
    return Copied(Twin(Policy.load(policy.config), draws={"temperature": 1.25}), policy)
