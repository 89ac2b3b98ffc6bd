"""How a recipe's reward function is found, called and checked."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftis.config import FtisError, PromptConfig, RecipeError, RewardConfig
from ftis.prompts import AnswerKind
from ftis.rewards.scoring import (
    LARGEST_REWARD,
    RewardError,
    Scorer,
    WeightedScorer,
    load_scorer,
    parts_of,
    require_columns,
)
from ftis.rollouts import Prompt

RIGHT = "<think>2+2 is 4</think><answer>4</answer>"
PROMPT = Prompt(3, "2+2", "4", {"level": 5, "answer": "shadowed", "prompts": "shadowed"})


def scorer(path: str = "ftis.rewards.format_and_answer", kind: AnswerKind = "number", answer: str = "auto") -> Scorer:
    config = RewardConfig.model_validate({"function": path, "answer": answer})
    return parts_of(load_scorer(config, PromptConfig(), kind))[0]


@pytest.fixture(autouse=True)
def my_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "my_rewards.py").write_text(
        "import math, numpy\n"
        "from ftis.config import FtisError\n"
        "calls = []\n"
        "LEVEL = 3\n"
        "def lengths(prompts, completions, completion_ids, **columns):\n"
        "    calls.append((prompts, completions, completion_ids, columns))\n"
        "    return [len(ids) / 2 for ids in completion_ids]\n"
        "def array(completions, **columns): return numpy.ones(len(completions), dtype=numpy.float32)\n"
        "def closed(prompts, completions, completion_ids): return []\n"
        "def returned(completions, **columns): return eval(completions[0])\n"
        "def broken(**columns): raise KeyError('mine')\n"
        "def tagged(completions, answer_kind, *, answer_tag='a', **columns):\n"
        "    calls.append((answer_kind, answer_tag, columns))\n"
        "    return [0.0] * len(completions)\n"
        "def refused(**columns): raise FtisError('set the limit to 3')\n"
        "def leveled(completions, level, **columns): return [0.0] * len(completions)\n"
        "def hinted(completions, hint, mood='so', **columns): return [0.0] * len(completions)\n"
    )
    (tmp_path / "my_broken.py").write_text("import a_module_that_is_not_there\n")
    (tmp_path / "my_import.py").write_text("from math import no_such_name\n")
    document = (Path(__file__).parents[1] / "docs" / "recipes.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^(    def my_reward.*\n(?: {8}.*\n)+)", document, re.MULTILINE)
    (tmp_path / "documented.py").write_text(textwrap.dedent(example), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("my_rewards", "my_broken", "my_import", "documented"):
        sys.modules.pop(name, None)


def several(*functions: str, weights: Sequence[float] = ()) -> Any:
    config = RewardConfig.model_validate({"function": list(functions), "reward_weights": list(weights)})
    return load_scorer(config, PromptConfig(), "number")


def test_several_rewards_are_summed_by_their_weights_and_each_has_its_mean() -> None:
    score = several("my_rewards.lengths", "my_rewards.array", weights=[2.0, -0.5])
    assert isinstance(score, WeightedScorer)
    assert score(PROMPT, ["x", "yz"], [[7], [8, 9]]) == (2 * 0.5 - 0.5, 2 * 1.0 - 0.5)
    assert score.means([(PROMPT.question, "yz")]) == {"rewards/lengths/mean": 1.0, "rewards/array/mean": 1.0}
    assert not score.seen
    assert score.means([(PROMPT.question, "of an environment with a reward of its own")]) == {}
    of_both, of_one = (several("my_rewards.lengths", "my_rewards.array", weights=w) for w in ([0.2, 0.2], [0.6, 0.0]))
    assert of_both(PROMPT, ["x"], [[7]]) == of_one(PROMPT, ["x"], [[7]]) == (0.3,), "0.1 + 0.2, as no sum of floats is"
    assert several("my_rewards.lengths", "my_rewards.array")(PROMPT, ["x"], [[7]]) == (0.5 + 1.0,)
    assert several("my_rewards.lengths", weights=[3.0])(PROMPT, ["x"], [[7]]) == (1.5,)
    assert isinstance(several("my_rewards.lengths"), Scorer)
    with pytest.raises(RewardError, match=r"reward_weights = \[1.0\]: 1 weights of 2"):
        several("my_rewards.lengths", "my_rewards.array", weights=[1.0])
    with pytest.raises(RewardError, match=r"two are called 'lengths'"):
        several("my_rewards.lengths", "other.lengths")
    one, both = (RewardConfig.model_validate({"function": f}) for f in ("a.b", ["a.b", "c.d"]))
    assert [of.model_dump(mode="json")["function"] for of in (one, both)] == ["a.b", ["a.b", "c.d"]]
    with pytest.raises(RewardError, match="closed"):
        several("my_rewards.lengths", "my_rewards.closed")


def test_the_built_in_reward_follows_the_recipe() -> None:
    half = "<think>t</think><answer>4.0</answer>"
    assert scorer()(PROMPT, [RIGHT, "4"], [[1], [2]]) == (1.0, 0.0)
    assert scorer(kind="exact")(PROMPT, [half], [[1]]) == (0.0,)
    assert scorer(kind="exact", answer="number")(PROMPT, [half], [[1]]) == (1.0,)
    tags = PromptConfig(think_tag="r", answer_tag="a")
    assert load_scorer(RewardConfig(), tags, "number")(PROMPT, ["<r></r><a>4</a>"], [[1]]) == (1.0,)
    begun = load_scorer(RewardConfig(), PromptConfig(prefill="<think>"), "number")
    assert begun(PROMPT, ["so</think><answer>4</answer>", RIGHT], [[1], [2]]) == (1.0, 0.0)
    last = load_scorer(RewardConfig(extract="last_number", format_weight=0.2), PromptConfig(), "number")
    assert last(PROMPT, ["It is 4.", "5", "none"], [[1], [2], [3]]) == (1.0, 0.2, 0.0)


def test_a_function_of_ones_own_is_called_as_trl_calls_it() -> None:
    score = scorer("my_rewards.lengths")
    assert score(PROMPT, ("a", "b"), [np.array([1, 2, 3], dtype=np.int32), [4]]) == (1.5, 0.5)
    (prompts, completions, completion_ids, columns) = sys.modules["my_rewards"].calls[0]
    assert (prompts, completions, completion_ids) == (["2+2", "2+2"], ["a", "b"], [[1, 2, 3], [4]])
    assert columns == {"level": [5, 5], "answer": ["4", "4"]}
    assert scorer("my_rewards.array")(PROMPT, ["a", "b"], [[1], [2]]) == (1.0, 1.0)
    assert scorer("documented.my_reward")(PROMPT, ["it is 4", "no"], [[1], [2]]) == (1.0, 0.0)


def test_a_function_gets_the_settings_that_its_signature_names() -> None:
    column = Prompt(0, "q", "a", {"answer_kind": "a column", "think_tag": "another"})
    tags = PromptConfig(think_tag="why", answer_tag="so")
    for answer, kind in (("auto", "math"), ("exact", "exact")):
        reward = RewardConfig.model_validate({"function": "my_rewards.tagged", "answer": answer})
        assert load_scorer(reward, tags, "math")(column, ["x", "y"], [[1], [2]]) == (0.0, 0.0)
        answer_kind, answer_tag, columns = sys.modules["my_rewards"].calls.pop()
        assert (answer_kind, answer_tag) == (kind, "so")
        assert columns["think_tag"] == ["another"] * 2  # no parameter has this name, so it is the data set's column
        assert set(columns) == {"prompts", "completion_ids", "answer", "think_tag"}


def test_a_functions_mistake_is_an_error_that_names_it() -> None:
    with pytest.raises(RewardError, match=r"'my_rewards.broken' raised KeyError: 'mine' \(.*my_rewards.py, line \d+\)"):
        scorer("my_rewards.broken")(PROMPT, ["a"], [[1]])
    with pytest.raises(FtisError, match=r"^set the limit to 3$"):  # it has its own remedy
        scorer("my_rewards.refused")(PROMPT, ["a"], [[1]])
    for returned, named in (
        ("[1.0]", "1 values for 2 completions"),
        ("'ab'", "returned 'ab'"),
        ("['1', '2']", "'1' for completion 0"),
        ("1.0", "a list of 2 numbers"),
        ("None", "returned None"),
        ("[1.0, None]", "None for completion 1"),
        ("[math.nan, 1]", "nan for completion 0"),
        ("[1, 10**400]", "for completion 1"),
    ):
        with pytest.raises(RewardError, match=r"reward\.function 'my_rewards\.returned' ") as caught:
            scorer("my_rewards.returned")(PROMPT, [returned, "b"], [[1], [2]])
        assert named in str(caught.value)


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("lengths", "dotted path"),
        ("my rewards.f", "dotted path"),
        (".f", "dotted path"),
        ("no_such_module.f", "no module 'no_such_module'"),
        ("my_rewards.sub.f", "no module 'my_rewards.sub'"),
        ("my_broken.f", "importing 'my_broken' failed: .*'a_module_that_is_not_there'"),
        ("my_import.f", "importing 'my_import' failed: .*'no_such_name'"),
        ("my_rewards.length", "no 'length' .*'lengths'"),
        ("my_rewards.LEVEL", "is a int, not a function"),
        ("my_rewards.closed", "[*][*]columns"),
    ],
)
def test_a_path_that_leads_to_no_reward_function(path: str, named: str) -> None:
    with pytest.raises((RecipeError, RewardError), match=named) as caught:
        scorer(path)
    assert "\n" not in str(caught.value)


@settings(max_examples=50)
@given(st.lists(st.floats() | st.floats(-LARGEST_REWARD, LARGEST_REWARD), min_size=1, max_size=4))
def test_only_numbers_pass_whose_squares_add_up(values: list[float]) -> None:
    score = Scorer(lambda **_: values, "f")
    completions, ids = ["x"] * len(values), [[0]] * len(values)
    for weight, scorer in ((1.0, score), (1e3, WeightedScorer([score], [1e3]))):
        sums = tuple(weight * value for value in values)
        if all(abs(value) <= LARGEST_REWARD for value in (*values, *sums)):
            assert scorer(PROMPT, completions, ids) == pytest.approx(sums, rel=1e-11)
            assert np.isfinite(np.sum(np.square(np.array(sums * 100_000, np.float32))))
        else:
            with pytest.raises(RewardError, match="finite"):
                scorer(PROMPT, completions, ids)


def test_an_argument_that_no_column_gives_is_refused() -> None:
    for path in ("my_rewards.leveled", "my_rewards.tagged", "ftis.rewards.format_and_answer"):
        require_columns(scorer(path), PROMPT, "mine")
    with pytest.raises(RewardError, match=r"'hint', .*'mine' \(it has answer, level"):
        require_columns(scorer("my_rewards.hinted"), PROMPT, "mine")
