"""The selections: F-TIS's filter, the foreign limit, penalties, and selections from outside the package."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from admissions import END, admitter, group, items, message, only
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from wire_messages import rollout

from ftis import admission as admission_module
from ftis.admission import Admission, Collected
from ftis.codec import decode
from ftis.config import Recipe, RecipeError
from ftis.guards.limit import ForeignLimit
from ftis.guards.penalties import Penalties
from ftis.member import Member
from ftis.objectives import F_TIS, OBJECTIVES, Diagnostics
from ftis.rollouts import Batch, Group, Rollout, ScoredGroup, collate
from ftis.selection import Judged, KLFilter, OfShares, Selection, select, selections_of
from recipes import recipe_of

NOISE = b"not a message"


def batch_of(n: int) -> Batch:
    rollouts = tuple(Rollout(np.array([5], np.int32), np.array([-1.0], np.float32)) for _ in range(n))
    scored = ScoredGroup(Group("bob", 0, 0, rollouts), ("5",) * n, (0.0,) * n)
    return collate([scored], lambda *_: np.array([1], np.int32), "ada")


def judged_of(advantage: Sequence[float], k1: Sequence[float] = (), k3: Sequence[float] = ()) -> Judged:
    """Rollouts of one token each; ``k1`` and ``k3`` are those of the rollouts with Â ≠ 0."""
    advantage_N = torch.tensor(advantage)
    rows = np.flatnonzero(advantage_N.numpy())
    n = len(rows)
    diagnostics = Diagnostics(
        length_N=torch.ones(n, dtype=torch.int64),
        k1_N=torch.tensor(k1 or [0.0] * n),
        k3_N=torch.tensor(k3 or [0.0] * n),
        raw_weight=torch.ones(n),
        weight=torch.ones(n),
        clipped_low=torch.zeros(n, dtype=torch.bool),
        clipped_high=torch.zeros(n, dtype=torch.bool),
        ref_kl=torch.zeros(0),
    )
    old = [np.array([-1.0], np.float32)] * n
    gap = np.zeros(0, np.float32)
    return Judged(batch_of(len(advantage)), advantage_N, rows, old, diagnostics if n else None, gap)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_filter_drops_what_is_bad_and_far_by_the_objectives_estimator(estimator: Any) -> None:
    kl, other = [0.0, 99.0, 0.4, 0.5, float("nan")], [9.0, 9.0, 9.0, 0.0, 0.0]
    k1, k3 = (kl, other) if estimator == "k1" else (other, kl)
    objective = replace(F_TIS, kl_estimator=estimator, kl_threshold=0.5)
    chosen = select(judged_of([1.0, 1.0, -1.0, 0.0, -1.0, -1.0], k1, k3), [KLFilter(objective)])
    assert chosen.share_R.tolist() == [1, 1, 1, 0, 0], "0.5 < 0.5 is false, and so it is of NaN"
    assert chosen.reason_R == (None, None, None, "kl", "kl")
    assert chosen.kept_R.tolist() == [True, True, True, False, False]


def halves(judged: Judged) -> Tensor:
    """For a recipe: ``training.selections = ["test_selection.halves"]``."""
    return torch.full((len(judged.rows),), 0.5)


class NothingOfBob(Selection):
    """For a recipe: a class, made with the recipe and the learner's name, that counts what it heard."""

    def __init__(self, recipe: Recipe, own: str) -> None:
        self.name, self.own, self.count = "nothing_of_bob", own, 0

    def heard(self, admission: Admission, round: int) -> None:
        self.count += 1

    def shares(self, judged: Judged) -> Tensor:
        return torch.tensor([float(source != "bob") for source in judged.source_names()])

    def state(self) -> dict[str, int]:
        return {"count": self.count}

    def restore(self, state: Any) -> None:
        self.count = state["count"]


def test_shares_multiply_and_what_drops_or_first_lowers_one_is_the_reason() -> None:
    first = OfShares(lambda judged: torch.tensor([1.0, 0.5, 0.0]), "first")
    chosen = select(judged_of([1.0, -1.0, 1.0]), [first, OfShares(halves, "second")])
    assert chosen.share_R.tolist() == [0.5, 0.25, 0.0]
    assert chosen.reason_R == ("second", "first", "first")
    assert chosen.kept_R.tolist() == [True, True, False]
    half, none = OfShares(halves, "half"), OfShares(lambda judged: torch.tensor([0.0]), "none")
    for selections in ([half, none], [none, half], [half, none, none]):
        assert select(judged_of([1.0]), selections).reason_R == ("none",)
    never = OfShares(lambda judged: pytest.fail("asked, though nothing carries gradient"), "never")
    assert select(judged_of([0.0, 0.0]), [never]).reason_R == ()


@pytest.mark.parametrize("shares", [[1.0], [1.0, 1.1], [1.0, -0.1], [1.0, float("nan")], []])
def test_shares_that_are_none_are_named(shares: list[float]) -> None:
    with pytest.raises(RecipeError, match=r"selection 'mine' returned .* for 2 rollouts"):
        select(judged_of([1.0, -1.0]), [OfShares(lambda judged: torch.tensor(shares), "mine")])


def test_a_recipe_names_functions_and_classes() -> None:
    recipe = recipe_of("ada", "bob", selections=["test_selection.halves", "test_selection.NothingOfBob"])
    kinds = selections_of(recipe, "ada", OBJECTIVES["F-TIS"])
    always = ["penalty", "honesty", "alignment"]
    assert [selection.name for selection in kinds] == ["kl", *always, "halves", "nothing_of_bob"]
    assert select(judged_of([1.0, -1.0]), kinds).share_R.tolist() == [0, 0]
    assert [s.name for s in selections_of(recipe_of("ada", "bob"), "ada", OBJECTIVES["TIS"])] == always
    limited = recipe_of("ada", "bob", max_foreign_rollouts=8)
    assert [s.name for s in selections_of(limited, "ada", F_TIS)] == ["kl", "limit", *always]
    for path, said in (
        ("test_selection.NOISE", "is a bytes"),
        ("test_selection.halfs", "'halves'"),
        ("halves", "dotted"),
    ):
        with pytest.raises(RecipeError, match=said):
            selections_of(recipe_of("ada", "bob", selections=[path]), "ada", OBJECTIVES["TIS"])
    bound = partial(halves)
    (made,) = selections_of(recipe_of("ada", "bob"), "ada", replace(OBJECTIVES["TIS"], selections=(bound,)))[-1:]
    assert made.name == "partial"
    assert made.shares(judged_of([1.0, -1.0])).tolist() == halves(judged_of([1.0, -1.0])).tolist()
    wrong: Any = KLFilter(F_TIS)
    with pytest.raises(RecipeError, match="is a KLFilter"):
        selections_of(recipe_of("ada", "bob"), "ada", replace(OBJECTIVES["TIS"], selections=(wrong,)))


def test_among_strangers_others_failures_are_dropped_and_own_ones_are_not() -> None:
    both = selections_of(recipe_of("ada", "bob"), "ada", OBJECTIVES["TIS"])
    guarded = selections_of(recipe_of("ada", "bob", foreign_failures=False), "ada", OBJECTIVES["TIS"])
    assert [s.name for s in guarded if s.name not in {one.name for one in both}] == ["failure", "short"]
    judged = judged_of([1.0, -1.0, 0.0, -2.0])
    chosen = select(judged, guarded)
    assert chosen.share_R.tolist() == [1, 0, 0]
    assert chosen.reason_R == (None, "failure", "failure")
    own = replace(judged.batch, source_N=np.zeros(4, np.int64), own_N=np.ones(4, bool))
    assert select(replace(judged, batch=own), guarded).share_R.tolist() == [1, 1, 1]
    (only,) = [one for one in guarded if one.name == "failure"]  # with a KL to the reference, Â = 0 has a row too
    assert only.shares(replace(judged, rows=np.arange(4))).tolist() == [1, 0, 1, 0]


def test_among_strangers_a_short_rollout_counts_by_its_length() -> None:
    """Own ones have 4 and 2 tokens, and the first is right, so l = 4; the others' have 1, 3 and 6."""
    judged = judged_of([1.0, 1.0, -1.0, 1.0, 1.0])
    lengths = (4, 1, 2, 3, 6)
    rollouts = [Rollout(np.ones(n, np.int32), np.zeros(n, np.float32)) for n in lengths]
    own_N = np.array([True, False, True, False, False])
    judged = replace(judged, batch=replace(judged.batch, rollouts=tuple(rollouts), own_N=own_N))
    recipe = recipe_of("ada", "bob", foreign_failures=False)
    (short,) = [one for one in selections_of(recipe, "ada", OBJECTIVES["TIS"]) if one.name == "short"]
    assert short.shares(judged).tolist() == pytest.approx([1, 1 / 4, 1, 3 / 4, 1])
    none_right = replace(judged, advantage_N=torch.tensor([-1.0, 1.0, -1.0, 1.0, 1.0]))
    assert short.shares(none_right).tolist() == pytest.approx([1, 1 / 3, 1, 1, 1])
    by_token = recipe.model_copy(update={"objective": recipe.objective.model_copy(update={"name": "DAPO"})})
    assert "short" not in [one.name for one in selections_of(by_token, "ada", OBJECTIVES["DAPO"])]


def test_late_groups_take_what_the_limit_leaves() -> None:
    limit = ForeignLimit(recipe_of("ada", "bob", max_foreign_rollouts=6), "ada")  # three groups of two
    groups = [ScoredGroup(Group("bob", round, item, ()), (), ()) for round, item in ((3, 0), (3, 1), (2, 2), (2, 3))]
    on_time, late = Admission("bob", tuple(groups[:2]), ()), Admission("bob", tuple(groups[2:]), ())
    kept = limit.within_room([on_time, late])
    assert [a.admitted for a in kept] == [tuple(groups[:2]), (groups[2],)]
    assert kept[1].passed_over == (groups[3].group,)


class Listener:
    """A peer's admission of messages, with its penalties."""

    def __init__(self, max_rejections: int = 3, rounds: int = 2) -> None:
        self.penalties = Penalties(max_rejections, rounds)
        self.admitter = admitter(assigned=lambda peer, round: [0, 1, 2], max_groups=3)
        self.selections = (self.penalties,)

    def skipped(self, round: int) -> frozenset[str]:
        return Member.skipped(self, round)  # type: ignore[arg-type]

    def admit(self, sender: str, data: bytes, round: int) -> Admission:
        (admission,) = Member.admit(self, Collected({sender: data}), round)  # type: ignore[arg-type]
        return admission


FAULTS = {"good": 0, "noise": 1, "mixed": 1, "two bad": 2, "empty": 0}
"""What a message may be, and its rejections."""


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["ada", "bob"]), st.sampled_from([*FAULTS]))), st.integers(0, 3))
def test_who_has_more_rejections_than_are_borne_is_set_aside_for_two_rounds(
    deeds: list[tuple[str, str]], borne: int
) -> None:
    """A faultless message wipes the slate. Who is set aside is not even decoded, and nothing counts meanwhile."""
    peer, counts, until = Listener(borne), Counter[str](), dict[str, int]()
    for at, (sender, deed) in enumerate(deeds):
        round, item = at // 2, at % 2
        of: dict[str, Any] = {"peer": sender, "round": round}
        fine, bad = group(item, **of), [group(n, rollout([END]), **of) for n in (1 - item, 2)]
        groups = {"good": [fine], "mixed": [fine, bad[1]], "two bad": bad}.get(deed, [])
        aside = {name for name, first in until.items() if round < first}
        assert peer.skipped(round) == aside
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(admission_module, "decode", decoded := Mock(wraps=decode))
            found = peer.admit(sender, NOISE if deed == "noise" else message(*groups, **of), round)
        assert decoded.call_count == (sender not in aside)
        if sender in aside:
            assert (only(found).peer, only(found).reason, only(found).item) == (sender, "set_aside", None)
            continue
        assert (len(found.rejections), items(found)) == (FAULTS[deed], [item] * (fine in groups))
        counts[sender] = 0 if deed == "good" else counts[sender] + FAULTS[deed]
        if borne and counts[sender] > borne:
            until[sender], counts[sender] = round + 3, 0
    again = Penalties(borne, 2)
    again.restore(json.loads(json.dumps(peer.penalties.state())))
    assert again == peer.penalties


def test_only_what_a_member_did_itself_is_held_against_it() -> None:
    peer = Listener()
    for number in range(1000):
        for _ in range(5):
            assert only(peer.admit(f"eve{number}", NOISE, round=0)).reason == "not_in_roster"
    assert peer.penalties.state() == {"rejections": {}, "until": {}}, "strangers leave nothing in memory"
    in_adas_name = message(group(0))
    for _ in range(4):
        assert only(peer.admit("bob", in_adas_name, round=0)).reason == "wrong_sender"
    assert peer.skipped(0) == {"bob"}
    slow = Listener(max_rejections=1)
    slow.admitter = admitter(max_seconds=-1.0)
    for _ in range(5):
        assert only(slow.admit("ada", message(group(0)), round=0)).reason == "over_time"
    assert slow.skipped(0) == frozenset()
