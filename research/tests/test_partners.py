"""Shares and advantages that spare the stronger partner, computed by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import torch
from earned import rewards

from ftis.config import ObjectiveConfig
from ftis.experiment.runs import run
from ftis.objectives import OBJECTIVES, resolve
from ftis.recipe.parsing import parse
from ftis.records.files import read_jsonl
from ftis.selection import Judged, selections_of
from recipes import pair_of, recipe_of
from research import partners


def judged(
    reward: Sequence[float],
    item: Sequence[int],
    source: Sequence[int],
    rows: Sequence[int] | None = None,
    advantage: Sequence[float] = (),
    kl: Sequence[float] = (),
) -> Judged:
    """The learner is source 0."""
    source_N = np.array(source)
    batch = SimpleNamespace(
        reward_N=np.array(reward, float), item_N=np.array(item), source_N=source_N, own_N=source_N == 0
    )
    diagnostics = SimpleNamespace(k1_N=torch.tensor(kl) / 2, k3_N=torch.tensor(kl))
    return cast(
        Judged,
        SimpleNamespace(
            batch=batch,
            rows=np.arange(len(reward)) if rows is None else np.array(rows),
            advantage_R=torch.tensor(advantage),
            diagnostics=diagnostics,
        ),
    )


def test_others_count_where_the_learner_fails() -> None:
    """Item 0: own 1 of 2. Item 1: own 0 of 2. Item 2: own 2 of 2. Item 3: not tried."""
    given = judged(
        [1, 0, 1, 0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 2, 2, 2, 3], [0, 0, 1, 0, 0, 1, 0, 0, 1, 1], [0, 2, 5, 8, 9]
    )
    assert partners.by_own_failure(given).tolist() == [1.0, 0.5, 1.0, 0.0, 1.0]
    assert partners.by_own_failure(judged([3, 3, 1], [0, 0, 0], [0, 0, 1])).tolist() == [1.0, 1.0, 0.0]
    assert partners.by_own_failure(judged([-1, -1, 1], [0, 0, 0], [0, 0, 1])).tolist() == [1.0, 1.0, 1.0]


def test_the_share_of_a_sender_falls_as_the_learner_leads() -> None:
    """The learner is right in 2 of 4; sender 1 in 1 of 4, sender 2 in 3 of 4."""
    reward = [1, 1, 0, 0, 1, 0, 0, 0, 1, 1, 1, 0]
    given = judged(reward, [0] * 4 + [1] * 4 + [2] * 4, [0] * 4 + [1] * 4 + [2] * 4, [0, 4, 5, 8])
    assert partners.by_lead(given).tolist() == [1.0, 0.5, 0.5, 1.0]
    for reward, source in (([0, 0, 1, 1], [0, 0, 1, 1]), ([1, 1], [1, 1])):  # no success, or no own rollouts
        assert set(partners.by_lead(judged(reward, [0] * len(reward), source)).tolist()) == {1.0}


def test_the_filter_of_a_weaker_sender_is_narrower() -> None:
    """g = .5 nats for own rollouts and for sender 2, .25 for sender 1, which succeeds half as often as the learner."""
    reward = [1, 1, 0, 0, 1, 0, 0, 0, 1, 1, 1, 0]
    advantage = [-1.0, 1.0, -1.0, -1.0, -1.0]
    kl = [0.4, 9.0, 0.3, 0.2, 0.4]
    given = judged(reward, [0] * 4 + [1] * 4 + [2] * 4, [0] * 4 + [1] * 4 + [2] * 4, [2, 4, 5, 6, 11], advantage, kl)
    found = []
    for estimator in ("k3", "k1"):
        objective = ObjectiveConfig(name="F-TIS", kl_estimator=estimator, kl_threshold=0.5)
        recipe = recipe_of("ada", "bob").model_copy(update={"objective": objective})
        found.append(partners.FilterBySender(recipe, "ada").shares(given).tolist())
    assert found == [[1.0, 1.0, 0.0, 1.0, 1.0], [1.0] * 5]  # k1 is half of k3 here


def test_the_weights_of_a_weaker_sender_are_cut_lower() -> None:
    """C = 2 for own rollouts and for sender 2, 1 for sender 1, which succeeds half as often, 0 for sender 3."""
    reward = [1, 1, 0, 0, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0]
    source = [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    given = judged(reward, source, source, [0, 4, 5, 8, 12, 13])
    ratio = [[1.0, 1.0], [0.5, 2.5, 1.5], [0.25], [3.0, 1.5], [1.0], [0.0]]
    given.diagnostics.raw_weight = torch.tensor([r for of_rollout in ratio for r in of_rollout])  # type: ignore[union-attr, misc]
    given.diagnostics.length_N = torch.tensor([len(of_rollout) for of_rollout in ratio])  # type: ignore[union-attr, misc]
    shares = partners.CutBySender(recipe_of("ada", "bob"), "ada").shares(given)
    np.testing.assert_allclose(shares, [1, (0.5 + 1 + 1) / (0.5 + 2 + 1.5), 1, 1, 0, 1], rtol=1e-7)


def test_foreign_advantages_are_relative_to_what_the_learner_earns() -> None:
    """Own: 1 of 2 in group 0, 0 of 2 in group 1, so 1 of 4 in the round, σ = √3/4. Group 2 is not tried."""
    given = ([1, 0, 1, 0, 0, 1, 1, 0], [0, 0, 0, 1, 1, 1, 2, 2], [0, 0, 1, 0, 0, 1, 1, 1])
    sigma = math.sqrt(3) / 4
    expected = [1, -1, 0.5 / sigma, 0, 0, 1 / sigma, 0.75 / sigma, -0.25 / sigma]
    np.testing.assert_allclose(partners.against_the_learner(rewards(*given)), expected, rtol=1e-12)
    unscaled = [0.5, -0.5, 0.5, 0, 0, 1, 0.75, -0.25]
    np.testing.assert_allclose(partners.against_the_learner(rewards(*given, "none")), unscaled, rtol=1e-12)
    assert partners.against_the_learner(rewards([0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 1, 1])).tolist() == [0, 0, 1, 0]
    assert partners.against_the_learner(rewards([1, 0], [0, 0], [1, 1])).tolist() == [0, 0]


def test_a_recipe_names_them() -> None:
    objective = resolve(ObjectiveConfig(name="research.partners.AGAINST_THE_LEARNER", kl_threshold=0.5))
    assert objective.filtered
    assert objective.weight is OBJECTIVES["F-TIS"].weight
    names = [f"research.partners.{name}" for name in ("by_own_failure", "by_lead", "FilterBySender", "CutBySender")]
    recipe = recipe_of("ada", "bob", selections=names)
    found = [selection.name for selection in selections_of(recipe, "ada", OBJECTIVES["F-TIS"])]
    assert found[-4:] == ["by_own_failure", "by_lead", "kl by sender", "cut by sender"]


def test_a_weight_of_the_sequence_is_the_product_of_its_tokens() -> None:
    raw_NT = torch.tensor([[0.5, 3.0, 1.0], [4.0, 2.0, 1.0], [1.0, 1.0, 1.0]], dtype=torch.float64)
    objective = resolve(ObjectiveConfig(name="research.partners.SEQUENCE_WEIGHTS"))
    expected = [[1.5] * 3, [2.0] * 3, [1.0] * 3]  # 8 is cut at C = 2
    np.testing.assert_allclose(objective.weight(raw_NT, torch.ones(3, 1), objective), expected, rtol=1e-12)
    assert objective.filtered
    raw_NT = torch.full((2, 500), 1e8)
    raw_NT[1] = 1e-8
    weights = partners.of_the_sequence(raw_NT, torch.ones(2, 1), OBJECTIVES["F-TIS"])
    assert weights.isfinite().all()
    assert weights[0].unique().tolist() == [2.0]
    assert 0 < float(weights[1].max()) < 1e-8


def test_they_train_otherwise_than_f_tis(models: dict[str, Path], tmp_path: Path) -> None:
    ways = {name: {"training.selections": [f"research.partners.{name}"]} for name in ("by_lead", "CutBySender")}
    document = pair_of(
        models,
        tmp_path / "runs",
        1e-2,
        objective={"name": "F-TIS", "kl_estimator": "k3", "kl_threshold": 0.05},
        training={"rounds": 3, "prompts_per_round": 8, "eval_every": 0},
        arms=[{"name": "F-TIS"}, *({"name": name, "set": keys} for name, keys in ways.items())],
    )
    assert run(parse(document))
    files = [tmp_path / "runs" / "tiny-seed0" / arm / "a" / "metrics.jsonl" for arm in ("F-TIS", *ways)]
    norms = [tuple(row["grad_norm"] for row in read_jsonl(file) if "grad_norm" in row) for file in files]
    assert len(set(norms)) == 3
    assert all(map(math.isfinite, itertools.chain.from_iterable(norms)))
