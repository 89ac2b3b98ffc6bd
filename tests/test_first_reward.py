"""The benchmark that follows preflight's advice: its recipes."""

from __future__ import annotations

from pathlib import Path

import first_reward

from ftis.recipe.parsing import load


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
