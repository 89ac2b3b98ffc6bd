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
    RUN,
    TERMS,
    TOKENIZER,
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
from ftis.codec import Header, Message, decode, encode, message_size
from ftis.config import PromptConfig, RewardConfig
from ftis.rewards.scoring import CompletionError, RewardError, load_scorer
from ftis.rollouts import Group, Prompt, Rollout
from ftis.wire.plain import weight_error

# ---------------------------------------------------------------------------------------------- what is good


def test_a_good_message_is_admitted_whole_and_scored_here() -> None:
    admission = admitter().admit("ada", message(group(0), group(1)), round=0)
    assert admission.rejections == ()
    assert items(admission) == [0, 1]
    scored = admission.admitted[1]
    assert scored.completions == ("1", "98")
    assert scored.rewards == (1.0, 0.0)
    assert scored.group.peer == "ada"
    assert scored.group.rollouts[0].completion_ids.tolist() == [1, END]


@pytest.mark.parametrize(("version", "logp"), [(1, "float32"), (2, "float32"), (2, "fixed9"), (2, "fixed6")])
def test_every_version_and_precision_is_admitted(version: Any, logp: Any) -> None:
    header = Header(RUN, 0, "ada", TOKENIZER, 1.0, 0, 1.0)
    exact = [0.0, -0.3, -100.0, -99.999]
    data = encode(Message(header, (group(0, rollout([1, 2, 3, 4], exact), rollout([1, END])),)), version, logp)
    (scored,) = admitter().admit("ada", data, round=0).admitted
    sent = scored.group.rollouts[0].gen_logp
    assert np.abs(np.expm1(np.array(exact) - sent)).max() <= weight_error(logp) + 1e-5  # float32's own rounding


def test_no_groups_is_no_fault() -> None:
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


def test_own_groups_are_scored_by_the_same_scorer() -> None:
    judge = admitter()
    own = judge.score_group(group(3, peer="bob"))
    foreign = judge.admit("bob", message(group(3, peer="bob"), peer="bob"), round=0).admitted[0]
    assert (own.completions, own.rewards) == (foreign.completions, foreign.rewards) == (("3", "98"), (1.0, 0.0))


def test_a_full_share_at_full_length_is_within_the_limits_and_a_byte_more_is_not() -> None:
    terms = dataclasses.replace(TERMS, roster=frozenset({"a" * 64}), assigned=lambda peer, round: [0, 1])
    full = rollout([1, 2, 3, 4])
    data = message(*(group(i, full, full, peer="a" * 64) for i in (0, 1)), peer="a" * 64)
    assert len(data) == terms.limits.max_bytes == message_size(16, 4, 2, "a" * 64)
    judge = Admitter(terms, score, detokenize)
    assert items(judge.admit("a" * 64, data, round=0)) == [0, 1]
    assert only(judge.admit("a" * 64, data + b"\0", round=0)).reason == "over_budget"


# ---------------------------------------------------------------------------------------------- what is not

GOOD = group(0)
SIGNALLING_NAN = np.array([0x7FA00001, 0xBF800000], np.uint32).view(np.float32)

MESSAGES = {
    "not_in_roster": ("eve", message(group(0, peer="eve"), peer="eve"), "'eve'"),
    "over_budget": ("ada", message(group(0), group(1), group(4)), "3 groups"),
    "over_budget (bytes)": ("ada", bytes(TERMS.limits.max_bytes + 1), "bytes"),
    "malformed": ("ada", message(GOOD)[:-1], "checksum"),
    "malformed (noise)": ("ada", b"\x80\x04K\x01." * 20, "not a message"),
    "malformed (nothing)": ("ada", b"", "0 bytes"),
    "wrong_sender": ("bob", message(GOOD), "'ada'"),
    "wrong_run": ("ada", message(GOOD, run="3" * 32), "3" * 32),
    "wrong_round": ("ada", message(group(4, round=1), round=1), "round 2"),
    "wrong_round (far)": ("ada", message(group(0, round=2**32 - 1), round=2**32 - 1), "round 4294967296"),
    "wrong_tokenizer": ("ada", message(GOOD, tokenizer="4" * 32), "4" * 32),
    "wrong_sampling": ("ada", message(GOOD, temperature=0.7), "0.7"),
    "wrong_sampling (nan)": ("ada", message(GOOD, temperature=float("nan")), "nan"),
    "wrong_sampling (top_p nan)": ("ada", message(GOOD, top_p=float("nan")), "nan"),
    "wrong_sampling (top_p 0)": ("ada", message(GOOD, top_p=0.0), "top_p 0.0"),
    "wrong_sampling (top_p inf)": ("ada", message(GOOD, top_p=float("inf")), "inf"),
}

GROUPS = {
    "unknown_prompt": (group(12), "the task has 12"),
    "unknown_prompt (far)": (group(2**32 - 1, rollout([END])), "4294967295"),
    "not_their_prompt": (group(2), "is not assigned to it"),
    "duplicate": (group(1), "sent before"),
    "wrong_group_size": (group(0, rollout([END])), "1 rollouts, a group has 2"),
    "wrong_group_size (more)": (group(0, *[rollout([END])] * 3), "3 rollouts"),
    "wrong_group_size (none)": (Group("ada", 0, 0, ()), "0 rollouts"),
    "empty": (group(0, rollout([1, END]), rollout([])), "rollout 1 has no tokens"),
    "too_long": (group(0, rollout([END]), rollout([1, 2, 3, 4, END])), "rollout 1 has 5 tokens"),
    "token_out_of_range": (group(0, rollout([1, END]), rollout([5, VOCAB, END])), "rollout 1, token 1: id 100"),
    "token_out_of_range (negative)": (group(0, rollout([-1, END]), rollout([END])), "rollout 0, token 0: id -1"),
    "tokens_after_end": (group(0, rollout([1, END]), rollout([7, 99, END])), "rollout 1, token 1: id 99"),
    "tokens_after_end (twice)": (group(0, rollout([END, END]), rollout([END])), "rollout 0, token 0: id 90"),
    "bad_logp": (group(0, rollout([END]), rollout([1, END], [-1.0, 0.001])), "rollout 1, token 1"),
    "bad_logp (nan)": (group(0, rollout([1, END], [float("nan"), -1.0]), rollout([END])), "rollout 0, token 0"),
    "bad_logp (snan)": (group(0, Rollout(np.array([1, END], np.int32), SIGNALLING_NAN), rollout([END])), "nan"),
    "bad_logp (-inf)": (group(0, rollout([1, END], [-1, -np.inf]), rollout([END])), "-inf"),
    "bad_logp (-1e30)": (group(0, rollout([1, END], [-1e30, -1]), rollout([END])), "rollout 0, token 0"),
    "bad_logp (+inf)": (group(0, rollout([1, END], [-1, np.inf]), rollout([END])), "inf is not in [-100, 0]"),
    "bad_logp (barely positive)": (group(0, rollout([1, END], [-1, 1e-45]), rollout([END])), "token 1"),
    "bad_logp (impossible)": (group(0, rollout([1, END], [-1, -100.5]), rollout([END])), "-100.5"),
}


@pytest.mark.parametrize("case", MESSAGES)
def test_a_fault_of_the_message_rejects_the_message(case: str) -> None:
    sender, data, says = MESSAGES[case]
    admission = admitter().admit(sender, data, round=0)
    assert admission.admitted == ()
    rejection = only(admission)
    assert (rejection.peer, rejection.reason, rejection.item) == (sender, case.split()[0], None)
    assert says in rejection.detail


@pytest.mark.parametrize("case", GROUPS)
def test_a_fault_of_a_group_rejects_the_group_and_leaves_the_others(case: str) -> None:
    bad, says = GROUPS[case]
    admission = admitter().admit("ada", message(group(1), bad), round=0)
    assert items(admission) == [1]
    rejection = only(admission)
    assert (rejection.peer, rejection.reason, rejection.item) == ("ada", case.split()[0], bad.item)
    assert says in rejection.detail


BY_OTHERS = {"forged", "equivocation", "corrupt", "set_aside", "over_time", "unscored"}
"""Those of the network's exchange, and those that depend on what came before; tested where they arise."""


def test_every_reason_has_a_row() -> None:
    assert {case.split()[0] for case in (*MESSAGES, *GROUPS)} == set(Reason) - BY_OTHERS


def test_a_completion_that_the_reward_function_fails_on_rejects_its_group_and_leaves_the_others() -> None:
    def score(prompt: Prompt, completions: Sequence[str], ids: Sequence[Sequence[int]]) -> tuple[float, ...]:
        if prompt is TERMS.prompts[0]:
            raise failure("reward.function 'mine.reward' raised ValueError: no number")
        return (1.0,) * len(completions)

    failure: type[Exception] = CompletionError
    judge = Admitter(TERMS, score, lambda ids: "")
    admission = judge.admit("ada", message(group(0), group(1)), round=0)
    assert items(admission) == [1]
    assert (only(admission).reason, only(admission).item) == ("unscored", 0)
    assert "raised ValueError: no number" in only(admission).detail
    with pytest.raises(CompletionError):  # of own completions it is the run's own error
        judge.score_group(group(0))
    failure = RewardError  # as where a helper cannot be started: no completion would be scored
    with pytest.raises(RewardError):
        judge.admit("ada", message(group(0)), round=0)


@pytest.mark.parametrize("text", [r"\frac{%s}{2}", r"\frac{2}{%s}", "1 %s/3", "%s", "1e%s", "%s^2"])
def test_a_number_of_thousands_of_digits_is_no_error(text: str) -> None:
    """Python refuses to read a number of more than 4300 digits."""
    score = load_scorer(RewardConfig(extract="last_number"), PromptConfig(), "number")
    long = "It is " + text % ("1" * 4400)
    judge = Admitter(dataclasses.replace(TERMS, max_completion_length=5000), score, lambda ids: long)
    admission = judge.admit("ada", message(group(0)), round=0)
    assert [scored.rewards for scored in admission.admitted] == [(0.0,) * TERMS.group_size]


def test_the_bad_group_may_come_first() -> None:
    admission = admitter().admit("ada", message(GROUPS["bad_logp"][0], group(1)), round=0)
    assert items(admission) == [1]


def test_nothing_is_decoded_detokenised_or_scored_before_the_cheap_checks_pass() -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("called")

    judge = Admitter(TERMS, never, never)
    for sender, data, _ in MESSAGES.values():
        assert only(judge.admit(sender, data, round=0)).item is None
    for name, (bad, _) in GROUPS.items():
        if name != "duplicate":
            assert only(judge.admit("ada", message(bad), round=0)).item == bad.item


# ---------------------------------------------------------------------------------------------- between messages


def test_a_group_sent_again_is_a_duplicate_and_is_not_scored_again() -> None:
    scored: list[int] = []
    judge = Admitter(TERMS, counting(scored), detokenize)
    assert items(judge.admit("ada", message(group(0)), round=0)) == [0]
    other = group(0, rollout([5, END]), rollout([6, END]))
    again = judge.admit("ada", message(other, group(1)), round=0)
    assert items(again) == [1]
    assert (only(again).reason, only(again).item) == ("duplicate", 0)
    assert scored == [0, 1]


def test_a_rejected_group_may_be_sent_again_mended() -> None:
    judge = admitter()
    assert only(judge.admit("ada", message(GROUPS["too_long"][0]), round=0)).reason == "too_long"
    assert items(judge.admit("ada", message(group(0)), round=0)) == [0]


def test_the_same_item_of_another_peer_is_no_duplicate() -> None:
    judge = admitter(assigned=lambda peer, round: [0, 1])  # horizontal: everybody samples everything
    assert items(judge.admit("ada", message(group(0)), round=0)) == [0]
    assert items(judge.admit("bob", message(group(0, peer="bob"), peer="bob"), round=0)) == [0]


def test_the_staleness_window() -> None:
    judge = admitter(max_staleness=2)
    late = {r: message(group(4 * (r % 3), round=r), round=r) for r in range(7)}
    assert only(judge.admit("ada", late[2], round=5)).reason == "wrong_round"
    assert items(judge.admit("ada", late[3], round=5)) == [0]
    assert items(judge.admit("ada", late[5], round=5)) == [8]
    assert only(judge.admit("ada", late[6], round=5)).reason == "wrong_round"
    assert only(judge.admit("ada", late[3], round=5)).reason == "duplicate"  # within the window: remembered
    assert only(judge.admit("ada", late[5], round=7)).reason == "duplicate"
    assert only(judge.admit("ada", late[3], round=6)).reason == "wrong_round"


def test_a_message_says_the_round_that_it_was_offered_for() -> None:
    judge = admitter(max_staleness=2)
    shifted = judge.admit("ada", message(group(0, round=3), round=3), round=4, offered_for=4)
    assert only(shifted).reason == "wrong_round"
    assert "round 4, offered for round 5" in only(shifted).detail
    assert only(judge.admit("ada", message(group(4, round=4), round=4), round=4, offered_for=3)).reason == "wrong_round"
    assert items(judge.admit("ada", message(group(0, round=3), round=3), round=4, offered_for=3)) == [0]


def test_a_stale_message_is_held_to_the_share_of_its_own_round() -> None:
    judge = admitter(max_staleness=1)
    stale = message(group(0, round=3), group(4, round=3), round=3)
    admission = judge.admit("ada", stale, round=4)
    assert items(admission) == [0]
    assert only(admission).reason == "not_their_prompt"


def test_memory_does_not_grow_with_rounds() -> None:
    judge = admitter(max_staleness=2)
    for r in range(50):
        assert judge.admit("ada", message(group(4 * (r % 3), round=r), round=r), round=r).admitted
    assert sorted(judge._admitted) == [47, 48, 49]
    judge.admit("eve", b"", round=1000)
    assert judge._admitted == {}


def test_a_scorers_own_failure_is_heard_and_nothing_is_remembered() -> None:
    broken = True

    def fragile(prompt: Prompt, completions: Sequence[str], ids: Sequence[Sequence[int]]) -> tuple[float, ...]:
        if broken and prompt.item == 1:
            raise ZeroDivisionError
        return score(prompt, completions, ids)

    judge = Admitter(TERMS, fragile, detokenize)
    with pytest.raises(ZeroDivisionError):
        judge.admit("ada", message(group(0), group(1)), round=0)
    broken = False
    assert items(judge.admit("ada", message(group(0), group(1)), round=0)) == [0, 1]


def test_a_scorer_with_too_few_rewards_is_heard() -> None:
    judge = Admitter(TERMS, lambda prompt, completions, ids: (1.0,), detokenize)
    with pytest.raises(ValueError, match="1 rewards for 2 completions"):
        judge.admit("ada", message(group(0)), round=0)


@pytest.mark.parametrize("field", ["vocab_size", "group_size", "max_completion_length", "max_staleness"])
def test_terms_that_cannot_be(field: str) -> None:
    with pytest.raises(ValueError, match=f"terms.{field}"):
        admitter(**{field: -1})


# ---------------------------------------------------------------------------------------------- late ones


def test_a_late_message_is_scored_now_and_keeps_the_log_probabilities_it_came_with() -> None:
    logps = [[-0.25, -0.5], [-3.0, -100.0]]
    late = group(0, rollout([0, END], logps[0]), rollout([98, 99], logps[1]), round=3)
    judge = admitter(max_staleness=2)
    admission = judge.admit("ada", message(late, round=3), round=5)
    assert admission.rejections == ()
    (scored,) = admission.admitted
    assert scored.rewards == (1.0, 0.0)
    assert scored.group.round == 3  # its own, not the one it arrived in
    assert [r.gen_logp.tolist() for r in scored.group.rollouts] == logps


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_a_message_is_taken_up_to_max_staleness_rounds_late_and_not_a_round_more(staleness: int) -> None:
    for late in range(staleness + 2):
        data = message(group(4 * (6 % 3), round=6), round=6)
        admission = admitter(max_staleness=staleness).admit("ada", data, round=6 + late)
        if late <= staleness:
            assert items(admission) == [0], late
        else:
            assert only(admission).reason == "wrong_round"


def test_each_round_is_remembered_by_itself() -> None:
    """The item comes again in another round, by right; in the same round it is a duplicate, however late."""
    judge = admitter(max_staleness=3, assigned=lambda peer, round: [0, 1])
    for round in (4, 5, 6):
        assert items(judge.admit("ada", message(group(0, round=round), round=round), round=6)) == [0]
    for round in (4, 5, 6):
        for now in range(6, round + 4):
            again = judge.admit("ada", message(group(0, round=round), group(1, round=round), round=round), round=now)
            assert again.rejections[0].reason == "duplicate"
            assert items(again) == ([1] if now == 6 else [])


def test_a_message_before_the_first_round_needs_no_negative_round() -> None:
    assert items(admitter(max_staleness=5).admit("ada", message(group(0)), round=1)) == [0]


# ---------------------------------------------------------------------------------------------- time


def test_groups_not_reached_in_time_are_rejected_and_may_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(admission_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    scored: list[int] = []

    def slow(prompt: Prompt, completions: Sequence[str], ids: Sequence[Sequence[int]]) -> tuple[float, ...]:
        scored.append(prompt.item)
        clock[0] += 4.0
        return score(prompt, completions, ids)

    terms = dataclasses.replace(TERMS, max_seconds=10.0, assigned=lambda peer, round: range(5), max_groups=5)
    judge = Admitter(terms, slow, detokenize)
    data = message(*(group(item) for item in range(5)))
    first = judge.admit("ada", data, round=0)
    assert items(first) == [0, 1, 2]  # begun at 0, 4 and 8 s
    assert [(r.reason, r.item) for r in first.rejections] == [("over_time", 3), ("over_time", 4)]
    assert all(r.detail == "not judged within 10 s" for r in first.rejections)
    second = judge.admit("ada", data, round=0)  # its time is its own
    assert items(second) == [3, 4]
    assert [r.reason for r in second.rejections] == ["duplicate"] * 3
    assert scored == [0, 1, 2, 3, 4]


def test_within_its_time_a_message_is_judged_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 10.0, 10.0])  # at the start and before each group: 10 of 10 s are not more than 10
    monkeypatch.setattr(admission_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert items(admitter(max_seconds=10.0).admit("ada", message(group(0), group(1)), round=0)) == [0, 1]


# ---------------------------------------------------------------------------------------------- many, and claims


def test_the_scorer_alone_decides_what_a_rollout_earned() -> None:
    """A message has no room for a reward; whatever else it says, the same tokens earn the same here."""
    rewards = []
    for logp, facts in (
        ([0.0, 0.0], {}),
        ([-100.0, -100.0], {"top_p": 1e-9, "top_k": 1}),
        ([-1.0, -1.0], {"top_k": 2**32 - 1}),
    ):
        claimed = group(1, rollout([98, END], logp), rollout([1, END], logp))
        rewards.append(admitter().admit("ada", message(claimed, **facts), round=0).admitted[0].rewards)
    assert rewards == [(0.0, 1.0)] * 3
    tokens = sum(len(r) for r in claimed.rollouts)
    assert len(message(claimed)) == message_size(tokens, 2, 1, "ada") == 68 + 3 + 6 + 8 + 8 * tokens + 4
    strict = Admitter(TERMS, lambda prompt, completions, ids: (0.0,) * len(ids), detokenize)
    assert strict.admit("ada", message(claimed), round=0).admitted[0].rewards == (0.0, 0.0)


MANY = 10_000
one_token = rollout([END])
tiny_groups = message(*(Group("ada", 0, item, (one_token, one_token)) for item in range(MANY)))


def test_ten_thousand_tiny_groups_that_nobody_asked_for_are_refused_before_decoding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission_module, "decode", lambda *_: pytest.fail("decoded"))
    assert only(admitter().admit("ada", tiny_groups, round=0)).reason == "over_budget"


def test_a_sender_with_prompts_in_reserve_may_choose_but_not_send_more() -> None:
    judge = admitter(assigned=lambda peer, round: [0, 1, 2, 3])
    assert judge.terms.limits == TERMS.limits
    rejection = only(judge.admit("ada", message(group(0), group(1), group(2)), round=0))
    assert (rejection.reason, rejection.detail) == ("over_budget", "3 groups, a message has at most 2")
    assert items(judge.admit("ada", message(group(1), group(3)), round=0)) == [1, 3]


def test_ten_thousand_tiny_groups_within_the_bytes_are_refused_by_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "_form", lambda _: pytest.fail("read"))
    judge = admitter(max_completion_length=MANY * 8)
    assert len(tiny_groups) < judge.terms.limits.max_bytes
    rejection = only(judge.admit("ada", tiny_groups, round=0))
    assert (rejection.reason, rejection.detail) == ("malformed", "10000 groups exceed the limit of 4")


def test_ten_thousand_tiny_groups_that_are_owed_are_each_scored_once_and_then_duplicates() -> None:
    scored: list[int] = []
    prompts = [Prompt(item, "", "") for item in range(MANY)]
    terms = dataclasses.replace(TERMS, prompts=prompts, assigned=lambda peer, round: range(MANY), max_groups=MANY)
    judge = Admitter(terms, counting(scored), detokenize)
    first = judge.admit("ada", tiny_groups, round=0)
    second = judge.admit("ada", tiny_groups, round=0)
    assert items(first) == scored == list(range(MANY))
    assert second.admitted == ()
    assert {r.reason for r in second.rejections} == {Reason.DUPLICATE}
    assert [r.item for r in second.rejections] == list(range(MANY))


def test_one_group_ten_thousand_times_is_scored_once() -> None:
    scored: list[int] = []
    terms = dataclasses.replace(
        TERMS,
        prompts=[Prompt(item, "", "") for item in range(MANY)],
        assigned=lambda peer, round: range(MANY),
        max_groups=MANY,
    )
    data = message(*(Group("ada", 0, 7, (one_token, one_token)),) * MANY)
    admission = Admitter(terms, counting(scored), detokenize).admit("ada", data, round=0)
    assert items(admission) == scored == [7]
    assert [r.reason for r in admission.rejections] == ["duplicate"] * (MANY - 1)


# ---------------------------------------------------------------------------------------------- anything at all

some_rollouts = st.lists(
    st.lists(
        st.tuples(
            st.one_of(st.integers(-(2**31), 2**31 - 1), st.sampled_from([0, 1, END, 99, VOCAB])),
            st.one_of(st.floats(width=32), st.sampled_from([0.0, -1.0, -100.0])),
        ),
        max_size=2 * LONGEST,
    ),
    max_size=2 * G,
)


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
                    assert ((r.completion_ids >= 0) & (r.completion_ids < VOCAB)).all()
                    assert ((r.gen_logp <= 0) & (r.gen_logp >= -100)).all()


@given(st.binary(max_size=200), st.text(max_size=5))
@settings(max_examples=200, deadline=None)
def test_noise_is_rejected_once(noise: bytes, sender: str) -> None:
    judge = admitter()
    assert only(judge.admit("ada", noise, round=0)).reason in {"malformed", "over_budget"}
    if sender not in TERMS.roster:
        assert only(judge.admit(sender, noise, round=0)).reason == "not_in_roster"


def test_the_rejected_case_messages_are_what_they_seem() -> None:
    """The rows above fail for their reason alone: without its fault each message decodes."""
    for case, (bad, _) in GROUPS.items():
        assert len(decode(message(group(1), bad), TERMS.limits).groups) == 2, case


# --- what is wanted ---------------------------------------------------------------------------------------------------


def test_only_wanted_groups_are_scored_and_the_others_counted() -> None:
    scored: list[int] = []
    terms = dataclasses.replace(TERMS, wanted=lambda peer, round: [assigned(peer, round)[1]])
    admission = Admitter(terms, counting(scored), detokenize).admit("ada", message(group(0), group(1)), 0)
    assert [s.group.item for s in admission.admitted] == scored == [1]
    assert [(g.peer, g.item) for g in admission.passed_over] == [("ada", 0)]
    assert not admission.rejections


def test_naming_all_as_wanted_is_naming_none() -> None:
    for groups in ([group(0), group(1)], [group(1), group(5)], [group(1), group(1)], [group(0, rollout([1]))]):
        everything, wanted = (admitter(wanted=c).admit("ada", message(*groups), 0) for c in (None, assigned))
        assert [s.group.item for s in everything.admitted] == [s.group.item for s in wanted.admitted]
        assert everything.rejections == wanted.rejections
        assert everything.passed_over == wanted.passed_over == ()


def test_what_is_not_wanted_is_still_held_to_the_senders_share() -> None:
    for second, reason in [(group(0), Reason.DUPLICATE), (group(5), Reason.NOT_THEIR_PROMPT)]:
        admission = admitter(wanted=lambda peer, round: []).admit("ada", message(group(0), second), 0)
        assert only(admission).reason == reason
        assert [g.item for g in admission.passed_over] == [0]
