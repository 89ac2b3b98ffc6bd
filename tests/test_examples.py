"""The scripts under examples/ run as their docstrings say."""

import importlib.util
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import ftis as ftis_command
from conftest import TinyModelDir

import ftis
from ftis.rewards.scoring import load_scorer
from ftis.rollouts import Prompt

ROOT = Path(__file__).parents[1]


def load_example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_starters_for_a_data_set_are_made_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("reasoning_gym")
    example = load_example("gym_starters")
    example.HEADROOM_PROBLEMS, example.SHIFTS, example.SEEDS = 8, 4, {"": 0}
    command = ["gym_starters.py", "chain_sum", "--scale", "tiny", "--seeds", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*command, "--headroom"])
    example.main()
    said = capsys.readouterr().out
    assert said.count("best of 12") == said.count("right when reasoned") == 2
    assert "chain_sum: left to learn" in said
    monkeypatch.setattr(sys, "argv", command)
    example.main()
    assert "right when reasoned" not in capsys.readouterr().out  # the models are there already
    arms = ("alone-spread", "alone-reuse", "imitation", "F-TIS", "F-TIS-horizontal", "F-TIS-lifted-horizontal", "alone")
    for arm in arms:
        for peer in ("small", "large"):
            rows = (tmp_path / "chain_sum" / "chain_sum-seed0" / arm / peer / "metrics.jsonl").read_text()
            assert rows.count("\n") == 1
    assert (tmp_path / "chain_sum" / "report.html").exists()


def test_what_guessing_solves_is_not_left_to_learn() -> None:
    """Samples of the next problems are tried: of answers 1, 1, 1, 1, 2 each sees four others."""
    example = load_example("gym_starters")
    answers = ("1", "1", "1", "1", "2")
    problems = [Prompt(i, f"question {i}", answer) for i, answer in enumerate(answers)]

    def right(problem: Prompt, texts: Sequence[str], ids: object) -> list[float]:
        return [float(text == problem.answer) for text in texts]

    alike = [("3", answer) for answer in answers]
    solved = [3 / 4, 3 / 4, 3 / 4, 3 / 4, 0]
    example.SHIFTS = 4
    assert example.solved_by_guessing(problems, alike, right) == pytest.approx(sum(solved) / 5)


ANSWER_IN: dict[str, Callable[[str, str], bool]] = {
    "chain_sum": lambda reasoning, answer: reasoning.rpartition("=")[2] == answer,
    "spell_backward": lambda reasoning, answer: re.sub(r"\d", "", reasoning)[::-1] == answer,
    "letter_counting": lambda reasoning, answer: reasoning.rpartition(":")[2] == answer,
    "simple_equations": lambda reasoning, answer: eval(re.sub("[a-z]", answer, reasoning).replace("=", "==")),
}


@pytest.mark.parametrize("dataset", ANSWER_IN)
def test_a_worked_solution_leads_to_the_answer(dataset: str) -> None:
    reasoning_gym = pytest.importorskip("reasoning_gym")
    problems = load_example("gym_starters").DATASETS[dataset]
    for entry in reasoning_gym.create_dataset(dataset, size=200, seed=3, **problems.options):
        reasoning = problems.solve(entry["question"], entry["answer"], entry["metadata"])
        assert ANSWER_IN[dataset](reasoning, entry["answer"]), (entry["question"], reasoning, entry["answer"])


def test_specialists_learn_from_parts_that_share_nothing() -> None:
    example = load_example("gsm8k_specialists")
    questions = ("Tea costs $2.", "How old is Ann?", "He earned much.", "How far is it?", "She pays 3 dollars.")
    solved = {"solution": "2*3=<<2*3=6>>6\nso 6+1=<<6+1=7>>7\n#### 7"}
    parts = example.parts_of([Prompt(i, question, "7", solved) for i, question in enumerate(questions)])
    assert {name: [p.item for p in part] for name, part in parts.items()} == {
        "money": [0, 2],
        "amounts": [1, 3],
        "pruned": [0, 1, 2, 3, 4],
    }
    prompt, completion = example.worked(parts["amounts"][0])
    recipe = ftis.load(ROOT / "recipes" / "smollm2_gsm8k.toml")
    assert prompt == recipe.prompt.template.format(question="How old is Ann?")
    assert completion == " 2*3=6\nso 6+1=7\nThe answer is 7."
    assert load_scorer(recipe.reward, recipe.prompt, "number")(parts["amounts"][0], [completion], [[1]]) == (1.0,)


def test_the_loss_of_worked_solutions_is_that_of_the_model(tiny_model_dir: TinyModelDir) -> None:
    """Against the logits of transformers, one problem at a time."""
    example = load_example("gsm8k_specialists")
    policy = ftis.Policy.load(ftis.PeerConfig(name="p", model=str(tiny_model_dir("llama"))))
    problems = [Prompt(i, f"{i}+1?", str(i + 1), {"solution": f"{i}+1={i + 1} #### {i + 1}"}) for i in range(3)]
    losses = []
    for question, solution in map(example.worked, problems):
        before = policy.tokenizer(question)["input_ids"]
        after = policy.tokenizer(solution, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            logp = policy.model(torch.tensor([before + after])).logits[0].log_softmax(-1)
        losses += [-logp[len(before) - 1 + t, token].item() for t, token in enumerate(after)]
    assert example.loss_of(policy, problems) == pytest.approx(sum(losses) / len(losses), abs=1e-5)


@pytest.mark.slow
def test_specialists_are_made_and_compared(
    tmp_path: Path, tiny_model_dir: TinyModelDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a model of six layers, one of four is made."""
    rows = [{"question": f"{q} {i}?", "answer": f"1+{i}={i + 1}\n#### {i + 1}"} for i in range(40) for q in ("$", "a")]
    for file, part in (("train", rows[:60]), ("test", rows[60:])):
        (tmp_path / f"{file}.jsonl").write_text("\n".join(map(json.dumps, part)))
    example, out = load_example("gsm8k_specialists"), tmp_path / "models"
    model = tiny_model_dir("llama", num_hidden_layers=6)
    command = ["gsm8k_specialists.py", "--model", str(model), "--out", str(out), "--path", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*command, "--steps=2", "--batch=4"])
    example.main()
    said = capsys.readouterr().out
    assert "pruned, 4 layers kept" in said
    told = re.findall(r"^(\w+), .+: \d+\.\d\d nats a token on 32 problems held back$", said, re.M)
    assert told == ["money"] * 2 + ["amounts"] * 2 + ["pruned"] * 3
    sizes = {
        name: json.loads((out / name / "config.json").read_text())["num_hidden_layers"] for name in ("money", "pruned")
    }
    assert sizes == {"money": 6, "pruned": 4}
    example.main()
    assert capsys.readouterr().out.count("is there already") == 3
    settings = [f"task.path={tmp_path}", f"output_dir={tmp_path / 'runs'}", "training.rounds=1", "processes=inline"]
    settings += ["task.validation_size=4", "training.prompts_per_round=6", "sampling.max_completion_length=8"]
    settings += [f"peers.{name}.model={out / name}" for name in ("money", "amounts", "pruned")]
    recipe = str(ROOT / "recipes" / "smollm2_gsm8k.toml")
    arms = ("F-TIS", "F-TIS-horizontal")
    asked = ["train", recipe, *(f"--arm={arm}" for arm in arms), *(part for s in settings for part in ("--set", s))]
    assert ftis_command(*asked) in (0, 3)  # such models may earn too little to teach anybody
    for arm in arms:
        metrics = tmp_path / "runs" / "smollm2-gsm8k-seed0" / arm / "pruned" / "metrics.jsonl"
        assert metrics.read_text().count("\n") == 1
