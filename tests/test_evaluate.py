"""Greedy pass@1: every problem once, in its own place, however they are batched."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from commands import ftis
from conftest import TinyPolicy

from ftis.config import FtisError, PeerConfig
from ftis.engines.builtin import builtin_sampler
from ftis.engines.samplers import open_sampler
from ftis.engines.stops import cut_at
from ftis.library import evaluate, load
from ftis.policy import Policy
from ftis.recipe.arms import arms_of
from ftis.records.files import read_jsonl
from ftis.rollouts import Prompt, Rollout
from ftis.run import assembly
from ftis.run.assembly import assemble
from ftis.run.evaluate import EVAL_BATCH, HEARD_EVERY, Answered, EvalSamples, Evaluation, Exam
from ftis.sampling import Decoding, Sampler
from ftis.tasks.problems import load_task
from recipes import write_recipe

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class FakePolicy:
    """Ids are letters."""

    device = torch.device("cpu")

    def detokenize(self, ids: Sequence[int]) -> str:
        return "".join(LETTERS[i] for i in ids)


class FakeSampler(Sampler):
    """Completes a prompt by its last id, once per id of the prompt; notes what it was asked for."""

    def __init__(self) -> None:
        self.prompt_lengths: list[int] = []
        self.batch_sizes: list[int] = []
        self.decodings: set[Decoding] = set()

    def __call__(
        self, policy: Any, prompt_ids: Sequence[Any], repeats: int, decoding: Decoding, seed: int, batch_size: int = 0
    ) -> list[tuple[Rollout, ...]]:
        assert repeats == 1
        self.prompt_lengths += [len(p) for p in prompt_ids]
        self.batch_sizes.append(batch_size)
        self.decodings.add(decoding)
        return [(Rollout(np.full_like(p, p[-1]), np.zeros(len(p), np.float32)),) for p in prompt_ids]

    def weights_moved(self, policy: Any) -> None:
        raise AssertionError("an evaluation moves no weights")

    def close(self) -> None:
        raise AssertionError("the sampler is the peer's")


def score(prompt: Prompt, completions: Sequence[str], ids: Sequence[Sequence[int]]) -> tuple[float, ...]:
    assert len(completions) == len(ids) == 1
    return tuple(float(c == prompt.answer) for c in completions)


LENGTHS = (3, 1, 4, 1, 5, 2, 6, 5, 3, 5)
PROMPT_IDS = [np.array([25] * (n - 1) + [i], np.int32) for i, n in enumerate(LENGTHS)]
PROBLEMS = [
    # Every third problem expects what the sampler does not say.
    Prompt(item=100 + i, question=f"question {i}", answer="wrong" if i % 3 == 0 else LETTERS[i] * n)
    for i, n in enumerate(LENGTHS)
]


def render(problem: Prompt) -> Any:
    return PROMPT_IDS[problem.item - 100]


def run(order: Sequence[int] = range(10), batch_size: int = 0) -> tuple[Evaluation, FakeSampler]:
    sampler = FakeSampler()
    problems = [PROBLEMS[i] for i in order]
    exam = Exam(FakePolicy(), sampler, problems, render, score, Decoding(7), batch_size)  # type: ignore[arg-type]
    return exam.greedy(), sampler


def test_every_problem_is_answered_and_scored_in_its_own_place() -> None:
    evaluation, _ = run()
    assert evaluation.problems == tuple(
        Answered(100 + i, f"question {i}", PROBLEMS[i].answer, LETTERS[i] * n, n, float(i % 3 != 0))
        for i, n in enumerate(LENGTHS)
    )
    assert evaluation.accuracy == 0.6
    assert evaluation.mean_length == 3.5


@pytest.mark.parametrize("batch_size", [0, 1, 3, 4, 10, 99])
def test_results_depend_neither_on_the_order_nor_on_the_batches(batch_size: int) -> None:
    expected = run()[0].problems
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(10).tolist()
        evaluation, sampler = run(order, batch_size)
        assert evaluation.problems == tuple(expected[i] for i in order)
        assert sampler.batch_sizes == [batch_size or EVAL_BATCH]
        assert sampler.prompt_lengths == sorted(LENGTHS)  # like lengths go together
        assert sampler.decodings == {Decoding(max_completion_length=7, temperature=0.0, top_k=0, top_p=1.0)}


@pytest.mark.parametrize("batch_size", [0, 3, 99])
def test_progress_is_heard_and_changes_nothing(batch_size: int) -> None:
    n = 2 * HEARD_EVERY["cpu"] + 5
    exam = Exam(FakePolicy(), FakeSampler(), (PROBLEMS * n)[:n], render, score, Decoding(7), batch_size)  # type: ignore[arg-type]
    heard: list[int] = []
    assert exam.greedy(heard.append) == exam.greedy()
    every = batch_size or HEARD_EVERY["cpu"]
    assert heard == [min(n, every * (i + 1)) for i in range(-(-n // every))]


@pytest.mark.parametrize(
    ("rewards", "mean", "solved"), [((1.0, 0.0, 1.0), None, 2), ((0.2, 0.2, 1.0), 0.467, 1), ((2.0, 1.0, 0.0), 1.0, 2)]
)
def test_a_mean_reward_is_called_pass_at_1_only_where_it_is(
    rewards: tuple[float, ...], mean: float | None, solved: int
) -> None:
    """Both lines of ftis eval count the same problems."""
    values = iter(rewards)
    policy: Any = FakePolicy()
    exam = Exam(policy, FakeSampler(), PROBLEMS[:3], render, lambda *_: (next(values),), Decoding(7))
    evaluation = exam.greedy()
    assert evaluation.solved == solved
    assert evaluation.accuracy == pytest.approx(sum(rewards) / 3)
    said = str(evaluation)
    assert said.endswith(f"{solved / 3:.3f} ({solved} of 3)")
    assert said.startswith("greedy pass@1" if mean is None else f"greedy mean reward {mean:.3f}, and pass@1")
    once = EvalSamples((("c",),) * 3, tuple((reward,) for reward in rewards))
    assert once.pass_at(1) == pytest.approx(solved / 3)


def test_problems_that_stand_twice_count_twice_and_none_are_refused() -> None:
    assert [p.reward for p in run([1, 1, 0])[0].problems] == [1.0, 1.0, 0.0]
    with pytest.raises(ValueError, match="no problems"):
        run([])


def test_pass_at_k_by_hand() -> None:
    """Problem 1: 2 of 4 right, so two draws miss with chance C(2,2)/C(4,2) = 1/6. Problem 2: none right."""
    drawn = EvalSamples((("a",) * 4,) * 2, ((1.0, 0.0, 1.0, 0.5), (0.0, 0.0, 0.0, 0.5)))
    assert drawn.pass_at(1) == pytest.approx((0.5 + 0) / 2)
    assert drawn.pass_at(2) == pytest.approx((5 / 6 + 0) / 2)
    assert drawn.pass_at(4) == pytest.approx(0.5)
    assert drawn.mean_reward == pytest.approx(3 / 8)
    for k in (0, 5):
        with pytest.raises(ValueError, match=f"pass@{k} of 4 completions: k is 1 to 4"):
            drawn.pass_at(k)


def test_samples_are_drawn_as_the_recipe_says_and_cut_at_stop_strings(tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy("qwen2")
    decoding = Decoding(10, 0.7, stop=("a", "1", "<think>"))
    exam = Exam(policy, open_sampler("auto", policy), PROBLEMS[:2], render, by_length, decoding)
    drawn = exam.sampled(3, seed=5)
    assert drawn == exam.sampled(3, seed=5)
    assert [len(of) for of in drawn.completions] == [3, 3]
    assert all(cut_at(decoding.stop, text) == text for of in drawn.completions for text in of)
    assert drawn.rewards == tuple(tuple(float(len(text)) for text in of) for of in drawn.completions)
    assert len({text for of in drawn.completions for text in of}) > 2


def by_length(prompt: Prompt, completions: Sequence[str], ids: Sequence[Sequence[int]]) -> tuple[float, ...]:
    return tuple(float(len(text)) for text in completions)


DEMO = ("--recipe", str(Path(__file__).parents[1] / "recipes" / "demo.toml"))


class Open(Sampler):
    """The built-in sampler; notes how many are open."""

    number = opened = 0

    def __init__(self, policy: Policy) -> None:
        Open.number += 1
        Open.opened += 1

    def __call__(self, *asked: Any) -> list[tuple[Rollout, ...]]:
        return builtin_sampler(*asked)

    def close(self) -> None:
        Open.number -= 1


def test_an_evaluation_closes_its_sampler_also_after_an_error(tmp_path: Path) -> None:
    keys = ("sampling.sampler=test_evaluate.Open", "reward.function=broken_parts.mistaken")
    before, asked = Open.opened, ("--limit", "2", "--samples", "2", "--set", keys[0])
    assert ftis("eval", "starter:small", *DEMO, *asked) == 0
    assert ftis("eval", "starter:small", *DEMO, *asked, "--set", keys[1]) == 1
    evaluate("starter:small", DEMO[1], keys[0], limit=2)
    with pytest.raises(FtisError, match="mistaken"):
        evaluate("starter:small", DEMO[1], keys, limit=2)
    assert (Open.number, Open.opened - before) == (0, 4)


def test_a_peer_that_cannot_be_assembled_closes_its_sampler(tmp_path: Path) -> None:
    keys, before = ["sampling.sampler=test_evaluate.Open", "peers.small.attack=broken_parts.no_attack"], Open.opened
    with pytest.raises(FtisError, match="no_attack"):
        assemble(arms_of(load(Path(DEMO[1]), keys))[0].swarm_of("small"), "small", tmp_path)
    assert (Open.number, Open.opened - before) == (0, 1)


def test_prompts_that_are_too_long_with_their_completions_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("eval", "starter:small", *DEMO, "--limit", "2", "--set=sampling.max_completion_length=300")
    assert ftis(*asked) == 1
    assert "with a completion of 300 that is more than the 256 positions of starter:small" in capsys.readouterr().err


def test_a_peers_or_a_runs_directory_leads_to_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arm = tmp_path / "F-TIS"
    for step in (10, 5):
        for peer in "ab":
            (arm / peer / f"checkpoint-{step}").mkdir(parents=True)
    run = [f"but checkpoints in {arm / 'a'}, {arm / 'b'}: name one", f"such as {arm / 'b/checkpoint-10'}"]
    of_peer = [f"no model at {arm / 'a'}, but in checkpoint-5, checkpoint-10 there: name one"]
    for directory, parts in ((tmp_path, run), (arm, run), (arm / "a", of_peer)):
        assert ftis("eval", str(directory), *DEMO) == 1
        told = " ".join(capsys.readouterr().err.split())
        assert [part for part in parts if part not in told] == []


def test_the_recipes_seed_draws_the_samples_of_its_own_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn, temperature = [], "--set=sampling.temperature=0.5"
    for name, seed in (("a", 0), ("b", 1), ("c", 1)):
        out = tmp_path / name
        asked = ("--limit", "6", "--samples", "4", f"--set=seed={seed}", temperature, "--output", str(out))
        assert ftis("eval", "starter:small", *DEMO, *asked) == 0
        drawn.append([row["samples"] for row in read_jsonl(out)])
    assert drawn[0] != drawn[1] == drawn[2]
    assert [len(samples) for samples in drawn[0]] == [4] * 6
    said = capsys.readouterr().out
    assert "clock: greedy pass@1" in said
    assert "of 4 samples at temperature 0.5" in said


def test_no_problem_is_asked_that_the_recipe_may_train_on(tmp_path: Path) -> None:
    rows = [{"question": f"{i}+1", "answer": str(i + 1)} for i in range(30)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    recipe = write_recipe(
        tmp_path,
        {name: {"model": "starter:small"} for name in "ab"},
        task={"name": "jsonl", "path": tmp_path / "mine.jsonl", "validation_size": 5},
        reward={"function": "ftis.rewards.format_and_answer", "extract": "last_number"},
    )
    asked = ("eval", "starter:small", "--recipe", str(recipe))
    answered = []
    for limit in ((), ("--limit", "12"), ("--limit", "3")):
        assert ftis(*asked, *limit, "--output", str(tmp_path / "out.jsonl")) == 0
        answered.append({row["question"] for row in read_jsonl(tmp_path / "out.jsonl")})
    assert answered[0] == answered[1] > answered[2]
    assert [len(questions) for questions in answered] == [5, 5, 3]


def test_an_environments_own_reward_needs_no_answers(tmp_path: Path) -> None:
    (tmp_path / "blank.py").write_text(
        "from ftis.tasks.problems import make_task\n"
        "def load(config):\n"
        "    rows = [(f'{i}+1', '', {}) for i in range(8)]\n"
        "    return make_task('blank', rows[:4], rows[4:], 'exact')\n"
        "class Game:\n"
        "    def reset(self, **row): pass\n"
        "    def reply(self, text): return None\n"
        "    def get_reward(self): return 1\n"
    )
    task, reward = {"name": "blank.load", "environment": "blank.Game"}, {"function": "ftis.rewards.format_and_answer"}
    recipe = write_recipe(tmp_path, {"a": {"model": "starter:small"}}, task=task, reward=reward)
    evaluation = evaluate("starter:small", str(recipe))
    assert isinstance(evaluation, Evaluation)
    assert evaluation.accuracy == 1


def test_a_task_without_problems_to_answer_and_a_place_that_cannot_be_written_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def loads(*of: object) -> NoReturn:
        raise AssertionError("the model is loaded")

    monkeypatch.setattr(Policy, "load", loads)
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", Path("/proc")):  # no directory, and one that takes no files
        assert ftis("eval", "starter:small", *DEMO, "--output", str(place / "out.jsonl")) == 1
        assert f"{place / 'out.jsonl'} cannot be written" in capsys.readouterr().err
    monkeypatch.setattr(assembly, "load_task", lambda config: replace(load_task(config), validation=()))
    assert ftis("eval", "starter:small", *DEMO) == 1
    assert "no problems to validate with" in capsys.readouterr().err


def test_a_model_runs_as_a_peer_of_the_recipe_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[tuple[str, str]] = []
    load = Policy.load

    def note(config: PeerConfig) -> Policy:
        loaded.append((config.device, config.dtype))
        return load(config)

    monkeypatch.setattr(Policy, "load", note)
    asked = ("eval", "starter:small", *DEMO, "--limit", "2")
    weighed = ("--set=reward.format_weight=0.25", '--set=peers.small.dtype="bfloat16"')
    assert ftis(*asked, "--peer", "small", *weighed, '--set=peers.small.device="cpu"') == 0
    assert ftis(*asked) == 0
    assert loaded == [("cpu", "bfloat16"), ("auto", "auto")]
    capsys.readouterr()
    assert ftis(*asked, "--peer", "smal") == 1
    assert "no peer 'smal' in the recipe" in capsys.readouterr().err


def test_answers_that_earn_nothing_are_told_before_they_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"question": "1+1", "answer": "two"}\n{"question": "1+2", "answer": "three"}\n', encoding="utf-8")
    keys = ("task.name=jsonl", f"task.path={file}", "task.options={}", "task.validation_size=1")
    asked = [part for key in (*keys, 'reward.extract="last_number"') for part in ("--set", key)]
    assert ftis("eval", "starter:small", *DEMO, *asked) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "task 'jsonl', validation problem 0 ('1+2'): its answer 't" in said
    assert """earns nothing with reward.extract = 'last_number'""" in said
