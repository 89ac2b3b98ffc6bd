"""Format, extraction, equality; hostile text; the helper process; the recipe's own functions."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftis import rewards
from ftis.config import FtisError, PromptConfig, RewardConfig
from ftis.rewards import RewardError, Scorer, answers_equal, extract_answer, format_and_answer, load_scorer
from ftis.rollouts import Prompt

DATA = Path(__file__).parents[2] / "shared" / "data"


def rows(name: str) -> list[dict[str, str]]:
    file = DATA / name
    if not file.is_file():
        pytest.skip(f"needs ../shared/data/{name} beside the checkout")
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


# --- format ---------------------------------------------------------------------------------------------------------

RIGHT = "<think>2+2 is 4</think><answer>4</answer>"


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (RIGHT, "4"),
        (f"\n {RIGHT}\t\n", "4"),
        ("<think></think>\n\n<answer> 4 </answer>", "4"),
        ("<think>a\nb</think>\n<answer>x < y\n> z</answer>", "x < y\n> z"),
        ("<think>a</think><answer></answer>", None),
        ("<think>a</think><answer> \n</answer>", None),
        ("<answer>4</answer>", None),
        ("<think>a</think>4", None),
        ("<think>a</think>so<answer>4</answer>", None),
        ("Well, <think>a</think><answer>4</answer>", None),
        ("<think>a</think><answer>4</answer>.", None),
        ("<think>a<answer>4</answer></think>", None),
        ("<answer>4</answer><think>a</think>", None),
        ("<think>a</think><answer>4</answer><answer>5</answer>", None),
        ("<think><think>a</think><answer>4</answer>", None),
        ("<think>a</think></think><answer>4</answer>", None),
        ("<think>a</think><answer>4", None),
        ("<think>a</think></answer>4<answer>", None),
        ("<think>a</answer></think><answer>4", None),
        ("</think><think><answer>4</answer>", None),
        ("<THINK>a</THINK><ANSWER>4</ANSWER>", None),
        ("<think >a</think><answer>4</answer>", None),
        ("", None),
    ],
)
def test_extract_answer(completion: str, answer: str | None) -> None:
    assert extract_answer(completion) == answer


def test_tags_are_the_recipes() -> None:
    assert extract_answer("<r>a</r><a.b>4</a.b>", "r", "a.b") == "4"
    assert extract_answer("<r>a</r><aXb>4</aXb>", "r", "a.b") is None
    assert extract_answer(RIGHT, "r", "a") is None


pieces = st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", " ", "\n", "4", "x", "<", ">", "</"])


@given(st.lists(pieces, max_size=12).map("".join) | st.text())
def test_extraction_never_raises_and_agrees_with_the_format(text: str) -> None:
    answer = extract_answer(text)
    if answer is not None:
        assert answer == answer.strip() != ""
        before, middle, after = text.partition("</think>")
        assert before.lstrip().startswith("<think>")
        assert middle
        assert after.strip().startswith("<answer>")
        assert after.strip().endswith("</answer>")
        assert all(text.count(tag) == 1 for tag in ("<think>", "</think>", "<answer>", "</answer>"))


@given(st.text().filter(lambda t: "<" not in t), st.text().filter(lambda t: "<" not in t and t.strip() != ""))
def test_what_is_put_in_comes_out(thought: str, answer: str) -> None:
    assert extract_answer(f"<think>{thought}</think> <answer>{answer}</answer>") == answer.strip()


@pytest.mark.parametrize("piece", ["<think>", "</think>", "<answer>", "</answer>", "<", " ", "<think></think> "])
def test_a_megabyte_of_one_thing_is_no_answer(piece: str) -> None:
    assert extract_answer(piece * (1_000_000 // len(piece))) is None
    assert extract_answer("<think>" + piece * (1_000_000 // len(piece)) + "</think><answer>") is None


# --- equality -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("18", "18"),
        ("18.0", "18"),
        ("18.", "18"),
        ("018", "18"),
        (" 18\n", "18"),
        ("$18", "18"),
        ("\\$18", "18"),
        ("18$", "18"),
        ("$18.50.", "18.5"),
        ("1,000", "1000"),
        ("1000", "1,000"),
        ("$1,234,567.80", "1234567.8"),
        ("-3", "-3.0"),
        ("-$3", "$-3"),
        ("\N{MINUS SIGN}3", "-3"),
        ("+3", "3"),
        ("- 3", "-3"),
        (".5", "1/2"),
        ("3/6", "1/2"),
        ("-1 / 2", "-.5"),
        ("50%", "50"),
        ("50\\%", "50"),
        ("1e3", "1000"),
        ("2.5e-1", "1/4"),
        ("-0", "0"),
        ("0.1", "0.10000000000000000000000000000"),
        ("east", "east"),
    ],
)
def test_equal_numbers(given: str, expected: str) -> None:
    assert answers_equal(given, expected, "number")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("18", "19"),
        ("18", "-18"),
        ("180", "18"),
        ("0.1", "0.10000000000000000000000000001"),
        ("18 or 19", "18"),
        ("18 19", "18"),
        ("18 dollars", "18"),
        ("1,00", "100"),
        ("1,0000", "10000"),
        (",100", "100"),
        ("1,000,00", "100000"),
        ("--3", "3"),
        ("-$-3", "3"),
        ("1/0", "0"),
        ("1/2/1", "1/2"),
        ("1/-2", "-1/2"),
        ("9+9", "18"),
        ("nan", "0"),
        ("NaN", "nan"),
        ("inf", "Infinity"),
        ("1e999999999", "1"),
        ("1e-999999999", "0"),
        ("1_8", "18"),
        ("0x12", "18"),
        ("\N{FULLWIDTH DIGIT ONE}8", "18"),
        ("\N{ARABIC-INDIC DIGIT THREE}", "3"),
        ("", ""),
        ("", "0"),
        (".", "0"),
        ("$", "0"),
        ("%", "0"),
        ("east", "west"),
        ("9" * 600, "9" * 600),
        ("1", "9" * 6000),
    ],
)
def test_unequal_numbers(given: str, expected: str) -> None:
    assert not answers_equal(given, expected, "number")


@given(st.integers(-(10**30), 10**30), st.integers(0, 6))
def test_any_way_to_write_a_number_is_that_number(value: int, zeros: int) -> None:
    ways = [
        f"{value:,}",
        f"{value}.{'0' * zeros}",
        f"${value}",
        f"{value * 7}/7",
        f" {value}. ",
        f"{value}%",
        f"{value}e0",
    ]
    assert all(answers_equal(way, str(value), "number") for way in ways)
    assert not any(answers_equal(way, str(value + 1), "number") for way in ways)


@given(st.text(alphabet="0123456789,.$%+-/eE \\\n") | st.text(), st.text(alphabet="0123456789,./") | st.text())
def test_number_comparison_never_raises(given_text: str, expected: str) -> None:
    assert answers_equal(given_text, expected, "number") in (True, False)


def test_exact_is_text_without_surrounding_whitespace() -> None:
    assert answers_equal(" a b\n", "a b", "exact")
    assert not answers_equal("18.0", "18", "exact")
    assert not answers_equal("A", "a", "exact")
    assert not answers_equal(" ", "", "exact")


def test_unknown_kind() -> None:
    with pytest.raises(RewardError, match="answer kind 'maths': use one of number, math, exact"):
        answers_equal("1", "1", "maths")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (r"\frac{1}{2}", "0.5"),
        (r"\dfrac12", r"\frac{1}{2}"),
        ("1/2", r"\frac12"),
        ("$\\frac{1}{2}$", "0.5"),
        (r"\(\frac{1}{2}\)", "0.5"),
        (r"\[ \frac{1}{2} \]", "0.5"),
        (r"\boxed{\frac{1}{2}}", "0.5"),
        (r"$\boxed{5}$.", "5"),
        (r"2\sqrt{5}", r"\sqrt{20}"),
        ("3-13x", "-13x+3"),
        ("(x-1)(x+1)", "x^2-1"),
        ("x=5", "5"),
        ("5", "x=5"),
        ("2,1", "1,2"),
        ("(3, 4]", "(3,4]"),
        ("$36", r"\$36"),
        ("-$36", "-36"),
        ("10080", r"10,\!080"),
        ("90", r"90^\circ"),
        ("Evelyn", r"\text{Evelyn}"),
        ("C", r"\text{(C)}"),
        (r"1+\sqrt{19},1-\sqrt{19}", r"1 \pm \sqrt{19}"),
        (r"\frac{275}{2}", r"137 \frac{1}{2}"),
        ("\\begin{pmatrix} -2 \\\\\n -14 \\end{pmatrix}", r"\begin{pmatrix} -2 \\ -14 \end{pmatrix}"),
        ("5.4", r"5.4 \text{ cents}"),
    ],
)
def test_equal_formulas(given: str, expected: str) -> None:
    assert answers_equal(given, expected, "math")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (r"\frac{1}{3}", "0.5"),
        ("(3,4)", "(3,4]"),
        ("(1,2)", "(2,1)"),
        ("5", "-5"),
        # more than one answer is none
        ("1,2", "2"),
        ("1 or 2", "2"),
        ("$1$ and $2$", "2"),
        ("$1$ $2$", "2"),
        ("1$ $2$ $", "2"),
        (r"\boxed{1} \boxed{2}", "2"),
        (r"1} \boxed{2", "2"),
        ("2}{1", "2"),
        (r"\(1\) \(2\)", "2"),
        ("1\n2", "2"),
        ("$", "2"),
        ("$$", "2"),
        (r"\$", "2"),
        ("{", "2"),
        ("", ""),
    ],
)
def test_unequal_formulas(given: str, expected: str) -> None:
    assert not answers_equal(given, expected, "math")


# --- hostile answers and the helper process -------------------------------------------------------------------------


@pytest.fixture
def fresh_helper(monkeypatch: pytest.MonkeyPatch) -> Iterator[rewards._Helper]:
    """A helper of the test's own, so that limits can be lowered."""
    helper = rewards._Helper()
    monkeypatch.setattr(rewards, "_helper", helper)
    rewards._math_equal.cache_clear()
    yield helper
    helper.stop()
    rewards._math_equal.cache_clear()


@pytest.fixture(scope="module")
def impatient_helper() -> Iterator[rewards._Helper]:
    helper = rewards._Helper()
    yield helper
    helper.stop()


@pytest.fixture
def short_limit(impatient_helper: rewards._Helper, monkeypatch: pytest.MonkeyPatch) -> rewards._Helper:
    """A lower limit on processor time, for what is to exceed it."""
    monkeypatch.setattr(rewards, "_helper", impatient_helper)
    monkeypatch.setattr(rewards, "_CPU_SECONDS", 0.3)
    return impatient_helper


SLOW = "(" * 250 + "5" + ")" * 250  # the grammar takes minutes


@pytest.mark.parametrize(
    "hostile",
    [
        "10**10**10",
        "10^{10^{10}}",
        r"\sum_{i=1}^{10^9} \frac{1}{i^2}",
        "(x+1)^{10^7}",
        r"\sqrt{" * 80 + "2" + "}" * 80,
        "1+" * 200 + "1",
        "9" * 510,
        "\\" * 511,
        "\x00",
        "\ud800",
        r"\{\text{__import__('os').abort()}\}",
        "__import__('os').abort()",
        '\n{"given": "5", "expected": "5"}\n',
    ],
)
@pytest.mark.usefixtures("short_limit")
def test_hostile_answers_are_wrong(hostile: str) -> None:
    assert not answers_equal(hostile, "5", "math")


def test_hostile_answers_harm_nothing_after_them(short_limit: rewards._Helper) -> None:
    for n, hostile in enumerate(["10^{10^{10}}", r"\text{__import__('os').abort()}"]):
        assert not answers_equal(hostile, "5", "math")
        assert answers_equal(f"{n}.0", str(n), "math")


@pytest.mark.parametrize("kind", ["number", "math", "exact"])
def test_a_very_long_answer_is_wrong_without_looking(kind: rewards.AnswerKind) -> None:
    assert not answers_equal("5" * 100_000, "5" * 100_000, kind)
    assert not answers_equal("{" * 100_000, "5", kind)


def test_a_comparison_over_its_limit_is_ended_and_the_next_one_works(
    fresh_helper: rewards._Helper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewards, "_CPU_SECONDS", 0.3)
    assert not answers_equal(SLOW, "5", "math")
    assert fresh_helper._process is None
    assert answers_equal("5.0", "5", "math")
    first = fresh_helper._process
    assert answers_equal("6.0", "6", "math")
    assert fresh_helper._process is first  # persistent while nothing goes wrong


def test_a_helper_that_hangs_is_killed_by_the_clock(
    fresh_helper: rewards._Helper, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "print('ready', flush=True); import time; time.sleep(600)"
    monkeypatch.setattr(rewards, "_command", lambda: [sys.executable, "-c", script])
    monkeypatch.setattr(rewards, "_WALL_SECONDS", 0.1)
    assert not answers_equal("5.0", "5", "math")
    assert fresh_helper._process is None


def test_a_helper_that_died_idle_costs_no_answer(fresh_helper: rewards._Helper) -> None:
    assert answers_equal("5.0", "5", "math")
    assert fresh_helper._process is not None
    fresh_helper._process.kill()
    assert answers_equal("6.0", "6", "math")


def test_a_helper_that_cannot_start_is_an_error(fresh_helper: rewards._Helper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards, "_command", lambda: [sys.executable, "-c", "print('No module named math_verify')"])
    with pytest.raises(RewardError, match=r"did not start .No module named math_verify.: install math-verify"):
        answers_equal("5.0", "5", "math")
    monkeypatch.setattr(rewards, "_command", lambda: ["/nonexistent/python"])
    with pytest.raises(RewardError, match=r"cannot be started: .*No such file"):
        answers_equal("5.0", "5", "math")


def test_many_threads_share_the_helper(fresh_helper: rewards._Helper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards, "_CPU_SECONDS", 1.0)
    pairs = [(f"\\frac{{{n}}}{{2}}", str(n / 2)) for n in range(40)] + [(str(n), str(n + 1)) for n in range(40)]
    pairs.insert(20, (SLOW, "5"))
    with ThreadPoolExecutor(8) as pool:
        verdicts = list(pool.map(lambda pair: answers_equal(*pair, "math"), pairs))
    assert verdicts == [given_text.startswith("\\frac") for given_text, _ in pairs]
    assert threading.active_count() < 20


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_a_forked_child_has_a_helper_of_its_own() -> None:
    script = """
import os
from ftis import rewards
assert rewards.answers_equal("5.0", "5", "math")
mine = rewards._helper._process.pid
if (child := os.fork()) == 0:
    ok = rewards.answers_equal("7.0", "7", "math") and rewards._helper._process.pid != mine
    rewards._helper.stop()
    os._exit(0 if ok else 1)
assert os.waitpid(child, 0)[1] == 0
assert rewards.answers_equal("6.0", "6", "math") and rewards._helper._process.pid == mine
print(mine)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    with pytest.raises(ProcessLookupError):  # gone with its parent
        os.kill(int(done.stdout), 0)


def test_the_helper_is_limited_in_memory_and_evaluates_no_text() -> None:
    pytest.importorskip("resource")
    script = """
import io, os, sys
from ftis import rewards
replies_to, os.dup2 = os.dup(1), lambda *_: None
sys.argv = ["rewards", "5"]
sys.stdin = io.TextIOWrapper(io.BytesIO(b""))
rewards._serve()
import sympy
try:
    assert sympy.Number("2.5") == 2.5
    sympy.sympify("__import__('os').abort()")
except (ValueError, sympy.SympifyError):
    print("refused")
try:
    bytearray(3 << 30)
except MemoryError:
    print("limited")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["ready", "refused", "limited"], done.stderr


# --- the reward -----------------------------------------------------------------------------------------------------


def test_reward_needs_format_and_answer() -> None:
    completions = [RIGHT, RIGHT.replace("<answer>4", "<answer>5"), "4", "<answer>4</answer>"]
    scores = format_and_answer(["2+2"] * 4, completions, [[1]] * 4, answer=["4"] * 4, level=[1, 2, 3, 4])
    assert scores == [1.0, 0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="zip"):
        format_and_answer(["2+2"], [RIGHT], [[1]], answer=["4", "4"])


def _another(answer: str) -> str:
    digit = next(i for i, c in enumerate(answer) if c.isdigit())
    return answer[:digit] + str((int(answer[digit]) + 1) % 10) + answer[digit + 1 :]


@pytest.mark.parametrize(("split", "size"), [("train", 7473), ("test", 1319)])
def test_every_gsm8k_solution_is_right_and_wrong_by_a_digit(split: str, size: int) -> None:
    solutions = [row["answer"] for row in rows(f"gsm8k/{split}.jsonl")]
    assert len(solutions) == size
    answers = [s.rpartition("####")[2].strip() for s in solutions]

    def score(given_answers: list[str]) -> list[float]:
        texts = [f"<think>{s}</think><answer>{a}</answer>" for s, a in zip(solutions, given_answers, strict=True)]
        return format_and_answer([""] * size, texts, [[0]] * size, answer=answers, answer_kind="number")

    assert score(answers) == [1.0] * size
    assert score([a.replace(",", "") for a in answers]) == [1.0] * size
    assert score([_another(a) for a in answers]) == [0.0] * size


def test_every_math500_answer_is_itself() -> None:
    answers = [row["answer"] for row in rows("math500/test.jsonl")]
    assert len(answers) == 500
    assert [a for a in answers if not answers_equal(a, a, "math")] == []
    # between dollar signs the text differs, so this goes through the parser
    assert [a for a in answers if not answers_equal(f"${a}$", a, "math")] == []
    wrong = [a for a in answers if a.isdigit() and answers_equal(f"${int(a) + 1}$", a, "math")]
    assert wrong == []


# --- the recipe's own function --------------------------------------------------------------------------------------

PROMPT = Prompt(3, "2+2", "4", {"level": 5, "answer": "shadowed", "prompts": "shadowed"})


def scorer(path: str = "ftis.rewards.format_and_answer", kind: str = "number", answer: str = "auto") -> Scorer:
    return load_scorer(RewardConfig.model_validate({"function": path, "answer": answer}), PromptConfig(), kind)


@pytest.fixture
def my_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "my_rewards.py").write_text(
        "import math, numpy\n"
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
    assert scorer(kind="math").answer_kind == "math"
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


@pytest.mark.usefixtures("my_rewards")
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("lengths", "reward.function = 'lengths': write a dotted path to a function"),
        ("my rewards.f", "write a dotted path"),
        (".f", "write a dotted path"),
        ("no_such_module.f", "there is no module 'no_such_module'; check the spelling, install it, or add"),
        ("my_rewards.sub.f", "there is no module 'my_rewards.sub'"),
        ("my_broken.f", "importing 'my_broken' failed: No module named 'a_module_that_is_not_there'; install"),
        ("my_import.f", "importing 'my_import' failed: cannot import name 'no_such_name'"),
        ("my_rewards.length", "module 'my_rewards' has no 'length'; its functions: lengths, array"),
        ("my_rewards.LEVEL", "is a int, not a function; name a function f[(]prompts"),
        ("my_rewards.closed", "does not take the data set's columns; add [*][*]columns"),
    ],
)
def test_a_path_that_leads_nowhere(path: str, message: str) -> None:
    with pytest.raises(RewardError, match=message) as caught:
        scorer(path)
    assert "\n" not in str(caught.value)
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


def test_an_unknown_answer_kind_of_a_task_is_an_error() -> None:
    with pytest.raises(RewardError, match="answer kind 'prose'"):
        scorer(kind="prose")


@settings(max_examples=50)
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=4))
def test_only_finite_numbers_pass(values: list[float]) -> None:
    score = Scorer(lambda **_: values, "f", "exact", "think", "answer")
    completions, ids = ["x"] * len(values), [[0]] * len(values)
    if all(map(math.isfinite, values)):
        assert score(PROMPT, completions, ids) == tuple(values)
    else:
        with pytest.raises(RewardError, match="finite"):
            score(PROMPT, completions, ids)


def test_an_exception_of_the_users_function_is_named_with_its_line() -> None:
    def broken(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **columns: object) -> None:
        raise KeyError("gold")

    scorer = Scorer(broken, "mine.broken", "exact", "think", "answer")  # type: ignore[arg-type]
    with pytest.raises(RewardError, match=r"'mine.broken' raised KeyError: 'gold' \(.*test_rewards.py, line \d+\)"):
        scorer(Prompt(0, "q", "a"), ["x"], [[1]])
