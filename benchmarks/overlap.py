"""Whether ``training.overlap`` fills the time in which a peer stands still: seconds a round, and idle shares.

    python benchmarks/overlap.py swarm       # three processes of ftis join over loopback
    python benchmarks/overlap.py server      # one peer whose sampler draws in another process
    python benchmarks/overlap.py vllm        # SmolLM2 with a vLLM server (models/smollm2-135m), on a core each

Except for ``vllm``, sampling and learning take as long as they are told to: a tiny peer sleeps beside its own work, so
that the two cores of a small machine stand for more. ``swarm`` prints for each peer the share of its time that it
waited, the others the seconds of a round beside those of sampling and of learning. The first rounds are left out.

- ``1:2:3``: the peers' speeds differ threefold, in sampling and in learning. ``elastic`` rounds wait for one of two.
- ``uneven``: the peers are alike, and each round of each peer takes between none and twice the mean.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from doubles import Twin, free_port
from watching import PROGRAM

from ftis.engines.builtin import open_sampler
from ftis.engines.handover import Copied
from ftis.models.starters import place_of
from ftis.policy import Policy
from ftis.records.files import read_jsonl
from ftis.sampling import Sampler

NAMES, WARM_UP, SEEN = ("fast", "middle", "slow"), 2, 12
RECIPE = """
name = "overlap"
threads = 1
[task]
name = "clock"
validation_size = 2
[prompt]
system_prompt = ""
template = "{question}="
[sampling]
num_generations = 4
max_completion_length = 24
[training]
prompts_per_round = 6
eval_every = 0
record_rollouts = false
"""


@dataclass
class Paced(Sampler):
    """The built-in sampler with pauses: ``seconds`` for drawing a round, and as many for learning from it."""

    draw: Any
    seconds: float
    uneven: bool
    chance: random.Random = field(default_factory=lambda: random.Random(os.getpid()))
    in_place: bool = True

    def __call__(self, policy: Policy, prompt_ids: Any, repeats: int, decoding: Any, *rest: Any) -> Any:
        if not decoding.greedy:
            self.pause()
        return self.draw(policy, prompt_ids, repeats, decoding, *rest)

    def weights_moved(self, policy: Policy) -> None:
        self.pause()

    def pause(self) -> None:
        time.sleep(self.seconds * (self.chance.uniform(0, 2) if self.uneven else 1))


def paced(policy: Policy, seconds: float, uneven: bool = False) -> Sampler:
    """``sampling.sampler`` of the swarm's peers."""
    return Paced(open_sampler(policy), seconds, uneven)


class SlowTwin(Twin):
    """An engine beside the learner, which takes its time."""

    beside, seconds = True, 0.0

    def complete(self, prompt_ids: Any, repeats: int, decoding: Any, seeds: Any, ends: Any) -> Any:
        if len(prompt_ids) > 1:  # else it is the short draw of a check
            time.sleep(self.seconds)
        return super().complete(prompt_ids, repeats, decoding, seeds, ends)


class SlowLearner(Copied):
    """A sampler whose learner takes its time to learn: it sleeps before the new weights are handed over."""

    def __init__(self, engine: SlowTwin, policy: Policy, seconds: float) -> None:
        super().__init__(engine, policy)
        self.seconds = seconds

    def weights_moved(self, policy: Policy) -> None:
        time.sleep(self.seconds)
        super().weights_moved(policy)


def served(policy: Policy, sample: float, learn: float) -> Sampler:
    """``sampling.sampler`` of a peer with a server."""
    twin = SlowTwin(Policy.load(policy.config, place_of(policy.config.model)))
    twin.seconds = sample
    return SlowLearner(twin, policy, learn)


def ftis(place: Path, arguments: Sequence[str], settings: Mapping[str, Any]) -> subprocess.Popen[bytes]:
    root = Path(__file__).parents[1]
    paths = os.pathsep.join([*map(str, (root / "src", root / "benchmarks")), os.environ.get("PYTHONPATH", "")])
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-c", PROGRAM, *arguments, *words]
    return subprocess.Popen(program, cwd=place, env=environment, stdout=subprocess.DEVNULL)


def recipe(place: Path, names: Sequence[str]) -> str:
    peers = [f'[[peers]]\nname = "{name}"\nmodel = "starter:small"\nlearning_rate = 1e-4\n' for name in names]
    (place / "recipe.toml").write_text(RECIPE + "".join(peers))
    return "recipe.toml"


def rounds_of(place: Path, name: str, first: int = WARM_UP) -> list[dict[str, Any]]:
    (path,) = place.rglob(f"{name}/metrics.jsonl")
    return read_jsonl(path)[first:-1]  # nothing is sampled ahead in the last


def swarm(overlap: int, seconds: Mapping[str, float], **settings: Any) -> dict[str, Any]:
    uneven = settings.pop("uneven", "false")
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        path, port, running = recipe(place, NAMES), free_port(), []
        for name in NAMES:
            options = f"{{ seconds = {seconds[name]}, uneven = {uneven} }}"
            mine = {"sampling.sampler": "overlap.paced", "sampling.options": options, "network.port": port}
            mine |= {"training.overlap": overlap, "training.rounds": WARM_UP + SEEN + 1, "training.no_regret": 0}
            join = ["join", path, "--open", "--peer", name]
            running.append(ftis(place, join, {**mine, "network.start_seconds": 300, **settings}))
        codes = [process.wait() for process in running]
        if any(codes):
            sys.exit("a peer failed")
        rows = {name: rounds_of(place, name) for name in NAMES}
    idle = {n: sum(r["time/wait"] for r in of) / sum(r["step_time"] for r in of) for n, of in rows.items()}
    heard = {
        n: fmean(sum(r.get(f"peer/{o}/delivered", 0) for o in NAMES if o != n) for r in of) for n, of in rows.items()
    }
    return {"seconds": {n: fmean(r["step_time"] for r in of) for n, of in rows.items()}, "idle": idle, "heard": heard}


def server(overlap: int, sample: float, learn: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        settings = {"sampling.sampler": "overlap.served", "training.rounds": WARM_UP + SEEN + 1}
        settings |= {"sampling.options": f"{{ sample = {sample}, learn = {learn} }}", "training.overlap": overlap}
        if ftis(place, ["train", recipe(place, ["one"])], settings).wait():
            sys.exit("the peer failed")
        rows = rounds_of(place, "one")
    return {"seconds": fmean(row["step_time"] for row in rows), "standing": fmean(row["time/sample"] for row in rows)}


def vllm(overlap: int, url: str) -> dict[str, float]:
    """A whole model, 2 prompts x 3 completions of up to 384 tokens; each completion has a reward of its own."""
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        story = "Write a very long story with many chapters. It begins with these words: {question}"
        settings: dict[str, Any] = {
            "task.name": "word_problems",
            "prompt.template": f"'{story}'",
            "reward.function": "overlap.vowels",
        }
        settings |= {"sampling.num_generations": 3, "sampling.max_completion_length": 384, "training.overlap": overlap}
        settings |= {"sampling.sampler": "vllm", "sampling.options": f'{{ url = "{url}", dtype = "float32" }}'}
        settings |= {"training.prompts_per_round": 2, "training.rounds": 7, "peers.one.learning_rate": 1e-6}
        settings |= {"peers.one.model": Path("models/smollm2-135m").resolve(), "peers.one.dtype": "float32"}
        if ftis(place, ["train", recipe(place, ["one"])], settings).wait():
            sys.exit("the peer failed")
        rows = rounds_of(place, "one", first=1)
    learn = fmean(row["time/logp"] + row["time/update"] for row in rows)
    sample = fmean(row.get("time/draw", row["time/sample"]) for row in rows)
    return {"seconds": fmean(row["step_time"] for row in rows), "sample": sample, "learn": learn}


def vowels(completions: Sequence[str], **columns: object) -> list[float]:
    """``reward.function`` of ``vllm``: the share of vowels."""
    return [sum(letter in "aeiou" for letter in text) / max(1, len(text)) for text in completions]


@contextmanager
def vllm_server(python: str) -> Iterator[str]:
    """A context with SmolLM2 served on the first core, by the vLLM of this Python; the URL."""
    port, environment = free_port(), {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    words = ["--model", "models/smollm2-135m", "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"]
    words += ["--logprobs-mode", "processed_logprobs", "--host", "127.0.0.1", "--port", str(port)]
    program = ["taskset", "-c", "0", python, "-m", "vllm.entrypoints.openai.api_server", *words]
    url, server = (
        f"http://127.0.0.1:{port}",
        subprocess.Popen(
            program, env={**os.environ, **environment, "VLLM_CPU_OMP_THREADS_BIND": "0"}, stdout=subprocess.DEVNULL
        ),
    )
    try:
        while server.poll() is None:
            with suppress(OSError):
                urllib.request.urlopen(f"{url}/health").close()
                break
            time.sleep(1)
        os.sched_setaffinity(0, {1})  # the learner, whose process starts from here
        yield url
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["swarm", "server", "vllm"])
    parser.add_argument("--vllm", default=".venv-vllm/bin/python", help="a Python that has vLLM")
    arguments = parser.parse_args()
    what = arguments.what
    if what == "vllm":
        with vllm_server(arguments.vllm) as url:
            for overlap in (0, 1):
                print(json.dumps({"overlap": overlap, **vllm(overlap, url)}), flush=True)
        return
    slower, alike = dict(zip(NAMES, (0.5, 1.0, 1.5), strict=True)), dict.fromkeys(NAMES, 1.0)
    for overlap in (0, 1):
        if what == "server":
            for sample, learn in ((1.0, 1.0), (2.0, 1.0), (1.0, 2.0)):
                print(
                    json.dumps({"overlap": overlap, "sample": sample, "learn": learn, **server(overlap, sample, learn)})
                )
            continue
        lockstep, elastic = {"network.quorum": 2}, {"network.quorum": 1, "network.patience": 1}
        for case, seconds, settings in (
            ("1:2:3", slower, lockstep),
            ("1:2:3 elastic", slower, elastic),
            ("uneven", alike, lockstep | {"uneven": "true"}),
        ):
            print(json.dumps({"overlap": overlap, "case": case, **swarm(overlap, seconds, **settings)}), flush=True)


if __name__ == "__main__":
    main()
