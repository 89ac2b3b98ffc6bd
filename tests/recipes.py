"""One tiny recipe for all tests that train: peers of a few thousand parameters on the clock calculator, in seconds.

And the recipes and tasks of tests that train nothing.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ftis.config import Recipe, TaskConfig
from ftis.prompts import Task
from ftis.recipe.parsing import parse
from ftis.tasks.problems import load_task

SECTIONS: Mapping[str, Mapping[str, Any]] = {
    "task": {"name": "clock", "validation_size": 4},
    "prompt": {"system_prompt": "", "template": "{question}="},
    "reward": {"function": "tiny_rewards.evenness"},
    "sampling": {"num_generations": 4, "max_completion_length": 8},
    "training": {
        "rounds": 4,
        "prompts_per_round": 4,
        "steps_per_generation": 2,
        "eval_every": 2,
        "save_every": 2,
    },
    "objective": {"kl_threshold": 0.5, "kl_estimator": "k3"},
}


def evenness(
    prompts: object, completions: object, completion_ids: Sequence[Sequence[int]], **columns: object
) -> list[float]:
    """Varies on random models, so that there is something to learn."""
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]


REWARDS = f'''from __future__ import annotations


{inspect.getsource(evenness)}

def first_even(prompts, completions, completion_ids, **columns):
    """Varies mostly with the first token, so that a few rollouts show a direction."""
    return [(ids[0] % 2 == 0) + sum(i % 2 == 0 for i in ids) / 10 for ids in completion_ids]


def none_at_all(prompts, completions, completion_ids, **columns):
    return [0.0 for _ in completions]
'''


def write_recipe(
    place: Path,
    peers: Mapping[str, Mapping[str, Any]],
    *,
    top: Mapping[str, Any] | None = None,
    ood: Sequence[Mapping[str, Any]] = (),
    arms: Sequence[Mapping[str, Any]] = (),
    **sections: Mapping[str, Any],
) -> Path:
    """Write the tiny recipe, changed in ``top`` and ``sections``, and its reward functions. Returns the recipe's path.

    Args:
        peers: keys of each peer by its name; ``model`` must be among them.
        top: keys of the recipe itself, as ``processes``.
        arms: the arms' keys.
    """
    settings = {"name": "tiny", "output_dir": "runs", **(top or {})}
    lines = [_pairs(settings)]
    for name in {**SECTIONS, **sections}:
        lines.append(f"[{name}]\n{_pairs({**SECTIONS.get(name, {}), **sections.get(name, {})})}")
    lines += [f"[[ood]]\n{_pairs(keys)}" for keys in ood]
    lines += [f"[[peers]]\n{_pairs({'name': name, **keys})}" for name, keys in peers.items()]
    lines += [f"[[arms]]\n{_pairs(keys)}" for keys in arms]
    path = place / "recipe.toml"
    path.write_text("".join(lines), encoding="utf-8")
    (place / "tiny_rewards.py").write_text(REWARDS, encoding="utf-8")
    return path


def pair_of(models: Mapping[str, Path], runs: Path, learning_rate: float, **sections: Any) -> dict[str, Any]:
    """The document of a recipe in which the tiny models ``a`` and ``b`` train inline on one operator.

    ``sections``: more of the document, as ``training``.
    """
    return {
        "name": "tiny",
        "output_dir": str(runs),
        "processes": "inline",
        "task": {"name": "clock", "options": {"operators": 1}, "validation_size": 2},
        "prompt": {"system_prompt": "", "template": "{question}"},
        "reward": {"function": "earned.third"},
        "sampling": {"num_generations": 8, "max_completion_length": 8},
        "peers": [
            {"name": name, "model": str(models[name]), "device": "cpu", "learning_rate": learning_rate} for name in "ab"
        ],
        **sections,
    }


def recipe_of(*peers: str, **training: Any) -> Recipe:
    """A recipe of peers without models; ``training``: keys of that section."""
    return parse(
        {
            "name": "a",
            "task": {"name": "clock"},
            "sampling": {"num_generations": 2},
            "training": {"prompts_per_round": 4 * len(peers), **training},
            "peers": [{"name": name, "model": "none"} for name in peers],
        }
    )


def swarm(peers: int, limit: int = 0, mode: str = "vertical", seed: int = 0) -> Recipe:
    """Every peer samples three groups of four rollouts a round, or in horizontal mode four of every group."""
    training = {"prompts_per_round": 3 * peers, "mode": mode, "max_foreign_rollouts": limit}
    document = {
        "name": "many",
        "seed": seed,
        "task": {"name": "clock"},
        "sampling": {"num_generations": 4 * (peers if mode == "horizontal" else 1)},
        "training": training,
        "peers": [{"name": f"p{i}", "model": "none"} for i in range(peers)],
    }
    return parse(document, where="test")


def task_of(name: str, **keys: Any) -> Task:
    """The task that a recipe names; ``keys``: the rest of its section."""
    return load_task(TaskConfig(name=name, **keys))


def _pairs(keys: Mapping[str, Any]) -> str:
    return "".join(f"{key} = {_value(value)}\n" for key, value in keys.items())


def _value(value: Any) -> str:
    """A TOML value: JSON's, but for tables."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(key)} = {_value(item)}" for key, item in value.items()) + " }"
    return json.dumps(str(value) if isinstance(value, Path) else value)
