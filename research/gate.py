"""A gate for tasks: does a real model alone gain from four times the sampling? ``python -m research.gate runs/gate``.

SmolLM2-135M-Instruct learns through LoRA, alone, from 24 and from 96 rollouts in each of 24 rounds. Only a task that
passes can show what a swarm of four is worth. These rules were written before any arm was run:

1. ``--screen`` looks at the start, on 12 groups of 4. The five tasks with most right rollouts go on, if at most half
   are right. Among equals the one with the cheapest round goes on.
2. Both arms run under seed 0. A task goes on if the second ends at least ``GOES_ON`` above the first.
3. Both run under seed 1. A task passes if the mean of both differences is at least ``ENOUGH``.

Accuracy is greedy, on 200 held-out problems, at the end alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import ftis
from ftis.config import Recipe
from research import commands
from research.findings.__main__ import FINDINGS, Summary, written

ENOUGH, GOES_ON = 0.08, 0.04
SCREENED = ("letters", "needle", "one-step", "family", "sum")
"""The tasks that passed the first rule: .27, .25, .17, .10 and .08 of their rollouts were right."""

SIZES = {"order": 600, "backward": 1000}
"""Problems to train on, of tasks that do not have 2,000."""

Example = tuple[str, str]
"""A question and its completion."""

TASKS: dict[str, tuple[str, dict[str, Any], tuple[Example, Example]]] = {
    "one-step": (
        "word_problems",
        {"steps": [1], "largest": 30},
        (
            ("Sam has 3 pens and gets 4 more. How many is that?", "3 + 4 = 7"),
            ("Ann has 2 bags with 5 nuts in each. How many nuts is that?", "2 * 5 = 10"),
        ),
    ),
    "two-step": (
        "word_problems",
        {"steps": [2], "largest": 12},
        (
            ("Sam has 3 pens, gets 4 more and loses 2. How many is that?", "3 + 4 - 2 = 5"),
            ("Ann has 2 bags with 5 nuts in each and eats 1. How many are left?", "2 * 5 - 1 = 9"),
        ),
    ),
    "sum": (
        "reasoning_gym:chain_sum",
        {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
        (("12 + 7 =", "19"), ("State the final answer to the following arithmetic problem: 5 - 3 =", "2")),
    ),
    "equation": (
        "reasoning_gym:simple_equations",
        {"min_terms": 2, "max_terms": 2, "min_value": 1, "max_value": 9},
        (("Find the value of k in the equation: 3*k + 2 = 8", "2"), ("Solve for y: y - 4 = 1", "5")),
    ),
    "order": (
        "reasoning_gym:sentence_reordering",
        {"min_words_in_sentence": 3, "max_words_in_sentence": 5},
        (
            ("Restore the correct order of words in the following sentence: lips move. Her", "Her lips move."),
            ("Restore the correct order of words in the following sentence: is dog The old", "The dog is old"),
        ),
    ),
    "needle": (
        "reasoning_gym:needle_haystack",
        {"min_num_statements": 3, "max_num_statements": 5},
        (
            ("Mia likes cats. Tom hates rain. Who hates rain? Reply only with a name.", "Tom"),
            ("Leo values tea. Ida bears golf. Zoe adores pigs. Who values tea? Reply only with a name.", "Leo"),
        ),
    ),
    "letters": (
        "reasoning_gym:letter_counting",
        {"min_words": 1, "max_words": 2},
        (
            ('How many times does the letter "n" appear in the text: "hundred thousand"?', "2"),
            ('How many times does the letter "a" appear in the text: "bananas"?', "3"),
        ),
    ),
    "backward": (
        "reasoning_gym:spell_backward",
        {"min_word_len": 3, "max_word_len": 4},
        (
            ("Spell this word backward (example: sun -> nus): neon", "noen"),
            ("Spell this word backward (example: sun -> nus): cat", "tac"),
        ),
    ),
    "sequence": (
        "reasoning_gym:number_sequence",
        {"max_complexity": 1},
        (("2, 4, 6, 8, ?", "10"), ("3, 6, 12, 24, ?", "48")),
    ),
    "family": (
        "reasoning_gym:family_relationships",
        {"min_family_size": 4, "max_family_size": 5},
        (
            (
                "Ian is married to Eve. They have a child called Bob.\n\nWhat is Eve to Bob? "
                "Answer with a single word.",
                "mother",
            ),
            (
                "Ian is married to Eve. They have a child called Bob.\n\nWhat relation is Ian to Eve? "
                "Answer with a single word.",
                "husband",
            ),
        ),
    ),
    "filter": (
        "reasoning_gym:number_filtering",
        {"min_numbers": 3, "max_numbers": 4, "min_decimals": 0, "max_decimals": 0, "min_value": 0, "max_value": 50},
        (
            (
                "Remove all numbers larger than 20 in this list: ['31', '4', '17']\nReturn the new list in the same "
                "format.",
                "['4', '17']",
            ),
            (
                "Keep all numbers larger than 20 in this list: ['31', '4', '17']\nReturn the new list in the same "
                "format.",
                "['31']",
            ),
        ),
    ),
}
"""By name: the task, its options, and two solved problems."""


def right(completions: Sequence[str], answer: Sequence[str], **columns: object) -> list[float]:
    """1 for a completion whose text after its last equals sign is the answer and nothing else."""
    ends = (text.rsplit("=", 1)[-1].strip() for text in completions)
    return [float(end == str(gold).strip()) for end, gold in zip(ends, answer, strict=True)]


def recipe(name: str, seed: int, output_dir: Path) -> Recipe:
    """Both arms of a task."""
    task, options, examples = TASKS[name]
    return ftis.load(
        {
            "name": f"gate-{name}",
            "seed": seed,
            "output_dir": str(output_dir),
            "task": {"name": task, "options": options, "train_size": SIZES.get(name, 2000), "validation_size": 200},
            "prompt": {
                "system_prompt": "",
                "chat_template": "never",
                "template": "Q: {question}\nA:",
                "examples": [{"question": q, "completion": f" {a}"} for q, a in examples],
            },
            "reward": {"function": "research.gate.right"},
            "sampling": {"num_generations": 4, "max_completion_length": 24, "temperature": 0.7, "stop": ["\n"]},
            "training": {"rounds": 24, "prompts_per_round": 24, "eval_every": 24, "save_every": 24},
            "peers": [
                {
                    "name": "lora",
                    "model": "models/smollm2-135m",
                    "train": "lora",
                    "lora_r": 16,
                    "lora_alpha": 32,
                    "learning_rate": 3e-4,
                    "lr_scheduler_type": "linear",
                }
            ],
            "arms": [
                {"name": "part", "collaborate": False, "set": {"training.prompts_per_round": 6}},
                {"name": "all", "collaborate": False},
            ],
        }
    )


def gate(output_dir: Path, tasks: list[str] = [], screen: bool = False, write: str = "") -> None:  # noqa: B006
    """Print what both arms of each task reach under both seeds; ``--screen`` only looks at the start.

    ``--write COMMIT`` makes the table of the findings of what has run.
    """
    rows: list[tuple[str, ...]] = []
    for name in tasks or (TASKS if screen else SCREENED):
        if screen:
            (found,) = ftis.preflight(recipe(name, 7, output_dir), arm="all", groups=12, quiet=True)
            signal = sum(len(set(group)) > 1 for group in found.rewards)
            print(
                f"{name}: {fmean(map(fmean, found.rewards)):.2f}, {signal} of {len(found.rewards)} groups with signal, "
                f"{found.mean_length:.0f} tokens, {found.seconds_per_round:.0f} s a round of 96",
                flush=True,
            )
            continue
        gains: list[float] = []
        for seed in (0, 1):
            if seed and gains[0] < GOES_ON:
                break
            results = ftis.train(recipe(name, seed, output_dir), resume=True, quiet=True)
            reached = {arm: [r["accuracy"] for r in results.accuracies if r["arm"] == arm] for arm in ("part", "all")}
            gains.append(reached["all"][-1] - reached["part"][-1])
            numbers = (reached["part"][0], reached["part"][-1], reached["all"][-1], gains[-1])
            rows.append((name, str(seed), *(f"{number:.3f}" for number in numbers)))
            print(*rows[-1], flush=True)
        print(f"{name}: {'passes' if len(gains) == 2 and fmean(gains) >= ENOUGH else 'does not pass'}", flush=True)
    if write:
        table = Summary(
            command=" ".join(["python -m research.gate runs/gate", *(f"--tasks {name}" for name in tasks)]),
            commit=write,
            machine="2 cores of an AMD EPYC (AVX-512), torch 2.13",
            seeds=(0, 1),
            comparisons=0,
            columns=("task", "seed", "start", "24 rollouts", "96 rollouts", "difference"),
            rows=tuple(rows),
        )
        (FINDINGS / "data" / "gate.json").write_text(written(table), encoding="utf-8")


if __name__ == "__main__":
    commands.run(gate)
