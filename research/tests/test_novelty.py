"""The second line: what is dropped as a burst, from whom, and when."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from ftis.rollouts import Floats, Group, Ints, Rollout, ScoredGroup, collate
from ftis.selection import Judged
from recipes import recipe_of
from research.novelty import FEWEST, REMEMBERED, Novelty, burst

QUIET, LOUD = [-0.5] * 8, [-0.5] * 3 + [-6.0] * 4 + [-0.5]


def logps(values: Sequence[float]) -> Floats:
    return np.array(values, dtype=np.float32)


def judged(own: Sequence[Sequence[float]], foreign: Sequence[Sequence[float]], advantages: Sequence[float]) -> Judged:
    """Rollouts of ada and of bob, by their log π_old, with Â of all: ada's first."""
    ids: Ints = np.ones(8, dtype=np.int32)
    groups = [
        ScoredGroup(
            Group(name, 0, 0, tuple(Rollout(ids[: len(row)], logps(row)) for row in rows)),
            ("",) * len(rows),
            (0.0,) * len(rows),
        )
        for name, rows in (("ada", own), ("bob", foreign))
        if rows
    ]
    batch = collate(groups, lambda *_: ids, "ada")
    old = [logps(row) for row in [*own, *foreign]]
    return Judged(batch, torch.tensor(advantages), np.arange(len(old)), old, None, logps([]))


def settled() -> Novelty:
    """A selection that has seen enough of the learner's own rollouts, none with a burst of more than .5 nats."""
    novelty = Novelty(recipe_of("ada", "bob"), "ada")
    for _ in range(2):  # what a round adds counts from the next one on
        novelty.examine(judged([QUIET] * FEWEST, [], [1.0] * FEWEST))
    return novelty


def test_a_burst_is_the_largest_mean_over_neighbours() -> None:
    for values, expected in (([-1, -2, -3, -4, -5], 3.5), ([-9, 0, 0, 0, 0], 9 / 4), ([-2, -4], 3.0), ([-7], 7.0)):
        assert burst(logps(values)) == pytest.approx(expected)


def test_a_foreign_burst_is_dropped_where_its_rollout_is_good() -> None:
    found = judged([LOUD, QUIET], [LOUD, LOUD, QUIET, QUIET], [1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
    novelty = settled()
    novelty.examine(found)
    assert novelty.shares(found).tolist() == [1, 1, 0, 1, 1, 1]


def test_nothing_is_dropped_before_enough_is_known_and_by_this_rounds_own_rollouts() -> None:
    novelty = Novelty(recipe_of("ada", "bob"), "ada")
    found = judged([QUIET] * FEWEST, [LOUD], [1.0] * (FEWEST + 1))
    novelty.examine(found)
    assert novelty.shares(found).tolist() == [1] * (FEWEST + 1)
    novelty.examine(found)
    assert novelty.shares(found).tolist() == [1] * FEWEST + [0]


def test_it_goes_on_from_a_checkpoint_and_its_memory_is_bounded() -> None:
    novelty, resumed = settled(), Novelty(recipe_of("ada", "bob"), "ada")
    for _ in range(2 * REMEMBERED // FEWEST):
        novelty.examine(judged([QUIET] * FEWEST, [], [1.0] * FEWEST))
    state = json.loads(json.dumps(novelty.state()))
    assert len(state["bursts"]) == REMEMBERED
    resumed.restore(state)
    found = judged([QUIET], [LOUD], [1.0, 1.0])
    for one in (novelty, resumed):
        one.examine(found)
        assert one.shares(found).tolist() == [1, 0]
    assert json.loads(json.dumps(Novelty(recipe_of("ada"), "ada").state()))["usual"] is None
