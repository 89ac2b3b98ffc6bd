"""Terms of admission of two peers, ada and bob, and messages that are judged by them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from wire_messages import rollout

from ftis.admission import Admission, Admitter, Rejection, Terms
from ftis.codec import Header, Message, encode
from ftis.rollouts import Group, Prompt, Rollout

RUN, TOKENIZER = "1" * 32, "2" * 32
END, VOCAB, G, LONGEST = 90, 100, 2, 4
PROMPTS = [Prompt(item, f"question {item}", str(item)) for item in range(12)]


def assigned(peer: str, round: int) -> list[int]:
    """Two items of each round's four: ada the first half, bob the second, moving with the round."""
    start = 4 * (round % 3) + {"ada": 0, "bob": 2}[peer]
    return [start, start + 1]


TERMS = Terms(
    run=RUN,
    tokenizer=TOKENIZER,
    temperature=1.0,
    vocab_size=VOCAB,
    end_ids=frozenset({END, 99}),
    group_size=G,
    max_completion_length=LONGEST,
    prompts=PROMPTS,
    assigned=assigned,
    roster=frozenset({"ada", "bob"}),
    max_groups=2,
)


def detokenize(ids: Sequence[int]) -> str:
    return " ".join(str(i) for i in ids if i not in TERMS.end_ids)


def score(prompt: Prompt, completions: Sequence[str], completion_ids: Sequence[Sequence[int]]) -> tuple[float, ...]:
    assert [detokenize(ids) for ids in completion_ids] == list(completions)
    return tuple(float(c == prompt.answer) for c in completions)


def counting(scored: list[int]) -> Callable[[Prompt, Sequence[str], Sequence[Sequence[int]]], tuple[float, ...]]:
    """``score``, which notes in ``scored`` the items that it is asked about."""

    def scorer(prompt: Prompt, completions: Sequence[str], ids: Sequence[Sequence[int]]) -> tuple[float, ...]:
        scored.append(prompt.item)
        return score(prompt, completions, ids)

    return scorer


def admitter(**changes: Any) -> Admitter:
    return Admitter(dataclasses.replace(TERMS, **changes), score, detokenize)


def group(item: int, *rollouts: Rollout, peer: str = "ada", round: int = 0) -> Group:
    """A good group: one completion that answers the item and one that does not."""
    return Group(peer, round, item, rollouts or (rollout([item, END]), rollout([98, 99])))


def message(*groups: Group, peer: str = "ada", round: int = 0, **header: Any) -> bytes:
    facts: dict[str, Any] = {"run": RUN, "tokenizer": TOKENIZER, "temperature": 1.0, "top_k": 0, "top_p": 1.0} | header
    return encode(Message(Header(round=round, peer=peer, **facts), groups))


def only(admission: Admission) -> Rejection:
    (rejection,) = admission.rejections
    return rejection


def items(admission: Admission) -> list[int]:
    return [scored.group.item for scored in admission.admitted]
