"""A TRL script as one peer of a swarm: TRL's GRPOTrainer, and three lines changed.

Make keys once (``ftis keys new small large``, ``ftis keys roster keys/small.pub keys/large.pub``). Then a TRL peer and
a peer of ours learn together in two terminals in the repository, 20 rounds on the CPU in about half a minute::

    python examples/trl_peer.py
    ftis join recipes/demo_pair.toml --arm F-TIS --peer large --key keys/large.key --roster roster.toml \
        --set training.rounds=20 --set output_dir=runs/trl

After Ctrl-C or a kill, ``--resume`` goes on from the last checkpoint. TRL comes with ``make trl``.
Two processes on CPUs: ``accelerate launch --multi_gpu --num_processes 2 examples/trl_peer.py``.
"""

from __future__ import annotations

import argparse
import os
import re
from typing import Any

import torch
from trl import GRPOConfig

import ftis
from ftis.trl import FTISTrainer, Swarm, end_processes  # one


def right_answer(prompts: Any, completions: Any, answer: Any, **columns: Any) -> list[float]:
    """1 for reasoning, tags and the right answer, as the recipe's built-in reward."""
    pattern = r"<think>[^<]*</think><answer>([^<]*)</answer>"
    texts = [given if isinstance(given, str) else given[-1]["content"] for given in completions]  # messages, too
    found = [re.fullmatch(pattern, text.strip()) for text in texts]
    return [float(match is not None and match[1] == a) for match, a in zip(found, answer, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="recipes/demo_pair.toml")
    parser.add_argument("--peer", default="small")
    parser.add_argument("--model", help="a Hugging Face directory or Hub id; default: the starter of that name")
    parser.add_argument("--key", default="keys/small.key")
    parser.add_argument("--roster", default="roster.toml")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--set", nargs="*", default=[], help="keys of the recipe, as --set network.port=7000")
    parser.add_argument("--out", default="runs/trl/small")
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args()
    processes = int(os.environ.get("WORLD_SIZE", "1"))  # torchrun and accelerate say how many there are
    torch.set_num_threads(1)

    recipe = ftis.load(given.recipe, [f"training.rounds={given.rounds}", *given.set])
    swarm = Swarm(recipe, peer=given.peer, arm="F-TIS", key=given.key, roster=given.roster)  # two
    args = GRPOConfig(
        output_dir=given.out,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        per_device_train_batch_size=72 // processes,  # a round's 24 prompts x 12 completions, of all peers, in 4 steps
        steps_per_generation=4,
        gradient_accumulation_steps=1,
        num_generations=12,
        max_completion_length=40,
        loss_type="grpo",  # F-TIS as published; without this line TRL's own, which is DAPO's
        learning_rate=6e-4,
        lr_scheduler_type="linear",
        adam_beta2=0.95,
        save_steps=20,  # every 5 rounds
        logging_steps=4,
        report_to="none",
    )
    trainer = FTISTrainer(given.model or f"starter:{given.peer}", right_answer, args, swarm=swarm)  # three
    trainer.train(resume_from_checkpoint=given.resume)
    end_processes(trainer)


if __name__ == "__main__":
    main()
