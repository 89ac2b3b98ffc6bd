"""Texts that others brought and that own answers take up: evidence by hand, and a table of swarms."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from math import comb

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from ftis.advantages import group_advantages
from ftis.guards.grams import SIZES, Grams
from ftis.guards.plants import MOST, MUCH, ODDS, TAKEN_UP, UNHELD, USUAL, PlantTest, log_help
from ftis.guards.regret import NoRegret
from ftis.rollouts import Group, Rollout, ScoredGroup, collate
from ftis.selection import Judged
from recipes import recipe_of


def test_the_evidence_of_one_success_among_three_failures() -> None:
    """The holder is the rewarded one with probability 1/4 by chance, and ω/(3 + ω) if it helps."""
    assert np.exp(log_help(4, 1, 1, 1)) == pytest.approx(4 * ODDS / (3 + ODDS))


@given(st.integers(1, 8), st.data())
@settings(deadline=None)
def test_evidence_of_help_is_at_most_1_in_expectation_unless_the_odds_are_higher(n: int, data: st.DataObject) -> None:
    held, rewarded = data.draw(st.integers(0, n)), data.draw(st.integers(0, n))
    harm = data.draw(st.floats(0, 3))
    holds = np.arange(n) < held
    total, expected, against = 0.0, np.zeros(len(ODDS)), np.zeros(len(ODDS))
    for rows in combinations(range(n), rewarded):
        good = np.isin(np.arange(n), rows)
        weight = np.exp(-harm * (good & holds).sum())  # the odds of a reward are lower by the factor e^-harm
        evidence = np.exp(log_help(n, held, rewarded, int((holds & good).sum())))
        total, expected = total + weight, expected + weight * evidence
        against += ODDS ** (good & holds).sum() / evidence  # each ω multiplies the odds
    if not harm:
        assert total == comb(n, rewarded)
        assert expected / total == pytest.approx(1)
        likely = sum(ODDS ** (np.isin(np.arange(n), rows) & holds).sum() for rows in combinations(range(n), rewarded))
        assert against / likely == pytest.approx(1)
    assert (expected / total <= 1 + 1e-9).all()


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=5), st.data())
@settings(deadline=None)
def test_n_grams_are_those_that_slices_give(rows: list[list[int]], data: st.DataObject) -> None:
    grams = Grams.of([np.array(row, np.int32) for row in rows])
    expected = {
        (tuple(row[at : at + size]), i)
        for i, row in enumerate(rows)
        for size in SIZES
        for at in range(len(row) - size + 1)
    }
    found = zip(grams.ids_of(grams.number_X), grams.row_X, strict=True)
    assert sorted(found) == sorted(expected)
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows))))
    items = np.array(data.draw(st.lists(st.integers(0, 2), min_size=len(rows), max_size=len(rows))))
    groups = grams.groups(mask, items)
    numbers = np.unique(grams.number_X)[::-1]
    holds_TN = grams.holds(numbers.tolist(), len(rows))
    for number, of, holds_N in zip(numbers, grams.ids_of(numbers), holds_TN, strict=True):
        holders = {row for ids, row in expected if ids == of}
        assert set(np.flatnonzero(holds_N)) == holders
        assert groups[number] == len({items[row] for row in holders if mask[row]})


PLANT = (90, 91)
GROUPS, SIZE, FIRST = 6, 8, 6
FOUND_BY = 4
"""Rounds in which a text that all own groups hold is surely found."""

Completions = Sequence[tuple[tuple[int, ...], float]]
"""Tokens and reward of a group's completions."""


def scored(peer: str, round: int, item: int, completions: Completions) -> ScoredGroup:
    rollouts = tuple(Rollout(np.array(ids, np.int32), np.zeros(len(ids), np.float32)) for ids, _ in completions)
    return ScoredGroup(Group(peer, round, item, rollouts), ("",) * len(rollouts), tuple(r for _, r in completions))


def judged_of(groups: Sequence[ScoredGroup]) -> Judged:
    batch = collate(groups, lambda *_: np.zeros(1, np.int32), "me")
    advantage_N = group_advantages(torch.from_numpy(batch.reward_N), torch.from_numpy(batch.group_N)).float()
    rows = np.flatnonzero(advantage_N.numpy())
    return Judged(batch, advantage_N, rows, [], None, np.zeros(0, np.float32))


def completions(bad: Iterable[int], held: Iterable[int] = (), text: tuple[int, ...] = PLANT) -> Completions:
    """A group whose ``bad`` completions fail, and whose ``held`` ones hold the text."""
    return [((1, *(text if i in held else ()), 2 + i % 2), float(i not in bad)) for i in range(SIZE)]


ALL, SOME = range(SIZE), (2, 4)
NOTHING, PLANTED = completions([1]), completions([1], SOME)
SPOILED = completions(SOME, SOME)
NEUTRAL = completions([0, 1, 2, 3], SOME)  # one of the two fails, and half of all
BETTER = completions([1, 3, 5, 6, 7], SOME)


def a_round(round: int, own: Completions, others: Mapping[str, Completions], groups: int = GROUPS) -> Judged:
    """A round of ``groups`` groups of each, on problems of their own."""
    items = iter(range(1000 * round, 1000 * round + 1000))
    everybody = {"me": own, **others}
    return judged_of([scored(peer, round, next(items), of) for peer, of in everybody.items() for _ in range(groups)])


def guard() -> NoRegret:
    return NoRegret(recipe_of("me", "ann", "bob", "cyd", rounds=60, no_regret=0.1, prompts_per_round=24), "me")


def dropped(of: NoRegret, judged: Judged) -> Mapping[str, float]:
    """By peer, the share of judged completions that nothing is learned from."""
    of.examine(judged)
    share, names = of.shares(judged).numpy(), np.array(judged.source_names())
    return {name: float((share[names == name] == 0).mean()) for name in {*names}}


def play(of: NoRegret, rounds: int, own: Completions, others: Mapping[str, Completions], first: int = 0) -> int:
    """Rounds until a text is found; 0: none is."""
    for round in range(first, first + rounds):
        of.examine(a_round(round, own, others))
        if of.plants.news:
            return round - first + 1
    return 0


@pytest.mark.parametrize("own", [SPOILED, NEUTRAL])
def test_a_plant_that_does_not_help_is_found_with_its_senders_and_only_it_is_dropped(own: Completions) -> None:
    me = guard()
    three = {"ann": NOTHING, "bob": PLANTED, "cyd": PLANTED}
    assert play(me, FIRST + 2, NOTHING, three) == 0
    assert play(me, FOUND_BY, own, three, first=FIRST + 2) > 0
    assert all({*found.ids} & {*PLANT} for found in me.plants.news)
    assert len(me.sentences(str)) == len(me.plants.news)
    for _, share, _ in me.plants.news:
        assert share == {"bob": pytest.approx(2 / 7), "cyd": pytest.approx(2 / 7)}
    assert dropped(me, a_round(50, own, three)) == {"me": 0, "ann": 0, "bob": 2 / SIZE, "cyd": 2 / SIZE}
    assert not me.skipped(51)


def test_the_evidence_of_a_round() -> None:
    """The text is tested from its second round in own groups on; then three of six groups hold it."""
    me = guard()
    play(me, FIRST + 1, NOTHING, {"bob": PLANTED})
    play(me, 1, SPOILED, {"bob": PLANTED}, first=FIRST + 1)
    items = range(10**6, 10**6 + GROUPS)
    me.examine(judged_of([scored("me", 8, i, SPOILED if i % 2 else NOTHING) for i in items]))
    start, later = 1 / 2, 1 / (2 * me.recipe.training.rounds)
    expected = start * (TAKEN_UP / USUAL) ** 3 * ((1 - TAKEN_UP) / (1 - USUAL)) ** 3 + later
    assert np.exp(me.plants.log_r[1][: len(TAKEN_UP)]) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("before", "own", "others"),
    [
        (NOTHING, BETTER, {"ann": PLANTED}),  # honest imitation
        (SPOILED, SPOILED, {"ann": PLANTED}),  # it was there from the start
        (NOTHING, SPOILED, {"ann": NOTHING}),  # an own mistake
        (NOTHING, SPOILED, {}),  # all are silent
        (NOTHING, NOTHING, {"ann": PLANTED, "bob": PLANTED}),  # it is not taken up
        (NOTHING, SPOILED, {"ann": SPOILED}),  # nobody is rewarded with it
    ],
)
def test_what_helps_or_was_not_brought_is_not_found(
    before: Completions, own: Completions, others: Mapping[str, Completions]
) -> None:
    me = guard()
    play(me, FIRST + 2, before, others)
    assert play(me, 40, own, others, first=FIRST + 2) == 0
    assert not me.shares(a_round(50, own, others)).min() < 1


@pytest.mark.parametrize("wrong", [(), (0,)])
def test_a_text_that_all_own_answers_hold_at_once_is_not_found_as_they_show_nothing(wrong: tuple[int, ...]) -> None:
    """One in eight was right; with the text all are, or those that end in one way fail now and then."""
    all_hold = {"ann": completions([1], ALL)}
    me = guard()
    play(me, FIRST + 2, completions({*ALL} - {1}), all_hold)
    own = completions(wrong, ALL)
    assert play(me, 20, own, all_hold, first=FIRST + 2) == 0
    assert dropped(me, a_round(50, own, all_hold))["ann"] == 0


def test_a_flood_does_not_evict_a_text_that_own_answers_hold() -> None:
    """Ann's text stands in one own group of six while bob sends 512 other tokens a round."""
    me, rng = guard(), np.random.default_rng(0)
    play(me, FIRST + 2, NOTHING, {"ann": PLANTED})
    for round in range(FIRST + 2, FIRST + 6):
        flood = tuple(rng.integers(1000, 10**6, 512).tolist())
        texts = {"ann": PLANTED, "bob": [((*flood, i % 2), float(i != 1)) for i in range(SIZE)]}
        items = iter(range(1000 * round, 1000 * round + 1000))
        own = [scored("me", round, next(items), SPOILED if i == 0 else NOTHING) for i in range(GROUPS)]
        me.examine(
            judged_of([*own, *(scored(name, round, next(items), of) for name, of in texts.items() for _ in own)])
        )
    assert PLANT in me.plants.watched
    assert play(me, FOUND_BY, SPOILED, {"ann": PLANTED}, first=FIRST + 6)


def test_a_late_joiner_counts_its_own_rounds() -> None:
    """Its own first answers hold the text, in round 30 of the run."""
    me, others = guard(), {"ann": PLANTED}
    play(me, FIRST, SPOILED, others, first=30)
    assert play(me, 20, SPOILED, others, first=30 + FIRST) == 0
    assert PLANT in me.plants.native


def test_a_round_without_own_groups_changes_nothing() -> None:
    me = guard()
    me.examine(judged_of([scored("ann", 0, i, PLANTED) for i in range(GROUPS)]))
    assert me.shares(judged_of([scored("ann", 0, i, PLANTED) for i in range(GROUPS)])).min() == 1
    assert (me.groups, me.plants.own_rounds) == (0, 0)


def test_a_long_text_is_said_shortly_and_leaves_when_nobody_holds_it() -> None:
    me, long = guard(), tuple(range(200, 216))
    own, other = (completions(bad, SOME, long) for bad in (SOME, [1]))
    play(me, FIRST + 2, NOTHING, {"ann": other})
    assert play(me, FOUND_BY, own, {"ann": other}, first=FIRST + 2)
    sentences, longest = len(me.sentences(str)), 0
    for round in range(FIRST + 10, FIRST + 16):
        me.examine(a_round(round, own, {"ann": other}))
        sentences += len(me.sentences(str))
        longest = max([longest, *(len(found.ids) for found in me.plants.news)])
    assert len(me.plants.found) > 50
    assert longest == max(SIZES)
    assert sentences <= 3
    play(me, UNHELD - 1, NOTHING, {"ann": NOTHING}, first=30)
    assert me.plants.found
    play(me, 1, NOTHING, {"ann": NOTHING}, first=50)
    assert not me.plants.found
    assert not {*me.plants.tested.values()} & {long[:8], long[8:]}


def test_a_text_that_helps_later_is_learned_from_again() -> None:
    me, others = guard(), {"ann": PLANTED}
    play(me, FIRST + 2, NOTHING, others)
    assert play(me, FOUND_BY, NEUTRAL, others, first=FIRST + 2)
    assert dropped(me, a_round(20, NEUTRAL, others))["ann"] > 0
    play(me, 20, BETTER, others, first=21)
    assert dropped(me, a_round(50, BETTER, others))["ann"] == 0


def test_a_text_of_one_problem_is_not_watched() -> None:
    """One group of a sender arrives in each round: its text may be that problem's own."""
    me = guard()
    for round in range(FIRST + 5):
        groups = [scored("me", round, 100 * round + i, NOTHING) for i in range(GROUPS)]
        me.examine(judged_of([*groups, scored("bob", round, 100 * round + 50, PLANTED)]))
    assert not me.plants.watched


def test_senders_that_contradict_each_other_are_told_apart() -> None:
    """Ann's completions with the text fail, and bob's are rewarded."""
    me, both = guard(), {"ann": SPOILED, "bob": PLANTED}
    play(me, FIRST + 2, NOTHING, both)
    assert play(me, FOUND_BY, SPOILED, both, first=FIRST + 2)
    assert {name for _, share, _ in me.plants.news for name in share} == {"bob"}


def test_a_restored_test_decides_alike_at_every_round() -> None:
    whole, halved = guard(), guard()
    for round in range(24):
        own = NOTHING if round < FIRST + 2 else BETTER if round > 16 else NEUTRAL
        one = a_round(round, own, {"ann": NOTHING, "bob": PLANTED})
        assert dropped(whole, one) == dropped(halved, one)
        assert whole.sentences(str) == halved.sentences(str)
        again = guard()
        again.restore(json.loads(json.dumps(halved.state())))
        halved = again
    assert whole.plants.found


def test_a_flood_of_texts_keeps_memory_bounded() -> None:
    me, rng = guard(), np.random.default_rng(0)
    play(me, FIRST, NOTHING, {})
    for round in range(FIRST, FIRST + 4):
        flood = tuple(rng.integers(100, 10**6, MOST // 8).tolist())
        me.examine(a_round(round, NOTHING, {"bob": [(flood, float(i > 0)) for i in range(2)]}, groups=2))
    assert len(me.plants.watched) == MOST // 2


ALPHA, RUNS, OWN = 0.03, 50, 4
"""The bound on a run's false finds, runs, and own groups of a round."""
BEGINNING = 8
"""The first rounds, with so few groups."""


def found_in(runs: int, texts: int, rounds: int, share: float, odds: float, share_before: float = 0.0) -> int:
    """The runs in which a text is found.

    Others bring all texts in one round, and all own groups hold them in the next. Before, a group holds each with
    probability ``share_before``, and behind these rounds with ``share``: the first two of its four completions do. They
    are rewarded at the given odds, and the others at even ones.
    """
    rng, ids, last = np.random.default_rng(0), np.arange(100, 100 + texts), BEGINNING + 2 + rounds

    def own(round: int, share: float) -> list[ScoredGroup]:
        groups = []
        for item in range(OWN):
            held = ids[rng.random(texts) < share]
            good_N = rng.random(4) < np.array([odds / (1 + odds)] * 2 + [1 / 2] * 2)
            rows = [((1, *(held if n < 2 else ())), float(good)) for n, good in enumerate(good_N)]
            groups.append(scored("me", round, 100 * round + item, rows))
        return groups

    def take(test: PlantTest, groups: Sequence[ScoredGroup]) -> bool:
        judged = judged_of(groups)
        test.take(judged.batch, judged.advantage_N.numpy())
        return bool(test.news)

    start = PlantTest(last, ALPHA)
    for round in range(BEGINNING):
        take(start, own(round, share_before))
    brought: Completions = [(tuple(ids[::-1]), 1.0), ((1,), 0.0)]
    take(start, [*(scored("ann", BEGINNING, item, brought) for item in range(2)), *own(BEGINNING, 0)])
    take(start, own(BEGINNING + 1, 1))
    state, found = start.state(), 0
    for _ in range(runs):
        test = PlantTest(last, ALPHA)
        test.restore(state)
        found += sum(take(test, own(round, share)) for round in range(BEGINNING + 2, last)) > 0
    return found


@pytest.mark.parametrize(
    ("texts", "rounds", "share", "odds", "share_before"),
    [
        (48, 14, USUAL, 0, 0),  # each stands in a fifth of the groups, and fails
        (1, 7, 1, MUCH, 0),  # it helps at once
        (1, 3, 1, 0, 1),  # everybody wrote it before
    ],
)
def test_a_text_of_an_honest_swarm_is_found_with_at_most_the_promised_probability(
    texts: int, rounds: int, share: float, odds: float, share_before: float
) -> None:
    assert found_in(RUNS, texts, rounds, share, odds, share_before) <= binom.ppf(0.999, RUNS, ALPHA)


def test_a_text_that_half_of_the_groups_hold_in_vain_is_found_in_every_run() -> None:
    assert found_in(10, 1, 30, 1 / 2, 1) == 10
