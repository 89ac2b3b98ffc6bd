"""Bytes on the wire and tokens a second.

    python benchmarks/wire.py --data GSM8K/train.jsonl     # worked solutions of another problem each
    python benchmarks/wire.py                              # no data: words drawn independently, by Zipf's law

A message holds ``--completions`` completions of each of ``--problems`` problems in a vocabulary of ``--vocabulary``
ids. Nothing here is sampled from a model, and both parts compress worse than what a model samples:

- Ids. Every completion is the worked solution of a *different* problem, without its calculator notes; completions of
  one problem would repeat each other's words. The tokenizer, a byte-level BPE of 20,000 tokens whose digits stand
  alone, is trained on the remaining problems, and its ids are scattered over the vocabulary; in a real one frequent
  tokens have small ids.
- Log-probabilities. Independent of the tokens and of each other. ``mixture``, mean about -0.29: 60% are all but
  certain, log-normal around -0.0025, the others exponential with mean -0.68. ``exponential``, mean -0.29: the most
  random distribution of that mean, so no other costs more.

The last line is one JSON object: ``bytes_per_token`` and their parts (ids, log-probabilities, and ``rest``), ``encode``
and ``decode`` in million tokens a second, medians of ``--repeat``.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from timing import median_seconds
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from ftis.codec import Header, Limits, Message, decode, encode
from ftis.rollouts import MIN_LOGP, Floats, Group, Ints, Rollout

HEADER = Header("0" * 32, 0, "large", "0" * 32, 1.0, 0, 1.0)
LIMITS = Limits(1 << 30, 1 << 20, 1 << 16, 1 << 20)
WORDS = Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KNOWN_TOKENS = 20_000


def solutions(path: Path, count: int, vocabulary: int, rng: np.random.Generator) -> list[Ints]:
    """The ids of ``count`` solutions, by a tokenizer trained on the problems that are not among them."""
    problems = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    order = rng.permutation(len(problems))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(WORDS, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.train_from_iterator(
        (f"{problems[i]['question']}\n{problems[i]['answer']}" for i in order[count:]),
        trainers.BpeTrainer(
            vocab_size=KNOWN_TOKENS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        ),
    )
    scattered = rng.permutation(vocabulary)[: tokenizer.get_vocab_size()].astype(np.int32)
    texts = [re.sub(r"<<.*?>>", "", problems[i]["answer"]) for i in order[:count]]
    return [scattered[tokenizer.encode(text).ids] for text in texts]


def words(count: int, vocabulary: int, rng: np.random.Generator) -> list[Ints]:
    """Completions of about 120 tokens, each token drawn by itself with probability proportional to 1 / (rank + 2.7)."""
    chances = 1 / (np.arange(KNOWN_TOKENS) + 2.7)
    scattered = rng.permutation(vocabulary)[:KNOWN_TOKENS].astype(np.int32)
    lengths = rng.lognormal(np.log(120), 0.4, count).astype(int) + 1
    return [scattered[rng.choice(KNOWN_TOKENS, length, p=chances / chances.sum())] for length in lengths]


def log_probabilities(kind: str, count: int, rng: np.random.Generator) -> Floats:
    if kind == "exponential":
        nats = rng.exponential(0.29, count)
    else:
        nats = np.where(rng.random(count) < 0.6, np.exp(rng.normal(-6, 2, count)), rng.exponential(0.68, count))
    return np.maximum(-nats, MIN_LOGP).astype(np.float32)


def message(completions: list[Ints], logp: Floats, problems: int) -> Message:
    stops = np.cumsum([len(ids) for ids in completions])[:-1]
    rollouts = [Rollout(ids, part) for ids, part in zip(completions, np.split(logp, stops), strict=True)]
    size = len(rollouts) // problems
    groups = (Group(HEADER.peer, 0, 97 * i, tuple(rollouts[i * size : (i + 1) * size])) for i in range(problems))
    return Message(HEADER, tuple(groups))


def measure(made: Message, repeat: int) -> dict[str, float]:
    data, rollouts = encode(made), [r for g in made.groups for r in g.rollouts]
    tokens = sum(map(len, rollouts))
    # One part at a time, the other made free: all ids the same or all log-probabilities 0.
    problems, exact = len(made.groups), np.concatenate([r.gen_logp for r in rollouts])
    without_ids = message([np.zeros_like(r.completion_ids) for r in rollouts], exact, problems)
    without_logp = message([r.completion_ids for r in rollouts], np.zeros_like(exact), problems)
    ids, logp = (len(data) - len(encode(without)) for without in (without_ids, without_logp))
    return {
        "bytes_per_token": len(data) / tokens,
        "ids": ids / tokens,
        "logp": logp / tokens,
        "rest": (len(data) - ids - logp) / tokens,
        "encode": tokens / median_seconds(lambda: encode(made), repeat) / 1e6,
        "decode": tokens / median_seconds(lambda: decode(data, LIMITS), repeat) / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="JSONL with question and answer, as GSM8K's train.jsonl")
    parser.add_argument("--problems", type=int, default=12)
    parser.add_argument("--completions", type=int, default=12, help="of each problem")
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    rng = np.random.default_rng(options.seed)
    count = options.problems * options.completions
    if options.data:
        completions = solutions(options.data, count, options.vocabulary, rng)
    else:
        completions = words(count, options.vocabulary, rng)
    tokens = sum(map(len, completions))
    distinct = len(np.unique(np.concatenate(completions)))
    print(f"{count} completions, {tokens} tokens, {distinct} distinct ids of {options.vocabulary}")

    result: dict[str, Any] = {
        "source": "solutions" if options.data else "zipf",
        "tokens": tokens,
        "completions": count,
        "distinct_ids": distinct,
    }
    for kind in ("mixture", "exponential"):
        logp = log_probabilities(kind, tokens, rng)
        made = message(completions, logp, options.problems)
        print(f"\n{kind} log-probabilities, mean {logp.mean():.3f}, median {np.median(logp):.4f}")
        row = measure(made, options.repeat)
        print(", ".join(f"{name} {value:.3f}" for name, value in row.items()))
        result[kind] = {"mean_logp": round(float(logp.mean()), 4), **{k: float(f"{v:.4g}") for k, v in row.items()}}
    print()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
