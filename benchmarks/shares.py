"""Three peers at speeds 1, 2 and 3: does sharing by speed leave nobody idle, and what does each learn in equal seconds?

    python benchmarks/shares.py --seeds 0 1 2 3 4 5 6 7 8 9

Processes of ``ftis join`` over loopback, in lock-step. A peer sleeps for each completion that it samples, so that the
two cores of a small machine stand for three machines; learning takes its own time. ``alone``: each peer alone on its
own part, ``ftis train``. A peer that learns from three times as many rollouts takes three times as many optimiser
steps, so that a step has as many rollouts as alone. Peers are evaluated about every :data:`EVERY` seconds.

A line is printed for each arm and seed, then for each peer of each arm: seconds a round, the share of its time that it
waited in rounds that follow no evaluation, prompts a round, and for two goals the accuracy around that time, the goal,
and for each seed the seconds until two neighbouring evaluations have it. A goal is the accuracy that the peer alone has
on the mean of all seeds around ``--seconds``, and around twice that, when runs end. Evaluations do not count. ``later``
is the mean of those seconds less the ones that the same seed needs alone, with its 95% interval; a run that does not
reach the goal counts with its last evaluation. ``--known FILE`` takes arms and seeds from lines printed before.

The one comparison that counts is the fastest peer's with overlap, by the goal at the end, over seeds 2 to 9; it was
written down before these ran. Seeds 0 and 1 had shown that a peer stands on a plateau after 60 seconds, where a
hundredth of accuracy takes 20 seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from doubles import free_port
from overlap import NAMES, ftis

from ftis.comparison.stats import mean_interval
from ftis.engines.builtin import open_sampler
from ftis.policy import Policy
from ftis.records.files import read_jsonl
from ftis.sampling import Sampler

EQUAL, GENERATIONS = 8, 12
SLEEPS = dict(zip(NAMES, (2.0, 3.0, 6.0), strict=True))
"""Seconds of sleep for the completions of an equal share: speeds 3, 2 and 1."""
MODELS = dict(zip(NAMES, ("small", "small-b", "small"), strict=True))
ARMS = {"equal": (0, "equal"), "speed": (0, "speed"), "speed, overlap": (1, "speed")}
WARM_UP = 4
"""Rounds that are left out: with overlap a peer knows the others' speeds after so many."""
STEPS = 4
"""Optimiser steps a round for the rollouts of one peer."""
EVERY, AROUND = 6.0, 10.0
"""Seconds of sleep between evaluations, and how far from a time they count for it."""
RECIPE = """
name = "shares"
threads = 1
[task]
name = "clock"
options = { operators = 4 }
validation_size = 400
[prompt]
system_prompt = ""
template = "{question}="
[sampling]
num_generations = 12
max_completion_length = 40
[training]
save_every = 1000
no_regret = 0
record_rollouts = false
[objective]
kl_estimator = "k3"
kl_threshold = 0.5
"""


@dataclass
class Counted(Sampler):
    """The built-in sampler with a pause of ``seconds`` for each completion."""

    draw: Any
    seconds: float
    in_place: bool = True

    def __call__(self, policy: Policy, prompt_ids: Any, repeats: int, decoding: Any, *rest: Any) -> Any:
        if not decoding.greedy:
            time.sleep(self.seconds * repeats * len(prompt_ids))
        return self.draw(policy, prompt_ids, repeats, decoding, *rest)


def counted(policy: Policy, seconds: float) -> Sampler:
    """``sampling.sampler`` of the peers."""
    return Counted(open_sampler(policy), seconds)


def settings(name: str, seed: int, seconds: float, sleep: float, peers: int, **more: Any) -> dict[str, Any]:
    """Keys of a peer whose rounds sleep for ``sleep`` seconds each, about ``seconds`` in all."""
    options = f"{{ seconds = {SLEEPS[name] / (EQUAL * GENERATIONS)} }}"
    of_peer: dict[str, Any] = {"sampling.sampler": "shares.counted", "sampling.options": options, "seed": seed}
    training = {"rounds": round(seconds / sleep), "eval_every": round(EVERY / sleep)}
    training |= {"prompts_per_round": EQUAL * peers, "steps_per_generation": STEPS * peers}
    of_peer |= {f"training.{key}": value for key, value in training.items()}
    return of_peer | {key.replace("__", "."): value for key, value in more.items()}


def recipe(place: Path, names: Sequence[str]) -> str:
    peers = [
        f'[[peers]]\nname = "{name}"\nmodel = "starter:{MODELS[name]}"\nlearning_rate = 3e-4\nadam_beta2 = 0.95\n'
        for name in names
    ]
    (place / "recipe.toml").write_text(RECIPE + "".join(peers))
    return "recipe.toml"


def records(place: Path, name: str) -> dict[str, Any]:
    """Means of a peer's rounds, and its accuracy over its seconds."""
    (metrics,) = place.rglob(f"{name}/metrics.jsonl")
    rows = read_jsonl(metrics)
    seconds = [0.0, *accumulate(row["step_time"] for row in rows)]
    evaluations = read_jsonl(metrics.with_name("evaluations.jsonl"))
    late = rows[WARM_UP:-1]  # nothing is sampled ahead in the last
    evaluated = {one["step"] + 1 for one in evaluations}
    quiet = [row for row in late if row["step"] not in evaluated] or late
    return {
        "round": fmean(row["step_time"] for row in late),
        "idle": sum(row.get("time/wait", 0.0) for row in quiet) / sum(row["step_time"] for row in quiet),
        "prompts": fmean(row.get(f"peer/{name}/admitted", EQUAL * GENERATIONS) for row in late) / GENERATIONS,
        "curve": [(round(seconds[one["step"]], 2), one["accuracy"]) for one in evaluations],
    }


def swarm(arm: str, seed: int, seconds: float) -> dict[str, Any]:
    overlap, share = ARMS[arm]
    sleep = SLEEPS["slow" if share == "equal" else "middle"]
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        path, port, running = recipe(place, NAMES), free_port(), []
        for name in NAMES:
            mine = settings(
                name, seed, seconds, sleep, len(NAMES), training__overlap=overlap, training__share=share,
                network__quorum=2, network__start_seconds=300, network__port=port,
            )  # fmt: skip
            running.append(ftis(place, ["join", path, "--open", "--peer", name], mine))
        codes = [process.wait() for process in running]
        if any(codes):
            sys.exit("a peer failed")
        return {name: records(place, name) for name in NAMES}


def alone(seed: int, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        places = {name: Path(temporary) / name for name in NAMES}
        running = []
        for name, place in places.items():
            place.mkdir()
            mine = settings(name, seed, seconds, SLEEPS[name], 1)
            running.append(ftis(place, ["train", recipe(place, [name])], mine))
        codes = [process.wait() for process in running]
        if any(codes):
            sys.exit("a peer failed")
        return {name: records(place, name) for name, place in places.items()}


def around(curve: Sequence[tuple[float, float]], seconds: float) -> float:
    """The mean accuracy of the evaluations within :data:`AROUND` seconds, else of the nearest one."""
    within = [accuracy for at, accuracy in curve if abs(at - seconds) <= AROUND]
    return fmean(within or [min(curve, key=lambda one: abs(one[0] - seconds))[1]])


def reached(curve: Sequence[tuple[float, float]], accuracy: float) -> float | None:
    """The seconds until the mean of two neighbouring evaluations is at least ``accuracy``; None if it never is."""
    return next((late for (_, one), (late, other) in pairwise(curve) if (one + other) / 2 >= accuracy), None)


def later(seconds: Sequence[float], alone: Sequence[float]) -> list[float] | None:
    """Mean seconds later than alone and its 95% interval, by t over seeds; None for one seed."""
    if len(seconds) < 2:
        return None
    interval = mean_interval([one - own for one, own in zip(seconds, alone, strict=True)])
    return [round(number, 1) for number in (interval.mean, interval.low, interval.high)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--known", type=Path, nargs="+", default=[])
    given = parser.parse_args()
    known = [row for path in given.known for row in read_jsonl(path) if "seed" in row]
    found: dict[tuple[str, int], dict[str, Any]] = {(row["arm"], row["seed"]): row for row in known}
    for seed in given.seeds:
        for arm in ("alone", *ARMS):
            if (arm, seed) in found:
                continue
            one = alone(seed, 2 * given.seconds) if arm == "alone" else swarm(arm, seed, 2 * given.seconds)
            found[arm, seed] = one
            print(json.dumps({"arm": arm, "seed": seed, **one}), flush=True)
    for arm in ("alone", *ARMS):
        for name in NAMES:
            rows, own = ([found[one, seed][name] for seed in given.seeds] for one in (arm, "alone"))
            line: dict[str, Any] = {"arm": arm, "peer": name}
            line |= {key: round(fmean(row[key] for row in rows), 3) for key in ("round", "idle", "prompts")}
            for at in (given.seconds, 2 * given.seconds):
                goal = fmean(around(row["curve"], at) for row in own)
                seconds = [reached(row["curve"], goal) for row in rows]
                needed, alones = (
                    [reached(row["curve"], goal) or row["curve"][-1][0] for row in some] for some in (rows, own)
                )
                accuracy = round(fmean(around(row["curve"], at) for row in rows), 3)
                line[f"{at:g} s"] = {"accuracy": accuracy, "goal": round(goal, 3), "seconds": seconds}
                line[f"{at:g} s"] |= {"mean": round(fmean(needed), 1), "later": later(needed, alones)}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
