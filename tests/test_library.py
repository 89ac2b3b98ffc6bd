"""ftis as a library: values of Python in recipes, functions of a script as rewards, tasks and selections, results."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import ROOT
from conftest import TinyModelDir
from torch import Tensor

import ftis
from ftis.config import TaskConfig
from ftis.objectives import OBJECTIVES
from ftis.prompts import Task
from ftis.recipe.own_code import give
from ftis.run.evaluate import Evaluation
from ftis.seams import look_up
from ftis.selection import Judged
from ftis.tasks.problems import Problem, make_task
from recipes import SECTIONS


@pytest.fixture
def keys(tmp_path: Path, tiny_model_dir: TinyModelDir) -> dict[str, Any]:
    """A recipe of two tiny peers, as a mapping."""
    peers = [{"name": name, "model": tiny_model_dir(seed=n), "learning_rate": 1e-3} for n, name in enumerate("ab")]
    training = {**SECTIONS["training"], "rounds": 2}
    return {**SECTIONS, "name": "tiny", "output_dir": tmp_path / "runs", "peers": peers, "training": training}


def rewarding(wanted: int) -> Any:
    """A closure: it is in no module."""

    def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        return [sum(i % 2 == wanted for i in ids) / len(ids) for ids in completion_ids]

    return reward


def playing(sign: str) -> type:
    """A class as a notebook's cell defines one."""

    class Game:
        def reset(self, **row: object) -> str:
            return sign

    return Game


def test_a_function_of_a_notebook_rewards_and_results_come_back(keys: dict[str, Any]) -> None:
    seen: list[Judged] = []

    def task(config: TaskConfig) -> Task:
        sums: list[Problem] = [(f"{a}+{b}", str(a + b), {}) for a in range(5) for b in range(5)]
        return make_task(config.name, sums[5:], sums[:5], "exact")

    def keep_all(judged: Judged) -> Tensor:
        seen.append(judged)
        return judged.advantage_R * 0 + 1

    changes = {"eval_every": 1, "selections": [keep_all]}
    recipe = ftis.load(keys, reward=rewarding(0), task=task, training=changes)
    assert recipe.processes == "inline"
    assert (recipe.training.rounds, recipe.training.eval_every) == (2, 1)
    results = ftis.train(recipe, quiet=True)
    assert results
    assert len(seen) == 4  # rounds of peers
    assert [(row["peer"], row["step"]) for row in results.accuracies] == [(p, n) for p in "ab" for n in range(3)]
    assert [row["reward"] > 0 for row in results.rounds] == [True] * 4
    assert all((place / "model.safetensors").is_file() for place in results.models["F-TIS"].values())
    assert ftis.train(recipe, quiet=True, resume=True).accuracies == results.accuracies
    with pytest.raises(ftis.FtisError, match=r"reward\.function"):
        ftis.train(recipe, quiet=True, resume=True, reward=rewarding(1))
    asked = ftis.evaluate(results.models["F-TIS"]["a"], recipe)
    final = [row["accuracy"] for row in results.accuracies if row["peer"] == "a"][-1]
    assert isinstance(asked, Evaluation)
    assert asked.accuracy == pytest.approx(final)


def test_preflight_looks_at_a_function_of_a_notebook_s_cell(keys: dict[str, Any]) -> None:
    """Its source is nowhere."""
    cell: dict[str, Any] = {"__name__": "__main__"}
    code = "def few(completion_ids, **columns):\n    return [1 / (1 + len(ids)) for ids in completion_ids]\n"
    exec(compile(code, "<ipython-input-1>", "exec"), cell)
    with pytest.raises(OSError, match="source"):
        inspect.getsource(cell["few"])
    found = ftis.preflight(keys, reward=cell["few"], peers=keys["peers"][:1], groups=1, quiet=True)
    assert [one.peer for one in found] == ["a"]
    assert 0 < found[0].reward < 1
    assert found[0].advice


def test_one_function_has_one_name_and_another_has_another() -> None:
    assert give(rewarding(0)) == give(rewarding(0)) != give(rewarding(1))
    assert give(lambda x: x + 1) != give(lambda x: x + 2)
    assert give(playing("+")) == give(playing("+")) != give(playing("-"))
    assert give(make_task) == "ftis.tasks.problems.make_task"
    called = rewarding(0)
    assert look_up(give(called), "reward.function") is called
    name = give(OBJECTIVES["GSPO"])
    assert look_up(name, "objective.name") is OBJECTIVES["GSPO"]


OF_A_SCRIPT = """
import functools, itertools
from ftis.recipe.own_code import give

class First:
    def reset(self, **row):
        return None

def made(sign):
    class Game(First):
        shown = [lambda text: text + sign]
        count = len
        short = functools.partial(max, key=lambda one: one)

        def reset(self, **row):
            return super().reset(**row)

        @property
        def sign(self):
            return sign

        @staticmethod
        def plain(text):
            return text

        @classmethod
        def of(cls):
            return cls()

        @functools.cache
        def twice(self):
            return 2 * sign

    return Game

print(give(made("+")), give(made("+")), give(made("-")))
"""


def test_a_class_has_one_name_in_all_processes() -> None:
    said = [subprocess.check_output([sys.executable, "-c", OF_A_SCRIPT], text=True).split() for _ in range(2)]
    ((one, same, other), again) = said
    assert again == [one, same, other]
    assert one == same != other


def test_another_process_says_that_it_has_not_the_function(keys: dict[str, Any]) -> None:
    with pytest.raises(ftis.FtisError, match=r'processes = "inline"'):
        ftis.load(keys, reward=rewarding(0), processes="parallel")
    name = give(rewarding(0))
    program = f"from ftis.seams import look_up; look_up({name!r}, 'reward.function')"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert name in ended.stderr
    assert "module" in ended.stderr.splitlines()[-1]


def test_keys_are_of_any_type_and_mistakes_name_the_nearest(keys: dict[str, Any]) -> None:
    by_keys = ftis.load(keys, {"peers.*.learning_rate": 1e-4, "training.rounds": 3}, seed=1)
    assert by_keys == ftis.load(ftis.load(keys), ["peers.*.learning_rate=1e-4", "training.rounds=3", "seed=1"])
    assert {peer.learning_rate for peer in by_keys.peers} == {1e-4}
    assert ftis.load(keys, "training.rounds=3") == ftis.load(keys, ["training.rounds=3"])
    with pytest.raises(ftis.FtisError, match=r"did you mean 'rounds'"):
        ftis.load(keys, training={"round": 3})
    with pytest.raises(ftis.FtisError, match=r"training\.rounds = '3'"):
        ftis.load(keys, {"training.rounds": "3"})


def test_signatures_in_the_documents_are_those_of_the_functions() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    written = re.findall(r"^    (\w+)(\(.*\)) -> (\S.*)$", text, re.MULTILINE)
    assert {name for name, _, _ in written} >= {"load", "train", "preflight", "evaluate", "join"}
    for name, arguments, returned in written:
        found = inspect.signature(getattr(ftis, name))
        bare = [one.replace(annotation=inspect.Parameter.empty) for one in found.parameters.values()]
        assert f"{arguments} -> {returned}" == f"{inspect.Signature(bare)} -> {found.return_annotation}"
