"""The recipes for one card of 24 GB, with stand-ins for their models: what they take, their prompts, and a round."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import stand_ins
from commands import DATA, ROOT, ftis

from ftis.recipe.parsing import load
from ftis.records.files import read_jsonl
from ftis.tasks.problems import load_task
from ftis.tasks.rendering import render_prompt

MODELS = {
    "qwen3_family": {"small": "Qwen3-0.6B", "medium": "Qwen3-1.7B", "large": "Qwen3-4B"},
    "two_families": {"qwen3": "Qwen3-0.6B", "llama": "Llama-3.2-1B"},
}
HERE = (DATA / "gsm8k" / "train.jsonl").exists()
REAL = (f"task.path={DATA / 'gsm8k'}", f"ood.0.path={DATA / 'math500'}", "ood.0.validation_size=4")
PROBLEMS = (*(REAL if HERE else ("task.name=word_problems", "ood=[]")), "task.validation_size=4")
CARD = 22.0  # gigabytes of 24; the rest is the driver's and what the allocator cannot use


def settings(recipe: str, place: Path, *more: str) -> list[str]:
    models = [f"peers.{peer}.model={place / name}" for peer, name in MODELS[recipe].items()]
    return [word for key in (*models, *PROBLEMS, f"output_dir={place}", *more) for word in ("--set", key)]


def gigabytes(line: str, after: str) -> float:
    found = re.search(rf"{after} ([\d.]+) GB", line)
    assert found, line
    return float(found[1])


@pytest.mark.slow
@pytest.mark.parametrize("recipe", MODELS)
def test_a_card_of_24_gb_holds_peers_in_turn(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By the real shapes, without weights. The recipe quotes these numbers."""
    parameters, path = {}, str(ROOT / "recipes" / f"{recipe}.toml")
    with pytest.raises(SystemExit) as ended:
        stand_ins.dry_run(path)
    assert not ended.value.code
    said = capsys.readouterr().out
    lines = {line.partition(":")[0]: line for line in said.splitlines() if " GB" in line}
    for peer in load(path).peers:
        parameters[peer.name] = int(re.sub(r"\D", "", lines[peer.name].partition("parameters")[0].partition(":")[2]))
        number = {"float32": 4, "bfloat16": 2, "nf4": 0.5}[peer.frozen_dtype]
        least = parameters[peer.name] * (4 if peer.train == "full" else number) / 1e9
        assert (
            0.99 * least <= gigabytes(lines[peer.name], "weights") <= 1.9 * least
        )  # embeddings and adapters have all bits
    assert list(parameters.values()) == sorted(parameters.values())
    turns = {name: float(size) for size, name in re.findall(r"([\d.]+) GB while (\w+) works", said)}
    assert set(turns) == set(MODELS[recipe])
    assert max(turns.values()) <= CARD
    quoted = " ".join(re.findall(r"^#\s*(.*)$", Path(path).read_text(encoding="utf-8"), re.MULTILINE))
    for pattern in (r"([\d.]+) GB while (\w+) works", r"([\d.]+) (?:s|min) for (\w+)"):
        now, then = ({name: float(size) for size, name in re.findall(pattern, text)} for text in (said, quoted))
        assert then == pytest.approx(now, rel=0.02)
        assert set(then) == set(MODELS[recipe])


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "prompts"), [("qwen3_family", 6), ("two_families", 8)])
def test_the_peers_of_a_recipe_train_in_every_arm(recipe: str, prompts: int, tmp_path: Path) -> None:
    if recipe == "qwen3_family":
        pytest.importorskip("bitsandbytes")
    for name in MODELS[recipe].values():
        stand_ins.stand_in(tmp_path / name, name, small=True)
    more = ("training.rounds=1", "training.eval_every=0", "sampling.max_completion_length=12")
    of_reward = ("reward.function=stand_ins.share_of_even", "peers.*.lora_r=2", "threads=1")
    spread = prompts * len(MODELS[recipe])
    arms = ("alone-spread", "alone-reuse", "imitation")
    fewer = (
        f"training.prompts_per_round={prompts}",
        *(f"arms.{a}.set.training.prompts_per_round={spread}" for a in arms),
    )
    sizes = settings(recipe, tmp_path, *more, *fewer, *of_reward)
    path = ROOT / "recipes" / f"{recipe}.toml"
    plan, peers = load(path, sizes[1::2]), set(MODELS[recipe])
    # Texts of random models align nowhere, so all foreign successes are dropped, and imitation has nothing else.
    trained = [arm for arm in plan.arms if (recipe, arm.name) != ("two_families", "imitation")]
    assert ftis("train", str(path), *(f"--arm={arm.name}" for arm in trained), *sizes) == 0

    run = tmp_path / f"{plan.name}-seed0"
    task = load_task(plan.task)
    for peer, name in MODELS[recipe].items():
        tokenizer = stand_ins.tokenizer_of(stand_ins.SHAPES[name][0])
        prompt = str(tokenizer.decode(render_prompt(task.train[0], plan.prompt, tokenizer)))
        assert prompt.endswith(
            "assistant\n<think>\n\n</think>\n\n" if "Qwen3" in name else "assistant<|end_header_id|>\n"
        )
        sampled = set()
        for arm in trained:
            rows = pq.read_table(run / arm.name / peer / "rollouts" / "round-000000.parquet").to_pylist()
            own = [row for row in rows if row["source"] == peer]
            assert {row["source"] for row in rows} == (peers if arm.collaborate else {peer})
            sampled.add(len(own))
            for row in own:
                ids = row["completion_ids"]
                assert not {0, 1} & set(ids[:-1])  # the ends of the model's generation defaults
                assert len(ids) == 12 or ids[-1] in (0, 1)
            last = read_jsonl(run / arm.name / peer / "metrics.jsonl")[-1]
            assert last["grad_norm"] > 0
            splits = {row["split"] for row in read_jsonl(run / arm.name / peer / "evaluations.jsonl")}
            assert splits == ({"validation", "ood-math500"} if HERE else {"validation"})
            if arm.collaborate:
                assert last["foreign_used"] > 0
        assert len(sampled) == 1  # every arm has the same sampling
