"""One GRPO round (sample, score, update) of a model alone: ours, TRL's GRPOTrainer, and FTISTrainer within TRL.

    python benchmarks/round.py --venv .venv-trl                                  # the 88k-parameter starter
    python benchmarks/round.py --venv .venv-trl --model 13M --rounds 4           # random weights, graded reward
    python benchmarks/round.py --venv .venv-trl --model smollm2-135m --rounds 4 --seeds 0 1 2

TRL 1.16 lives in an environment of its own, made on the first run at --venv. Both sides get the same model, 24
prompts x 12 completions of at most 40 tokens of the clock task (SmolLM2, from `ftis models smollm2-135m`: 8 word
problems behind two worked ones x 8 completions of at most 16 tokens, graded), the same reward function, AdamW with
the same settings, 4 optimiser steps a round, one thread, float32, and settle the same number of rounds for each seed.
TRL's settings are those that suit a CPU: no checkpointing, no pinned memory, everything of a step in one micro-batch.

"TRL + ftis" is the same script with FTISTrainer and a recipe of which it is the only peer. "TRL + ftis, of two" has
another peer. That one is ours (starter:large beside the starter, else the same model), trains on its own share before,
and its messages are handed over in memory. So this side samples half of the prompts, and decodes, admits, scores and
judges the other half, tests it for honesty, and learns from as many rollouts as TRL. It writes the records that a
recipe has by default.

Sides take turns, each run in a process of its own. Seconds are medians over the rounds of all seeds but each run's
first: of the processor, as the machine may be busy with other things, and for a whole round of the clock too.
"adapter" is what FTISTrainer spends itself: all but TRL's own code, sampling, reward functions, the model's passes and
the optimiser. `parts` splits it. What a swarm does with the others' rollouts before the first step counts as "update"
too. Memory is the process's largest resident size; the
final reward is the mean over the last five rounds. Evaluation is greedy pass@1 on 300 held-out problems: ours by
ftis.run.evaluate, TRL's by generate, since its trainer has none of its own.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from round_medians import SWARMS, compared, row_of
from round_swarm import Nobody, Recorded, Spent

if TYPE_CHECKING:
    from ftis.config import Recipe
    from ftis.trl.swarm import Link

STEPS = 4
PINNED = ("torch==2.13.0", "transformers==5.23.0", "accelerate==1.15.0", "numpy==2.4.6")


def clock_reward(prompts: Any, completions: Any, completion_ids: Any, answer: Any, **columns: Any) -> list[float]:
    """1 for reasoning, tags and the right answer."""
    pattern = r"<think>.*</think><answer>(.*)</answer>"
    found = [re.fullmatch(pattern, completion.strip()) for completion in completions]
    return [float(match is not None and match[1] == a) for match, a in zip(found, answer, strict=True)]


def even_share(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
    """The share of tokens with an even id: varies on random models, so that there is something to learn."""
    return [sum(int(i) % 2 == 0 for i in ids) / max(1, len(ids)) for ids in completion_ids]


# With a greater rate for "13M", the lengths of what both sides sample drift apart within a few rounds.
# A completion has some 17 tokens of it, so its filter is that of recipes/demo_pair.toml.
OF_CLOCK = {"groups": 24, "group": 12, "length": 40, "filter": {"kl_estimator": "k3", "kl_threshold": 0.5}}
MODELS: dict[str, dict[str, Any]] = {
    "starter": {"reward": "clock_reward", "learning_rate": 5e-4, **OF_CLOCK},
    "13M": {"reward": "even_share", "learning_rate": 1e-5, **OF_CLOCK},
    "smollm2-135m": {
        "reward": "even_share",
        "learning_rate": 1e-6,
        "groups": 8,
        "group": 8,
        "length": 16,
        "filter": {},
    },
}
OWN, OTHER = "own", "other"
ROOT = Path(__file__).parents[1]
WORDS = ROOT / "recipes" / "smollm2_words.toml"


def recipe_of(name: str, rounds: int, seed: int, models: Mapping[str, Path], objective: str) -> Recipe:
    """A swarm of the peers that ``models`` names."""
    of_model = MODELS[name]
    of_task: dict[str, Any] = {
        "task": {"name": "clock", "options": {"operators": 2}, "validation_size": 300},
        "prompt": {"system_prompt": "", "template": "{question}="},
    }
    if name == "smollm2-135m":
        words = tomllib.loads(WORDS.read_text(encoding="utf-8"))
        of_task = {"task": {**words["task"], "validation_size": 40}, "prompt": words["prompt"]}
    from ftis.recipe.parsing import parse

    return parse(
        {
            "name": "round",
            "seed": seed,
            **of_task,
            "reward": {"function": f"round.{MODELS[name]['reward']}"},
            "sampling": {"num_generations": of_model["group"], "max_completion_length": of_model["length"]},
            "training": {
                "rounds": rounds,
                "prompts_per_round": of_model["groups"],
                "steps_per_generation": STEPS,
                "record_rollouts": objective != "NoIS",
            },
            "objective": {"name": objective, **(of_model["filter"] if objective == "F-TIS" else {})},
            "peers": [
                {
                    "name": peer,
                    "model": str(model),
                    "device": "cpu",
                    "learning_rate": of_model["learning_rate"],
                    "adam_beta2": 0.95,
                }
                for peer, model in models.items()
            ],
        },
        where="benchmark",
    )


def ours(model: Path, problems: Path, name: str, rounds: int, seed: int) -> dict[str, Any]:
    import torch

    from ftis.admission import Collected
    from ftis.run.assembly import assemble

    torch.set_num_threads(1)
    of_model, recipe = MODELS[name], recipe_of(name, rounds, seed, {OWN: model}, "NoIS")
    stages_clock = mock.patch("ftis.measures.time", SimpleNamespace(monotonic=time.process_time))
    with tempfile.TemporaryDirectory() as directory, stages_clock:
        trainer = assemble(recipe, OWN, Path(directory))
        metrics, processor, clock = [], [], []
        for round in range(rounds):
            began, began_by_clock = time.process_time(), time.perf_counter()
            trainer.peer.begin(round)
            metrics.append(trainer.peer.finish(round, Collected({})).metrics)
            processor.append(time.process_time() - began)
            clock.append(time.perf_counter() - began_by_clock)
        began = time.process_time()
        accuracy = trainer.evaluate(trainer.splits).accuracies["validation"]
    tokens = [row["completions/mean_length"] * of_model["groups"] * of_model["group"] for row in metrics]
    return {
        "round": clock,
        "round_processor": processor,
        "sampling": [row["time/sample"] for row in metrics],
        "log-probs": [row["time/logp"] for row in metrics],
        "update": [row["time/update"] for row in metrics],
        "evaluation": [time.process_time() - began],
        "tokens": tokens,
        "reward": [row["reward"] for row in metrics],
        "accuracy": accuracy,
    }


def theirs(
    model: Path,
    problems: Path,
    name: str,
    rounds: int,
    seed: int,
    recipe: Recipe | None = None,
    link: Link | None = None,
) -> dict[str, Any]:
    """TRL's side; with a ``recipe``, as its peer :data:`OWN`, whose messages ``link`` carries."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from ftis.records.files import read_jsonl

    torch.set_num_threads(1)
    of_model = MODELS[name]
    reward = {"clock_reward": clock_reward, "even_share": even_share}[of_model["reward"]]
    data = json.loads(problems.read_text())
    columns = {key: [row[key] for row in data["train"]] for key in ("prompt", "answer")}
    times: dict[str, list[float]] = {
        "round": [],
        "round_processor": [],
        "_generate": [],
        "_generate_and_score_completions": [],
    }
    tokens: list[int] = []
    spent, spent_of_rounds = Spent(), []

    def timed(trainer: Any, method: str) -> None:
        inner = getattr(trainer, method)

        def outer(*arguments: Any) -> Any:
            began = time.process_time()
            out = inner(*arguments)
            times[method].append(time.process_time() - began)
            if method != "_generate":
                tokens.append(int(out["completion_mask"].sum()))
            return out

        setattr(trainer, method, outer)

    class RoundTimes(TrainerCallback):
        began = began_processor = 0.0

        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            if state.global_step % STEPS == 0:
                now = time.perf_counter()
                times["round"].append(now - self.began)
                times["round_processor"].append(time.process_time() - self.began_processor)
                spent_of_rounds.append(spent.take())
                self.began, self.began_processor = now, time.process_time()

    with tempfile.TemporaryDirectory() as directory:
        settings = GRPOConfig(
            output_dir=directory,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            dataloader_pin_memory=False,
            per_device_train_batch_size=of_model["groups"] * of_model["group"] // STEPS,
            steps_per_generation=STEPS,
            num_generations=of_model["group"],
            max_completion_length=of_model["length"],
            max_steps=rounds * STEPS,
            learning_rate=of_model["learning_rate"],
            lr_scheduler_type="constant",
            adam_beta2=0.95,
            max_grad_norm=1.0,
            beta=0.0,
            epsilon=0.2,
            loss_type="grpo",
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            seed=seed,
            report_to="none",
            save_strategy="no",
            logging_steps=STEPS,
            disable_tqdm=True,
        )
        tokenizer = AutoTokenizer.from_pretrained(model)
        parts = {
            "model": AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            "reward_funcs": reward,
            "args": settings,
            "train_dataset": Dataset.from_dict(columns),
            "processing_class": tokenizer,
            "callbacks": [callback := RoundTimes()],
        }
        if recipe is None:
            trainer = GRPOTrainer(**parts)
        else:
            from ftis.trl import FTISTrainer, Swarm

            trainer = FTISTrainer(**parts, swarm=Swarm(recipe, OWN, link=link))
            if len(recipe.peers) > 1:
                spent.watch_adapter(trainer)
        spent.watch_host(GRPOTrainer)
        timed(trainer, "_generate")
        timed(trainer, "_generate_and_score_completions")
        callback.began, callback.began_processor = time.perf_counter(), time.process_time()
        spent.take()
        trainer.train()
        others = recipe is not None and len(recipe.peers) > 1
        of_rounds = read_jsonl(trainer.place / "metrics.jsonl") if others else [{}]
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    scored, generated = times["_generate_and_score_completions"], times["_generate"]
    began, right = time.process_time(), 0
    for start in range(0, len(data["validation"]), 256):
        rows = data["validation"][start : start + 256]
        inputs = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True, padding_side="left")
        inputs.pop("token_type_ids", None)
        with torch.no_grad():
            output = trainer.model.generate(**inputs, max_new_tokens=of_model["length"], do_sample=False)
        texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        if name != "smollm2-135m":  # there, the share of right answers says nothing of a reward for even tokens
            right += int(sum(clock_reward(None, texts, None, [row["answer"] for row in rows])))
    return {
        "round": times["round"],
        "round_processor": times["round_processor"],
        "sampling": generated,
        "log-probs": [a - b for a, b in zip(scored, generated, strict=True)],
        "update": [a - b for a, b in zip(times["round_processor"], scored, strict=True)],
        "evaluation": [time.process_time() - began],
        "tokens": tokens,
        "reward": rewards,
        "accuracy": right / len(data["validation"]),
        "spent": spent_of_rounds,
        "foreign": [[row.get(key, 0) for key in (f"peer/{OTHER}/admitted", "foreign_used")] for row in of_rounds],
    }


def theirs_in_a_swarm(model: Path, problems: Path, name: str, rounds: int, seed: int) -> dict[str, Any]:
    recipe = recipe_of(name, rounds, seed, {OWN: model}, "F-TIS")
    return theirs(model, problems, name, rounds, seed, recipe, Nobody())


def theirs_with_another(model: Path, problems: Path, name: str, rounds: int, seed: int) -> dict[str, Any]:
    link = Recorded.read(OTHER, messages_of(problems, seed))
    return theirs(model, problems, name, rounds, seed, recipe_of_two(model, name, rounds, seed), link)


def recipe_of_two(model: Path, name: str, rounds: int, seed: int) -> Recipe:
    from ftis.models import starters

    other = starters.path_of("starter:large") if name == "starter" else model
    return recipe_of(name, rounds, seed, {OWN: model, OTHER: other}, "F-TIS")


def messages_of(problems: Path, seed: int) -> Path:
    return problems.with_name(f"messages-{seed}")


def record_another(model: Path, problems: Path, name: str, rounds: int, seed: int) -> dict[str, Any]:
    """Train :data:`OTHER` on its own share, and keep its messages."""
    import torch

    from ftis.admission import Collected
    from ftis.run.assembly import assemble

    torch.set_num_threads(1)
    messages = messages_of(problems, seed)
    messages.mkdir()
    with tempfile.TemporaryDirectory() as directory:
        recipe = recipe_of_two(model, name, rounds, seed)
        peer, rewards = assemble(recipe, OTHER, Path(directory)).peer, []
        for round in range(rounds):
            (messages / str(round)).write_bytes(peer.begin(round).message)
            rewards.append(peer.finish(round, Collected({})).metrics["reward"])
        return {"reward": rewards}


def make_model(name: str, directory: Path) -> Path:
    import torch
    from make_starters import make_tokenizer
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from ftis.models import starters

    if name == "starter":
        return starters.path_of("starter:small")
    if name == "smollm2-135m":
        return ROOT / "models" / name
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def write_problems(name: str, model: Path, path: Path) -> None:
    """The prompts as ours renders them, in text, and their answers."""
    import ftis
    from ftis.config import TaskConfig
    from ftis.engines.tokenizers import load_tokenizer
    from ftis.tasks.problems import load_task
    from ftis.tasks.rendering import render_prompt

    if name == "smollm2-135m":
        recipe, tokenizer = ftis.load(WORDS), load_tokenizer(str(model))
        task = load_task(recipe.task.model_copy(update={"validation_size": 40}))
        text = {
            p: tokenizer.decode(render_prompt(p, recipe.prompt, tokenizer)) for p in (*task.train, *task.validation)
        }
    else:
        task = load_task(TaskConfig(name="clock", options={"operators": 2}, validation_size=300))
        text = {p: f"{p.question}=" for p in (*task.train, *task.validation)}
    splits = {
        split: [{"prompt": text[p], "answer": p.answer} for p in problems]
        for split, problems in (("train", task.train), ("validation", task.validation))
    }
    path.write_text(json.dumps(splits))


def make_venv(directory: Path) -> Path:
    python = directory / "bin" / "python"
    if not (directory / "lib").exists() or not list(directory.glob("lib/*/site-packages/ftis*-*")):
        print(f"making {directory} with TRL 1.16", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
        # torch first, pinned: resolved with the rest, another build of it could be pulled in.
        for packages in ([PINNED[0]], ["trl==1.16.*", *PINNED], ["--editable", str(ROOT), *PINNED]):
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True)
    return python


SIDES: dict[str, Callable[..., dict[str, Any]]] = {
    "ours": ours,
    "TRL": theirs,
    "TRL + ftis": theirs_in_a_swarm,
    "TRL + ftis, of two": theirs_with_another,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=Path("/tmp/ftis-benchmark-trl"))
    parser.add_argument("--model", choices=list(MODELS), default="starter")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--prompts", type=int, help="of a round, in place of the model's own number")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--run", help=argparse.SUPPRESS)
    settings = parser.parse_args()
    MODELS[settings.model]["groups"] = settings.prompts = settings.prompts or MODELS[settings.model]["groups"]
    if settings.run:
        side, model, problems, seed = json.loads(settings.run)
        result = {**SIDES, OTHER: record_another}[side](
            Path(model), Path(problems), settings.model, settings.rounds, seed
        )
        result["megabytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps(result))
        return

    import torch

    shown = {**vars(settings), "venv": str(settings.venv), **MODELS[settings.model]}
    print(f"{shown}, one thread, torch {torch.__version__}", flush=True)
    pythons = {"ours": Path(sys.executable), OTHER: Path(sys.executable)}
    for side in {"TRL", *SWARMS} & set(settings.sides):
        pythons[side] = make_venv(settings.venv)
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in settings.sides}
    with tempfile.TemporaryDirectory() as scratch:
        model, problems = make_model(settings.model, Path(scratch) / "model"), Path(scratch) / "problems.json"
        write_problems(settings.model, model, problems)

        def run(side: str, seed: int) -> dict[str, Any]:
            arguments = [f"--{name}={getattr(settings, name)}" for name in ("model", "rounds", "prompts")]
            what = json.dumps([side, str(model), str(problems), seed])
            command = [str(pythons[side]), __file__, *arguments, "--run", what]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(f"{side} failed:\n{done.stderr[-2000:]}")
            result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
            return result

        for seed in settings.seeds:
            if "TRL + ftis, of two" in settings.sides:
                run(OTHER, seed)
            for side in settings.sides:
                runs[side].append(last := run(side, seed))
                print(f"seed {seed} {side}: {statistics.median(last['round_processor'][1:]):.3f} s a round", flush=True)
    table = {side: row_of(results, side in SWARMS) for side, results in runs.items()}
    for side, row in table.items():
        print(side, *(f"{key} {value}" for key, value in row.items()), sep="  ")
    print(json.dumps({"benchmark": "round", **shown, **table, **compared(runs)}))


if __name__ == "__main__":
    main()
