"""The built-in reward: the format, the answer in it, their weights, and problems that nothing can earn."""

from __future__ import annotations

import json
from typing import Any

import pytest
from commands import real_problems
from hypothesis import given
from hypothesis import strategies as st

from ftis.config import PromptConfig, RewardConfig
from ftis.prompts import AnswerKind
from ftis.rewards import answers, extract_answer, format_and_answer
from ftis.rewards.answers import Extract, require_rewardable
from ftis.rewards.scoring import RewardError, Scorer, load_scorer, parts_of
from ftis.rollouts import Prompt

RIGHT = "<think>2+2 is 4</think><answer>4</answer>"
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in real_problems(name).read_text(encoding="utf-8").splitlines()]


COMPLETIONS: list[tuple[Extract, str, str | None]] = [
    ("tags", RIGHT, "4"),
    ("tags", f"\n {RIGHT}\t\n", "4"),
    ("tags", "<think></think>\n\n<answer> 4 </answer>", "4"),
    ("tags", "<think>a\nb</think>\n<answer>x < y\n> z</answer>", "x < y\n> z"),
    ("tags", "<think>a</think><answer> \n</answer>", None),
    ("tags", "<think>a</think>so<answer>4</answer>", None),
    ("tags", "Well, <think>a</think><answer>4</answer>", None),
    ("tags", "<think>a</think><answer>4</answer>.", None),
    ("tags", "<think>a<answer>4</answer></think>", None),
    ("tags", "<think>a</think></answer>4<answer>", None),
    ("tags", "<think>a</answer></think><answer>4", None),
    ("tags", "</think><think><answer>4</answer>", None),
    ("tags", "<THINK>a</THINK><ANSWER>4</ANSWER>", None),
    ("tags", "<think >a</think><answer>4</answer>", None),
    ("tags", "", None),
    ("boxed", r"so \boxed{4}.", "4"),
    ("boxed", r"\boxed{3} or \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    ("boxed", r"\boxed{a{b}{c{d}}e} tail }", "a{b}{c{d}}e"),
    ("boxed", r"\boxed{ 7 }", "7"),
    ("boxed", r"\boxed{}", None),
    ("boxed", r"\boxed{3} then \boxed{4", None),
    ("boxed", "4", None),
]


def test_the_answer_of_a_completion() -> None:
    assert [row for row in COMPLETIONS if extract_answer(row[1], extract=row[0]) != row[2]] == []
    assert extract_answer("<r>a</r><a.b>4</a.b>", "r", "a.b") == "4"
    assert extract_answer("<r>a</r><aXb>4</aXb>", "r", "a.b") is None
    for tag in TAGS:  # each exactly once
        assert extract_answer(RIGHT.replace(tag, "")) is None
        assert extract_answer(RIGHT.replace(tag, tag * 2)) is None


@given(st.lists(st.sampled_from([*TAGS, *" \n4x<>", "</", "\\boxed{", "{", "}"]), max_size=12).map("".join) | st.text())
def test_each_format_takes_any_text_and_gives_a_part_of_it(text: str) -> None:
    for extract in ("tags", "boxed", "last_number"):
        found = extract_answer(text, extract=extract)
        assert found is None or found == found.strip() != ""
        assert found is None or found in text or extract == "last_number"  # digit gaps are closed
    if extract_answer(text) is not None:
        before, middle, after = text.partition("</think>")
        assert before.lstrip().startswith("<think>")
        assert middle
        assert after.strip().startswith("<answer>")
        assert after.strip().endswith("</answer>")
        assert all(text.count(tag) == 1 for tag in TAGS)


@given(*[st.text().filter(lambda text: "<" not in text)] * 2)
def test_an_answer_comes_out_as_it_was_put_in(thought: str, answer: str) -> None:
    assert extract_answer(f"<think>{thought}</think> <answer>{answer}</answer>") == (answer.strip() or None)


def test_a_long_text_is_searched_at_once() -> None:
    """Quadratic time would be minutes."""
    for piece in (*TAGS, "<", " ", "<think></think> ", "\\boxed{", "-"):
        text = piece * (1_000_000 // len(piece))
        assert all(extract_answer(text, extract=extract) is None for extract in ("tags", "boxed", "last_number"))
        assert extract_answer("<think>" + text + "</think><answer>") is None
    for text, number in (("1" * 200_000, "1" * 200_000), ("1," * 200_000, "1"), ("1/" * 200_000, "1/1")):
        assert extract_answer(text, extract="last_number") == number


def test_format_and_answer_are_multiplied_or_weighed() -> None:
    wrong = RIGHT.replace(">4<", ">5<")
    table: list[tuple[Extract, str, int, int]] = [  # with f and a
        ("tags", RIGHT, 1, 1),
        ("tags", wrong, 1, 0),
        ("tags", "<answer>4</answer>", 0, 1),
        ("tags", "it is <answer>5</answer>, no <answer> 4 </answer> yes", 0, 1),
        ("tags", "</answer>4<answer>", 0, 0),
        ("tags", "4", 0, 0),
        ("last_number", "the 4", 1, 1),
        ("last_number", "the 5", 1, 0),
        ("boxed", r"\boxed{4}", 1, 1),
        ("boxed", r"\boxed{5}", 1, 0),
        ("boxed", "4", 0, 0),
    ]
    for extract, text, f, a in table:
        for w in (None, 0.0, 0.25, 1.0):
            (found,) = format_and_answer(
                ["q"], [text], [[1]], answer=["4"], extract=extract, format_weight=w, level=[3]
            )
            assert found == (f * a if w is None else w * f + (1 - w) * a), (text, w)
    with pytest.raises(ValueError, match="zip"):
        format_and_answer(["2+2"], [RIGHT], [[1]], answer=["4", "4"])


@pytest.mark.parametrize(("split", "size"), [("train", 7473), ("test", 1319)])
def test_every_gsm8k_solution_is_right_and_wrong_by_a_digit(split: str, size: int) -> None:
    solutions = [row["answer"] for row in rows(f"gsm8k/{split}.jsonl")]
    gold = [solution.rpartition("####")[2].strip() for solution in solutions]
    assert len(gold) == size

    def score(given_answers: list[str]) -> list[float]:
        texts = [f"<think>{s}</think><answer>{a}</answer>" for s, a in zip(solutions, given_answers, strict=True)]
        return format_and_answer([""] * size, texts, [[0]] * size, answer=gold)

    def another(answer: str) -> str:
        place = next(i for i, character in enumerate(answer) if character.isdigit())
        return answer[:place] + str((int(answer[place]) + 1) % 10) + answer[place + 1 :]

    assert score(gold) == [1.0] * size
    assert score([answer.replace(",", "") for answer in gold]) == [1.0] * size
    assert score([another(answer) for answer in gold]) == [0.0] * size
    for extract in ("tags", "boxed", "last_number"):
        problems = [Prompt(n, "q", answer) for n, answer in enumerate(gold)]
        require_rewardable(reward_of("number", extract=extract), problems, f"gsm8k, {split} problem")


def reward_of(kind: AnswerKind, **settings: Any) -> Scorer:
    return parts_of(load_scorer(RewardConfig.model_validate(settings), PromptConfig(), kind))[0]


def require(answer: str, kind: AnswerKind, extract: str, **settings: Any) -> None:
    problems = [Prompt(6, "q", "7"), Prompt(7, "q", answer)]
    require_rewardable(reward_of(kind, extract=extract, **settings), problems, "task 'mine', training problem")


def test_a_problem_whose_answer_earns_its_reward_is_taken() -> None:
    for kind, extract, *accepted in (
        ("exact", "tags", "two", " 12 ", "x" * 600),
        ("exact", "last_number", "1,000", "-3"),
        ("number", "boxed", "1,000"),
        ("number", "last_number", "12 dollars"),
        ("math", "boxed", r"\frac{1}{2}"),
        ("math", "tags", r"\frac{1}{2}"),
        ("math", "last_number", "x=5"),
    ):
        for answer in accepted:
            require(answer, kind, extract)  # type: ignore[arg-type]
    require("3", "exact", "last_number", format_weight=0.2)
    own: Any = Scorer(lambda **_: [0.0], "mine.own", {"extract": "last_number"})
    for score in (own, lambda *_: (0.0,)):  # another function has answers of its own
        require_rewardable(score, [Prompt(0, "q", "two")], "task 'mine', problem")


def test_a_problem_that_cannot_be_rewarded_is_refused() -> None:
    refused: list[tuple[str, AnswerKind, str, str]] = [
        ("two", "exact", "last_number", "earns nothing.*'last_number'.*\"tags\" or"),
        ("two", "number", "tags", 'is no number.*reward.answer = "exact"'),
        ("two", "number", "last_number", 'is no number.*with reward.extract = "tags"'),
        (" ", "number", "tags", "earns nothing.*blank"),
        ("12 dollars", "exact", "last_number", "earns nothing"),
        (r"\sqrt{2}", "math", "last_number", "earns nothing"),
        ("{", "exact", "boxed", "earns nothing.*'boxed'.*braces"),
        ("} {", "exact", "boxed", "earns nothing"),
        ("</answer>", "exact", "tags", "prompt.think_tag"),
        ("", "exact", "boxed", "earns nothing"),
    ]
    for answer, kind, extract, named in refused:
        for settings in ({}, {"format_weight": 0.2}):  # a weight of the format does not hide it
            with pytest.raises(RewardError, match=f"^task 'mine', training problem 7 \\('.*'\\).*{named}"):
                require(answer, kind, extract, **settings)


def test_answers_that_the_format_leaves_alone_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "answer_score", lambda *_: pytest.fail("compared"))
    for extract in ("tags", "boxed", "last_number"):
        problems = [Prompt(n, "q", str(n)) for n in range(1000)]
        require_rewardable(reward_of("math", extract=extract), problems, "task 'mine', problem")
    for extract in ("tags", "boxed"):
        problems = [Prompt(n, "q", row["answer"]) for n, row in enumerate(rows("math500/test.jsonl"))]
        require_rewardable(reward_of("math", extract=extract), problems, "math500, problem")


def test_an_answer_may_count_what_its_problem_asks_for() -> None:
    asked = [
        ("How many figurines does Ann have?", "5 figurines"),
        ("How many figurines does Ann have?", "\\boxed{5\\text{ figurines}}"),
        ("Combien de moutons reste-t-il ?", "5 moutons"),
        ("Сколько котят у Анны?", "5 котят."),
        ("How many more figurines has she?", "5 more figurines"),
        ("How many dozen figurines are 60?", "5 dozen"),
        ("Find the number of figurines.", "5 figurines"),
        ("How many figurines are a third of each quantity?", "5 figurines"),
        ("Сколько котят у Анны, если ушло несколько котов?", "5 котят"),
        ("How many figurines are there if the number of gizmos is 5?", "5 figurines"),
        ("有多少只小猫在树上？", "5只小猫"),
        ("राम के पास कितनी मूर्तियाँ हैं?", "5 मूर्तियाँ"),
    ]
    other = "A figurine weighs 2 ounces. What do 5 figurines weigh?"
    not_asked = [
        *((other, given_text) for _, given_text in asked),
        ("How many dozen eggs did she buy? In the end, how many eggs are left?", "5 dozen"),
        ("How many thousand dollars does he earn, and how many dollars does he save?", "5 thousand"),
        ("She has a number of pairs. How many shoes (individual shoes, not pairs)?", "5 pairs"),
        ("How many socks in pairs has he?", "5 socks in pairs"),
        ("How many incorrect answers did he give, and how many correct answers?", "5 incorrect answers"),
        ("How many figurines are there if the number of gizmos is 5?", "5 gizmos"),
        ("How many eggs are left?", "5 pairs"),
    ]
    for pairs, reward in ((asked, 1.0), (not_asked, 0.0)):
        texts = [f"<think></think><answer>{given_text}</answer>" for _, given_text in pairs]
        for kind in ("number", "math"):
            problems, n = [problem for problem, _ in pairs], len(pairs)
            assert format_and_answer(problems, texts, [[]] * n, answer=["5"] * n, answer_kind=kind) == [reward] * n
