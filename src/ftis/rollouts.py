"""The values that travel through a round, and the axes of their arrays.

    Prompt ──sample──▶ Rollout × G = Group ──score──▶ ScoredGroup ──collate──▶ Batch

A suffix has a letter for each axis: ``logp_NT`` has a row per rollout and a column per token::

    _P  prompts               _T  tokens of a row, padded        _S  tokens of a line
    _N  rollouts              _U  units of likelihood            _L  places of a row
    _R  rollouts with Â ≠ 0   _M  completion tokens, end to end  _Q  tokens of a line that predict
    _V  vocabulary            _H  hidden width                   _X  V or H: a model's output
    _C  components of a mixture                                  _W  mixtures: without π_old, with it

A lower-case letter (``logp_nT``) is a part of that axis, such as a micro-batch's; a 1 is an axis of length 1.

A **unit** carries one importance weight: a token, or a span of tokens that the sender's tokenizer and the learner's
have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
Decode = Callable[[Sequence[int]], str]
"""Token ids -> text."""
Rows = npt.NDArray[np.int64]
"""Indices of rollouts in a batch."""

MIN_LOGP = -100.0
"""The lowest log-probability of a token. In float32, whose smallest normal number is about e^-87, sampling never draws
a less probable token."""


@dataclass(frozen=True)
class Prompt:
    """One problem of a task's split. ``item`` is its index there and names it on the wire."""

    item: int
    question: str
    answer: str
    columns: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}), compare=False)
    """Further columns of the data set, handed to reward functions."""
    round: int | None = None
    """The round of its rollouts, which gives an environment its seed; None outside of training."""


@dataclass(frozen=True, eq=False)
class Sent:
    """A completion as a sender of another tokenizer sampled it.

    Attributes:
        text: in UTF-8, without its ends.
        size_S: int32 [S], the bytes of each of the sender's tokens; 0 for an end token.
        gen_logp_S: float32 [S], log π_gen of each token.
        tokens_U: int32 [U], the number of tokens in each unit.
        fault: the reason to learn nothing from the completion; empty if there is none.
        ends: int32, the number of each end token that the sender sampled, in order; see :mod:`ftis.text.completions`.
    """

    text: bytes
    size_S: Ints
    gen_logp_S: Floats
    tokens_U: Ints
    fault: str = ""
    ends: Ints = field(default_factory=lambda: np.zeros(0, np.int32))


class Observed(NamedTuple):
    """An environment's answer within a completion: int32 ids, which stand before the completion's token ``at``."""

    at: int
    ids: Ints


@dataclass(frozen=True, eq=False)
class Rollout:
    """One completion with the log-probabilities of the distribution it was sampled from.

    An environment may answer between the completion's turns. The model reads the answers. They have no
    log-probability, and nothing is learned from them.

    Attributes:
        completion_ids: int32 [T], T ≥ 1; ends with an end-of-sequence id unless cut at the maximum length.
        gen_logp: float32 [U], log π_gen of each unit, in nats, ≤ 0.
        unit: int32 [T], the unit of each token: 0 … U − 1, ascending. None: each token is a unit of its own, U = T.
        sent: the text as it came; None if ids came.
        observed: the environment's answers, in order.
        overdue: whether the environment took too long for the last turn when this peer first played the whole episode.
            None: this peer has not played it yet.
    """

    completion_ids: Ints
    gen_logp: Floats
    unit: Ints | None = None
    sent: Sent | None = None
    observed: tuple[Observed, ...] = ()
    overdue: bool | None = None

    def __post_init__(self) -> None:
        if self.unit is None:
            if self.completion_ids.ndim != 1 or self.completion_ids.shape != self.gen_logp.shape:
                shapes = f"shapes {self.completion_ids.shape} and {self.gen_logp.shape}"
                raise ValueError(f"a rollout needs one log-probability per token, got {shapes}")
            return
        if self.unit.shape != self.completion_ids.shape:
            raise ValueError(f"unit has shape {self.unit.shape}, completion_ids {self.completion_ids.shape}")
        steps = self.unit[1:] - self.unit[:-1]
        ends = (int(self.unit[0]), int(self.unit[-1]) + 1) if len(self.unit) else (0, 0)
        if ends != (0, len(self.gen_logp)) or ((steps < 0) | (steps > 1)).any():
            raise ValueError(f"unit must number the tokens 0 to {len(self.gen_logp) - 1} in ascending order")

    def __len__(self) -> int:
        return len(self.completion_ids)

    @property
    def read_ids(self) -> Ints:
        """The completion as the model reads it, with the environment's answers: int32 [T + their tokens]."""
        if not self.observed:
            return self.completion_ids
        parts = np.split(self.completion_ids, [at for at, _ in self.observed])
        answers = [*(ids for _, ids in self.observed), np.zeros(0, np.int32)]
        return np.concatenate([ids for pair in zip(parts, answers, strict=True) for ids in pair])

    @property
    def drawn(self) -> Bools:
        """A mask of ``read_ids``: True for the completion's own tokens."""
        places = [at for at, ids in self.observed for _ in ids]
        return np.insert(np.ones(len(self), dtype=bool), np.array(places, np.int64), False)


@dataclass(frozen=True, eq=False)
class Group:
    """One peer's samples for one prompt in one round: G rollouts, or G/m in horizontal mode."""

    peer: str
    round: int
    item: int
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, eq=False)
class ScoredGroup:
    """A group with the texts and rewards that *this* peer computed, never a sender's claims."""

    group: Group
    completions: tuple[str, ...]
    rewards: tuple[float, ...]

    @property
    def has_signal(self) -> bool:
        """Whether the rewards differ. If all are equal, Â = 0."""
        return len(set(self.rewards)) > 1


@dataclass(frozen=True, eq=False)
class Batch:
    """A round's rollouts as one peer learns from them; index n runs over rollouts.

    Attributes:
        prompt_ids: per rollout, int32 [prompt length], under the learner's own template.
        completions: the rollouts' texts.
        reward_N: float64 [N].
        group_N: int64 [N]; rollouts of one prompt and round have the same number, and the same advantage baseline.
        source_N: int64 [N]; the index in ``sources`` of the peer that sampled the rollout.
        own_N: bool [N]; whether the learner sampled the rollout itself.
        item_N, round_N: int64 [N]; the rollout's prompt and the round in which it was sampled.
        sources: names of the peers that sampled, sorted.
    """

    prompt_ids: tuple[Ints, ...]
    rollouts: tuple[Rollout, ...]
    completions: tuple[str, ...]
    reward_N: npt.NDArray[np.float64]
    group_N: npt.NDArray[np.int64]
    source_N: npt.NDArray[np.int64]
    own_N: npt.NDArray[np.bool_]
    item_N: npt.NDArray[np.int64]
    round_N: npt.NDArray[np.int64]
    sources: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.rollouts)

    def own_groups(self) -> list[Rows]:
        """The learner's own rollouts of each prompt."""
        rows = np.flatnonzero(self.own_N)
        rows = rows[np.argsort(self.item_N[rows], kind="stable")]
        return np.split(rows, np.flatnonzero(np.diff(self.item_N[rows])) + 1) if len(rows) else []

    def completion_ids(self, rows: Iterable[int]) -> list[Ints]:
        """The completions of the given rollouts, with an environment's answers."""
        return [self.rollouts[row].read_ids for row in rows]

    def drawn(self, rows: Iterable[int]) -> list[Bools] | None:
        """Masks of ``completion_ids``: True for sampled tokens. None: all are, as without environments."""
        rollouts = [self.rollouts[row] for row in rows]
        return [rollout.drawn for rollout in rollouts] if any(rollout.observed for rollout in rollouts) else None

    def prompts(self, rows: Iterable[int]) -> list[Ints]:
        """The prompt ids of the given rollouts."""
        return [self.prompt_ids[row] for row in rows]


def collate(groups: Iterable[ScoredGroup], prompt_ids: Callable[[int, int], Ints], own: str) -> Batch:
    """Flatten scored groups into a batch. Groups of one prompt and round become one group.

    Rollouts are ordered by round, item and peer, whatever order the groups arrived in.

    Args:
        groups: own and admitted foreign groups.
        prompt_ids: (item, round) → the learner's token ids of the prompt.
        own: the learner's name.
    """
    ordered = sorted(groups, key=lambda s: (s.group.round, s.group.item, s.group.peer))
    sources = tuple(sorted({s.group.peer for s in ordered}))
    prompts = dict.fromkeys((s.group.round, s.group.item) for s in ordered)
    number_of = {prompt: number for number, prompt in enumerate(prompts)}
    rows = [(s, i) for s in ordered for i in range(len(s.group.rollouts))]

    def column(values: Sequence[int]) -> npt.NDArray[np.int64]:
        return np.array(values, dtype=np.int64)

    return Batch(
        prompt_ids=tuple(prompt_ids(s.group.item, s.group.round) for s, _ in rows),
        rollouts=tuple(s.group.rollouts[i] for s, i in rows),
        completions=tuple(s.completions[i] for s, i in rows),
        reward_N=np.array([s.rewards[i] for s, i in rows], dtype=np.float64),
        group_N=column([number_of[s.group.round, s.group.item] for s, _ in rows]),
        source_N=column([sources.index(s.group.peer) for s, _ in rows]),
        own_N=np.array([s.group.peer == own for s, _ in rows], dtype=bool),
        item_N=column([s.group.item for s, _ in rows]),
        round_N=column([s.group.round for s, _ in rows]),
        sources=sources,
    )


def pad(rows: Sequence[npt.NDArray[Any]], fill: float | int = 0) -> npt.NDArray[Any]:
    """Stack rows of unequal length into one array [N, longest], padded on the right with ``fill``."""
    longest = max((len(row) for row in rows), default=0)
    out = np.full((len(rows), longest), fill, dtype=rows[0].dtype if rows else np.float32)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out
