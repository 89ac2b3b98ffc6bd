"""Units of likelihood of two tokenizers: the shortest pieces of a text at whose ends both have a token's end.

    sender   |The| cat|ast|rophe|!|END|    gen_logp   a  b  c  d  e  f
    learner  |The| cata|strophe  |!|END|   gen_logp   a  b + c + d  e  f
    unit     |0  |1    |1        |2|3  |

The probability of a unit is the product over its tokens, under either tokenizer. A unit's importance weight is then
exp(Σ log π_old − Σ log π_gen). With one tokenizer each token is a unit of its own.

This is exact for a sender and a learner who condition on the same text. If a unit starts inside a longer token that
the learner would have taken, the learner scores a spelling that it rarely samples; docs/tokenizers.md has how often.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ftis.rollouts import Floats, Ints, Rollout
from ftis.text.completions import END, REPLACED, ended, text_of
from ftis.text.token_bytes import TokenBytes

MOST_TOKENS = 8
"""The most tokens of either side in one unit. A longer unit says little about which of its tokens were likely."""

Counts = npt.NDArray[np.integer]


@dataclass(frozen=True, eq=False)
class Aligned:
    """A completion in the learner's tokens, with the sender's log-probability of each unit.

    Attributes:
        rollout: the learner's ids, and units that carry the sender's ``gen_logp``.
        sender_U, learner_U: int64 [U], the number of either side's tokens in each unit, at least one.
        fault: the reason why nothing is learned from the rollout; empty if something is.
    """

    rollout: Rollout
    sender_U: Counts
    learner_U: Counts
    fault: str = ""


def units(sender_S: Counts, learner_T: Counts) -> tuple[Counts, Counts]:
    """The unit of each token of two segmentations of the same bytes: ([S], [T]), from 0, ascending.

    A unit ends at each place where both segmentations have an end.

    Args:
        sender_S, learner_T: how many bytes each token has, at least one, with the same sum.

    Raises:
        ValueError: a token without bytes, or different sums.
    """
    ends = [np.cumsum(sizes, dtype=np.int64) for sizes in (sender_S, learner_T)]
    totals = [int(end[-1]) if len(end) else 0 for end in ends]
    if totals[0] != totals[1] or min(sender_S.min(initial=1), learner_T.min(initial=1)) < 1:
        raise ValueError(
            f"tokens of {totals[0]} and of {totals[1]} bytes: both segment one text, and no token of it is empty"
        )
    both = np.zeros(totals[0] + 1, np.int8)
    for end in ends:
        both[end] += 1
    closed = np.cumsum(both == 2)  # how many units end at or before each place
    return closed[ends[0] - 1], closed[ends[1] - 1]


def align(texts: Sequence[Rollout], learner: TokenBytes, end_id: int) -> list[Aligned]:
    """The learner's rollouts of a sender's texts.

    With the sender's own segmentation a rollout is the one that the sender sampled: ``unit`` is None, and ``gen_logp``
    the sender's, bit for bit. Sums are taken in float64. A text that the learner cannot spell becomes one unit.

    Args:
        texts: completions as text, see :func:`~ftis.text.completions.as_texts`.
        learner: the learner's tokenizer.
        end_id: the learner's own end token. It is appended if the sender ended the completion.
    """
    written = [text_of(text) for text in texts]
    spoken = learner.encode(written)
    spelt = _spelt(spoken, written, learner)
    at_end = np.array([ended(text) for text in texts], dtype=bool)
    stops = np.cumsum([len(ids) for ids in spoken], dtype=np.int64)
    flat = np.insert(np.concatenate([np.zeros(0, np.int32), *spoken]), stops[at_end], end_id)
    own = [flat[start:stop] for start, stop in itertools.pairwise([0, *(stops + np.cumsum(at_end)).tolist()])]
    good = [n for n in range(len(texts)) if spelt[n] and len(own[n])]
    found = dict(zip(good, _in_units([texts[n] for n in good], [own[n] for n in good], learner), strict=True))
    for n, text in enumerate(texts):
        if n not in found:
            ids = own[n] if len(own[n]) else np.array([end_id], np.int32)
            fault = f"the learner's tokenizer cannot spell {written[n][:40]!r}"
            found[n] = Aligned(whole(ids, text.gen_logp), np.array([len(text.gen_logp)]), np.array([len(ids)]), fault)
        elif REPLACED in written[n] and not found[n].fault:
            found[n] = replace(found[n], fault="bytes that are no character")
    return [found[n] for n in range(len(texts))]


def as_sampled(texts: Sequence[Rollout], learner: TokenBytes, end_id: int, end_ids: Sequence[int]) -> list[Aligned]:
    """The rollouts that a sender of the learner's own tokenizer sampled, each token a unit of its own.

    A text with tokens that the vocabulary lacks, or that is no UTF-8, is aligned as any other.

    Args:
        end_ids: the tokens that end a completion for both, in the order in which ends are numbered.
    """
    ends = dict(enumerate(end_ids, start=END))
    found: list[Aligned | None] = []
    for text in texts:
        assert text.unit is not None
        parts = np.split(text.completion_ids, np.flatnonzero(np.diff(text.unit)) + 1)
        ids = [
            ends.get(int(part[0])) if part[0] >= END else learner.id_of.get(part.astype(np.uint8).tobytes())
            for part in parts
        ]
        known = [number for number in ids if number is not None]
        if len(known) < len(ids) or REPLACED in text_of(text):
            found.append(None)
        else:
            one = np.ones(len(ids), np.int64)
            found.append(Aligned(Rollout(np.array(known, np.int32), text.gen_logp), one, one))
    others = iter(align([text for text, one in zip(texts, found, strict=True) if one is None], learner, end_id))
    return [one or next(others) for one in found]


def _in_units(texts: Sequence[Rollout], own: Sequence[Ints], learner: TokenBytes) -> Iterator[Aligned]:
    """Each text in the learner's tokens ``own``, which spell it, with its end.

    All texts are walked as one: both segmentations have an end where a text ends.
    """
    if not texts:
        return
    text_stops, own_stops = (np.cumsum([len(row) for row in rows]) for rows in (texts, own))
    tokens = np.array([len(text.gen_logp) for text in texts])
    unit_M = np.concatenate([np.arange(len(text)) if text.unit is None else text.unit for text in texts])
    unit_M = unit_M + np.repeat(np.cumsum(tokens) - tokens, np.diff(text_stops, prepend=0))
    sizes_T = learner.sizes(np.concatenate(own))
    at_end = np.array([ended(text) for text in texts])
    sizes_T[own_stops[at_end] - 1] = 1
    unit_S, unit_T = units(np.bincount(unit_M), sizes_T)
    sender_U, learner_U = np.bincount(unit_S), np.bincount(unit_T)
    gen_logp = np.concatenate([text.gen_logp for text in texts]).astype(np.float64)
    gen_logp_U = np.add.reduceat(gen_logp, np.cumsum(sender_U) - sender_U).astype(np.float32)
    stops = (unit_T[own_stops - 1] + 1).tolist()
    most = np.maximum.reduceat(np.maximum(sender_U, learner_U), [0, *stops[:-1]]).tolist()
    for ids, own_stop, start, stop, longest in zip(own, own_stops.tolist(), [0, *stops[:-1]], stops, most, strict=True):
        unit = None
        if stop - start < len(ids):
            unit = (unit_T[own_stop - len(ids) : own_stop] - start).astype(np.int32)
        fault = f"a unit of {longest} tokens, the most is {MOST_TOKENS}" if longest > MOST_TOKENS else ""
        yield Aligned(Rollout(ids, gen_logp_U[start:stop], unit), sender_U[start:stop], learner_U[start:stop], fault)


def _spelt(spoken: Sequence[Ints], written: Sequence[str], learner: TokenBytes) -> list[bool]:
    """Whether the tokens of each text have its bytes, each token at least one."""
    ids = np.concatenate([np.zeros(0, np.int32), *spoken])
    sizes, joined = learner.sizes(ids), learner.join(ids).tobytes()
    tokens = np.cumsum([0, *map(len, spoken)])
    places = np.concatenate([[0], np.cumsum(sizes)])[tokens].tolist()
    empty = np.diff(np.concatenate([[0], np.cumsum(sizes == 0)])[tokens]).tolist()
    cut = zip(itertools.pairwise(places), empty, written, strict=True)
    return [not none and joined[start:stop] == text.encode("utf-8") for (start, stop), none, text in cut]


def whole(ids: Ints, gen_logp: Floats) -> Rollout:
    """A completion that is not aligned, as one unit of the learner's tokens ``ids``."""
    return Rollout(ids, gen_logp.sum(dtype=np.float64, keepdims=True).astype(np.float32), np.zeros_like(ids))
