"""Benchmarks: the one for a machine with one GPU, at toy size on a CPU, and the recipes of preflight's advice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import first_reward
import pytest

from ftis.recipe.parsing import load


@pytest.mark.slow
def test_every_stage_of_the_gpu_benchmark_writes_what_it_measured(tmp_path: Path) -> None:
    """All of its code except what only CUDA has."""
    command = [sys.executable, "benchmarks/gpu.py", "--tiny", "--out", str(tmp_path)]
    ended = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert [found[stage]["ended"] for stage in ("tests", "family", "learning")] == [0, 0, 0]
    family, learning = found["family"], found["learning"]
    for peer in ("small", "medium"):
        alone, together = family[peer][peer], family["together"][peer]
        assert alone["tokens"] > 1.5 * together["tokens"]  # half of the sampling
        assert alone["round"] > 0
        assert together["update"] > 0
        assert set(alone) == set(together)
    for peer in ("full", "lora"):
        steps = [learning[f"{arm} {peer}"]["accuracy"].keys() for arm in ("F-TIS", "alone-spread")]
        assert steps[0] == steps[1]
        assert len(learning[f"F-TIS {peer}"]["reward"]) == learning["pilot"]["rounds"]


def test_the_parts_of_recipes_that_preflight_prints_are_whole(tmp_path: Path) -> None:
    of = {}
    for name, part in first_reward.EASY_FORMATS.items():
        file = tmp_path / "recipe.toml"
        text = first_reward.recipe_text("m", part, seed=3, output_dir="runs", validation_size=8, full=1e-5)
        file.write_text(text, encoding="utf-8")
        of[name] = load(file)
        assert (of[name].seed, of[name].reward.extract) == (3, "last_number")
        assert [(peer.train, peer.learning_rate) for peer in of[name].peers] == [("full", 1e-5), ("lora", 1e-4)]
    base, instruct = of.values()
    assert (instruct.prompt.chat_template, instruct.sampling.stop) == ("auto", ())
    assert (base.prompt.chat_template, base.sampling.stop, len(base.prompt.examples)) == ("never", ("\n",), 1)
