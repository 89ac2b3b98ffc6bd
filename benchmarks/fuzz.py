"""A million hostile messages and manifests, and what must hold for each of them.

    python benchmarks/fuzz.py                        # 1,000,000 cases, some minutes on one core
    python benchmarks/fuzz.py --first 4711 --cases 1 # one case again, by its number

Case n of a seed is always the same bytes: a message or a manifest that is random, or a good one cut, flipped,
spliced, stretched or rewritten, with its checksum made right or not. For each the oracle holds that

- ``decode`` gives a message that writing and reading again does not change, or raises CodecError; ``parse`` gives a
  manifest that is written as the same bytes, or raises ManifestError;
- ``Admitter.admit`` raises nothing and warns of nothing; each group is admitted or rejected once; what is admitted
  keeps the terms and is rewarded as it is worth; sent again, it is a duplicate;
- texts of errors are short and printable;
- memory (traced for a sample of the cases) grows with the bytes that are there and the limits, never with what they
  promise.

The last line is one JSON object; the exit status is 1 if anything did not hold. ``fuzz_coverage.py`` has the same
oracle under a coverage-guided fuzzer.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import struct
import sys
import time
import tracemalloc
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from doubles import byte_level
from fuzz_cases import END, GOOD_MANIFESTS, LONGEST, ROUND, RUN, TOKENIZER, VOCAB, G, make, signed

from ftis.admission import Admission, Admitter, Reason, Terms
from ftis.codec import MOST_BYTES, CodecError, Limits, Message, decode, encode
from ftis.guards.penalties import Penalties
from ftis.rollouts import MIN_LOGP, Prompt
from ftis.swarm import manifest as manifests
from ftis.swarm.identity import public_hex
from ftis.swarm.manifest import ManifestError
from ftis.text.completions import END as END_OF_TEXT
from ftis.text.messages import TextReader, spoken, terms_of_text
from ftis.text.token_bytes import TokenBytes

PROMPTS = [Prompt(item, f"question {item}", str(item)) for item in range(12)]
PEERS = ("ada", "bob")
KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = public_hex(KEY)
SEALS = {data: manifests.seal(KEY, data) for data in GOOD_MANIFESTS}
ANY_SEAL = next(iter(SEALS.values()))
LONGEST_TEXT = 500
LARGE = 50_000
"""Cases of more bytes are traced at the end: tracing them takes more memory than they do."""


def share(peer: str, round: int) -> range:
    start = 4 * (round % 3) + 2 * PEERS.index(peer)
    return range(start, start + 2)


TERMS = Terms(
    run=RUN,
    tokenizer=TOKENIZER,
    temperature=1.0,
    vocab_size=VOCAB,
    end_ids=frozenset({END}),
    group_size=G,
    max_completion_length=LONGEST,
    prompts=PROMPTS,
    assigned=share,
    roster=frozenset(PEERS),
    max_groups=2,
    max_staleness=1,
)
TEXT_TERMS = replace(TERMS, max_completion_length=8 * LONGEST)
LEARNER = TokenBytes.of(byte_level([]))
END_OF_LEARNER = LEARNER.tokenizer.eos_token_id
TOKENIZERS_CACHE = 200 * 10**6
"""The library's tokenizers remember 10,000 words of up to 255 bytes, whatever they are: 175 MB as bytes, measured."""
MOST_TOKENS = 12 * LONGEST
"""Of the learner's tokenizer, in a completion of text."""
LIMITS = TERMS.limits
BOUNDLESS = Limits(max_bytes=1 << 40, max_groups=1 << 32, max_rollouts_per_group=1 << 16, max_completion_length=1 << 32)
ROOMY = Limits(1 << 40, 2 * LIMITS.max_groups, 2 * LIMITS.max_rollouts_per_group, 2 * LIMITS.max_completion_length)
"""The limits bound a message's memory, and not its bytes alone."""

OF_A_GROUP = {
    Reason.UNKNOWN_PROMPT,
    Reason.NOT_THEIR_PROMPT,
    Reason.DUPLICATE,
    Reason.WRONG_GROUP_SIZE,
    Reason.EMPTY,
    Reason.TOO_LONG,
    Reason.TOKEN_OUT_OF_RANGE,
    Reason.TOKENS_AFTER_END,
    Reason.BAD_LOGP,
    Reason.WRONG_TOKENIZER,  # text under the fingerprint of a tokenizer
}


class FindingError(AssertionError):
    """Something that ought to hold and did not."""


def hold(condition: object, what: str) -> None:
    if not condition:
        raise FindingError(what)


def text_admitter() -> Admitter:
    """That of a run which exchanges text, with a vocabulary of few symbols."""
    reader = TextReader(TEXT_TERMS.tokenizer, LEARNER, END_OF_LEARNER, [END_OF_LEARNER], lambda *_: MOST_TOKENS)
    return Admitter(terms_of_text(TEXT_TERMS), score, detokenize, spoken, reader)


def memory_bound(kind: str, data: bytes) -> int:
    """The most bytes of memory that judging ``data`` may take, whatever it promises.

    Four bytes of a message can be a rollout without tokens: two arrays, a Rollout and its places in lists. Two bytes
    of a manifest can be a list, of 56 bytes and its place in another. The limits allow a number of tokens and of
    rollouts, too, and in a message of text of bytes.
    """
    if kind == "manifest":
        return 30_000 + 80 * min(len(data), manifests.MAX_BYTES)
    rollouts = ROOMY.max_groups * ROOMY.max_rollouts_per_group
    token = 50 + 40 * MOST_BYTES * (data[7:8] >= b"\x10")
    return 30_000 + 150 * len(data) + rollouts * (600 + token * ROOMY.max_completion_length)


# ---------------------------------------------------------------------------------------------- what must hold


def detokenize(ids: Sequence[int]) -> str:
    hold(ids and all(0 <= i < VOCAB for i in ids), "the detokenizer was given ids outside of the vocabulary")
    return " ".join(str(i) for i in ids if i != END)


def score(prompt: Prompt, completions: Sequence[str], completion_ids: Sequence[Sequence[int]]) -> tuple[float, ...]:
    return tuple(float(c == prompt.answer) for c in completions)


@dataclass
class Oracle:
    """Judges cases and counts what became of them."""

    outcomes: Counter[str] = field(default_factory=Counter)
    peak_bytes: int = 0
    """Of all traced cases, the most that one took."""
    fullest: float = 0.0
    """The most of its memory bound that a traced case took, as a fraction."""

    def __post_init__(self) -> None:
        self._lasting, self._penalties = Admitter(TERMS, score, detokenize), Penalties(8, 1)
        self._round = ROUND
        self._taken: set[tuple[str, int, int]] = set()

    def case(self, kind: str, data: bytes, trace: bool = False) -> None:
        """
        Raises:
            FindingError: something does not hold for ``data``. Any other exception is a finding, too.
        """
        judge, bound = self.manifest if kind == "manifest" else self.message, memory_bound(kind, data)
        if not trace:
            return judge(data)
        tracemalloc.start()
        try:
            judge(data)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        self.peak_bytes = max(self.peak_bytes, peak)
        self.fullest = max(self.fullest, peak / bound)
        hold(peak <= bound, f"{len(data)} bytes took {peak} bytes of memory, the bound is {bound}")

    def message(self, data: bytes) -> None:
        roomier = self._decode(data, ROOMY)
        message = self._decode(data, LIMITS)
        if message is not None:
            hold(roomier is not None, "limits let through what is no message within wider ones")
            if data[7]:
                self.outcomes["messages of text decoded"] += 1
                self._admit_text(data, message)
        admitter = Admitter(TERMS, score, detokenize)
        first = admitter.admit("ada", data, ROUND)
        self._check(first, message, data)
        again = admitter.admit("ada", data, ROUND)
        hold(not again.admitted, "a group was admitted twice")
        hold(len(again.rejections) >= len(first.rejections), "what was rejected was let in the second time")
        for rejection in first.rejections:
            self.outcomes[f"rejected: {rejection.reason}"] += 1
        self.outcomes["groups admitted"] += len(first.admitted)
        self.outcomes["messages decoded" if message else "messages refused"] += 1
        self._admit_lastingly(data)

    def manifest(self, data: bytes) -> None:
        try:
            manifest = manifests.parse(data)
        except ManifestError as error:
            self._check_text(str(error))
            self.outcomes["manifests refused"] += 1
            return
        self.outcomes["manifests parsed"] += 1
        hold(manifests.to_bytes(manifest) == data, "a manifest that would be written otherwise was parsed")
        sizes = [manifests.chunk_size(manifest, index) for index in range(len(manifest.chunks))]
        hold(sum(sizes) == manifest.size, "the chunks are not the contents")
        hold(all(0 < size <= manifests.CHUNK_BYTES for size in sizes), "a chunk is empty or too long")
        signer = manifests.signer(data, SEALS.get(data, ANY_SEAL))
        hold(signer == (PUBLIC if data in SEALS else None), "a signature is good for another manifest")

    def _decode(self, data: bytes, limits: Limits) -> Message | None:
        try:
            message = decode(data, limits)
        except CodecError as error:
            self._check_text(str(error))
            return None
        if limits is LIMITS:  # once is enough
            hold(signed(data[:-4]) == data, "a wrong checksum was taken")
            written = encode(message)
            hold(encode(decode(written, ROOMY)) == written, "writing again changed a message")
        hold(len(message.groups) <= limits.max_groups, "more groups than the limit")
        for group in message.groups:
            hold(len(group.rollouts) <= limits.max_rollouts_per_group, "more rollouts than the limit")
            tokens = [len(rollout.gen_logp) for rollout in group.rollouts]
            hold(all(number <= limits.max_completion_length for number in tokens), "more tokens than the limit")
            most = MOST_BYTES * limits.max_completion_length + 1
            hold(all(r.unit is None or len(r) <= most for r in group.rollouts), "more bytes than the limit")
        return message

    def _check(self, admission: Admission, message: Message | None, data: bytes) -> None:
        for rejection in admission.rejections:
            hold(rejection.peer == "ada", "a rejection names another peer")
            self._check_text(rejection.detail)
        whole = [r for r in admission.rejections if r.item is None]
        if whole:
            hold(len(admission.rejections) == 1 and not admission.admitted, "a message rejected, and groups of it")
        if message is None:
            hold(whole and whole[0].reason in (Reason.MALFORMED, Reason.OVER_BUDGET), "no message, and not rejected")
            return
        hold(not whole or whole[0].reason != Reason.MALFORMED, "a message, and rejected as none")
        if whole:
            return
        header = message.header
        hold((header.peer, header.run, header.tokenizer) == ("ada", RUN, TOKENIZER), "another header was let in")
        hold(
            header.round in (ROUND - 1, ROUND) and header.temperature == 1.0, "another round or temperature was let in"
        )
        hold(all(r.reason in OF_A_GROUP for r in admission.rejections), "a group rejected for a message's fault")
        judged = Counter([s.group.item for s in admission.admitted] + [r.item for r in admission.rejections])
        hold(judged == Counter(group.item for group in message.groups), "a group got lost, or was judged twice")
        admitted = [scored.group.item for scored in admission.admitted]
        hold(len(set(admitted)) == len(admitted), "an item was admitted twice")
        for scored in admission.admitted:
            group = scored.group
            hold(group.item in share("ada", header.round), "a prompt of another's share was let in")
            hold((group.peer, group.round) == ("ada", header.round), "a group of another peer or round was let in")
            hold(len(group.rollouts) == G, "a group of another size was let in")
            for rollout, reward in zip(group.rollouts, scored.rewards, strict=True):
                ids, logps = rollout.completion_ids.tolist(), rollout.gen_logp.tolist()
                hold(1 <= len(ids) <= LONGEST and END not in ids[:-1], "too long, empty, or text after the end")
                hold(all(0 <= i < VOCAB for i in ids), "an id outside of the vocabulary was let in")
                hold(all(MIN_LOGP <= p <= 0 for p in logps), "an impossible log-probability was let in")
                earned = [i for i in ids if i != END] == [int(PROMPTS[group.item].answer)]
                hold(reward == float(earned), "a reward that was not earned")

    def _admit_text(self, data: bytes, message: Message) -> None:
        """The admitter of a run that exchanges text: what it admits is the text, in the learner's tokens."""
        admission = text_admitter().admit("ada", data, ROUND)
        sent = {group.item: group.rollouts for group in reversed(message.groups)}
        for scored in admission.admitted:
            for rollout, came in zip(scored.group.rollouts, sent[scored.group.item], strict=True):
                hold(rollout.sent is not None and came.unit is not None, "ids admitted as text")
                assert rollout.sent is not None
                spoken = came.completion_ids[came.completion_ids < END_OF_TEXT]
                hold(rollout.sent.text == spoken.astype(np.uint8).tobytes(), "another text than came")
                ended = rollout.completion_ids[-1] == LEARNER.tokenizer.eos_token_id
                cut = rollout.sent.fault.startswith("it takes")
                hold(cut or ended == (came.completion_ids[-1] >= END_OF_TEXT), "another end than came")
                told, kept = (float(logp.astype(np.float64).sum()) for logp in (came.gen_logp, rollout.gen_logp))
                hold(abs(told - kept) <= 1e-5 * max(1.0, -told), "other log-probabilities than came")
                hold(rollout.sent.size_S.sum() == len(spoken), "sizes that are not the text's")
                hold(rollout.sent.tokens_U.sum() == len(came.gen_logp), "tokens of the sender got lost")
                hold(len(rollout) <= MOST_TOKENS, "more of the learner's tokens than the limit")
                spelt = LEARNER.join(rollout.completion_ids).tobytes() == rollout.sent.text
                hold(spelt or rollout.sent.fault, "tokens that do not spell the text")
        self.outcomes["groups of text admitted"] += len(admission.admitted)

    def _admit_lastingly(self, data: bytes) -> None:
        """One admitter for the whole of the run, as rounds go by: it takes nothing twice and does not grow."""
        if len(data) % 4 == 0:
            self._round += 3  # the shares are those of ROUND again, and all from before is too late
            self._taken.clear()
        if len(data) >= 72 and zlib.crc32(data[:-4]).to_bytes(4, "little") == data[-4:]:
            told = struct.unpack_from("<I", data, 60)[0] + self._round - ROUND
            data = signed(data[:60] + struct.pack("<I", told & 0xFFFF_FFFF) + data[64:-4])
        sender = "bob" if data[68:71] == b"bob" else "ada"
        if sender in self._penalties.skipped(self._round):
            self.outcomes["not heard, being set aside"] += 1
            return
        admission = self._lasting.admit(sender, data, self._round)
        self._penalties.heard(admission, self._round)
        taken = {(sender, scored.group.round, scored.group.item) for scored in admission.admitted}
        hold(len(taken) == len(admission.admitted) and not taken & self._taken, "a group was taken twice")
        self._taken |= taken
        self.outcomes["groups admitted by the lasting admitter"] += len(taken)
        remembered = sum(len(keys) for keys in self._lasting._admitted.values())
        hold(remembered <= 2 * len(PEERS) * 2, f"{remembered} groups of two rounds are remembered")

    def _check_text(self, text: str) -> None:
        hold(len(text) <= LONGEST_TEXT and text.isprintable(), "an error's text is long or not printable")


# ---------------------------------------------------------------------------------------------- the command


@contextlib.contextmanager
def warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        yield


@dataclass
class Storm:
    """What became of many cases."""

    oracle: Oracle
    findings: list[str] = field(default_factory=list)
    slowest_ms: float = 0.0
    slowest_case: int = -1

    large: list[int] = field(default_factory=list)

    @warnings_are_errors()
    def run(self, seed: int, numbers: range, trace_every: int, most_findings: int = 10) -> None:
        for number in numbers:
            kind, data = make(seed, number)
            if len(data) > LARGE:
                self.large.append(number)
            started = time.perf_counter()
            self._case(number, kind, data, trace=number % trace_every == 0 and len(data) <= LARGE)
            if (took := 1000 * (time.perf_counter() - started)) > self.slowest_ms:
                self.slowest_ms, self.slowest_case = took, number
            if len(self.findings) >= most_findings:
                return

    @warnings_are_errors()
    def trace_large(self, seed: int, most: int = 100) -> None:
        """The memory of large cases that were run."""
        for number in self.large[:most]:
            self._case(number, *make(seed, number), trace=True)

    def _case(self, number: int, kind: str, data: bytes, trace: bool) -> None:
        try:
            self.oracle.case(kind, data, trace)
        except Exception as error:
            self.findings.append(f"case {number}: {kind}: {type(error).__name__}: {error}: {data[:200].hex()}")


def most_resident() -> int:
    """The most memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> int:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    parser = argparse.ArgumentParser(description="Hostile messages and manifests, and what must hold for each.")
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--trace-every", type=int, default=50, help="measure the memory of every so many")
    options = parser.parse_args()

    storm = Storm(Oracle())
    storm.run(options.seed, range(options.first, options.first + 100), 1)  # what is loaded late is loaded now
    storm = Storm(Oracle())
    rss_before = rss_at_half = most_resident()
    last, started = options.first + options.cases, time.perf_counter()
    columns = (TextColumn("cases"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[findings]} findings")) as progress:
        bar = progress.add_task("cases", total=options.cases, findings=0)
        for start in range(options.first, last, 1000):
            numbers = range(start, min(start + 1000, last))
            storm.run(options.seed, numbers, options.trace_every)
            progress.update(bar, advance=len(numbers), findings=len(storm.findings))
            if len(storm.findings) >= 10:
                break
            if start < options.first + options.cases // 2:
                rss_at_half = most_resident()
    seconds = time.perf_counter() - started
    rss_growth, second_half = most_resident() - rss_before, most_resident() - rss_at_half
    rss_growth_bound = 2 * memory_bound("manifest", bytes(manifests.MAX_BYTES)) + TOKENIZERS_CACHE
    outcomes = storm.oracle.outcomes.copy()
    storm.trace_large(options.seed)
    if rss_growth > rss_growth_bound:
        storm.findings.append(f"the process grew by {rss_growth:,} bytes, the bound is {rss_growth_bound:,}")
    for finding in storm.findings:
        print(finding)
    for outcome, count in outcomes.most_common():
        print(f"{count:>10,}  {outcome}")
    print(f"{options.cases:,} cases in {seconds:.0f} s, {len(storm.findings)} findings")
    print(f"memory: {storm.oracle.peak_bytes:,} bytes at most in one case, {storm.oracle.fullest:.0%} of its bound;")
    print(f"        the process grew by {rss_growth:,} of at most {rss_growth_bound:,}")
    print(
        json.dumps(
            {
                "cases": options.cases,
                "first": options.first,
                "seed": options.seed,
                "findings": len(storm.findings),
                "seconds": round(seconds, 1),
                "cases_per_second": round(options.cases / seconds),
                "slowest_ms": round(storm.slowest_ms, 2),
                "slowest_case": storm.slowest_case,
                "peak_traced_bytes": storm.oracle.peak_bytes,
                "peak_of_bound": round(storm.oracle.fullest, 3),
                "rss_growth_bytes": rss_growth,
                "rss_growth_second_half_bytes": second_half,
                "rss_growth_bound": rss_growth_bound,
                "outcomes": dict(sorted(outcomes.items())),
            }
        )
    )
    return 1 if storm.findings else 0


if __name__ == "__main__":
    sys.exit(main())
