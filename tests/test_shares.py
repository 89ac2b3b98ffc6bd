"""``training.share = "speed"``: each peer samples as much as it can in the time of the middle one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median_high
from typing import Any

import pytest
from commands import ftis
from hypothesis import given
from hypothesis import strategies as st
from round_table import Table, seated

from ftis.admission import Reason
from ftis.config import LARGEST_SHARE, Recipe, RecipeError, RunError
from ftis.experiment.runs import run
from ftis.guards.limit import ForeignLimit
from ftis.recipe.parsing import parse
from ftis.run.assembly import assemble
from ftis.schedule import assigned
from ftis.swarm.facts import agreement, run_id
from ftis.swarm.shares import ROUNDS, Share
from recipes import pair_of

Models = dict[str, Path]
Capture = pytest.CaptureFixture[str]
EQUAL, GROUP = 8, 4
MOST = LARGEST_SHARE * EQUAL


def measured(each: float, besides: float, prompts: int = EQUAL, waited: float = 1e3) -> dict[str, Any]:
    """The metrics of a round."""
    sampling = each * prompts
    seconds = {"time/sample": sampling, "time/wait": waited, "step_time": sampling + besides + waited}
    return {"peer/a/admitted": prompts * GROUP, **seconds}


def share_of(each: float = 0.0, besides: float = 0.0, rounds: int = 1) -> Share:
    share = Share("a", EQUAL, MOST, GROUP)
    for _ in range(rounds):
        share.took(measured(each, besides))
    return share


def test_at_speeds_1_2_3_the_middle_peer_keeps_its_share_and_the_others_need_its_time() -> None:
    peers = [share_of(seconds) for seconds in (0.3, 0.15, 0.1)]
    stated = [peer.milliseconds for peer in peers]
    assert stated == [2400, 1200, 800]
    assert [peer.prompts(stated[:at] + stated[at + 1 :]) for at, peer in enumerate(peers)] == [4, 8, 12]
    share = share_of(0.1, besides=2.0)
    assert share.milliseconds == 2800
    assert share.prompts([3000, 3400]) == 10
    assert share.prompts([1900, 1500]) == 1, "even without sampling it would be late"


def test_until_its_speed_and_one_others_are_known_a_peer_samples_a_quarter() -> None:
    new = share_of(rounds=0)
    assert (new.milliseconds, new.prompts([]), new.prompts([10, 10])) == (0, EQUAL // 4, EQUAL // 4)
    begun = share_of(1.0)
    assert (begun.prompts([]), begun.prompts([16_000])) == (EQUAL // 4, 2 * EQUAL)
    assert share_of(1.0, rounds=2).prompts([]) == EQUAL, "a silent swarm does not keep it small"
    assert Share("a", 3, 9, GROUP).prompts([]) == 1
    slow_at_first = share_of(50.0)
    for _ in range(ROUNDS):
        slow_at_first.took(measured(0.1, 0.5))
    assert slow_at_first.milliseconds == 1300, "it is forgotten"


@given(st.lists(st.integers(1, MOST), min_size=1, max_size=8), st.floats(0.01, 10), st.floats(0, 10))
def test_seconds_of_a_draw_are_of_the_next_rounds_prompts(sampled: list[int], each: float, learning: float) -> None:
    share = share_of(rounds=0)
    for now, ahead in pairwise([EQUAL, *sampled]):
        draw = each * ahead
        seconds = {"time/sample": max(draw - learning, 0), "time/wait": 5.0, "step_time": max(draw, learning) + 5}
        share.took({"peer/a/admitted": now * GROUP, "time/draw": draw, **seconds})
    share.took({"peer/a/admitted": sampled[-1] * GROUP, "time/sample": 0, "time/wait": 0, "step_time": learning})
    lately = sampled[-ROUNDS:]
    assert list(share.each) == pytest.approx([each] * len(lately))
    assert list(share.besides) == pytest.approx([max(learning - each * n, 0) for n in lately], abs=1e-9)


speeds = st.tuples(st.floats(0.01, 10), st.floats(0, 10))


@given(st.lists(speeds, min_size=2, max_size=9), st.lists(st.integers(1, MOST), min_size=9, max_size=9))
def test_all_need_the_median_time_unless_bounded(peers: list[tuple[float, float]], before: list[int]) -> None:
    shares = [share_of(rounds=0) for _ in peers]
    for share, (each, besides), prompts in zip(shares, peers, before, strict=False):
        share.took(measured(each, besides, prompts))
    stated = [share.milliseconds for share in shares]
    median = median_high([besides + EQUAL * each for each, besides in peers])
    for at, (each, besides) in enumerate(peers):
        n = shares[at].prompts(stated[:at] + stated[at + 1 :])
        seconds = besides + n * each
        assert 1 <= n <= MOST
        assert n == MOST or seconds >= median - each / 2 - 0.002
        assert n == 1 or seconds <= median + each / 2 + 0.002


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=8), st.integers(1, 2**53), speeds)
def test_a_liar_moves_the_median_at_most_to_a_neighbour(
    others: list[int], lie: int, speed: tuple[float, float]
) -> None:
    share = share_of(*speed)
    each, besides = share.each[0], share.besides[0]
    honest = sorted([share.seconds, *(other / 1000 for other in others)])
    least, most = (
        min(max(1, round((seconds - besides) / each)), MOST)
        for seconds in (honest[len(others) // 2], honest[len(others) // 2 + 1])
    )
    assert least <= share.prompts([*others, lie]) <= most


@given(st.integers(1, 2**53), speeds)
def test_in_a_pair_a_lie_makes_nobody_sample_less_than_its_equal_share(lie: int, speed: tuple[float, float]) -> None:
    assert EQUAL <= share_of(*speed).prompts([lie]) <= MOST


def stating(table: Table, **milliseconds: int) -> None:
    for name, value in milliseconds.items():
        table.offers(name, 0, milliseconds=value)


def half_arrived(table: Table) -> None:
    stating(table, b=5, c=7)  # offers whose contents nobody has
    table.delivers("d", 0)  # it states nothing


def contradicting(table: Table) -> None:
    stating(table, b=5, c=7, d=9)
    table.offers("d", 0, b"other", milliseconds=900)


def gone(table: Table) -> None:
    stating(table, b=5, c=7, d=9)
    table.leaves("d")


def older(table: Table) -> None:
    table.offers("b", 1, milliseconds=6)
    stating(table, b=5, c=7)


def forged(table: Table) -> None:
    stating(table, c=7)
    table.offers("b", 0, signer="x", milliseconds=5)


def skipped(table: Table) -> None:
    table.collect(0, skip="c")
    stating(table, b=5, c=7, d=9)


@pytest.mark.parametrize(
    ("deeds", "counted"),
    [
        (lambda table: None, []),
        (half_arrived, [5, 7]),
        (contradicting, [5, 7, 9]),
        (gone, [5, 7]),
        (older, [6, 7]),
        (forged, [7]),
        (skipped, [5, 9]),
    ],
)
def test_the_newest_statement_of_each_present_peer_counts(deeds: Callable[[Table], None], counted: list[int]) -> None:
    table = seated({"quorum": 3})
    table.collect(0)
    deeds(table)
    assert sorted(table.rounds.milliseconds) == counted


def recipe_of(models: Models, place: Path, share: str = "speed", **training: Any) -> Recipe:
    training = {"share": share, "prompts_per_round": 4, **training}
    return parse(pair_of(models, place, 1e-3, training=training), where="test")


def test_prompts_are_disjoint_however_many_each_samples(models: Models, tmp_path: Path) -> None:
    recipe = recipe_of(models, tmp_path)
    of_round = [item for peer in recipe.peers for item in assigned(recipe, 100, peer.name, 3)]
    assert len(of_round) == len(set(of_round)) == LARGEST_SHARE * recipe.training.prompts_per_round
    alone = recipe.of_swarm({"a"})
    equal = recipe_of(models, tmp_path, "equal").of_swarm({"a"})
    assert assigned(alone, 100, "a", 3) == assigned(equal, 100, "a", 3), "alone there is nothing to share"
    with pytest.raises(RecipeError, match=r'share = "speed" take 12, but the task has only 11'):
        assigned(recipe, 11, "a", 0)


def test_a_message_has_up_to_the_largest_share_of_its_senders_prompts(models: Models, tmp_path: Path) -> None:
    recipe = recipe_of(models, tmp_path)
    a, b = (assemble(recipe, name, tmp_path / name).peer for name in "ab")
    items = assigned(recipe, len(a.member.task.train), "b", 0)
    shares = (1, 3, len(items))
    b.member.share = lambda round: shares[min(round, 2)]
    for round, share in enumerate(shares):
        outgoing = b.begin(round)
        assert outgoing.items == tuple(sorted(b.member.assigned("b", round)[:share]))
        admission = a.member.admitter.admit("b", outgoing.message, round)
        assert tuple(scored.group.item for scored in admission.admitted) == outgoing.items
    groups = [scored.group for scored in b.sample(3)]
    other = dataclasses.replace(groups[0], item=a.member.assigned("a", 3)[0])
    for sent, reason in ((groups[:-1], Reason.NOT_THEIR_PROMPT), (groups, Reason.OVER_BUDGET)):
        message = b.member.outgoing(3, [*sent, other]).message
        assert [one.reason for one in a.member.admitter.admit("b", message, 3).rejections] == [reason]


def test_a_limit_takes_the_first_ones_since_others_may_not_come(models: Models, tmp_path: Path) -> None:
    recipe = recipe_of(models, tmp_path, max_foreign_rollouts=16)
    items = assigned(recipe, 100, "b", 2)
    assert ForeignLimit(recipe, "a").wanted("b", 2, items) == items[:2]


def test_the_share_is_agreed_and_has_its_place(models: Models, tmp_path: Path, capsys: Capture) -> None:
    equal, speed = (recipe_of(models, tmp_path, share) for share in ("equal", "speed"))
    assert run_id(agreement(equal, "", 1)) != run_id(agreement(speed, "", 1))
    assert "share" not in agreement(equal, "", 1), "runs of before are the same runs"
    with pytest.raises(RecipeError, match=r'share = "speed" is for mode = "vertical"'):
        recipe_of(models, tmp_path, mode="horizontal")
    with pytest.raises(RunError, match="ftis join"):
        run(speed)
    for also in ((), ("--seeds", "2")):
        given = ("train", "recipes/demo_three.toml", "--dry-run", "--set", 'training.share="speed"', *also)
        assert ftis(*given) == 1, "a dry run refuses as the run does"
        assert "ftis join" in capsys.readouterr().err
