"""What a machine with one GPU shows in eight minutes: stages in the order of their worth, each with results as it goes.

    make gpu                                                    # everything, into gpu/
    PYTHONPATH=src python benchmarks/gpu.py --stages family     # a bare python, one stage
    python benchmarks/gpu.py --tiny                             # the same on a CPU in seconds

- ``tests``: those of tests/test_gpu.py, which has all that are marked gpu. ``<out>/tests.txt`` has pytest's lines.
- ``family``: two of recipes/qwen3_family.toml, random weights of Qwen3-0.6B's and 1.7B's shapes, 24 prompts × 12
  completions of 256 tokens: each alone with all of the sampling, then both together with half each. Seconds of each
  stage of a round, tokens a second, and memory where torch may take 24 GB and believes that the card has no more.
  Moments have 8 bits where bitsandbytes is, as the recipe says; ``optim`` tells.
- ``learning``: F-TIS and alone-spread in recipes/smollm2_words.toml, as many rounds as two minutes give beside the
  evaluations before and after them.

Each stage is a process with a time limit, and writes ``<out>/<stage>.json`` after each of its parts. Packages that this
python lacks may lie in ``wheels/`` as wheels. The exit code is 1 if a stage did not end well; the next ones run all the
same.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LIMITS = {"tests": 100, "family": 210, "learning": 150}
"""Seconds of each stage."""
CARD = 24 * 10**9
"""Bytes of the card that the family is for."""
NEEDED = (
    "torch transformers peft pydantic typer rich scipy pyarrow math_verify zstandard zenoh cryptography filelock pytest"
)
ROUNDS, LEARNED_FOR = 3, 50
"""Rounds of the family in each part; seconds of an arm that learns, with its evaluations."""
STAGES_OF_A_ROUND = ("sample", "exchange", "wait", "admit", "logp", "update")


class Results:
    """A stage's file, written again with each result."""

    def __init__(self, path: Path) -> None:
        self.path, self.facts = path, dict[str, Any]()

    def add(self, name: str, facts: Mapping[str, Any]) -> None:
        self.facts[name] = dict(facts)
        self.path.write_text(json.dumps(self.facts, indent=1), encoding="utf-8")
        print(f"{name}: {json.dumps(facts)}", flush=True)


def unpack(wheels: Path, to: Path) -> None:
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as file:
            file.extractall(to)


def machine() -> dict[str, Any]:
    import torch
    import transformers

    here = torch.cuda.is_available()
    return {
        "card": torch.cuda.get_device_name() if here else "none",
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
        "cores": os.cpu_count(),
    }


def tests(out: Path, results: Results, tiny: bool) -> None:
    environment = {**os.environ, "FTIS_TEST_DEVICE": "cpu" if tiny else "cuda", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--noconftest", "tests/test_gpu.py"]
    path = out / "tests.txt"
    with path.open("w", encoding="utf-8") as file:  # which keeps the lines of a stage that is stopped
        code = subprocess.run(command, cwd=ROOT, env=environment, stdout=file, stderr=file, check=False).returncode
    lines = path.read_text(encoding="utf-8").splitlines()
    told = [line for line in lines if line.startswith(("FAILED", "ERROR", "SKIPPED", "E  "))]
    results.add("tests", {"code": code, "last": lines[-1:], "told": told[:40]})
    if code:
        raise SystemExit("\n".join(lines)[-6000:])


def hold_to(card: int) -> None:
    """Let torch take so many bytes, and let it believe that the GPU has no more."""
    import torch

    if not torch.cuda.is_available():
        return
    real = torch.cuda.get_device_properties(0)
    torch.cuda.set_per_process_memory_fraction(min(1.0, card / real.total_memory))

    class Smaller:
        total_memory = min(card, real.total_memory)

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    torch.cuda.get_device_properties = lambda device=None: Smaller()  # type: ignore[assignment,return-value]


def family_of(out: Path, part: str, tiny: bool) -> dict[str, Any]:
    """The recipe of one part: a peer alone with all of the sampling, or both together."""
    from stand_ins import stand_in

    document = tomllib.loads((ROOT / "recipes" / "qwen3_family.toml").read_text(encoding="utf-8"))
    peers = {peer["name"]: peer for peer in document["peers"]}
    chosen = ["small", "medium"] if part == "together" else [part]
    for name in chosen:
        shape = peers[name]["model"].rpartition("/")[2]
        place = out / "models" / shape
        if not (place / "model.safetensors").exists():
            stand_in(place, shape, small=tiny, device="cpu" if tiny else "cuda")
        peers[name] |= {"model": str(place)} | ({"lora_r": 2} if tiny and name != "small" else {})
        if importlib.util.find_spec("bitsandbytes") is None:
            peers[name]["optim"] = "adamw"
    sizes = {"num_generations": 4 if tiny else 12, "max_completion_length": 8 if tiny else 256, "batch_size": 0}
    document |= {
        "name": f"family-{part}",
        "output_dir": str(out / "runs"),
        "processes": "inline" if tiny else "auto",  # as on one card, where peers take turns
        "threads": 1,
        "task": {"name": "word_problems", "validation_size": 4},
        "ood": [],
        "reward": {"function": "stand_ins.share_of_even"},
        "sampling": sizes,
        "training": {
            "rounds": ROUNDS,
            "prompts_per_round": 4 if tiny else 24,
            "steps_per_generation": 4,
            "eval_every": 0,
            "save_every": ROUNDS,
        },
        "objective": {
            "name": "F-TIS",
            "kl_threshold": 1e9,
        },  # random models are far apart, and all is to be learned from
        "peers": [peers[name] for name in chosen],
        "arms": [{"name": part, "collaborate": part == "together"}],
        "experiment": {"baselines": [part]},
    }
    return document


def family(out: Path, results: Results, tiny: bool) -> None:
    for part in ("small", "medium", "together"):
        began = time.monotonic()
        (out / f"family-{part}.json").unlink(missing_ok=True)
        again = [sys.executable, __file__, "--out", str(out), "--part", part, *(["--tiny"] if tiny else [])]
        subprocess.run(again, check=True)  # memory of one part is not another's
        facts = json.loads((out / f"family-{part}.json").read_text(encoding="utf-8"))
        results.add(part, facts | {"seconds_in_all": round(time.monotonic() - began, 1)})


def family_part(out: Path, part: str, tiny: bool) -> None:
    import torch

    import ftis
    from ftis.recipe.parsing import parse

    hold_to(CARD)
    recipe = parse(family_of(out, part, tiny))
    ftis.train(recipe, overwrite=True)
    facts: dict[str, Any] = {}
    for peer in recipe.peers:
        rows = ftis.read_jsonl(ftis.run_directory(recipe) / part / peer.name / "metrics.jsonl")
        tokens = [b["tokens_sampled"] - a["tokens_sampled"] for a, b in pairwise(rows)]
        seconds = {stage: [row[f"time/{stage}"] for row in rows[1:]] for stage in STAGES_OF_A_ROUND}
        facts[peer.name] = {stage: round(statistics.median(times), 3) for stage, times in seconds.items()} | {
            "optim": peer.optim,
            "round": round(statistics.median(row["step_time"] for row in rows[1:]), 3),
            "tokens": statistics.median(tokens),
            "tokens_per_second": round(statistics.median(map(lambda n, s: n / s, tokens, seconds["sample"]))),
            "peak_gigabytes": round(max(row["peak_memory"] for row in rows) / 1e9, 2),
        }
    if torch.cuda.is_available():
        facts["reserved_gigabytes"] = round(torch.cuda.max_memory_reserved() / 1e9, 2)
    shutil.rmtree(ftis.run_directory(recipe))
    (out / f"family-{part}.json").write_text(json.dumps(facts), encoding="utf-8")


def learning(out: Path, results: Results, tiny: bool) -> None:
    import ftis

    settings = [f"output_dir={out / 'runs'}"]
    if tiny:
        from stand_ins import stand_in

        model = stand_in(out / "models" / "llama", "Llama-3.2-1B", small=True)
        settings += [f"peers.*.model={model}", "task.validation_size=4", "peers.lora.lora_r=2", "threads=1"]
        settings += ["processes=inline", "training.prompts_per_round=4", "sampling.num_generations=4"]
    elif not (ROOT / "models" / "smollm2-135m" / "config.json").exists():
        raise SystemExit("models/smollm2-135m is not here: ftis models smollm2-135m fetches it")
    recipe_path = ROOT / "recipes" / "smollm2_words.toml"
    pilot = ftis.load(recipe_path, [*settings, "name=pilot", "training.rounds=3", "training.eval_every=0"])
    began = time.monotonic()
    ftis.train(pilot, overwrite=True, only="F-TIS")
    seconds = time.monotonic() - began
    directory = ftis.run_directory(pilot) / "F-TIS"
    each = [
        [row["step_time"] - row["time/wait"] for row in ftis.read_jsonl(place)]
        for place in directory.glob("*/metrics.jsonl")
    ]
    a_round = sum(statistics.median(of[1:]) for of in each)
    beside = seconds - sum(map(sum, each))  # two evaluations of each peer, and loading
    rounds = 2 if tiny else max(6, min(200, int((LEARNED_FOR - beside) / a_round)))
    results.add("pilot", {"seconds_a_round": round(a_round, 2), "beside": round(beside, 1), "rounds": rounds})
    for arm in ("F-TIS", "alone-spread"):
        more = [f"training.rounds={rounds}", f"training.save_every={rounds}", "training.eval_every=0"]
        recipe = ftis.load(recipe_path, [*settings, *more])
        ftis.train(recipe, overwrite=arm == "F-TIS", resume=arm != "F-TIS", only=arm)
        for peer in recipe.peers:
            place = ftis.run_directory(recipe) / arm / peer.name
            rows, told = ftis.read_jsonl(place / "metrics.jsonl"), ftis.read_jsonl(place / "evaluations.jsonl")
            results.add(
                f"{arm} {peer.name}",
                {
                    "accuracy": {str(row["step"]): round(row["accuracy"], 3) for row in told},
                    "reward": [round(row["reward"], 3) for row in rows],
                    "seconds": round(sum(row["step_time"] - row["time/wait"] for row in rows), 1),
                },
            )


STAGES: dict[str, Callable[[Path, Results, bool], None]] = {"tests": tests, "family": family, "learning": learning}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="toy sizes on a CPU, to run all of the code anywhere")
    parser.add_argument("--out", type=Path, default=Path("gpu"))
    parser.add_argument("--stages", nargs="+", choices=list(STAGES), default=list(STAGES))
    parser.add_argument("--stage", choices=list(STAGES), help=argparse.SUPPRESS)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    given = parser.parse_args()
    out, tiny = given.out.absolute(), given.tiny
    if given.part:
        return family_part(out, given.part, tiny)
    if given.stage:
        return STAGES[given.stage](out, Results(out / f"{given.stage}.json"), tiny)
    out.mkdir(parents=True, exist_ok=True)
    unpack(ROOT / "wheels", out / "site")
    paths = [ROOT / "src", ROOT / "benchmarks", out / "site"]
    known = [*map(str, paths), os.environ.get("PYTHONPATH", "")]
    os.environ |= {"PYTHONPATH": os.pathsep.join(filter(None, known)), "HF_HUB_OFFLINE": "1"}
    sys.path[:0] = map(str, paths)
    if missing := [name for name in NEEDED.split() if importlib.util.find_spec(name) is None]:
        sys.exit(f"this python lacks {', '.join(missing)}: install them, or put their wheels into {ROOT / 'wheels'}")
    facts = machine()
    print(json.dumps(facts), flush=True)
    if not tiny and facts["card"] == "none":
        sys.exit("there is no CUDA device here: nothing was measured (--tiny runs the code without one)")
    summary: dict[str, Any] = {"machine": facts}
    for stage in given.stages:
        began = time.monotonic()
        command = [sys.executable, __file__, "--out", str(out), "--stage", stage, *(["--tiny"] if tiny else [])]
        process = subprocess.Popen(command, start_new_session=True)
        try:
            code: int | str = process.wait(None if tiny else LIMITS[stage])
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            code = f"stopped after {LIMITS[stage]} s"
        path = out / f"{stage}.json"
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        summary[stage] = {"ended": code, "seconds": round(time.monotonic() - began, 1), **found}
        (out / "gpu.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")
        print(f"== {stage}: {code}, {summary[stage]['seconds']} s", flush=True)
    sys.exit(any(summary[stage]["ended"] != 0 for stage in given.stages))


if __name__ == "__main__":
    main()
