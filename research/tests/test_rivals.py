"""The rivals against loops in plain Python, their advantages and selections by hand, and each in a run."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from earned import rewards

from ftis.advantages import group_advantages
from ftis.config import RecipeError
from ftis.experiment.runs import run
from ftis.metric_keys import by_peer
from ftis.objectives import policy_loss
from ftis.recipe.parsing import parse
from ftis.records.files import read_jsonl
from ftis.selection import Judged, selections_of
from recipes import pair_of, recipe_of
from research import rivals

Row = list[float]
OfRow = Callable[[Row, Row, Row, float, bool], tuple[float, Row]]
"""(log π_θ, log π_old, log π_gen, Â, own) → the row's surrogate and its derivative by each log π_θ."""

LOW, HIGH = 0.8, 1.2


def ppo(ratio: float, advantage: float) -> tuple[float, bool]:
    """min(ρÂ, clip(ρ)Â), and whether it moves with ρ."""
    inside = ratio <= HIGH if advantage > 0 else ratio >= LOW
    return (ratio if inside else min(max(ratio, LOW), HIGH)) * advantage, inside


def per_token(ratios: Row, advantage: float, slopes: Row | None = None) -> tuple[float, Row]:
    """The clipped surrogate of token ratios; ``slopes`` are dρ/dlogπ, ρ itself unless given."""
    values = [ppo(r, advantage) for r in ratios]
    slopes = slopes or ratios
    n = len(ratios)
    return sum(v for v, _ in values) / n, [
        advantage * s / n if moves else 0.0 for s, (_, moves) in zip(slopes, values, strict=True)
    ]


def old_ratios(logp: Row, old: Row) -> Row:
    return [math.exp(a - b) for a, b in zip(logp, old, strict=True)]


def gspo(logp: Row, old: Row, gen: Row, advantage: float, own: bool) -> tuple[float, Row]:
    n = len(logp)
    ratio = math.exp((sum(logp) - sum(gen)) / n)
    value, moves = ppo(ratio, advantage)
    return value, [ratio * advantage / n if moves else 0.0] * n


def hacpo(logp: Row, old: Row, gen: Row, advantage: float, own: bool) -> tuple[float, Row]:
    if own:
        return gspo(logp, old, gen, advantage, own)
    n = len(logp)
    ratio = math.exp((sum(logp) - sum(gen)) / n)
    kept = min(max(ratio, 0.8), 1.0)
    return kept * advantage, [ratio * advantage / n if ratio == kept else 0.0] * n


def topr(logp: Row, old: Row, gen: Row, advantage: float, own: bool) -> tuple[float, Row]:
    weight = 1.0 if advantage > 0 else min(math.exp(sum(logp) - sum(gen)), 1.0)
    return weight * advantage, [weight * advantage / len(logp)] * len(logp)


def luffy(logp: Row, old: Row, gen: Row, advantage: float, own: bool) -> tuple[float, Row]:
    if own:
        return per_token(old_ratios(logp, old), advantage)
    p = [math.exp(x) for x in logp]
    return per_token([x / (x + 0.1) for x in p], advantage, [0.1 * x / (x + 0.1) ** 2 for x in p])


def score(logp: Row, old: Row, gen: Row, advantage: float, own: bool) -> tuple[float, Row]:
    return per_token(old_ratios(logp, old) if own else [1.0] * len(logp), advantage)


def dro(logp: Row, old: Row, gen: Row, advantage: float, own: bool) -> tuple[float, Row]:
    gap = advantage - (sum(logp) - sum(old))
    return -0.5 * gap**2, [gap] * len(logp)


REFERENCES: dict[str, OfRow] = {
    "GSPO_OVER_GENERATOR": gspo, "HACPO": hacpo, "TOPR": topr, "LUFFY": luffy,
    "SFT_THEN_ALONE": score, "SGT": score, "DRO": dro, "SGT_SHAPED": luffy,
}  # fmt: skip


def drawn(seed: int) -> tuple[list[Row], list[Row], list[Row], Row, list[bool]]:
    """Ragged rows, near to and far from their samplers, with both signs of Â."""
    rng = random.Random(seed)
    logp, old, gen = [], [], []
    for _ in range(80):
        n, far, above = rng.randint(1, 9), rng.choice([0.05, 0.5, 2.0]), rng.choice([0.2, -0.3, -0.1])
        base = [-rng.expovariate(1.0) for _ in range(n)]
        logp.append([min(b + rng.gauss(0, 0.1), 0.0) for b in base])
        old.append(base)
        gen.append([min(b + rng.gauss(above, far), 0.0) for b in base])
    return logp, old, gen, [rng.choice([-1.2, -0.4, 0.7, 1.5]) for _ in logp], [rng.random() < 0.4 for _ in logp]


def padded(rows: Sequence[Row]) -> torch.Tensor:
    widest = max(map(len, rows))
    return torch.tensor([[*row, *[math.nan] * (widest - len(row))] for row in rows], dtype=torch.float64)


@pytest.mark.parametrize("name", REFERENCES)
def test_losses_and_gradients_are_those_of_a_loop(name: str) -> None:
    logp, old, gen, advantage, own = drawn(0)
    branches = {
        (is_own, a > 0, sum(math.exp((sum(p) - sum(g)) / len(p)) > bound for bound in (LOW, 1, HIGH)))
        for p, g, a, is_own in zip(logp, gen, advantage, own, strict=True)
    }
    assert len(branches) == 16, "else the comparison would prove less than it says"
    logp_NT = padded(logp).requires_grad_(True)
    loss, _ = policy_loss(
        getattr(rivals, name),
        logp_NT,
        padded(old),
        padded(gen),
        torch.tensor(advantage, dtype=torch.float64),
        padded(logp).isfinite(),
        own_N=torch.tensor(own),
    )
    loss.backward()
    rows = [REFERENCES[name](*row) for row in zip(logp, old, gen, advantage, own, strict=True)]
    assert loss.item() == pytest.approx(-sum(value for value, _ in rows) / len(rows), rel=1e-12)
    assert logp_NT.grad is not None
    for found, (_, slopes) in zip(logp_NT.grad, rows, strict=True):
        expected = [-slope / len(rows) for slope in slopes]
        np.testing.assert_allclose(found[: len(expected)], expected, rtol=1e-10, atol=1e-14)
        assert not found[len(expected) :].any()


def test_sequence_ratios_are_the_same_where_units_hold_several_tokens() -> None:
    """A rollout of four tokens, and the same with π_gen known of two spans."""
    logp, gen = torch.tensor([[-1.0, -2.0, -0.5, -0.7]]), torch.tensor([[-0.9, -1.8, -0.6, -1.0]])
    mask, advantage = torch.ones(1, 4, dtype=torch.bool), torch.tensor([-1.0])
    unit, spans = torch.tensor([[0, 0, 1, 1]]), torch.tensor([[-2.7, -1.6]])
    for name in ("GSPO_OVER_GENERATOR", "HACPO", "TOPR", "DRO"):
        objective = getattr(rivals, name)
        tokens, _ = policy_loss(objective, logp, logp, gen, advantage, mask)
        units, _ = policy_loss(objective, logp, logp, spans, advantage, mask, unit_NT=unit)
        torch.testing.assert_close(tokens, units)


def test_capabilities_scale_baseline_and_advantage() -> None:
    """Two prompts, two rollouts of each peer. The learner is right in 1 of 4, the other in 2 of 4: ω = 2.

    Group 0: rewards 1, 0 | 1, 0; scaled to the learner 1, 0 | 1/2, 0, with the mean 3/8; σ = 1/2.
    Group 1: rewards 0, 0 | 1, 0; scaled 0, 0 | 1/2, 0, with the mean 1/8; σ = √3/4.
    """
    given = rewards([1, 0, 1, 0, 0, 0, 1, 0], [0] * 4 + [1] * 4, [0, 0, 1, 1] * 2)
    sigma = math.sqrt(3) / 4
    expected = [1.25, -0.75, 2.5, -1.5, -0.125 / sigma, -0.125 / sigma, 2 * 0.875 / sigma, -0.25 / sigma]
    np.testing.assert_allclose(rivals.by_capability(given), expected, rtol=1e-12)
    unscaled = rivals.by_capability(rewards([1, 0, 1, 0, 0, 0, 1, 0], [0] * 4 + [1] * 4, [0, 0, 1, 1] * 2, "none"))
    np.testing.assert_allclose(unscaled[:4], [0.625, -0.375, 1.25, -0.75], rtol=1e-12)


def test_equal_capabilities_are_grpo_and_none_is_infinite() -> None:
    given = rewards([1, 0, 0, 1, 1, 0, 0, 1], [0] * 4 + [1] * 4, [0, 0, 1, 1] * 2)
    np.testing.assert_allclose(rivals.by_capability(given), group_advantages(given.reward_N, given.group_N))
    for reward, ratio in (([1, 0, 0, 0], 0.5), ([0, 0, 1, 0], 2.0)):  # a peer without any success
        found = rivals.by_capability(rewards(reward, [0] * 4, [0, 0, 1, 1]))
        baseline = sum(r / w for r, w in zip(reward, [1, 1, ratio, ratio], strict=True)) / 4
        assert found[3].item() == pytest.approx(-ratio * baseline / (math.sqrt(3) / 4))
    with pytest.raises(RecipeError, match="HACPO compares mean rewards"):  # below zero they are no ratio
        rivals.by_capability(rewards([1, 0, -1, -1], [0] * 4, [0, 0, 1, 1]))


def test_others_successes_pass_the_gate_where_all_own_fail() -> None:
    """Group 0: own solved once. Group 1: own failed. Group 2: not tried."""
    given = rewards([1, 0, 1, 0, 0, 1, 0, 1, 1], [0, 0, 0, 1, 1, 1, 1, 2, 2], [0, 0, 1, 0, 0, 1, 1, 1, 1])
    assert rivals.where_own_fail(given).tolist() == [1.0, -1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]


def judged(own: Sequence[bool], advantage: Sequence[float], round: int = 0) -> Judged:
    batch = SimpleNamespace(own_N=np.array(own), round_N=np.full(len(own), round))
    rows = np.flatnonzero(np.array(advantage))
    return cast(Judged, SimpleNamespace(batch=batch, rows=rows, advantage_R=torch.tensor([a for a in advantage if a])))


def test_foreign_first_then_own() -> None:
    recipe = recipe_of("ada", "bob", "cid", rounds=8)
    selection = rivals.ForeignFirst(recipe, "ada")
    assert [sorted(selection.skipped(round)) for round in (0, 1, 2, 7)] == [[], [], ["bob", "cid"], ["bob", "cid"]]
    assert selection.shares(judged([True, False], [1.0, 1.0], round=1)).tolist() == [0.0, 1.0]
    assert selection.shares(judged([True, True], [1.0, -1.0], round=2)).tolist() == [1.0, 1.0]
    alone = rivals.ForeignFirst(recipe_of("ada", rounds=8), "ada")
    assert alone.shares(judged([True, True], [1.0, -1.0])).tolist() == [1.0, 1.0]


def test_an_objective_brings_its_selections() -> None:
    found = judged([True, True, False, False, False], [1.0, -1.0, 0.0, 1.0, -1.0])
    assert rivals.foreign_positives(found).tolist() == [1, 1, 1, 0]
    for objective, name in ((rivals.SFT_THEN_ALONE, "foreign first"), (rivals.LUFFY, "foreign_positives")):
        assert selections_of(recipe_of("ada", "bob"), "ada", objective)[-1].name == name


@pytest.mark.parametrize(("name", "mode"), [("HACPO", "horizontal"), ("SFT_THEN_ALONE", "vertical")])
def test_two_train(name: str, mode: str, models: dict[str, Path], tmp_path: Path) -> None:
    training = {"rounds": 4, "prompts_per_round": 8, "eval_every": 0, "mode": mode}
    path = f"research.rivals.{name}"
    assert run(parse(pair_of(models, tmp_path / "runs", 1e-3, objective={"name": path}, training=training)))
    for own, other in ("ab", "ba"):
        rounds = read_jsonl(tmp_path / "runs" / "tiny-seed0" / path / own / "metrics.jsonl")
        kept = [by_peer(row)[other].get("kept", 0) > 0 for row in rounds]
        assert kept == [True] * 4 if name == "HACPO" else [True, False, False, False]
