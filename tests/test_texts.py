"""A completion's text behind its prompt: the space in front of it, which some decoders take off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import TinyModelDir, TinyPolicy, make_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import GemmaTokenizer, LlamaTokenizer, PreTrainedTokenizerFast
from vocabularies import byte_level, sentencepiece

from ftis.config import PromptConfig, RewardConfig
from ftis.engines.texts import texts_of
from ftis.rewards.scoring import load_scorer
from ftis.rollouts import Prompt

WORDS = (" 7", " the", "is", " a")
VOCABULARY = {"<unk>": 0, "<s>": 1, "</s>": 2, "\u2581": 3, "7": 4, "\u25817": 5, "a": 6, "<0xE2>": 7, "<0x96>": 8}
MERGES: Any = [("\u2581", "7")]  # transformers says they are strings
LLAMA = LlamaTokenizer(vocab=VOCABULARY, merges=MERGES)
STRIPPING = [LLAMA, sentencepiece(WORDS, prefix=True, strips=True), sentencepiece(WORDS, strips=True)]


def metaspace() -> PreTrainedTokenizerFast:
    """As T5's, whose decoder takes the space off the first token."""
    tokenizer = Tokenizer(models.WordLevel({"</s>": 0, "\u2581": 1, "\u25817": 2, "a": 3}, unk_token="</s>"))
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def word_pieces() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "7": 2, "##7": 3}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="[UNK]")


PLAIN = [
    byte_level(WORDS),
    sentencepiece(WORDS),
    sentencepiece(WORDS, prefix=True),
    GemmaTokenizer(vocab=VOCABULARY, merges=MERGES),
    make_tokenizer(),
    word_pieces(),
]


@pytest.mark.parametrize("tokenizer", [*STRIPPING, metaspace()], ids=["llama", "prefixed", "not prefixed", "metaspace"])
def test_a_space_in_front_stays(tokenizer: Any) -> None:
    seven, letter, end = tokenizer.get_vocab()["\u25817"], tokenizer.get_vocab()["a"], tokenizer.eos_token_id
    text = texts_of(tokenizer)
    assert tokenizer.decode([seven]) == "7"
    assert text([seven]) == text([end, seven]) == text([seven, end]) == " 7"
    assert text([letter, seven]) == tokenizer.decode([letter, seven]) == "a 7"
    assert text([seven, seven]) == " 7 7"
    assert text([]) == text([end]) == ""


@pytest.mark.parametrize("tokenizer", [*STRIPPING, *PLAIN], ids=map(str, range(9)))
@given(data=st.data())
def test_texts_are_the_decoders_but_for_that_space(tokenizer: Any, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=8))
    text = texts_of(tokenizer)(ids)
    decoded = tokenizer.decode(ids, skip_special_tokens=True)
    assert (text.removeprefix(" ") if tokenizer in STRIPPING else text) == decoded


def test_a_number_behind_a_prefill_is_one(
    tiny_policy: TinyPolicy, tiny_model_dir: TinyModelDir, tmp_path: Path
) -> None:
    """A right answer earned nothing: "The answer is7" holds no number."""
    tokenizer = STRIPPING[1]
    place = tiny_model_dir("llama", vocab_size=len(tokenizer))
    for file in place.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tokenizer.save_pretrained(tmp_path)
    policy = tiny_policy("llama", model=tmp_path)
    ids = [policy.tokenizer.get_vocab()["\u25817"], policy.tokenizer.eos_token_id]
    prompt = PromptConfig(prefill="The answer is", system_prompt="")
    score = load_scorer(RewardConfig(extract="last_number"), prompt, "number")
    assert score(Prompt(0, "3 + 4?", "7"), [policy.detokenize(ids)], [ids]) == (1.0,)
