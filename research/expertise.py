"""Real models that each know one kind of problem.

    python -m research.expertise                             # makes the experts
    ftis train research/recipes/expertise.toml --seeds 3
    python -m research.expertise --write COMMIT              # the table of accuracy by kind, of that run

SmolLM2-135M-Instruct copies the answers of one kind through LoRA, and becomes the expert of that kind. Experts then
learn both kinds together (research/recipes/expertise.toml), each through another LoRA.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

import numpy as np
import torch

from ftis import PeerConfig, Policy, supervised_step
from ftis.config import TaskConfig
from ftis.objectives import F_TIS_LIFTED, lifted
from ftis.prompts import Task
from ftis.records.reading import VALIDATION, Run, read_study
from ftis.rollouts import Prompt
from ftis.tasks.problems import Problem, load_task, make_task
from research import commands
from research.findings.__main__ import FINDINGS, Cell, Summary, written

KINDS = {
    "sum": ("reasoning_gym:chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}),
    "equation": (
        "reasoning_gym:simple_equations",
        {"min_terms": 2, "max_terms": 2, "min_value": 1, "max_value": 9},
    ),
}
"""By name: the data set and its options. A model that knows one kind solves almost none of the other."""
PEERS = ("sums", "equations")
SHARED, COPIED = 1000, 1000
"""Problems of a kind that peers train on, and those after them. An expert copies the latter without repeated ones."""
STEPS, BATCH, RATE = 200, 16, 1e-3
PROMPT = "Q: {question}\nA:"

LIFTED_FURTHER = replace(F_TIS_LIFTED, weight=partial(lifted, least=0.01))
"""F-TIS-lifted with δ = .01."""


def problems_of(kind: str, train: int, validation: int) -> tuple[Sequence[Prompt], Sequence[Prompt]]:
    """Training and validation problems of a kind."""
    name, options = KINDS[kind]
    task = load_task(TaskConfig(name=name, options=options, train_size=train, validation_size=validation))
    return task.train, task.validation


def copied_of(kind: str) -> Sequence[Prompt]:
    """The problems that an expert copies: none that peers train on, or validate with."""
    train, validation = problems_of(kind, SHARED, 200)
    known = {problem.question for problem in (*train, *validation)}
    return [p for p in problems_of(kind, SHARED + COPIED, 200)[0][SHARED:] if p.question not in known]


def load(config: TaskConfig) -> Task:
    """The kinds in ``config.options["kinds"]`` in turn, with ``config.validation_size`` validation problems of each."""
    parts = [problems_of(kind, SHARED, config.validation_size or 200) for kind in config.options["kinds"]]

    def in_turn(of: Sequence[Sequence[Prompt]]) -> list[Problem]:
        return [(p.question, p.answer, {}) for problems in zip(*of, strict=True) for p in problems]

    return make_task(config.name, in_turn([t for t, _ in parts]), in_turn([v for _, v in parts]), "exact")


def by_kind(runs: Path, commit: str) -> Summary:
    """Each peer's accuracy on each kind, before training and at the end, means over seeds, by arm."""
    study = read_study(runs)
    arms = [arm.name for arm in study.arms]
    rows: list[tuple[Cell, ...]] = []
    for label, arm, step in [("before training", arms[0], 0), *((arm, arm, None) for arm in arms)]:
        of_seeds = [_accuracies(study.runs[seed], arm, step) for seed in study.seeds]
        rows.append((label, *map(fmean, zip(*of_seeds, strict=True))))
    return Summary(
        command="python -m research.expertise\nftis train research/recipes/expertise.toml --seeds 3\n"
        "python -m research.expertise --write COMMIT",
        commit=commit,
        machine="one core of an AMD EPYC (AVX-512 BF16), torch 2.13",
        seeds=study.seeds,
        comparisons=0,
        columns=("arm", *(f"{peer} on {kind}s" for peer in PEERS for kind in KINDS)),
        rows=tuple(rows),
    )


def _accuracies(run: Run, arm: str, step: int | None) -> list[float]:
    """By peer and kind: accuracy after ``step`` rounds, None for the last."""
    found = list[float]()
    for peer in PEERS:
        answers = run.peers[arm, peer].answers(VALIDATION, step)
        found += [fmean(one["reward"] for one in answers[place :: len(KINDS)]) for place in range(len(KINDS))]
    return found


def main(
    out: Path = Path("models"),
    model: Path = Path("models/smollm2-135m"),
    runs: Path = Path("runs/expertise"),
    write: str = "",
) -> None:
    """Make the experts that are not there yet, ``OUT/smollm2-KIND``; or ``--write`` the table of ``--runs``."""
    if write:
        (FINDINGS / "data" / "expertise-kinds.json").write_text(written(by_kind(runs, write)), encoding="utf-8")
        return
    for kind in KINDS:
        target = out / f"smollm2-{kind}"
        if (target / "tokenizer_config.json").exists():  # written last
            continue
        copied = copied_of(kind)
        policy = Policy.load(
            PeerConfig(
                name=kind,
                model=str(model),
                train="lora",
                lora_r=32,
                lora_alpha=64,
                learning_rate=RATE,
                adam_beta2=0.95,
                dtype="bfloat16",
            )
        )
        rng = np.random.default_rng(0)
        for step in range(STEPS):
            policy.set_learning_rate(RATE * (1 - step / STEPS))
            chosen = rng.choice(len(copied), BATCH, replace=False)
            examples = [(PROMPT.format(question=copied[i].question), f" {copied[i].answer}\n") for i in chosen]
            supervised_step(policy, examples)
            if step % 20 == 0:
                print(f"{kind}: step {step} of {STEPS}", flush=True)
        policy.model.merge_and_unload().save_pretrained(target)
        policy.tokenizer.save_pretrained(target)


if __name__ == "__main__":
    torch.set_num_threads(1)
    commands.run(main)
