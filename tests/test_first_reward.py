"""The benchmark that follows preflight's advice: its recipes, and all of it with a real model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import first_reward
import pytest

from ftis.recipe.parsing import load

ROOT = Path(__file__).parents[1]
REAL = ROOT / "models" / "smollm2-135m"


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


@pytest.mark.slow
@pytest.mark.skipif(not (REAL / "config.json").exists(), reason="models/smollm2-135m is absent: make models")
def test_a_real_model_earns_what_the_default_prompt_does_not_give() -> None:
    command = [sys.executable, "benchmarks/first_reward.py", "models/smollm2-135m", "--groups=2"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert ended.returncode == 0, ended.stderr
    default, *easy = json.loads(ended.stdout.splitlines()[-1])["models/smollm2-135m"]["preflight"]
    assert (default["recipe"], default["reward"], default["signal"]) == ("default prompt", 0.0, 0.0)
    assert [row["recipe"] for row in easy] == ["with examples", "without tags"]
    assert max(row["reward"] for row in easy) > 0
