"""``ftis new``: columns are found, what is written runs as it is, and a mistake leaves nothing behind."""

from __future__ import annotations

import json
import re
import runpy
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from commands import ftis
from conftest import TinyModelDir

from ftis.check.plan import split
from ftis.config import RecipeError
from ftis.draft.problems import problems_in
from ftis.machine import resources
from ftis.recipe.parsing import load

SUMS = [{"id": 10 * a + b, "problem": f"what is {a}+{b}", "result": a + b} for a in range(5) for b in range(4)]


def write(rows: Sequence[dict[str, Any]], file: Path = Path("sums.jsonl")) -> str:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(file)


@pytest.fixture
def models(tmp_path: Path, tiny_model_dir: TinyModelDir, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """``--model`` and ``--lora`` of the same weights; the test works in a directory of its own."""
    monkeypatch.chdir(tmp_path)
    model = str(tiny_model_dir(max_position_embeddings=256))
    return ["--model", model, "--lora", model]


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ([{"question": "a?", "answer": "b"}], ("question", "answer", "exact")),
        (
            [{"Answer": 1, "other": 2, "Prompt": "a?"}, {"Answer": "1,000", "Prompt": "b?"}],
            ("Prompt", "Answer", "number"),
        ),
        ([{"problem": "a?", "target": "\\sqrt2"}], ("problem", "target", "math")),
        ([{"text": "a?", "last": "x"}], ("text", "last", "exact")),  # the only one left
        ([{"question": "a?", "answer": "2,5"}], ("question", "answer", "exact")),  # its last number would be 5
    ],
)
def test_columns_and_the_kind_of_answers_are_found(
    rows: list[dict[str, Any]], found: tuple[str, ...], tmp_path: Path
) -> None:
    file = write(
        [*rows, *({**rows[0], key: f"{value} again"} for key, value in rows[0].items() if value == "a?")],
        tmp_path / "p.jsonl",
    )
    looked = problems_in(file)
    assert (looked.question, looked.answer, looked.kind) == found


@pytest.mark.parametrize("copies", [1, 2, 3, 9])
def test_a_quarter_of_the_questions_is_held_out_however_often_each_stands_there(copies: int, tmp_path: Path) -> None:
    task = problems_in(write(SUMS * copies, tmp_path / "p.jsonl")).task
    assert (len(task.validation), len(task.train)) == (len(SUMS) // 4, (len(SUMS) - len(SUMS) // 4) * copies)
    assert task.copies == len(SUMS) // 4 * (copies - 1)
    assert (f"({task.copies} cop" in split(task)) == (copies > 1)


def test_problems_to_validate_alone_are_refused(tmp_path: Path) -> None:
    write(SUMS, tmp_path / "validation.jsonl")
    with pytest.raises(RecipeError, match=r"only problems to validate with.*train\.jsonl"):
        problems_in(str(tmp_path))


def test_a_column_that_cannot_be_guessed_is_asked_for(tmp_path: Path) -> None:
    file = write([{"left": "a?", "right": "b"}, {"left": "c?", "right": "d"}], tmp_path / "p.jsonl")
    with pytest.raises(RecipeError, match=r"left, right.*--question"):
        problems_in(file)
    with pytest.raises(RecipeError, match=r"--answer write.*right"):
        problems_in(file, "left", "write")
    with pytest.raises(RecipeError, match=r"columns messages: .*--answer"):
        problems_in(write([{"messages": "a?"}], tmp_path / "one.jsonl"))
    assert problems_in(file, "left", "right").task.validation[0].answer in ("b", "d")


@pytest.mark.parametrize("reward", [pytest.param("number", marks=pytest.mark.slow), "own"])
def test_what_is_written_trains_as_it_is(models: list[str], reward: str, capsys: pytest.CaptureFixture[str]) -> None:
    new = ("new", "mine", *models, "--problems", write(SUMS), "--reward", reward)
    assert ftis(*new) == 0
    printed = capsys.readouterr().out
    assert "ftis train mine/recipe.toml --dry-run" in printed
    assert printed.splitlines()[0].endswith("…")  # it says what it does meanwhile
    lines = Path("mine/recipe.toml").read_text().splitlines()
    assert all(re.search(r" = .*  # \w", line) for line in lines if line and not line.startswith("["))
    assert ftis("train", "mine/recipe.toml", "--set", "training.rounds=1", "--set", "processes=inline") == 0
    assert Path("runs/mine-seed0/F-TIS").is_dir()
    assert sorted(file.name for file in Path("mine").glob("*.*")) == ["mine_reward.py"] * (reward == "own") + [
        "recipe.toml"
    ]
    assert ftis(*new) == 1
    assert "mine/recipe.toml" in capsys.readouterr().err


def test_a_mistake_leaves_nothing_behind(
    models: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    long = [*SUMS, {"problem": "what is 1+1 " * 30, "result": 2}]  # more than the model's positions
    assert ftis("new", "a/b", *models, "--problems", write(long), "--reward", "own") == 1
    assert "positions" in capsys.readouterr().err
    assert not Path("a").exists()
    assert ftis("new", "a", *models) == 2  # no terminal to ask on
    assert "--problems" in capsys.readouterr().err


def test_memory_is_saved_on_a_machine_that_lacks_it(models: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    Path("proc").mkdir()
    Path("proc/meminfo").write_text("MemAvailable:    1000 kB\n")
    monkeypatch.setattr(resources, "SYSTEM", Path.cwd())
    assert ftis("new", "small", *models[:2], "--problems", write(SUMS)) == 0
    (peer,) = load("small/recipe.toml").peers
    assert (peer.tokens_per_microbatch, peer.gradient_checkpointing) == (256, True)


def test_starters_are_asked_as_they_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"{a}+{b}", "answer": str((a + b) % 10)} for a in range(10) for b in range(10)]
    assert ftis("new", "--model", "starter:small", "--problems", write(rows)) == 0
    written = tomllib.loads(Path("mine/recipe.toml").read_text())
    assert written["prompt"]["template"] == "{question}="
    assert written["reward"]["extract"] == "tags"
    assert ftis("new", "own", "--model", "starter:small", "--problems", write(rows), "--reward", "own") == 0
    reward = runpy.run_path("own/own_reward.py")["reward"]
    texts = ["<answer>7</answer>", "so it is 7.", "<answer>17</answer>", ""]
    assert reward(["3+4"] * 4, texts, [[]] * 4, ["7"] * 4) == [1.0, 1.0, 0.0, 0.0]
    assert "starter:small reads" not in capsys.readouterr().out
    assert ftis("new", "words", "--model", "starter:small", "--problems", write(SUMS)) == 0
    assert "starter:small reads" in capsys.readouterr().out
