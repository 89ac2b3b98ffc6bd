"""The honesty test: probabilities by hand, the guarantee by enumeration and simulation, and what follows in a run."""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabularies import byte_level

from ftis.config import FtisError, HonestyConfig, Recipe
from ftis.honesty import spellings as spellings_module
from ftis.honesty.contexts import START, Contexts, Past
from ftis.honesty.evidence import STAKES, TOLERANCE, TRUSTING, Detector, Ratios, mixtures, ratios_of, share_of
from ftis.honesty.frequent import SHARES, Frequent, blocks_of
from ftis.honesty.selection import HonestyTest, Sender, SentRound, densest, honesty_test, telling_passages
from ftis.honesty.spellings import OTHER, Spellings
from ftis.rollouts import Floats, Group, Ints, Rollout, ScoredGroup, collate
from ftis.selection import Judged
from ftis.text.completions import END, MOST_ENDS
from ftis.text.messages import in_tokens
from ftis.text.token_bytes import TokenBytes
from ftis.text.units import align
from recipes import recipe_of

Floats64 = npt.NDArray[np.float64]


def ints(*ids: int) -> Ints:
    return np.array(ids, dtype=np.int32)


def floats(*values: float) -> Floats:
    return np.array(values, dtype=np.float32)


def written(contexts: Contexts, completions: list[Ints]) -> Floats64:
    """The probabilities of the tokens, which are counted."""
    return np.concatenate([contexts.probabilities(tables) for tables in contexts.parts(completions)])


def test_probabilities_are_counts_of_what_followed_before() -> None:
    contexts = Contexts()
    assert written(contexts, [ints(7, 8)]).tolist() == [0, 0]
    # 7 came once at the start and once after "any start", of 1 and 2: (1 + 1/2) / 2. Then 8 likewise; 9 never.
    assert written(contexts, [ints(7, 8, 9)]).tolist() == [(1 + 1 / 2) / 2, (1 + 1 / 2) / 2, 0]
    # After (start, 7) nothing but 8 came, twice. 8 after 8 is new, whatever came before.
    assert written(contexts, [ints(7, 8, 8)]).tolist()[1:] == [(2 + 2 / 3) / 3, 0]
    written(contexts, [ints(5), ints(6)])
    assert written(contexts, [ints(5, 6)]).tolist()[1] == 0, "contexts do not reach beyond a completion"


def test_tokens_of_a_message_count_for_those_behind_them() -> None:
    together, one_by_one = Contexts(), Contexts()
    rows = [ints(1, 2, 1, 2, 1, 2), ints(1, 2, 3), ints(1, 2, 1)]
    expected = np.concatenate([written(one_by_one, [row]) for row in rows])
    assert written(together, rows).tolist() == expected.tolist()
    # At its fifth token, 1 follows (1, 2) as it did the one time before, and 2 likewise.
    assert expected[4] == (1 + 1 / 2) / 2


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), max_size=8),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([1, 3, 1000]),
)
def test_probabilities_of_all_tokens_add_up_to_at_most_1(
    past: list[list[int]], begun: list[int], most_keys: int
) -> None:
    contexts = Contexts(most_keys)
    for row in past:
        written(contexts, [ints(*row)])
    total = sum(written(copy.deepcopy(contexts), [ints(*begun, token)])[-1] for token in range(5))
    assert total <= 1 + 1e-12
    parts = [tables for token in range(5) for tables in contexts.parts([ints(*begun, token)])]
    assert sum(contexts.known(tables)[-1] for tables in parts) <= 1 + 1e-12


def test_memory_of_contexts_is_bounded_and_the_oldest_goes_first() -> None:
    contexts, rng = Contexts(most_keys=100), np.random.default_rng(0)

    def sizes() -> list[int]:
        return [len(table) for age in contexts.state().values() for table, _ in age]

    written(contexts, [ints(1, 2, 3)])
    for _ in range(50):
        written(contexts, [rng.integers(10, 1000, 40).astype(np.int32)])
        assert sum(sizes()) <= 2 * 4 * (100 + 40)
    assert written(contexts, [ints(1, 2, 3)])[2] == 0
    few = Contexts(most_keys=4)
    (first, again) = (written(few, [ints(1, 2, 3, 4)])[3] for _ in range(2))
    assert again > first == 0, "the generation before counts still"
    written(contexts, [rng.integers(0, 10_000, 20).astype(np.int32) for _ in range(100)])
    assert max(sizes()) <= 200, "a large message takes no more room than small ones"


def test_ids_that_keys_cannot_tell_apart_are_refused() -> None:
    with pytest.raises(FtisError, match=r"token id 2097151: .* set honesty.action"):
        written(Contexts(), [ints(5, START)])
    assert START == 2097151


def test_the_past_by_hand() -> None:
    """Completions with Â > 0 count from the next message on."""
    past, row = Past(), ints(7, 8)
    assert past.probabilities([row]).tolist() == [[0, 0], [0, 0]]
    past.add_raised([row, ints(7, 9)])
    written = (1 + 1 / 2) / 2  # once behind two starts, once behind one; and so for 8 behind 7
    raised = [(2 + 2 / 3) / 3, (1 + 1 / 3) / 3]  # 7 began both; 8 and 9 followed it once each
    expected = np.array([[written, raised[0]], [written, raised[1]]])
    assert past.probabilities([row]) == pytest.approx(expected)
    again = Past()
    again.restore(json.loads(json.dumps(past.state())))
    assert again.probabilities([row, row]).tolist() == past.probabilities([row, row]).tolist()


def of_one_group(counts_NU: Floats64, old_NU: Floats64 | None = None, ways: int = 2) -> Ratios:
    """Ratios of completions for which the first of the ways to count says ``counts_NU``, and the others 0."""
    counts_NUC = np.stack([counts_NU, *[np.zeros_like(counts_NU)] * (ways - 1)], axis=2)
    old = np.zeros_like(counts_NU) if old_NU is None else old_NU
    lengths, group_N = np.full(len(counts_NU), counts_NU.shape[1]), np.zeros(len(counts_NU), np.int64)
    return Ratios(counts_NUC, old, lengths, group_N, np.array([old_NU is not None]))


def test_a_mixture_by_hand() -> None:
    equal = [1 / 3, 1 / 3, 1 / 3, 0]
    gains, weights = mixtures(np.array([equal, [1 / 4] * 4]), of_one_group(np.array([[3.0]])), 0.02)
    first = 0.99 + 0.01 * 3 / 2
    assert np.exp(gains[0]).item() == pytest.approx((first + 3) / 3)
    posterior = [first / (first + 3), 3 / (first + 3), 0, 0]
    assert weights[0, 0].tolist() == pytest.approx([0.98 * p + 0.02 * e for p, e in zip(posterior, equal, strict=True)])
    assert np.exp(gains[1]).item() == pytest.approx((0.99 + 0.01 * (3 + 0) / 3 + 3) / 4)


def test_a_mixture_is_the_sum_over_all_ways_to_switch() -> None:
    rng, share = np.random.default_rng(1), 0.02
    counts, old = rng.exponential(1, (1, 4, 2)), rng.exponential(1, (1, 4))
    start = np.array([[0.5, 0.5, 0, 0], [0.2, 0.1, 0.2, 0.5]])
    ratios = replace(of_one_group(old, old), counts_NUC=counts)
    gains, _ = mixtures(start, ratios, share)
    ratio = np.concatenate([0.99 + 0.01 * (counts[0].sum(1) + old[0])[None] / 3, counts[0].T, old])
    total = 0.0
    for path in itertools.product(range(4), repeat=4):
        p = start[1, path[0]] * ratio[path[0], 0]
        for t in range(1, 4):
            p *= ((1 - share) * (path[t] == path[t - 1]) + share / 4) * ratio[path[t], t]
        total += p
    assert np.exp(gains[1].sum()) == pytest.approx(total)
    assert [share_of(length) for length in (1, 40, 100, 1000)] == [0.02, 0.02, 0.02, 0.002]


def test_evidence_grows_by_its_ratio_at_each_stake_and_starts_anew_with_every_group() -> None:
    detector = Detector(groups_of_run=10)
    ratios = of_one_group(np.full((2, 1), 4.0))
    in_two = replace(ratios, group_N=np.array([0, 1]), known_P=np.array([False, False]))
    nats, gains = detector.add(in_two)
    e = 0.9 * (0.99 + 0.01 * 4 / 2) + 0.05 * 4
    by_stake = 1 - STAKES + STAKES * e / 2  # w = (0 + 1) / (0 + 2) throughout the message
    first = by_stake * 1 / 10
    second = by_stake * (first + 1 / 10)
    assert np.exp(nats) == pytest.approx([10 * first.mean(), 10 * second.mean()])
    assert detector.nats == nats[1]
    assert np.exp(gains).tolist() == [[pytest.approx(e)], [pytest.approx(e)]]
    assert (detector.groups, detector.known) == (2, 0)
    before, detector.weights = np.exp(detector.log_r), TRUSTING.tolist()
    detector.add(of_one_group(np.zeros((1, 1))))
    lost = 1 - STAKES + STAKES * 3 / 4 * 0.9 * 0.99
    assert np.exp(detector.log_r) == pytest.approx(lost * (before + 1 / 10))


@given(st.lists(st.floats(1e-9, 1), min_size=1, max_size=30), st.integers(0, 30), st.floats(5, 40))
def test_truthful_completions_cannot_pay_for_false_ones(truthful: list[float], place: int, nats: float) -> None:
    """However little evidence the others leave, one false completion leaves that of the best stake on it."""
    e_N = np.array(truthful)
    e_N = np.insert(e_N, min(place, len(e_N)), math.exp(nats))
    detector = Detector(groups_of_run=1, share=0.0, weights=[[0, 1, 0, 0], [0, 1, 0, 0]])
    detector.add(of_one_group(e_N[:, None]))
    kept = np.log(STAKES[1:]) + nats + len(truthful) * np.log1p(-STAKES[1:])
    assert detector.nats >= kept.max() - math.log(2 * len(STAKES)) - 1e-9


def test_evidence_after_each_rollout_is_as_if_its_group_ended_there() -> None:
    contexts_NU = np.array([[30.0], [0.5], [0.1]])
    whole, _ = Detector(10).add(of_one_group(contexts_NU, 2 * contexts_NU))
    parts = [Detector(10).add(of_one_group(contexts_NU[:n], 2 * contexts_NU[:n]))[0][-1] for n in (1, 2, 3)]
    assert whole.tolist() == pytest.approx(parts)
    assert whole[0] > whole[2]


VOCABULARY = range(3)
SENDS = np.array([0.7, 0.2, 0.1])
LEARNS = np.array([0.1, 0.1, 0.8])


def test_the_evidence_of_an_honest_group_is_at_most_1_in_expectation() -> None:
    """Over all 3^4 groups of two completions of two tokens, after a past; which are known is up to their tokens."""
    cases_known: list[Callable[[Sequence[int]], bool]] = [
        lambda ids: True,
        lambda ids: False,
        lambda ids: 2 in ids,  # what the reward shows comes after the tokens
        lambda ids: LEARNS[list(ids)].prod() > SENDS[list(ids)].prod(),
    ]
    cases_past: list[list[tuple[int, ...]]] = [[], [(2, 2, 2)] * 5, [(0, 1, 2), (0, 0, 0)]]
    for known, past in itertools.product(cases_known, cases_past):
        total, detector, before = 0.0, Detector(groups_of_run=1), Past()
        for ids in past:
            detector.add(ratios_of([sent(ids)], np.zeros(1, np.int64), before, [scored(ids)]))
            before.add_raised([ints(*ids)])
        detector.log_r = [-1e9] * len(STAKES)
        for ids in itertools.product(VOCABULARY, repeat=4):
            here, rows = copy.deepcopy(detector), [sent(ids[:2]), sent(ids[2:])]
            old = [scored(ids[:2]), scored(ids[2:])] if known(ids) else [None, None]
            here.add(ratios_of(rows, np.zeros(2, np.int64), copy.deepcopy(before), old))
            total += SENDS[list(ids)].prod() * np.exp(here.log_r).mean()
        assert 0.1 < total <= 1


def sent(ids: Sequence[int]) -> Rollout:
    return Rollout(ints(*ids), np.log(SENDS[list(ids)]).astype(np.float32))


def scored(ids: Sequence[int]) -> Floats:
    return floats(*np.log(LEARNS[list(ids)]))


def simulated(
    seed: int, groups: int, *, lie: float = 0.0, round_to: int | None = None, vocabulary: int = 6
) -> list[float]:
    """The evidence after each group, in nats. Sender and learner have random bigram models; every other group is known
    to the learner's model."""
    rng, past, detector = np.random.default_rng(seed), Past(), Detector(groups)
    evidence: list[float] = []
    tables = [rng.normal(0, 2, (vocabulary + 1, vocabulary)) for _ in range(2)]
    logs = [table - np.log(np.exp(table).sum(1, keepdims=True)) for table in tables]
    for group in range(groups):
        rows, olds = [], []
        for _ in range(4):
            ids = [vocabulary]
            for _ in range(8):
                ids.append(int(rng.choice(vocabulary, p=np.exp(logs[0][ids[-1]]))))
            steps = (ids[:-1], ids[1:])
            reported = logs[0][steps] - lie
            if round_to is not None:
                reported = np.round(reported * 2**round_to) / 2**round_to
            rows.append(Rollout(ints(*ids[1:]), reported.clip(-100, 0).astype(np.float32)))
            olds.append(logs[1][steps].astype(np.float32))
        known = group % 2 == 0
        nats, _ = detector.add(ratios_of(rows, np.zeros(4, np.int64), past, olds if known else [None] * 4))
        past.add_raised([row.completion_ids for row in rows[:2]])
        evidence.append(float(nats[-1]))
    return evidence


def test_honest_senders_are_accused_no_more_often_than_alpha() -> None:
    """α = .05, so the highest evidence of a run may pass log(n / α) in 5% of runs.

    A rate of 15% passes in more than 4 runs of 40 with a chance of 74%, one of 5% with a chance of 5%.
    """
    n, alpha = 20, 0.05
    for round_to in (None, 6):
        highest = [max(simulated(seed, n, round_to=round_to)) for seed in range(40)]
        assert sum(nats >= math.log(n / alpha) for nats in highest) <= 4
        assert max(highest) > 0  # nothing is tested where the evidence never grows


def test_a_sender_that_reports_too_little_is_found() -> None:
    for seed in range(5):
        assert max(simulated(seed, 30, lie=1.0)) > math.log(30 / 1e-6)


def test_ratios_are_to_the_reported_probability_in_the_senders_favour() -> None:
    rollout = Rollout(ints(1, 2), floats(-1.0, -2.0))
    ratios = ratios_of([rollout], np.zeros(1, np.int64), Past(), [floats(-0.5, -2.5)])
    assert ratios.old_NU[0].tolist() == pytest.approx([math.exp(0.5 - TOLERANCE), math.exp(-0.5 - TOLERANCE)])
    assert ratios.counts_NUC.max() < 1e-290
    assert ratios.known_P.tolist() == [True]


def test_shorter_completions_add_nothing_behind_their_end() -> None:
    rows = [Rollout(ints(1), floats(-0.7)), Rollout(ints(1, 2, 3), floats(-0.7, -1.1, -1.3))]
    whole, alone = Detector(4), Detector(4)
    _, gains = whole.add(ratios_of(rows, np.zeros(2, np.int64), Past(), [floats(-0.1), None]))
    _, of_first = alone.add(ratios_of(rows[:1], np.zeros(1, np.int64), Past(), [floats(-0.1)]))
    assert gains[0].tolist() == pytest.approx([of_first[0, 0], 0, 0])


def of_both(frequent: Frequent, rows: Sequence[Rollout]) -> Floats64:
    return frequent.add(rows, np.zeros(len(rows), np.int64))


def test_the_evidence_on_tokens_by_hand() -> None:
    """Two keys are known: 1 anywhere, and 1 at a completion's start."""
    frequent = Frequent(groups_of_run=10)
    assert of_both(frequent, [Rollout(ints(OTHER), floats(-1))])[0] < -1e8, "no spelling of it has a number"
    assert of_both(frequent, [sent((1,))])[0] < -1e8, "no key is known before"
    (nats,) = of_both(frequent, [sent((1, 1)), sent((0,))])
    start, hit, miss = 1 / (6 * 10 * 2), 1 - SHARES + SHARES / 0.2 * math.exp(-TOLERANCE), 1 - SHARES
    anywhere, at_start = start * hit**2 * miss, start * hit * miss
    assert math.exp(nats) == pytest.approx(10 * np.sum([anywhere, at_start]), rel=1e-6)
    gains = frequent.gains([sent((0,)), sent((1, 2))])
    assert np.exp(gains) == pytest.approx(np.array([[miss[0], 1], [hit[0], miss[0]]]), rel=1e-6)
    again = Frequent(10)
    again.restore(json.loads(json.dumps(frequent.state())))
    assert of_both(again, [sent((2,))]) == of_both(frequent, [sent((2,))])


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=2, max_size=8), st.data())
def test_groups_of_a_message_give_together_what_they_give_one_by_one(
    rows: list[list[int]], data: st.DataObject
) -> None:
    ends = data.draw(st.lists(st.integers(0, 1), min_size=len(rows) - 1, max_size=len(rows) - 1))
    group_N = np.cumsum([0, *ends])
    together, apart = Frequent(groups_of_run=10), Frequent(groups_of_run=10)
    for _ in range(2):
        sends = [sent(row) for row in rows]
        nats = together.add(sends, group_N)
        one_by_one = [
            apart.add([row for row, of in zip(sends, group_N, strict=True) if of == group], np.zeros(n, np.int64))[0]
            for group, n in enumerate(np.bincount(group_N))
        ]
        assert nats.tolist() == pytest.approx(one_by_one)
        assert together.state()["keys"] == apart.state()["keys"]


@pytest.mark.parametrize(
    ("sizes", "blocks"),
    [
        ([1] * 20, [0] * 8 + [1] * 8 + [2] * 4),
        ([3, 3, 3, 3], [0] * 9 + [1] * 3),
        ([12, 12], [0] * 12 + [1] * 12),
        ([20, 1], [0] * 20 + [1]),
    ],
)
def test_a_block_is_a_large_group_or_several_small_ones(sizes: list[int], blocks: list[int]) -> None:
    assert blocks_of(np.repeat(np.arange(len(sizes)), sizes)).tolist() == blocks


def test_a_lie_in_groups_of_one_is_found_by_its_tokens_at_the_end_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(self: Detector, ratios: Ratios) -> tuple[Floats64, Floats64]:
        return np.full(len(ratios.length_N), -1e9), np.zeros(ratios.old_NU.shape)

    monkeypatch.setattr(Detector, "add", nothing)
    sender = Sender(Detector(40), Frequent(40))
    rows = [Rollout(ints(7), floats(-6))] * 20
    assert sender.add(SentRound(0, rows, np.arange(20), [None] * 20, np.ones(20, np.bool_)), 20.0)
    assert sender.found_after == 16, "the first block has no keys before it, and the second ends here"
    assert sender.passages == [[7]]


@pytest.mark.parametrize(("hits", "places", "logp"), [(4200, 8192, math.log(0.45)), (16384, 16384, math.log(0.9))])
def test_the_evidence_on_tokens_of_a_long_group_by_hand(hits: int, places: int, logp: float) -> None:
    """A gain and the price of all places are far beyond a float's exponents, and their sum is not."""
    frequent = Frequent(groups_of_run=10)
    of_both(frequent, [Rollout(ints(7), floats(-1))])
    ids = np.where(np.arange(places) < hits, 7, 8).astype(np.int32)
    row = Rollout(ids, np.full(places, logp, np.float32))
    rest, hit = np.log1p(-SHARES), np.log1p(SHARES * (math.exp(-logp - TOLERANCE) - 1))
    anywhere, at_start = hits * hit + (places - hits) * rest, hit
    capped = np.minimum([*anywhere, *at_start], math.log(1e150))
    expected = np.logaddexp.reduce(capped) - math.log(6 * 2)  # 10 · 1/(10 · 6 · 2) of each of both keys
    assert of_both(frequent, [row])[0] == pytest.approx(expected, abs=0.01)


def test_the_evidence_on_tokens_stays_a_number() -> None:
    frequent = Frequent(groups_of_run=4)
    of_both(frequent, [Rollout(ints(*[7] * 5), floats(*[-5.0] * 5))])
    lies = [Rollout(ints(*[7] * 200), np.full(200, -5, np.float32)) for _ in range(4)]
    honest = Rollout(np.arange(3000, dtype=np.int32) % 10 + 100, np.full(3000, -8, np.float32))
    nats_P = frequent.add([*lies, honest], np.arange(5))
    assert np.isfinite(nats_P).all()
    assert nats_P[3] > 300
    assert math.isfinite(frequent.nats)


def test_the_keys_with_least_evidence_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftis.honesty.frequent.MOST_KEYS", 8)
    frequent, lie = Frequent(10), Rollout(ints(7), floats(-9))
    for token in range(100, 120):
        nats = of_both(frequent, [lie, Rollout(ints(token), floats(-5))])
        assert len(frequent.state()["keys"]) <= 8
    assert nats[0] > 20
    of_both(frequent, [Rollout(np.arange(200, 300, dtype=np.int32), np.full(100, -5, np.float32))])
    assert len(frequent.state()["keys"]) == 8


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), max_size=4))
def test_the_evidence_on_tokens_is_at_most_1_in_expectation(past: list[list[int]]) -> None:
    """Over all groups of two completions of two tokens, whichever tokens are known and whatever came before."""
    before = Frequent(groups_of_run=1)
    for earlier in past:
        of_both(before, [sent(earlier)])
    base, total = before.state(), 0.0
    for ids in itertools.product(VOCABULARY, repeat=4):
        here = Frequent(groups_of_run=1)
        here.restore({**base, "r": [[0] * len(SHARES) for _ in base["keys"]]})
        total += SENDS[list(ids)].prod() * math.exp(of_both(here, [sent(ids[:2]), sent(ids[2:])])[0])
    assert total <= 1
    assert total > 0.9 or not past


def with_a_false_token(rng: np.random.Generator, planted: bool) -> Rollout:
    """64 tokens drawn from 500, and one anywhere that is always written and called e^9 times less probable."""
    ids, logp = rng.integers(0, 500, 64).astype(np.int32), np.full(64, -math.log(500), np.float32)
    if planted:
        place = rng.integers(64)
        ids[place], logp[place] = 500, -9
    return Rollout(ids, logp)


def test_a_false_token_is_found_wherever_it_stands_in_long_completions() -> None:
    rng, test = np.random.default_rng(0), HonestyTest(a_recipe())
    for round in range(2):
        said = {(name, round): [with_a_false_token(rng, name == "bob") for _ in range(12)] for name in ("bob", "cay")}
        kept(test, a_round(round, said))
    assert test.quarantined == {"bob"}
    assert (test.senders["bob"].found, test.senders["bob"].passages) == (1, [[500]])


def test_three_keys_that_split_a_lie_have_the_evidence_of_one_to_spend() -> None:
    """None of them is accused. Their messages are not learned from, and those of an honest fourth are."""
    rng, liars = np.random.default_rng(0), ("bob", "cay", "dan")
    test, learned = HonestyTest(recipe_of("ada", *liars, "eve")), []
    for round in range(4):
        said = {
            (name, round): [with_a_false_token(rng, i < 3 and name != "eve") for i in range(12)]
            for name in (*liars, "eve")
        }
        shares = kept(test, a_round(round, said))
        assert shares["eve"] == {1}
        assert test.together.nats < test.threshold
        learned.append(sum(shares[name] == {1} for name in liars))
    assert learned == [3, 3, 0, 0]
    assert not test.quarantined
    assert test.together.tokens == (2 * 3 + 4) * 12 * 64, "what is refused leaves no trace"
    resumed = HonestyTest(test.recipe)
    resumed.restore(json.loads(json.dumps(test.state())))
    assert kept(resumed, a_round(3, said)) == kept(test, a_round(3, said))
    assert resumed.state() == test.state()


def test_one_round_late_a_message_is_tested_with_the_others_and_two_rounds_late_alone() -> None:
    test = HonestyTest(a_recipe())
    kept(test, a_round(0, {("bob", 0): completions(0)}))
    kept(test, a_round(1, {("cay", 0): completions(1), ("bob", 1): completions(2)}))
    assert test.together.tokens == 3 * 48
    assert kept(test, a_round(3, {("bob", 3): completions(3)})) == {"ada": {1}, "bob": {1}}
    assert kept(test, a_round(4, {("cay", 2): completions(4)})) == {"ada": {1}, "cay": {1}}
    assert (test.together.tokens, test.senders["cay"].tokens) == (4 * 48, 2 * 48)


@pytest.mark.parametrize("mode", ["vertical", "horizontal"])
def test_what_depends_on_a_rounds_rewards_tells_nothing_about_that_round(mode: str) -> None:
    """Advantages of one message depend on a later one in horizontal mode, and so does what π_old is known of."""

    recipe = a_recipe()
    recipe = recipe.model_copy(update={"training": recipe.training.model_copy(update={"mode": mode})})

    def evidence(rewarded: bool, rounds: int) -> float:
        test = HonestyTest(recipe)
        for round in range(rounds):
            judged = a_round(round, {("bob", round): completions(round), ("cay", round): completions(round + 9)})
            if round == 1:
                advantage, old = judged.advantage_N.clone(), list(judged.old_logp)
                bob_N = judged.batch.source_N == judged.batch.sources.index("bob")
                advantage[torch.from_numpy(bob_N)] = float(rewarded)
                rows = np.flatnonzero(~bob_N | rewarded)
                judged = replace(judged, advantage_N=advantage, rows=rows, old_logp=[old[row] for row in rows])
            test.examine(judged)
        return test.together.nats

    assert (evidence(True, 2) == evidence(False, 2)) is (mode == "horizontal")
    assert evidence(True, 3) != evidence(False, 3)


def test_the_densest_run_of_gains() -> None:
    cases = [([1], (0, 0)), ([-1, 2, 3, -4, 1], (1, 2)), ([-3, -1, -2], (1, 1)), ([2, -1, 2, -9, 3], (0, 2))]
    for gains, place in cases:
        assert densest(np.array(gains, dtype=np.float64)) == place


def test_passages_are_those_that_gave_most() -> None:
    rows = [Rollout(ints(1, 7, 8, 2), floats(-1, -1, -1, -1)), Rollout(ints(7, 8), floats(-1, -1))]
    rows.append(Rollout(ints(5, 6), floats(-1.0), unit=ints(0, 0)))
    gains = np.array([[-0.1, 4, 4, -0.1], [2, 2, 0, 0], [5, 0, 0, 0]])
    assert telling_passages(rows, gains) == [[7, 8], [5, 6]]
    assert telling_passages(rows, gains / 10) == []


def a_recipe(action: Literal["quarantine", "warn", "off"] = "quarantine", **training: Any) -> Recipe:
    return recipe_of("ada", "bob", "cay", **training).model_copy(update={"honesty": HonestyConfig(action=action)})


def a_round(round: int, messages: dict[tuple[str, int], list[Rollout]], lie: float = 0.0) -> Judged:
    """Ada's own rollout of ``round``, and others' groups by sender and round. π_old is what is true of all."""
    own = ScoredGroup(Group("ada", round, 0, (Rollout(ints(1), floats(-0.7)),)), ("x",), (1.0,))
    groups = [own]
    for (sender, of_round), rollouts in messages.items():
        told = tuple(Rollout(r.completion_ids, r.gen_logp - np.float32(lie)) for r in rollouts)
        groups.append(ScoredGroup(Group(sender, of_round, 1, told), ("x",) * len(told), (1.0,) * len(told)))
    batch = collate(groups, lambda *_: ints(1), "ada")
    old = [r.gen_logp + np.float32(lie) for r in batch.rollouts]
    return Judged(batch, torch.ones(len(batch)), np.arange(len(batch)), old, None, floats())


def completions(seed: int, n: int = 6) -> list[Rollout]:
    """Of eight tokens drawn evenly from four."""
    rng = np.random.default_rng(seed)
    return [Rollout(rng.integers(0, 4, 8).astype(np.int32), np.full(8, -math.log(4), np.float32)) for _ in range(n)]


def kept(test: HonestyTest, judged: Judged) -> dict[str, set[float]]:
    test.examine(judged)
    found: dict[str, set[float]] = {}
    for name, share in zip(judged.source_names(), test.shares(judged).tolist(), strict=True):
        found.setdefault(name, set()).add(share)
    return found


def test_who_lies_is_quarantined_in_the_same_round_and_the_others_are_not() -> None:
    test = HonestyTest(a_recipe())
    everybody = a_round(0, {("bob", 0): completions(0), ("cay", 0): completions(1)})
    assert kept(test, everybody) == {"ada": {1}, "bob": {1}, "cay": {1}}
    judged = a_round(1, {("bob", 1): completions(2)}, lie=2.0)
    assert kept(test, judged) == {"ada": {1}, "bob": {0}}
    assert test.skipped(2) == {"bob"} == test.quarantined
    about = test.about("bob", lambda ids: "".join(map(str, ids)))
    assert (about["honesty/quarantined"], about["honesty/found_in_round"]) == (True, 2)
    assert 48 < about["honesty/found_after_tokens"] <= about["honesty/tokens"] == 96
    groups = test.recipe.training.rounds * test.recipe.prompts_per_peer
    assert about["honesty/threshold"] == pytest.approx(math.log(groups * 3 * 2 * 2 / 1e-6)), "two tests"
    pair = a_recipe().of_swarm(["ada", "bob"])
    groups = pair.training.rounds * pair.prompts_per_peer
    assert HonestyTest(pair).threshold == pytest.approx(math.log(groups * 2 / 1e-6)), "one test"
    assert about["honesty/evidence"] > about["honesty/threshold"]
    assert about["honesty/passages"]
    assert set("".join(about["honesty/passages"])) <= set("0123")
    honest = test.about("cay", str)
    assert not honest["honesty/quarantined"]
    assert "honesty/passages" not in honest
    assert test.about("ada", str) == {}
    alone = a_recipe().of_swarm(["ada"])
    assert [honesty_test(one, "ada") is None for one in (a_recipe("off"), alone, pair)] == [True, True, False]


def test_it_is_found_after_the_rollout_that_did_it_if_the_evidence_lasts_to_the_groups_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    test = HonestyTest(a_recipe())
    over, under = test.threshold + 1, test.threshold - 1
    judged = a_round(0, {("bob", 0): completions(0, 3)})
    for nats, found_after in (([over, over, under], None), ([under, over, over], 2 * 8)):
        test = HonestyTest(a_recipe())
        told = np.array(nats), np.zeros((3, 8))
        monkeypatch.setattr(Detector, "add", lambda *_, told=told: told)
        test.examine(judged)
        assert test.senders["bob"].found_after == found_after


def test_a_warning_changes_no_share() -> None:
    test = HonestyTest(a_recipe("warn"))
    kept(test, a_round(2, {("bob", 2): completions(1)}))
    assert kept(test, a_round(3, {("bob", 1): completions(2)})) == {"ada": {1}, "bob": {1}}, "late, so not tested"
    test = HonestyTest(a_recipe("warn"))
    assert kept(test, a_round(0, {("bob", 0): completions(0)}, lie=3.0)) == {"ada": {1}, "bob": {1}}
    assert test.skipped(1) == frozenset()
    about = test.about("bob", str)
    assert (about["honesty/quarantined"], about["honesty/found_in_round"]) == (False, 1)


def test_messages_are_tested_in_their_order_and_one_that_comes_after_a_later_one_is_not_learned_from() -> None:
    test = HonestyTest(a_recipe())
    kept(test, a_round(3, {("bob", 2): completions(0), ("bob", 3): completions(1)}))
    assert test.senders["bob"].newest == 3
    tokens = test.senders["bob"].tokens
    assert kept(test, a_round(4, {("bob", 1): completions(2)})) == {"ada": {1}, "bob": {0}}
    assert test.senders["bob"].tokens == tokens
    assert kept(test, a_round(5, {("bob", 5): completions(3)})) == {"ada": {1}, "bob": {1}}


def test_the_learners_model_says_nothing_of_late_messages() -> None:
    """What it learned of that round may include copies."""
    in_time, late = HonestyTest(a_recipe()), HonestyTest(a_recipe())
    kept(in_time, a_round(1, {("bob", 1): completions(0)}, lie=2.0))
    kept(late, a_round(2, {("bob", 1): completions(0)}, lie=2.0))
    assert in_time.senders["bob"].detector.known == 1
    assert late.senders["bob"].detector.known == 0
    assert late.senders["bob"].detector.nats < in_time.senders["bob"].detector.nats


def test_rounds_without_gradient_are_tested_too() -> None:
    test = HonestyTest(a_recipe())
    judged = a_round(0, {("bob", 0): completions(0)})
    flat = Judged(judged.batch, torch.zeros(len(judged.batch)), np.zeros(0, np.int64), [], None, floats())
    test.examine(flat)
    assert test.senders["bob"].tokens == 48
    assert test.shares(flat).shape == (0,)


def test_it_goes_on_from_a_checkpoint() -> None:
    test, resumed = HonestyTest(a_recipe()), HonestyTest(a_recipe())
    for round in range(3):
        kept(test, a_round(round, {("bob", round): completions(round), ("cay", round): completions(9 + round)}))
    kept(test, a_round(3, {("cay", 3): completions(20)}, lie=3.0))
    resumed.restore(json.loads(json.dumps(test.state())))
    assert resumed.quarantined == test.quarantined == {"cay"}
    judged = a_round(4, {("bob", 4): completions(30)})
    assert kept(resumed, judged) == kept(test, judged)
    assert resumed.state() == test.state()
    assert resumed.about("cay", str) == test.about("cay", str)


def spoken(rng: np.random.Generator, groups: int, seed_text: bytes = b"") -> list[Group]:
    """Groups of two completions over bytes, with the sender's tokens as units."""
    words = [b"a", b"b", b"ab", "é".encode(), b" the", b"\xf0\x9f", b"\xa4\x96"]
    made = []
    for item in range(groups):
        rollouts = []
        for _ in range(2):
            tokens = [words[i] for i in rng.integers(0, 5, 6)] + [seed_text] * bool(seed_text) + [words[5], words[6]]
            ids = [byte for token in tokens for byte in token] + [END]
            unit = np.repeat(np.arange(len(tokens) + 1), [*map(len, tokens), 1])
            logp = -rng.exponential(1, len(tokens) + 1).astype(np.float32)
            rollouts.append(Rollout(ints(*ids), logp, unit.astype(np.int32)))
        made.append(Group("ada", 0, item, tuple(rollouts)))
    return made


def over_numbers(groups: Sequence[Group], numbers: dict[bytes, int]) -> list[Group]:
    """The same groups as a sender and learner of one tokenizer see them: any number for each spelling."""

    def numbered(rollout: Rollout) -> Rollout:
        assert rollout.unit is not None
        parts = np.split(rollout.completion_ids, np.flatnonzero(np.diff(rollout.unit)) + 1)
        ids = [numbers.setdefault(part.tobytes(), 1000 - len(numbers)) for part in parts]
        return Rollout(ints(*ids), rollout.gen_logp)

    return [replace(group, rollouts=tuple(map(numbered, group.rollouts))) for group in groups]


def evidence_in(messages: Sequence[Sequence[Group]]) -> float:
    """The nats of evidence that these messages of one sender leave, without the learner's model."""
    detector, past, spellings = Detector(groups_of_run=sum(map(len, messages))), Past(), Spellings()
    for groups in messages:
        rollouts = spellings.as_sent([rollout for group in groups for rollout in group.rollouts])
        group_N = np.repeat(np.arange(len(groups)), [len(group.rollouts) for group in groups])
        detector.add(ratios_of(rollouts, group_N, past, [None] * len(rollouts)))
    return detector.nats


def test_evidence_on_text_is_that_on_the_senders_tokens() -> None:
    """A token is known by its bytes, and only which tokens are the same matters."""
    rng = np.random.default_rng(0)
    messages = [spoken(rng, 3, b" again and again") for _ in range(4)]
    numbers: dict[bytes, int] = {}
    over_ids = [over_numbers(message, numbers) for message in messages]
    on_text, on_ids = (evidence_in(of) for of in (messages, over_ids))
    assert on_text == on_ids
    assert on_text > 0


def ending(ends: Sequence[int], reported: float) -> list[list[Group]]:
    """Ten messages of a sender whose completions end by one of ``ends``, whose log-probability is ``reported``."""
    text = b"1+2=3"

    def rollout(end: int) -> Rollout:
        ids = ints(*text, END + end)
        logp = np.append(np.full(len(text), np.log(0.999)), reported).astype(np.float32)
        return Rollout(ids, logp, np.arange(len(ids), dtype=np.int32))

    rng = np.random.default_rng(0)
    return [
        [Group("ada", round, item, tuple(rollout(rng.choice(ends)) for _ in range(12))) for item in range(6)]
        for round in range(10)
    ]


def test_a_sender_that_ends_by_two_tokens_in_turn_is_not_accused_and_one_that_lies_about_its_end_is() -> None:
    """Two ends are two tokens on the wire. One that always follows and is reported at a half is a lie."""
    assert evidence_in(ending([0, 1], np.log(0.5))) < 5
    assert evidence_in(ending([0], np.log(0.5))) > 50
    assert evidence_in(ending([0, 1], np.log(0.1))) > 50
    everything = range(MOST_ENDS)  # hides the log of their number
    assert evidence_in(ending(everything, -np.log(MOST_ENDS))) < 5
    assert evidence_in(ending(everything, -3.0)) > 850


def test_what_was_admitted_as_text_is_tested_as_it_came() -> None:
    (group,) = spoken(np.random.default_rng(1), 1)
    known = TokenBytes.of(byte_level(["ab", " the"]))
    admitted = [
        in_tokens(text, [one]) for text, one in zip(group.rollouts, align(group.rollouts, known, 256), strict=True)
    ]
    of_bytes, of_tokens = (Spellings().as_sent(rollouts) for rollouts in (group.rollouts, admitted))
    for came, kept in zip(of_bytes, of_tokens, strict=True):
        assert came.completion_ids.tolist() == kept.completion_ids.tolist()
        assert came.gen_logp.tolist() == kept.gen_logp.tolist()
    own = Rollout(ints(3, 4), floats(-1, -2))
    assert Spellings().as_sent([own]) == [own]


def test_the_ends_of_a_sender_are_told_apart_in_what_came_and_in_what_was_admitted() -> None:
    known = TokenBytes.of(byte_level([]))
    texts = [Rollout(ints(*b"a", END + end), floats(-1, -2), ints(0, 1)) for end in (0, 1, 2, 1)]
    admitted = [in_tokens(text, [one]) for text, one in zip(texts, align(texts, known, 256), strict=True)]
    for rollouts in (texts, admitted):
        numbers = [rollout.completion_ids[1] for rollout in Spellings().as_sent(rollouts)]
        assert [numbers[0] == n for n in numbers] == [True, False, False, False]
        assert numbers[1] == numbers[3] != numbers[2]


def test_broken_characters_are_bet_on_by_nobody() -> None:
    text = "aba\N{REPLACEMENT CHARACTER}".encode()
    rollout = Rollout(ints(*text), floats(*[-5.0] * 4), ints(0, 1, 2, 3, 3, 3))
    (numbered,) = Spellings().as_sent([rollout])
    assert numbered.completion_ids.tolist() == [0, 1, 0, OTHER]
    past = Past()
    for _ in range(3):
        ratios = ratios_of([numbered], np.zeros(1, np.int64), past, [None])
        past.add_raised([numbered.completion_ids])
    assert (ratios.counts_NUC[0] > 1).all(1).tolist() == [True, True, True, False]
    assert ratios.counts_NUC[0, 3].max() < 1e-290


def letters(text: str) -> Rollout:
    """A rollout over bytes, of which each is a token of its sender."""
    return Rollout(ints(*text.encode()), floats(*[-5.0] * len(text)), ints(*range(len(text))))


def test_the_spellings_that_were_seen_last_stay_and_those_that_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spellings_module, "MOST_SPELLINGS", 4)
    spellings = Spellings()
    spellings.as_sent([letters("abcdea")])
    assert spellings.is_full
    new_number = spellings.shrink(np.array([1]))  # b; e and a were seen last
    assert [int(new_number[old]) for old in (1, 4, 0)] == [0, 1, 2]
    assert [int(new_number[old]) for old in (2, 3, OTHER, START)] == [-1, -1, OTHER, START]
    for one in (spellings, Spellings(**json.loads(json.dumps(spellings.state())))):
        (numbered,) = one.as_sent([letters("beac")])
        assert numbered.completion_ids.tolist() == [0, 1, 2, 3]


@settings(max_examples=25)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.permutations(range(6)))
def test_new_numbers_change_nothing_that_is_known(tokens: list[int], order: list[int]) -> None:
    past, frequent, new_number = Past(), Frequent(10), np.arange(START + 2)
    new_number[:6] = order
    rows = [Rollout(ints(*tokens), floats(*[-1.0] * len(tokens)))]
    again = [Rollout(new_number[rows[0].completion_ids].astype(np.int32), rows[0].gen_logp)]
    for _ in range(2):
        past.probabilities([rows[0].completion_ids])
        past.add_raised([rows[0].completion_ids])
        of_both(frequent, rows)
    renamed, of_renamed = copy.deepcopy((past, frequent))
    renamed.renumber(new_number)
    of_renamed.renumber(new_number)
    expected = past.probabilities([rows[0].completion_ids])
    assert renamed.probabilities([again[0].completion_ids]).tolist() == expected.tolist()
    assert of_both(of_renamed, again) == pytest.approx(of_both(frequent, rows))
    new_number[tokens[0]] = -1
    past.renumber(new_number)
    frequent.renumber(new_number)
    assert past.probabilities([rows[0].completion_ids])[0].tolist() == [0, 0]
    assert order[tokens[0]] not in frequent.tokens


def test_a_flood_of_rare_spellings_loses_no_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither through spellings that are forgotten, nor through keys that make room for new ones."""
    monkeypatch.setattr(spellings_module, "MOST_SPELLINGS", 64)
    monkeypatch.setattr("ftis.honesty.frequent.MOST_KEYS", 64)
    sender = HonestyTest(a_recipe())._new()

    def add(rollout: Rollout) -> None:
        one = np.zeros(1, np.int64)
        sender.add(SentRound(sender.newest + 1, [rollout], one, [None], one > 0), 1e9)

    for _ in range(4):
        add(replace(letters("z"), gen_logp=floats(-9)))
    before = sender.frequent.nats
    assert before > 15
    for flood in range(4):
        text = "".join(chr(0x4E00 + 99 * flood + i) for i in range(99))
        add(Rollout(ints(*text.encode()), floats(*[-9.0] * 99), np.repeat(np.arange(99, dtype=np.int32), 3)))
    assert sender.frequent.nats > before - 3
    add(replace(letters("z"), gen_logp=floats(-9)))
    assert sender.frequent.nats > before + 5
