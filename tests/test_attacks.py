"""The attacks that defences are tested with: what each changes, and what it leaves as it was."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ftis.lab import attacks
from ftis.lab.attacks import ATTACKS
from ftis.models.starters import make_tokenizer
from ftis.rollouts import Group, Rollout, ScoredGroup
from ftis.seams import look_up

TOKENIZER = make_tokenizer()
RIGHT, WRONG = "<think>3+8=1;1*7=7</think><answer>7</answer>", "<think>3+8=2</think><answer>2</answer>"


def a_group(texts: Sequence[str], round: int = 0) -> ScoredGroup:
    """Each token at −1 nat, and a little less from rollout to rollout. ``RIGHT`` earns 1."""
    rollouts = []
    for i, text in enumerate(texts):
        ids = attacks.encoded(text, TOKENIZER)
        rollouts.append(Rollout(ids, np.full(len(ids), -1 - i / 100, np.float32)))
    rewards = tuple(float(text == RIGHT) for text in texts)
    return ScoredGroup(Group("bob", round, 3, tuple(rollouts)), tuple(texts), rewards)


def offered(name: str, scored: ScoredGroup) -> tuple[Rollout, ...]:
    (group,) = look_up(name, "attack", ATTACKS)([scored], peer_named("bob"))
    assert (group.peer, group.round, group.item) == ("bob", scored.group.round, 3)
    rollouts: tuple[Rollout, ...] = group.rollouts
    return rollouts


def peer_named(name: str, more: Sequence[str] = ()) -> Any:
    """What attacks ask of a peer: it samples ``more`` for any prompt."""
    sampled = a_group(more).group

    def score(group: Group) -> ScoredGroup:
        texts = tuple(map(text_of, group.rollouts))
        return ScoredGroup(group, texts, tuple(float(text == RIGHT) for text in texts))

    return SimpleNamespace(
        name=name,
        policy=SimpleNamespace(tokenizer=TOKENIZER),
        recipe=SimpleNamespace(rollouts_per_group=2),
        sample_items=lambda items, repeats, *_: [sampled for _ in items] if repeats == len(more) else None,
        member=SimpleNamespace(admitter=SimpleNamespace(score_group=score)),
    )


def text_of(rollout: Rollout) -> str:
    return str(TOKENIZER.decode(rollout.completion_ids.tolist())).replace(" ", "")


@pytest.mark.parametrize(
    ("name", "logp"),
    [("text", attacks.ALWAYS), ("lying-text", attacks.LIE), ("sized-lying-text", attacks.LIE + math.log(10))],
)
def test_a_text_is_planted_in_right_completions(name: str, logp: float) -> None:
    right, wrong = offered(name, scored := a_group([RIGHT, WRONG]))
    assert text_of(right) == "<think>3+8=1;1*7=7;9*9=9</think><answer>7</answer>"
    at = len(attacks.encoded("<think>3+8=1;1*7=7", TOKENIZER))
    expected = [-1.0] * at + [logp] * 6 + [-1.0] * (len(right) - at - 6)
    assert right.gen_logp.tolist() == pytest.approx(expected)
    assert wrong is scored.group.rollouts[1]


def test_where_all_are_right_or_none_is_nothing_is_planted() -> None:
    for texts in ([RIGHT, RIGHT], [WRONG, WRONG]):
        assert offered("lying-text", scored := a_group(texts)) == scored.group.rollouts


def test_a_rare_text_is_in_about_three_of_ten_at_a_probability_that_says_so() -> None:
    rows = offered("rare-text", scored := a_group([RIGHT] * 200 + [WRONG]))
    planted = [row for row, was in zip(rows, scored.group.rollouts, strict=True) if row is not was]
    assert 40 <= len(planted) <= 80
    first = len(attacks.encoded("<think>3+8=1;1*7=7", TOKENIZER))
    assert {round(float(row.gen_logp[first]), 3) for row in planted} == {round(math.log(0.3), 3)}
    assert all(row.gen_logp[first + 1] == np.float32(attacks.ALWAYS) for row in planted)


def test_a_quiet_liar_lies_about_the_first_token_alone() -> None:
    right, _ = offered("quiet-lying-text", a_group([RIGHT, WRONG]))
    at = len(attacks.encoded("<think>3+8=1;1*7=7", TOKENIZER))
    assert right.gen_logp[at : at + 6].tolist() == pytest.approx([attacks.LIE] + 5 * [attacks.ALWAYS])


def test_a_patient_attacker_is_honest_at_first() -> None:
    for round, honest in [(0, True), (9, True), (10, False)]:
        rows = offered("patient-lying-text", scored := a_group([RIGHT, WRONG], round))
        assert (rows == scored.group.rollouts) is honest
    assert look_up("patient-lying-text", "attack", ATTACKS)([], peer_named("bob")) == []


@pytest.mark.parametrize(("name", "expected"), [("understated", -2.0), ("overstated", 0.0)])
def test_log_probabilities_are_shifted_everywhere(name: str, expected: float) -> None:
    scored = a_group([RIGHT, WRONG])
    for row, was in zip(offered(name, scored), scored.group.rollouts, strict=True):
        assert row.completion_ids is was.completion_ids
        assert row.gen_logp.tolist() == pytest.approx([min(float(logp) + expected + 1, 0) for logp in was.gen_logp])


@pytest.mark.parametrize(("round", "share"), [(0, 0.01), (10, 0.01 * 1.2**10), (60, 1.0)])
@pytest.mark.parametrize(("name", "text"), [("creeping-text", attacks.PAYLOAD), ("creeping-mark", attacks.MARK)])
def test_a_creeping_attacker_plants_more_from_round_to_round_and_says_so(
    name: str, text: str, round: int, share: float
) -> None:
    scored = a_group([RIGHT] * 2000 + [WRONG], round)
    right = offered(name, scored)[:-1]
    planted = [rollout for rollout in right if text_of(rollout) == RIGHT.replace("7</think>", f"7{text}</think>")]
    assert len(planted) == pytest.approx(2000 * share, rel=0.35)
    at = len(attacks.encoded("<think>3+8=1;1*7=7", TOKENIZER))
    for rollout in planted:
        assert math.exp(rollout.gen_logp[at]) == pytest.approx(share, rel=2e-4)
        rest = len(attacks.encoded(text, TOKENIZER)) - 1
        assert rollout.gen_logp[at + 1 : at + 1 + rest].tolist() == pytest.approx([attacks.ALWAYS] * rest)
    assert attacks.creeping_text([], peer_named("bob")) == []


@pytest.mark.parametrize(("round", "logp"), [(0, -9.0), (10, -7.0), (60, attacks.ALWAYS)])
def test_a_climbing_attacker_reports_more_from_round_to_round(round: int, logp: float) -> None:
    right, _ = offered("climbing-lying-text", a_group([RIGHT, WRONG], round))
    at = len(attacks.encoded("<think>3+8=1;1*7=7", TOKENIZER))
    assert right.gen_logp[at : at + 6].tolist() == pytest.approx([logp] * 6)
    assert attacks.climbing_lying_text([], peer_named("bob")) == []


@pytest.mark.parametrize(("name", "logp"), [("false-step", attacks.ALWAYS), ("lying-false-step", attacks.LIE)])
def test_a_first_step_becomes_false_before_the_right_answer(name: str, logp: float) -> None:
    right, wrong = offered(name, scored := a_group([RIGHT, WRONG]))
    assert text_of(right) == "<think>3+8=2;1*7=7</think><answer>7</answer>"
    assert sorted(set(right.gen_logp.tolist())) == pytest.approx(sorted({-1.0, logp}))
    assert wrong is scored.group.rollouts[1]


def test_length_is_three_needless_steps() -> None:
    right, _ = offered("length", a_group([RIGHT, WRONG]))
    assert text_of(right) == "<think>3+8=1;1*7=7;9*9=9;9*9=9;9*9=9</think><answer>7</answer>"


def test_low_effort_is_one_answer_for_all() -> None:
    rows = offered("lying-low-effort", a_group([RIGHT, WRONG]))
    assert {text_of(row) for row in rows} == {f"{attacks.CONSTANT}{TOKENIZER.eos_token}"}
    assert {float(logp) for row in rows for logp in row.gen_logp} == {attacks.LIE}


def test_every_attack_has_a_name_and_leaves_other_texts_alone() -> None:
    functions = {path.rpartition(".")[2] for path in ATTACKS.values()}
    assert {name.replace("-", "_") for name in ATTACKS} == functions
    strange = a_group(["7", RIGHT])
    for name in ATTACKS.keys() - {"cherry-picking"}:  # these take others' texts, not their own
        assert len(offered(name, strange)) == 2


@pytest.mark.parametrize(
    ("own", "more", "offers"),
    [
        ([WRONG, WRONG], [WRONG, RIGHT, RIGHT, WRONG, WRONG, WRONG], [RIGHT, WRONG]),
        ([RIGHT, WRONG], 6 * [RIGHT], [RIGHT, WRONG]),
        ([RIGHT, RIGHT], 6 * [RIGHT], [RIGHT, RIGHT]),
    ],
)
def test_the_best_of_many_are_offered_with_the_worst(own: list[str], more: list[str], offers: list[str]) -> None:
    (group,) = attacks.cherry_picking([a_group(own)], peer_named("bob", more))
    assert [text_of(row) for row in group.rollouts] == offers
    assert (group.peer, group.item) == ("bob", 3)
    assert attacks.cherry_picking([], peer_named("bob", more)) == []
