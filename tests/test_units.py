"""Completions as text, and units of likelihood: cases by hand, and what holds for random vocabularies and texts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from memory import peak_of
from transformers import PreTrainedTokenizerBase as Tokenizer
from vocabularies import byte_level, sentencepiece, texts, tokenizers

from ftis.rollouts import Rollout
from ftis.text.completions import END, REPLACED, as_texts, ended, text_of
from ftis.text.token_bytes import TokenBytes
from ftis.text.units import MOST_TOKENS, Aligned, align, as_sampled, units


def spoken(tokenizer: Tokenizer, text: str, end: bool, seed: int = 0) -> Rollout:
    """``text`` as a sender of ``tokenizer`` samples it, with some log-probabilities."""
    (ids,) = TokenBytes.of(tokenizer).encode([text])
    ids = np.append(ids, np.int32(tokenizer.eos_token_id)) if end else ids
    return Rollout(ids, -np.random.default_rng(seed).exponential(1, len(ids)).astype(np.float32))


def sent(tokenizer: Tokenizer, rollout: Rollout) -> Rollout:
    (text,) = as_texts([rollout], TokenBytes.of(tokenizer), [int(tokenizer.eos_token_id)])
    return text


def aligned(tokenizer: Tokenizer, text: Rollout) -> Aligned:
    (one,) = align([text], TokenBytes.of(tokenizer), int(tokenizer.eos_token_id))
    return one


def test_units_end_where_both_have_an_end_and_different_texts_have_none() -> None:
    cases: list[tuple[list[str], list[str], list[int], list[int]]] = [
        (["The", " cat", "ast", "rophe", "!"], ["The", " cata", "strophe", "!"], [0, 1, 1, 1, 2], [0, 1, 1, 2]),
        (["201", "+"], ["2", "0", "1", "+"], [0, 1], [0, 0, 0, 1]),
        (["2", "0", "1"], ["20", "1"], [0, 0, 1], [0, 1]),
        (["a", "b"], ["a", "b"], [0, 1], [0, 1]),
        (["ab", "cd", "e"], ["a", "bc", "de"], [0, 0, 0], [0, 0, 0]),
        (["  ", "a"], [" ", " a"], [0, 0], [0, 0]),
        (["\r", "\n", "x"], ["\r\n", "x"], [0, 0, 1], [0, 1]),
        (["a"], ["a"], [0], [0]),
        ([], [], [], []),
    ]
    for sender, learner, unit_S, unit_T in cases:
        sizes = [np.array([len(token.encode()) for token in side], np.int32) for side in (sender, learner)]
        assert [unit.tolist() for unit in units(*sizes)] == [unit_S, unit_T]
    for sizes_S, sizes_T in (([1, 2], [2, 2]), ([2, 0], [1, 1]), ([1, 1], [0, 2]), ([], [1])):
        with pytest.raises(ValueError, match="segment one text"):
            units(np.array(sizes_S, np.int32), np.array(sizes_T, np.int32))


def test_an_example_by_hand_from_sampling_to_the_learners_units() -> None:
    sender, learner = byte_level(["201", " 4"]), byte_level([" 42"], digits=False)
    rollout = Rollout(spoken(sender, "201 42", True).completion_ids, np.array([-0.5, -0.25, -1, -2], np.float32))
    text = sent(sender, rollout)
    assert text.completion_ids.tolist() == [*b"201 42", END]
    assert text.unit is not None
    assert text.unit.tolist() == [0, 0, 0, 1, 1, 2, 3], "the bytes of 201, of a space and 4, of 2, and the end"
    assert (text_of(text), ended(text)) == ("201 42", True)
    one = aligned(learner, text)
    assert one.rollout.unit is not None
    assert one.rollout.unit.tolist() == [0, 0, 0, 1, 2], "2, 0, 1 | 42 with its space | the end"
    assert one.rollout.gen_logp.tolist() == [-0.5, -1.25, -2.0]
    assert one.rollout.completion_ids[-1] == learner.eos_token_id
    assert (one.sender_U.tolist(), one.learner_U.tolist(), one.fault) == ([1, 2, 1], [3, 1, 1], "")


def test_a_unit_of_too_many_tokens_or_a_text_that_the_learner_cannot_spell_is_a_fault() -> None:
    for tokens, fault in ((MOST_TOKENS, ""), (MOST_TOKENS + 1, "a unit of 9 tokens, the most is 8")):
        word = "abcdefghi"[:tokens]
        whole, pieces = byte_level([word]), byte_level()
        for sender, learner in ((whole, pieces), (pieces, whole)):
            assert aligned(learner, sent(sender, spoken(sender, word, True))).fault == fault
    sender, learner = byte_level(), sentencepiece()  # where the sign for a space cannot be told from one
    rollout = spoken(sender, "a\u2581b", True)
    one = aligned(learner, sent(sender, rollout))
    assert one.fault.endswith("cannot spell 'a▁b'")
    assert one.rollout.gen_logp.tolist() == pytest.approx([rollout.gen_logp.sum()])
    assert set(one.rollout.unit.tolist() if one.rollout.unit is not None else []) == {0}


def test_bytes_that_are_no_character_are_replaced_and_are_a_fault() -> None:
    tokenizer = byte_level()
    known = TokenBytes.of(tokenizer)
    (ids,) = known.encode(["ab🤖c🤖"])
    logp = -np.arange(1, len(ids) + 1).astype(np.float32)
    cut = Rollout(ids[:-2], logp[:-2])  # cut off inside the second robot
    (text,) = as_texts([cut], known, [999])
    assert text_of(text) == f"ab🤖c{REPLACED}"
    assert text.unit is not None
    assert text.unit.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 7, 7]
    assert text.gen_logp.tolist() == [-1, -2, -3, -4, -5, -6, -7, -8], "that of its first byte"
    assert aligned(tokenizer, text).fault == "bytes that are no character"
    (middle,) = as_texts([Rollout(np.delete(ids, 3), np.delete(logp, 3))], known, [999])
    assert text_of(middle) == f"ab{REPLACED}c🤖"
    assert middle.gen_logp.tolist()[:4] == [-1, -2, -3, -7]


def test_a_special_token_inside_is_left_out_with_its_log_probability() -> None:
    """Added to a neighbour's, it would make that one look less probable than it was drawn with."""
    tokenizer = byte_level()
    end = int(tokenizer.eos_token_id)
    (ids,) = TokenBytes.of(tokenizer).encode(["ab"])
    a, b = ids.tolist()
    for tokens, expected in (
        ([a, end, b], [-1.0, -3.0]),
        ([end, a, b], [-2.0, -3.0]),
        ([a, b, end], [-1.0, -2.0, -3.0]),
        ([a, b, end, end], [-1.0, -2.0, -4.0]),
        ([end, end], [-2.0]),
    ):
        logp = -np.arange(1, len(tokens) + 1).astype(np.float32)
        text = sent(tokenizer, Rollout(np.array(tokens, np.int32), logp))
        assert text.gen_logp.tolist() == expected
        assert ended(text) == (tokens[-1] == end)


@given(tokenizers(), tokenizers(), texts, st.booleans(), st.integers(0, 99))
@settings(max_examples=300, deadline=None)
def test_units_partition_both_sides_and_keep_all(
    sender: Tokenizer, learner: Tokenizer, written: str, end: bool, seed: int
) -> None:
    assume(written or end)
    written = written.replace("\u2581", "_")
    rollout = spoken(sender, written, end, seed)
    text = sent(sender, rollout)
    assert (text_of(text), ended(text)) == (written, end)
    one = aligned(learner, text)
    known, result = TokenBytes.of(learner), one.rollout
    ids = result.completion_ids[: len(result) - end]
    assert known.join(ids).tobytes() == written.encode("utf-8"), "the learner's tokens spell the text"
    assert np.array_equal(ids, known.encode([written])[0]), "as the learner would"
    assert (one.sender_U.sum(), one.learner_U.sum()) == (len(rollout), len(result)), "every token is in one unit"
    assert min(one.sender_U.min(), one.learner_U.min()) >= 1, "no unit is empty on a side"
    ends_S, ends_T = (
        np.cumsum(np.append(TokenBytes.of(t).sizes(r.completion_ids[: len(r) - end]), [1] * end))
        for t, r in ((sender, rollout), (learner, result))
    )
    after_S, after_T = np.cumsum(one.sender_U) - 1, np.cumsum(one.learner_U) - 1
    assert np.array_equal(ends_S[after_S], ends_T[after_T]), "a unit ends at the same byte on both sides"
    assert np.array_equal(ends_S[after_S], np.intersect1d(ends_S, ends_T)), "and at every such byte"
    sums = [part.sum(dtype=np.float64) for part in np.split(rollout.gen_logp, after_S[:-1] + 1)]
    assert result.gen_logp.dtype == np.float32
    assert np.array_equal(result.gen_logp, np.array(sums).astype(np.float32)), "sums of log-probabilities are kept"
    assert bool(one.fault) == (max(*one.sender_U, *one.learner_U) > MOST_TOKENS or REPLACED in written)
    if end:
        assert (one.sender_U[-1], one.learner_U[-1]) == (1, 1), "the end is a unit of its own"


@given(tokenizers(), st.lists(st.integers(0, 400), min_size=1, max_size=40), st.booleans())
@settings(max_examples=200, deadline=None)
def test_any_tokens_become_a_text(tokenizer: Tokenizer, tokens: Sequence[int], end: bool) -> None:
    """Lone bytes, special tokens, ids beyond the vocabulary: what a bad model samples."""
    tokens = [*tokens, int(tokenizer.eos_token_id)] if end else tokens
    rollout = Rollout(np.array(tokens, np.int32), -np.linspace(0.1, 3, len(tokens)).astype(np.float32))
    text = sent(tokenizer, rollout)
    text_of(text)
    assert set(rollout.gen_logp.tolist()) >= set(text.gen_logp.tolist()), "of a token, or left out with it"
    assert 1 <= len(text.gen_logp) <= len(rollout)
    one = aligned(tokenizer, text)
    assert one.rollout.gen_logp.sum(dtype=np.float64) == pytest.approx(text.gen_logp.sum(dtype=np.float64), rel=1e-5)


@given(tokenizers(), tokenizers(), st.lists(st.tuples(texts, st.booleans()), min_size=1, max_size=6))
@settings(max_examples=100, deadline=None)
def test_many_at_once_are_as_each_by_itself(
    sender: Tokenizer, learner: Tokenizer, written: list[tuple[str, bool]]
) -> None:
    known, end = TokenBytes.of(sender), int(sender.eos_token_id)
    rollouts = [spoken(sender, text, ended_) for text, ended_ in written]
    rollouts = [rollout for rollout in rollouts if len(rollout)]
    together = as_texts(rollouts, known, [end])
    alone = [sent(sender, rollout) for rollout in rollouts]
    pairs = [*zip(together, alone, strict=True)]
    result = align(together, TokenBytes.of(learner), int(learner.eos_token_id))
    pairs += [(one.rollout, aligned(learner, text).rollout) for one, text in zip(result, alone, strict=True)]
    for one, other in pairs:
        assert one.completion_ids.tobytes() == other.completion_ids.tobytes()
        assert one.gen_logp.tobytes() == other.gen_logp.tobytes()
        assert (None if one.unit is None else one.unit.tolist()) == (
            None if other.unit is None else other.unit.tolist()
        )


def test_alignment_takes_memory_in_proportion_to_the_text() -> None:
    """A long text without a space, in which each byte is a token on one side."""
    sender, learner = byte_level(), byte_level(["abab", "ba"])
    known, end = TokenBytes.of(learner), int(learner.eos_token_id)
    text = sent(sender, spoken(sender, "ab" * 8192, True))
    peak = peak_of(lambda: align([text], known, end))
    assert peak < 200 * len(text)


@given(tokenizers(), st.lists(texts, min_size=1, max_size=4), st.data())
@settings(max_examples=100, deadline=None)
def test_a_sender_of_the_own_tokenizer_is_read_as_it_sampled(
    tokenizer: Tokenizer, written: list[str], data: st.DataObject
) -> None:
    """Also where it would cut otherwise, as a model that samples a rare spelling; else alignment comes to the same."""
    known, end = TokenBytes.of(tokenizer), int(tokenizer.eos_token_id)
    rollouts, usual = list[Rollout](), list[bool]()
    for text in (text.replace("\u2581", "_").replace(REPLACED, "_") for text in written):
        cut, ends = data.draw(st.integers(0, len(text))), data.draw(st.booleans()) or not text
        ids = np.concatenate([*known.encode([text[:cut], text[cut:]])]).astype(np.int32)
        ids = np.append(ids, np.int32(end)) if ends else ids
        usual.append(np.array_equal(ids[: len(ids) - ends], known.encode([text])[0]))
        rollouts.append(Rollout(ids, -np.random.default_rng(cut).exponential(1, len(ids)).astype(np.float32)))
    came = as_texts(rollouts, known, [end])
    for read, as_it_was in (
        (as_sampled(came, known, end, [end]), [True] * len(came)),
        (align(came, known, end), usual),
    ):
        for rollout, one, expected in zip(rollouts, read, as_it_was, strict=True):
            if not expected:
                continue
            assert one.rollout.unit is None
            assert one.rollout.completion_ids.dtype == np.int32
            assert one.rollout.gen_logp.dtype == np.float32
            assert one.rollout.completion_ids.tobytes() == rollout.completion_ids.tobytes()
            assert one.rollout.gen_logp.tobytes() == rollout.gen_logp.tobytes()
            assert not one.fault


def test_tokens_that_the_vocabulary_lacks_are_aligned_and_of_two_of_one_spelling_one_is_meant() -> None:
    sender, learner = byte_level(["abc"]), byte_level(["ab"])
    text = sent(sender, spoken(sender, "abc", end=True))
    other = sent(sender, spoken(sender, "ab", end=True))
    end = int(learner.eos_token_id)
    one, two = as_sampled([text, other], TokenBytes.of(learner), end, [end])
    assert (one.sender_U.tolist(), one.learner_U.tolist()) == ([1, 1], [2, 1])
    assert two.rollout.unit is None
    known = TokenBytes.of(sentencepiece(["a", " "]))
    (ids,) = known.encode(["a"])
    tokens = [known.join(np.array([i], np.int32)).tobytes() for i in range(len(known.size_V))]
    assert tokens.count(b"a") > 1, "a character, and its byte"
    assert known.id_of[b"a"] == ids[0]
