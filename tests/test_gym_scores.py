"""Answers that reasoning-gym's data sets score themselves, and what hostile ones cannot do there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ftis.config import PromptConfig, RewardConfig, TaskConfig
from ftis.machine import helper
from ftis.machine.helper import Helper
from ftis.rewards import graded, gym, gym_judge
from ftis.rewards.answers import answer_score, require_rewardable
from ftis.rewards.gym_judge import OwnScore
from ftis.rewards.numbers import MAX_ANSWER_LENGTH
from ftis.rewards.scoring import RewardError, load_scorer
from ftis.rollouts import Prompt
from ftis.tasks.problems import load_task

reasoning_gym = pytest.importorskip("reasoning_gym")


def own(dataset: str, answer: str, **metadata: Any) -> OwnScore:
    entry = {"question": "?", "answer": answer, "metadata": {"source_dataset": dataset, **metadata}}
    return OwnScore(dataset=dataset, options="{}", entry=json.dumps(entry))


EXPECTED = "49*(85 - 1)/14 - 42 - 73"
COUNTDOWN = own("countdown", EXPECTED, numbers=[73, 85, 1, 42, 14, 49], target=179)
NUMBERS_24 = {"numbers": [8, 5, 1, 2]}
INTEGRAL = {"integrand": "6*x**2", "variable": "x"}


def score(answer: str) -> float:
    return answer_score(answer, EXPECTED, "reasoning_gym", COUNTDOWN)


def entries_of(dataset: str, seed: int = 5, **options: Any) -> list[dict[str, Any]]:
    made = reasoning_gym.create_dataset(dataset, size=8, seed=seed, **options)
    entries = [{key: made[i][key] for key in ("question", "answer", "metadata")} for i in range(8)]
    return json.loads(json.dumps(entries, default=repr))  # type: ignore[no-any-return]


def test_a_right_answer_is_right_in_any_spelling() -> None:
    for answer in (EXPECTED, "49*(85-1)/14-42-73", " (85 - 1) * 49 / 14 - (73 + 42) ", "-42 + 49*(85 - 1)/14 - 73"):
        assert score(answer) == 1.0
    for dataset, answer, metadata, given, least in (
        ("chain_sum", "-1038", {}, "-1,038.0", 1.0),
        ("simple_integration", "2*x**3 + C", INTEGRAL, "C + x**3 * 2", 1.0),
        ("polynomial_multiplication", "x**2 - 1", {"variables": ["x"]}, "-1+x*x", 1.0),
        ("puzzle24", "8*(5*1 - 2)", NUMBERS_24, "(5*1-2)*8", 1.0),
        ("string_insertion", "ABCD", {}, "['A', 'B', 'C', 'D']", 0.1),
    ):
        assert answer_score(given, answer, "reasoning_gym", own(dataset, answer, **metadata)) >= least
    (entry, *_) = entries_of("bitwise_arithmetic")
    known = OwnScore(dataset="bitwise_arithmetic", options="{}", entry=json.dumps(entry))
    assert answer_score(str(int(entry["answer"], 16)), entry["answer"], "reasoning_gym", known) == 1.0


def test_what_a_scorer_takes_for_an_answer_is_none() -> None:
    for answer in ("", "179", "49*(85 - 1)/14 - 42", "49*(85 - 1)/14 - 42 - 74", "four"):
        assert score(answer) < 0.1
    for spelled in ("179e0+0e0*(73+85+1+42+14+49)", "1_79+0_0*(73+85+1+42+14+49)", "(x+x)/x + 73+85+14-42+49-1-x/x"):
        assert score(spelled) < 0.5
    for dataset, answer, metadata, given in (
        ("simple_integration", "2*x**3 + C", INTEGRAL, "2*x**2 + C"),
        ("simple_integration", "2*x**3 + C", INTEGRAL, "Infinity"),
        ("complex_arithmetic", "3.0 - 2.0i", {"result": [3, -2], "real": 3, "imag": -2}, "nan"),
        ("number_sorting", "['1.0', '2.0']", {"original_numbers": ["2.0", "1.0"]}, "[NaN, NaN]"),
        ("puzzle24", "8*(5*1 - 2)", NUMBERS_24, "6*4*1*1"),
        ("puzzle24", "(10-4)*4", {"numbers": [10, 4, 5, 5]}, "5*5-4/10"),
        ("countdown", "100*5", {"numbers": [1, 99, 98, 5, 100], "target": 500}, "100*5 + 1/(99*98)"),
    ):
        assert answer_score(given, answer, "reasoning_gym", own(dataset, answer, **metadata)) < 0.5


@pytest.fixture
def unguarded() -> Iterator[None]:
    yield
    gym_judge._guard(False)
    gym_judge._dataset.cache_clear()


@pytest.mark.usefixtures("unguarded")
def test_a_data_set_scores_itself_if_right_is_right_and_wrong_is_wrong() -> None:
    for dataset, itself in (
        ("countdown", True),
        ("bitwise_arithmetic", True),  # evaluates its own problem, which stays possible
        ("simple_integration", True),
        ("gcd", False),  # has no scorer of its own
        ("game_of_life_halting", False),  # any text is right there
        ("coin_flip", False),  # 0 is
    ):
        assert gym_judge.scores_itself(dataset, {}, entries_of(dataset)) == itself, dataset
    for seed in (1000, 2000, 3000):
        boards = entries_of("n_queens", seed)
        pairs = [(one, two["answer"].strip()) for one in boards for two in boards if two["answer"] != one["answer"]]
        # another problem's answer may be right here too
        assert any(gym_judge.judge("n_queens", "{}", one, another) == 1 for one, another in pairs)
        assert gym_judge.scores_itself("n_queens", {}, boards)


class Scoring:
    def score_answer(self) -> None:
        """Its own, not the library's."""


def test_when_a_scorer_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 answers so many score 1, of the 56 pairs with another's answer, and of texts that are none."""
    monkeypatch.setattr(gym_judge, "_dataset", lambda dataset, options: object.__new__(Scoring))
    entries: list[dict[str, Any]] = [{"question": f"q{i}", "answer": f"answer {i}", "metadata": {}} for i in range(8)]

    def score(dataset: str, options: str, entry: dict[str, str], text: str) -> float:
        kind = "own" if text == entry["answer"] else "wrong" if text in gym_judge.WRONG else "others"
        left[kind] -= 1
        return float(left[kind] >= 0)

    monkeypatch.setattr(gym_judge, "_score", score)
    for own, others, wrong, itself in (
        *((8, 0, 0, True), (6, 0, 0, True), (5, 0, 0, False)),
        *((8, 27, 0, True), (8, 28, 0, False), (8, 0, 1, False)),
    ):
        left = {"own": own, "others": others, "wrong": wrong}
        assert gym_judge.scores_itself("any", {}, entries) == itself
    monkeypatch.setattr(gym_judge, "_score", lambda dataset, options, entry, text: float(text == "right"))
    for answers, itself in (((None, None), True), ((None, "right"), True), ((None, "odd"), False)):
        entries = [{"question": f"q{i}", "answer": answer, "metadata": {}} for i, answer in enumerate(answers)]
        assert gym_judge.scores_itself("any", {}, entries) == itself


@pytest.mark.parametrize(
    ("dataset", "known"),
    [("graph_color", "possible_answer"), ("propositional_logic", "example_answer"), ("boxnet", None)],
)
def test_any_solution_is_right_if_a_data_set_gives_no_answers(dataset: str, known: str | None) -> None:
    task = load_task(TaskConfig(name=f"reasoning_gym:{dataset}", train_size=12, validation_size=2))
    assert task.answer_kind == "reasoning_gym"
    scorer = load_scorer(RewardConfig(), PromptConfig(), task.answer_kind)
    require_rewardable(scorer, task.train, "problem")
    exact = load_scorer(RewardConfig(answer="exact"), PromptConfig(), task.answer_kind)
    with pytest.raises(RewardError, match="'' earns nothing"):
        require_rewardable(exact, task.train, "problem")
    for problem in task.train[:4]:
        assert problem.answer == ""
        right = problem.columns["metadata"][known] if known else ""
        answers = [right if isinstance(right, str) else json.dumps(right), "", "x", "0", "R U F", "P"]
        texts = [f"<think></think><answer>{answer}</answer>" for answer in answers]
        assert scorer(problem, texts, [[0]] * 6) == (float(bool(known)), *([0.0] * 5))


def test_an_answer_of_thousands_of_characters_has_other_spellings() -> None:
    problems = reasoning_gym.create_dataset("palindrome_partitioning", size=30, seed=0)
    entry = max(problems, key=lambda entry: len(entry["answer"]))
    assert len(entry["answer"]) > 4000 > MAX_ANSWER_LENGTH
    known = own("palindrome_partitioning", entry["answer"], **entry["metadata"])
    partitions = json.loads(entry["answer"])
    backwards, fewer = json.dumps(partitions[::-1]), json.dumps(partitions[1:])
    assert answer_score(backwards, entry["answer"], "reasoning_gym", known) == 1.0
    assert answer_score(fewer, entry["answer"], "reasoning_gym", known) < 1.0
    assert answer_score(backwards + " " * 9999 + "x", entry["answer"], "reasoning_gym", known) == 0.0


@pytest.mark.parametrize("dataset", ["countdown", "polynomial_multiplication", "n_queens", "string_insertion"])
def test_an_answer_is_never_run(dataset: str, tmp_path: Path) -> None:
    touch = f"open({str(tmp_path / 'run')!r}, 'w')"
    entry = own(dataset, "1", numbers=[1], target=1, variables=["x"], valid_answers=["1"])
    for attack in (
        touch,
        f"__import__('pathlib').Path({str(tmp_path / 'run')!r}).touch()",
        f"[c for c in ().__class__.__base__.__subclasses__()] + {touch}",
        f"(lambda: {touch})()",
        f'exec("{touch}")',
        f"1 if {touch} else 2",
        f"Symbol('x').__class__.__init__.__globals__['__builtins__'] or {touch}",
        f"'a'.join([{touch}])",
        f"sqrt.__globals__ and {touch}",
        f"Integer({touch})",
    ):
        gym.score(dataset, entry["options"], entry["entry"], attack)
        assert not (tmp_path / "run").exists()
    assert score("49*(85-1)/14 - 42 - 73") == 1.0  # and the helper goes on


def test_an_answer_that_takes_too_long_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    impatient = Helper("ftis.rewards.gym", "scores answers", "reasoning-gym")
    monkeypatch.setattr(gym, "_helper", impatient)
    monkeypatch.setattr(helper, "CPU_SECONDS", 1.0)
    gym.score.cache_clear()
    for hostile in ("9**9**9**9", "(" * 200 + "1" + ")" * 200, "9" * 500, "\ud800", "\x00"):
        assert score(hostile) < 0.1
    assert score("49*(85-1)/14-73-42") == 1.0
    impatient.stop()


def test_a_formula_is_all_that_sympy_reads() -> None:
    power, quotient = "Integer (3 )*Symbol ('x' )**Integer (2 )+C", "-sin (Symbol ('x' ))/Float ('1.5' )+pi *E"
    for formula in (power, quotient, "Integer (1 )/x"):
        gym_judge.require_formula(formula, {"x": 1, "C": 2})
    calls = "lambda: 1 ¦ Symbol('x', real=True) ¦ Symbol('x')(1) ¦ open ¦ y"
    values = "x.real ¦ x[0] ¦ [1] ¦ 'a b' ¦ f'{x}' ¦ b'a' ¦ None ¦ 1 if x else 2 ¦ x and 1 ¦ x := 1 ¦ x @ x ¦ *x"
    for code in f"{calls} ¦ {values}".split(" ¦ "):
        with pytest.raises((ValueError, SyntaxError)):
            gym_judge.require_formula(code, {"x": 1})


def test_the_reward_is_binary_unless_the_score_is_asked_for() -> None:
    texts = [f"<think>so</think><answer>{text}</answer>" for text in ("(85-1)*49/14 - 73 - 42", "49*85", "no idea")]
    settings: dict[str, Any]
    for settings, rewards in (
        ({}, [1, 0, 0]),
        ({"partial_credit": True}, [1, 0.05, 0]),  # for a formula of some of the numbers
        ({"partial_credit": True, "format_weight": 0.2}, [1, 0.2 + 0.8 * 0.05, 0.2]),
        ({"answer": "exact"}, [0, 0, 0]),
    ):
        scorer = load_scorer(RewardConfig(**settings), PromptConfig(), "reasoning_gym")
        prompt = Prompt(0, "?", EXPECTED, {"reasoning_gym": COUNTDOWN})
        assert scorer(prompt, texts, [[1]] * 3) == pytest.approx(rewards)
    with pytest.raises(RewardError, match="only problems of reasoning-gym"):
        graded("<think></think><answer>1</answer>", "1", "reasoning_gym")
