"""Greedy pass@1: one deterministic completion per problem, judged by the task's reward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ftis.policy import Policy
from ftis.rollouts import Ints, Prompt
from ftis.sampling import Decoding, Sampler

Score = Callable[[Prompt, Sequence[str], Sequence[Sequence[int]]], tuple[float, ...]]

EVAL_BATCH = 256


@dataclass(frozen=True)
class Answered:
    """One problem's greedy completion and its reward."""

    item: int
    question: str
    answer: str
    completion: str
    length: int
    reward: float


@dataclass(frozen=True)
class Evaluation:
    problems: tuple[Answered, ...]

    @property
    def accuracy(self) -> float:
        """Share of problems whose reward is 1 (for rewards other than 0/1: the mean reward)."""
        return sum(p.reward for p in self.problems) / len(self.problems)

    @property
    def mean_length(self) -> float:
        return sum(p.length for p in self.problems) / len(self.problems)


def evaluate(
    policy: Policy,
    sampler: Sampler,
    problems: Sequence[Prompt],
    prompt_ids: Sequence[Ints],
    score: Score,
    max_completion_length: int,
    batch_size: int = 0,
) -> Evaluation:
    """Answer every problem greedily and score it.

    Args:
        prompt_ids: token ids of each problem's prompt.
        batch_size: problems at a time; 0 is 256.
    """
    if not problems:
        raise ValueError("no problems to evaluate on")
    decoding = Decoding(max_completion_length=max_completion_length, temperature=0.0)
    # Problems of like length go together, which keeps padding small; greedy text does not depend on it.
    order = sorted(range(len(problems)), key=lambda i: len(prompt_ids[i]))
    groups = sampler(policy, [prompt_ids[i] for i in order], 1, decoding, 0, batch_size or EVAL_BATCH)
    answered: dict[int, Answered] = {}
    for i, (rollout,) in zip(order, groups, strict=True):
        problem, ids = problems[i], rollout.completion_ids.tolist()
        text = policy.detokenize(ids)
        (reward,) = score(problem, [text], [ids])
        answered[i] = Answered(problem.item, problem.question, problem.answer, text, len(ids), reward)
    return Evaluation(tuple(answered[i] for i in range(len(problems))))
