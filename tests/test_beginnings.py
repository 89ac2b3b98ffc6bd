"""Broken beginnings: what is said of each before the run, and by its first rounds."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ftis.check.estimate import estimate
from ftis.check.plan import plan
from ftis.config import FtisError
from ftis.experiment.runs import run
from ftis.preparing.checks import check
from ftis.recipe.arms import arms_of
from ftis.recipe.parsing import parse, set_key
from ftis.view.progress import Display

ALL = "peers.*"
LORA = {f"{ALL}.train": "lora", f"{ALL}.lora_r": 4}
TAGS_AFTER = {"prompt.template": "Tell me {question}: "}

BROKEN: Mapping[str, tuple[Mapping[str, Any], tuple[str, ...], str]] = {
    # keys, words before the run, words of the first rounds
    "rate too high": ({f"{ALL}.learning_rate": 3e-2}, ("learning rate is 0.03", "break"), "learning rate (0.03)"),
    "rate far too high": ({f"{ALL}.learning_rate": 1.0}, ("learning rate is 1", "break"), "learning rate (1)"),
    "rate too low": ({f"{ALL}.learning_rate": 1e-7}, ("learning rate is 1e-07", "want more"), ""),
    "adapter's rate too high": ({**LORA, f"{ALL}.learning_rate": 1.0}, ("LoRA wants",), "learning rate (1)"),
    "adapter's rate too low": ({**LORA, f"{ALL}.learning_rate": 1e-7}, ("LoRA wants",), ""),
    "selection drops all": ({"training.selections": ["broken_parts.nothing_at_all"]}, (), "drop every rollout"),
    "stop string at once": ({"sampling.stop": ["<think>"]}, (), "completions end at once"),
    "end token at once": ({"sampling.end_tokens": ["<think>"]}, (), "completions end at once"),
    "end token unknown": ({"sampling.end_tokens": ["<|over|>"]}, ("<|over|>", "no token of"), ""),
    "completions too short": ({"sampling.max_completion_length": 3}, (), "no completion ends"),
    "a prompt that it never saw": (TAGS_AFTER, (), "no completion has the format"),
    "a format that it never writes": ({"reward.extract": "boxed"}, (), "no completion has the format"),
    "constant reward": ({"reward.function": "broken_parts.halves"}, ("gives 0.5", "constant"), "earns the same"),
    "reward of the wrong sign": ({"reward.function": "broken_parts.wrong_sign"}, ("check its sign",), ""),
    "reward with a mistake": ({"reward.function": "broken_parts.mistaken"}, ("ZeroDivisionError", "line "), ""),
    "reward that ends the program": ({"reward.function": "broken_parts.quits"}, ("in quits", "no answer"), ""),
    "reward that ends it at once": ({"reward.function": "broken_parts.leaves"}, ("in leaves", "status 3"), ""),
    "reward not a number": ({"reward.function": "broken_parts.unknown"}, ("nan", "finite number"), ""),
    "reward of a column that is not there": ({"reward.function": "broken_parts.of_column"}, ("difficulty",), ""),
    "no such reward": ({"reward.function": "broken_parts.halve"}, ("halve", "did you mean"), ""),
    "no variety": ({"sampling.temperature": 0.01}, (), "all rewards are equal"),
    "problems too easy": ({"sampling.temperature": 0.01, "task.name": "easy"}, (), "harder problems"),
    "problems too hard": ({"task.name": "hard"}, (), "the problems are too hard"),
    "format alone": ({"task.name": "hard", "reward.format_weight": 0.5}, (), "only the format is learned"),
    "memory": (
        {"sampling.num_generations": 500},
        ("of memory", "more than the", "lower peers."),
        "",
    ),  # of which is little
    "few validation problems": ({"task.validation_size": 4}, ("4 validation problems", "luck"), ""),
}


PROBLEMS = {
    "easy": [("8+1+1", "0"), ("8+1+2", "1"), ("8+1+4", "3")],  # one that a starter has learned
    "hard": [("1+1+1", "ten"), ("2+1+1", "six")],  # answers that no sum has
}


def recipe_of(keys: Mapping[str, Any], place: Path) -> dict[str, Any]:
    document: dict[str, Any] = {
        "name": "broken",
        "output_dir": str(place / "runs"),
        "processes": "inline",
        "threads": 1,
        "task": {"name": "clock", "validation_size": 60},
        "prompt": {"system_prompt": "", "template": "{question}="},
        "sampling": {"num_generations": 8, "max_completion_length": 40},
        "training": {"rounds": 3, "prompts_per_round": 12, "eval_every": 0},
        "peers": [{"name": "a", "model": "starter:small", "learning_rate": 6e-4}],
    }
    for key, value in keys.items():
        set_key(document, key, value)
    if problems := PROBLEMS.get(document["task"]["name"]):
        for split, end in (("train", ""), ("validation", "+1")):
            rows = [json.dumps({"question": question + end, "answer": answer}) for question, answer in problems]
            (place / f"{split}.jsonl").write_text("\n".join(rows), encoding="utf-8")
        document["task"] = {"name": "jsonl", "path": str(place)}
        document["training"]["prompts_per_round"] = len(problems)
    return document


def said_of(keys: Mapping[str, Any], place: Path, runs: bool) -> tuple[str, str]:
    """The text before a run, and while it ``runs``; an error ends either."""
    before, out = list[str](), io.StringIO()
    try:
        recipe = parse(recipe_of(keys, place))
        checked = check(arms_of(recipe))
        before = [*plan(checked, checked.arms), *estimate(checked.arms)]
        if runs:
            run(recipe, checked=checked, say=Display(Console(file=out, width=1000)))
    except FtisError as error:
        return " ".join([*before, str(error)]), out.getvalue()
    return " ".join(before), out.getvalue()


@pytest.mark.slow
def test_a_broken_beginning_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unnamed = dict[str, tuple[str, str]]()
    for name, (keys, words, later) in BROKEN.items():
        place = tmp_path / name.replace(" ", "-")
        place.mkdir()
        if name == "memory":
            monkeypatch.setattr("ftis.check.estimate.available_bytes", lambda: 100_000_000)
        before, while_running = said_of(keys, place, bool(later))
        assert words or later, name
        if not all(word in before for word in words) or later not in while_running:
            unnamed[name] = (before, while_running)
    for name, texts in unnamed.items():
        print(name, *texts, sep="\n")
    assert not unnamed
