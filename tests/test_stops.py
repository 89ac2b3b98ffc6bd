"""Stop strings: where completions end, in both samplers, in rewards, in admission and in evaluation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from admissions import admitter, group, message, only, score
from conftest import CHARACTERS, assert_one_line
from hypothesis import given
from hypothesis import strategies as st
from policies import check_drawn, rows_of
from tokenizers import AddedToken

from ftis.admission import Admitter, Reason
from ftis.config import RecipeError
from ftis.engines.builtin import builtin_sampler
from ftis.engines.generate import generate_sampler
from ftis.engines.samplers import InPlace, check_stop, open_sampler
from ftis.engines.stops import Stopping, StopStrings, cut_at, holds, stopped_at
from ftis.policy import Policy
from ftis.rollouts import Prompt, Rollout
from ftis.run.evaluate import Exam
from ftis.sampling import Decoding, Draw

WORDS = ["a", "b", "ab", "</answer>", ">\n", "<", "é", "x>"]


def written(ids: Sequence[int]) -> str:
    return "".join(WORDS[i] for i in ids)


@pytest.mark.parametrize(
    ("stop", "text", "cut"),
    [
        ((), "abc", "abc"),
        (("b",), "abcb", "ab"),
        (("c", "b"), "abc", "ab"),
        (("bc", "b"), "abc", "ab"),
        (("\n\n", "Q:"), "7\nQ: 8", "7\nQ:"),
        (("z",), "abc", "abc"),
    ],
)
def test_text_ends_with_the_first_stop_string(stop: tuple[str, ...], text: str, cut: str) -> None:
    assert cut_at(stop, text) == cut


@given(
    st.lists(st.integers(0, len(WORDS) - 1), max_size=20),
    st.lists(st.sampled_from(["a", "ba", "er>", "><", "</answer>", "é", "ab<"]), min_size=1, max_size=3),
)
def test_a_completion_ends_with_the_token_that_completes_a_stop_string(ids: list[int], stop: list[str]) -> None:
    """As trying every length in turn. The last tokens are enough to see it."""
    at = [n for n in range(len(ids) + 1) if any(s in written(ids[:n]) for s in stop)]
    assert stopped_at(stop, ids, written) == (at[0] if at else len(ids))
    search = StopStrings(Mock(detokenize=written), stop)
    first = next((n for n, token in enumerate(ids, 1) if search.complete(7, token)), len(ids))
    assert first == stopped_at(stop, ids, written)
    assert len(search.rows.get(7, [])) <= search.reach


STOP = ("a", "7", "</think>", "1")
PROMPTS = rows_of((3, 9, 5, 9, 1, 7))


def flat(groups: list[tuple[Rollout, ...]]) -> list[Rollout]:
    return [rollout for of_prompt in groups for rollout in of_prompt]


BOTH = pytest.mark.parametrize("draw", [builtin_sampler, generate_sampler])


@BOTH
def test_a_sampler_ends_rows_at_stop_strings_with_the_learners_log_probabilities(draw: Draw, policy: Policy) -> None:
    groups = draw(policy, PROMPTS, 4, Decoding(16, stop=STOP), 3)
    assert len({len(rollout) for rollout in flat(groups)}) > 4
    check_drawn(policy, PROMPTS, groups)
    stopped = 0
    for ids in (rollout.completion_ids.tolist() for rollout in flat(groups)):
        assert not holds(STOP, policy.detokenize(ids[:-1]))
        stopped += holds(STOP, policy.detokenize(ids))
        assert holds(STOP, policy.detokenize(ids)) or ids[-1] in policy.end_ids or len(ids) == 16
    assert stopped > 4 * len(PROMPTS) // 3


@BOTH
def test_rows_do_not_go_on_behind_a_stop_string(draw: Draw, policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch ends when all its rows have ended, long before the longest completion."""
    asked = Mock(side_effect=StopStrings.complete, autospec=True)
    monkeypatch.setattr(StopStrings, "complete", lambda *row: asked(*row))
    draw(policy, PROMPTS, 2, Decoding(64, stop=(*CHARACTERS, "<")), 0)
    assert max(Counter(call.args[1] for call in asked.call_args_list).values()) < 10


def test_a_sampler_that_knows_of_no_stop_strings_is_cut(policy: Policy) -> None:
    ids = np.array([30, 31, 4, 5, 6], np.int32)
    rollout = Rollout(ids, np.arange(-5, 0, dtype=np.float32))
    sampler = Stopping(long := Mock(return_value=[(rollout, rollout)]))
    text = policy.detokenize([int(ids[1])])
    ((one, other),) = sampler(policy, PROMPTS[:1], 2, Decoding(5, stop=(text,)), 0)
    assert one.completion_ids.tolist() == other.completion_ids.tolist() == [30, 31]
    assert one.gen_logp.tolist() == [-5.0, -4.0]
    ((one, _),) = sampler(policy, PROMPTS[:1], 2, Decoding(5), 0)
    assert one.completion_ids.tolist() == ids.tolist()
    sampler.weights_moved(policy)
    sampler.close()
    long.weights_moved.assert_called_once_with(policy)
    long.close.assert_called_once_with()


@pytest.mark.parametrize(
    "groups",
    [
        [],
        [[1]],
        [[1, 2, 3]],
        [[np.zeros(2, np.int64), 2]],
        [[np.zeros(6, np.int32), 2]],
        [[1, np.zeros(2, np.float64)]],
    ],
)
def test_what_a_sampler_must_not_return_names_it(groups: list[list[Any]], policy: Policy) -> None:
    def rollout(wrong: Any) -> Rollout:
        if isinstance(wrong, int):
            return Rollout(np.zeros(wrong, np.int32), np.zeros(wrong, np.float32))
        ids = wrong if wrong.dtype.kind == "i" else np.zeros(len(wrong), np.int32)
        return Rollout(ids, wrong if wrong.dtype.kind == "f" else np.zeros(len(wrong), np.float32))

    wrong = Mock(return_value=[tuple(map(rollout, group)) for group in groups])
    with pytest.raises(RecipeError, match="Mock returned"):
        Stopping(wrong)(policy, PROMPTS[:1], 2, Decoding(5), 0)


@pytest.mark.parametrize("name", ["auto", "builtin", "transformers"])
def test_every_sampler_that_a_recipe_names_stops(name: str, policy: Policy) -> None:
    for rollout in flat(open_sampler(name, policy)(policy, PROMPTS, 2, Decoding(12, stop=STOP), 1)):
        assert not holds(STOP, policy.detokenize(rollout.completion_ids[:-1].tolist()))


def test_padding_behind_an_end_is_not_read(policy: Policy) -> None:
    """Where the padding is an ordinary token, it could complete a stop string that nobody sampled."""
    vocabulary = policy.tokenizer.get_vocab()
    policy.end_ids = frozenset({vocabulary["a"], vocabulary["="]})
    padding = policy.detokenize([min(policy.end_ids)])
    for rollout in flat(generate_sampler(policy, PROMPTS, 4, Decoding(16, stop=(2 * padding,)), 3)):
        assert not policy.end_ids & set(rollout.completion_ids[:-1].tolist())


def test_a_stop_string_that_text_never_holds_is_refused(policy: Policy) -> None:
    # Most of SmolLM2's have no role: decoding leaves them out, but ``all_special_tokens`` does not name them.
    policy.tokenizer.add_tokens([AddedToken("<sep>", special=True), AddedToken("<plain>", special=False)])
    assert "<sep>" not in policy.tokenizer.all_special_tokens
    check_stop(("a", "</answer>", "<plain>"), policy.tokenizer, "m")
    for stop, token in (("x<eos>", "<eos>"), ("<sep>", "<sep>")):
        with pytest.raises(RecipeError) as caught:
            check_stop(("a", stop), policy.tokenizer, "m")
        assert_one_line(caught, f"'{stop}' holds '{token}', a special token of m", "put it in sampling.end_tokens")


def test_what_the_last_token_adds_behind_a_stop_string_is_not_read(policy: Policy) -> None:
    """In evaluation; admission and rewards read what the peer's own detokenize leaves."""
    seen: list[str] = []

    def score(prompt: Prompt, completions: Sequence[str], ids: Sequence[Sequence[int]]) -> tuple[float, ...]:
        seen.extend(completions)
        return (1.0,)

    assert policy.detokenize([4]) == "<think>"
    draw = Mock(return_value=[(Rollout(np.array([30, 4], np.int32), np.zeros(2, np.float32)),)])
    asked = (policy, InPlace(draw), [Prompt(0, "q", "a")], lambda problem: PROMPTS[0], score)
    Exam(*asked, Decoding(2, stop=("<th",))).greedy()
    assert seen == [policy.detokenize([30]) + "<th"]


def test_a_group_that_goes_on_behind_a_stop_string_is_rejected() -> None:
    """The tokens of the test's detokenizer are written as numbers."""

    def detokenize(ids: Sequence[int]) -> str:
        return cut_at(("5",), " ".join(map(str, ids)))

    receiver = Admitter(admitter(stop=("5",)).terms, score, detokenize)
    whole = Rollout(np.array([1, 5], np.int32), np.full(2, -0.5, np.float32))
    longer = Rollout(np.array([1, 5, 2], np.int32), np.full(3, -0.5, np.float32))
    rejection = only(receiver.admit("ada", message(group(0, whole, longer)), 0))
    assert rejection.reason == Reason.TOKENS_AFTER_END
    assert rejection.detail == "rollout 1: a stop string is complete before its last token"
    admission = receiver.admit("ada", message(group(0, whole, whole)), 0)
    assert [scored.completions for scored in admission.admitted] == [("1 5", "1 5")]
