"""The bytes of tokens: each spelling by hand, whole texts of random vocabularies, and tokenizers that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from vocabularies import END, byte_level, sentencepiece, texts, tokenizers

from ftis.engines.tokenizers import load_tokenizer
from ftis.models import starters
from ftis.text.token_bytes import AlignmentError, TokenBytes, token_bytes

MODELS = Path(__file__).parents[1] / "models"


def test_a_byte_level_vocabulary_spells_each_byte() -> None:
    tokenizer = byte_level(["é", " the", "\r\n"])
    tokens = token_bytes(tokenizer)
    assert sorted(token for token in tokens if len(token) == 1) == [bytes([byte]) for byte in range(256)]
    spelt = dict(zip(tokenizer.convert_ids_to_tokens(list(range(len(tokens)))), tokens, strict=True))
    assert (spelt["Ġ"], spelt["Ċ"], spelt["Ã"], spelt["č"], spelt["!"]) == (b" ", b"\n", b"\xc3", b"\r", b"!")
    assert (spelt["Ã©"], spelt["Ġthe"], spelt["čĊ"], spelt[END]) == ("é".encode(), b" the", b"\r\n", b"")


def test_sentencepiece_spells_a_space_and_lone_bytes_and_in_other_vocabularies_a_token_is_itself() -> None:
    tokenizer = sentencepiece([" the", "  "])
    tokens = token_bytes(tokenizer)
    spelt = dict(zip(tokenizer.convert_ids_to_tokens(list(range(len(tokens)))), tokens, strict=True))
    assert [spelt[token] for token in ("▁", "▁▁", "▁the")] == [b" ", b"  ", b" the"]
    assert (spelt["<0x0D>"], spelt["<0xFF>"]) == (b"\r", b"\xff")
    words = Tokenizer(models.WordLevel({"a": 0, "Ġ": 1, "▁": 2, "é": 4}, unk_token="a"))
    words.decoder = decoders.Fuse()
    tokens = token_bytes(PreTrainedTokenizerFast(tokenizer_object=words))
    assert tokens == [b"a", "Ġ".encode(), "▁".encode(), b"", "é".encode()], "and an id without a token has none"


@pytest.mark.parametrize("name", ["small", "adder"])
def test_the_starters_tokens(name: str) -> None:
    tokenizer = load_tokenizer(str(starters.path_of(f"starter:{name}")))
    known = TokenBytes.of(tokenizer)
    text = "<think>12+3*4=24;-7</think><answer>-7</answer>"
    (ids,) = known.encode([text])
    assert ids.tolist() == tokenizer.encode(text, add_special_tokens=False)
    assert known.join(ids).tobytes() == text.encode()
    assert known.sizes(ids)[[0, -1]].tolist() == [7, 9], "a tag is one token, and stands for itself"
    assert known.sizes(np.array([tokenizer.eos_token_id], np.int32)).tolist() == [0]


@given(tokenizers(), texts)
@settings(max_examples=200, deadline=None)
def test_the_tokens_of_a_text_have_its_bytes(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    known = TokenBytes.of(tokenizer)
    text = text.replace("\u2581", "") if "<0x00>" in tokenizer.get_vocab() else text  # SentencePiece's sign is a space
    (ids,) = known.encode([text])
    assert known.join(ids).tobytes() == text.encode("utf-8")
    sizes = known.sizes(ids)
    assert sizes.dtype == np.int32
    assert sizes.sum() == len(text.encode("utf-8"))
    assert (sizes > 0).all(), "a special token is not encoded, even where the text spells one"


def test_a_tokenizer_that_composes_characters_is_used_without() -> None:
    tokenizer = byte_level(normal_form=True)
    known = TokenBytes.of(tokenizer)
    (ids,) = known.encode(["e\u0301"])
    assert known.join(ids).tobytes() == "e\u0301".encode()
    assert tokenizer.decode(tokenizer.encode("e\u0301", add_special_tokens=False)) == "\xe9", (
        "and is not changed itself"
    )


def test_ids_without_a_token_have_no_bytes() -> None:
    known = TokenBytes.of(byte_level(["ab"]))
    (ids,) = known.encode(["ab"])
    beyond = np.concatenate([ids, np.array([len(known.size_V), 10**6], np.int32), ids])
    assert known.join(beyond).tobytes() == b"abab"
    assert known.sizes(beyond).tolist() == [2, 0, 0, 2]
    assert known.join(np.zeros(0, np.int32)).tobytes() == b""
    assert known.encode([]) == []


def test_a_tokenizer_of_another_kind_or_that_puts_a_space_in_front_is_refused() -> None:
    words = Tokenizer(models.WordPiece({"a": 0, "##b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    words.decoder = decoders.WordPiece()
    bert = PreTrainedTokenizerFast(tokenizer_object=words, name_or_path="a/bert")
    for tokenizer, said in (
        (bert, r"tokenizer .a/bert. .* by WordPiece.*exchange ids"),
        (sentencepiece(["the"], prefix=True), r"changes text.*add_prefix_space"),
        (PreTrainedTokenizerBase(), r"no tokenizer\.json.*save"),
    ):
        with pytest.raises(AlignmentError, match=said):
            TokenBytes.of(tokenizer)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["smollm2-135m", "gemma3-270m"])
def test_real_tokenizers_keep_every_byte(model: str) -> None:
    if not (MODELS / model / "tokenizer.json").exists():
        pytest.skip(f"models/{model} is absent: ftis models get {model}")
    known = TokenBytes.of(load_tokenizer(str(MODELS / model)))
    spelt = json.loads((MODELS / model / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    plain = [token for token in spelt if token.isascii() and token.isalpha()][:5000]
    written = [
        *plain,
        " ".join(plain),
        "a  b\r\n\n\t1,234.5 → e\u0301 g\u0308 👩\u200d🚀 中文字 \ufeff\u200b<eos><|im_end|>",
    ]
    for text, ids in zip(written, known.encode(written), strict=True):
        assert known.join(ids).tobytes() == text.encode("utf-8")
