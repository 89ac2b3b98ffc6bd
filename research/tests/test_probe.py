"""The bias probe: its statistics on made-up gradients, and on tiny models whose answer is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import research, trained

from ftis.objectives import OBJECTIVES
from ftis.records.rollouts import read_rollouts
from recipes import write_recipe
from research.probe import (
    PAPERS,
    STATISTICS,
    Products,
    ceiling,
    direction,
    order_preserved,
    probe,
    probe_bias,
    with_interval,
)
from research.replay import recordings


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Any) -> Path:
    """The directory in which a run was recorded; nothing there is changed by the tests."""
    place = tmp_path_factory.mktemp("recorded")
    a, b = tiny_model_dir(hidden_size=16), tiny_model_dir(hidden_size=24, seed=1)
    short = {"training.rounds": 1}
    write_recipe(
        place,
        {name: {"model": a, "learning_rate": 1e-2} for name in "ab"},
        top={"processes": "inline"},
        reward={"function": "tiny_rewards.first_even"},
        sampling={"num_generations": 32, "max_completion_length": 3},
        training={
            "rounds": 3,
            "prompts_per_round": 8,
            "steps_per_generation": 1,
            "eval_every": 0,
            "save_every": 1,
            "save_total_limit": 5,
        },
        arms=[
            {"name": "twins", "set": short},
            {"name": "mixed", "set": {"peers.b.model": b}},
            {"name": "wide", "set": {"training.mode": "horizontal", **short}},
            {"name": "alone", "collaborate": False, "set": short},
        ],
    )
    return trained(place)


@pytest.fixture
def run(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(recorded)
    monkeypatch.syspath_prepend(str(recorded))
    return Path("runs/tiny-seed0")


def below(estimate: dict[str, float], ceiling: dict[str, float]) -> bool:
    return estimate["value"] < ceiling["low"]


def products(f: Any, fresh: Any) -> Products:
    return Products(fresh @ fresh.T, fresh @ f, float(f @ f))


def value(name: str, p: Products) -> float:
    return float(STATISTICS[name](p, np.ones((1, len(p.toward_K))))[0])


def test_statistics_equal_their_formulas() -> None:
    rng = np.random.default_rng(0)
    fresh, f = rng.normal(size=(5, 7)) + 1, rng.normal(size=7) + 1
    p = products(f, fresh)

    def cos(a: Any, b: Any) -> float:
        return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))

    means = [np.delete(fresh, k, 0).mean(0) for k in range(5)]
    assert value("cosine", p) == pytest.approx(np.mean([cos(f, m) for m in means]))
    u = np.mean([fresh[k] @ fresh[j] for k in range(5) for j in range(5) if k != j])
    assert value("projection", p) == pytest.approx(f @ fresh.mean(0) / u)
    assert value("corrected_cosine", p) == pytest.approx(f @ fresh.mean(0) / np.linalg.norm(f) / np.sqrt(u))
    assert value("norm_ratio", p) == pytest.approx(np.linalg.norm(f) / np.sqrt((fresh**2).sum(1).mean()))
    assert ceiling(STATISTICS["cosine"], p.fresh_KK).value == pytest.approx(
        np.mean([cos(fresh[k], means[k]) for k in range(5)])
    )
    # A batch taken twice is a batch more, except that no product with its own copy counts in U.
    twice = np.array([[2.0, 1, 1, 1, 1]])
    total = fresh.sum(0) + fresh[0]
    cosines = [cos(f, total - fresh[k]) for k in (0, 0, 1, 2, 3, 4)]
    assert STATISTICS["cosine"](p, twice)[0] == pytest.approx(np.mean(cosines))
    taken = [0, 0, 1, 2, 3, 4]
    u = np.mean([fresh[i] @ fresh[j] for i in taken for j in taken if i != j])
    assert STATISTICS["projection"](p, twice)[0] == pytest.approx(f @ total / 6 / u)


def test_without_noise_every_score_is_exact() -> None:
    mu = np.array([3.0, 4.0, 0.0])
    fresh = np.tile(mu, (4, 1))
    aside = np.array([0.0, 0.0, 5.0])
    for f, expected in ((mu, 1.0), (mu + aside, 0.5**0.5), (-2 * mu, -1.0)):
        p = products(f, fresh)
        assert value("cosine", p) == pytest.approx(expected)
        assert value("corrected_cosine", p) == pytest.approx(expected)
    assert value("projection", products(0.3 * mu + aside, fresh)) == pytest.approx(0.3)
    assert value("norm_ratio", products(-2 * mu, fresh)) == pytest.approx(2)
    estimate = with_interval(STATISTICS["cosine"], products(mu, fresh), np.random.default_rng(0))
    assert (estimate.low, estimate.high) == pytest.approx((1, 1))


def test_what_is_undefined_is_none() -> None:
    fresh = np.eye(4)  # nothing in common: U = 0
    f = np.ones(4)
    rng = np.random.default_rng(0)
    assert with_interval(STATISTICS["projection"], products(f, fresh), rng).value is None
    assert with_interval(STATISTICS["corrected_cosine"], products(f, fresh), rng).value is None
    assert ceiling(STATISTICS["projection"], fresh).value is None
    assert with_interval(STATISTICS["cosine"], products(f, fresh), rng).low is not None
    nothing = products(0 * f, fresh + 1)
    assert with_interval(STATISTICS["cosine"], nothing, rng).value is None
    assert with_interval(STATISTICS["projection"], nothing, rng).value == 0


def test_an_unbiased_batch_lies_within_the_ceiling_and_the_noise_is_taken_out() -> None:
    rng = np.random.default_rng(0)
    mu = rng.normal(size=100)
    inside, corrected, projections, covered = [], [], [], []
    for _ in range(150):
        fresh, f = mu + rng.normal(size=(12, 100)), mu + rng.normal(size=100)
        p = products(f, fresh)
        top = ceiling(STATISTICS["cosine"], p.fresh_KK)
        assert top.low is not None
        assert top.high is not None
        inside.append(top.low <= value("cosine", p) <= top.high)
        corrected.append(value("corrected_cosine", p) - f @ mu / np.linalg.norm(f) / np.linalg.norm(mu))
        projections.append(value("projection", p))
        estimate = with_interval(STATISTICS["projection"], p, rng)
        assert estimate.low is not None
        assert estimate.high is not None
        covered.append(estimate.low <= f @ mu / (mu @ mu) <= estimate.high)
    assert np.mean(inside) > 0.88
    assert abs(np.mean(corrected)) < 0.01
    assert np.mean(projections) == pytest.approx(1, abs=0.03)
    assert np.mean(covered) > 0.85


def test_between_equal_models_nothing_is_biased(run: Path) -> None:
    result = probe(run, "twins", "a", 0, fresh=8)
    assert result["foreign"]["rollouts"] == 128
    assert result["foreign"]["prompts"] == 4
    assert result["foreign"]["effective_sample_size"] == pytest.approx(1, abs=1e-4)
    top = result["ceiling"]
    assert 0.2 < top["cosine"]["value"] < 1  # so there is something to fall short of, and noise
    for name in ("NoIS", "VIS", "TIS"):
        values = result["objectives"][name]
        assert not below(values["cosine"], top["cosine"])
        assert not below(values["projection"], top["projection"])
        assert values["kept_share"] == 1
        # The weights are 1 up to rounding, so these are one estimate.
        assert values["cosine"]["value"] == pytest.approx(result["objectives"]["NoIS"]["cosine"]["value"], abs=1e-3)


def test_between_different_models_the_uncorrected_update_is_biased(run: Path, capsys: Any) -> None:
    arguments = [str(run), "--arm", "mixed", "--peer", "b", "--step", "1", "--fresh", "8"]
    assert research(probe_bias, *arguments, "--output", "out/probe.json") == 0
    text = Path("out/probe.json").read_text()
    result = json.loads(text)
    assert below(result["objectives"]["NoIS"]["cosine"], result["ceiling"]["cosine"])
    assert result["foreign"]["effective_sample_size"] < 0.9
    assert result["objectives"]["F-TIS"]["kept_share"] < 1
    assert result["objectives"]["F-TIS"]["advantage_sign_preserved"] < 1
    for values in result["objectives"].values():
        for name in STATISTICS:
            if values[name]["low"] is not None:
                assert values[name]["low"] <= values[name]["value"] <= values[name]["high"]
    # The table names them from the best cosine to the worst, the ceiling first.
    shown = capsys.readouterr().out
    ranked = sorted(PAPERS, key=lambda name: -result["objectives"][name]["cosine"]["value"])
    places = [shown.index(f"\n  {name} ") for name in ["own (ceiling)", *ranked]]
    assert places == sorted(places)
    assert f"{result['objectives']['TIS']['cosine']['low']:.2f} … " in shown
    # Again it is the same, to the last digit; under another seed not.
    for seed in ("0", "1"):
        assert research(probe_bias, *arguments, "--output", "out/again.json", "--seed", seed) == 0
        assert (Path("out/again.json").read_text() == text) is (seed == "0")


def test_what_the_filter_did_is_what_the_round_did(run: Path) -> None:
    result = probe(run, "mixed", "a", 1, fresh=3, objectives=["F-TIS"])
    rows = [row for row in read_rollouts(run / "mixed" / "a", 1) if row["source"] == "b"]
    judged = [row["kept"] for row in rows if row["advantage"]]
    assert result["objectives"]["F-TIS"]["kept_share"] == pytest.approx(np.mean(judged))
    assert result["foreign"]["zero_advantage"] == len(rows) - len(judged)
    metrics = json.loads((run / "mixed" / "a" / "metrics.jsonl").read_text().splitlines()[1])
    assert result["foreign"]["effective_sample_size"] == pytest.approx(
        metrics["peer/b/sampling/effective_sample_size"], rel=1e-6
    )


def test_order_preserved_by_hand() -> None:
    """Group 0 tells 2 pairs apart (its two -0.5 are a tie), group 1 all 6, group 2 has no pair."""
    advantage_N = np.array([1.0, -0.5, -0.5, 2.0, 1.0, -1.0, -2.0, 0.0], np.float32)
    group_N = np.array([0, 0, 0, 1, 1, 1, 1, 2])
    assert order_preserved(advantage_N, np.ones(8, bool), group_N) == (8, 8, 8)
    # Signs are lost in each pair with a dropped one: 1 of group 0, 3 of group 1. Order only between −1, which stays,
    # and −2, which becomes 0 and so the better of them; if both are dropped they are a tie.
    keep_N = np.array([1, 0, 1, 1, 1, 1, 0, 1], bool)
    assert order_preserved(advantage_N, keep_N, group_N) == (8, 4, 7)
    assert order_preserved(advantage_N, keep_N & (np.arange(8) != 5), group_N)[2] == 7
    assert order_preserved(advantage_N[:0], keep_N[:0], group_N[:0]) == (0, 0, 0)


def test_in_horizontal_mode_as_many_own_rollouts_take_part_as_foreign_ones(run: Path) -> None:
    result = probe(run, "wide", "a", 0, fresh=4, objectives=["NoIS", "TIS"])
    assert result["foreign"]["rollouts"] == 128  # half of each group of 32
    assert result["foreign"]["prompts"] == 8
    assert not below(result["objectives"]["TIS"]["cosine"], result["ceiling"]["cosine"])


def test_a_direction_is_the_gradient_of_the_first_step(run: Path) -> None:
    from dataclasses import replace

    (recording,) = recordings(run, "mixed", ["a"])
    peer = recording.load(0).peer
    batch = recording.batch(peer, 0)
    before = [p.detach().clone() for p in peer.policy.trainable]
    gradient, _, _ = direction(peer, batch, np.ones(len(batch), bool))
    assert all(torch.equal(p, q) for p, q in zip(peer.policy.trainable, before, strict=True))
    norm = json.loads((run / "mixed" / "a" / "metrics.jsonl").read_text().splitlines()[0])["grad_norm"]
    assert float(gradient.norm()) == pytest.approx(norm, rel=1e-5)
    # Downhill of the loss: a small step against it earns what the gradient promises.
    with torch.no_grad():
        for p, g in zip(peer.policy.trainable, gradient.split([p.numel() for p in before]), strict=True):
            p -= 1e-3 * g.view_as(p)
    moved, _, _ = direction(peer, batch, np.ones(len(batch), bool))
    assert not torch.equal(moved, gradient)
    uncorrected = replace(peer, member=replace(peer.member, objective=OBJECTIVES["NoIS"]))
    nothing, _, _ = direction(uncorrected, batch, np.zeros(len(batch), bool))
    assert not nothing.any()


MISTAKES: dict[str, tuple[list[str], str]] = {
    "alone": (["--arm", "alone"], "none of its 0 foreign rollouts carries gradient"),
    "the last step": (["--arm", "mixed", "--step", "3"], "rollouts after steps 0 to 2, and none after 3"),
    "few fresh batches": (["--arm", "mixed", "--fresh", "2"], "at least 3"),
    "a wrong objective": (["--arm", "mixed", "--objectives", "TIS,FTIS"], "there is no such objective; take NoIS"),
    "no objective": (["--arm", "mixed", "--objectives", ""], "there is no such objective"),
    "no arm": ([], "name one with --arm"),
}


def test_a_mistake_is_one_line_with_its_remedy(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, key_words in MISTAKES.values():
        assert research(probe_bias, str(run), "--peer", "a", *arguments) == 1
        error = capsys.readouterr().err.strip()
        assert error.startswith("error: ")
        assert "\n" not in error
        assert key_words in error
