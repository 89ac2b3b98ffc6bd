"""Messages of text between peers of different tokenizers: written, admitted, put into own tokens, selected."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from admissions import RUN, TERMS
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase as Tokenizer
from vocabularies import byte_level, texts, tokenizers

from ftis.admission import Admission, Admitter, Reason, Terms
from ftis.codec import Header, Message, encode
from ftis.engines.stops import cut_at
from ftis.rollouts import Group, Prompt, Rollout, ScoredGroup, collate
from ftis.selection import Judged
from ftis.text.alignment import Readable, readable
from ftis.text.completions import REPLACED, as_texts, ended, text_of
from ftis.text.messages import TextReader, spoken, terms_of_text, write_groups
from ftis.text.token_bytes import TokenBytes
from ftis.text.units import MOST_TOKENS

SENDER, LEARNER = "2" * 32, "3" * 32
PROMPTS = [Prompt(item, f"question {item}", f"answer {item}") for item in range(4)]
LONGEST = 12


def end_of(tokenizer: Tokenizer) -> int:
    return int(cast(int, tokenizer.eos_token_id))


def terms(tokenizer: Tokenizer, **changes: Any) -> Terms:
    own: dict[str, Any] = {
        "tokenizer": LEARNER,
        "vocab_size": len(tokenizer),
        "end_ids": frozenset({end_of(tokenizer)}),
    }
    own |= {"max_completion_length": LONGEST, "prompts": PROMPTS, "assigned": lambda peer, round: [0, 1]}
    return dataclasses.replace(TERMS, **own | changes)


class Learner:
    """Admits text with the vocabulary of ``tokenizer``, and notes what its reward function is given."""

    def __init__(self, tokenizer: Tokenizer, most_tokens: int = 2 * LONGEST, **changes: Any) -> None:
        self.scored: list[tuple[tuple[str, ...], list[list[int]]]] = []
        self.known = TokenBytes.of(tokenizer)
        own = terms(tokenizer, **changes)
        stop: Sequence[str] = changes.get("stop", ())
        self.admitter = Admitter(
            terms_of_text(own),
            self.score,
            lambda ids: str(tokenizer.decode(list(ids))),
            lambda ids: cut_at(stop, spoken(ids)),
            TextReader(own.tokenizer, self.known, end_of(tokenizer), [end_of(tokenizer)], lambda *_: most_tokens),
        )

    def score(self, prompt: Prompt, completions: Sequence[str], ids: Sequence[Sequence[int]]) -> tuple[float, ...]:
        self.scored.append((tuple(completions), [list(row) for row in ids]))
        return tuple(float(text == prompt.answer) for text in completions)

    def admit(self, *groups: Group, round: int = 0) -> Admission:
        header = Header(RUN, round, "ada", SENDER, 1.0, 0, 1.0)
        return self.admitter.admit("ada", encode(Message(header, groups)), round)


def sampled(tokenizer: Tokenizer, text: str, end: bool = True) -> Rollout:
    (ids,) = TokenBytes.of(tokenizer).encode([text])
    ids = np.append(ids, np.int32(end_of(tokenizer))) if end else ids
    return Rollout(ids, (-np.arange(1, len(ids) + 1) / 8).astype(np.float32))


def offered(tokenizer: Tokenizer, *texts: str, item: int = 0, end: bool = True) -> Group:
    """What a peer of ``tokenizer`` offers."""
    group = Group("ada", 0, item, tuple(sampled(tokenizer, text, end) for text in texts))
    (written,) = write_groups([group], TokenBytes.of(tokenizer), [end_of(tokenizer)])
    return written


def pieces(known: TokenBytes, rollout: Rollout) -> list[bytes]:
    return [known.join(rollout.completion_ids[i : i + 1]).tobytes() for i in range(len(rollout))]


def test_a_text_is_admitted_in_the_learners_tokens_with_what_came() -> None:
    sender, learner = byte_level(["answer", " 0"]), Learner(byte_level(["ans", "wer", "wer 0"]))
    (scored,) = learner.admit(offered(sender, "answer 0", "no")).admitted
    right, wrong = scored.group.rollouts
    assert pieces(learner.known, right) == [b"ans", b"wer 0", b""]
    assert right.unit is not None
    assert right.unit.tolist() == [0, 0, 1]
    assert right.gen_logp.tolist() == [-0.125 - 0.25, -0.375]
    assert right.sent is not None
    assert (right.sent.text, right.sent.size_S.tolist()) == (b"answer 0", [6, 2, 0])
    assert (right.sent.gen_logp_S.tolist(), right.sent.tokens_U.tolist()) == ([-0.125, -0.25, -0.375], [2, 1])
    assert wrong.unit is None  # both say n, o, end
    assert (scored.completions, scored.rewards) == (("answer 0", "no"), (1.0, 0.0))
    assert (scored.group.peer, scored.group.round, scored.group.item) == ("ada", 0, 0)


def test_a_reward_function_gets_the_text_and_the_learners_tokens() -> None:
    tokenizer = byte_level(["ans"])
    learner = Learner(tokenizer)
    learner.admit(offered(byte_level(["answer"]), "answer 0", "no"), offered(byte_level(), "x", "y", item=1, end=False))
    ids = [[*row.tolist(), end_of(tokenizer)] for row in learner.known.encode(["answer 0", "no"])]
    assert learner.scored[0] == (("answer 0", "no"), ids)
    assert learner.scored[1] == (("x", "y"), [row.tolist() for row in learner.known.encode(["x", "y"])])
    own = Group("bob", 0, 0, (sampled(tokenizer, "answer 0", end=False), sampled(tokenizer, "no", end=False)))
    scored = learner.admitter.score_group(own)
    assert (scored.group, scored.completions, scored.rewards) == (own, ("answer 0", "no"), (1.0, 0.0))
    assert learner.scored[-1][1] == [rollout.completion_ids.tolist() for rollout in own.rollouts]


def test_a_faulty_group_is_rejected_alone() -> None:
    for group, stop, reason in (
        (offered(byte_level(), "a" * LONGEST, "b"), (), Reason.TOO_LONG),  # with its end
        (offered(byte_level(), "a"), (), Reason.WRONG_GROUP_SIZE),
        (offered(byte_level(), "a", "b", item=2), (), Reason.NOT_THEIR_PROMPT),
        (offered(byte_level(["o, "]), "no, no", "a"), ("no",), Reason.TOKENS_AFTER_END),
    ):
        admission = Learner(byte_level(), stop=stop).admit(group, offered(byte_level(), "a", "b", item=1))
        (rejection,) = admission.rejections
        assert (rejection.reason, rejection.item) == (reason, group.item)
        assert [scored.group.item for scored in admission.admitted] == [1]


def test_the_token_that_completes_a_stop_string_may_go_beyond_it() -> None:
    admission = Learner(byte_level(), stop=("no",)).admit(offered(byte_level(["o, "]), "no, ", "no, ", end=False))
    (scored,) = admission.admitted
    assert scored.completions == ("no", "no")
    assert all(rollout.sent is not None and rollout.sent.text == b"no, " for rollout in scored.group.rollouts)


def test_a_completion_without_bytes_can_be_sent() -> None:
    tokenizer = byte_level(["ab"])
    end = end_of(tokenizer)
    (ab,) = TokenBytes.of(tokenizer).encode(["ab"])
    silent = Rollout(np.array([end, end], np.int32), np.array([-1, -2], np.float32))  # sampled behind another's end
    unlikely = Rollout(np.array([*ab, end, *ab], np.int32), np.array([-90, -90, -1], np.float32))
    (written,) = write_groups([Group("ada", 0, 0, (silent, unlikely))], TokenBytes.of(tokenizer), [10**6])
    (scored,) = Learner(byte_level()).admit(written).admitted
    assert scored.completions == (REPLACED, "abab")
    assert scored.group.rollouts[0].sent is not None
    assert "no character" in scored.group.rollouts[0].sent.fault
    assert scored.group.rollouts[1].gen_logp.tolist() == [-90.0, -1.0]


def test_a_text_of_too_many_of_the_learners_tokens_is_no_fault_of_its_sender() -> None:
    """It is dropped, and the others of its group are learned from. The model never runs on the rest of it."""
    admission = Learner(byte_level(), most_tokens=3).admit(offered(byte_level(["ab"]), "ab", "abab"))
    assert not admission.rejections
    (scored,) = admission.admitted
    short, long = scored.group.rollouts
    assert short.sent is not None
    assert long.sent is not None
    assert (short.sent.fault, long.sent.fault) == ("", "it takes 5 tokens, the most is 3")
    assert (len(long), long.sent.text) == (3, b"abab")
    assert scored.completions == ("ab", "abab")
    assert Readable().shares(judged([scored])).tolist() == [1, 0]


@given(tokenizers(), st.lists(texts, min_size=1, max_size=3), st.integers(6, 40))
@settings(max_examples=100, deadline=None)
def test_too_many_bytes_are_cut_off_behind_a_token(tokenizer: Tokenizer, written: list[str], most: int) -> None:
    known, end = TokenBytes.of(tokenizer), end_of(tokenizer)
    rollouts = [sampled(tokenizer, text.replace("\u2581", "_")) for text in written]
    whole, cut = (as_texts(rollouts, known, [end], *limit) for limit in ((), (most,)))
    for rollout, all_of_it, part in zip(rollouts, whole, cut, strict=True):
        if len(text_of(all_of_it).encode()) <= most:
            assert part.completion_ids.tolist() == all_of_it.completion_ids.tolist()
            continue
        assert not ended(part)
        assert len(part) <= most
        assert text_of(all_of_it).startswith(text_of(part).rstrip(REPLACED))
        tokens = len(part.gen_logp)
        assert part.gen_logp.tolist() == rollout.gen_logp[:tokens].tolist(), "what was sampled up to there"


@given(tokenizers(), tokenizers(), st.lists(texts, min_size=2, max_size=2), st.booleans())
@settings(max_examples=100, deadline=None)
def test_whatever_is_written_is_admitted_whole(
    sender: Tokenizer, learner: Tokenizer, written: list[str], end: bool
) -> None:
    """Nothing raises, and no byte and no log-probability gets lost."""
    written = [text.replace("\u2581", "_") for text in written]
    if not all(written) and not end:
        return
    admission = Learner(learner, max_completion_length=300, most_tokens=600).admit(offered(sender, *written, end=end))
    assert not admission.rejections
    (scored,) = admission.admitted
    assert scored.completions == tuple(written)
    for text, rollout in zip(written, scored.group.rollouts, strict=True):
        came = rollout.sent
        assert came is not None
        assert (came.text, int(came.size_S.sum())) == (text.encode(), len(text.encode()))
        assert np.isclose(rollout.gen_logp.sum(), came.gen_logp_S.sum(), rtol=1e-6)
        assert (came.tokens_U.sum(), len(came.tokens_U)) == (len(came.size_S), len(rollout.gen_logp))


def test_a_copy_of_another_peers_text_is_written_as_it_came() -> None:
    """As the attack that copies others offers them."""
    tokenizer = byte_level()
    copy = offered(byte_level(["ab"]), "ab", "b")
    own = Group("bob", 0, 1, (sampled(tokenizer, "a"), sampled(tokenizer, "b")))
    as_came, written = write_groups([copy, own], TokenBytes.of(tokenizer), [end_of(tokenizer)])
    assert as_came.rollouts == copy.rollouts
    assert all(rollout.unit is not None for rollout in written.rollouts)


def judged(groups: Sequence[ScoredGroup]) -> Judged:
    batch = collate(groups, lambda *_: np.zeros(1, np.int32), "bob")
    n = len(batch)
    return Judged(batch, torch.ones(n), np.arange(n), [np.zeros(0, np.float32)] * n, None, np.zeros(0, np.float32))


def test_a_rollout_that_cannot_be_aligned_is_dropped_and_counted() -> None:
    sender, long = byte_level(), "abcdefghi"[: MOST_TOKENS + 1]
    learner = Learner(byte_level([long]))
    admission = learner.admit(offered(sender, long, "no"), offered(sender, f"a{REPLACED}", "aa", item=1))
    own = ScoredGroup(Group("bob", 0, 2, (sampled(sender, "a"), sampled(sender, "b"))), ("a", "b"), (0.0, 1.0))
    batch = judged([*admission.admitted, own])
    selection = Readable()
    selection.examine(batch)
    assert selection.shares(batch).tolist() == [0, 1, 0, 1, 1, 1]
    faults = [rollout.sent.fault if rollout.sent else None for rollout in batch.batch.rollouts]
    too_long = f"a unit of {MOST_TOKENS + 1} tokens, the most is {MOST_TOKENS}"
    assert faults == [too_long, "", "bytes that are no character", "", None, None]
    about = selection.about("ada", str)
    assert (about["units/most_tokens"], about["units/not_aligned"]) == (MOST_TOKENS + 1, 2)
    assert selection.about("bob", str) == {}
    selection.examine(judged([own]))
    assert selection.about("ada", str) == {}
    (scored,) = Learner(byte_level(["ans", "wer"])).admit(offered(byte_level(["answer"]), "answer", "no")).admitted
    # answer | end and n | o | end: the first of five units has two of the learner's tokens
    selection.examine(judged([scored]))
    found = {"units/one_to_one": 0.8, "units/most_tokens": 2, "units/not_aligned": 0}
    assert selection.about("ada", str) == found


def test_who_exchanges_ids_or_trains_alone_has_nothing_to_align() -> None:
    for exchange, peers, there in (("text", 2, True), ("auto", 2, True), ("ids", 2, False), ("text", 1, False)):
        recipe: Any = SimpleNamespace(exchange=exchange, peers=[None] * peers)
        assert (readable(recipe, "ada") is not None) == there


def test_the_terms_of_text_are_those_of_the_run_over_bytes() -> None:
    own, text = terms(byte_level(["ab"])), Learner(byte_level(["ab"])).admitter.terms
    changed = [f.name for f in dataclasses.fields(Terms) if getattr(own, f.name) != getattr(text, f.name)]
    assert set(changed) - {"assigned"} == {"tokenizer", "vocab_size", "end_ids"}
    assert (text.tokenizer, text.vocab_size, text.end_ids) == (None, 260, frozenset(range(256, 260)))
