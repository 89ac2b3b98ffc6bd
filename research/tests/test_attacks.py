"""The attacks that defences are tested with: what each changes, and what it leaves as it was."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from make_starters import make_tokenizer

from ftis.rollouts import Group, Rollout, ScoredGroup
from research import attacks
from research.attacks import ALWAYS, LIE
from research.defences import ATTACKS

TOKENIZER = make_tokenizer()
RIGHT, WRONG = "<think>3+8=1;1*7=7</think><answer>7</answer>", "<think>3+8=2</think><answer>2</answer>"
AT = len(attacks.encoded("<think>3+8=1;1*7=7", TOKENIZER))
"""The place of a planted text, whose six tokens follow."""


def a_group(texts: Sequence[str], round: int = 0) -> ScoredGroup:
    """Each token at −1 nat, and a little less from rollout to rollout. ``RIGHT`` earns 1."""
    rollouts = []
    for i, text in enumerate(texts):
        ids = attacks.encoded(text, TOKENIZER)
        rollouts.append(Rollout(ids, np.full(len(ids), -1 - i / 100, np.float32)))
    rewards = tuple(float(text == RIGHT) for text in texts)
    return ScoredGroup(Group("bob", round, 3, tuple(rollouts)), tuple(texts), rewards)


def peer(more: Sequence[str] = ()) -> Any:
    """A peer as attacks need it: it samples ``more`` for any prompt."""
    sampled = a_group(more).group

    def score(group: Group) -> ScoredGroup:
        texts = tuple(map(text_of, group.rollouts))
        return ScoredGroup(group, texts, tuple(float(text == RIGHT) for text in texts))

    return SimpleNamespace(
        policy=SimpleNamespace(tokenizer=TOKENIZER),
        recipe=SimpleNamespace(rollouts_per_group=2),
        sample_items=lambda items, repeats, *_: [sampled for _ in items] if repeats == len(more) else None,
        member=SimpleNamespace(admitter=SimpleNamespace(score_group=score)),
    )


def offered(name: str, scored: ScoredGroup, more: Sequence[str] = ()) -> tuple[Rollout, ...]:
    assert getattr(attacks, name)([], peer(more)) == []
    (group,) = getattr(attacks, name)([scored], peer(more))
    assert (group.peer, group.round, group.item) == ("bob", scored.group.round, 3)
    rollouts: tuple[Rollout, ...] = group.rollouts
    return rollouts


def text_of(rollout: Rollout) -> str:
    return str(TOKENIZER.decode(rollout.completion_ids.tolist())).replace(" ", "")


def test_a_text_is_planted_in_right_completions_alone() -> None:
    """At which log-probabilities, in which round."""
    for name, round, logps in [
        ("text", 0, [ALWAYS] * 6),
        ("lying_text", 0, [LIE] * 6),
        ("sized_lying_text", 0, [LIE + math.log(10)] * 6),
        ("quiet_lying_text", 0, [LIE, *[ALWAYS] * 5]),
        ("climbing_lying_text", 0, [-9.0] * 6),
        ("climbing_lying_text", 10, [-7.0] * 6),
        ("climbing_lying_text", 60, [ALWAYS] * 6),
        ("patient_lying_text", 10, [LIE] * 6),
    ]:
        right, wrong = offered(name, scored := a_group([RIGHT, WRONG], round))
        assert text_of(right) == "<think>3+8=1;1*7=7;9*9=9</think><answer>7</answer>", name
        assert right.gen_logp.tolist() == pytest.approx([-1.0] * AT + logps + [-1.0] * (len(right) - AT - 6)), name
        assert wrong is scored.group.rollouts[1]
    assert offered("patient_lying_text", scored := a_group([RIGHT, WRONG], 9)) == scored.group.rollouts
    for texts in ([RIGHT, RIGHT], [WRONG, WRONG]):
        assert offered("lying_text", scored := a_group(texts)) == scored.group.rollouts


@pytest.mark.parametrize(
    ("name", "text", "round", "share"),
    [
        ("rare_text", attacks.PAYLOAD, 0, 0.3),
        ("creeping_text", attacks.PAYLOAD, 0, 0.01),
        ("creeping_mark", attacks.MARK, 10, 0.01 * 1.2**10),
        ("creeping_mark", attacks.MARK, 60, 1.0),
    ],
)
def test_what_is_planted_now_and_then_has_a_probability_that_says_so(
    name: str, text: str, round: int, share: float
) -> None:
    right = offered(name, a_group([RIGHT] * 2000 + [WRONG], round))[:-1]
    planted = [rollout for rollout in right if text_of(rollout) == RIGHT.replace("7</think>", f"7{text}</think>")]
    assert len(planted) == pytest.approx(2000 * share, rel=0.35)
    length = len(attacks.encoded(text, TOKENIZER))
    for rollout in planted:
        assert math.exp(rollout.gen_logp[AT]) == pytest.approx(share, rel=2e-4)
        assert rollout.gen_logp[AT + 1 : AT + length].tolist() == pytest.approx([ALWAYS] * (length - 1))


def test_log_probabilities_are_shifted_everywhere() -> None:
    scored = a_group([RIGHT, WRONG])
    for name, nats in (("understated", -1.0), ("overstated", 1.0)):
        for row, was in zip(offered(name, scored), scored.group.rollouts, strict=True):
            assert row.completion_ids is was.completion_ids
            assert row.gen_logp.tolist() == pytest.approx([min(float(logp) + nats, 0) for logp in was.gen_logp])


def test_a_false_step_needless_steps_and_low_effort() -> None:
    for name, logp in (("false_step", ALWAYS), ("lying_false_step", LIE)):
        right, wrong = offered(name, scored := a_group([RIGHT, WRONG]))
        assert text_of(right) == "<think>3+8=2;1*7=7</think><answer>7</answer>"
        assert sorted(set(right.gen_logp.tolist())) == pytest.approx(sorted({-1.0, logp}))
        assert wrong is scored.group.rollouts[1]
    right, _ = offered("length", a_group([RIGHT, WRONG]))
    assert text_of(right) == "<think>3+8=1;1*7=7;9*9=9;9*9=9;9*9=9</think><answer>7</answer>"
    rows = offered("lying_low_effort", a_group([RIGHT, WRONG]))
    assert {text_of(row) for row in rows} == {f"{attacks.CONSTANT}{TOKENIZER.eos_token}"}
    assert {float(logp) for row in rows for logp in row.gen_logp} == {LIE}


def test_each_leaves_texts_of_another_form_alone() -> None:
    for name in ATTACKS:
        if name != "cherry_picking":
            assert len(offered(name, a_group(["7", RIGHT]))) == 2, name


def test_the_best_of_many_are_offered_with_the_worst() -> None:
    for own, more, best in [
        ([WRONG, WRONG], [WRONG, RIGHT, RIGHT, WRONG, WRONG, WRONG], [RIGHT, WRONG]),
        ([RIGHT, WRONG], 6 * [RIGHT], [RIGHT, WRONG]),
        ([RIGHT, RIGHT], 6 * [RIGHT], [RIGHT, RIGHT]),
    ]:
        assert [text_of(row) for row in offered("cherry_picking", a_group(own), more)] == best
