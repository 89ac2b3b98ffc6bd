"""How a recipe's reward function is found, called and checked."""

from __future__ import annotations

import math
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftis.config import FtisError, PromptConfig, RecipeError, RewardConfig
from ftis.prompts import AnswerKind
from ftis.rewards.scoring import RewardError, Scorer, load_scorer, require_columns
from ftis.rollouts import Prompt

RIGHT = "<think>2+2 is 4</think><answer>4</answer>"
PROMPT = Prompt(3, "2+2", "4", {"level": 5, "answer": "shadowed", "prompts": "shadowed"})


def scorer(path: str = "ftis.rewards.format_and_answer", kind: AnswerKind = "number", answer: str = "auto") -> Scorer:
    return load_scorer(RewardConfig.model_validate({"function": path, "answer": answer}), PromptConfig(), kind)


@pytest.fixture
def my_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
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
        "def short(**columns): return [1.0]\n"
        "def text(**columns): return 'ab'\n"
        "def strings(**columns): return ['1', '2']\n"
        "def number(**columns): return 1.0\n"
        "def none(**columns): return None\n"
        "def nones(**columns): return [1.0, None]\n"
        "def nan(**columns): return [math.nan, 1]\n"
        "def huge(**columns): return [1, 10**400]\n"
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
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("my_rewards", "my_broken", "my_import"):
        sys.modules.pop(name, None)


def test_built_in_reward_by_default() -> None:
    assert scorer()(PROMPT, [RIGHT, "4"], [[1], [2]]) == (1.0, 0.0)
    half = "<think>t</think><answer>4.0</answer>"
    assert scorer(kind="exact")(PROMPT, [half], [[1]]) == (0.0,)
    assert scorer(kind="exact", answer="number")(PROMPT, [half], [[1]]) == (1.0,)
    tags = PromptConfig(think_tag="r", answer_tag="a")
    assert load_scorer(RewardConfig(), tags, "number")(PROMPT, ["<r></r><a>4</a>"], [[1]]) == (1.0,)


@pytest.mark.usefixtures("my_rewards")
def test_a_function_of_ones_own_is_called_as_trl_calls_it() -> None:
    score = scorer("my_rewards.lengths")
    assert score(PROMPT, ("a", "b"), [np.array([1, 2, 3], dtype=np.int32), [4]]) == (1.5, 0.5)
    (prompts, completions, completion_ids, columns) = sys.modules["my_rewards"].calls[0]
    assert prompts == ["2+2", "2+2"]
    assert completions == ["a", "b"]
    assert completion_ids == [[1, 2, 3], [4]]
    assert columns == {"level": [5, 5], "answer": ["4", "4"]}
    assert scorer("my_rewards.array")(PROMPT, ["a", "b"], [[1], [2]]) == (1.0, 1.0)
    with pytest.raises(RewardError, match="raised KeyError"):
        scorer("my_rewards.broken")(PROMPT, ["a"], [[1]])


def test_the_documents_example_is_a_reward_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = (Path(__file__).parents[1] / "docs" / "recipes.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^(    def my_reward.*\n(?: {8}.*\n)+)", document, re.MULTILINE)
    (tmp_path / "documented_reward.py").write_text(textwrap.dedent(example), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert scorer("documented_reward.my_reward")(PROMPT, ["it is 4", "no"], [[1], [2]]) == (1.0, 0.0)


@pytest.mark.usefixtures("my_rewards")
def test_a_function_gets_the_settings_that_its_signature_names() -> None:
    column = Prompt(0, "q", "a", {"answer_kind": "a column", "think_tag": "another"})
    tags = PromptConfig(think_tag="why", answer_tag="so")
    score = load_scorer(RewardConfig(function="my_rewards.tagged"), tags, "math")
    assert score(column, ["x", "y"], [[1], [2]]) == (0.0, 0.0)
    answer_kind, answer_tag, columns = sys.modules["my_rewards"].calls.pop()
    assert (answer_kind, answer_tag) == ("math", "so")
    assert columns["think_tag"] == ["another"] * 2  # the signature does not name it, so it is the data set's column
    assert set(columns) == {"prompts", "completion_ids", "answer", "think_tag"}
    exact = load_scorer(RewardConfig(function="my_rewards.tagged", answer="exact"), tags, "math")
    exact(column, ["x"], [[1]])
    assert sys.modules["my_rewards"].calls.pop()[0] == "exact"


@pytest.mark.usefixtures("my_rewards")
def test_a_functions_error_with_a_remedy_is_told_as_it_is() -> None:
    with pytest.raises(FtisError, match="set the limit to 3"):
        scorer("my_rewards.refused")(PROMPT, ["a"], [[1]])


@pytest.mark.usefixtures("my_rewards")
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("lengths", "reward.function = 'lengths': write a dotted path, as in"),
        ("my rewards.f", "write a dotted path"),
        (".f", "write a dotted path"),
        ("no_such_module.f", "there is no module 'no_such_module'; check the spelling, install it, or add"),
        ("my_rewards.sub.f", "there is no module 'my_rewards.sub'"),
        ("my_broken.f", "importing 'my_broken' failed: No module named 'a_module_that_is_not_there'; install"),
        ("my_import.f", "importing 'my_import' failed: cannot import name 'no_such_name'"),
        ("my_rewards.length", r"module 'my_rewards' has no 'length' \(did you mean 'lengths'"),
    ],
)
def test_a_path_that_leads_nowhere(path: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        scorer(path)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("my_rewards")
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("my_rewards.LEVEL", "is a int, not a function; name a function f[(]prompts"),
        ("my_rewards.closed", "does not take the data set's columns; add [*][*]columns"),
    ],
)
def test_a_path_that_leads_to_no_reward_function(path: str, message: str) -> None:
    with pytest.raises(RewardError, match=message) as caught:
        scorer(path)
    assert isinstance(caught.value, FtisError)


@pytest.mark.usefixtures("my_rewards")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("short", r"returned 1 values for 2 completions: \[1.0\]; return one number per completion"),
        ("text", "returned 'ab'; return a list of 2 numbers"),
        ("strings", "returned '1' for completion 0; return a finite number"),
        ("number", "returned 1.0; return a list of 2 numbers, one per completion"),
        ("none", "returned None; return a list"),
        ("nones", "returned None for completion 1; return a finite number for every completion"),
        ("nan", "returned nan for completion 0"),
        ("huge", "for completion 1"),
    ],
)
def test_nonsense_returned_is_an_error_that_names_the_function(name: str, message: str) -> None:
    with pytest.raises(RewardError, match=f"reward.function 'my_rewards.{name}' ") as caught:
        scorer(f"my_rewards.{name}")(PROMPT, ["a", "b"], [[1], [2]])
    assert caught.match(message)


@settings(max_examples=50)
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=4))
def test_only_finite_numbers_pass(values: list[float]) -> None:
    score = Scorer(lambda **_: values, "f")
    completions, ids = ["x"] * len(values), [[0]] * len(values)
    if all(map(math.isfinite, values)):
        assert score(PROMPT, completions, ids) == tuple(values)
    else:
        with pytest.raises(RewardError, match="finite"):
            score(PROMPT, completions, ids)


def test_an_exception_of_the_users_function_is_named_with_its_line() -> None:
    def broken(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **columns: object) -> None:
        raise KeyError("gold")

    scorer = Scorer(broken, "mine.broken")  # type: ignore[arg-type]
    with pytest.raises(RewardError, match=r"'mine.broken' raised KeyError: 'gold' \(.*test_scoring.py, line \d+\)"):
        scorer(Prompt(0, "q", "a"), ["x"], [[1]])


def test_a_reward_reads_the_prefill_in_front_of_each_completion() -> None:
    prompt = PromptConfig(prefill="<think>")
    built_in = load_scorer(RewardConfig(), prompt, "number")
    assert built_in(Prompt(0, "2+2", "4"), ["so</think><answer>4</answer>", RIGHT], [[1], [2]]) == (1.0, 0.0)


def test_the_recipe_says_where_the_answer_is_and_what_the_format_weighs() -> None:
    reward = RewardConfig(extract="last_number", format_weight=0.2)
    scorer = load_scorer(reward, PromptConfig(), "number")
    assert scorer(Prompt(0, "2+2", "4"), ["It is 4.", "5", "none"], [[1], [2], [3]]) == (1.0, 0.2, 0.0)


def test_an_argument_that_no_column_gives_is_refused(my_rewards: Path) -> None:
    for path in ("my_rewards.leveled", "my_rewards.tagged", "ftis.rewards.format_and_answer"):
        require_columns(scorer(path), PROMPT, "mine")
    with pytest.raises(RewardError, match=r"takes 'hint', which is no column of task 'mine' \(it has answer, level"):
        require_columns(scorer("my_rewards.hinted"), PROMPT, "mine")
