"""Messages of text: a peer writes its own groups as text, and reads others' as its own tokens."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ftis.admission import Terms
from ftis.rollouts import Group, Ints, Rollout, Sent
from ftis.text.completions import END, MOST_ENDS, as_texts, sizes_of, text_of
from ftis.text.token_bytes import AlignmentError, TokenBytes
from ftis.text.turns import joined
from ftis.text.units import Aligned, align, as_sampled, whole


def write_groups(
    groups: Sequence[Group],
    known: TokenBytes,
    end_ids: Sequence[int],
    most_bytes: int = sys.maxsize,
    turns: Callable[[Ints], Sequence[Ints]] = lambda ids: [ids],
) -> list[Group]:
    """Groups of this peer's tokens as text, by :func:`~ftis.text.completions.as_texts`. Rollouts of text stay.

    Args:
        turns: a completion's ids → those of its turns. Turns after ``most_bytes`` are left out.
    """
    own = [rollout for group in groups for rollout in group.rollouts if rollout.unit is None]
    cut = [_cut(rollout, turns(rollout.completion_ids)) for rollout in own]
    texts = iter(as_texts([turn for rollout in cut for turn in rollout], known, end_ids, most_bytes))
    joins = iter([_within(most_bytes, [next(texts) for _ in rollout]) for rollout in cut])
    written = []
    for group in groups:
        rollouts = tuple(next(joins) if one.unit is None else one for one in group.rollouts)
        written.append(replace(group, rollouts=rollouts))
    return written


def _cut(rollout: Rollout, turns: Sequence[Ints]) -> list[Rollout]:
    logps = np.split(rollout.gen_logp, np.cumsum([len(ids) for ids in turns])[:-1])
    return [Rollout(ids, logp) for ids, logp in zip(turns, logps, strict=True)]


def _within(most_bytes: int, turns: Sequence[Rollout]) -> Rollout:
    """The first turns that have at most ``most_bytes`` together, and at least the first one."""
    fits = np.cumsum([int((turn.completion_ids < END).sum()) for turn in turns]) <= most_bytes
    return joined(turns[: max(int(fits.sum()), 1)])


def end_of_text(who: str, known: TokenBytes, own: Collection[int], named: Collection[int]) -> int:
    """The token that stands for the end of others' completions: the one by which a model ends its own.

    Args:
        who: the model's owner, for the message.
        own: the ids by which the model ends completions, regardless of the recipe.
        named: those of ``sampling.end_tokens``. They decide among several.

    Raises:
        AlignmentError: the token is not known, or has bytes as an ordinary one, or there are more ends than
            :data:`MOST_ENDS`.
    """
    tokenizer, eos = known.tokenizer, int(known.tokenizer.eos_token_id)
    likely = list(own) if len(own) == 1 else [end for end in named if end in own]
    if not likely:
        ends = ", ".join(f'"{token}"' for token in tokenizer.convert_ids_to_tokens(sorted(own)))
        remedy = "name the one by which its model ends answers in sampling.end_tokens"
        raise AlignmentError(f"{who} ends completions by several tokens ({ends}), and a text has one end: {remedy}")
    if (n := int((known.sizes(np.array(list({*own, *named}))) == 0).sum())) > MOST_ENDS:
        remedy = "name fewer in sampling.end_tokens, or in its generation_config.json"
        raise AlignmentError(
            f"{who} ends completions by {n} tokens, and over text {MOST_ENDS} are told apart: {remedy}"
        )
    end = eos if eos in likely else likely[0]
    if known.sizes(np.array([end]))[0]:
        token = tokenizer.convert_ids_to_tokens(end)
        remedy = "give its tokenizer another eos_token, and name this one in sampling.stop"
        raise AlignmentError(
            f"{who} ends completions by {token!r}, which is text, and an end must not be text: {remedy}"
        )
    return end


def terms_of_text(terms: Terms) -> Terms:
    """The terms that judge messages of text: over their bytes, by the rules for any message."""
    return replace(terms, tokenizer=None, vocab_size=END + MOST_ENDS, end_ids=frozenset(range(END, END + MOST_ENDS)))


def spoken(ids: Sequence[int]) -> str:
    """The text of bytes, without ends. A part of a character becomes U+FFFD."""
    return bytes(byte for byte in ids if byte < END).decode("utf-8", "replace")


@dataclass(frozen=True)
class TextReader:
    """A reader that makes groups of this peer's tokens out of groups of text.

    Attributes:
        tokenizer: the fingerprint of this peer's own. A sender's tokens stay as sampled if its tokenizer is the same.
        known: this peer's tokenizer.
        end_id: this peer's token for the end of others' completions.
        end_ids: the tokens that end a completion for all peers of this tokenizer, ascending.
        most_tokens: (item, round) → the most of this peer's tokens of a completion from which it learns.
        turns: a completion as text → its turns, in an environment. :class:`~ftis.environments.play.Player` then applies
            ``most_tokens``, since answers count too.
    """

    tokenizer: str | None
    known: TokenBytes
    end_id: int
    end_ids: Sequence[int]
    most_tokens: Callable[[int, int | None], int]
    turns: Callable[[Rollout], Sequence[Rollout]] | None = None

    def __call__(self, group: Group, tokenizer: str) -> Group:
        """The group in this peer's tokens, beside the text as it came.

        Raises:
            UnplayableError: a completion cannot be cut into turns.
        """
        turns = [[text] if self.turns is None else self.turns(text) for text in group.rollouts]
        texts = [turn for of_one in turns for turn in of_one]
        if tokenizer == self.tokenizer:
            aligned = iter(as_sampled(texts, self.known, self.end_id, self.end_ids))
        else:
            aligned = iter(align(texts, self.known, self.end_id))
        pairs = zip(group.rollouts, turns, strict=True)
        read = [in_tokens(text, [next(aligned) for _ in of_one]) for text, of_one in pairs]
        if self.turns is None:
            read = [at_most(self.most_tokens(group.item, group.round), rollout) for rollout in read]
        return replace(group, rollouts=tuple(read))


def at_most(most: int, rollout: Rollout) -> Rollout:
    """A completion that came as text, of at most that many of the learner's tokens, with an environment's answers.

    Nothing is learned from one that takes more: the learner's model may have no room for it, and its sender cannot know
    how many tokens the learner takes.
    """
    came, n = rollout.sent, len(rollout.read_ids)
    if came is None or n <= most:
        return rollout
    fault, tokens_U = f"it takes {n} tokens, the most is {most}", np.array([len(came.size_S)], np.int32)
    sent = replace(came, fault=fault, tokens_U=tokens_U)
    return replace(whole(rollout.completion_ids[: max(most, 1)], came.gen_logp_S), sent=sent)


def in_tokens(text: Rollout, turns: Sequence[Aligned]) -> Rollout:
    """A text in the learner's tokens, turn by turn, beside the text as it came."""
    ends = text.completion_ids[text.completion_ids >= END] - np.int32(END)
    tokens_U = np.concatenate([turn.sender_U for turn in turns]).astype(np.int32)
    fault = next((turn.fault for turn in turns if turn.fault), "")
    came = Sent(text_of(text).encode("utf-8"), sizes_of(text), text.gen_logp, tokens_U, fault, ends)
    return replace(joined([turn.rollout for turn in turns]), sent=came)
