"""What is said of a peer, in plain words, from what its rounds recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from ftis.admission import Reason
from ftis.metric_keys import peer_key
from ftis.records import standing as standings
from ftis.records.reading import RoundRow
from ftis.records.standing import Formats, RewardMeans, Source, Standing
from ftis.view.sentences import REASONS, About, about, headline, share

LARGE = Source("large", offered=144, used=118)
SMALL = Standing(
    "small",
    80,
    step=31,
    started=True,
    lately=10,
    reward=0.62,
    change=0.09,
    change_over=10,
    best=0.62,
    together=True,
    sources=(LARGE,),
    seconds_left=240.0,
    usual=5.0,
)
LEARNED = "learned from 118 of large’s 144 rollouts in 10 rounds"


@pytest.mark.parametrize(
    ("peer", "sentence"),
    [
        (SMALL, f"round 31 of 80, {LEARNED}, reward .62 (+.09 in 10 rounds), 4.0 min left"),
        (
            replace(SMALL, change=-0.2, change_over=4),
            f"round 31 of 80, {LEARNED}, reward .62 (−.20 in 4 rounds), 4.0 min left",
        ),
        (
            replace(SMALL, together=False, sources=(), change=None, seconds_left=31),
            "round 31 of 80, reward .62, 31 s left",
        ),
        (
            replace(SMALL, step=80, seconds_left=None),
            f"all 80 rounds finished, {LEARNED}, reward .62 (+.09 in 10 rounds)",
        ),
        (
            replace(SMALL, sources=(Source("James"),), lately=1, reward=None, seconds_left=None),
            "round 31 of 80, learned from nothing of James in one round",
        ),
        (
            replace(SMALL, sources=(LARGE, Source("lora", offered=100, used=1)), seconds_left=None, change=None),
            "round 31 of 80, learned from 119 of the others’ 244 rollouts (large 118, lora 1) in 10 rounds, reward .62",
        ),
        (Standing("small", 80), "no round of 80 finished yet"),
        (Standing("small", 80, started=True), "no round of 80 finished yet, evaluated once"),
    ],
)
def test_where_a_peer_is(peer: Standing, sentence: str) -> None:
    said = about(peer)
    assert said.sentence == sentence
    if peer.sources in ((), (LARGE,)):
        assert (said.level, list(said.remarks)) == ("fine", [])


NONE_OF_THEIRS = replace(LARGE, used=0)
LIE = "it does not draw its tokens from the log-probabilities that it reports"


@pytest.mark.parametrize(
    ("peer", "level", "remark"),
    [
        (
            replace(SMALL, step=12, unrewarded=12, formats=Formats(0, 96)),
            "trouble",
            "No reward yet in 12 rounds: format right in 0 of 96, see the completions",
        ),
        (replace(SMALL, unrewarded=3), "trouble", "No reward in the last 3 rounds: see the completions, or ask ftis"),
        (replace(SMALL, sources=(replace(LARGE, behind=3),)), "look", "large is 3 rounds late"),
        (
            replace(SMALL, sources=(replace(LARGE, rejected={"wrong_run": 7}, first_rejection="seed 1, not 0"),)),
            "trouble",
            "7 rejected from large in 10 rounds: other run (seed 1, not 0)",
        ),
        (
            replace(SMALL, sources=(replace(LARGE, rejected={"of_my_own": 1}),)),
            "trouble",
            "1 rejected from large in 10 rounds: of_my_own",
        ),
        (
            replace(SMALL, sources=(replace(LARGE, quarantined_since=4, missing=10, rejected={"set_aside": 3}),)),
            "trouble",
            f"large is in quarantine since round 4: {LIE}",
        ),
        (
            replace(SMALL, sources=(replace(LARGE, accused_only=True),)),
            "trouble",
            "large does not draw its tokens from the log-probabilities that it reports, and is still learned from",
        ),
        (
            replace(SMALL, sources=(Source("large", missing=10),)),
            "trouble",
            "Nothing came from large in the last 10 rounds",
        ),
        (
            replace(SMALL, sources=(replace(LARGE, missing=2),)),
            "look",
            "Nothing came from large in 2 of the last 10 rounds",
        ),
        (replace(SMALL, sources=(replace(LARGE, late=1),)), "look", "one message of large came late in 10 rounds"),
        (
            replace(SMALL, sources=(replace(NONE_OF_THEIRS, dropped={"kl": 140}, zero=4),)),
            "look",
            "Nothing of large was learned from in the last 10 rounds: the KL filter dropped 140, 4 are in groups whose",
        ),
        (replace(SMALL, without_foreign=1), "look", "Learned from nobody else in the last round"),
        (replace(SMALL, without_foreign=5), "trouble", "Learned from nobody else in the last 5 rounds"),
        (replace(SMALL, reward=0.2), "look", "The reward fell to .20; its best was .62"),
        (replace(SMALL, silent_for=200), "trouble", "Nothing new for 3.3 min; its rounds took 5 s"),
        (
            replace(SMALL, notice="round 4: waiting for large (sampling)"),
            "look",
            "Round 4: waiting for large (sampling)",
        ),
    ],
)
def test_what_needs_a_look(peer: Standing, level: str, remark: str) -> None:
    said = about(peer)
    assert said.level == level
    (only,) = said.remarks
    assert only.text.startswith(remark)


@pytest.mark.parametrize(
    "peer",
    [
        replace(SMALL, unrewarded=2),
        replace(SMALL, sources=(replace(LARGE, behind=1),)),
        replace(SMALL, step=80, sources=(replace(LARGE, behind=9),)),
        replace(SMALL, silent_for=50),
        replace(SMALL, silent_for=400, usual=100.0),
        replace(SMALL, reward=0.01, best=0.05),
    ],
)
def test_what_is_usual_is_not_remarked_on(peer: Standing) -> None:
    assert about(peer).level == "fine"


def test_every_reason_of_a_rejection_has_words() -> None:
    assert set(REASONS) == {reason.value for reason in Reason}


def test_the_headline_names_those_in_trouble_first() -> None:
    def said(levels: Mapping[str, Any], **of: Any) -> str:
        peers = [About(name, level, "", []) for name, level in levels.items()]
        return headline(peers, [replace(SMALL, name=name, **of) for name in levels])

    assert said({"a": "fine", "b": "fine"}) == "Both peers are working"
    assert said({"a": "fine", "b": "look", "c": "look"}) == "Working; have a look at b and c"
    assert said({"a": "look", "b": "trouble"}) == "Trouble at b"
    assert said(dict.fromkeys("abcdef", "trouble")) == "Trouble at a, b, c and 3 more peers"
    assert said({"a": "fine", "b": "fine"}, step=80) == "Both peers have finished"
    assert said({"a": "trouble", "b": "fine"}, step=80) == "Finished, with trouble at a"
    assert said({"a": "fine"}, step=0) == "No round is finished yet"


@pytest.mark.parametrize(
    ("value", "sign", "text"),
    [
        (0.62, "", ".62"),
        (1.0, "", "1.00"),
        (0.0, "", ".00"),
        (-0.094, "+", "−.09"),
        (0.0001, "+", "+.00"),
        (12, "", "12"),
    ],
)
def test_a_reward_in_short(value: float, sign: str, text: str) -> None:
    assert share(value, sign) == text


# --- from records ---


def rows(rewards: Sequence[float], **more: Any) -> list[dict[str, Any]]:
    return [{"step": i + 1, "reward": reward, "step_time": 2.0, **more} for i, reward in enumerate(rewards)]


def standing(name: str, rounds: int, rows: Sequence[Mapping[str, Any]], **known: Any) -> Standing:
    return standings.standing(name, rounds, rows, [RoundRow.of(row) for row in rows], RewardMeans().of(rows), **known)


def of_large(**measures: Any) -> dict[str, Any]:
    return {peer_key("large", measure.replace("__", "/")): value for measure, value in measures.items()}


def test_a_standing_is_counted_over_the_last_ten_rounds() -> None:
    heard = of_large(delivered=True, admitted=12, kept=9, zero_advantage=1, dropped=2, dropped__kl=2, late=0)
    recorded = rows([0.1 * (i // 4) for i in range(24)], **heard)
    recorded[-1] |= of_large(delivered=False, rejected__bad_logp=2, first_rejection="the first")
    peer = standing("small", 30, recorded, swarm=("small", "large"), steps={"small": 24, "large": 20})
    (source,) = peer.sources
    assert (source.offered, source.used, source.zero, dict(source.dropped)) == (120, 90, 10, {"kl": 20})
    assert (source.missing, source.behind, source.first_rejection) == (1, 4, "the first")
    assert dict(source.rejected) == {"bad_logp": 2}
    assert peer.lately == 10
    assert peer.reward == pytest.approx(0.5)
    assert peer.change == pytest.approx(0.5 - (0.3 + 0.3 + 0.2) / 3)
    assert peer.change_over == 10
    assert peer.seconds_left == 12.0
    assert (peer.unrewarded, peer.without_foreign) == (0, 0)


def test_rounds_without_reward_or_others_are_counted_to_the_last_one_with() -> None:
    recorded = rows([0, 0.5, 0, 0, 0])
    recorded[-1]["without_foreign"] = recorded[-2]["without_foreign"] = True
    peer = standing("small", 9, recorded, swarm=("small", "large"))
    assert (peer.unrewarded, peer.without_foreign) == (3, 2)
    assert standing("small", 9, rows([0] * 7)).unrewarded == 7
    gaps = [row for row in rows([0] * 40) if row["step"] % 5 == 1]
    assert standing("small", 99, gaps).unrewarded == 36


def test_a_peer_without_rounds_stands_at_the_beginning() -> None:
    peer = standing("small", 9, [], swarm=("small", "large"), started=True)
    assert (peer.step, peer.started, peer.reward, peer.finished) == (0, True, None, False)


def test_rewards_are_means_of_three_rounds() -> None:
    assert RewardMeans().of(rows([0, 3, 6, 9])) == [(1, 0), (2, 1.5), (3, 3), (4, 6)]
    assert standing("small", 9, rows([0, 3, 6])).change is None
    peer = standing("small", 9, rows([0, 3, 6, 9, 9, 9]))
    assert (peer.reward, peer.change, peer.change_over) == (9, 6, 3)


def test_rows_of_another_version_are_no_error() -> None:
    peer = standing("small", 9, [{"step": 1}], swarm=("small", "large"))
    assert (peer.reward, peer.seconds_left, peer.sources[0].offered) == (None, None, 0)
    assert about(peer).sentence == "round 1 of 9, learned from nothing of large in one round"
