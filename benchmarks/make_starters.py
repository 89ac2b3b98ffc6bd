"""Make starters as the package ships them, and measure where they start.

    python benchmarks/make_starters.py OUT                         # those that the package ships: about five minutes
    python benchmarks/make_starters.py OUT small@3 small@4 …       # candidates for others

Each starter is warmed up from its recipe in ``ftis.models.starters.STARTERS`` on one thread (and kept in
``$FTIS_HOME``, so that a second call does not repeat it), rounded to float16, and written to
``OUT/<name>-<digits of its sha256>``, as in ``src/ftis/starters``. It is loaded again, in float32, and answers
the demo's validation problems:
greedily, and by sampling at temperature 1. Prints one line a starter: name, seed, steps, fraction right when reasoned,
greedy and sampled accuracy, CPU seconds, directory.

Another CPU or another version of torch rounds a warm-up otherwise and makes another model, which is why they are
shipped. To ship others, replace those in ``src/ftis/starters``, the digests in ``ftis.models.starters.SHIPPED`` and the
table in docs/models.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ftis.config import PeerConfig, PromptConfig, RewardConfig, TaskConfig
from ftis.engines.builtin import builtin_sampler
from ftis.engines.samplers import InPlace
from ftis.models import starters
from ftis.policy import Policy
from ftis.rewards.scoring import load_scorer
from ftis.run.evaluate import evaluate
from ftis.sampling import Decoding
from ftis.tasks.problems import load_task
from ftis.tasks.rendering import render_prompt

TASK = TaskConfig(name="clock", options={"operators": 2}, validation_size=300)
PROMPT = PromptConfig(system_prompt="", template="{question}=")
LENGTH, DRAWS = 40, 8


def load(directory: Path) -> Policy:
    return Policy.load(PeerConfig(name="starter", model=str(directory), device="cpu", dtype="float32"))


def write(made: Path, out: Path, name: str, merged: bool = False) -> Path:
    """Round the starter in ``made`` to float16 and write it to ``out`` under its name and digest.

    Raises:
        ValueError: a weight is beyond float16's range.
    """
    policy = load(made)
    policy.model.half()
    beyond = [key for key, weight in policy.model.named_parameters() if not weight.isfinite().all()]
    if beyond:
        raise ValueError(f"{made}: {beyond[0]} holds weights beyond float16's range; ship it in bfloat16")
    partial = out / f".partial-{name}"
    policy.model.save_pretrained(partial)
    starters.make_tokenizer(merged).save_pretrained(partial)  # transformers has read it as Qwen2's own kind
    for file in partial.iterdir():
        file.chmod(0o644)  # transformers writes weights for their owner alone
    digest = hashlib.sha256((partial / "model.safetensors").read_bytes()).hexdigest()
    target = out / f"{name}-{digest[: starters.DIGITS]}"
    if target.exists():
        for file in target.iterdir():
            file.unlink()
        target.rmdir()
    return partial.rename(target)


def start(directory: Path) -> dict[str, float]:
    """Accuracy before training, on the demo's validation problems: greedy, and the mean over samples of each."""
    policy = load(directory)
    task = load_task(TASK)
    score = load_scorer(RewardConfig(), PROMPT, task.answer_kind)
    prompts = [render_prompt(problem, PROMPT, policy.tokenizer) for problem in task.validation]
    greedy = evaluate(policy, InPlace(builtin_sampler), task.validation, prompts, score, Decoding(LENGTH)).accuracy
    groups = builtin_sampler(policy, prompts, DRAWS, Decoding(LENGTH), 0)
    rewards: list[float] = []
    for problem, group in zip(task.validation, groups, strict=True):
        ids = [rollout.completion_ids.tolist() for rollout in group]
        rewards += score(problem, [policy.detokenize(i) for i in ids], ids)
    return {"greedy": round(greedy, 4), "sampled": round(sum(rewards) / len(rewards), 4)}


def make(name: str, out: Path) -> dict[str, Any]:
    """Warm up, round, write and measure one starter; what its line of the table says."""
    label, starter = starters.lookup(starters.PREFIX + name)
    variant = label if "@" in label else f"{label}@{starter.seed}"  # a bare name stands for what is shipped already
    began = time.process_time()
    warm = starters.make(starters.PREFIX + variant)
    seconds = time.process_time() - began
    directory = write(warm, out, label.replace("@", "-"), starter.merged)
    card: dict[str, Any] = json.loads((warm / "starter.json").read_text(encoding="utf-8"))
    card |= {"start": start(directory), "torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}
    (directory / "starter.json").write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
    return card | {"label": label, "directory": directory.name, "seconds": seconds}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME[@SEED]", help="by default those that the package ships")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for name in chosen.names or starters.STARTERS:
        made = make(name, chosen.out)
        print(
            f"| {made['label']} | {made['seed']} | {made['warm_up_steps']} | {made['right_when_reasoned']:.3f} "
            f"| {made['start']['greedy']:.3f} | {made['start']['sampled']:.3f} | {made['seconds']:.0f} "
            f"| `{made['directory']}` |",
            flush=True,
        )


if __name__ == "__main__":
    main()
