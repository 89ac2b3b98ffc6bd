"""Completions as text beside completions as ids: bytes on the wire, and tokens a second on one core.

    python benchmarks/text.py --sender models/smollm2-135m --learner models/gemma3-270m \\
        --rollouts RUN/full/rollouts                                    # as a recorded run sampled them
    python benchmarks/text.py --sender … --learner … --data GSM8K/train.jsonl  # reference solutions
    python benchmarks/text.py --sender … --learner … --data GSM8K/test.jsonl --sample 220    # as the sender answers now

A message holds ``--completions`` completions of each of ``--problems`` problems. Recorded rollouts are taken in their
order, several rounds to a message, with the log-probabilities that were sampled. Reference solutions have drawn ones,
as in ``wire.py``. With ``--sample`` the sender's model answers the first problems under its own chat template, at
temperature 1 and seed 0. ``ids`` is the packed form of version 2, ``text`` that of version 3; both say what one of the
sender's tokens takes.

Tokens a second count the sender's tokens, medians of ``--repeat``. ``as text`` is the sender's part, ``spell`` the
learner's encoding of the texts and ``align`` that encoding and the units. ``units`` is their share of one token on
either side, and how many completions have a unit that is too long; ``own cuts`` the units that the sender's own
tokenizer would cut otherwise than they were sampled. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from timing import median_seconds
from wire import HEADER, LIMITS, log_probabilities

from ftis.codec import Message, decode, encode
from ftis.config import PeerConfig
from ftis.engines.samplers import open_sampler
from ftis.engines.tokenizers import load_tokenizer
from ftis.policy import Policy
from ftis.records.rollouts import read_rollouts
from ftis.rollouts import Group, Rollout
from ftis.sampling import Decoding
from ftis.text.completions import as_texts, text_of
from ftis.text.token_bytes import TokenBytes
from ftis.text.units import align
from ftis.wire.streams import PHRASES, write_logp, write_numbers, write_stream


def recorded(directory: Path, count: int) -> list[Rollout]:
    """The first ``count`` rollouts that the runs under ``directory`` recorded."""
    found: list[Rollout] = []
    for path in sorted(directory.rglob("round-*.parquet")):
        for row in read_rollouts(path.parents[1], int(path.stem.removeprefix("round-"))):
            found.append(Rollout(np.array(row["completion_ids"]), np.array(row["gen_logp"])))
        if len(found) >= count:
            return found[:count]
    raise SystemExit(f"{directory} holds {len(found)} rollouts, {count} are asked for: lower --problems")


def answers(sender: str, path: Path, problems: int, completions: int, longest: int) -> list[Rollout]:
    """What the model itself answers to the first problems."""
    policy = Policy.load(PeerConfig(name="sender", model=sender, device="cpu"))
    questions = [json.loads(line)["question"] for line in path.read_text("utf-8").splitlines()[:problems]]
    prompts = [
        policy.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in questions
    ]
    sampler = open_sampler("auto", policy)
    ids = [np.array(prompt, np.int32) for prompt in prompts]
    return [rollout for group in sampler(policy, ids, completions, Decoding(longest), seed=0) for rollout in group]


def solutions(path: Path, known: TokenBytes, end: int, count: int) -> list[Rollout]:
    """The first ``count`` reference solutions, without calculator notes, with drawn log-probabilities."""
    rng = np.random.default_rng(0)
    texts = [
        re.sub(r"<<.*?>>", "", json.loads(line)["answer"]) for line in path.read_text("utf-8").splitlines()[:count]
    ]
    ids = [np.append(one, np.int32(end)) for one in known.encode(texts)]
    return [Rollout(one, log_probabilities("mixture", len(one), rng)) for one in ids]


def message(rollouts: list[Rollout], problems: int) -> Message:
    size = len(rollouts) // problems
    groups = (Group(HEADER.peer, 0, 97 * i, tuple(rollouts[i * size : (i + 1) * size])) for i in range(problems))
    return Message(HEADER, tuple(groups))


def size_of(parts: list[bytes]) -> int:
    return sum(map(len, parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sender", required=True, help="directory of the sender's model")
    parser.add_argument("--learner", required=True, help="directory of the learner's model")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--rollouts", type=Path, help="recorded runs of the sender's model")
    source.add_argument("--data", type=Path, help="JSONL with answers, as GSM8K's train.jsonl")
    parser.add_argument("--sample", type=int, metavar="N", help="with --data: sample answers of at most N tokens")
    parser.add_argument("--problems", type=int, default=12)
    parser.add_argument("--completions", type=int, default=12, help="of each problem")
    parser.add_argument("--repeat", type=int, default=7)
    options = parser.parse_args()

    tokenizers = [load_tokenizer(path) for path in (options.sender, options.learner)]
    sender, learner = map(TokenBytes.of, tokenizers)
    end, learner_end = (int(tokenizer.eos_token_id) for tokenizer in tokenizers)
    count = options.problems * options.completions
    if options.rollouts:
        sampled = recorded(options.rollouts, count)
    elif options.sample:
        sampled = answers(options.sender, options.data, options.problems, options.completions, options.sample)
    else:
        sampled = solutions(options.data, sender, end, count)
    ends = list({end, *(int(r.completion_ids[-1]) for r in sampled if not sender.sizes(r.completion_ids[-1:])[0])})
    tokens = sum(map(len, sampled))

    def texts() -> list[Rollout]:
        return as_texts(sampled, sender, ends)

    ids, written = message(sampled, options.problems), texts()
    text = message(written, options.problems)
    spelt = [text_of(one) for one in written]
    sizes = np.concatenate([np.bincount(one.unit) for one in written if one.unit is not None]).astype(np.uint32)
    data = np.frombuffer("".join(spelt).encode("utf-8"), np.uint8)
    logp = np.concatenate([one.gen_logp for one in written])
    print(f"{count} completions, {tokens} tokens, {len(data) / tokens:.2f} bytes of text a token")
    print(f"{'':14}{'bytes/token':>12}{'text':>7}{'sizes':>7}{'logp':>7}{'encode':>9}{'decode':>9}")

    kind = "recorded" if options.rollouts else "sampled" if options.sample else "solutions"
    result: dict[str, Any] = {"source": kind, "tokens": tokens}
    result |= {"completions": count, "bytes_of_text": len(data) / tokens}
    for name, made in (("ids", ids), ("text", text)):
        packed = encode(made)
        row = {
            "bytes_per_token": len(packed) / tokens,
            "text": size_of(write_stream(data, PHRASES)) / tokens if made is text else 0.0,
            "sizes": size_of(write_numbers(sizes)) / tokens if made is text else 0.0,
            "logp": size_of(write_logp(logp)) / tokens,
            "encode": tokens / median_seconds(partial(encode, made), options.repeat) / 1e6,
            "decode": tokens / median_seconds(partial(decode, packed, LIMITS), options.repeat) / 1e6,
        }
        print(f"{name:14}{row['bytes_per_token']:12.3f}{row['text']:7.3f}{row['sizes']:7.3f}", end="")
        print(f"{row['logp']:7.3f}{row['encode']:9.2f}{row['decode']:9.2f}")
        result[name] = row

    aligned = align(written, learner, learner_end)
    parts = {
        "as text": median_seconds(texts, options.repeat),
        "spell": median_seconds(lambda: learner.encode(spelt), options.repeat),
        "align": median_seconds(lambda: align(written, learner, learner_end), options.repeat),
    }
    result["speed"] = {name: tokens / seconds / 1e6 for name, seconds in parts.items()}
    print("million tokens/s: " + ", ".join(f"{name} {speed:.2f}" for name, speed in result["speed"].items()))
    one_to_one = np.concatenate([(one.sender_U == 1) & (one.learner_U == 1) for one in aligned])
    most = max(int(max(one.sender_U.max(), one.learner_U.max())) for one in aligned if not one.fault)
    faults = [one.fault for one in aligned if one.fault]
    result["units"] = {"one_to_one": float(one_to_one.mean()), "most_tokens": most, "faults": faults}
    print(f"units: {one_to_one.mean():.2%} one to one, at most {most} tokens; dropped: {faults or 'none'}")
    recut = [(one.sender_U != 1) | (one.learner_U != 1) for one in align(written, sender, end)]
    result["own_cuts"] = {"units": float(np.concatenate(recut).mean()), "completions": sum(map(any, recut))}
    print(f"own cuts: {result['own_cuts']['units']:.2%} of units, in {result['own_cuts']['completions']} completions")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
