"""Greedy pass@1: one deterministic completion per problem, scored by the task's reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ftis.admission import Score
from ftis.engines.stops import cut_at
from ftis.policy import Policy
from ftis.rollouts import Ints, Prompt
from ftis.sampling import Decoding, Sampler

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
        """The mean reward: for rewards 0 and 1, the fraction of problems solved."""
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
    decoding: Decoding,
    batch_size: int = 0,
) -> Evaluation:
    """Answer every problem greedily and score it.

    Args:
        prompt_ids: token ids of each problem's prompt.
        decoding: of the samples; its longest completion and its stop strings hold here too.
        batch_size: problems at a time; 0 is 256.
    """
    if not problems:
        raise ValueError("no problems to evaluate on")
    greedy = Decoding(decoding.max_completion_length, temperature=0.0, stop=decoding.stop)
    # Problems of similar length go together, which keeps padding small. Greedy text does not depend on the order.
    order = sorted(range(len(problems)), key=lambda i: len(prompt_ids[i]))
    groups = sampler(policy, [prompt_ids[i] for i in order], 1, greedy, 0, batch_size or EVAL_BATCH)
    answered: dict[int, Answered] = {}
    for i, (rollout,) in zip(order, groups, strict=True):
        problem, ids = problems[i], rollout.completion_ids.tolist()
        text = cut_at(greedy.stop, policy.detokenize(ids))
        (reward,) = score(problem, [text], [ids])
        answered[i] = Answered(problem.item, problem.question, problem.answer, text, len(ids), reward)
    return Evaluation(tuple(answered[i] for i in range(len(problems))))
