"""The built-in reward: format, extraction, and equality of numbers and text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftis.config import PromptConfig, RewardConfig
from ftis.prompts import AnswerKind
from ftis.rewards import answers, answers_equal, extract_answer, format_and_answer
from ftis.rewards.answers import require_rewardable
from ftis.rewards.scoring import RewardError, Scorer, load_scorer
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


def test_exact_is_text_without_surrounding_whitespace() -> None:
    assert answers_equal(" a b\n", "a b", "exact")
    assert not answers_equal("18.0", "18", "exact")
    assert not answers_equal("A", "a", "exact")
    assert not answers_equal(" ", "", "exact")


def test_unknown_kind() -> None:
    with pytest.raises(RewardError, match="answer kind 'maths': use one of number, math, exact"):
        answers_equal("1", "1", "maths")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["number", "math", "exact"])
def test_a_very_long_answer_is_right_only_letter_by_letter(kind: AnswerKind) -> None:
    assert answers_equal("5" * 100_000, "5" * 100_000, kind)
    assert not answers_equal("5" * 100_000, "5" * 99_999, kind)
    assert not answers_equal("{" * 100_000, "5", kind)


# --- the reward -----------------------------------------------------------------------------------------------------


def test_reward_needs_format_and_answer() -> None:
    completions = [RIGHT, RIGHT.replace("<answer>4", "<answer>5"), "4", "<answer>4</answer>"]
    scores = format_and_answer(["2+2"] * 4, completions, [[1]] * 4, answer=["4"] * 4, level=[1, 2, 3, 4])
    assert scores == [1.0, 0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="zip"):
        format_and_answer(["2+2"], [RIGHT], [[1]], answer=["4", "4"])


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"so \boxed{4}.", "4"),
        (r"\boxed{3} or \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{a{b}{c{d}}e} tail }", "a{b}{c{d}}e"),
        (r"\boxed{ 7 }", "7"),
        (r"\boxed{}", None),
        (r"\boxed{4", None),
        (r"\boxed{3} then \boxed{4", None),
        ("4", None),
    ],
)
def test_the_last_box(completion: str, answer: str | None) -> None:
    assert extract_answer(completion, extract="boxed") == answer


@given(st.text(alphabet="0123456789,./-$ ax\\{}boxed%\n") | st.text())
def test_every_way_to_extract_takes_any_text_and_gives_a_part_of_it(text: str) -> None:
    for extract in ("tags", "boxed", "last_number"):
        found = extract_answer(text, extract=extract)
        assert found is None or found == found.strip() != ""
        assert found is None or found in text or extract == "last_number"  # digit gaps are closed


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1" * 200_000, "1" * 200_000),
        ("1," * 200_000, "1"),
        ("1/" * 200_000, "1/1"),
        ("\\boxed{" * 100_000, None),
        ("-" * 200_000, None),
    ],
    ids=["digits", "commas", "strokes", "boxes", "signs"],
)
def test_a_long_text_is_searched_at_once(text: str, number: str | None) -> None:
    """Quadratic time would be minutes."""
    assert extract_answer(text, extract="last_number") == number
    assert extract_answer(text, extract="boxed") is None


@pytest.mark.parametrize(
    ("completion", "extract", "weight", "reward"),
    [
        (RIGHT, "tags", 0.25, 1.0),
        (RIGHT.replace(">4<", ">5<"), "tags", 0.25, 0.25),
        ("<answer>4</answer>", "tags", 0.25, 0.75),
        ("it is <answer>5</answer>, no <answer> 4 </answer> yes", "tags", 0.25, 0.75),
        ("4", "tags", 0.25, 0.0),
        ("</answer>4<answer>", "tags", 0.25, 0.0),
        ("the 5", "last_number", 0.25, 0.25),
        ("the 4", "last_number", 0.25, 1.0),
        (r"\boxed{4}", "boxed", 0.0, 1.0),
        (r"\boxed{5}", "boxed", 0.0, 0.0),
        (RIGHT.replace(">4<", ">5<"), "tags", 1.0, 1.0),
        (RIGHT, "tags", None, 1.0),
        ("<answer>4</answer>", "tags", None, 0.0),
        ("the 4", "last_number", None, 1.0),
        (r"\boxed{5}", "boxed", None, 0.0),
    ],
)
def test_format_and_answer_weigh_apart(completion: str, extract: str, weight: float | None, reward: float) -> None:
    """w f + (1 − w) a; without w both must be right."""
    given = {"extract": extract, "format_weight": weight}
    assert format_and_answer(["q"], [completion], [[1]], answer=["4"], **given) == [reward]  # type: ignore[arg-type]


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


# --- problems that earn nothing -------------------------------------------------------------------------------------


def reward_of(kind: AnswerKind, **settings: object) -> Scorer:
    return load_scorer(RewardConfig.model_validate(settings), PromptConfig(), kind)


def require(answer: str, kind: AnswerKind, **settings: object) -> None:
    problems = [Prompt(6, "q", "7"), Prompt(7, "q", answer)]
    require_rewardable(reward_of(kind, **settings), problems, "task 'mine', training problem")


@pytest.mark.parametrize(
    ("answer", "kind", "extract"),
    [
        ("two", "exact", "tags"),
        ("1,000", "number", "boxed"),
        (r"\frac{1}{2}", "math", "boxed"),
        (r"\frac{1}{2}", "math", "tags"),
        ("1,000", "exact", "last_number"),
        ("-3", "exact", "last_number"),
        ("12 dollars", "number", "last_number"),
        (" 12 ", "exact", "tags"),
        ("x=5", "math", "last_number"),
        ("x" * 600, "exact", "tags"),
    ],
)
def test_a_problem_whose_answer_earns_its_reward_is_taken(answer: str, kind: AnswerKind, extract: str) -> None:
    require(answer, kind, extract=extract)


@pytest.mark.parametrize(
    ("answer", "kind", "extract", "told"),
    [
        ("two", "exact", "last_number", r"answer 'two' earns nothing .*'last_number': only numbers .*\"tags\" or"),
        ("two", "number", "tags", r"'two' is no number, and .*compared as numbers: set reward.answer = \"exact\""),
        ("two", "number", "last_number", r"'two' is no number, .* \"math\" with reward.extract = \"tags\", or"),
        (" ", "number", "tags", "' ' earns nothing .*: it may not be blank"),
        ("12 dollars", "exact", "last_number", "'12 dollars' earns nothing"),
        (r"\sqrt{2}", "math", "last_number", "earns nothing"),
        ("{", "exact", "boxed", "'{' earns nothing .*'boxed': the braces .* must balance; set"),
        ("} {", "exact", "boxed", "earns nothing"),
        ("</answer>", "exact", "tags", "nor hold the tags; choose others by prompt.think_tag"),
        (" ", "exact", "tags", "' ' earns nothing"),
        ("", "exact", "boxed", "'' earns nothing"),
    ],
)
def test_a_problem_that_cannot_be_rewarded_is_refused(answer: str, kind: AnswerKind, extract: str, told: str) -> None:
    with pytest.raises(RewardError, match=f"^task 'mine', training problem 7 \\('.*'\\): its .*{told}"):
        require(answer, kind, extract=extract)


def test_a_format_that_has_a_weight_of_its_own_does_not_hide_it() -> None:
    require("3", "exact", extract="last_number", format_weight=0.2)
    with pytest.raises(RewardError, match="'3 4' earns nothing"):
        require("3 4", "exact", extract="last_number", format_weight=0.2)


def test_answers_that_come_out_as_they_were_put_in_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "answer_score", lambda *_: pytest.fail("compared"))
    for extract in ("tags", "boxed", "last_number"):
        problems = [Prompt(n, "q", str(n)) for n in range(1000)]
        require_rewardable(reward_of("math", extract=extract), problems, "task 'mine', problem")


def test_another_function_has_answers_of_its_own() -> None:
    with_own = Scorer(lambda **_: [0.0], "mine.own", {"extract": "last_number"})
    require_rewardable(with_own, [Prompt(0, "q", "two")], "task 'mine', problem")
    require_rewardable(lambda *_: (0.0,), [Prompt(0, "q", "two")], "task 'mine', problem")


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("extract", ["tags", "boxed", "last_number"])
def test_every_answer_of_gsm8k_can_be_rewarded_in_every_format(split: str, extract: str) -> None:
    gold = [row["answer"].rpartition("####")[2].strip() for row in rows(f"gsm8k/{split}.jsonl")]
    problems = [Prompt(n, "q", answer) for n, answer in enumerate(gold)]
    require_rewardable(reward_of("number", extract=extract), problems, f"gsm8k, {split} problem")


@pytest.mark.parametrize("extract", ["tags", "boxed"])
def test_every_answer_of_math500_can_be_rewarded(extract: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = [Prompt(n, "q", row["answer"]) for n, row in enumerate(rows("math500/test.jsonl"))]
    monkeypatch.setattr(answers, "answer_score", lambda *_: pytest.fail("compared"))
    require_rewardable(reward_of("math", extract=extract), problems, "math500, problem")
