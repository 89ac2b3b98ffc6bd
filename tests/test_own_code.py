"""Whose code a command runs: that of ftis, of installed packages and of a recipe that was named, and no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ftis.config import ModelError, PeerConfig, RecipeError
from ftis.engines.models import load_config, load_model
from ftis.engines.tokenizers import load_tokenizer
from ftis.recipe.own_code import staying
from ftis.seams import look_up
from recipes import write_recipe

STRANGERS = ("torch", "scipy", "ftis", "transformers", "numpy", "selectors", "stranger")
"""Modules in the current directory, some named as those that every command or process imports."""

ALL_COMMANDS = """
import json, sys
from ftis.cli import main
for arguments in json.loads(sys.argv[1]):
    try:
        main(arguments)
    except SystemExit as ended:
        print("ended", ended.code, *arguments)
"""


def run(*arguments: str, cwd: Path) -> str:
    environment = dict(os.environ)
    environment.pop("PYTHONSAFEPATH", None)
    ended = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    return ended.stdout + ended.stderr


@pytest.mark.parametrize("leave", ["sys.exit('no')", "os._exit(3)"])
def test_a_module_that_ends_the_program_is_named(leave: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leaving.py").write_text(f"import os, sys\n{leave}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = os._exit
    with pytest.raises(RecipeError, match=r"leaving\.py, line 2"), staying():
        look_up("leaving.reward", "reward.function")
    assert os._exit is before


def test_a_reward_that_crashes_leaves_the_lines_it_was_in(tmp_path: Path, models: dict[str, Path]) -> None:
    reward = {"function": "broken_parts.crashes"}
    recipe = write_recipe(tmp_path, {"a": {"model": models["a"], "learning_rate": 1e-3}}, reward=reward)
    (tmp_path / "broken_parts.py").symlink_to(Path(__file__).with_name("broken_parts.py"))
    said = run("-m", "ftis", "train", str(recipe), "--dry-run", cwd=tmp_path)
    assert "broken_parts.py" in said
    assert "in crashes" in said


@pytest.mark.slow
def test_no_command_runs_what_lies_in_the_current_directory(tmp_path: Path, models: dict[str, Path]) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    marks = here / "marks"
    for name in STRANGERS:
        (here / f"{name}.py").write_text(f"open({str(marks)!r}, 'a').write({name!r} + chr(10))\nraise ImportError\n")
    peers = {"a": {"model": models["a"], "device": "cpu", "learning_rate": 1e-3}}
    training = {"rounds": 1, "prompts_per_round": 1}
    recipe = write_recipe(elsewhere, peers, top={"processes": "parallel"}, training=training)
    (elsewhere / "torch.py").write_text(f"open({str(marks)!r}, 'a').write('beside the recipe')\n")  # behind installed
    stranger = here / "runs" / "stranger-seed0"  # as somebody else's run directory
    document = {
        "name": "stranger",
        "task": {"name": "stranger.task"},
        "reward": {"function": "stranger.reward"},
        "objective": {"name": "stranger.objective"},
        "sampling": {"sampler": "stranger.sampler", "num_generations": 2},
        "peers": [{"name": "a", "model": "starter:small"}],
    }
    (stranger / "stranger" / "a").mkdir(parents=True)
    (stranger / "recipe.json").write_text(json.dumps(document))
    commands = [
        ["doctor"],
        ["keys", "new", "a"],
        ["report", str(stranger)],
        ["preflight", str(recipe), "--groups", "1"],
        ["train", str(recipe)],
        ["eval", str(models["a"]), "--recipe", str(recipe)],
        ["report", "runs/tiny-seed0"],
    ]
    said = run("-P", "-c", ALL_COMMANDS, json.dumps(commands), cwd=here)
    assert (here / "runs" / "tiny-seed0" / "summary.json").exists(), said
    assert said.count("ended") == len(commands)
    (here / "ftis.py").unlink()  # Python itself takes it where -m names it
    assert "ok" in run("-m", "ftis", "doctor", cwd=here)
    assert not marks.exists(), marks.read_text()


def test_code_in_a_models_directory_is_refused_and_nobody_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under pytest a question at the terminal would raise."""
    mark = tmp_path / "ran"
    (tmp_path / "code.py").write_text(f"open({str(mark)!r}, 'w')\n")
    code = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model", "AutoTokenizer": ["code.Slow", None]}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "of-its-own", "auto_map": code}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Slow", "auto_map": code}))
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    of_base = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(tmp_path)}
    (adapter / "adapter_config.json").write_text(json.dumps(of_base))

    def load_weights(place: str) -> object:
        return load_model(place, PeerConfig(name="a", model=place))

    here = str(tmp_path)
    loads = ((load_config, here), (load_tokenizer, here), (load_weights, here), (load_weights, str(adapter)))
    for load, place in loads:
        with pytest.raises((ModelError, ValueError)) as refused:
            load(place)
        assert "code" in str(refused.value)
    assert not mark.exists()
    assert "[y/N]" not in capsys.readouterr().out
