"""The built-in tasks: where their problems come from, how they are split, and what they refuse."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow
import pytest
from commands import real_problems
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from ftis.prompts import TaskError
from ftis.rewards import answers_equal
from ftis.rollouts import Prompt
from ftis.tasks import clock, gym, words
from ftis.tasks.clock import clock_held_out, clock_problem, clock_solution
from ftis.tasks.problems import Problem
from ftis.tasks.splitting import hold_out
from recipes import task_of as load


def fails(message: str, name: str, **keys: Any) -> None:
    with pytest.raises(TaskError) as caught:
        load(name, **keys)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def write_lines(file: Path, rows: Iterable[Any]) -> Path:
    file.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return file


def questions(prompts: tuple[Prompt, ...]) -> list[str]:
    return [prompt.question for prompt in prompts]


def test_a_setting_that_would_be_ignored_is_an_error() -> None:
    for name, key, value in (
        ("gsm8k", "question_field", "q"),
        ("gsm8k", "options", {"operators": 2}),
        ("math500", "train_size", 5),
        ("jsonl", "options", {"size": 2}),
        ("clock", "path", "somewhere"),
        ("word_problems", "answer_field", "a"),
        ("reasoning_gym:leg_counting", "train_file", "x.jsonl"),
    ):
        fails(f"task.{key} = {value!r}: means nothing to {name!r}", name, **{key: value})


def gsm8k_rows(n: int, start: int = 0) -> list[dict[str, str]]:
    numbers = range(start, start + n)
    return [{"question": f"{i}+1000?", "answer": f"{i}+1000={i + 1000} #### no\n#### {i + 1000:,}"} for i in numbers]


def test_gsm8k_from_a_directory(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", [*gsm8k_rows(49), "", {"question": "?", "answer": "#### -3 "}])
    write_lines(tmp_path / "test.jsonl", gsm8k_rows(50, start=100))
    keys: dict[str, Any] = {"path": str(tmp_path)}
    task = load("gsm8k", **keys)
    assert (task.answer_kind, [p.item for p in task.train]) == ("number", list(range(50)))
    assert (task.train[3].question, task.train[3].answer) == ("3+1000?", "1003")
    assert task.train[3].columns == {"solution": "3+1000=1003 #### no\n#### 1,003"}
    assert task.train[49].answer == "-3"
    assert questions(task.validation) == [f"{i}+1000?" for i in range(100, 150)]
    for key in ("train_size", "validation_size"):
        fails(f"task.{key} = 51: there are only 50 problems", "gsm8k", **keys, **{key: 51})
    keys |= {"train_size": 10, "validation_size": 10}  # drawn by the seed, in their order
    task = load("gsm8k", **keys)
    assert task == load("gsm8k", **keys)
    assert len({load("gsm8k", seed=seed, **keys).digest for seed in (0, 1, -1)}) == 3
    numbers = [int(question.partition("+")[0]) for question in questions(task.validation)]
    assert numbers == sorted(set(numbers)) != list(range(100, 110))
    assert load("gsm8k", **{**keys, "validation_size": 3}).digest == task.digest


def test_both_from_the_hub_and_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "main").mkdir()
    for split, rows in (("train", gsm8k_rows(6)), ("test", gsm8k_rows(4, start=50))):
        for shard in (0, 1):
            file = tmp_path / "main" / f"{split}-{shard:05}-of-00002.parquet"
            parquet.write_table(pyarrow.Table.from_pylist(rows[shard::2]), file)
    others = {"solution": "So.", "subject": "Algebra", "level": 2, "unique_id": "x/1"}
    problems: list[dict[str, Any]] = [{"problem": "What?", "answer": r"\frac12"}, {"problem": "Why?", "answer": 7}]
    write_lines(tmp_path / "test.jsonl", [{**problem, **others} for problem in problems])
    download = Mock(return_value=str(tmp_path))
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    task = load("math500")
    assert download.call_args.args == ("HuggingFaceH4/MATH-500",)
    assert (task.train, task.answer_kind, questions(task.validation)) == ((), "math", ["What?", "Why?"])
    assert [p.answer for p in task.validation] == [r"\frac12", "7"]
    assert task.validation[0].columns == others
    assert load("math500", path=str(tmp_path), validation_size=1).validation[0].item == 0
    (tmp_path / "test.jsonl").unlink()
    task = load("gsm8k")
    patterns = ["main/train-*.parquet", "main/test-*.parquet"]
    download.assert_called_with("openai/gsm8k", repo_type="dataset", allow_patterns=patterns)
    assert sorted(p.answer for p in task.train) == [f"{1000 + i}" for i in range(6)]
    assert len(task.validation) == 4
    assert load("gsm8k", path="someone/else").digest == load("gsm8k", path=str(tmp_path)).digest == task.digest
    assert download.call_args.args == ("someone/else",)
    for error in (OSError("no route\nto host"), ValueError("bad id"), FileNotFoundError("offline")):
        download.side_effect = error
        fails("'openai/gsm8k' cannot be fetched", "gsm8k")
        fails("set task.path", "math500")


def test_gsm8k_errors(tmp_path: Path) -> None:
    train, test = tmp_path / "train.jsonl", tmp_path / "test.jsonl"
    path = str(tmp_path)
    fails("leave it out to use 'openai/gsm8k'", "gsm8k", path=f"{path}/missing")
    fails(f"{path}: holds no 'train' split; put train.jsonl or main/train-*.parquet there", "gsm8k", path=path)
    write_lines(train, gsm8k_rows(3))
    fails("holds no 'test' split", "gsm8k", path=path)
    fails("is a file", "gsm8k", path=str(train))
    write_lines(test, gsm8k_rows(3))
    fails("share 3 questions, the first of them '0+1000?'", "gsm8k", path=path)
    for answer in ("42", "####", "42 #### \n"):
        write_lines(test, [*gsm8k_rows(1, 10), {"question": "q", "answer": answer}])
        fails(f"{test}, line 2: 'answer' has no final answer", "gsm8k", path=path)
    train.unlink()
    (tmp_path / "train-00000.parquet").write_bytes(b"not parquet")
    fails("cannot be read as Parquet", "gsm8k", path=path)


def test_gsm8k_and_math500_as_they_are() -> None:
    task = load("gsm8k", path=str(real_problems("gsm8k/train.jsonl").parent))
    assert (len(set(questions(task.train))), len(task.validation)) == (7473, 1319)
    assert all(answers_equal(p.answer, str(int(p.answer)), "number") for p in task.train + task.validation)
    task = load("math500", path=str(real_problems("math500/test.jsonl").parent))
    assert (len(task.train), len(task.validation)) == (0, 500)


GOOD = {"question": "q", "answer": "a"}


def test_jsonl_file_holds_out_by_seed(tmp_path: Path) -> None:
    rows = [{"question": f"q{i}", "answer": i, "tag": [i]} for i in range(50)]
    file = str(write_lines(tmp_path / "p.jsonl", rows))
    task = load("jsonl", path=file)
    assert (len(task.train), len(task.validation), task.answer_kind) == (45, 5, "exact")
    assert Counter(questions(task.train + task.validation)) == Counter(f"q{i}" for i in range(50))
    assert all(p.columns == {"tag": [int(p.answer)]} for p in task.train)
    assert [p.item for p in task.validation] == list(range(5))
    assert questions(load("jsonl", path=file, seed=1).validation) != questions(task.validation)
    assert questions(load("jsonl", path=file, train_size=7).validation) == questions(task.validation)
    assert len(load("jsonl", path=file, validation_size=20).train) == 30
    fails("holding out 50 of 50 different problems", "jsonl", path=file, validation_size=50)
    fails("task.train_size = 46: there are only 45 problems", "jsonl", path=file, train_size=46)
    many = write_lines(tmp_path / "many.jsonl", [{**GOOD, "question": f"q{i}"} for i in range(2000)])
    assert len(load("jsonl", path=str(many)).validation) == 100


@settings(max_examples=30)
@given(st.integers(2, 60), st.integers(0, 10**6), st.data())
def test_a_hold_out_is_a_partition_without_copies(n: int, seed: int, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, n - 1))
    problems: list[Problem] = [(f"q{i}", "a", {}) for i in range(n)]
    copies: list[Problem] = [(f"q{i} \n", "a", {}) for i in range(n)]  # white space makes no other problem
    train, validation = hold_out(problems + copies, size, seed, "here")
    assert len(validation) == size
    assert sorted(train[: n - size] + validation, key=problems.index) == problems
    assert [(question.strip(), *rest) for question, *rest in train[n - size :]] == train[: n - size]


def test_a_column_that_a_row_lacks_is_none(tmp_path: Path) -> None:
    """As in Hugging Face's data sets. A reward function may name it."""
    rows = [{"question": f"q{i}", "answer": i, **({"level": i} if i != 7 else {})} for i in range(20)]
    write_lines(tmp_path / "train.jsonl", rows)
    write_lines(tmp_path / "validation.jsonl", [{"question": "q", "answer": 1, "unit": "km"}])
    alone, task = load("jsonl", path=str(tmp_path / "train.jsonl")), load("jsonl", path=str(tmp_path))
    levels = {f"q{i}": i if i != 7 else None for i in range(20)}
    for prompts in ((*alone.train, *alone.validation), task.train):
        assert {p.question: p.columns["level"] for p in prompts} == levels
    assert task.validation[0].columns == {"level": None, "unit": "km"}
    assert task.train[0].columns == {"level": 0, "unit": None}


def test_jsonl_directory_and_fields(tmp_path: Path) -> None:
    fails("task.path is missing", "jsonl")
    fails("there is no such file or directory", "jsonl", path=str(tmp_path / "nothing"))
    fails("task.train_file = 'train.jsonl': there is no such file", "jsonl", path=str(tmp_path))
    write_lines(tmp_path / "validation.jsonl", [{"q": "3", "a": "z"}, {"q": "4", "a": "z"}])
    keys = {"path": str(tmp_path), "question_field": "q", "answer_field": "a"}
    alone = load("jsonl", **keys)
    assert (alone.train, questions(alone.validation)) == ((), ["3", "4"])
    fails("is for evaluation only", "jsonl", **keys, train_size=3)
    write_lines(tmp_path / "train.jsonl", ["\ufeff" + json.dumps({"q": "é", "a": " x "}), {"q": "2", "a": 1.5}])
    write_lines(tmp_path / "other.jsonl", [{"q": "5", "a": "z"}])
    task = load("jsonl", **keys)
    assert [(p.question, p.answer) for p in task.train] == [("é", "x"), ("2", "1.5")]
    assert questions(task.validation) == ["3", "4"]
    assert questions(load("jsonl", **keys, validation_file="other.jsonl").validation) == ["5"]
    assert questions(load("jsonl", **keys, train_file="other.jsonl").train) == ["5"]
    single = {**keys, "path": str(tmp_path / "train.jsonl")}
    assert questions(load("jsonl", **single, validation_file="other.jsonl").validation) == ["5"]
    fails("task.path already names a file", "jsonl", **single, train_file="other.jsonl")
    fails("task.validation_file = 'none.jsonl': there is no such file", "jsonl", **keys, validation_file="none.jsonl")
    fails("files there: other.jsonl, train.jsonl, validation.jsonl", "jsonl", **keys, train_file="t.jsonl")
    fails("share 2 questions, the first of them '2'", "jsonl", **keys, validation_file="train.jsonl")


def test_jsonl_errors_name_the_place(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    for rows, place, named in (
        ([], "", "holds no problems"),
        (["", "  "], "", "holds no problems"),
        ([GOOD, "", "{"], ", line 3", "is not JSON"),
        ([GOOD, '{"question": "q", "answer": "3"'], ", line 2", "at column 32"),
        (["[" * 100_000], ", line 1", "is not JSON"),
        (['{"question": NaN}'], ", line 1", "NaN is not a JSON value"),
        ([GOOD, [1]], ", line 2", "is a list"),
        (["null"], ", line 1", "is a NoneType"),
        ([{"answer": "a", "prompt": "q"}], ", line 1", "no field 'question'; fields there: answer, prompt"),
        ([{"question": "q"}], ", line 1", "no field 'answer'; fields there: question"),
        (["{}"], ", line 1", "fields there: none"),
        ([{"question": "q\ud800", "answer": "a"}], ", line 1", r"'question' holds '\ud800'"),
        ([GOOD, GOOD], "", "holding out 1 of 1 different problems"),
        *(([{**GOOD, "question": odd}], ", line 1", f"'question' is {odd!r}") for odd in (3, " ", None)),
        *(([{**GOOD, "answer": odd}], ", line 1", f"'answer' is {odd!r}") for odd in (None, True, ["a"], "")),
        (['{"question": "q", "answer": 1e999}'], ", line 1", "'answer' is inf"),
    ):
        write_lines(file, rows)  # type: ignore[arg-type]
        fails(f"{file}{place}: ", "jsonl", path=str(file))
        fails(named, "jsonl", path=str(file))
    file.write_bytes(b'{"question": "\xe9", "answer": "1"}\n')
    fails("is not UTF-8", "jsonl", path=str(file))


@given(st.integers(0, 2**32), st.integers(1, 6))
def test_clock_problems_are_solved_left_to_right(seed: int, operators: int) -> None:
    question = clock_problem(np.random.default_rng(seed), operators)
    steps, value = [], int(question[0])
    for i in range(1, len(question), 2):
        step = f"{value}{question[i : i + 2]}"
        value = eval(f"({step}) % 10")
        steps.append(f"{step}={value}")
    assert len(steps) == operators
    assert clock_solution(question) == (tuple(steps), str(value))


def test_what_is_no_clock_problem_has_no_solution() -> None:
    for question in ("", "3", "3+", "3+0", "33+1", "3/1", "3 + 1", "3+1=", "٣+1"):
        with pytest.raises(TaskError, match="is not a clock problem"):
            clock_solution(question)


def test_clock_trains_on_all_that_is_not_held_out() -> None:
    task, other = load("clock"), load("clock", seed=1)
    for drawn in (task, load("clock", options={"operators": 4}, train_size=400, validation_size=50)):
        assert not any(map(clock_held_out, questions(drawn.train)))
        assert all(map(clock_held_out, questions(drawn.validation)))
        assert all(";".join(clock_solution(p.question)[0]) == p.columns["solution"] for p in drawn.train)
        assert all(clock_solution(p.question)[1] == p.answer for p in drawn.train)
    assert len(set(questions(task.validation))) == len(task.validation) == 300
    assert len(set(questions(task.train))) == len(task.train) == 6569  # of 10 * 27**2
    assert (task.answer_kind, other.digest) == ("exact", task.digest)
    assert questions(other.validation) != questions(task.validation)
    assert len(load("clock", train_size=100).train) == 100
    keys = {"options": {"operators": 4}, "train_size": 400, "validation_size": 50}
    task = load("clock", **keys)
    assert (len(set(questions(task.train))), len(set(questions(task.validation)))) == (400, 50)
    assert task == load("clock", **keys)
    assert task.digest != load("clock", seed=1, **keys).digest
    # which are held out never changes
    assert len(load("clock", options={"operators": 1}).train) == 237
    assert [q for q in ("3+8*7", "1+1", "2*9", "0-3", "6+1") if clock_held_out(q)] == ["2*9"]


def test_options_of_made_up_problems_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, option, *wrong in (
        ("clock", "operators", 0, -1, 33, 2.0, "2", True),
        ("word_problems", "steps", 1, [], [3], [True], "12"),
        ("word_problems", "largest", 4, 1001, 6.0, True),
    ):
        fails(f"task.options.{option}s: ", name, options={f"{option}s": 2})
        for value in wrong:
            fails(f"task.options.{option} = {value!r}: ", name, options={option: value})
    fails("task.train_size = 7000: there are only 6569", "clock", train_size=7000)
    fails("task.validation_size = 40: there are only 33", "clock", options={"operators": 1}, validation_size=40)
    monkeypatch.setattr(clock, "_ENUMERATED", 0)
    fails("task.train_size = 238: ", "clock", options={"operators": 1}, train_size=238)
    monkeypatch.setattr(words, "NAMES", ("Amy",))
    monkeypatch.setattr(words, "THINGS", ("eggs",))
    few = {"options": {"steps": [1], "largest": 5}, "train_size": 100}
    fails("task.train_size = 100: there are too few", "word_problems", **few)


def numbers_of(question: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", question)]


def test_word_problem_answers() -> None:
    answers = {
        1: [([3, 4], 7), ([9, 2], 11), ([9, 2], 7), ([5, 5], 0), ([6, 7], 42)],
        2: [([4, 8, 12], 0), ([10, 8, 3], 5), ([3, 4, 5], 17)],
    }
    for steps, stories in words.STORIES.items():
        for (text, solve), (numbers, answer) in zip(stories, answers[steps], strict=True):
            assert solve(*numbers) == answer
            named = dict(zip("abc", numbers, strict=False))
            assert numbers_of(text.format(name="Amy", things="eggs", **named)) == numbers  # in the order of solve


def test_word_problems() -> None:
    task = load("word_problems")
    assert (len(task.train), len(task.validation), task.answer_kind) == (2000, 200, "number")
    assert {len(numbers_of(p.question)) for p in task.train} == {2, 3}
    for prompt in (*task.train, *task.validation):
        assert all(2 <= n <= 12 for n in numbers_of(prompt.question))
        assert int(prompt.answer) >= 0
    assert task == load("word_problems")
    assert task.digest != load("word_problems", seed=1).digest
    small: dict[str, Any] = {"options": {"steps": [1], "largest": 9}, "train_size": 3000, "validation_size": 300}
    task, other = load("word_problems", **small), load("word_problems", seed=3, **small)
    parts = task.train, task.validation, other.validation
    train, held, others = ({tuple(sorted(numbers_of(p.question))) for p in part} for part in parts)
    assert not train & held  # numbers of validation never occur together in training
    assert (len(train | held), held) == (36, others)  # of two numbers from 2 to 9, in either order


def test_reasoning_gym_makes_the_same_problems_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("reasoning_gym")
    # this data set follows the order of Python's sets of strings, which is another in each process
    keys = {"train_size": 30, "validation_size": 10}
    task = load("reasoning_gym:isomorphic_strings", **keys)
    monkeypatch.setenv("PYTHONHASHSEED", "77")
    assert load("reasoning_gym:isomorphic_strings", **keys) == task
    assert (len(task.train), len(task.validation), task.answer_kind) == (30, 10, "exact")
    assert task.train[0].columns["metadata"]["source_dataset"] == "isomorphic_strings"
    assert load("reasoning_gym:isomorphic_strings", seed=1, **keys).digest != task.digest


def test_only_some_data_sets_score_answers_themselves() -> None:
    pytest.importorskip("reasoning_gym")
    task = load("reasoning_gym:countdown", options={"max_numbers": 4}, train_size=10, validation_size=4)
    assert task.answer_kind == "reasoning_gym"
    for prompt in (*task.train, *task.validation):
        own = prompt.columns["reasoning_gym"]
        assert (own["dataset"], json.loads(own["options"])) == ("countdown", {"max_numbers": 4})
        entry = json.loads(own["entry"])
        assert (entry["question"], entry["answer"]) == (prompt.question, prompt.answer)
        assert entry["metadata"] == prompt.columns["metadata"]
    for dataset in ("gcd", "rearc"):  # without a scorer of its own; with problems that do not survive JSON
        task = load(f"reasoning_gym:{dataset}", train_size=10, validation_size=4)
        assert task.answer_kind == "exact"
        assert "reasoning_gym" not in task.train[0].columns


def test_reasoning_gym_errors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    legs = "reasoning_gym:leg_counting"
    fails("there is no such data set (did you mean 'leg_counting'?)", "reasoning_gym:leg_countin")
    fails("unexpected keyword argument 'legs'; check task.options", legs, options={"legs": 3})
    fails("task.options.size: set task.train_size", legs, options={"size": 3})
    fails("use numbers, strings, booleans", legs, options={"min_animals": {1}})
    with pytest.raises(TaskError, match="its answer is None, not a text to compare with"):
        list(gym._problems([{"question": None, "answer": None}], "here", None))
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho 'Traceback' >&2\necho 'MemoryError: too large' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    fails(f"{legs}: making problems failed: MemoryError: too large", legs)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(TaskError, match=r"reasoning_gym:x: .*'ftis-rl\[reasoning-gym\]'"):
        gym._entries("x", {}, 1, 0)


def test_reasoning_gym_with_few_different_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    def generate(_: str, __: object, parts: list[tuple[int, int]]) -> tuple[list[list[dict[str, Any]]], bool]:
        drawn = [np.random.default_rng(seed).integers(20, size=size) for size, seed in parts]
        return [[{"question": f"q{number}", "answer": "a"} for number in numbers] for numbers in drawn], False

    monkeypatch.setattr(gym, "_generate", generate)
    for size in ({}, {"validation_size": 20}):
        fails("of 800 problems made for validation only 12", "reasoning_gym:x", train_size=10, **size)
        fails("as to 4, or set task.validation_size = 12,", "reasoning_gym:x", train_size=10, **size)
    task = load("reasoning_gym:x", train_size=10, validation_size=12)
    assert len(task.validation) == len(set(questions(task.validation))) == 12
    fails("lower task.train_size", "reasoning_gym:x", train_size=1000)
