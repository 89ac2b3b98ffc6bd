"""Evidence as a file: what one peer signed, for anybody to check. Pure: bytes in, bytes out.

Numbers are little-endian::

    8 bytes   magic, ``FTISPROF``
    u16       version, 1
    u32       size of the facts, and they: what the run's peers agreed on, as JSON
    u16       number of messages, and they, in the order of their rounds, each as
              u32  size of the manifest, and it
              96   the seal: public key and signature
              u32  size of the contents, and they

The sender's signature covers the run's digest, which is the digest of the facts, and the digests of the contents. So a
reader with the run's roster believes nobody: neither who sent the bundle, nor who wrote it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from ftis.codec import LONGEST_NAME, CodecError, Limits, Reader, decode, message_size
from ftis.config import FtisError
from ftis.honesty.contexts import START
from ftis.honesty.evidence import share_of
from ftis.honesty.proof import ALPHA, Spot, evidence_in, nats_needed
from ftis.rollouts import MIN_LOGP, Group
from ftis.swarm import manifest as manifests
from ftis.swarm.chunks import Assembly
from ftis.swarm.facts import MAX_FACTS_BYTES, Sizes, canonical, read_facts, run_id
from ftis.swarm.identity import Roster, roster_digest
from ftis.swarm.manifest import Manifest, ManifestError
from ftis.swarm.offers import OfferCheck, Refusal

MAGIC, VERSION = b"FTISPROF", 1
MOST_BYTES = 128 * 2**20
"""The most bytes of a bundle."""
MOST_MESSAGES = 64
MOST_ROLLOUTS = 2**14
"""The most rollouts of one message by the facts: four times as many may be read, and take 1 kB each."""
MOST_TOKENS = 2**23
"""The most tokens of one message by the facts, with every rollout as long as the run allows."""
MOST_TOKENS_READ = 2**23
"""The most tokens that a bundle holds: to weigh so many takes ten seconds."""
SLACK = 2
"""Counts up to so many times what the run allows are read, as admission reads them: a liar must not escape by adding to
its message what is left out."""
SEAL_BYTES = 96
_HEAD, _SIZE, _COUNT = struct.Struct("<8sH"), struct.Struct("<I"), struct.Struct("<H")


class BundleError(FtisError):
    """The bytes are not evidence, or not of this run."""


@dataclass(frozen=True)
class Signed:
    """One message as its sender signed it."""

    document: bytes
    seal: bytes
    contents: bytes

    def to_bytes(self) -> bytes:
        sizes = _SIZE.pack(len(self.document)), _SIZE.pack(len(self.contents))
        return b"".join([sizes[0], self.document, self.seal, sizes[1], self.contents])

    @classmethod
    def read(cls, reader: Reader) -> Signed:
        """
        Raises:
            CodecError: its sizes do not fit the bytes present.
        """
        document = reader.take(_number(reader, _SIZE, "the size of a manifest"), "a manifest")
        seal = reader.take(SEAL_BYTES, "a seal")
        return cls(document, seal, reader.take(_number(reader, _SIZE, "the size of a message"), "a message"))

    @cached_property
    def offer(self) -> Manifest:
        """
        Raises:
            BundleError: the document is not a manifest.
        """
        try:
            return manifests.parse(self.document)
        except ManifestError as error:
            raise BundleError(f"the bundle holds something else than a manifest: {error}") from None


@dataclass(frozen=True)
class Bundle:
    """What one peer signed, and the facts of the run."""

    facts: Mapping[str, Any]
    messages: Sequence[Signed]

    def to_bytes(self) -> bytes:
        facts = _canonical(self.facts)
        head = [_HEAD.pack(MAGIC, VERSION), _SIZE.pack(len(facts)), facts, _COUNT.pack(len(self.messages))]
        return b"".join([*head, *(message.to_bytes() for message in self.messages)])

    @classmethod
    def read(cls, data: bytes) -> Bundle:
        """
        Raises:
            BundleError: the bytes are not a bundle.
        """
        if len(data) > MOST_BYTES:
            raise BundleError(f"the bundle has more than {MOST_BYTES} bytes")
        if data[: len(MAGIC)] != MAGIC:
            raise BundleError("this is not evidence of ftis: give a file that ftis join wrote under evidence/")
        reader = Reader(data, len(MAGIC), len(data))
        try:
            if (version := _number(reader, _COUNT, "the version")) != VERSION:
                raise BundleError(f"the bundle has version {version}, this ftis reads version {VERSION}")
            size = _number(reader, _SIZE, "the size of the facts")
            if size > MAX_FACTS_BYTES:
                raise BundleError(f"facts of {size} bytes exceed {MAX_FACTS_BYTES}")
            written = reader.take(size, "the facts")
            facts = read_facts(written)
            if facts is None:
                raise BundleError("the facts of the run are not a JSON object")
            if _canonical(facts) != written:
                raise BundleError("the facts of the run are not written in their one way")
            count = _number(reader, _COUNT, "the number of messages")
            if not 1 <= count <= MOST_MESSAGES:
                raise BundleError(f"{count} messages are not 1 to {MOST_MESSAGES}")
            messages = [Signed.read(reader) for _ in range(count)]
        except CodecError as error:
            raise BundleError(f"the bundle is cut short or altered: {error}") from None
        if reader.at != len(data):
            raise BundleError(f"the bundle ends at byte {reader.at}, the file at {len(data)}")
        return cls(facts, messages)


@dataclass(frozen=True)
class Finding:
    """What a bundle says of its sender.

    Attributes:
        rounds: of the messages, counted from 0.
        nats: the evidence that the tokens were not drawn from the log-probabilities reported.
        needed: the evidence from which on it is proof.
    """

    peer: str
    run: str
    rounds: tuple[int, ...]
    nats: float
    needed: float

    @property
    def is_proof(self) -> bool:
        return self.nats >= self.needed


def read_file(path: Path) -> Bundle:
    """
    Raises:
        BundleError: the file cannot be read, or is not a bundle.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error}") from None
    return Bundle.read(data)


def examine(bundle: Bundle, roster: Roster, alpha: float = ALPHA) -> Finding:
    """What ``bundle`` says of its sender at level ``alpha``, whoever wrote it.

    Args:
        roster: the run's.

    Raises:
        BundleError: the messages are not all of one peer of this roster and one run, in order, and unaltered.
    """
    offers = [message.offer for message in bundle.messages]
    peer = offers[0].peer
    run, sizes = run_id(bundle.facts), Sizes.of(bundle.facts)
    if sizes is None:
        raise BundleError("the facts do not say who took part in the run and how large its messages are")
    for offer in offers:
        if offer.run != run:
            signed = f"{peer} signed round {offer.round + 1} for run {offer.run}"
            raise BundleError(f"{signed}, the bundle is about run {run}")
        if offer.peer != peer:
            raise BundleError(f"the bundle holds messages of two peers, {peer} and {offer.peer}")
    for before, offer in pairwise(offers):
        if offer.round <= before.round:
            order = f"round {offer.round + 1} comes after round {before.round + 1}"
            raise BundleError(f"{order}: each counts once, in order")
        if offer.incarnation < before.incarnation:
            raise BundleError(f"round {offer.round + 1} is of an earlier start of {peer} than round {before.round + 1}")
    if peer not in sizes.peers:
        raise BundleError(f"{peer} did not take part in the run, by its facts")
    if peer not in roster:
        raise BundleError(f"the roster has no key for {peer}: give the roster of the run")
    if bundle.facts.get("roster") != roster_digest(roster):
        raise BundleError(f"this is not the roster of run {run}: give the file that its peers were given")
    limits = _limits(sizes)
    check = OfferCheck(run, offers[-1].round + 1, roster, limits.max_bytes, limits.max_groups)
    for message, offer in zip(bundle.messages, offers, strict=True):
        read = check.read(peer, offer.round, message.document, message.seal)
        if isinstance(read, Refusal):
            raise BundleError(f"round {offer.round + 1} of {peer} is refused as {read.reason}: {read.detail}")
    spots = [Spot(offer.round, offer.incarnation) for offer in offers]
    nats = evidence_in(_groups(bundle.messages, sizes, limits), sizes.groups_sampled, share_of(sizes.tokens))
    return Finding(peer, run, tuple(spot.round for spot in spots), nats, nats_needed(spots, len(sizes.peers), alpha))


def strongest(facts: Mapping[str, Any], kept: Sequence[Signed], roster: Roster) -> tuple[Bundle, Finding]:
    """The shortest window of the newest messages that is proof, of 1, 2, 4, …; all of them where none is.

    Args:
        kept: one peer's messages in the order of their rounds. Those that nobody could check are left out.

    Raises:
        BundleError: none is left.
    """
    usable = _usable(facts, kept, roster)
    size, bundle = 1, Bundle(facts, usable[-1:])
    finding = examine(bundle, roster)
    while not finding.is_proof and size < len(usable):
        size *= 2
        longer = Bundle(facts, usable[-size:])
        try:
            bundle, finding = longer, examine(longer, roster)
        except BundleError:  # too much to read
            break
    return bundle, finding


def _usable(facts: Mapping[str, Any], kept: Sequence[Signed], roster: Roster) -> list[Signed]:
    usable: list[Signed] = []
    why = ""
    for message in reversed(kept[-MOST_MESSAGES:]):
        try:
            examine(Bundle(facts, [message]), roster)
        except BundleError as error:
            why = f" ({error})"
            continue
        if not usable or message.offer.incarnation <= usable[-1].offer.incarnation:
            usable.append(message)
    if not usable:
        raise BundleError(f"of {len(kept)} messages kept there is none that others could check{why}")
    return usable[::-1]


def _limits(sizes: Sizes) -> Limits:
    """The most that is read of one message: what the run allows."""
    rollouts = sizes.groups * sizes.rollouts
    tokens = rollouts * sizes.tokens
    if rollouts > MOST_ROLLOUTS or tokens > MOST_TOKENS:
        raise BundleError(
            f"messages of this run may hold {rollouts} rollouts and {tokens} tokens, at most {MOST_ROLLOUTS} and "
            f"{MOST_TOKENS} are read"
        )
    most_bytes = message_size(tokens, rollouts, sizes.groups, "x" * LONGEST_NAME, sizes.text)
    return Limits(most_bytes, SLACK * sizes.groups, SLACK * sizes.rollouts, SLACK * sizes.tokens)


def _groups(messages: Iterable[Signed], sizes: Sizes, limits: Limits) -> Iterator[Sequence[Group]]:
    """The groups of each message, once its contents are found to be what was signed."""
    tokens = 0
    for message in messages:
        offer, place = message.offer, f"round {message.offer.round + 1} of {message.offer.peer}"
        assembly = Assembly(offer)
        for index in assembly.missing():
            at = index * manifests.CHUNK_BYTES
            assembly.hear(index, message.contents[at : at + manifests.chunk_size(offer, index)])
        contents = assembly.contents()
        if contents is None or len(message.contents) != offer.size:
            raise BundleError(f"{place}: the contents are not what was signed")
        try:
            decoded = decode(contents, limits)
        except CodecError as error:
            raise BundleError(f"{place}: the contents cannot be read: {error}") from None
        tokens += sum(len(rollout) for group in decoded.groups for rollout in group.rollouts)
        if tokens > MOST_TOKENS_READ:
            raise BundleError(f"{place}: with it the bundle holds {tokens} tokens, at most {MOST_TOKENS_READ} are read")
        if (decoded.header.round, decoded.header.peer) != (offer.round, offer.peer):
            raise BundleError(f"{place}: the contents are {decoded.header.peer}'s for round {decoded.header.round + 1}")
        of_item = {group.item: group for group in reversed(decoded.groups)}  # the first of each
        yield [group for group in of_item.values() if _is_possible(group, sizes)]


def _is_possible(group: Group, sizes: Sizes) -> bool:
    """Whether an honest peer may have sent the group. Others are not admitted anywhere, and count for nothing here."""
    if len(group.rollouts) > sizes.rollouts:
        return False
    for rollout in group.rollouts:
        ids, logp = rollout.completion_ids, rollout.gen_logp
        if not 1 <= len(logp) <= sizes.tokens or int(ids.min()) < 0 or int(ids.max()) >= START:
            return False
        if (rollout.unit is not None) != sizes.text:
            return False
        if not ((logp <= 0) & (logp >= MIN_LOGP)).all():  # false of NaN as well
            return False
    return True


def _canonical(facts: Mapping[str, Any]) -> bytes:
    try:
        return canonical(facts)
    except RecursionError:
        raise BundleError("the facts of the run are nested too deeply") from None


def _number(reader: Reader, form: struct.Struct, what: str) -> int:
    (number,) = form.unpack(reader.take(form.size, what))
    return int(number)
