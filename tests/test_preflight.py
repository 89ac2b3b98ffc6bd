"""A look before the first round: what it measures on a tiny model, and what it advises."""

from __future__ import annotations

import io
import itertools
import json
import re
import threading
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from commands import ftis
from conftest import TinyModelDir, make_tokenizer
from rich.console import Console

from ftis.check import preflight as preflight_module
from ftis.check.advice import PLAIN, advice, easier_tasks, easy_format
from ftis.check.plan import about_own, without_effect
from ftis.check.preflight import LONG, Sounding, advised, example_to_show, extrapolated, sound
from ftis.check.rates import rate_advice
from ftis.check.reward import about_reward
from ftis.config import PeerConfig, Recipe, RewardConfig
from ftis.engines.tokenizers import load_tokenizer, unread
from ftis.models import starters
from ftis.policy import Policy
from ftis.preparing import checks
from ftis.recipe.arms import arms_of, rollouts_per_round
from ftis.recipe.own_code import give
from ftis.recipe.parsing import parse
from ftis.records.events import Event, FirstGroup, GroupsTried, Place, Stopped
from ftis.rewards.answers import graded, require_rewardable
from ftis.rewards.scoring import RewardError, load_scorer
from ftis.run.assembly import assemble
from ftis.schedule import assigned
from ftis.tasks.problems import load_task, make_task
from ftis.view.tables import print_soundings, shortened

TAGS, WEIGHED = RewardConfig(), RewardConfig(format_weight=0.2)


def sounding(rewards: list[list[float]], **changes: Any) -> Sounding:
    values: dict[str, Any] = {
        "peer": "a",
        "rewards": tuple(map(tuple, rewards)),
        "formats": None,
        "answers": None,
        "unfinished": 0,
        "example": None,
        "parameters": 2 * 10**9,
        "groups_a_round": 16,
        "tokens_per_second": 100.0,
        "seconds_to_sample": 0.5,
        "seconds_to_learn": 1.5,
        "sampling_cost": 0.25,
        "peak_bytes": 10**9,
        "checkpoint_bytes": 10**6,
        "message_bytes": 1000,
        "compared": None,
        "samples": (),
        "mean_length": 17.0,
        "idle_filter": None,
        "reads_plain": True,
    }
    return Sounding(**values | changes)


def plain_recipe(**sections: Any) -> Recipe:
    """A recipe whose task has an option for its difficulty."""
    task = {"name": "clock", "options": {"operators": 2}}
    return parse({"name": "m", "task": task, "peers": [{"name": "a", "model": "starter:small"}], **sections})


NONE = [[0.0] * 4] * 4
SOME = [[0.0, 1.0, 0.0, 0.0]] + [[0.0] * 4] * 3
FORMATS, MIXED = [[0.2] * 4] * 4, [[0.2, 0.2, 0.2, 0.0]] * 4
"""Rewards of ``WEIGHED`` where all formats, or three of four, and no answers are right."""
SHOWN = {"chat_template": "never", "examples": [{"question": "1 + 1", "completion": "2"}]}


ADVICE: list[tuple[Sounding, RewardConfig, list[str]]] = [
    (sounding(SOME, formats=0), TAGS, []),
    (sounding(NONE, formats=1), TAGS, ["the format is right in 1 of 16 completions: show it in prompt.examples"]),
    (sounding(NONE, formats=0), TAGS, ['reward.extract = "last_number" or "boxed"']),
    (sounding(NONE, formats=0, example=("q", "a")), TAGS, ['(reward.extract = "boxed") and stop']),
    (sounding(NONE, formats=0), RewardConfig(extract="boxed"), ["say in prompt.system_prompt what it is"]),
    (sounding(NONE, formats=16), TAGS, ["0 of 16 completions earn a reward: give easier problems (task"]),
    (sounding(NONE), TAGS, ["or raise sampling.num_generations, as below"]),
    (sounding(NONE, formats=16, answers=0), TAGS, ["0 of 16 answers are right: give easier problems"]),
    (sounding(MIXED, formats=12, answers=0), WEIGHED, ["learned is the format alone: give easier problems"]),
    (sounding(MIXED, formats=12, answers=0), RewardConfig(format_weight=0.2, partial_credit=True), []),
    (sounding(MIXED, formats=12, answers=0), RewardConfig(format_weight=1.0), []),
    (sounding([[0.2, 1.0]] + [[0.2] * 4] * 4, formats=18, answers=1), WEIGHED, ["or raise sampling.num_generations"]),
    (sounding([[0.8] * 4] * 4, formats=0, answers=16), WEIGHED, ["the format is right in 0 of 16 completions"]),
    (sounding([[0.95] * 4] * 4, formats=16, answers=0), RewardConfig(format_weight=0.95), ["0 of 16 answers"]),
    (sounding([[1.0] * 4] * 4, formats=16), TAGS, ["give harder problems"]),
    (sounding([[3.0] * 4, [2.0] * 4], answers=None), TAGS, ["in the others all rewards are equal"]),  # of ten, say
    (sounding([[1.0] * 4, [0.0] * 4]), TAGS, ["about 0 of a round's 16 groups carry signal, in the others"]),
    (sounding([[0.0, 1.0]] * 4, groups_a_round=3), TAGS, []),
    (sounding(SOME, unfinished=9), TAGS, ["9 of 16 completions do not end: end them by sampling.stop"]),
    (sounding(NONE, formats=0, unfinished=16), TAGS, ["the format is right in 0", "16 of 16 completions do not"]),
]


def test_advice() -> None:
    for looked, reward, said in ADVICE:
        found = advice(looked, plain_recipe(reward=reward.model_dump()))
        assert all(part in line for part, line in zip(said, found, strict=True)), (said, found)
    (end,) = advice(sounding(SOME, unfinished=9), plain_recipe(sampling={"stop": ["\n"]}))
    assert "prompt.examples how they end" in end
    taken = {"mode": "horizontal", "max_foreign_rollouts": 12}  # fewer than a group of twice the completions
    (line,) = advice(sounding([[1.0] * 4, [0.0] * 4]), plain_recipe(training=taken))
    assert "give other problems" in line


def test_advice_is_not_in_words_that_the_tokenizer_lacks() -> None:
    outcomes: list[dict[str, Any]] = [
        {"rewards": NONE, "formats": formats, "answers": 0, "unfinished": 16} for formats in (0, 16)
    ]
    for outcome in outcomes:
        looked = sounding(**outcome)
        for reads_plain in (True, False):
            said = shown_of([replace(looked, reads_plain=reads_plain)], plain_recipe())
            assert ("prompt.examples" in said, "as below" in said, "stop = [" in said) == (reads_plain,) * 3
            assert ("Question:" in said) == reads_plain
    starter, words = (load_tokenizer(starters.place_of("starter:small")), make_tokenizer())
    assert unread(starter, PLAIN)[0] == unread(starter, PLAIN)[1]
    assert unread(words, "12+3=") == (0, 5)


def test_advice_for_an_environment_is_about_its_episodes() -> None:
    task = {"name": "clock", "options": {"operators": 2}, "environment": "guess"}
    for reward in ({}, {"function": "test_preflight.refused"}):
        recipe = plain_recipe(task=task, reward=reward, sampling={"max_turns": 3})
        assert about_reward(recipe, load_task(recipe.task)) == []
        for rewards, key in ((NONE, "sampling.max_turns"), (SOME, "max_completion_length"), ([[1.0] * 4] * 4, "")):
            said = advice(sounding(rewards, unfinished=0 if rewards is NONE else 16), recipe)
            assert len(said) == 1 + (not key)
            assert key in said[0]
            for line in said:
                assert "episodes" in line
                assert not any(word in line for word in ("answers", "completions", "prompt.", "sampling.stop", "below"))


def lengths(prompts: Any, completions: list[str], completion_ids: Any, **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def refused(prompts: Any, completions: Any, completion_ids: Any, answer: list[str], **columns: Any) -> list[float]:
    return [float(right not in text) for text, right in zip(completions, answer, strict=True)]


def paid(prompts: Any, completions: Any, completion_ids: Any, answer: list[str], **columns: Any) -> list[float]:
    return [float(right in text) for text, right in zip(completions, answer, strict=True)]


def raises(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
    raise ValueError("no such judge")


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("jsonl", [False, True])
def test_what_is_advised_has_an_effect(own: bool, jsonl: bool, tmp_path: Path) -> None:
    """Options of the task only if it has some that make it easier; parts of recipes only for the built-in reward."""
    for split in ("train", "validation"):
        rows = [json.dumps({"question": f"{split} {n}", "answer": f"{n}"}) for n in range(9)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(rows), encoding="utf-8")
    task = {"name": "jsonl", "path": str(tmp_path)} if jsonl else {"name": "clock"}
    recipe = plain_recipe(task=task, reward={"function": "test_preflight.lengths"} if own else {})
    outcomes = [sounding(NONE, formats=None if own else formats, answers=None if own else 0) for formats in (0, 16)]
    said = " ".join(line for one in outcomes for line in advice(one, recipe)) + easy_format(recipe, None, "exact")
    assert ("task.options.operators = 1" in said) == (not jsonl)
    assert [part in said for part in ("reward.extract", "[reward]", "as below")] == [not own] * 3


def test_a_reward_that_cannot_teach_is_told_before_the_run() -> None:
    said = {"refused": "sign", "same": "constant", "raises": "no such judge", "paid": "", "lengths": ""}
    for name, word in said.items():
        recipe = plain_recipe(reward={"function": f"test_preflight.{name}"})
        found = about_reward(recipe, load_task(recipe.task))
        assert (len(found), word in " ".join(found)) == (bool(word), True), (name, found)
    assert about_reward(plain_recipe(), load_task(plain_recipe().task)) == []
    for name in ("one_number", "one_entry"):  # an evaluation of one completion at a time takes the second
        recipe = plain_recipe(reward={"function": f"test_preflight.{name}"})
        with pytest.raises(RewardError, match=r"for .* completions|a list of"):
            about_reward(recipe, load_task(recipe.task))


@pytest.mark.parametrize(
    ("prompt", "reward", "shown", "below"),
    [
        ({}, {}, True, True),
        ({"chat_template": "never"}, {}, True, True),
        (SHOWN, {}, False, True),
        (SHOWN | {"system_prompt": ""}, {"extract": "boxed"}, False, True),
        (SHOWN | {"system_prompt": ""}, {"extract": "last_number"}, False, False),
    ],
)
def test_advice_leaves_out_what_the_recipe_has(
    prompt: dict[str, Any], reward: dict[str, Any], shown: bool, below: bool
) -> None:
    recipe = plain_recipe(reward={"format_weight": 0.2, **reward}, prompt=prompt)
    (found,) = advice(sounding(FORMATS, formats=16, answers=0), recipe)
    assert "give easier problems (task.options.operators = 1)" in found
    assert ("show worked ones" in found, "as below" in found) == (shown, below)
    assert bool(easy_format(recipe, None, "exact")) == below
    assert ("how in plain text" in shown_of([sounding(FORMATS, formats=16, answers=0)], recipe)) == below
    assert "how in plain text" not in shown_of([sounding(SOME)], recipe)


def test_a_task_of_a_notebook_has_no_options_to_lower() -> None:
    recipe = plain_recipe(task={"name": "clock"})
    named = recipe.task.model_copy(update={"name": give(lambda config: load_task(recipe.task))})
    assert easier_tasks(recipe) != []
    assert easier_tasks(recipe.model_copy(update={"task": named})) == []


def test_a_rate_that_does_not_fit_a_model_is_told() -> None:
    small, large, starter, lora = 134_515_008, 1_543_714_304, 205_824, {"train": "lora"}
    cases: list[Any] = [
        (small, {}, "want more"),
        (small, {"learning_rate": 2e-6}, ""),
        (small, {"learning_rate": 1e-4}, ""),
        (small, {"learning_rate": 1.1e-4}, "break"),
        (large, {}, ""),
        (large, {"learning_rate": 1e-2}, "break"),
        (starter, {"learning_rate": 1e-2}, "break"),
        (starter, {"learning_rate": 1.2e-3}, ""),
        (starter, {}, "want more"),
        (starter, lora | {"learning_rate": 3e-3}, ""),
        (starter, lora | {"learning_rate": 1e-1}, "LoRA wants about 0.003"),
        (large, lora, "LoRA wants about 1e-4"),
        (large, lora | {"learning_rate": 9e-6}, "LoRA wants about 1e-4"),
        (large, lora | {"learning_rate": 1e-5}, ""),
        (large, lora | {"learning_rate": 3e-3}, ""),
        (large, lora | {"learning_rate": 1e-2}, "LoRA wants about 1e-4"),
    ]
    for parameters, keys, said in cases:
        found = rate_advice(PeerConfig(name="a", model="m", **keys), parameters)
        assert len(found) == bool(said)
        assert all(said in line for line in found)


def test_keys_without_effect_are_told() -> None:
    """An adapter's without an adapter, and a comparison of numbers as text."""
    said, text = "a: lora_r without effect, since it has no adapter", "so 1,000 is not 1000: set reward.answer"
    lora, by_format = {"train": "lora"}, {"function": "test_preflight.by_format"}
    cases: list[Any] = [
        ("clock", {}, {}, [{}, {"peers.a.lora_r": 4}], said),
        ("clock", {"lora_r": 4, **lora}, {}, [{}, {"peers.a.train": "full"}], ""),
        ("clock", {"lora_r": 4}, {}, [{}, {"peers.a.train": "lora"}], ""),
        ("clock", {}, {}, [{}], ""),
        ("jsonl", {}, {"extract": "last_number"}, [{}], text),
        ("jsonl", {}, {"extract": "last_number", "answer": "number"}, [{}], ""),
        ("jsonl", {}, {"extract": "boxed"}, [{}], ""),
        ("jsonl", {}, {"extract": "last_number", **by_format}, [{}], ""),
        ("word_problems", {}, {"extract": "last_number"}, [{}], ""),
    ]
    for task, peer, reward, sets, part in cases:
        sections = {"task": {"name": task}, "reward": reward, "peers": [{"name": "a", "model": "m", **peer}]}
        arms = [{"name": f"arm{n}", "set": values} for n, values in enumerate(sets)]
        found = without_effect(arms_of(parse({"name": "m", **sections, "arms": arms})))
        assert (len(found), part in "".join(found)) == (bool(part), True), found


def test_own_completions_that_are_compared_with_none_are_told() -> None:
    peers = [{"name": name, "model": "m"} for name in "ab"]
    arms = [
        {
            "name": f"{name}-{n}",
            "set": {"objective.name": name, "training.mode": "horizontal", "sampling.num_generations": n},
        }
        for name in ("imitation", "F-TIS", "GSPO")
        for n in (2, 4)
    ]
    keys = {"task": {"name": "clock"}, "training": {"prompts_per_round": 2}, "peers": peers}
    (found,) = about_own(arms_of(parse({"name": "m", **keys, "arms": arms})))
    assert found.startswith("imitation-2: ")
    broken = {
        "name": "broken",
        "set": {"objective.name": "no_such.OBJECTIVE", "training.mode": "horizontal", "sampling.num_generations": 2},
    }
    assert not without_effect(arms_of(parse({"name": "m", **keys, "arms": [broken]})))  # an arm that is not trained


def by_format(
    prompts: Any, completions: list[str], completion_ids: Any, *, extract: str, answer_kind: str, **columns: Any
) -> list[float]:
    return [float(len(text)) for text in completions]


def test_seconds_of_all_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[Any] = [
        ("inline", 4, "in turns, all peers' seconds: 80 s"),
        ("parallel", 4, "at the same time on 2 cores: 40 s"),
        ("parallel", 2, "at the same time, the slowest peer's seconds: 20 s"),
    ]
    for processes, number, told in cases:
        monkeypatch.setattr(preflight_module, "cores", lambda: 2)
        peers = [{"name": name, "model": "starter:small"} for name in "abcd"[:number]]
        keys = {"name": "m", "task": {"name": "clock"}, "processes": processes, "training": {"rounds": 10}}
        recipe = parse({**keys, "peers": peers})
        looked = [sounding(SOME, peer=peer["name"], seconds_to_sample=0.5, seconds_to_learn=1.5) for peer in peers]
        assert f"10 rounds of all peers, {told}\n" in shown_of(looked, recipe)


def shown_of(looked: list[Sounding], recipe: Recipe) -> str:
    out = io.StringIO()
    print_soundings([advised(one, recipe) for one in looked], recipe, Console(file=out, width=400))
    return out.getvalue()


def test_what_a_look_shows(tiny_model_dir: TinyModelDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight_module, "cores", lambda: 2)
    recipe = parse(document(tiny_model_dir()))
    said = shown_of([sounding(SOME, parameters=1000), sounding(SOME, peer="b")], recipe)
    for peer in "ab":
        assert f"{peer}: one checkpoint of 1 MB" in said  # 5 rounds, saved every 10
    assert "a, b: 25% of 4 groups carry signal (1% to 81% of all, by a 95% interval)" in said  # of both, and once
    assert "b: the learning rate is 1e-06, and LoRA wants" in said
    assert "a: the learning rate" not in said
    assert "4 groups say little" in said
    assert "little" not in shown_of([sounding(SOME * 2)], recipe)
    assert "4 groups of b say little" in shown_of([sounding(SOME * 2), sounding(SOME, peer="b")], recipe)
    assert "100% of 8 groups carry signal (63% to 100%" in shown_of([sounding([[0.0, 1.0]] * 8)], recipe)
    assert "little to learn from" in shown_of([sounding(NONE * 2 + SOME, answers=1)], recipe)
    apart = shown_of([sounding(NONE, formats=0), sounding(SOME, peer="b")], recipe)
    assert "a: in none of 4 groups" in apart
    assert "b: 25% of 4 groups" in apart
    assert "shorter" not in said
    slow = sounding(SOME * 2, seconds_to_learn=LONG / recipe.training.rounds)
    assert "a run is shorter with fewer training.rounds" in shown_of([slow], recipe)
    halves = [sounding(SOME * 2, peer=peer, seconds_to_learn=0.6 * LONG / recipe.training.rounds) for peer in "ab"]
    in_turns = recipe.model_copy(update={"processes": "inline"})
    assert "a run is shorter" in shown_of(halves, in_turns)
    assert "shorter" not in shown_of(halves, recipe.model_copy(update={"processes": "parallel"}))


def test_the_lines_advised_make_a_recipe_that_can_earn(tiny_model_dir: TinyModelDir) -> None:
    cases: list[Any] = [
        ("number", ["7", "1,200"], "last_number"),
        ("exact", ["7", "12"], "last_number"),
        ("exact", ["pit", 'ura "é'], "boxed"),
        ("exact", ["7", "ura"], "boxed"),
        ("math", ["\\frac{1}{2}", "x^2"], "boxed"),
        ("exact", ["1 2\n3 4", "1 2\n3 4\n5 6"], "boxed"),
        ("exact", ["", "no"], "boxed"),
    ]
    for kind, answers, extract in cases:
        task = make_task("t", [(f'What {i}, "then"?', answer, {}) for i, answer in enumerate(answers)], [], kind)
        before = parse(document(tiny_model_dir()))
        lines = easy_format(before, example_to_show(task, before), task.answer_kind).partition("\n")[2]
        recipe = parse(document(tiny_model_dir(), **tomllib.loads(lines)))
        assert recipe.reward.extract == extract
        score = load_scorer(recipe.reward, recipe.prompt, kind)
        require_rewardable(score, [problem for problem in task.train if problem.answer], "problem")
        if extract == "boxed":
            (example,) = recipe.prompt.examples
            assert example.completion.startswith(recipe.prompt.prefill)
            assert not any(end in example.completion for end in recipe.sampling.stop)
            (problem,) = [problem for problem in task.train if problem.question == example.question]
            assert graded(example.completion, problem.answer, kind, extract="boxed") == (True, 1.0)


def document(model: Path, **sections: Any) -> dict[str, Any]:
    return {
        "name": "look",
        "threads": 1,
        "task": {"name": "clock", "options": {"operators": 1}, "validation_size": 2},
        "prompt": {"system_prompt": "", "template": "{question}="},
        "sampling": {"num_generations": 4, "max_completion_length": 8},
        "training": {"rounds": 5, "prompts_per_round": 8},
        "peers": [
            {"name": "a", "model": str(model), "learning_rate": 1e-3},
            {"name": "b", "model": str(model), "train": "lora", "lora_r": 2},
        ],
        **sections,
    }


def test_a_problem_that_cannot_be_rewarded_is_refused_before_anything_is_sampled(
    tmp_path: Path, tiny_model_dir: TinyModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = [("1+1", "2"), ("1+2", "three"), ("1+3", "4"), ("1+4", "5")]
    for split, rows in (("train", problems), ("validation", [("2+2", "4")])):
        lines = [json.dumps({"question": question, "answer": answer}) for question, answer in rows]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    sections = {"task": {"name": "jsonl", "path": str(tmp_path)}, "training": {"rounds": 1, "prompts_per_round": 2}}
    sections["arms"] = [{"name": "together"}, {"name": "alone", "collaborate": False}]
    tags, numbers = (
        arms_of(parse(document(tiny_model_dir(), reward={"extract": extract}, **sections)))
        for extract in ("tags", "last_number")
    )
    looked_at: list[str] = []
    monkeypatch.setattr(checks, "require_rewardable", lambda score, problems, where: looked_at.append(where))
    checks.check(tags)
    assert looked_at == ["task 'jsonl', training problem", "task 'jsonl', validation problem"]  # once for both arms
    monkeypatch.undo()
    with pytest.raises(RewardError, match=r"task 'jsonl', training problem 1 \('1\+2'\): its answer 'three' earns"):
        checks.check(numbers)


def told_of(heard: list[Event]) -> tuple[list[tuple[int, int]], FirstGroup]:
    """The progress of a look, and its first group."""
    (first,) = [event for event in heard if isinstance(event, FirstGroup)]
    assert all(event.place == Place(peer="a") for event in heard)
    return [(event.groups, event.most) for event in heard if isinstance(event, GroupsTried)], first


def test_a_peer_is_sounded(tmp_path: Path, tiny_model_dir: TinyModelDir) -> None:
    model = tiny_model_dir()
    recipe = parse(document(model, reward={"extract": "last_number"}))
    heard: list[Event] = []
    looked = sound(recipe, "a", 3, tmp_path / "a", heard.append)
    steps, first = told_of(heard)
    assert steps == [(0, 1), *((done, 25) for done in (1, 2, 5, 9, 13, 25))]
    assert (first.completions, first.reward, first.answers) == (4, sum(looked.rewards[0]) / 4, sum(looked.rewards[0]))
    assert first.formats is not None
    assert 0 <= first.unfinished <= min(4, looked.unfinished)
    assert [len(group) for group in looked.rewards] == [4, 4, 4]
    assert (looked.compared, looked.completions, looked.groups_a_round) == ("exact", 12, 8)
    assert looked.answers == sum(map(sum, looked.rewards))
    assert 0 <= looked.answers <= (looked.formats or 0) <= 12
    assert first.unfinished <= looked.unfinished <= 12
    sampled, trained = rollouts_per_round(recipe)
    ratio = looked.seconds_to_sample / sampled / (looked.seconds_to_learn / trained)
    assert looked.sampling_cost == pytest.approx(ratio)
    assert min(looked.sampling_cost, looked.tokens_per_second) > 0
    assert looked.peak_bytes > 10**7
    assert len(looked.samples) == 3
    assert looked.with_signal == looked.signal * 8
    assert looked.reward == pytest.approx(fmean(map(fmean, looked.rewards)))
    assert looked.checkpoint_bytes == 12 * Policy.load(recipe.peer("a"), str(model)).n_parameters
    adapter = sound(recipe, "b", 3, tmp_path / "b")
    assert [question for question, *_ in adapter.samples] == [question for question, *_ in looked.samples]
    assert 0 < adapter.checkpoint_bytes < looked.checkpoint_bytes
    assert not list((tmp_path / "a").glob("checkpoint-*"))


def test_where_a_group_takes_long_one_is_learned_from(
    tmp_path: Path, tiny_model_dir: TinyModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight_module, "QUICK", 0.0)
    monkeypatch.setattr(preflight_module, "seconds_to_learn", lambda peer, scored: 3.0)
    recipe, heard = parse(document(tiny_model_dir())), list[Event]()
    looked = sound(recipe, "a", 3, tmp_path / "a", heard.append)
    assert told_of(heard)[0] == [(0, 1), (1, 7), (3, 7), (7, 7)]  # the first group is not sampled again
    assert [len(group) for group in looked.rewards] == [4, 4, 4]
    _, trained = rollouts_per_round(recipe)
    # 3 s for the first group: as much for any other of its length
    assert 0.3 * 3.0 / 4 * trained < looked.seconds_to_learn < 3 * 3.0 / 4 * trained


def test_a_filter_that_short_completions_do_not_reach_is_told(tmp_path: Path, tiny_model_dir: TinyModelDir) -> None:
    cases: list[tuple[dict[str, Any], float | None]] = [
        ({"name": "F-TIS"}, 50.0),
        ({"name": "F-TIS", "kl_estimator": "k3", "kl_threshold": 0.5}, None),
        ({"name": "F-TIS", "kl_reduction": "mean"}, None),
        ({"name": "TIS"}, None),
    ]
    for objective, idle in cases:
        recipe = parse(document(tiny_model_dir(), objective=objective))
        looked = sound(recipe, "a", 1, tmp_path / "a")
        assert 1 <= looked.mean_length <= recipe.sampling.max_completion_length
        assert looked.idle_filter == idle
        told = "tokens hardly come to 50 nats of KL, so the filter drops nothing" in shown_of([looked], recipe)
        assert told == bool(idle)
        assert sound(recipe.of_swarm({"a"}), "a", 1, tmp_path / "alone").idle_filter is None


def test_what_is_shown_is_the_model_as_it_is(tmp_path: Path, tiny_model_dir: TinyModelDir) -> None:
    """The steps that are measured leave no trace in it, and the first group that is told is one of those shown."""
    recipe = parse(document(tiny_model_dir(), reward={"function": "test_preflight.by_content"}))
    heard: list[Event] = []
    looked = sound(recipe, "a", 4, tmp_path / "a", heard.append)
    assert (looked.formats, looked.answers) == (None, None)  # what a reward of one's own means is not guessed
    assert looked.signal > 0
    assert told_of(heard)[1].reward == pytest.approx(fmean(looked.rewards[0]))
    peer = assemble(recipe, "a", tmp_path / "again").peer
    items = sorted({item for name in "ab" for item in assigned(recipe, len(peer.member.task.train), name, 0)})[:4]
    first, *_ = peer.sample_items(items[:1], 4, 0, "preflight")
    groups = [first, *peer.sample_items(items, 4, 0, "preflight")[1:]]
    assert looked.rewards == tuple(peer.member.admitter.score_group(group).rewards for group in groups)


def test_in_horizontal_mode_groups_are_looked_at_whole(tmp_path: Path, tiny_model_dir: TinyModelDir) -> None:
    training = {"rounds": 5, "prompts_per_round": 4, "mode": "horizontal"}
    recipe = parse(
        document(tiny_model_dir(), training=training, sampling={"num_generations": 2, "max_completion_length": 8}),
        where="test",
    )
    looked = sound(recipe, "a", 2, tmp_path / "a")
    assert [len(group) for group in looked.rewards] == [2] * 4  # without signal in two, two more of the round's four
    assert looked.groups_a_round == 4


@pytest.mark.parametrize(
    ("function", "quick", "groups"), [("same", 10.0, 8), ("same", 0.0, 2), ("by_content", 10.0, 2)]
)
def test_more_groups_are_sampled_where_none_has_signal_and_that_is_quick(
    function: str,
    quick: float,
    groups: int,
    tmp_path: Path,
    tiny_model_dir: TinyModelDir,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            calls.append(name)
            return function(*arguments)

        return noted

    heard, calls = list[Event](), list[str]()
    monkeypatch.setattr(preflight_module, "QUICK", quick)
    for name in ("sample", "seconds_to_learn"):
        monkeypatch.setattr(preflight_module, name, noting(name, getattr(preflight_module, name)))
    reward = {"function": f"test_preflight.{function}"}
    recipe = parse(document(tiny_model_dir(), reward=reward, training={"prompts_per_round": 16}))
    assert len(sound(recipe, "a", 2, tmp_path / "a", heard.append).rewards) == groups
    told = [done / most for done, most in told_of(heard)[0]]
    assert told == sorted(set(told))
    assert told[-1] == 1
    # What is sampled is the model as it is.
    assert [kind for kind, _ in itertools.groupby(calls)] == ["sample", "seconds_to_learn"]


def test_a_look_stops_when_asked_to(tmp_path: Path, tiny_model_dir: TinyModelDir) -> None:
    recipe, stop, heard = parse(document(tiny_model_dir())), threading.Event(), list[Event]()
    stop.set()
    with pytest.raises(Stopped):
        sound(recipe, "a", 2, tmp_path / "a", heard.append, stop)
    assert heard == [GroupsTried(0, 1, Place(peer="a"))]


def one_number(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> float:
    return 1.0


def one_entry(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
    return [1.0]


def same(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
    return [0.0] * len(completion_ids)


def by_content(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
    return [float(sum(ids)) for ids in completion_ids]


@pytest.mark.slow
def test_preflight_says_what_to_change(
    tmp_path: Path, tiny_model_dir: TinyModelDir, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model_dir()
    (tmp_path / "recipe.toml").write_text(
        f"""
name = "look"
threads = 1
task = {{ name = "clock", validation_size = 2 }}
prompt = {{ system_prompt = "", template = "{{question}}=" }}
sampling = {{ num_generations = 4, max_completion_length = 6 }}
training = {{ rounds = 5, save_every = 2, prompts_per_round = 8 }}
peers = [{{ name = "a", model = "{model}" }}, {{ name = "b", model = "{model}" }}]
""",
        encoding="utf-8",
    )
    assert ftis("preflight", str(tmp_path / "recipe.toml"), "--groups", "2") == 3
    said = capsys.readouterr().out
    assert "arm F-TIS: one after the other each peer loads its model, samples up to 2 groups and" in said
    for peer in "ab":
        assert (
            f"{peer}: loaded\n{peer}: first group: reward 0.00  format right in 0 of 4 completions, answer in 0  "
        ) in said
        parts = re.findall(rf"{peer}: ([0-9]+)% of its preflight done", said)  # with the time left on a slow machine
        assert parts[:3] == ["5", "10", "20"]
        assert f"{peer}: 2 checkpoints of" in said
        assert said.count(f"{peer}, reward 0:") == 3
    assert "a, b: the format is right in 0 of 32 completions" in said
    (together,) = [line for line in said.replace("\n", " ").split("  ") if "together: at most" in line][:1] or [""]
    assert "of disk for 3 checkpoints of each" in together  # the newest is written before an older one goes
    assert not (tmp_path / "runs").exists()


def test_a_text_in_one_line() -> None:
    assert shortened("a\nb\u202e") == "a⏎b⟨U+202E⟩"
    assert shortened("x" * 300) == "x" * 79 + "…" + "x" * 80


def test_seconds_by_a_line_through_two_measurements() -> None:
    cases: list[Any] = [
        ((8, 3.0), (16, 5.0), 96, 25.0),  # 1 + n / 4
        ((8, 2.0), (16, 2.0), 96, 2.0),  # a fixed cost
        ((8, 2.5), (16, 2.0), 96, 2.0),  # never less for more
        ((8, 1.0), (16, 4.0), 96, 24.0),  # a start below 0: in proportion
        ((4, 1.0), (4, 1.0), 96, 24.0),  # one measurement
    ]
    for few, many, wanted, seconds in cases:
        assert extrapolated(*(*few, *many, wanted)) == pytest.approx(seconds)
