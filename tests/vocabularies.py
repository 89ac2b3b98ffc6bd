"""Tokenizers of random vocabularies, and texts that tokenizers disagree about."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END = "<|end|>"
PIECES = (
    *("a", "b", "the", "The", " the", "  ", " ", "\n", "\r\n", "\t", "1", "12", "2024", "0", ".", "…", "é", "e\u0301"),
    *("ß", "中", "文字", "🤖", "👩\u200d🚀", "🇩🇪", "g\u0308", "\u200b", "\u2581", "\ufeff", "\0", "<|end|>", "<0x41>"),
)
"""Emoji, combining marks, digits, spaces, line ends, and text that looks like a token's spelling."""

texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=30).map("".join)


def byte_level(words: Sequence[str] = (), digits: bool = False, normal_form: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE that merges each of ``words`` from left to right.

    Args:
        digits: a digit is always a token of its own.
        normal_form: the tokenizer composes characters first, as Qwen's does.
    """
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    spelt = [level.pre_tokenize_str(word)[0][0] for word in words if word]
    vocabulary, merges = _merged(alphabet, spelt)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    apart = [pre_tokenizers.Split(Regex(r"\p{N}"), "isolated")] if digits else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*apart, level])
    tokenizer.decoder = decoders.ByteLevel()
    if normal_form:
        tokenizer.normalizer = normalizers.NFC()
    return _fast(tokenizer)


def sentencepiece(words: Sequence[str] = (), prefix: bool = False, strips: bool = False) -> PreTrainedTokenizerFast:
    """A BPE over characters with ▁ for a space, which falls back to bytes.

    Args:
        prefix: a space is put in front of every text, as Llama 2 does.
        strips: decoding takes one off, as Llama 2 does too.
    """
    spelt = [word.replace(" ", "\u2581") for word in words if word]
    characters = sorted({character for word in spelt for character in word} | {"\u2581", "a"})
    vocabulary, merges = _merged(["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *characters], spelt)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    space = [normalizers.Replace(" ", "\u2581")]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), *space] if prefix else space)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if strips else [])])
    return _fast(tokenizer)


def _merged(alphabet: Sequence[str], words: Sequence[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    vocabulary = {token: number for number, token in enumerate(alphabet)}
    merges = []
    for word in words:
        for stop in range(2, len(word) + 1):
            pair = (word[: stop - 1], word[stop - 1])
            if "".join(pair) not in vocabulary:
                vocabulary["".join(pair)] = len(vocabulary)
                merges.append(pair)
    return vocabulary, merges


def _fast(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


pairs = st.tuples(st.sampled_from(PIECES), st.sampled_from(PIECES)).map("".join)
words = st.lists(pairs.filter(lambda word: END not in word), max_size=12)  # else a merge would make the special token


@st.composite
def tokenizers(draw: st.DrawFn) -> PreTrainedTokenizerFast:
    """Of either spelling, over a random vocabulary."""
    if draw(st.booleans()):
        return sentencepiece([word for word in draw(words) if "\u2581" not in word])
    return byte_level(draw(words), digits=draw(st.booleans()), normal_form=draw(st.booleans()))
