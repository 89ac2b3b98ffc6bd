"""Stop strings: where they end a completion, and how a sampler finds them while it draws."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from ftis.config import RecipeError, excerpt
from ftis.policy import Policy
from ftis.rollouts import Rollout
from ftis.sampling import Decoding, Prompts, Sampler

TOKENS_A_CHARACTER = 4  # of UTF-8, where a token may be a byte


class StopStrings:
    """A search for stop strings in rows. It looks at the last tokens of a row, as many as a stop string can take.

    :class:`Stopping` reads whole completions afterwards and decides; this class only saves decoding steps.
    """

    def __init__(self, policy: Policy, stop: Sequence[str]) -> None:
        self.policy, self.stop = policy, stop
        self.reach = TOKENS_A_CHARACTER * max(map(len, stop), default=0)
        self.rows: dict[int, list[int]] = {}

    def complete(self, row: int, token: int) -> bool:
        """Whether ``row`` holds a stop string after one more token."""
        tail = self.rows[row] = [*self.rows.get(row, [])[1 - self.reach :], token]
        return holds(self.stop, self.policy.detokenize(tail))


def holds(stop: Sequence[str], text: str) -> bool:
    """Whether ``text`` holds a stop string."""
    return any(s in text for s in stop)


def cut_at(stop: Sequence[str], text: str) -> str:
    """``text`` up to the end of the first stop string in it; all of it if there is none."""
    ends = [at + len(s) for s in stop if (at := text.find(s)) >= 0]
    return text[: min(ends)] if ends else text


def stopped_at(stop: Sequence[str], ids: Sequence[int], detokenize: Callable[[Sequence[int]], str]) -> int:
    """The number of ``ids`` up to the one that completes a stop string; all of them if none does."""
    return bisect.bisect_left(range(len(ids)), True, key=lambda n: holds(stop, detokenize(ids[:n])))


class Stopping(Sampler):
    """A sampler whose rollouts end where ``decoding.stop`` says, whether it knows of stop strings or not."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.slow = getattr(sampler, "slow", "")  # a user's sampler may not derive from Sampler
        self.in_place = getattr(sampler, "in_place", False)

    def __call__(
        self, policy: Policy, prompt_ids: Prompts, repeats: int, decoding: Decoding, seed: int, batch_size: int = 0
    ) -> list[tuple[Rollout, ...]]:
        groups = self.sampler(policy, prompt_ids, repeats, decoding, seed, batch_size)
        self._require_groups(groups, len(prompt_ids), repeats, decoding.max_completion_length)
        if not decoding.stop:
            return groups

        def ended(rollout: Rollout) -> Rollout:
            n = stopped_at(decoding.stop, rollout.completion_ids.tolist(), policy.detokenize)
            return Rollout(rollout.completion_ids[:n], rollout.gen_logp[:n])

        return [tuple(map(ended, group)) for group in groups]

    def _require_groups(self, groups: Sequence[Sequence[Rollout]], prompts: int, repeats: int, most: int) -> None:
        """Refuse numbers, types and lengths that a user's sampler must not return. Others would reject them, and this
        peer would learn from them."""
        name = f"sampling.sampler: {type(self.sampler).__name__} returned"
        if (sizes := [len(group) for group in groups]) != [repeats] * prompts:
            wanted = f"return {repeats} for each of {prompts} prompts"
            raise RecipeError(f"{name} groups of {excerpt(sizes)} rollouts: {wanted}")
        for rollout in itertools.chain(*groups):
            ids, logp = rollout.completion_ids, rollout.gen_logp
            if ids.dtype != np.int32 or logp.dtype != np.float32 or not 1 <= len(ids) <= most:
                raise RecipeError(
                    f"{name} {len(ids)} ids of {ids.dtype} with log-probabilities of {logp.dtype}: return 1 to {most} "
                    f"ids of int32, with float32"
                )

    def weights_moved(self, policy: Policy) -> None:
        self.sampler.weights_moved(policy)

    def close(self) -> None:
        self.sampler.close()
