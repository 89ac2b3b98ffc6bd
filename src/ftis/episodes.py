"""Completions of several turns: the model acts, an environment answers, and the model goes on.

An environment is deterministic given a problem and a round. So the tokens that a model drew determine an episode: every
peer plays them in an environment of its own, and gets the same answers and reward. Messages hold drawn tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ftis.config import FtisError
from ftis.rollouts import Group, Ints, Prompt, Rollout


class EpisodeError(FtisError):
    """An environment cannot be used, raises, or is not deterministic."""


class UnplayableError(FtisError):
    """Drawn tokens that no episode of the environment has."""


class Episodes(Protocol):
    """The episodes of a task's environment. :class:`ftis.environments.play.Player` has them."""

    def go_on(
        self,
        groups: Sequence[Sequence[Rollout]],
        prompts: Sequence[Prompt],
        prompt_ids: Sequence[Ints],
        sampler: Any,
        policy: Any,
        decoding: Any,
        seed: int,
        batch_size: int = 0,
    ) -> list[tuple[Rollout, ...]]:
        """Rollouts with all their turns, from ``groups`` of first turns. The other arguments are those of that draw."""
        ...

    def judge(self, prompt: Prompt, group: Group) -> tuple[Group, tuple[str, ...], tuple[float, ...]]:
        """A group with the environment's answers, its texts, and the environment's rewards, () if it gives none.

        Raises:
            UnplayableError: a completion is no whole episode.
            EpisodeError: the environment fails, or answers otherwise than before.
        """
        ...

    def close(self) -> None:
        """Release the environment's resources; it may be played again afterwards."""
        ...
