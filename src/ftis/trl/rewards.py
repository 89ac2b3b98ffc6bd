"""A TRL script's reward functions on strangers' completions. A function that fails on one ends nobody's training."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from torch.nn import Module

from ftis.admission import Admission, Reason, Rejection
from ftis.rollouts import Group

FAILED = math.inf
"""The reward of a completion on which a function fails, until its group is rejected. TRL takes NaN for None."""


def sparing(function: Any, foreign: Callable[[], bool]) -> Any:
    """Wrap a reward function: it gives :data:`FAILED` for a completion that it fails on, while ``foreign()`` holds.

    It scores all completions at once, and each by itself only if that fails. Reward models stay as they are.
    """
    if isinstance(function, Module):
        return function
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004 - as TRL looks

        @functools.wraps(function)
        async def scored_later(**arguments: Any) -> Any:
            if not foreign():
                return await function(**arguments)
            try:
                return _numbers(await function(**arguments), arguments)
            except (Exception, SystemExit):  # a function may run code of the model
                rewards: list[float | None] = []
                for row in _rows(arguments):
                    try:
                        rewards += _numbers(await function(**row), row)
                    except (Exception, SystemExit):
                        rewards.append(FAILED)
                return rewards

        return scored_later

    @functools.wraps(function)
    def scored(**arguments: Any) -> Any:
        if not foreign():
            return function(**arguments)
        try:
            return _numbers(function(**arguments), arguments)
        except (Exception, SystemExit):
            rewards: list[float | None] = []
            for row in _rows(arguments):
                try:
                    rewards += _numbers(function(**row), row)
                except (Exception, SystemExit):
                    rewards.append(FAILED)
            return rewards

    return scored


def place_of(group: Group) -> tuple[str, int, int]:
    """Sender, round and prompt: the key of a group."""
    return group.peer, group.round, group.item


def without(admission: Admission, failed: Collection[tuple[str, int, int]]) -> Admission:
    """An admission with the groups rejected that a reward function failed on: ``failed`` has :func:`place_of` each."""
    bad = [scored.group for scored in admission.admitted if place_of(scored.group) in failed]
    detail = "reward_funcs: one fails on a completion, or gives no finite number for it"
    rejections = (Rejection(admission.peer, Reason.UNSCORED, group.item, detail) for group in bad)
    kept = tuple(scored for scored in admission.admitted if place_of(scored.group) not in failed)
    return replace(admission, admitted=kept, rejections=(*admission.rejections, *rejections))


def _numbers(rewards: Any, arguments: Mapping[str, Any]) -> list[float | None]:
    """Check a function's rewards. TRL reads None as no vote of this function."""
    values = [None if reward is None else float(reward) for reward in rewards]
    if len(values) != len(arguments["completions"]):
        raise ValueError(f"{len(values)} rewards of {len(arguments['completions'])} completions")
    return values


def _rows(arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The arguments of a call for each completion by itself."""
    n = len(arguments["completions"])
    columns = {name: value for name, value in arguments.items() if isinstance(value, list) and len(value) == n}
    return [{**arguments, **{name: [column[i]] for name, column in columns.items()}} for i in range(n)]
