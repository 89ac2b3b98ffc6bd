"""``training.overlap``: a round is sampled before the one before it is learned from."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from run_files import differences, records_of, same, weights
from twin import Twin

from ftis.admission import Admitter, Collected
from ftis.config import Recipe
from ftis.experiment.runs import run
from ftis.guards.regret import NoRegret
from ftis.learning import judge
from ftis.peer import Peer
from ftis.policy import Policy
from ftis.recipe.parsing import parse
from ftis.records.events import Event, NetworkEvent, RoundEnded, Say, unheard
from ftis.records.files import read_jsonl, saved_steps
from ftis.records.reading import PeerRun
from ftis.records.writing import Records
from ftis.rollouts import collate
from ftis.run.assembly import assemble
from ftis.run.training import Trainer
from ftis.swarm.link import NetworkExchange
from ftis.swarm.rounds import Rounds
from ftis.swarm.shares import Share
from recipes import pair_of

ROUNDS, ALARM = 8, 5


def recipe_in(place: Path, models: dict[str, Path], overlap: int = 1, peers: str = "ab", **more: Any) -> Recipe:
    training = {"rounds": ROUNDS, "prompts_per_round": 4, "eval_every": 0, "save_every": 2, "overlap": overlap}
    document = pair_of(models, place, 2e-2, training=training | more.pop("training", {}), **more)
    document["peers"] = [peer for peer in document["peers"] if peer["name"] in peers]
    return parse(document, where="test")


def peer_of(place: Path, models: dict[str, Path], **more: Any) -> Peer:
    return assemble(recipe_in(place, models, peers="a", **more), "a", place).peer


def finish(peer: Peer, round: int) -> Mapping[str, Any]:
    return peer.finish(round, Collected({})).metrics


def train_a(recipe: Recipe, place: Path, say: Say = unheard, share_of: Callable[[int], int] | None = None) -> None:
    """Train the peer ``a`` from its newest checkpoint on, while nothing comes from ``b``."""
    step = max(saved_steps(place), default=0)
    with closing(assemble(recipe, "a", place, resume_step=step)) as trainer, suppress(StopIteration):
        if share_of is not None:
            trainer.peer.member.share = share_of
        rounds = trainer.train(say)
        next(rounds)
        while True:
            rounds.send(Collected({}, ("b",)))


def test_own_rollouts_of_earlier_weights_are_weighed_as_foreign_ones(tmp_path: Path, models: dict[str, Path]) -> None:
    peer = peer_of(tmp_path, models)
    peer.begin(0)
    peer.sample_ahead(1)
    assert finish(peer, 0)["sampling/staleness"] == 0
    peer.begin(1)
    batch = collate(peer._begun[1].drawn.own, peer.member.prompt_ids, "a")
    member, cap = peer.member, peer.member.objective.importance_sampling_clip_max
    asked = (batch, member.advantages(batch), peer.policy, peer.decoding, member.objective, 1)
    start = judge(*asked, on_policy=False)
    old = peer.policy.logps(batch.prompts(start.rows), batch.completion_ids(start.rows), 1.0)
    ratios = [np.exp(one - batch.rollouts[row].gen_logp) for one, row in zip(old, start.rows, strict=True)]
    assert start.diagnostics is not None
    np.testing.assert_allclose(start.diagnostics.raw_weight, np.concatenate(ratios), rtol=1e-4)
    np.testing.assert_allclose(start.diagnostics.weight, np.concatenate(ratios).clip(max=cap), rtol=1e-4)
    assert np.abs(np.concatenate(ratios) - 1).max() > 0.01
    assert not len(start.gap)  # it would be no difference between sampler and learner

    row = finish(peer, 1)
    assert row["sampling/staleness"] == 1
    assert row["peer/a/sampling/importance_sampling_ratio/max"] == pytest.approx(max(map(np.max, ratios)), rel=1e-4)
    assert row["peer/a/dropped"] == 0
    assert "foreign_used" not in row
    assert "sampling/checked_logp_difference/max" not in row


def test_a_round_is_sampled_by_the_weights_of_two_rounds_before(tmp_path: Path, models: dict[str, Path]) -> None:
    peer, lockstep = (peer_of(tmp_path / str(overlap), models, overlap=overlap) for overlap in (1, 0))
    sent = []
    for round in range(3):
        sent.append(peer.begin(round).message)
        peer.sample_ahead(round + 1)
        finish(peer, round)
    assert lockstep.begin(0).message == sent[0]
    lockstep.sample_ahead(1)
    assert lockstep.begin(1).message == sent[1]
    assert "sampling/staleness" not in finish(lockstep, 0)
    assert lockstep.begin(2).message == sent[2]


def test_seconds_of_sampling_ahead_count_for_its_own_round_and_not_as_waiting(
    tmp_path: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, now = peer_of(tmp_path, models), [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    sample = peer.sample

    def slow(round: int) -> Any:
        now[0] += 10.0 ** (round + 1)
        return sample(round)

    peer.sample = slow  # type: ignore[method-assign]
    peer.begin(0)
    peer.sample_ahead(1)
    now[0] += 3
    rows = [finish(peer, 0)]
    peer.begin(1)
    rows.append(finish(peer, 1))
    assert [(row["time/sample"], row["time/wait"], row["step_time"]) for row in rows] == [(10, 3, 13), (100, 0, 100)]


class Killed(BaseException):
    """Nothing handles it, as nothing handles a kill."""


@contextmanager
def killed_at(owner: type, method: str, call: int, when: str) -> Iterator[None]:
    """Die before or after a method is called for the ``call``-th time."""
    original, calls = getattr(owner, method), [0]

    def deadly(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == call and when == "before":
            raise Killed
        returned = original(*arguments, **options)
        if calls[0] == call:
            raise Killed
        return returned

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, method, deadly)
        yield


@pytest.fixture
def goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard of peer ``a`` goes back to the second checkpoint after the round ``ALARM``."""

    def take(self: NoRegret, step: int, groups: Any, senders: Any) -> None:
        self.best, self.remarks = 2, []
        self.back_to = 2 if step == ALARM and self.own == "a" else None

    monkeypatch.setattr(NoRegret, "take", take)


KILLS = [
    (Peer, "begin", 2, "before"),
    (Peer, "sample_ahead", 3, "after"),
    (Peer, "finish", 1, "before"),
    (Peer, "learn_from", 2, "after"),
    (Trainer, "go_back", 3, "before"),
    (Records, "round", 2, "after"),
    (Trainer, "save", 1, "after"),
    (Trainer, "save", 1, "before"),
]
"""Between two kills the peer finishes a few rounds, or none. Behind some it trains several again."""


@dataclass
class OfSpeed:
    """The lives of peer ``a``. What ``b`` says of its time depends on how far the rounds have come."""

    recipe: Recipe
    place: Path
    furthest: int = 0
    life: int = 0

    def train(self, say: Say) -> None:
        self.life += 1
        key = Ed25519PrivateKey.from_private_bytes(bytes(32))
        keys: dict[str, Any] = {"key": key, "roster": None, "max_bytes": 1, "max_items": 1, "incarnation": self.life}
        box = self.place / "outbox"
        network = NetworkExchange(self.recipe, "a", run="0" * 32, facts={}, outbox=box, say=say, **keys)

        def share(round: int) -> int:
            self.furthest = max(self.furthest, round)
            return network.own_share(round)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Rounds, "milliseconds", property(lambda rounds: [2000 + 700 * (self.furthest % 4)]))
            patch.setattr(Share, "took", at_a_known_speed)
            network.share.resume(PeerRun.read(self.place).rounds, max(saved_steps(self.place), default=0))
            train_a(self.recipe, self.place, network.hear, share)


took = Share.took


def at_a_known_speed(share: Share, metrics: Mapping[str, Any]) -> None:
    """Note a round as if a prompt had taken .5 to .7 s, and all else a second."""
    sampling = metrics["peer/a/admitted"] / share.group * (0.5 + 0.1 * (metrics["step"] % 3))
    took(share, {**metrics, "time/sample": sampling, "time/wait": 0.0, "step_time": sampling + 1})


@pytest.mark.parametrize(("overlap", "share"), [(1, "equal"), (1, "speed"), (0, "speed")])
def test_killed_at_each_point_of_a_round_it_ends_as_if_unbroken(
    overlap: int, share: str, goes_back: None, tmp_path: Path, models: dict[str, Path]
) -> None:
    rewards = {"function": ["earned.third", "recipes.evenness"]}
    training = {"no_regret": 0.1, "share": share, "save_every": ROUNDS}  # and for the guard after 2 and 5 rounds
    recipe, said = recipe_in(tmp_path, models, overlap, reward=rewards, training=training), list[str]()

    def say(event: Event) -> None:
        if isinstance(event, NetworkEvent):
            said.append(event.text)

    unbroken, killed = tmp_path / "unbroken", tmp_path / "killed"
    OfSpeed(recipe, unbroken).train(say)
    assert said == [f"round {ALARM + 1} is sampled again, by the weights of step 2"] * overlap
    lives = OfSpeed(recipe, killed)
    for owner, method, call, when in KILLS:
        if method == "sample_ahead" and not overlap:
            continue
        with killed_at(owner, method, call, when), pytest.raises(Killed):
            lives.train(say)
    lives.train(say)
    assert differences(records_of(killed), records_of(unbroken)) == []
    assert same(*(weights(place / f"checkpoint-{ROUNDS}") for place in (unbroken, killed)))
    rows = read_jsonl(unbroken / "metrics.jsonl")
    if overlap:
        assert [row["sampling/staleness"] for row in rows] == [int(at not in (0, ALARM)) for at in range(ROUNDS)]
    shares = {row["peer/a/admitted"] for row in rows}
    assert len(shares) == 1 if share == "equal" else len(shares) > 2


@pytest.mark.parametrize(("owner", "method"), [(Peer, "sample_items"), (Admitter, "score_group")])
def test_a_finished_round_outlives_the_failure_of_the_draw_for_the_next(
    owner: type, method: str, tmp_path: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vLLM server draws round 3 while the peer learns from round 2, and may be gone then."""
    monkeypatch.setattr(Twin, "draws_alone", True)
    training, sampling = {"save_every": ROUNDS}, {"sampler": "twin.with_twin", "max_completion_length": 8}
    recipe = recipe_in(tmp_path, models, training=training, sampling={"num_generations": 8, **sampling})

    train = partial(train_a, recipe, tmp_path)
    original = getattr(owner, method)

    def gone(self: Twin, policy: Policy) -> None:
        raise OSError("no server for new weights")

    def failing(self: Any, asked: Any, *more: Any) -> Any:
        if 3 in more or getattr(asked, "round", 0) == 3:
            if owner is Peer:
                patch.setattr(Twin, "load", gone)
            raise OSError("no draw, or no reward")
        return original(self, asked, *more)

    with monkeypatch.context() as patch:
        patch.setattr(owner, method, failing)
        with pytest.raises(OSError, match="no reward"):
            train()
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert saved_steps(tmp_path) == [3]
    train()
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [*range(1, ROUNDS + 1)]


def test_peers_of_one_machine_overlap_and_a_stopped_run_goes_on_alike(tmp_path: Path, models: dict[str, Path]) -> None:
    """It is stopped while ``a`` waits, and ``b`` is asked before its round."""

    def recipe(place: str) -> Recipe:
        return recipe_in(tmp_path / place, models, training={"rounds": 5})

    assert run(recipe("unbroken"))
    stop = threading.Event()

    def say(event: Event) -> None:
        if isinstance(event, RoundEnded) and event.metrics["step"] == 3:
            stop.set()

    assert not run(recipe("stopped"), say=say, stop=stop)
    assert run(recipe("stopped"), resume=True)
    unbroken, stopped = (records_of(tmp_path / place / "tiny-seed0") for place in ("unbroken", "stopped"))
    assert differences(stopped, unbroken) == []
    rows = unbroken["F-TIS/b/metrics.jsonl"]
    assert [row["peer/a/admitted"] for row in rows] == [16] * 5
