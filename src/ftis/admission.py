"""Admission: bytes from a peer → admitted groups, and rejections with a reason.

Each statement of a message is checked against the :class:`Terms` of the run. Only log-probabilities in range are taken
as reported. The reward is computed here, from the tokens, with this peer's own scorer. A fault of the message rejects
the message. A fault of a group rejects that whole group, since its advantages need all of its rollouts; the
other groups stay. Nothing that a peer sends raises an exception. Detokenising and scoring cost most. They happen at
most once for each group assigned to a peer, however much it sends; with stop strings a group is detokenised twice.

The exchange establishes the sender of a message, and bounds the number of messages. docs/threat-model.md lists the
defence against each attack.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from ftis.codec import LONGEST_NAME, CodecError, Header, Limits, decode, largest_message
from ftis.config import FtisError
from ftis.episodes import EpisodeError, Episodes, UnplayableError
from ftis.rollouts import MIN_LOGP, Decode, Group, Prompt, ScoredGroup

_SLACK = 2
"""Decoding allows this many times the agreed counts. So a group that is too large is rejected, and the rest of its
message is not. The limit of bytes has no such slack."""


class ScoringError(FtisError):
    """This peer's reward function fails on a completion."""


Score = Callable[[Prompt, Sequence[str], Sequence[Sequence[int]]], tuple[float, ...]]
"""(prompt, completions, their token ids) -> a reward for each."""


class Reason(StrEnum):
    """The reason why a message (first part) or one of its groups (second part) was rejected."""

    NOT_IN_ROSTER = "not_in_roster"
    """The sender is no peer of this run."""
    OVER_BUDGET = "over_budget"
    """More bytes or groups than the prompts assigned to the sender can have."""
    MALFORMED = "malformed"
    """The bytes are not a message."""
    WRONG_SENDER = "wrong_sender"
    """The header names another peer than the sender."""
    FORGED = "forged"
    """An offer without the signature of the peer that it names, so somebody else sent it."""
    EQUIVOCATION = "equivocation"
    """Two different offers for one round, both signed by the sender."""
    CORRUPT = "corrupt"
    """The contents differ from those that the sender signed."""
    SET_ASIDE = "set_aside"
    """Not decoded: a selection skips the sender in this round, as penalties and the honesty test do."""
    UNSCORED = "unscored"
    """This peer's reward function fails on a completion of the group."""
    OVER_TIME = "over_time"
    """Not judged within the time a message may take."""
    WRONG_RUN = "wrong_run"
    WRONG_ROUND = "wrong_round"
    """Neither the current round nor within ``max_staleness`` before it."""
    WRONG_TOKENIZER = "wrong_tokenizer"
    WRONG_SAMPLING = "wrong_sampling"
    """The temperature is not the agreed one, or top_p is not in (0, 1]. No check shows whether they were used."""

    UNKNOWN_PROMPT = "unknown_prompt"
    """The item lies outside the task."""
    NOT_THEIR_PROMPT = "not_their_prompt"
    """The item is not assigned to the sender in that round."""
    DUPLICATE = "duplicate"
    """The item occurs earlier in the message, or was admitted from this peer for that round before."""
    WRONG_GROUP_SIZE = "wrong_group_size"
    EMPTY = "empty"
    """A completion without tokens."""
    TOO_LONG = "too_long"
    TOKEN_OUT_OF_RANGE = "token_out_of_range"
    TOKENS_AFTER_END = "tokens_after_end"
    """An end-of-sequence id before the last position, or tokens after a stop string."""
    UNPLAYABLE = "unplayable"
    """A completion that no episode of the environment has: it goes on after its end, or stops between turns."""
    BAD_LOGP = "bad_logp"
    """NaN, above 0 or below :data:`~ftis.rollouts.MIN_LOGP`."""


@dataclass(frozen=True)
class Rejection:
    """A message or group that was not admitted. ``item`` is None for a whole message."""

    peer: str
    reason: Reason
    item: int | None
    detail: str


@dataclass(frozen=True)
class Admission:
    """The outcome of one message.

    Attributes:
        peer: the sender, as the exchange established it.
        passed_over: groups of assigned prompts that this peer does not want.
    """

    peer: str
    admitted: tuple[ScoredGroup, ...]
    rejections: tuple[Rejection, ...]
    passed_over: tuple[Group, ...] = ()


@dataclass(frozen=True)
class Collected:
    """The other peers' messages of a round.

    Attributes:
        messages: the other peers' messages for the round, by sender.
        missing: peers that did not deliver.
        late: (sender, round, message) of earlier rounds.
        offered_only: by peer of ``Outgoing.offers_only``, the number of groups in its offer, which was not fetched.
        rejections: of offers, before anything was fetched.
        waited: over a network, the seconds for which the round waited for each peer.
    """

    messages: Mapping[str, bytes]
    missing: tuple[str, ...] = ()
    late: tuple[tuple[str, int, bytes], ...] = ()
    offered_only: Mapping[str, int] = field(default_factory=dict)
    rejections: tuple[Rejection, ...] = ()
    waited: Mapping[str, float] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, eq=False)
class Terms:
    """The agreements of a run that a message can break.

    Attributes:
        run, tokenizer: 32 hex digits each, as in the header. None: messages hold text.
        vocab_size: ids lie in 0 … vocab_size − 1; this peer's model embeds all of them, and its tokenizer decodes them.
        end_ids: the ids that end a completion for every peer.
        group_size: rollouts that one peer samples for a prompt: G, or G/m in horizontal mode.
        stop: strings that end a completion for every peer; its text ends with the first of them.
        max_staleness: the most rounds by which a message may be late.
        prompts: the training split; a group's item is an index into it.
        assigned: (peer, round) → the items that a roster member may sample then, equally many in every round.
        roster: the names of all peers.
        max_groups: the most groups of one message.
        wanted: (peer, round) → the assigned items that this peer learns from; None: all. Other groups are passed
            over: neither their rollouts are checked nor their rewards computed.
        max_seconds: after so many no further group of one message is judged; the groups left are rejected.
    """

    run: str
    tokenizer: str | None
    temperature: float
    vocab_size: int
    end_ids: frozenset[int]
    group_size: int
    max_completion_length: int
    prompts: Sequence[Prompt]
    assigned: Callable[[str, int], Collection[int]]
    roster: frozenset[str]
    max_groups: int
    wanted: Callable[[str, int], Collection[int]] | None = None
    stop: tuple[str, ...] = ()
    max_staleness: int = 0
    max_seconds: float = math.inf

    @property
    def limits(self) -> Limits:
        """The most that is decoded of one message. A round needs no message larger than ``max_bytes``."""
        groups, text = self.max_groups, self.tokenizer is None
        rollouts, name = groups * self.group_size, "x" * LONGEST_NAME
        return Limits(
            max_bytes=largest_message(rollouts * self.max_completion_length, rollouts, groups, name, text),
            max_groups=_SLACK * groups,
            max_rollouts_per_group=_SLACK * self.group_size,
            max_completion_length=_SLACK * self.max_completion_length,
        )


class Admitter:
    """A judge of messages under fixed terms. It remembers admitted groups as long as a repeat could be admitted.

    Args:
        score: this peer's own reward function.
        detokenize: ids of this peer's tokenizer -> text up to the end of the first stop string.
        spoken: the same for the ids of a message; None: messages hold this peer's ids.
        read: (an admissible group, its sender's tokenizer) -> the group in this peer's ids; None: groups hold these.
        episodes: of this peer's copy of the environment; None: the task has no environment.
    """

    def __init__(
        self,
        terms: Terms,
        score: Score,
        detokenize: Decode,
        spoken: Decode | None = None,
        read: Callable[[Group, str], Group] | None = None,
        episodes: Episodes | None = None,
    ) -> None:
        self.terms, self.score, self.detokenize = terms, score, detokenize
        self._spoken, self._read = spoken or detokenize, read or (lambda group, tokenizer: group)
        self.episodes = episodes
        self._limits = terms.limits
        self._ends_V = np.isin(np.arange(terms.vocab_size), sorted(terms.end_ids))
        self._admitted: dict[int, set[tuple[str, int]]] = {}  # round -> (peer, item)

    def admit(self, sender: str, data: bytes, round: int, offered_for: int | None = None) -> Admission:
        """Judge one message.

        Args:
            sender: the peer that sent it, as the exchange established it.
            round: the receiver's current round.
            offered_for: the round for which the sender offered the message; None: the header alone names a round.

        Raises:
            Exception: every error of the scorer or the detokenizer, except ScoringError. Nothing of the message is
                remembered then.
        """
        self._forget_before(round - self.terms.max_staleness)
        if sender not in self.terms.roster:
            return rejected(sender, Reason.NOT_IN_ROSTER, f"{sender!r} is no peer of this run")
        if len(data) > self._limits.max_bytes:
            return rejected(
                sender, Reason.OVER_BUDGET, f"{len(data)} bytes, a full message has at most {self._limits.max_bytes}"
            )
        try:
            message = decode(data, self._limits)
        except CodecError as error:
            return rejected(sender, Reason.MALFORMED, str(error))
        header = message.header
        if fault := self._header_fault(header, sender, round, offered_for):
            return rejected(sender, *fault)
        assigned = frozenset(self.terms.assigned(sender, header.round))
        if len(message.groups) > (most := self.terms.max_groups):
            return rejected(sender, Reason.OVER_BUDGET, f"{len(message.groups)} groups, a message has at most {most}")

        admitted: list[ScoredGroup] = []
        rejections: list[Rejection] = []
        give_up = time.monotonic() + self.terms.max_seconds
        wanted = frozenset(self.terms.wanted(sender, header.round)) if self.terms.wanted else assigned
        passed_over: list[Group] = []
        remembered = self._admitted.get(header.round, set())
        seen: set[int] = set()
        for group in message.groups:
            again = group.item in seen or (sender, group.item) in remembered
            seen.add(group.item)
            fault = self._prompt_fault(group, assigned, again)
            if fault is None and group.item not in wanted:
                passed_over.append(group)
                continue
            fault = fault or self._rollouts_fault(group)
            if fault is None and time.monotonic() > give_up:
                fault = Reason.OVER_TIME, f"not judged within {self.terms.max_seconds:g} s"
            if fault := fault or self._stop_fault(group):
                rejections.append(Rejection(sender, fault[0], group.item, fault[1]))
                continue
            try:
                scored = self._scored(self._read(group, header.tokenizer), group, self._spoken)
                if overdue := [row for row, rollout in enumerate(scored.group.rollouts) if rollout.overdue]:
                    raise EpisodeError(f"rollout {overdue[0]}: the environment took too long here for its last turn")
                admitted.append(scored)
            except UnplayableError as error:
                rejections.append(Rejection(sender, Reason.UNPLAYABLE, group.item, str(error)))
            except (ScoringError, EpisodeError) as error:
                rejections.append(Rejection(sender, Reason.UNSCORED, group.item, str(error)))
        if admitted:
            keys = {(sender, scored.group.item) for scored in admitted}
            self._admitted.setdefault(header.round, set()).update(keys)
        return Admission(sender, tuple(admitted), tuple(rejections), tuple(passed_over))

    def _forget_before(self, oldest: int) -> None:
        self._admitted = {round: groups for round, groups in self._admitted.items() if round >= oldest}

    def score_group(self, group: Group) -> ScoredGroup:
        """A group of this peer's own ids, with the text and the reward of each completion."""
        return self._scored(group, group, self.detokenize)

    def _scored(self, group: Group, came: Group, decode: Decode) -> ScoredGroup:
        """A group in this peer's ids with texts and rewards; ``decode`` reads the texts of the group as it ``came``."""
        prompt, rewards = replace(self.terms.prompts[group.item], round=group.round), tuple[float, ...]()
        if self.episodes is None:
            completions = tuple(decode(rollout.completion_ids.tolist()) for rollout in came.rollouts)
        else:
            group, completions, rewards = self.episodes.judge(prompt, group)
        ids = [rollout.completion_ids.tolist() for rollout in group.rollouts]
        rewards = rewards or tuple(self.score(prompt, completions, ids))
        if len(rewards) != len(completions):
            raise ValueError(f"the scorer gave {len(rewards)} rewards for {len(completions)} completions")
        return ScoredGroup(group, completions, rewards)

    def _header_fault(
        self, header: Header, sender: str, round: int, offered_for: int | None
    ) -> tuple[Reason, str] | None:
        terms = self.terms
        if header.peer != sender:
            return Reason.WRONG_SENDER, f"speaks for {header.peer!r}, sent by {sender!r}"
        if header.run != terms.run:
            return Reason.WRONG_RUN, f"run {header.run}, this is {terms.run}: recipe or task differ"
        if not round - terms.max_staleness <= header.round <= round:
            there = f"round {header.round + 1}, this is {round + 1}"
            return Reason.WRONG_ROUND, f"{there}, and network.max_staleness = {terms.max_staleness}"
        if offered_for not in (None, header.round):  # groups of a later round, sent as old, would be tested less
            return Reason.WRONG_ROUND, f"round {header.round + 1}, offered for round {offered_for + 1}"
        if terms.tokenizer not in (None, header.tokenizer):
            return Reason.WRONG_TOKENIZER, f"tokenizer {header.tokenizer}, this run's is {terms.tokenizer}"
        if header.temperature != terms.temperature:  # true of NaN as well
            return Reason.WRONG_SAMPLING, f"temperature {header.temperature}, this run's is {terms.temperature}"
        if not 0 < header.top_p <= 1:
            return Reason.WRONG_SAMPLING, f"top_p {header.top_p} is not above 0 and at most 1"
        return None

    def _prompt_fault(self, group: Group, assigned: frozenset[int], again: bool) -> tuple[Reason, str] | None:
        if group.item >= len(self.terms.prompts):
            return Reason.UNKNOWN_PROMPT, f"item {group.item}, the task has {len(self.terms.prompts)}"
        if group.item not in assigned:
            return Reason.NOT_THEIR_PROMPT, f"item {group.item} is not assigned to it in round {group.round + 1}"
        if again:
            return Reason.DUPLICATE, f"item {group.item} of round {group.round + 1} was sent before"
        return None

    def _rollouts_fault(self, group: Group) -> tuple[Reason, str] | None:
        terms = self.terms
        if len(group.rollouts) != terms.group_size:
            return Reason.WRONG_GROUP_SIZE, f"{len(group.rollouts)} rollouts, a group has {terms.group_size}"
        if any(rollout.unit is not None for rollout in group.rollouts) != (terms.tokenizer is None):
            return Reason.WRONG_TOKENIZER, "ids instead of this run's text, or text instead of its ids"
        tokens = [len(rollout.gen_logp) for rollout in group.rollouts]
        if 0 in tokens:
            return Reason.EMPTY, f"rollout {tokens.index(0)} has no tokens"
        if (longest := max(tokens)) > terms.max_completion_length:
            first = f"rollout {tokens.index(longest)}"
            return Reason.TOO_LONG, f"{first} has {longest} tokens, the most is {terms.max_completion_length}"

        # All rollouts' ids end to end: tokens, or the bytes of texts, whose log-probabilities are of units.
        ids = np.concatenate([rollout.completion_ids for rollout in group.rollouts])
        logp = np.concatenate([rollout.gen_logp for rollout in group.rollouts])
        lengths = [len(rollout) for rollout in group.rollouts]

        def place(index: int, lengths: Sequence[int]) -> str:
            rollout = int(np.searchsorted(np.cumsum(lengths), index, side="right"))
            return f"rollout {rollout}, token {index - sum(lengths[:rollout])}"

        if ids.max() >= terms.vocab_size:
            where = place(at := int((ids >= terms.vocab_size).argmax()), lengths)
            return Reason.TOKEN_OUT_OF_RANGE, f"{where}: id {int(ids[at])}, the vocabulary has {terms.vocab_size}"

        ends = self._ends_V[ids]
        ends[np.cumsum(lengths) - 1] = False
        if self.episodes is None and ends.any():
            where = place(at := int(ends.argmax()), lengths)
            return Reason.TOKENS_AFTER_END, f"{where}: id {int(ids[at])} ends the completion, more follows"
        if not (logp.min() >= MIN_LOGP and logp.max() <= 0):  # not true of NaN either
            where = place(at := int((~((logp >= MIN_LOGP) & (logp <= 0))).argmax()), tokens)
            return Reason.BAD_LOGP, f"{where}: log-probability {float(logp[at])} is not in [{MIN_LOGP:g}, 0]"
        return None

    def _stop_fault(self, group: Group) -> tuple[Reason, str] | None:
        for row, rollout in enumerate(group.rollouts if self.terms.stop and self.episodes is None else ()):
            last = 1 if rollout.unit is None else int((rollout.unit == rollout.unit[-1]).sum())
            if self._spoken(rollout.completion_ids[:-last].tolist()).endswith(self.terms.stop):
                return Reason.TOKENS_AFTER_END, f"rollout {row}: a stop string is complete before its last token"
        return None


def rejected(peer: str, reason: Reason, detail: str) -> Admission:
    """A whole message rejected for ``reason``."""
    return Admission(peer, (), (Rejection(peer, reason, None, detail),))
