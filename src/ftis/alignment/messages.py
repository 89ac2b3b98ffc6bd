"""Messages of text: what a peer writes of its own groups, and what it makes of others'."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ftis.admission import Terms
from ftis.alignment.text import END, as_texts, text_of
from ftis.alignment.token_bytes import TokenBytes
from ftis.alignment.units import Aligned, align, as_sampled, one_unit
from ftis.rollouts import Group, Rollout, Sent


def write_groups(
    groups: Sequence[Group], known: TokenBytes, end_ids: Collection[int], most_bytes: int = sys.maxsize
) -> list[Group]:
    """Groups of this peer's tokens as text; see :func:`~ftis.alignment.text.as_texts`. What is text already stays."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    texts = iter(as_texts([rollout for rollout in rollouts if rollout.unit is None], known, end_ids, most_bytes))

    def written(rollout: Rollout) -> Rollout:
        return next(texts) if rollout.unit is None else rollout

    return [replace(group, rollouts=tuple(map(written, group.rollouts))) for group in groups]


def terms_of_text(terms: Terms) -> Terms:
    """Those on which messages of text are judged: over their bytes, by the rules for any message."""
    return replace(terms, tokenizer=None, vocab_size=END + 1, end_ids=frozenset({END}))


def spoken(ids: Sequence[int]) -> str:
    """The text of bytes, where a part of a character at the end counts as one."""
    return bytes(byte for byte in ids if byte != END).decode("utf-8", "replace")


@dataclass(frozen=True)
class TextReader:
    """Makes groups of this peer's tokens out of groups of text.

    Attributes:
        tokenizer: the fingerprint of this peer's own. What a sender with the same sampled is read as sampled.
        known: this peer's tokenizer.
        end_id: this peer's token for the end of others' completions.
        most_tokens: item → the most of this peer's tokens of a completion from which it learns.
    """

    tokenizer: str | None
    known: TokenBytes
    end_id: int
    most_tokens: Callable[[int], int]

    def __call__(self, group: Group, tokenizer: str) -> Group:
        """The group in this peer's tokens, beside what came."""
        read = as_sampled if tokenizer == self.tokenizer else align
        aligned = zip(group.rollouts, read(group.rollouts, self.known, self.end_id), strict=True)
        most = self.most_tokens(group.item)
        return replace(group, rollouts=tuple(in_tokens(text, at_most(most, text, one)) for text, one in aligned))


def at_most(most: int, text: Rollout, aligned: Aligned) -> Aligned:
    """A text with at most that many of the learner's tokens. Nothing is learned from one that takes more: its model may
    have no room for it, and a sender cannot know how many the learner takes."""
    ids = aligned.rollout.completion_ids
    if len(ids) <= most:
        return aligned
    return one_unit(text, ids[: max(most, 1)], f"it takes {len(ids)} tokens, the most is {most}")


def in_tokens(text: Rollout, aligned: Aligned) -> Rollout:
    """A text in the learner's tokens, beside what came."""
    assert text.unit is not None
    sizes = np.bincount(text.unit[text.completion_ids != END], minlength=len(text.gen_logp)).astype(np.int32)
    came = Sent(text_of(text).encode("utf-8"), sizes, text.gen_logp, aligned.sender_U.astype(np.int32), aligned.fault)
    return replace(aligned.rollout, sent=came)
