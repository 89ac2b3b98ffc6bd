"""Episodes between peers of different tokenizers: turns travel as text, and each peer plays and spells them itself."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from admissions import TERMS
from commands import ftis
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase
from vocabularies import byte_level
from wire_messages import spoken, spoken_rollouts

from ftis.admission import Admission, Reason
from ftis.codec import Header, Message, encode
from ftis.config import PromptConfig, RecipeError
from ftis.environments.contract import open_environment
from ftis.environments.play import Player
from ftis.episodes import UnplayableError
from ftis.rollouts import Group, Ints, Prompt, Rollout
from ftis.run.membership import text_form
from ftis.text.completions import REPLACED, text_of
from ftis.text.turns import joined, split, turn_stops
from recipes import recipe_of, write_recipe

PLAIN = PromptConfig(system_prompt="", chat_template="never")
LONGEST = 24
ASKED = Prompt(0, "3+4", "7")


class Peer:
    """One peer of a swarm that exchanges text: its episodes, its messages, and its judgement of others'."""

    def __init__(
        self,
        path: str,
        tokenizer: PreTrainedTokenizerBase,
        stop: tuple[str, ...] = (),
        most: int = LONGEST,
        also: str = "",
    ) -> None:
        self.tokenizer, self.end = tokenizer, int(cast(int, tokenizer.eos_token_id))
        ends = frozenset({self.end, *(tokenizer.get_vocab()[token] for token in also)})
        recipe = recipe_of("ada", "bob")
        sampling = recipe.sampling.model_copy(update={"stop": stop, "max_completion_length": most})
        terms = dataclasses.replace(TERMS, end_ids=ends, stop=stop, prompts=[ASKED] * 12, max_completion_length=most)
        speaker = SimpleNamespace(tokenizer=tokenizer, model=torch.nn.Module(), detokenize=self.text)
        speaker.model.config = SimpleNamespace(get_text_config=lambda decoder: None)
        environment = open_environment(path, apart=False)
        player = Player(environment, PLAIN, tokenizer, self.text, {self.end}, stop, most, 4)
        self.admitter, self.write = text_form(
            recipe.model_copy(update={"sampling": sampling}),
            "bob",
            cast(Any, speaker),
            [self.end],
            cast(Any, lambda *_: np.zeros(4, np.int32)),
            terms,
            lambda prompt, texts, ids: (0.5,) * len(texts),
            player,
        )
        self.play = cast(Player, self.admitter.episodes)

    def text(self, ids: Sequence[int] | Ints) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def drawn(self, text: str) -> Rollout:
        """A rollout of this text in own tokens; ``$`` is an end."""
        pieces = [self.tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in text.split("$")]
        ids = np.array([i for piece in pieces for i in [*cast(Any, piece), self.end]][:-1], np.int32)
        return Rollout(ids, (-np.arange(1, len(ids) + 1) / 8).astype(np.float32))

    def message(self, *rollouts: Rollout) -> bytes:
        (group,) = self.write([Group("ada", 0, 0, rollouts)])
        return of_text(*group.rollouts)

    def hears(self, data: bytes) -> Admission:
        return self.admitter.admit("ada", data, 0)


def of_text(*rollouts: Rollout) -> bytes:
    return encode(Message(Header(TERMS.run, 0, "ada", "9" * 32, 1.0, 0, 1.0), (Group("ada", 0, 0, rollouts),)))


WORDS = byte_level(["17", "1=", "é", "+1", "71", "=1"])
"""A vocabulary that cuts texts otherwise than bytes do, also behind a stop string that ends a turn."""
BYTES = byte_level()

TURNS: Mapping[str, tuple[list[bytes], tuple[str, ...], list[int]]] = {
    "one, cut off": ([b"a", b"b"], (), [2]),
    "one, with its end": ([b"a", b""], (), [2]),
    "ends": ([b"a", b"", b"", b"b"], (), [2, 3, 4]),
    "stop strings": ([b"1", b"=", b"2="], ("=",), [2, 3]),
    "a token goes beyond a stop string": ([b"1", b"=2", b"="], ("=",), [2, 3]),
    "a stop string in two tokens": ([b"<", b"b>", b"c"], ("<b>",), [2, 3]),
    "the first of two": ([b"a=b\n", b"c"], ("\n", "="), [1, 2]),
    "an end behind a stop string": ([b"1=", b""], ("=",), [1, 2]),
    "not across an end": ([b"<", b"", b"b>"], ("<b>",), [2, 3]),
}


def test_bytes_and_sizes_say_where_turns_end() -> None:
    for case, (tokens, stop, stops) in TURNS.items():
        sizes = np.array([len(token) for token in tokens], np.int32)
        assert turn_stops(b"".join(tokens), sizes, stop, 9) == stops, case


@given(spoken_rollouts, st.sampled_from([(), ("a",), (" ", "the")]))
def test_turns_together_are_the_completion(text: Rollout, stop: tuple[str, ...]) -> None:
    try:
        turns = split(text, stop, 99)
    except UnplayableError:
        return
    again = joined(turns)
    for name in ("completion_ids", "gen_logp", "unit"):
        assert getattr(again, name).tolist() == getattr(text, name).tolist()
    for turn in turns:
        assert turn.unit is not None
        before = turn.completion_ids[turn.unit < turn.unit[-1]]
        assert before.max(initial=0) < 256
        assert not any(string.encode() in before.astype(np.uint8).tobytes() for string in stop)
    for turn in turns[:-1]:
        assert turn.completion_ids[-1] >= 256 or any(string in text_of(turn) for string in stop)


@given(
    st.sampled_from(["guess", "calculator", "toys_of_turns.Echo"]),
    st.text("17$=+é", min_size=1, max_size=14),
    st.booleans(),
)
def test_an_episode_of_another_tokenizer_is_played_as_its_sender_played_it(path: str, text: str, words: bool) -> None:
    stop = ("=",) if path == "calculator" else ()
    sender, receiver = (Peer(path, tokenizer, stop) for tokenizer in ((WORDS, BYTES) if words else (BYTES, WORDS)))
    own = sender.drawn(text)
    try:
        scored = sender.admitter.score_group(Group("ada", 0, 0, (own, own)))
    except UnplayableError:
        return  # no episode
    (heard,) = receiver.hears(sender.message(own, own)).admitted
    assert (heard.completions, heard.rewards) == (scored.completions, scored.rewards)
    ours, theirs = heard.group.rollouts[0], scored.group.rollouts[0]
    assert ours.sent is not None
    assert ours.sent.gen_logp_S.tolist() == own.gen_logp.tolist()
    assert [receiver.text(a.ids) for a in ours.observed] == [sender.text(a.ids) for a in theirs.observed]
    assert np.isclose(ours.gen_logp.sum(), own.gen_logp.sum(), rtol=1e-6)
    assert receiver.text(ours.completion_ids) == sender.text(own.completion_ids)
    unit = np.arange(len(ours)) if ours.unit is None else ours.unit
    assert len(ours.sent.tokens_U) == unit[-1] + 1
    for (at, _), (place, _) in zip(ours.observed, theirs.observed, strict=True):
        assert unit[at - 1] + 1 == unit[at] if at < len(unit) else True
        assert ours.sent.tokens_U[: unit[at - 1] + 1].sum() == place


def test_units_end_with_turns() -> None:
    sender, receiver = Peer("guess", byte_level(["17", "71"])), Peer("guess", BYTES)
    (scored,) = receiver.hears(sender.message(sender.drawn("71$17$7$"), sender.drawn("7$"))).admitted
    first, _ = scored.group.rollouts
    assert scored.completions == ("71\n> -\n17\n> -\n7", "7")
    assert scored.rewards == (1.0, 1.0)
    assert first.unit is not None
    assert first.unit.tolist() == [0, 0, 1, 2, 2, 3, 4, 5]
    assert first.sent is not None
    assert (first.sent.tokens_U.tolist(), first.sent.ends.tolist()) == ([1] * 6, [0] * 3)
    assert [(at, receiver.text(ids)) for at, ids in first.observed] == [(3, "-"), (6, "-")]
    sender, receiver = (Peer("calculator", tokenizer, ("=",)) for tokenizer in (BYTES, byte_level(["=1"])))
    (scored,) = receiver.hears(sender.message(sender.drawn("1+1=1=$"), sender.drawn("7$"))).admitted
    first, _ = scored.group.rollouts
    assert scored.completions[0] == "1+1= 21= 21"
    assert [receiver.text([i]) for i in first.completion_ids] == ["1", "+", "1", "=", "1", "=", ""]


def hostile(tokens: Sequence[bytes], ends: Iterable[int] = repeat(0)) -> Rollout:
    numbers = iter(ends)
    ids = [i for token in tokens for i in (token or [256 + next(numbers) % 4])]
    unit = np.repeat(np.arange(len(tokens), dtype=np.int32), [max(len(token), 1) for token in tokens])
    return Rollout(np.array(ids, np.int32), np.full(len(tokens), -1, np.float32), unit)


CASES: Mapping[str, tuple[list[bytes], Reason | None]] = {
    "an episode": ([b"9", b"", b"7", b""], None),
    "stops where an answer may have had no room": ([b"9", b""], None),
    "goes on behind the end of this peer's episode": ([b"7", b"", b"9", b""], Reason.UNPLAYABLE),
    "more turns than there are": ([b"9", b""] * 5, Reason.UNPLAYABLE),
    "10,000 turns": ([b""] * 10_000, Reason.UNPLAYABLE),
    "a border inside a character": (["é".encode()[:1], b"", "é".encode()[1:], b""], Reason.UNPLAYABLE),
    "not UTF-8": ([b"9", b"", b"\xff", b""], Reason.MALFORMED),
    "an end that nobody has": ([b"9", b"", b"7", b"end 3", b""], None),
    "too long": ([b"9"] * 10_001, Reason.TOO_LONG),
}


@pytest.mark.parametrize("case", CASES)
def test_turns_that_nobody_can_have_drawn_are_rejected(case: str) -> None:
    tokens, reason = CASES[case]
    peer, good = Peer("guess", WORDS, most=10_000), joined([spoken([b"9"], end=0), spoken([b"7"], end=0)])
    try:
        data = of_text(hostile(tokens), good)
    except ValueError:
        data = of_text(spoken([b"x"] * 9), good).replace(b"x" * 9, b"\xff" * 9)
    outcome = peer.hears(data)
    assert [rejection.reason for rejection in outcome.rejections] == ([] if reason is None else [reason])
    assert len(outcome.admitted) == (reason is None)


def test_nothing_is_learned_from_an_episode_that_takes_too_many_own_tokens() -> None:
    answers = byte_level(["1!", "12345678!"])
    sender, receiver = Peer("toys_of_turns.Echo", answers, most=9), Peer("toys_of_turns.Echo", BYTES, most=9)
    (scored,) = receiver.hears(sender.message(sender.drawn("12345678$7$"), sender.drawn("1$7$"))).admitted
    faults = [rollout.sent.fault if rollout.sent else None for rollout in scored.group.rollouts]
    assert faults == ["it takes 20 tokens, the most is 18", ""]
    assert scored.completions == ("12345678\n> 12345678!\n7", "1\n> 1!\n7")
    assert [len(rollout.observed) for rollout in scored.group.rollouts] == [0, 1]


def test_bytes_that_are_no_character_stay_in_their_turn() -> None:
    sender, receiver = Peer("toys_of_turns.Echo", BYTES), Peer("toys_of_turns.Echo", WORDS)
    ids = sender.drawn("é$é$").completion_ids
    own = Rollout(np.delete(ids, 1), np.full(len(ids) - 1, -1, np.float32))  # the first turn ends inside its character
    (scored,) = receiver.hears(sender.message(own, own)).admitted
    assert scored.completions[0].startswith(f"{REPLACED}\n> {REPLACED}!\né")
    sent = scored.group.rollouts[0].sent
    assert sent is not None
    assert "no character" in sent.fault
    with pytest.raises(RecipeError):  # a turn would end with a token of the text
        Peer("guess", BYTES, also="=")


HOSTILE = st.lists(
    st.sampled_from([b"", b"1", b"7", b"=", b"1=", "é".encode(), b"\xc3", b"\xa9", b"+", b" "]), min_size=1, max_size=12
)
RECEIVERS = [Peer("guess", WORDS), Peer("calculator", BYTES, ("=", "é")), Peer("toys_of_turns.Echo", WORDS, ("1",))]


ENDS = st.lists(st.integers(0, 3), min_size=12, max_size=12)


@given(st.sampled_from(RECEIVERS), st.lists(st.builds(hostile, HOSTILE, ENDS), min_size=2, max_size=2))
def test_whatever_comes_is_admitted_as_it_came_or_rejected(receiver: Peer, rollouts: list[Rollout]) -> None:
    receiver.admitter._admitted.clear()
    try:
        data = of_text(*rollouts)
    except ValueError:
        return  # not UTF-8
    outcome = receiver.hears(data)
    assert len(outcome.admitted) + len(outcome.rejections) == 1
    for rejection in outcome.rejections:
        assert rejection.reason == Reason.UNPLAYABLE
        assert len(rejection.detail) < 500
    for scored in outcome.admitted:
        for came, ours in zip(rollouts, scored.group.rollouts, strict=True):
            assert ours.sent is not None
            assert ours.sent.text == text_of(came).encode()
            assert ours.sent.ends.tolist() == [i - 256 for i in came.completion_ids.tolist() if i >= 256]
            assert np.isclose(ours.gen_logp.sum(), came.gen_logp.sum(), rtol=1e-6)
            assert len(ours.read_ids) <= 2 * LONGEST
            spelt = receiver.text(ours.completion_ids).encode()
            assert spelt == ours.sent.text or ours.sent.fault


def test_two_peers_of_two_tokenizers_play_one_game(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = write_recipe(
        tmp_path,
        {"a": {"model": "starter:small"}, "b": {"model": "starter:small-merged"}},
        top={"output_dir": tmp_path / "runs", "threads": 1, "processes": "inline"},
        task={"validation_size": 4, "environment": "guess"},
        sampling={"max_completion_length": 48, "max_turns": 3},
        training={"rounds": 2, "eval_every": 2},
        reward={"function": "ftis.rewards.format_and_answer"},
    )
    assert ftis("train", str(recipe)) == 0
    run = tmp_path / "runs" / "tiny-seed0"
    lines = [json.loads(line) for path in run.rglob("metrics.jsonl") for line in path.read_text().splitlines()]
    assert len(lines) == 4
    assert all(line["foreign_used"] for line in lines)
    assert not sum(value for line in lines for key, value in line.items() if key.endswith("/rejected"))
    rows = [row for path in sorted(run.rglob("round-*.parquet")) for row in pq.read_table(path).to_pylist()]
    heard, own = set[Any](), set[Any]()
    for row in rows:
        (heard if row["sent"] else own).add(tuple(row[name] for name in ("round", "source", "completion", "reward")))
    assert heard == own
    assert any(row["sent"] and row["observed"] and row["unit"] for row in rows)
