"""Messages of text: what a peer writes of its own groups, and what it makes of others'."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import numpy as np

from ftis.admission import Admission, Admits, Admitter, Reason, Rejection, Score, Terms
from ftis.alignment.text import END, as_texts, text_of
from ftis.alignment.token_bytes import TokenBytes
from ftis.alignment.units import Aligned, align, as_sampled
from ftis.rollouts import Group, Prompt, Rollout, ScoredGroup, Sent


def write_groups(groups: Sequence[Group], known: TokenBytes, end_ids: Collection[int]) -> list[Group]:
    """Groups of this peer's tokens as text; see :func:`~ftis.alignment.text.as_texts`. What is text already stays."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    texts = iter(as_texts([rollout for rollout in rollouts if rollout.unit is None], known, end_ids))

    def written(rollout: Rollout) -> Rollout:
        return next(texts) if rollout.unit is None else rollout

    return [replace(group, rollouts=tuple(map(written, group.rollouts))) for group in groups]


class TextAdmitter:
    """Admits messages of text, and gives what they hold in this peer's own tokens.

    A message is judged over its bytes, by the rules for any message. Its completions are scored as text.

    Args:
        own: scores this peer's own groups. Messages are judged on its terms.
        score: this peer's reward function.
        cut: leaves out what stands behind a stop string.
        known: this peer's tokenizer.
        end_id: its end token.
        most_tokens: item → the most of this peer's tokens that a completion of the prompt may take.
    """

    def __init__(
        self,
        own: Admits,
        score: Score,
        cut: Callable[[str], str],
        known: TokenBytes,
        end_id: int,
        most_tokens: Callable[[int], int],
    ) -> None:
        def score_text(prompt: Prompt, completions: Sequence[str], ids: Sequence[Sequence[int]]) -> tuple[float, ...]:
            spoken = zip(known.encode(completions), ids, strict=True)
            tokens = [[*row.tolist(), end_id] if END in came else row.tolist() for row, came in spoken]
            return score(prompt, completions, tokens)

        self.terms: Terms = replace(own.terms, tokenizer=None, vocab_size=END + 1, end_ids=frozenset({END}))
        self._own = own
        self._over_bytes = Admitter(self.terms, score_text, lambda ids: cut(_spoken(ids)))
        self._known, self._end_id, self._most_tokens = known, end_id, most_tokens

    def admit(self, sender: str, data: bytes, round: int) -> Admission:
        """Judge one message, as :meth:`~ftis.admission.Admitter.admit` does.

        A sender of this peer's own tokenizer is read in the tokens that it sampled.
        """
        admission = self._over_bytes.admit(sender, data, round)
        texts = [rollout for scored in admission.admitted for rollout in scored.group.rollouts]
        read = as_sampled if admission.tokenizer == self._own.terms.tokenizer else align
        aligned = map(in_tokens, texts, read(texts, self._known, self._end_id))
        admitted: list[ScoredGroup] = []
        rejections = list(admission.rejections)
        for scored in admission.admitted:
            rollouts = tuple(itertools.islice(aligned, len(scored.group.rollouts)))
            longest, most = max(map(len, rollouts)), self._most_tokens(scored.group.item)
            if longest > most:
                detail = f"a completion takes {longest} tokens of this peer's tokenizer, the most is {most}"
                rejections.append(Rejection(sender, Reason.TOO_LONG, scored.group.item, detail))
            else:
                admitted.append(replace(scored, group=replace(scored.group, rollouts=rollouts)))
        return replace(admission, admitted=tuple(admitted), rejections=tuple(rejections))

    def score_group(self, group: Group) -> ScoredGroup:
        """A group in this peer's own tokens with its rewards."""
        return self._own.score_group(group)


def in_tokens(text: Rollout, aligned: Aligned) -> Rollout:
    """A text in the learner's tokens, beside what came."""
    assert text.unit is not None
    sizes = np.bincount(text.unit[text.completion_ids != END], minlength=len(text.gen_logp)).astype(np.int32)
    came = Sent(text_of(text).encode("utf-8"), sizes, text.gen_logp, aligned.sender_U.astype(np.int32), aligned.fault)
    return replace(aligned.rollout, sent=came)


def _spoken(ids: Sequence[int]) -> str:
    """The text of bytes, where a part of a character at the end counts as one."""
    return bytes(byte for byte in ids if byte != END).decode("utf-8", "replace")
