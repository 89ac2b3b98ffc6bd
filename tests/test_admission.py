"""What is let in: one row for each reason, and the rules that hold between messages."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from admissions import (
    END,
    LONGEST,
    TERMS,
    VOCAB,
    G,
    admitter,
    assigned,
    counting,
    detokenize,
    group,
    items,
    message,
    only,
    score,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_messages import rollout

from ftis import admission as admission_module
from ftis import codec
from ftis.admission import Admission, Admitter, Reason
from ftis.codec import decode
from ftis.config import PromptConfig, RewardConfig, RunError
from ftis.rewards.scoring import CompletionError, load_scorer
from ftis.rollouts import Group, Prompt, Rollout


def test_a_good_message_is_admitted_whole_and_scored_here() -> None:
    admission = admitter().admit("ada", message(group(0), group(1)), round=0)
    assert admission.rejections == ()
    assert items(admission) == [0, 1]
    scored = admission.admitted[1]
    assert (scored.completions, scored.rewards, scored.group.peer) == (("1", "98"), (1.0, 0.0), "ada")
    assert scored.group.rollouts[0].completion_ids.tolist() == [1, END]
    assert admitter().admit("ada", message(), round=0) == Admission("ada", (), ())


def test_the_borders_of_what_is_allowed() -> None:
    borders = group(
        0,
        rollout([1, 2, 3, 4], [0.0, -0.0, -100.0, -1e-30]),  # as long as may be, with no room for an end
        rollout([99], [-0.5]),  # nothing but an end
        rollout([1, 80]),  # ended by an id that only the sender's model ends on
    )
    admission = admitter(group_size=3).admit("ada", message(borders, top_p=1e-9, top_k=2**32 - 1), round=0)
    assert items(admission) == [0]
    judge = admitter(assigned=lambda peer, round: range(4))  # more than a message may have
    assert only(judge.admit("ada", message(group(0), group(1), group(2)), round=0)).reason == "over_budget"
    assert items(judge.admit("ada", message(group(1), group(3)), round=0)) == [1, 3]
    most = TERMS.limits.max_bytes
    assert only(admitter().admit("ada", bytes(most), round=0)).reason == "malformed"
    assert only(admitter().admit("ada", bytes(most + 1), round=0)).reason == "over_budget"


def test_own_groups_are_scored_by_the_same_scorer_and_claims_earn_nothing() -> None:
    judge = admitter()
    own = judge.score_group(group(3, peer="bob"))
    foreign = judge.admit("bob", message(group(3, peer="bob"), peer="bob"), round=0).admitted[0]
    assert (own.completions, own.rewards) == (foreign.completions, foreign.rewards) == (("3", "98"), (1.0, 0.0))
    for logp, facts in ((0.0, {}), (-100.0, {"top_p": 1e-9, "top_k": 1}), (-1.0, {"top_k": 2**32 - 1})):
        claimed = group(1, rollout([98, END], [logp] * 2), rollout([1, END], [logp] * 2))
        assert admitter().admit("ada", message(claimed, **facts), round=0).admitted[0].rewards == (0.0, 1.0)


GOOD = group(0)
SIGNALLING_NAN = np.array([0x7FA00001, 0xBF800000], np.uint32).view(np.float32)

MESSAGES = [
    ("not_in_roster", "eve", message(group(0, peer="eve"), peer="eve"), "'eve'"),
    ("over_budget", "ada", message(group(0), group(1), group(4)), "3 groups"),
    ("over_budget", "ada", bytes(TERMS.limits.max_bytes + 1), "bytes"),
    ("malformed", "ada", message(GOOD)[:-1], "checksum"),
    ("malformed", "ada", b"\x80\x04K\x01." * 20, "not a message"),
    ("malformed", "ada", b"", "0 bytes"),
    ("wrong_sender", "bob", message(GOOD), "'ada'"),
    ("wrong_run", "ada", message(GOOD, run="3" * 32), "3" * 32),
    ("wrong_round", "ada", message(group(4, round=1), round=1), "round 2"),
    ("wrong_round", "ada", message(group(0, round=2**32 - 1), round=2**32 - 1), "round 4294967296"),
    ("wrong_tokenizer", "ada", message(GOOD, tokenizer="4" * 32), "4" * 32),
    *(("wrong_sampling", "ada", message(GOOD, temperature=t), str(t)) for t in (0.7, float("nan"))),
    *(("wrong_sampling", "ada", message(GOOD, top_p=p), str(p)) for p in (0.0, float("nan"), float("inf"))),
]

GROUPS = [
    ("unknown_prompt", group(12), "the task has 12"),
    ("unknown_prompt", group(2**32 - 1, rollout([END])), "4294967295"),
    ("not_their_prompt", group(2), "is not assigned to it"),
    ("duplicate", group(1), "sent before"),
    *(("wrong_group_size", Group("ada", 0, 0, (rollout([END]),) * n), f"{n} rollouts") for n in (0, 1, 3)),
    ("empty", group(0, rollout([1, END]), rollout([])), "rollout 1 has no tokens"),
    ("too_long", group(0, rollout([END]), rollout([1, 2, 3, 4, END])), "rollout 1 has 5 tokens"),
    ("token_out_of_range", group(0, rollout([1, END]), rollout([5, VOCAB, END])), "rollout 1, token 1: id 100"),
    ("tokens_after_end", group(0, rollout([1, END]), rollout([7, 99, END])), "rollout 1, token 1: id 99"),
    ("tokens_after_end", group(0, rollout([END, END]), rollout([END])), "rollout 0, token 0: id 90"),
    ("bad_logp", group(0, Rollout(np.array([1, END], np.int32), SIGNALLING_NAN), rollout([END])), "token 0"),
    *(
        ("bad_logp", group(0, rollout([END]), rollout([1, END], [-1.0, wrong])), "rollout 1, token 1")
        for wrong in (0.001, 1e-45, np.inf, float("nan"), -np.inf, -1e30, -100.5)
    ),
]


def test_a_log_probability_of_a_text_is_named_by_its_unit() -> None:
    """Three units of five bytes, and two of four: the fifth log-probability is the second rollout's second."""
    texts = [
        Rollout(np.arange(1, 6, dtype=np.int32), np.full(3, -1, np.float32), np.array([0, 0, 0, 1, 2], np.int32)),
        Rollout(np.arange(1, 5, dtype=np.int32), np.array([-1, 2], np.float32), np.array([0, 0, 1, 1], np.int32)),
    ]
    over_text = admitter(tokenizer=None, max_completion_length=9)
    assert over_text._rollouts_fault(group(0, *texts)) == (
        Reason.BAD_LOGP,
        "rollout 1, token 1: log-probability 2.0 is not in [-100, 0]",
    )


def test_a_fault_of_the_message_rejects_the_message() -> None:
    by_others = {"forged", "equivocation", "corrupt", "set_aside", "over_time", "unscored", "unplayable"}
    assert {row[0] for row in (*MESSAGES, *GROUPS)} == set(Reason) - by_others, "every reason has a row"
    for reason, sender, data, says in MESSAGES:
        admission = admitter().admit(sender, data, round=0)
        rejection = only(admission)
        assert (admission.admitted, rejection.peer, rejection.reason, rejection.item) == ((), sender, reason, None)
        assert says in rejection.detail


def test_a_fault_of_a_group_rejects_the_group_and_leaves_the_others() -> None:
    for reason, bad, says in GROUPS:
        assert len(decode(message(group(1), bad), TERMS.limits).groups) == 2, "without its fault it decodes"
        orders = [(group(1), bad)] if reason == "duplicate" else [(group(1), bad), (bad, group(1))]
        for order in orders:
            admission = admitter().admit("ada", message(*order), round=0)
            rejection = only(admission)
            assert items(admission) == [1]
            assert (rejection.peer, rejection.reason, rejection.item) == ("ada", reason, bad.item)
            assert says in rejection.detail


def test_nothing_is_detokenised_or_scored_before_the_cheap_checks_pass() -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("called")

    judge = Admitter(TERMS, never, never)
    for _, sender, data, _ in MESSAGES:
        assert only(judge.admit(sender, data, round=0)).item is None
    for reason, bad, _ in GROUPS:
        if reason != "duplicate":
            assert only(judge.admit("ada", message(bad), round=0)).item == bad.item


def test_a_completion_that_the_reward_function_fails_on_rejects_its_group_and_leaves_the_others() -> None:
    failure: type[Exception] = CompletionError

    def failing(prompt: Prompt, completions: Sequence[str], ids: Sequence[Sequence[int]]) -> tuple[float, ...]:
        if prompt.item == 0:
            raise failure("reward.function 'mine.reward' raised ValueError: no number")
        return (1.0,) * len(completions)

    judge = Admitter(TERMS, failing, lambda ids: "")
    admission = judge.admit("ada", message(group(0), group(1)), round=0)
    assert items(admission) == [1]
    assert (only(admission).reason, only(admission).item) == ("unscored", 0)
    assert "no number" in only(admission).detail
    with pytest.raises(CompletionError):  # of own completions it is the run's own error
        judge.score_group(group(0))
    for failure in (RunError, ZeroDivisionError):  # as if a helper cannot be started: nothing would be scored
        judge = Admitter(TERMS, failing, lambda ids: "")
        with pytest.raises(failure):
            judge.admit("ada", message(group(1), group(0)), round=0)
        assert items(judge.admit("ada", message(group(1)), round=0)) == [1], "nothing of the first is remembered"
    few = Admitter(TERMS, lambda prompt, completions, ids: (1.0,), detokenize)
    with pytest.raises(ValueError, match="1 rewards for 2 completions"):
        few.admit("ada", message(group(0)), round=0)


def test_a_number_of_thousands_of_digits_is_no_error() -> None:
    """Python refuses to read a number of more than 4300 digits."""
    score = load_scorer(RewardConfig(extract="last_number"), PromptConfig(), "number")
    for text in (r"\frac{%s}{2}", r"\frac{2}{%s}", "1 %s/3", "%s", "1e%s", "%s^2"):
        long = "It is " + text % ("1" * 4400)
        admission = Admitter(TERMS, score, lambda ids: long).admit("ada", message(group(0)), round=0)  # noqa: B023
        assert [scored.rewards for scored in admission.admitted] == [(0.0,) * TERMS.group_size]


def test_a_group_sent_again_is_a_duplicate_and_a_rejected_one_may_come_mended() -> None:
    scored: list[int] = []
    judge = Admitter(TERMS, counting(scored), detokenize)
    too_long = next(bad for reason, bad, _ in GROUPS if reason == "too_long")
    assert only(judge.admit("ada", message(too_long), round=0)).reason == "too_long"
    assert items(judge.admit("ada", message(group(0)), round=0)) == [0]
    other = group(0, rollout([5, END]), rollout([6, END]))
    again = judge.admit("ada", message(other, group(1)), round=0)
    assert items(again) == [1]
    assert (only(again).reason, only(again).item) == ("duplicate", 0)
    assert scored == [0, 1]


@given(st.integers(0, 4), st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 9), st.integers(0, 3)), max_size=25))
@settings(deadline=None)
def test_each_group_is_admitted_once_within_its_window(staleness: int, sent: list[tuple[str, int, int]]) -> None:
    """Whatever comes when: (sender, its round, rounds later), as the receiver's round goes on."""
    judge = admitter(max_staleness=staleness, assigned=lambda peer, round: [0, 1])  # everybody samples everything
    seen: set[tuple[str, int]] = set()
    for letter, round, later in sorted(sent, key=lambda one: one[1] + one[2]):
        peer, now = {"a": "ada", "b": "bob"}[letter], round + later
        data = message(group(0, peer=peer, round=round), peer=peer, round=round)
        admission = judge.admit(peer, data, now)
        if later > staleness:
            assert only(admission).reason == "wrong_round"
        elif (peer, round) in seen:
            assert only(admission).reason == "duplicate"
        else:
            assert [scored.group.round for scored in admission.admitted] == [round], "its own, not when it came"
        seen |= {(peer, round)} if later <= staleness else set()
        assert all(kept >= now - staleness for kept in judge._admitted)
    judge.admit("eve", b"", round=1000)
    assert judge._admitted == {}


def test_a_message_is_held_to_the_round_that_it_was_offered_for_and_to_the_share_of_that_round() -> None:
    judge = admitter(max_staleness=2)
    for round, offered_for in ((3, 4), (4, 3)):
        item = assigned("ada", round)[0]
        shifted = judge.admit("ada", message(group(item, round=round), round=round), 4, offered_for)
        assert only(shifted).reason == "wrong_round"
    stale = message(group(0, round=3), group(4, round=3), round=3)
    admission = judge.admit("ada", stale, round=4, offered_for=3)
    assert items(admission) == [0]
    assert only(admission).reason == "not_their_prompt"


def test_groups_not_reached_in_time_are_rejected_and_may_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, scored = [100.0], list[int]()
    monkeypatch.setattr(admission_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def slow(prompt: Prompt, completions: Sequence[str], ids: Sequence[Sequence[int]]) -> tuple[float, ...]:
        scored.append(prompt.item)
        clock[0] += 5.0
        return score(prompt, completions, ids)

    terms = dataclasses.replace(TERMS, max_seconds=10.0, assigned=lambda peer, round: range(5), max_groups=5)
    judge = Admitter(terms, slow, detokenize)
    data = message(*(group(item) for item in range(5)))
    first = judge.admit("ada", data, round=0)
    assert items(first) == [0, 1, 2]  # begun at 0, 5 and 10 s: 10 of 10 s are not more than 10
    assert [(r.reason, r.item) for r in first.rejections] == [("over_time", 3), ("over_time", 4)]
    second = judge.admit("ada", data, round=0)  # its time is its own
    assert items(second) == [3, 4]
    assert [r.reason for r in second.rejections] == ["duplicate"] * 3
    assert scored == [0, 1, 2, 3, 4]


MANY = 10_000
one_token = rollout([END])
tiny_groups = message(*(Group("ada", 0, item, (one_token, one_token)) for item in range(MANY)))


def test_ten_thousand_groups_cost_nothing_unless_they_are_owed(monkeypatch: pytest.MonkeyPatch) -> None:
    scored: list[int] = []
    prompts = [Prompt(item, "", "") for item in range(MANY)]
    terms = dataclasses.replace(TERMS, prompts=prompts, assigned=lambda peer, round: range(MANY), max_groups=MANY)
    judge = Admitter(terms, counting(scored), detokenize)
    first, second = (judge.admit("ada", tiny_groups, round=0) for _ in range(2))
    assert items(first) == scored == list(range(MANY))
    assert (second.admitted, {r.reason for r in second.rejections}) == ((), {Reason.DUPLICATE})
    scored.clear()
    copies = message(*(Group("ada", 0, 7, (one_token, one_token)),) * MANY)
    admission = Admitter(terms, counting(scored), detokenize).admit("ada", copies, round=0)
    assert items(admission) == scored == [7]
    assert [r.reason for r in admission.rejections] == ["duplicate"] * (MANY - 1)
    monkeypatch.setattr(codec, "_form", lambda _: pytest.fail("read"))
    wide = admitter(max_completion_length=MANY * 8)
    assert len(tiny_groups) < wide.terms.limits.max_bytes
    assert only(wide.admit("ada", tiny_groups, round=0)).detail == "10000 groups exceed the limit of 4"
    monkeypatch.setattr(admission_module, "decode", lambda *_: pytest.fail("decoded"))
    assert only(admitter().admit("ada", tiny_groups, round=0)).reason == "over_budget"


token = st.tuples(
    st.one_of(st.integers(0, 2**31 - 1), st.sampled_from([0, 1, END, 99, VOCAB])),
    st.one_of(st.floats(width=32), st.sampled_from([0.0, -1.0, -100.0])),
)
some_rollouts = st.lists(st.lists(token, max_size=2 * LONGEST), max_size=2 * G)


@given(st.lists(st.tuples(st.integers(0, 13), some_rollouts), max_size=4), st.integers(0, 3), st.floats())
@settings(max_examples=300, deadline=None)
def test_nothing_raises_and_what_is_admitted_keeps_the_terms(
    groups: list[tuple[int, list[list[tuple[int, float]]]]], round: int, temperature: float
) -> None:
    made = [
        Group("ada", round, item, tuple(rollout([i for i, _ in r], [p for _, p in r]) for r in rollouts))
        for item, rollouts in groups
    ]
    judge = admitter(max_staleness=1)
    for t in (temperature, 1.0):
        data = message(*made, round=round, temperature=t)
        for now in (0, 1, 2):
            for scored in judge.admit("ada", data, now).admitted:
                assert scored.group.item in assigned("ada", round)
                assert now - 1 <= round <= now
                assert len(scored.group.rollouts) == len(scored.rewards) == G
                for r in scored.group.rollouts:
                    assert 1 <= len(r) <= LONGEST
                    assert (r.completion_ids < VOCAB).all()
                    assert ((r.gen_logp <= 0) & (r.gen_logp >= -100)).all()


def test_only_wanted_groups_are_scored_and_all_are_held_to_the_senders_share() -> None:
    scored: list[int] = []
    terms = dataclasses.replace(TERMS, wanted=lambda peer, round: [assigned(peer, round)[1]])
    admission = Admitter(terms, counting(scored), detokenize).admit("ada", message(group(0), group(1)), 0)
    assert items(admission) == scored == [1]
    assert [(g.peer, g.item) for g in admission.passed_over] == [("ada", 0)]
    assert not admission.rejections
    for second, reason in [(group(0), Reason.DUPLICATE), (group(5), Reason.NOT_THEIR_PROMPT)]:
        admission = admitter(wanted=lambda peer, round: []).admit("ada", message(group(0), second), 0)
        assert only(admission).reason == reason
        assert [g.item for g in admission.passed_over] == [0]
    for groups in ([group(0), group(1)], [group(1), group(5)], [group(1), group(1)], [group(0, rollout([1]))]):
        everything, wanted = (admitter(wanted=c).admit("ada", message(*groups), 0) for c in (None, assigned))
        assert (items(everything), everything.rejections) == (items(wanted), wanted.rejections)
        assert everything.passed_over == wanted.passed_over == ()
