"""How often tokenizers agree about a text: GSM8K's reference solutions, every pair of tokenizers, as table.

    python benchmarks/segmentations.py --data GSM8K/test.jsonl --models models/smollm2-135m models/gemma3-270m \\
        --qwen dashscope/resources/qwen.tiktoken

Qwen's vocabulary is in the pip package ``dashscope``, a file of tokens and ranks (``pip download --no-deps dashscope``,
and unpack the wheel). Its pre-tokenizer is written down here: a digit is a token of its own.

For a pair: the share of solutions without a unit of more than 8 tokens on either side, the share of units of one token
on either side, and the most tokens in a unit. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from wire import WORDS

from ftis.engines.tokenizers import load_tokenizer
from ftis.text.token_bytes import TokenBytes
from ftis.text.units import MOST_TOKENS, units


def qwen(path: Path) -> PreTrainedTokenizerFast:
    """Qwen's tokenizer from its ranks. A merge of rank r joins the two tokens that the merges before it leave of r."""
    lines = path.read_text(encoding="ascii").splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}
    level = sorted(pre_tokenizers.ByteLevel.alphabet(), key=ord)  # U+0100 and up are the bytes that Latin-1 hides
    hidden = [character for character in level if ord(character) > 0xFF]
    spare = iter(hidden)
    spelling = [chr(byte) if chr(byte) in level else next(spare) for byte in range(256)]

    def spelt(token: bytes) -> str:
        return "".join(spelling[byte] for byte in token)

    def halves(token: bytes) -> tuple[bytes, ...]:
        parts = tuple(token[i : i + 1] for i in range(len(token)))
        while len(parts) > 2:
            pairs = [ranks.get(left + right, len(ranks)) for left, right in itertools.pairwise(parts)]
            at = pairs.index(min(pairs))
            parts = (*parts[:at], parts[at] + parts[at + 1], *parts[at + 2 :])
        return parts

    by_rank = sorted((token for token in ranks if len(token) > 1), key=ranks.__getitem__)
    merges = [(spelt(left), spelt(right)) for left, right in map(halves, by_rank)]
    tokenizer = Tokenizer(models.BPE({spelt(token): rank for token, rank in ranks.items()}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(WORDS, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="JSONL with answers, as GSM8K's test.jsonl")
    parser.add_argument("--models", nargs="+", required=True, help="directories of models")
    parser.add_argument("--qwen", type=Path, help="qwen.tiktoken")
    options = parser.parse_args()

    texts = [json.loads(line)["answer"] for line in options.data.read_text(encoding="utf-8").splitlines()]
    loaded: dict[str, Any] = {Path(model).name: load_tokenizer(model) for model in options.models}
    loaded |= {"qwen": qwen(options.qwen)} if options.qwen else {}
    known = {name: TokenBytes.of(tokenizer) for name, tokenizer in loaded.items()}
    ids = {name: one.encode(texts) for name, one in known.items()}
    for name, one in known.items():
        spelt = [one.join(row).tobytes() == text.encode("utf-8") for row, text in zip(ids[name], texts, strict=True)]
        print(f"{name}: {sum(map(len, ids[name])):,} tokens, {sum(spelt):,} of {len(texts):,} solutions spelt exactly")
    print(f"\n{'pair':32}{'solutions without long units':>30}{'units one to one':>18}{'most tokens':>13}")
    result = {}
    for a, b in itertools.combinations(known, 2):
        one_to_one = n_units = good = most = 0
        for left, right in zip(ids[a], ids[b], strict=True):
            counts = [np.bincount(unit) for unit in units(known[a].sizes(left), known[b].sizes(right))]
            larger = np.maximum(*counts)
            one_to_one, n_units = one_to_one + int((larger == 1).sum()), n_units + len(larger)
            good, most = good + (int(larger.max()) <= MOST_TOKENS), max(most, int(larger.max()))
        row = {"without_long_units": good / len(texts), "one_to_one": one_to_one / n_units, "most_tokens": most}
        print(f"{a + ' / ' + b:32}{row['without_long_units']:30.2%}{row['one_to_one']:18.2%}{most:13}")
        result[f"{a} / {b}"] = row
    print(json.dumps(result))


if __name__ == "__main__":
    main()
