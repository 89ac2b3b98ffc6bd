"""Whose groups a peer learns from under ``training.max_foreign_rollouts``: the same whenever it asks."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from ftis.admission import Admission
from ftis.config import Recipe
from ftis.guards.limit import ForeignLimit, take_turns
from ftis.rollouts import Group, ScoredGroup
from ftis.schedule import assigned
from recipes import swarm


@given(st.integers(1, 100), st.integers(1, 30), st.integers(0, 2**32))
@settings(deadline=None)
def test_turns_are_even_within_a_round_and_over_any_number_of_rounds(names: int, count: int, seed: int) -> None:
    everybody = [f"p{i}" for i in range(names)]
    so_far = dict.fromkeys(everybody, 0)
    for round in range(20):
        turns = take_turns(everybody, count, round, seed)
        assert sum(turns.values()) == count
        assert min(turns.values()) > 0
        assert len(turns) == min(names, count)
        assert max(turns.values()) - min(turns.get(name, 0) for name in everybody) <= 1
        for name, picks in turns.items():
            so_far[name] += picks
        assert max(so_far.values()) - min(so_far.values()) <= 1


def picked(recipe: Recipe, own: str, round: int) -> dict[str, list[int]]:
    others, limit = [p.name for p in recipe.peers if p.name != own], ForeignLimit(recipe, own)
    return {name: sorted(limit.wanted(name, round, assigned(recipe, 1000, name, round))) for name in others}


@given(st.sampled_from(["vertical", "horizontal"]))
@settings(deadline=None)
def test_a_limit_that_all_fit_in_changes_nothing(mode: str) -> None:
    offered = 4 * 4 * (3 if mode == "vertical" else 15)
    for round in range(6):
        everything = picked(swarm(5, 0, mode), "p1", round)
        assert everything == {n: sorted(assigned(swarm(5, 0, mode), 1000, n, round)) for n in everything}
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
            assert all(set(items) <= set(assigned(recipe, 1000, name, round)) for name, items in of.items())


def test_every_peer_and_every_place_in_an_assignment_is_chosen_equally_often() -> None:
    recipe = swarm(10, 16)
    rounds = 450
    peers, places = Counter[str](), Counter[int]()
    for round in range(rounds):
        for name, items in picked(recipe, "p0", round).items():
            peers[name] += len(items)
            places.update(assigned(recipe, 1000, name, round).index(item) for item in items)
    assert set(peers.values()) == {4 * rounds // 9}
    assert all(abs(count - 4 * rounds / 3) < 5 * (4 * rounds * 2 / 9) ** 0.5 for count in places.values())


def test_the_choice_depends_on_the_seed_the_round_and_the_learner_alone() -> None:
    def choices(seed: int, own: str) -> list[dict[str, list[int]]]:
        return [picked(swarm(10, 16, seed=seed), own, round) for round in range(9)]

    assert choices(0, "p0") == choices(0, "p0")
    assert choices(0, "p0")[4] == picked(swarm(10, 16), "p0", 4)  # without a memory of earlier rounds
    assert len({str(c) for c in choices(0, "p0")}) == 9
    assert choices(0, "p0") != choices(1, "p0")
    without_own = [
        [{n: i for n, i in c.items() if n not in ("p0", "p1")} for c in choices(0, own)] for own in ("p0", "p1")
    ]
    assert without_own[0] != without_own[1]


def test_a_peer_that_sends_nothing_leaves_its_room_to_late_groups_alone() -> None:
    """Who is silent, or sends half, changes nothing of what is wanted of the others."""
    limit = ForeignLimit(swarm(5, 16), "p0")
    scored = ScoredGroup(Group("p1", 0, 0, ()), (), ())
    silent, half, full = (Admission(name, (scored,) * n, ()) for name, n in (("p1", 0), ("p2", 1), ("p3", 3)))
    assert [len(kept.admitted) for kept in limit.within_room([silent, half, full])] == [0, 1, 3]
    assert [len(kept.admitted) for kept in limit.within_room([full, full, half])] == [3, 1, 0]
    assert [len(kept.passed_over) for kept in limit.within_room([full, full, half])] == [0, 2, 1]
