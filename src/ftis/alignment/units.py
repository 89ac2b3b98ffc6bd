"""Units of likelihood of two tokenizers: the shortest pieces of a text at whose ends both have a token's end.

    sender   |The| cat|ast|rophe|!|END|    gen_logp   a  b  c  d  e  f
    learner  |The| cata|strophe  |!|END|   gen_logp   a  b + c + d  e  f
    unit     |0  |1    |1        |2|3  |

The probability of a unit is the product over its tokens, under either tokenizer. A unit's importance weight is then
exp(Σ log π_old − Σ log π_gen). With one tokenizer each token is a unit of its own.

This is exact for a sender and a learner who condition on the same text. Where a unit starts inside a longer token that
the learner would have taken, the learner scores a spelling that it rarely samples; docs/tokenizers.md has how often.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ftis.alignment.text import REPLACED, ended, text_of
from ftis.alignment.token_bytes import TokenBytes
from ftis.rollouts import Ints, Rollout

MOST_TOKENS = 8
"""The most tokens of either side in one unit. A longer unit says little about which of its tokens were likely."""

_REPLACED = REPLACED.encode("utf-8")

Counts = npt.NDArray[np.integer]


@dataclass(frozen=True, eq=False)
class Aligned:
    """A completion in the learner's tokens, with the sender's log-probability of each unit.

    Attributes:
        rollout: the learner's ids, and units that carry the sender's ``gen_logp``.
        sender_U, learner_U: int64 [U], how many tokens each side has in each unit, at least one.
        fault: why the rollout is not learned from; empty where it is.
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
        texts: completions as text, see :func:`~ftis.alignment.text.as_text`.
        learner: the learner's tokenizer.
        end_id: the learner's own end token. It is appended where the sender ended the completion.
    """
    encoded = learner.encode([text_of(text) for text in texts])
    return [_align(text, learner, ids, end_id) for text, ids in zip(texts, encoded, strict=True)]


def _align(text: Rollout, learner: TokenBytes, ids: Ints, end_id: int) -> Aligned:
    sizes, written = learner.sizes(ids), text.completion_ids
    if ended(text):
        written, ids, sizes = written[:-1], np.append(ids, np.int32(end_id)), np.append(sizes, np.int32(1))
    if not np.array_equal(learner.join(ids), written) or not sizes.all():
        return _one_unit(text, ids if len(ids) else np.array([end_id], np.int32))
    sender_S = np.bincount(text.unit) if text.unit is not None else np.ones(len(text), np.int64)
    unit_S, unit_T = units(sender_S, sizes)
    sender_U, learner_U = np.bincount(unit_S), np.bincount(unit_T)
    gen_logp = text.gen_logp
    if len(sender_U) < len(gen_logp):
        starts = np.cumsum(sender_U) - sender_U
        gen_logp = np.add.reduceat(gen_logp.astype(np.float64), starts).astype(np.float32)
    rollout = Rollout(ids, gen_logp, None if len(learner_U) == len(ids) else unit_T.astype(np.int32))
    fault = ""
    if (longest := int(max(sender_U.max(initial=0), learner_U.max(initial=0)))) > MOST_TOKENS:
        fault = f"a unit of {longest} tokens, the most is {MOST_TOKENS}"
    elif _REPLACED in written.astype(np.uint8).tobytes():
        fault = "bytes that are no character"
    return Aligned(rollout, sender_U, learner_U, fault)


def _one_unit(text: Rollout, ids: Ints) -> Aligned:
    whole = Rollout(ids, text.gen_logp.sum(dtype=np.float64, keepdims=True).astype(np.float32), np.zeros_like(ids))
    counts = np.array([len(text.gen_logp)]), np.array([len(ids)])
    return Aligned(whole, *counts, f"the learner's tokenizer cannot spell {text_of(text)[:40]!r}")
