"""The scripts under examples/ run as their docstrings say."""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
def test_starters_for_a_data_set_are_made_and_compared(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    script = ROOT / "examples" / "gym_starters.py"
    command = [sys.executable, str(script), "chain_sum", "--scale", "tiny", "--seeds", "1", "--out", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    looked = subprocess.run([*command, "--headroom"], capture_output=True, text=True, env=environment)
    assert looked.returncode == 0, looked.stderr
    assert looked.stdout.count("best of 12") == 4
    made = sorted(path.parent.name for path in (tmp_path / "models" / "chain_sum").glob("*/model.safetensors"))
    assert made == ["large", "large-b", "small", "small-b"]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert "right when reasoned" not in ended.stdout  # the models are there already
    for arm in ("alone-part", "F-TIS", "alone"):
        for peer in made:
            rows = (tmp_path / "chain_sum" / "chain_sum-seed0" / arm / peer / "metrics.jsonl").read_text()
            assert rows.count("\n") == 1
    assert (tmp_path / "chain_sum" / "report.html").exists()


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
