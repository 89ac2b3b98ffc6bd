"""A round's start: whose log-probabilities are taken from the sampler, and whose from the learner."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import TinyModelDir
from rich.console import Console

from ftis.admission import Admission
from ftis.config import Recipe, parse
from ftis.events import ArmBegun, RoundEnded, placed
from ftis.exchange import AloneExchange
from ftis.lab.progress import Display
from ftis.peer import CHECKED_ROLLOUTS, Peer, at_round_start, chosen, load_peer, share, train_round
from ftis.rollouts import Batch, Group, Rollout, ScoredGroup, collate

MakePeer = Callable[..., Peer]


def evenness(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
    """Varies on random models, so that there is something to learn."""
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]


@pytest.fixture
def make_peer(tiny_model_dir: TinyModelDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakePeer:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))

    def make(**sampling: Any) -> Peer:
        peer = {"name": "a", "model": str(tiny_model_dir()), "device": "cpu", "learning_rate": 1e-2}
        document = {
            "name": "tiny",
            "task": {"name": "clock", "validation_size": 4},
            "prompt": {"system_prompt": "", "template": "{question}="},
            "reward": {"function": "test_peer.evenness"},
            "sampling": {"num_generations": 4, "max_completion_length": 8, **sampling},
            "training": {"prompts_per_round": 4, "steps_per_generation": 2},
            "peers": [peer],
        }
        return load_peer(parse(document, where="test"), "a", tmp_path, AloneExchange())

    return make


def batch_of(peer: Peer) -> Batch:
    return collate([peer.admitter.score_group(group) for group in peer.sample(0)], peer.prompt_ids)


def forwarded(peer: Peer) -> list[int]:
    """Fills up with the number of rows of each call for log-probabilities."""
    calls: list[int] = []
    logps = peer.policy.logps

    def counting(prompt_ids: Any, completion_ids: Any, temperature: float) -> Any:
        calls.append(len(completion_ids))
        return logps(prompt_ids, completion_ids, temperature)

    peer.policy.logps = counting  # type: ignore[method-assign]
    return calls


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_own_rollouts_keep_their_samplers_log_probabilities(temperature: float, make_peer: MakePeer) -> None:
    peer = make_peer(temperature=temperature)
    batch = batch_of(peer)
    expected = peer.policy.logps(batch.prompt_ids, [r.completion_ids for r in batch.rollouts], temperature)
    calls = forwarded(peer)
    start = at_round_start(peer, batch, peer.advantages(batch))
    assert len(start.rows) > CHECKED_ROLLOUTS
    assert sum(calls) == CHECKED_ROLLOUTS
    assert not start.recomputed
    assert 0 < start.gap.max() < 1e-4
    for row, old in zip(start.rows, start.old_logp, strict=True):
        assert old is batch.rollouts[row].gen_logp
        np.testing.assert_allclose(old, expected[row], atol=1e-4)
    assert start.diagnostics is not None
    assert (start.diagnostics.raw_weight == 1).all()
    assert (start.diagnostics.k1_N == 0).all()


def test_where_sampler_and_learner_differ_all_are_computed_again(make_peer: MakePeer) -> None:
    peer = make_peer()
    batch = batch_of(peer)
    expected = peer.policy.logps(batch.prompt_ids, [r.completion_ids for r in batch.rollouts], 1.0)
    off = tuple(Rollout(r.completion_ids, r.gen_logp - np.float32(0.01)) for r in batch.rollouts)
    calls = forwarded(peer)
    start = at_round_start(peer, replace(batch, rollouts=off), peer.advantages(batch))
    assert start.recomputed
    assert sum(calls) == len(start.rows)  # none of them twice
    assert len(start.gap) == sum(len(batch.rollouts[row]) for row in start.rows)
    np.testing.assert_allclose(start.gap, 0.01, atol=1e-4)
    for row, old in zip(start.rows, start.old_logp, strict=True):
        np.testing.assert_allclose(old, expected[row], atol=1e-5)


@pytest.mark.parametrize("truncation", [{"top_k": 5}, {"top_p": 0.8}])
def test_with_a_truncated_distribution_all_are_computed_again(truncation: Any, make_peer: MakePeer) -> None:
    peer = make_peer(**truncation)
    batch = batch_of(peer)
    calls = forwarded(peer)
    start = at_round_start(peer, batch, peer.advantages(batch))
    assert start.recomputed
    assert not len(start.gap)
    assert sum(calls) == len(start.rows)


def test_foreign_rollouts_are_scored_by_the_learner(make_peer: MakePeer) -> None:
    peer = make_peer()
    batch = batch_of(peer)
    source_N = np.arange(len(batch)) % 2
    calls = forwarded(peer)
    start = at_round_start(peer, replace(batch, source_N=source_N, sources=("a", "b")), peer.advantages(batch))
    foreign = source_N[start.rows] == 1
    assert sum(calls) == foreign.sum() + min(CHECKED_ROLLOUTS, (~foreign).sum())
    for row, old, is_foreign in zip(start.rows, start.old_logp, foreign, strict=True):
        assert (old is batch.rollouts[row].gen_logp) == (not is_foreign)
        np.testing.assert_allclose(old, batch.rollouts[row].gen_logp, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "tolerance", "said"),
    [
        ({}, 1e-3, ""),
        ({"top_k": 5}, 1e-3, "arm/a: top-k or top-p is on: log-probabilities of own rollouts are computed again"),
        ({}, 1e-9, "arm/a: sampler and learner differ by up to "),
    ],
)
def test_a_round_says_whether_they_were_computed_again(
    settings: Any, tolerance: float, said: str, make_peer: MakePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftis.peer.LOGP_TOLERANCE", tolerance)
    peer = make_peer(**settings)
    out = io.StringIO()
    display = Display(Console(file=out, width=200))
    say = placed(display, arm="arm", peer="a")
    say(ArmBegun(("a",), 2))
    for round in range(2):
        metrics = train_round(peer, round)
        assert metrics["sampling/logp_recomputed"] is bool(said)
        assert ("sampling/sampling_logp_difference/max" in metrics) == ("top_k" not in settings)
        say(RoundEnded(metrics))
    assert out.getvalue().count("computed again") == bool(said)  # once, not every round
    assert said in out.getvalue()


# --- max_foreign_rollouts ---------------------------------------------------------------------------------------------


def swarm(peers: int, limit: int, mode: str = "vertical", seed: int = 0) -> Recipe:
    """Every peer samples three groups of four rollouts a round, or in horizontal mode four of every group."""
    training = {"prompts_per_round": 3 * peers, "mode": mode, "max_foreign_rollouts": limit}
    document = {
        "name": "many",
        "seed": seed,
        "task": {"name": "clock"},
        "sampling": {"num_generations": 4 * (peers if mode == "horizontal" else 1)},
        "training": training,
        "peers": [{"name": f"p{i}", "model": "none"} for i in range(peers)],
    }
    return parse(document, where="test")


def picked(recipe: Recipe, own: str, round: int) -> dict[str, list[int]]:
    others = [p.name for p in recipe.peers if p.name != own]
    return {name: sorted(chosen(recipe, 1000, own, name, round)) for name in others}


@pytest.mark.parametrize("mode", ["vertical", "horizontal"])
def test_a_limit_that_all_fit_in_changes_nothing(mode: str) -> None:
    offered = 4 * 4 * (3 if mode == "vertical" else 15)
    for round in range(6):
        everything = picked(swarm(5, 0, mode), "p1", round)
        assert everything == {n: sorted(share(swarm(5, 0, mode), 1000, n, round)) for n in everything}
        for limit in (offered, offered + 1, 10 * offered):
            assert picked(swarm(5, limit, mode), "p1", round) == everything
        assert picked(swarm(5, offered - 1, mode), "p1", round) != everything


def test_whole_groups_are_chosen_from_as_many_peers_as_there_are_groups() -> None:
    for limit, groups in [(4, 1), (7, 1), (16, 4), (36, 9), (60, 15)]:
        recipe = swarm(10, limit)
        for round in range(20):
            of = picked(recipe, "p3", round)
            counts = [len(items) for items in of.values()]
            assert sum(counts) == groups
            assert max(counts) - min(counts) <= 1
            assert all(set(items) <= set(share(recipe, 1000, name, round)) for name, items in of.items())


def test_every_peer_and_every_place_in_a_share_is_chosen_equally_often() -> None:
    recipe = swarm(10, 16)
    rounds = 450
    peers, places = Counter[str](), Counter[int]()
    for round in range(rounds):
        for name, items in picked(recipe, "p0", round).items():
            peers[name] += len(items)
            places.update(share(recipe, 1000, name, round).index(item) for item in items)
    assert set(peers.values()) == {4 * rounds // 9}
    assert all(abs(count - 4 * rounds / 3) < 5 * (4 * rounds * 2 / 9) ** 0.5 for count in places.values())


def test_the_choice_depends_on_the_seed_the_round_and_the_learner_alone() -> None:
    def choices(seed: int, own: str) -> list[dict[str, list[int]]]:
        return [picked(swarm(10, 16, seed=seed), own, round) for round in range(9)]

    assert choices(0, "p0") == choices(0, "p0")
    assert len({str(c) for c in choices(0, "p0")}) == 9
    assert choices(0, "p0") != choices(1, "p0")
    without_own = [
        [{n: i for n, i in c.items() if n not in ("p0", "p1")} for c in choices(0, own)] for own in ("p0", "p1")
    ]
    assert without_own[0] != without_own[1]


def test_late_groups_take_what_the_limit_leaves() -> None:
    recipe = SimpleNamespace(training=SimpleNamespace(max_foreign_rollouts=12), rollouts_per_group=4)
    groups = [ScoredGroup(Group("b", round, item, ()), (), ()) for round, item in ((3, 0), (3, 1), (2, 2), (2, 3))]
    on_time, late = Admission(tuple(groups[:2]), ()), Admission(tuple(groups[2:]), ())
    kept = Peer.within_limit(SimpleNamespace(recipe=recipe), [on_time, late])  # type: ignore[arg-type]
    assert [a.admitted for a in kept] == [tuple(groups[:2]), (groups[2],)]
    assert kept[1].passed_over == (groups[3].group,)
    recipe.training.max_foreign_rollouts = 0
    assert Peer.within_limit(SimpleNamespace(recipe=recipe), [on_time, late]) == [on_time, late]  # type: ignore[arg-type]
