"""Messages of text: a peer writes its own groups as text, and reads others' as its own tokens."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ftis.admission import Terms
from ftis.rollouts import Group, Rollout, Sent
from ftis.text.completions import END, MOST_ENDS, as_texts, text_of
from ftis.text.token_bytes import AlignmentError, TokenBytes
from ftis.text.units import Aligned, align, as_sampled, one_unit


def write_groups(
    groups: Sequence[Group], known: TokenBytes, end_ids: Sequence[int], most_bytes: int = sys.maxsize
) -> list[Group]:
    """Groups of this peer's tokens as text, by :func:`~ftis.text.completions.as_texts`. Rollouts of text stay."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    texts = iter(as_texts([rollout for rollout in rollouts if rollout.unit is None], known, end_ids, most_bytes))

    def written(rollout: Rollout) -> Rollout:
        return next(texts) if rollout.unit is None else rollout

    return [replace(group, rollouts=tuple(map(written, group.rollouts))) for group in groups]


def end_of_text(who: str, known: TokenBytes, own: Collection[int], named: Collection[int]) -> int:
    """The token that stands for the end of others' completions: the one by which a model ends its own.

    Args:
        who: the model's owner, for the message.
        own: the ids by which the model ends completions, regardless of the recipe: its tokenizer's, and those of its
            generation defaults.
        named: those of ``sampling.end_tokens``. They decide among several.

    Raises:
        AlignmentError: it is not known, or has bytes as an ordinary token, or there are more than :data:`MOST_ENDS`.
    """
    tokenizer, eos = known.tokenizer, int(known.tokenizer.eos_token_id)
    likely = list(own) if len(own) == 1 else [end for end in named if end in own]
    if not likely:
        ends = ", ".join(f'"{token}"' for token in tokenizer.convert_ids_to_tokens(sorted(own)))
        raise AlignmentError(
            f"{who} ends completions by several tokens ({ends}), and a text has one end: name the one by which its "
            f"model ends answers in sampling.end_tokens"
        )
    if (n := int((known.sizes(np.array(list({*own, *named}))) == 0).sum())) > MOST_ENDS:
        raise AlignmentError(
            f"{who} ends completions by {n} tokens, and over text {MOST_ENDS} are told apart: name fewer in "
            f"sampling.end_tokens, or in its generation_config.json"
        )
    end = eos if eos in likely else likely[0]
    if known.sizes(np.array([end]))[0]:
        raise AlignmentError(
            f"{who} ends completions by {tokenizer.convert_ids_to_tokens(end)!r}, which is text, and the end of a text "
            f"has none: give its tokenizer another eos_token, and take sampling.stop"
        )
    return end


def terms_of_text(terms: Terms) -> Terms:
    """The terms that judge messages of text: over their bytes, by the rules for any message."""
    return replace(terms, tokenizer=None, vocab_size=END + MOST_ENDS, end_ids=frozenset(range(END, END + MOST_ENDS)))


def spoken(ids: Sequence[int]) -> str:
    """The text of bytes. Part of a character at the end counts as one."""
    return bytes(byte for byte in ids if byte < END).decode("utf-8", "replace")


@dataclass(frozen=True)
class TextReader:
    """Makes groups of this peer's tokens out of groups of text.

    Attributes:
        tokenizer: the fingerprint of this peer's own. A sender's tokens stay as sampled if its tokenizer is the same.
        known: this peer's tokenizer.
        end_id: this peer's token for the end of others' completions.
        end_ids: the tokens that end a completion for all peers of this tokenizer, ascending.
        most_tokens: item → the most of this peer's tokens of a completion from which it learns.
    """

    tokenizer: str | None
    known: TokenBytes
    end_id: int
    end_ids: Sequence[int]
    most_tokens: Callable[[int], int]

    def __call__(self, group: Group, tokenizer: str) -> Group:
        """The group in this peer's tokens, beside the text as it came."""
        if tokenizer == self.tokenizer:
            aligned = as_sampled(group.rollouts, self.known, self.end_id, self.end_ids)
        else:
            aligned = align(group.rollouts, self.known, self.end_id)
        most, both = self.most_tokens(group.item), zip(group.rollouts, aligned, strict=True)
        return replace(group, rollouts=tuple(in_tokens(text, at_most(most, text, one)) for text, one in both))


def at_most(most: int, text: Rollout, aligned: Aligned) -> Aligned:
    """A text with at most that many of the learner's tokens. Nothing is learned from one that takes more: its model may
    have no room for it, and a sender cannot know how many the learner takes."""
    ids = aligned.rollout.completion_ids
    if len(ids) <= most:
        return aligned
    return one_unit(text, ids[: max(most, 1)], f"it takes {len(ids)} tokens, the most is {most}")


def in_tokens(text: Rollout, aligned: Aligned) -> Rollout:
    """A text in the learner's tokens, beside the text as it came."""
    assert text.unit is not None
    sizes = np.bincount(text.unit[text.completion_ids < END], minlength=len(text.gen_logp)).astype(np.int32)
    came = Sent(
        text_of(text).encode("utf-8"),
        sizes,
        text.gen_logp,
        aligned.sender_U.astype(np.int32),
        aligned.fault,
        end=max(int(text.completion_ids[-1]) - END, 0),
    )
    return replace(aligned.rollout, sent=came)
