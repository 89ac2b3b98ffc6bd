"""Greedy pass@1, one deterministic completion per problem; and pass@k and mean reward of several sampled ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import pstdev

from ftis.admission import Score
from ftis.engines.devices import device_kind
from ftis.engines.stops import cut_at
from ftis.episodes import Episodes
from ftis.policy import Policy
from ftis.rollouts import Group, Ints, Prompt, Rollout
from ftis.sampling import Decoding, Sampler

EVAL_BATCH = 256
"""Problems answered at a time by default. Many more take longer on a CPU, and reading their prompts in takes memory."""
HEARD_EVERY = {"cpu": 32, "cuda": EVAL_BATCH}
"""Problems between two reports of the progress, by kind of device: as many as keep it busy."""


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
    def solved(self) -> int:
        """Problems whose reward is at least 1, as :meth:`EvalSamples.pass_at` counts them."""
        return sum(p.reward >= 1 for p in self.problems)

    def __str__(self) -> str:
        """Pass@1; the mean reward with pass@1 beside it if rewards lie between 0 and 1 or elsewhere."""
        n = len(self.problems)
        if all(p.reward in (0, 1) for p in self.problems):
            return f"greedy pass@1 {self.accuracy:.3f} ({self.solved} of {n})"
        return (
            f"greedy mean reward {self.accuracy:.3f}, and pass@1, a reward of at least 1, {self.solved / n:.3f} "
            f"({self.solved} of {n})"
        )

    @cached_property
    def reward_std(self) -> float:
        """The standard deviation of the problems' rewards."""
        return pstdev(p.reward for p in self.problems)

    @property
    def mean_length(self) -> float:
        return sum(p.length for p in self.problems) / len(self.problems)


@dataclass(frozen=True)
class EvalSamples:
    """Several completions of each problem, drawn as in training.

    Attributes:
        completions, rewards: by problem.
    """

    completions: tuple[tuple[str, ...], ...]
    rewards: tuple[tuple[float, ...], ...]

    @property
    def mean_reward(self) -> float:
        """The mean over all completions; for rewards 0 and 1 an estimate of pass@1."""
        return sum(map(sum, self.rewards)) / sum(map(len, self.rewards))

    def pass_at(self, k: int) -> float:
        """The chance that one of k completions earns a reward of at least 1: the mean of 1 − C(n − c, k) / C(n, k).

        Of n completions of a problem, c earn such a reward. Unbiased for k ≤ n (Chen et al. 2021, "Evaluating large
        language models trained on code").
        """
        missed = []
        for rewards in self.rewards:
            n, c = len(rewards), sum(reward >= 1 for reward in rewards)
            if not 1 <= k <= n:
                raise ValueError(f"pass@{k} of {n} completions: k is 1 to {n}")
            missed.append(math.comb(n - c, k) / math.comb(n, k))
        return 1 - sum(missed) / len(missed)


@dataclass(frozen=True)
class Exam:
    """Problems for a model to answer, and the rewards of its answers.

    Attributes:
        render: the token ids of a problem's prompt.
        decoding: of samples. Its longest completion and its stop strings hold for greedy answers too.
        batch_size: completions at a time; 0 is :data:`EVAL_BATCH`, but one problem's at least.
        episodes: of the problems' environment; None: there is none.
    """

    policy: Policy
    sampler: Sampler
    problems: Sequence[Prompt]
    render: Callable[[Prompt], Ints]
    score: Score
    decoding: Decoding
    batch_size: int = 0
    episodes: Episodes | None = None

    @cached_property
    def prompt_ids(self) -> list[Ints]:
        return [self.render(problem) for problem in self.problems]

    def close(self) -> None:
        """Release the sampler and the environment. A trainer's exams share its sampler, which the trainer releases."""
        self.sampler.close()
        if self.episodes is not None:
            self.episodes.close()

    def greedy(self, heard: Callable[[int], None] | None = None) -> Evaluation:
        """Answer every problem greedily and score it.

        Args:
            heard: called now and then with the number of problems answered.
        """
        if not self.problems:
            raise ValueError("no problems to evaluate on")
        greedy = Decoding(self.decoding.max_completion_length, temperature=0.0, stop=self.decoding.stop)
        # Problems of similar length go together, which keeps padding small. Greedy text does not depend on the order.
        order = sorted(range(len(self.problems)), key=lambda i: len(self.prompt_ids[i]))
        every = len(order)
        if heard is not None:
            every = self.batch_size or HEARD_EVERY[device_kind(self.policy.device)]
        answered: dict[int, Answered] = {}
        for start in range(0, len(order), every):
            part = order[start : start + every]
            problems, ids = [self.problems[i] for i in part], [self.prompt_ids[i] for i in part]
            groups = self._drawn(problems, ids, 1, greedy, 0, self.batch_size or EVAL_BATCH)
            for i, problem, group in zip(part, problems, groups, strict=True):
                (text,), (reward,) = self._scored(problem, group)
                answered[i] = Answered(problem.item, problem.question, problem.answer, text, len(group[0]), reward)
            if heard is not None:
                heard(len(answered))
        return Evaluation(tuple(answered[i] for i in range(len(order))))

    def sampled(self, samples: int, seed: int = 0) -> EvalSamples:
        """Draw ``samples`` completions of every problem as ``decoding`` says, and score them."""
        at_a_time = self.batch_size or max(EVAL_BATCH, samples)
        groups = self._drawn(self.problems, list(self.prompt_ids), samples, self.decoding, seed, at_a_time)
        scored = [self._scored(problem, group) for problem, group in zip(self.problems, groups, strict=True)]
        return EvalSamples(tuple(texts for texts, _ in scored), tuple(rewards for _, rewards in scored))

    def _drawn(
        self,
        problems: Sequence[Prompt],
        ids: Sequence[Ints],
        repeats: int,
        decoding: Decoding,
        seed: int,
        at_a_time: int,
    ) -> list[tuple[Rollout, ...]]:
        """Completions with all their turns."""
        decoding = decoding if self.episodes is None else decoding.keeping()
        groups = self.sampler(self.policy, ids, repeats, decoding, seed, at_a_time)
        if self.episodes is None:
            return groups
        return self.episodes.go_on(groups, problems, ids, self.sampler, self.policy, decoding, seed, at_a_time)

    def _scored(self, problem: Prompt, group: Sequence[Rollout]) -> tuple[tuple[str, ...], tuple[float, ...]]:
        """The texts and rewards of a problem's completions."""
        rewards = tuple[float, ...]()
        if self.episodes is None:
            texts = tuple(cut_at(self.decoding.stop, self.policy.detokenize(r.completion_ids.tolist())) for r in group)
        else:
            _, texts, rewards = self.episodes.judge(problem, Group("", 0, problem.item, tuple(group)))
        return texts, rewards or self.score(problem, texts, [r.completion_ids.tolist() for r in group])
