"""A round's start: whose log-probabilities are taken from the sampler, and whose from the learner."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from admissions import admitter, group, message
from conftest import TinyModelDir
from policies import weights
from rich.console import Console

from ftis.admission import Collected
from ftis.config import ModelError
from ftis.engines.stops import Stopping
from ftis.learning import CHECKED_ROLLOUTS, StepLoss, judge, learn, step_size
from ftis.peer import Peer
from ftis.recipe.parsing import parse
from ftis.records.events import ArmBegun, RoundEnded, placed
from ftis.rollouts import Batch, Rollout, collate
from ftis.run.assembly import assemble
from ftis.schedule import assigned
from ftis.selection import Judged, OwnOld, select
from ftis.view.progress import Display

MakePeer = Callable[..., Peer]


@pytest.fixture
def make_peer(tiny_model_dir: TinyModelDir, tmp_path: Path) -> MakePeer:
    def make(
        objective: str = "F-TIS",
        steps: int = 2,
        beta: float = 0.0,
        peer: Mapping[str, Any] = MappingProxyType({}),
        **sampling: Any,
    ) -> Peer:
        peer = {"name": "a", "model": str(tiny_model_dir()), "device": "cpu", "learning_rate": 1e-2, **peer}
        document = {
            "name": "tiny",
            "task": {"name": "clock", "validation_size": 4},
            "prompt": {"system_prompt": "", "template": "{question}="},
            "reward": {"function": "recipes.evenness"},
            "sampling": {"num_generations": 4, "max_completion_length": 8, **sampling},
            "training": {"prompts_per_round": 4, "steps_per_generation": steps},
            "objective": {"name": objective, "beta": beta},
            "peers": [peer],
        }
        return assemble(parse(document, where="test"), "a", tmp_path).peer

    return make


def whole_round(peer: Peer, round: int) -> Mapping[str, Any]:
    """The metrics of a round in which nobody else takes part."""
    peer.begin(round)
    return peer.finish(round, Collected({})).metrics


def batch_of(peer: Peer) -> Batch:
    return collate(peer.sample(0), peer.member.prompt_ids, peer.name)


def halved(batch: Batch) -> Batch:
    """The same, as if every second rollout were another peer's."""
    source_N = np.arange(len(batch)) % 2
    return replace(batch, source_N=source_N, own_N=source_N == 0, sources=("a", "b"))


def judged(peer: Peer, batch: Batch, steps: int = 2) -> Judged:
    return judge(batch, peer.member.advantages(batch), peer.policy, peer.decoding, peer.member.objective, steps)


def forwarded(peer: Peer) -> list[int]:
    """Fills up with the number of rows of each call for log-probabilities."""
    calls: list[int] = []
    logps = peer.policy.logps

    def counting(prompt_ids: Any, completion_ids: Any, temperature: float, drawn: Any = None) -> Any:
        calls.append(len(completion_ids))
        return logps(prompt_ids, completion_ids, temperature, drawn)

    peer.policy.logps = counting  # type: ignore[method-assign]
    return calls


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_own_rollouts_keep_their_samplers_log_probabilities(temperature: float, make_peer: MakePeer) -> None:
    peer = make_peer(temperature=temperature)
    batch = batch_of(peer)
    expected = peer.policy.logps(batch.prompt_ids, [r.completion_ids for r in batch.rollouts], temperature)
    calls = forwarded(peer)
    start = judged(peer, batch)
    assert len(start.rows) > CHECKED_ROLLOUTS
    assert sum(calls) == CHECKED_ROLLOUTS
    assert start.own_old == OwnOld.SAMPLED
    assert 0 < start.gap.max() < 1e-4
    for row, old in zip(start.rows, start.old_logp, strict=True):
        assert old is batch.rollouts[row].gen_logp
        np.testing.assert_allclose(old, expected[row], atol=1e-4)
    assert start.diagnostics is not None
    assert (start.diagnostics.raw_weight == 1).all()
    assert (start.diagnostics.k1_N == 0).all()


@pytest.mark.parametrize("train", [{}, {"train": "lora", "lora_r": 2}], ids=["full", "lora"])
def test_beta_pulls_back_to_the_model_at_the_start_on_rollouts_without_advantage_too(
    train: dict[str, Any], make_peer: MakePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert make_peer(peer=train).reference is None
    peer = make_peer(beta=0.5, peer=train | {"learning_rate": 1e-3}, steps=1)
    batch = batch_of(peer)
    asked = (batch.prompt_ids, [r.completion_ids for r in batch.rollouts], 1.0)
    start = peer.policy.logps(*asked)
    assert whole_round(peer, 0)["kl"] < 1e-9
    peer.policy.set_learning_rate(3e-3)
    for _ in range(3):
        peer.policy.step(*asked, lambda logp, mask, rows: logp.where(mask, 0.0).sum())
    assert peer.reference is not None
    for before, now, moved in zip(start, peer.reference(*asked), peer.policy.logps(*asked), strict=True):
        np.testing.assert_array_equal(before, now)
        assert np.abs(before - moved).max() > 0.01
    trained = [parameter.requires_grad for parameter in peer.policy.model.parameters()]
    assert sum(trained) == len(peer.policy.trainable)
    peer.policy.optimizer.state.clear()
    monkeypatch.setattr(peer.member, "advantages", lambda batch: torch.zeros(len(batch)))
    rounds = [whole_round(peer, round) for round in range(1, 7)]
    assert rounds[-1]["kl"] < rounds[0]["kl"]
    assert [metrics["optimizer_steps"] for metrics in rounds] == [1] * 6


def test_a_message_of_another_round_than_its_offers_is_not_admitted(make_peer: MakePeer) -> None:
    peer = make_peer()
    peer.member.admitter = admitter(max_staleness=2)
    of_three = message(group(0, round=3), round=3)
    for shifted in (Collected({"ada": of_three}), Collected({}, late=(("ada", 2, of_three),))):
        assert [r.reason for a in peer.member.admit(shifted, 4) for r in a.rejections] == ["wrong_round"]
    assert [len(a.admitted) for a in peer.member.admit(Collected({}, late=(("ada", 3, of_three),)), 4)] == [1]


def test_where_sampler_and_learner_differ_all_are_computed_again(make_peer: MakePeer) -> None:
    peer = make_peer()
    batch = batch_of(peer)
    expected = peer.policy.logps(batch.prompt_ids, [r.completion_ids for r in batch.rollouts], 1.0)
    off = tuple(Rollout(r.completion_ids, r.gen_logp - np.float32(0.01)) for r in batch.rollouts)
    calls = forwarded(peer)
    start = judged(peer, replace(batch, rollouts=off))
    assert start.own_old == OwnOld.RECOMPUTED
    assert sum(calls) == len(start.rows)  # none of them twice
    assert len(start.gap) == sum(len(batch.rollouts[row]) for row in start.rows)
    np.testing.assert_allclose(start.gap, 0.01, atol=1e-4)
    for row, old in zip(start.rows, start.old_logp, strict=True):
        np.testing.assert_allclose(old, expected[row], atol=1e-5)


def test_nothing_is_trained_where_they_are_two_policies(make_peer: MakePeer) -> None:
    peer, other = make_peer(), make_peer()
    draw = other.sampler

    def of_another(policy: Any, *arguments: Any) -> list[tuple[Rollout, ...]]:
        return draw(other.policy, *arguments)

    before = weights(other.policy)
    other.policy.step([np.array([5], np.int32)], [np.array([7, 8], np.int32)], 1.0, lambda logp, mask, rows: logp.sum())
    peer.sampler = Stopping(of_another)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"peer 'a': .*: the sampler is"):
        peer.begin(0)
    assert all(torch.equal(value, before[name]) for name, value in weights(peer.policy).items())


@pytest.mark.parametrize("objective", ["NoIS", "F-TIS", "F-VIS"])
def test_a_rounds_only_step_takes_log_pi_old_from_its_own_pass(
    objective: str, make_peer: MakePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gradient is that with log π_old computed before."""
    peer = in_bfloat16(make_peer(objective=objective), monkeypatch)
    batch = halved(batch_of(peer))
    noise = np.random.default_rng(0).normal(scale=0.05, size=(len(batch), peer.decoding.max_completion_length))
    off = [
        Rollout(r.completion_ids, np.minimum(r.gen_logp + noise[i, : len(r)], 0).astype(np.float32))
        for i, r in enumerate(batch.rollouts)
    ]
    batch = replace(batch, rollouts=tuple(off))

    def gradient(start: Judged) -> torch.Tensor:
        step = step_size(batch, np.arange(len(batch)), peer.decoding)
        loss = StepLoss(start, select(start, peer.member.selections), peer.member.objective, start.rows, step)
        peer.policy.backward(batch.prompts(start.rows), batch.completion_ids(start.rows), 1.0, loss)
        return torch.cat([p.grad.flatten() for p in peer.policy.trainable if p.grad is not None])

    before = judged(peer, batch, steps=2)
    assert before.own_old == OwnOld.RECOMPUTED
    expected = gradient(before)
    calls = forwarded(peer)
    start = judged(peer, batch, steps=1)
    assert start.own_old == OwnOld.IN_STEP
    foreign = int((~batch.own_N[start.rows]).sum())
    assert sum(calls) == foreign + min(CHECKED_ROLLOUTS, len(start.rows) - foreign)
    assert len(start.gap)
    torch.testing.assert_close(gradient(start), expected, rtol=1e-4, atol=1e-7)
    # Where nothing is clipped, ρ = π_θ / π_gen corrects as w · ρ does; without a weight it would be another gradient.
    as_sampled = gradient(replace(start, own_old=OwnOld.SAMPLED))
    assert torch.allclose(as_sampled, expected, rtol=1e-4, atol=1e-7) == (objective != "NoIS")

    chosen = select(start, peer.member.selections)
    steps = [np.arange(len(batch))]
    _, known = learn(peer.policy, start, chosen, peer.member.objective, peer.decoding, steps)  # what is recorded
    for now, then in zip(known.old_logp, before.old_logp, strict=True):
        np.testing.assert_allclose(now, then, atol=1e-5)
    assert known.diagnostics is not None
    assert before.diagnostics is not None
    torch.testing.assert_close(known.diagnostics.raw_weight, before.diagnostics.raw_weight, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(known.diagnostics.k1_N, before.diagnostics.k1_N, rtol=1e-3, atol=1e-4)


def in_bfloat16(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> Peer:
    """A peer that takes its arithmetic for bfloat16, while its numbers are as exact as before."""
    peer.policy.compute_dtype, peer.policy.head = torch.bfloat16, None
    monkeypatch.setattr(peer.policy, "precision", contextlib.nullcontext)
    return peer


@pytest.mark.parametrize(("off_by", "bfloat16"), [(0.2, True), (0.05, False)])
def test_a_sampler_of_another_policy_is_no_rounding(
    off_by: float, bfloat16: bool, make_peer: MakePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = in_bfloat16(make_peer(), monkeypatch) if bfloat16 else make_peer()
    batch = batch_of(peer)
    off = tuple(Rollout(r.completion_ids, r.gen_logp - np.float32(off_by)) for r in batch.rollouts)
    assert judged(peer, replace(batch, rollouts=off), steps=1).own_old == OwnOld.RECOMPUTED


@pytest.mark.parametrize("truncation", [{"top_k": 5}, {"top_p": 0.8}])
def test_with_a_truncated_distribution_all_are_computed_again(truncation: Any, make_peer: MakePeer) -> None:
    peer = make_peer(**truncation)
    batch, calls = batch_of(peer), forwarded(peer)
    start = judged(peer, batch, steps=1)
    assert (start.own_old, len(start.gap), sum(calls)) == (OwnOld.RECOMPUTED, 0, len(start.rows))


@pytest.mark.parametrize(
    ("settings", "tolerance", "said"),
    [
        ({}, 1e-3, ""),
        ({"top_k": 5}, 1e-3, "arm/a: top-k or top-p is on: log-probabilities of own rollouts are computed again"),
        ({}, 1e-9, "nats: log-probabilities of own rollouts are computed again"),
        ({"steps": 1}, 1e-9, "nats: log π_old of own rollouts is taken from the optimiser step"),
    ],
)
def test_a_round_says_whether_they_were_computed_again(
    settings: Any, tolerance: float, said: str, make_peer: MakePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftis.learning.LOGP_TOLERANCE", tolerance)
    peer = make_peer(**settings)
    if "steps" in settings:
        peer = in_bfloat16(peer, monkeypatch)
    out = io.StringIO()
    display = Display(Console(file=out, width=200))
    say = placed(display, arm="arm", peer="a")
    say(ArmBegun(("a",), 2))
    for round in range(2):
        metrics = whole_round(peer, round)
        assert metrics["sampling/logp_recomputed"] is ("computed again" in said)
        assert ("sampling/checked_logp_difference/max" in metrics) == ("top_k" not in settings)
        say(RoundEnded(metrics))
    told = [line for line in out.getvalue().splitlines() if "own rollouts" in line]
    assert len(told) == bool(said)  # once, not every round
    assert said in out.getvalue()


def test_a_round_samples_the_prompts_of_its_peer_and_counts_their_tokens(make_peer: MakePeer) -> None:
    peer, tokens = make_peer(), 0
    for round in range(2):
        own = peer.sample(round)  # the round draws the same again
        assert [s.group.item for s in own] == sorted(assigned(peer.recipe, len(peer.member.task.train), "a", round))
        tokens += sum(len(rollout) for scored in own for rollout in scored.group.rollouts)
        assert whole_round(peer, round)["tokens_sampled"] == tokens
