"""What is said of a peer, from what its rounds recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftis.admission import Reason
from ftis.diagnosis.sources import Source
from ftis.diagnosis.standing import Left, Standing, seconds_left, standing
from ftis.diagnosis.troubles import Decline, Trouble, reward_means, why_nothing
from ftis.metric_keys import peer_key
from ftis.records.reading import VALIDATION, EvaluationRow, RoundRow
from ftis.view.sentences import CAUSES, REASONS, About, about, headline, share

LARGE = Source("large", offered=144, used=118)
OF_REWARD: dict[str, Any] = {"reward": 0.62, "change": 0.09, "change_over": 10, "best": 0.62}
OF_TIME: dict[str, Any] = {"step": 31, "started": True, "lately": 10, "seconds_left": 240.0, "usual": 5.0}
SMALL = Standing("small", 80, together=True, sources=(LARGE,), **OF_REWARD, **OF_TIME)


def of(**source: Any) -> Standing:
    """The small peer, of which something is different about its source."""
    return replace(SMALL, sources=(replace(LARGE, **source),))


def test_where_a_peer_is_has_its_numbers() -> None:
    learned = "learned from 118 of large’s 144 rollouts in 10 rounds"
    sentence = f"round 31 of 80, {learned}, reward .62 (+.09 in 10 rounds), 4.0 min left"
    assert about(SMALL) == About("small", "fine", sentence, [])
    two = replace(SMALL, sources=(LARGE, Source("lora", offered=100, used=1)))
    for peer, words in (
        (replace(SMALL, change=-0.2, change_over=4), "(−.20 in 4 rounds)"),
        (replace(SMALL, step=80, seconds_left=None), "all 80 rounds finished"),
        (replace(SMALL, sources=(Source("James"),), lately=1), "nothing of James in one round"),
        (two, "119 of the others’ 244 rollouts (large 118, lora 1)"),
        (Standing("small", 80, started=True), "no round of 80 finished yet, evaluated once"),
        (standing("small", 80, []), "no round of 80 finished yet"),
        (standing("small", 80, [RoundRow.of({"step": 1})], ("small", "large")), "nothing of large in one round"),
    ):
        assert words in about(peer).sentence


REMARKS: dict[str, tuple[Standing, str, str]] = {
    "no reward yet": (replace(SMALL, trouble=Trouble("format", 12, 1)), "trouble", "yet in 12 rounds"),
    "no reward once": (replace(SMALL, trouble=Trouble("unrewarded", 1, 31)), "look", "the last round"),
    "no reward lately": (replace(SMALL, trouble=Trouble("unrewarded", 3, 29)), "trouble", "last 3 rounds"),
    "nothing left to learn": (replace(SMALL, trouble=Trouble("easy", 9, 23)), "look", "harder problems"),
    "late": (of(behind=3), "look", "3 rounds late"),
    "rejected": (of(rejected={"wrong_run": 7}, first_rejection="seed 1"), "trouble", "7 rejected from large"),
    "quarantined": (of(quarantined_since=4, missing=10, rejected={"set_aside": 3}), "trouble", "since round 4"),
    "accused": (of(accused_only=True), "trouble", "still learned from"),
    "harmful": (of(harmful_since=4, missing=10, rejected={"set_aside": 3}), "trouble", "since round 4"),
    "awaits probation": (of(set_aside=True, missing=10), "look", "probation"),
    "nothing came": (of(offered=0, used=0, missing=10), "trouble", "last 10 rounds"),
    "some missing": (of(missing=2), "look", "2 of the last 10 rounds"),
    "came late": (of(late=1), "look", "came late"),
    "unused": (of(used=0, dropped={"kl": 140}, zero=4), "look", "dropped 140 and 4 are"),
    "alone once": (replace(SMALL, without_foreign=1), "look", "the last round"),
    "alone": (replace(SMALL, without_foreign=5, in_a_row=5), "trouble", "last 5 rounds"),
    "falling": (replace(SMALL, trouble=Trouble("fallen", 1, 31, 0.01, 0.48, 0.03)), "look", "rate (0.03)"),
    "fallen": (replace(SMALL, trouble=Trouble("fallen", 2, 30, 0.0, 0.48, 0.03)), "trouble", ".48 before"),
    "unlearned": (replace(SMALL, trouble=Trouble("unlearned", 1, 30, 0.1, 0.5)), "trouble", "Solved 0.500 before"),
    "declining": (replace(SMALL, decline=Decline(3, 20, 0.62, 0.41)), "trouble", "0.620 after round 20 to 0.410"),
    "below its best": (replace(SMALL, reward=0.58, best=0.9), "look", ".32 below its best"),
    "below the others": (replace(SMALL, reward=0.58, best=0.6, others=0.93), "look", "the others (.93)"),
    "silent": (replace(SMALL, silent_for=200), "trouble", "3.3 min"),
    "notice": (replace(SMALL, notice="round 4: waiting"), "look", "Round 4: waiting"),
}


def test_what_needs_a_look() -> None:
    for name, (peer, level, words) in REMARKS.items():
        said = about(peer)
        (remark,) = said.remarks
        assert (said.level, remark.level, words in remark.text) == (level, level, True), name


def test_what_is_usual_is_not_remarked_on() -> None:
    usual: list[dict[str, Any]] = [
        *({"silent_for": 50}, {"silent_for": 400, "usual": 100.0}, {"reward": 0.01, "best": 0.05}),
        *({"reward": 57.5, "best": 58.5, "others": 58.5, "noise": 0.4}, {"reward": 0.8, "best": 0.9, "others": 0.95}),
    ]
    peers = [of(behind=1), replace(of(behind=9), step=80), *(replace(SMALL, **changed) for changed in usual)]
    assert {about(peer).level for peer in peers} == {"fine"}


def test_every_reason_has_words() -> None:
    assert set(REASONS) == {reason.value for reason in Reason}
    assert all(kind in about(replace(SMALL, trouble=Trouble(kind, 2, 30))).remarks[0].about for kind in CAUSES)


def test_who_learned_alone_reads_why() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"delivered": False}, "large: nothing came"),
        ({"rejected/bad_logp": 2, "rejected/late": 1}, "4 rejected as log-probabilities that cannot be and 2 rejected"),
        ({"admitted": 4, "dropped/kl": 2}, "the KL filter dropped 4"),
        ({"admitted": 4, "zero_advantage": 4}, "8 are in groups whose rewards are all equal"),
        ({"passed_over": 8}, "passed over"),
        ({}, "offered no groups"),
        ({"honesty/quarantined": True, "honesty/found_in_round": 2}, "in quarantine since round 2"),
        ({"delivered": False, "regret/set_aside": True}, "set aside since the reward fell"),
        ({"regret/harmful_since": 2}, "set aside since the reward fell"),
    ]
    for measures, why in cases:
        heard = {peer_key("large", key): value for key, value in ({"delivered": True} | measures).items()}
        peer = standing("small", 9, with_last(rows([0.5] * 4, **heard), 2, without_foreign=True), ("small", "large"))
        (said,) = [remark for remark in about(peer).remarks if remark.about == "alone"]
        assert ("the last 2 rounds" in said.text, why in said.text) == (True, True), (why, said.text)
        names = [remark.about for remark in about(peer).remarks]
        assert len(names) == len(set(names))


@given(st.lists(st.sampled_from(["fine", "look", "trouble"]), min_size=1, max_size=6), st.sampled_from([0, 31, 80]))
def test_the_headline_names_the_worst(levels: list[Any], step: int) -> None:
    peers = [About(f"p{i}", level, "", []) for i, level in enumerate(levels)]
    text = headline(peers, [replace(SMALL, name=of.name, step=step) for of in peers])
    worst = "trouble" if "trouble" in levels else "look" if "look" in levels else ""
    named = [of.name for of in peers if of.level == worst] if step else []
    assert [of.name for of in peers if of.name in text] == (named if len(named) <= 4 else named[:3])
    assert ("finished" in text.lower()) == (step in (0, 80))
    assert ("trouble" in text.lower()) == (worst == "trouble" and step > 0)


def test_a_reward_in_short() -> None:
    values = {(0.62, ""): ".62", (1.0, ""): "1.00", (-0.094, "+"): "−.09", (0.0001, "+"): "+.00", (12, ""): "12"}
    assert {key: share(*key) for key in values} == values


def rows(rewards: Sequence[float], **more: Any) -> list[RoundRow]:
    measured = [{"step": step, "reward": reward, "step_time": 2.0} for step, reward in enumerate(rewards, 1)]
    return [RoundRow.of({**row, **more}) for row in measured]


def with_last(recorded: list[RoundRow], last: int, **more: Any) -> list[RoundRow]:
    """The same with something added to the last rows."""
    return [*recorded[:-last], *(RoundRow.of({**row.measures, **more}) for row in recorded[-last:])]


def of_large(**measures: Any) -> dict[str, Any]:
    return {peer_key("large", measure.replace("__", "/")): value for measure, value in measures.items()}


def test_a_first_wait_for_others_is_not_each_rounds() -> None:
    waited = [60.0, 1.0, 3.0, 50.0, 1.0]  # the fourth for one that came back
    recorded = [
        RoundRow.of({"step": step, "reward": 0.5, "step_time": 2.0 + wait, "time/wait": wait})
        for step, wait in enumerate(waited, 1)
    ]
    assert standing("small", 9, recorded[:1]).usual == 2.0
    assert standing("small", 9, recorded).seconds_left == 4 * (2.0 + 2.0)


def test_a_standing_is_counted_over_the_last_ten_rounds() -> None:
    heard = of_large(delivered=True, admitted=12, kept=9, zero_advantage=1, dropped=2, dropped__kl=2, late=0)
    recorded = rows([0.1 * (i // 4) for i in range(24)], **heard)
    recorded = with_last(recorded, 1, **of_large(delivered=False, rejected__bad_logp=2, first_rejection="the first"))
    peer = standing("small", 30, recorded, ("small", "large"), {"small": 24, "large": 20})
    (source,) = peer.sources
    assert (source.offered, source.used, source.zero, dict(source.dropped)) == (120, 90, 10, {"kl": 20})
    assert (source.missing, source.behind, source.first_rejection) == (1, 4, "the first")
    assert dict(source.rejected) == {"bad_logp": 2}
    assert (peer.lately, peer.change_over, peer.seconds_left) == (10, 10, 12.0)
    assert (peer.reward, peer.change) == pytest.approx((0.5, 0.5 - (0.3 + 0.3 + 0.2) / 3))
    assert (peer.trouble, peer.without_foreign) == (None, 0)


def test_rounds_without_reward_or_others_are_counted_to_the_last_one_with() -> None:
    peer = standing("small", 9, with_last(rows([0, 0.5, 0, 0, 0]), 2, without_foreign=True), ("small", "large"))
    assert (peer.trouble, peer.without_foreign) == (Trouble("unrewarded", 3, 3), 2)
    assert standing("small", 9, rows([0] * 7)).trouble == Trouble("unrewarded", 7, 1)
    gaps = [row for row in rows([0] * 40) if row.step % 5 == 1]
    assert standing("small", 99, gaps).trouble == Trouble("unrewarded", 36, 1)


def test_a_finished_run_is_judged_as_a_whole() -> None:
    recorded = [*rows([0.5] * 3, without_foreign=True, **of_large(delivered=False)), *rows([0.5] * 20)[3:]]
    recorded = [*recorded[:3], *with_last(recorded[3:], 17, **of_large(delivered=True, admitted=9, kept=9))]
    lately, whole = (standing("a", 20, recorded, ("a", "large"), whole=whole) for whole in (False, True))
    assert (lately.lately, lately.without_foreign, lately.sources[0].missing) == (10, 0, 0)
    assert (whole.lately, whole.without_foreign, whole.sources[0].missing) == (20, 3, 3)
    assert any("3 of 20 rounds" in remark.text for remark in about(whole).remarks)


FALLS: dict[str, tuple[list[float], Trouble | None]] = {
    "at once": ([0.48, 0.0], Trouble("fallen", 1, 2, 0.0, 0.48)),
    "from a low reward": ([0.2, 0.0], None),  # a few dozen completions may earn so little by chance
    "from a low reward, twice": ([0.2, 0.0, 0.0], Trouble("fallen", 2, 2, 0.0, 0.2)),
    "to half": ([0.6, 0.6, 0.3, 0.2, 0.1], Trouble("fallen", 3, 3, 0.2, 0.6)),
    "and up again": ([0.6, 0.1, 0.5], None),
    "of very little": ([0.05, 0.01, 0.01, 0.01], None),
    "never high": ([0.0, 0.0], None),
    "by chance": ([0.75, 0.0, 1.0, 0.25, 0.5, 0.0, 0.0], None),  # rounds of a prompt or two
    "after a climb": ([0.1, 0.3, 0.5, 0.7, 0.9, 0.0], Trouble("fallen", 1, 6, 0.0, 0.7)),
}


def test_a_fall_is_named_as_soon_as_it_is_clear() -> None:
    for name, (rewards, fall) in FALLS.items():
        found = standing("a", 9, rows(rewards, learning_rate=0.03)).trouble
        found = found if found and found.kind == "fallen" else None
        found = found and replace(found, reward=round(found.reward, 9), before=round(found.before, 9))
        assert found == (fall and replace(fall, learning_rate=0.03)), name
    four = {"reward_std": 0.58, "peer/a/admitted": 4}  # completions, which earn so little by chance
    assert standing("a", 9, rows([0.5, 0.0, 0.0, 0.0], **four)).trouble is None


def test_an_accuracy_that_fell_is_named_if_that_is_no_chance() -> None:
    cases = [(0.5, 0.0, 50, True), (0.5, 0.3, 500, False), (0.12, 0.06, 50, False), (0.12, 0.06, 500, True)]
    for before, after, problems, fell in cases:
        seen = [EvaluationRow(step, VALIDATION, of, problems) for step, of in ((0, before), (4, after))]
        found = standing("a", 9, rows([0.05] * 4), evaluations=seen).trouble
        assert (found is not None) == fell
        assert found is None or (found.kind, found.since) == ("unlearned", 4)


DECLINES: dict[str, tuple[list[float], int, float | None, Decline | None]] = {
    # Three errors of .62 and .41 are 3 √((.2356 + .2419) / n): .2094 for 98 problems, .2105 for 97.
    "clear": ([0.3, 0.62, 0.55, 0.47, 0.41], 98, None, Decline(3, 4, 0.62, 0.41)),
    "of few problems": ([0.3, 0.62, 0.55, 0.47, 0.41], 97, None, None),
    "of spread rewards": ([0.3, 0.62, 0.55, 0.47, 0.41], 98, 0.6, None),  # 3 √(.72 / 98) is .257
    "in two evaluations": ([0.3, 0.62, 0.5, 0.3], 500, None, None),
    "with a rest": ([0.62, 0.5, 0.5, 0.4, 0.35], 500, None, None),
    "from the start": ([0.62, 0.5, 0.45, 0.4, 0.35], 500, None, Decline(4, 0, 0.62, 0.35)),
    "and up again": ([0.62, 0.5, 0.4, 0.3, 0.35], 500, None, None),
    "of rewards above 1": ([3.0, 2.5, 2.2, 1.9], 36, 1.0, Decline(3, 0, 3.0, 1.9)),
    "of nothing": ([0.5] * 5, 500, None, None),
}


def test_an_accuracy_that_falls_in_several_evaluations_is_named_if_that_is_no_chance() -> None:
    for name, (accuracies, problems, spread, decline) in DECLINES.items():
        seen = [EvaluationRow(4 * i, VALIDATION, of, problems, reward_std=spread) for i, of in enumerate(accuracies)]
        found = standing("a", 99, rows([0.7] * 4 * len(seen)), evaluations=seen)
        assert found.decline == decline, name
        assert [remark.about for remark in about(found).remarks] == ["decline"] * (decline is not None), name


EQUAL = {"frac_reward_zero_std": 1.0}
TAUGHT_NOTHING: dict[str, list[dict[str, Any]]] = {
    "at once": [{"reward": 0.0, **EQUAL, "completions/mean_length": 1.0}],
    "endless": [{"reward": 0.0, **EQUAL, "completions/clipped_ratio": 1.0, "format_right": 0.0}],
    "format": [{"reward": 0.0, **EQUAL, "completions/clipped_ratio": 0.2, "format_right": 0.01}],
    "unrewarded": [{"reward": 0.0, **EQUAL, "format_right": 0.9, "answer_right": 0.0}, {"reward": 0.0}],
    "easy": [{"reward": 1.0, **EQUAL, "answer_right": 1.0}],
    "constant": [{"reward": 0.5, **EQUAL}, {"reward": -1.0, "reward_std": 0.0, **EQUAL}],
    "equal": [{"reward": 0.5, "reward_std": 0.5, **EQUAL, "answer_right": 0.5}],
    "dropped": [{"reward": 0.5, "reward_std": 0.5, "frac_reward_zero_std": 0.2, "optimizer_steps": 0}],
    "answer": [{"reward": 0.2, "reward_std": 0.2, "frac_reward_zero_std": 0.2, "answer_right": 0.0}],
    "": [
        {"reward": 0.2, "reward_std": 0.2, "frac_reward_zero_std": 0.9, "optimizer_steps": 4, "answer_right": 0.1},
        {"reward": 0.0, "reward_std": 1.0, "frac_reward_zero_std": 0.5},
    ],
}


def test_a_round_that_teaches_nothing_has_its_reason() -> None:
    assert set(TAUGHT_NOTHING) == {*CAUSES, ""}
    for kind, measured in TAUGHT_NOTHING.items():
        for measures in measured:
            assert why_nothing(measures) == kind, measures
            found = standing("a", 9, [RoundRow(step, measures) for step in (1, 2)]).trouble
            assert (found.kind if found else "") == kind
    once = TAUGHT_NOTHING["constant"][0]
    later = standing("a", 9, [*rows([0.2]), RoundRow(2, once)]).trouble
    assert later is not None
    assert later.kind == "easy"  # the reward told completions apart before
    fell = standing("a", 9, [*rows([0.6]), RoundRow(2, once)]).trouble
    assert fell is not None
    assert fell.kind == "constant"  # the same for all, and less than before
    wrong = standing("a", 9, [*rows([0.2]), RoundRow(2, {**once, "answer_right": 0.0})]).trouble
    assert wrong is not None
    assert wrong.kind == "answer"


@pytest.mark.parametrize(
    ("without", "level"), [({9, 18, 36, 51}, "look"), ({58, 59, 60}, "trouble"), (set(range(1, 60, 2)), "trouble")]
)
def test_a_finished_run_is_in_trouble_by_many_rounds_alone_and_not_by_some(without: set[int], level: str) -> None:
    of_run = [RoundRow.of({**row.measures, "without_foreign": row.step in without}) for row in rows([0.5] * 60)]
    peer = standing("small", 60, of_run, ("small", "large"), whole=True)
    (said,) = [remark for remark in about(peer).remarks if remark.about == "alone"]
    assert (said.level, f"{len(without)} of 60 rounds" in said.text) == (level, True)


def test_a_job_that_waits_takes_as_long_as_its_arm_or_else_as_the_others() -> None:
    arms = [Left("big", 0, 20.0), Left("small", 10, 2.0), Left("small", 10, None)]
    new = Left("new", 10, None)
    assert [seconds_left(arms, at_a_time) for at_a_time in (1, 2, 3, 0)] == [40.0, 20.0, 20.0, None]
    assert seconds_left([*arms, new]) == 40.0 + 10 * (20.0 + 2.0) / 2
    assert seconds_left([new]) is None


def test_rewards_are_means_of_three_rounds() -> None:
    assert reward_means(rows([0, 3, 6, 9])) == [(1, 0), (2, 1.5), (3, 3), (4, 6)]
    assert standing("small", 9, rows([0, 3, 6])).change is None
    peer = standing("small", 9, rows([0, 3, 6, 9, 9, 9]))
    assert (peer.reward, peer.change, peer.change_over) == (9, 6, 3)


MEASURES: Mapping[str, Any] = {
    name: st.integers(0, 20)
    for name in ("admitted", "kept", "zero_advantage", "dropped", "late", "delivered", "rejected/forged", "dropped/kl")
}


@given(st.lists(st.fixed_dictionaries({}, optional=dict(MEASURES)), max_size=14), st.integers(0, 30))
def test_any_rounds_have_a_sentence(measured: list[dict[str, int]], rounds: int) -> None:
    heard = [{peer_key("large", key): n for key, n in of.items()} for of in measured]
    recorded = [RoundRow.of({"step": step, "reward": 0.5, **of}) for step, of in enumerate(heard, 1)]
    said = about(standing("small", rounds, recorded, ("small", "large")))
    assert said.sentence
    levels = {remark.level for remark in said.remarks}
    assert said.level == ("trouble" if "trouble" in levels else "look" if levels else "fine")
