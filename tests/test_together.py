"""Peers of one machine: who computes when, what each gets, and who stops with whom."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftis.admission import Collected
from ftis.member import Outgoing
from ftis.objectives import F_TIS
from ftis.recipe.parsing import load
from ftis.records.events import Evaluated, Event, PeerFinished, PeerStopped, RoundEnded
from ftis.records.files import saved_steps
from ftis.rewards.scoring import WeightedScorer
from ftis.run import checkpoint
from ftis.run.assembly import assemble
from ftis.run.together import Turns, TurnTaking, delivered, go_on, in_turns
from ftis.selection import Judged
from ftis.swarm.facts import ExchangeError


def message(peer: str, round: int) -> bytes:
    return f"{peer} in round {round}".encode() + bytes(round + 1)


def outgoing(peer: str, round: int, **wishes: Any) -> Outgoing:
    return Outgoing(round, message(peer, round), (2, 5, 7), **wishes)


def others(names: str, own: str, round: int) -> Collected:
    return Collected({name: message(name, round) for name in names if name != own})


def test_a_message_that_is_not_wanted_is_offered_only_and_a_skipped_peer_is_delivered() -> None:
    wishes = {"skip": frozenset("b"), "offers_only": frozenset("c")}
    sent = {"a": outgoing("a", 0, **wishes), "b": outgoing("b", 0), "c": outgoing("c", 0)}
    got = delivered(sent)
    assert got["a"] == Collected({"b": message("b", 0)}, offered_only={"c": 3})
    assert got["b"] == others("abc", "b", 0)


@given(
    swarms=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    at_a_time=st.integers(1, 5),
    rounds=st.integers(1, 4),
    seed=st.integers(0, 2**16),
    leaver=st.none() | st.tuples(st.integers(0, 20), st.integers(0, 4)),
)
def test_any_order_gives_each_every_message_and_stops_a_swarm_after_one_round(
    swarms: list[int], at_a_time: int, rounds: int, seed: int, leaver: tuple[int, int] | None
) -> None:
    """Peers compute in any order. One of them may leave in the middle."""
    names = [[f"{index}-{member}" for member in range(size)] for index, size in enumerate(swarms)]
    every = [name for swarm in names for name in swarm]
    swarm_of = {name: swarm for swarm in names for name in swarm}
    leaves = {every[leaver[0] % len(every)]: leaver[1]} if leaver else {}
    turns = Turns(names, at_a_time)
    rng, finished, computing, ended = random.Random(seed), Counter[str](), dict[str, int | None](), set[str]()
    for name in every:
        turns.asks(name, None)
    awaited: dict[str, int] = {}
    while len(ended) < len(every):
        for name, reply in turns.next():
            assert name not in computing
            if name not in awaited:
                computing[name] = 0
            elif reply is None:
                computing[name] = None  # asked to stop
            else:
                round = awaited[name]
                assert reply.messages == {n: message(n, round) for n in swarm_of[name] if n != name}
                finished[name] += 1
                computing[name] = round + 1
        assert 0 < len(computing) <= at_a_time, "nobody can go on"
        name = rng.choice(sorted(computing))
        next_round = computing.pop(name)
        if next_round is None or next_round == rounds or leaves.get(name) == next_round:
            ended.add(name)
            turns.left(name)
        else:
            awaited[name] = next_round
            turns.asks(name, outgoing(name, next_round))
    assert turns.next() == []
    for swarm in names:
        expected = min([rounds, *(leaves[name] for name in swarm if name in leaves)])
        assert {finished[name] for name in swarm} == {expected}


def peer(name: str, rounds: int, log: list[str], fails_in: int = -1) -> TurnTaking:
    for round in range(rounds):
        log.append(f"{name} begins {round}")
        if round == fails_in:
            raise OSError(f"{name} fails")
        collected = yield outgoing(name, round)
        if collected is None:
            log.append(f"{name} stops in {round}")
            return
        log.append(f"{name} finishes {round} with {''.join(collected.messages)}")


def test_peers_of_a_process_take_turns_between_what_comes_before_and_after() -> None:
    log: list[str] = []
    in_turns({name: peer(name, 2, log) for name in "ab"}, log.append, lambda: log.append("-"))
    assert log == [
        *("a", "a begins 0", "-", "b", "b begins 0", "-"),
        *("a", "a finishes 0 with b", "a begins 1", "-", "b", "b finishes 0 with a", "b begins 1", "-"),
        *("a", "a finishes 1 with b", "-", "b", "b finishes 1 with a", "-"),
    ]


def test_where_one_fails_the_others_stop_before_its_error_is_raised() -> None:
    log: list[str] = []
    with pytest.raises(OSError, match="b fails"):
        in_turns({n: peer(n, 3, log, fails_in=1 if n == "b" else -1) for n in "abc"})
    assert [line for line in log if "stops" in line] == ["a stops in 1", "c stops in 1"]


DEMO_PAIR = Path(__file__).parents[1] / "recipes" / "demo_pair.toml"
SMALL = (
    *("training.rounds=3", "training.prompts_per_round=4", "training.eval_every=0", "sampling.num_generations=4"),
    *("task.validation_size=2", "ood=[]", "arms=[]"),
)


@pytest.mark.parametrize("finished", [0, 1, 3])
def test_a_peer_that_is_asked_to_stop_saves_before_it_evaluates(finished: int, tmp_path: Path) -> None:
    often = ("training.eval_every=1", "training.save_every=5", "ood=[{name='clock', validation_size=2}]")
    two_rewards = "reward.function=['test_together.longest', 'test_together.shortest']"
    recipe = load(DEMO_PAIR, (*SMALL, *often, two_rewards))
    swarm = recipe.of_swarm(("small",))
    trainer, heard = assemble(swarm, "small", tmp_path, networked=True), list[Event]()

    def rounds() -> int:
        return sum(isinstance(event, RoundEnded) for event in heard)

    go_on(trainer.train(heard.append, lambda: rounds() == finished), lambda: Collected({}))
    assert rounds() == finished
    assert isinstance(heard[-1], PeerStopped)
    assert [event.step for event in heard if isinstance(event, Evaluated)] == list(range(finished))
    assert saved_steps(tmp_path) == [finished] * (finished > 0)
    scores = [exam.score for exam in trainer.splits.values()]
    assert not any(score.seen for score in scores if isinstance(score, WeightedScorer)), "an evaluation's texts stay"
    go_on(trainer.train(heard.append), lambda: Collected({}))
    assert isinstance(heard[-1], PeerFinished)
    assert sorted({event.step for event in heard if isinstance(event, Evaluated)}) == [0, 1, 2, 3]


@pytest.mark.parametrize("names", [("small",), ("small", "large")])  # with others the no-regret guard saves, too
def test_a_peer_that_skips_rounds_is_saved_and_evaluated_as_often(names: tuple[str, ...], tmp_path: Path) -> None:
    """It finishes the steps 1, 5, 8 and 10 of ten, and passes the multiples 3, 6 and 9 of three while it skips."""
    often = ("training.rounds=10", "training.eval_every=3", "training.save_every=3", "training.save_total_limit=9")
    swarm = load(DEMO_PAIR, (*SMALL, *often, "training.no_regret=0.1")).of_swarm(names)
    trainer, heard = assemble(swarm, "small", tmp_path, networked=True), list[Event]()
    ahead = {0: 0, 1: 4, 5: 7, 8: 9}
    missing = names[1:]
    go_on(trainer.train(heard.append, next_round=ahead.__getitem__), lambda: Collected({}, missing=missing))
    assert [event.step for event in heard if isinstance(event, Evaluated)] == [0, 5, 8, 10]
    assert saved_steps(tmp_path) == [5, 8, 10]


GUARDED = (*SMALL, "training.no_regret=0.1")


@pytest.mark.parametrize("place", ["training.selections=['{}']", "objective.name='{}'"])
def test_a_selection_that_fails_leaves_what_others_remember_as_it_was(place: str, tmp_path: Path) -> None:
    own = place.format("test_together.second_round" if "selections" in place else "test_together.WITH_SELECTION")
    swarm = load(DEMO_PAIR, (*GUARDED, own)).of_swarm(("small", "large"))
    trainer = assemble(swarm, "small", tmp_path, networked=True)
    with pytest.raises(RuntimeError, match="the second round"):
        go_on(trainer.train(lambda event: None), lambda: Collected({}, missing=("large",)))
    assert saved_steps(tmp_path) == [1]
    assert len(checkpoint.selections(tmp_path, 1)["regret"]["rewards"]) == 1


def test_a_finished_round_that_could_not_be_reported_is_remembered(tmp_path: Path) -> None:
    swarm = load(DEMO_PAIR, (*GUARDED, "training.selections=['test_together.all_of_them']"))
    trainer = assemble(swarm.of_swarm(("small", "large")), "small", tmp_path, networked=True)

    def report(metrics: Any) -> None:
        if metrics["step"] == 2:
            raise RuntimeError("the tracker is gone")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.records, "report", report)
        with pytest.raises(RuntimeError, match="tracker"):
            go_on(trainer.train(lambda event: None), lambda: Collected({}, missing=("large",)))
    assert saved_steps(tmp_path) == [2]
    assert len(checkpoint.selections(tmp_path, 2)["regret"]["rewards"]) == 2


def all_of_them(judged: Judged) -> list[float]:
    return [1.0] * len(judged.rows)


def second_round(judged: Judged) -> list[float]:
    if judged.batch.round_N.max() == 1:
        raise RuntimeError("the second round")
    return [1.0] * len(judged.rows)


WITH_SELECTION = replace(F_TIS, selections=(second_round,))


def longest(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def shortest(completions: list[str], **_: Any) -> list[float]:
    return [-float(len(text)) for text in completions]


def test_a_peer_saves_its_finished_rounds_if_messages_cannot_be_had(tmp_path: Path) -> None:
    swarm = load(DEMO_PAIR, SMALL).of_swarm(("small", "large"))
    trainer = assemble(swarm, "small", tmp_path, networked=True)
    coming = [Collected({}, missing=("large",))]

    def messages() -> Collected:
        if not coming:
            raise ExchangeError("below the quorum")
        return coming.pop()

    with pytest.raises(ExchangeError, match="below the quorum"):
        go_on(trainer.train(lambda event: None), messages)
    assert saved_steps(tmp_path) == [1]
