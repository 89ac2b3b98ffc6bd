"""Which peers share a process, what they share there, and what a dry run says of it."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import ROOT, ftis
from conftest import TinyModelDir, assert_one_line
from policies import with_gpus

from ftis.check import estimate
from ftis.check.estimate import checkpoints_at_once, checkpoints_kept, guess_on_card, in_one_process, in_turn
from ftis.check.memory import Memory, peak_memory
from ftis.config import PeerConfig, Recipe, RunError
from ftis.directory.resuming import repeats, require_checkpoint
from ftis.experiment import processes, runs
from ftis.experiment.processes import computing_at_a_time, offloads, runs_in_parallel
from ftis.models import sizes
from ftis.recipe.arms import arms_of
from ftis.recipe.parsing import load, parse
from ftis.run.assembly import assemble
from recipes import write_recipe

LORA = {"train": "lora", "lora_r": 2, "device": "cpu"}


@pytest.fixture
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A core for each peer, and no model too small to be shared."""
    monkeypatch.setattr(processes, "cores", lambda: 8)
    monkeypatch.setattr(sizes, "SMALL", 0)


def recipe_of(*peers: dict[str, Any], **keys: Any) -> Recipe:
    named = [{"name": f"p{i}", "model": "m", **peer} for i, peer in enumerate(peers)]
    return parse({"name": "r", "task": {"name": "clock"}, "peers": named, **keys}, where="test")


def parallel(*peers: dict[str, Any], **keys: Any) -> bool:
    return runs_in_parallel(recipe_of(*peers, **keys))


def test_adapters_on_one_large_base_share_a_process(
    tiny_model_dir: TinyModelDir, many_cores: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = str(tiny_model_dir("llama")), str(tiny_model_dir("qwen2"))
    one, two = {"model": model, **LORA}, {"model": other, **LORA}
    assert not parallel(one, one)
    assert not parallel(one, two, {"model": model, "device": "cpu"}, one)
    assert parallel(one, two)
    assert parallel(one, {"model": model, "device": "cpu"})
    assert parallel(one)
    in_four_bits = one | {"frozen_dtype": "nf4"}
    assert not parallel(in_four_bits, in_four_bits)
    assert parallel(one, in_four_bits)
    half = one | {"frozen_dtype": "bfloat16", "dtype": "bfloat16"}
    assert parallel(one, half)
    assert not parallel(half, half)
    assert parallel(one, one, processes="parallel")
    assert not parallel(one, two, processes="inline")
    monkeypatch.setattr(sizes, "SMALL", 20_000_000)
    assert parallel(one, one)
    starter = {"model": "starter:small", **LORA}
    assert parallel(starter, starter)


@pytest.mark.parametrize(
    ("number", "on", "expected"), [(4, 2, True), (6, 2, False), (3, 2, True), (2, 1, False), (1, 1, True), (8, 4, True)]
)
def test_two_small_models_share_a_core(
    number: int, on: int, expected: bool, tiny_model_dir: TinyModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "cores", lambda: on)
    peers = [{"model": str(tiny_model_dir()), "device": "cpu"}] * number
    assert parallel(*peers) == expected
    assert not parallel(*peers, processes="inline")
    assert computing_at_a_time(recipe_of(*peers)) == min(number, on)
    monkeypatch.setattr(sizes, "SMALL", 0)  # each is large
    assert parallel(*peers) == (number <= on)


def test_peers_with_a_gpu_each_share_nothing(
    tiny_model_dir: TinyModelDir, many_cores: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = {"model": str(tiny_model_dir()), "train": "lora", "lora_r": 2}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for devices, expected in ((1, False), (2, True)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda n=devices: n)
        assert parallel(one, one) == expected
    monkeypatch.setattr(processes, "cores", lambda: 1)
    assert computing_at_a_time(recipe_of(one, one)) == 2


def test_peers_of_a_run_keep_their_base_at_one_address(
    tmp_path: Path, tiny_model_dir: TinyModelDir, many_cores: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_recipe(
        tmp_path,
        {name: {"model": str(tiny_model_dir()), **LORA} for name in "ab"},
        top={"output_dir": tmp_path / "runs", "threads": 1},
        training={"rounds": 1, "eval_every": 0},
        reward={"function": "ftis.rewards.format_and_answer"},
    )
    weights: dict[str, dict[bool, set[int]]] = {}

    def assembled(recipe: Recipe, name: str, *args: Any, **keys: Any) -> Any:
        trainer = assemble(recipe, name, *args, **keys)
        parameters = list(trainer.peer.policy.model.parameters())
        weights[name] = {kind: {p.data_ptr() for p in parameters if p.requires_grad == kind} for kind in (True, False)}
        return trainer

    trimmed: list[bool] = []
    monkeypatch.setattr(runs, "assemble", assembled)
    monkeypatch.setattr(runs, "return_freed_memory", lambda: trimmed.append(True))
    monkeypatch.setattr(runs, "is_large", lambda model: False)
    assert runs.run(load(path))
    assert not trimmed
    monkeypatch.setattr(runs, "is_large", lambda model: True)
    weights.clear()
    assert runs.run(load(path), overwrite=True)
    assert weights["a"][False] == weights["b"][False] != set()
    assert not weights["a"][True] & weights["b"][True]
    assert len(trimmed) == 6  # of each peer, when it is loaded, when it waits and at its end


MEMORY = Memory(program=7, weights=1100, moments=200, gradients=100, update=50, sampling=30, microbatches=2)


def peer(name: str, **keys: Any) -> tuple[PeerConfig, Memory]:
    return PeerConfig(name=name, model="m", **keys), MEMORY


def test_in_one_process_a_shared_base_counts_once() -> None:
    memory = MEMORY
    assert memory.peak == 7 + 1100 + 200 + 30 + 150
    lora = {"train": "lora"}
    assert in_one_process([peer("a", **lora)]) == memory.peak
    own = 100 + 200 + 100
    in_four_bits = {"train": "lora", "frozen_dtype": "nf4"}
    for keys in (lora, in_four_bits):
        assert in_one_process([peer("a", **keys), peer("b", **keys)]) == memory.peak + own
    for keys in ({}, in_four_bits):
        assert in_one_process([peer("a", **lora), peer("b", **keys)]) == memory.peak + 1000 + own


def test_in_turns_on_one_card_a_peer_has_it_alone_beside_a_shared_base() -> None:
    found = [peer("a", train="lora"), peer("b", train="lora"), peer("c"), peer("d", train="lora", frozen_dtype="nf4")]
    assert in_turn(found) == {"a": 1487, "b": 1487, "c": 2487, "d": 2487}
    recipe = recipe_of(*[{"device": "cpu"}] * 4, offload="always", training={"prompts_per_round": 4})
    (line,) = estimate._moving(recipe, found)
    # Of a and b, adapter and moments move: 100 + 200 there and back. Of c and d all, and 100 + 200 back.
    assert all(size in line for size in ("2.49 kB while c works", "3.2 kB to the device", "1.2 kB back", "3.7e-07 s"))
    assert estimate._moving(recipe.model_copy(update={"offload": "never"}), found) == []


def test_a_round_s_seconds_on_a_card_are_bytes_and_operations_at_shares_of_its_peaks() -> None:
    sampling, cpu = {"num_generations": 6, "max_completion_length": 100, "batch_size": 4}, {"device": "cpu"}
    recipe = recipe_of(cpu, cpu | {"train": "lora"}, training={"prompts_per_round": 4}, sampling=sampling)
    # 12 rollouts of 50 tokens, 4 at a time, are 150 steps at 9e8 / 9e10 s; 24 are trained on.
    for peer, operations in zip(recipe.peers, (8, 6), strict=True):
        guess = guess_on_card(recipe, peer, 10**9, 9 * 10**8)
        assert guess == pytest.approx(1.5 + operations * 1e9 * 24 * 50 / (0.23 * 165e12))


@pytest.mark.parametrize(
    ("gpus", "devices", "leave"),
    [
        (0, ["auto", "auto"], False),
        (1, ["auto", "cuda:0"], True),
        (1, ["auto", "cpu"], False),
        (2, ["cuda:0", "cuda:1"], False),
        (2, ["cuda:0", "cuda:1", "cuda:1"], True),
        (1, ["cuda"], False),
    ],
)
def test_peers_leave_a_gpu_that_they_share(
    gpus: int, devices: list[str], leave: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if gpus:
        with_gpus(monkeypatch, *[True] * gpus)
    for offload, expected in (("auto", leave), ("never", False), ("always", len(devices) > 1)):
        recipe = recipe_of(
            *({"device": device} for device in devices), offload=offload, training={"prompts_per_round": 6}
        )
        assert offloads(recipe, recipe.peers) == expected


NOTHING = Memory(program=0, weights=0, moments=0, gradients=0, update=0, sampling=0, microbatches=1)
LIKELY = replace(NOTHING, update=900, activations=800, share=0.25)
LARGE = replace(NOTHING, weights=10**7)


@pytest.mark.parametrize(
    ("memory", "left", "gpus", "devices", "said"),
    [
        (LARGE, 0, 0, "cpu cpu", ""),
        (LARGE, 10**6, 0, "cpu cpu", " (both are more than the 1 MB that this machine has left: "),
        (LIKELY, 1500, 0, "cpu cpu", " (the most is more than the 1.5 kB that this machine has left: "),
        (LARGE, 10**12, 0, "cpu cpu", ""),
        (LARGE, 1000, 1, "cuda cuda", " (both are more than the 1 MB that its GPU has left: "),
        (LARGE, 1000, 1, "cuda cuda:0", " (both are more than the 1 MB that its GPU has left: "),
        (LARGE, 1000, 2, "cuda:0 cuda:0", ""),
        (LARGE, 1000, 2, "cuda:0 cuda:1", ""),
        (LARGE, 1000, 1, "cpu cuda", ""),
        (LARGE, 1000, 1, "cpu cpu", " (both are more than the 1 kB that this machine has left: "),
    ],
)
def test_more_memory_than_there_is_is_told(
    memory: Memory, left: int, gpus: int, devices: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate, "available_bytes", lambda: left)
    monkeypatch.setattr(estimate, "peak_memory", lambda *_: memory)
    monkeypatch.setattr(estimate, "in_one_process", lambda found: sum(memory.peak for _, memory in found))
    monkeypatch.setattr(estimate, "bandwidth", lambda device: 0.0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**6, 10**10))
    keys = [f"peers.{i}.device={device}" for i, device in enumerate(devices.split())]
    recipe = load(ROOT / "recipes" / "demo_pair.toml", keys)
    (line,) = (line for line in estimate.estimate(arms_of(recipe)) if line.startswith("together"))
    assert said in line
    assert ("has left: " in line) == bool(said)
    if memory is LIKELY:
        assert line.startswith("together: at most 1.8 kB of memory ")
        assert ", likely 600 B (" in line


@pytest.mark.parametrize(
    ("rounds", "every", "limit", "best", "no_regret", "kept", "at_once"),
    [
        (12, 12, 2, True, 0, 1, 1),
        (12, 5, 2, False, 0, 2, 3),
        (12, 5, 2, True, 0, 3, 3),
        (12, 5, 9, False, 0, 3, 3),
        (5, 10, 2, False, 0, 1, 1),
        (12, 5, 2, False, 0.1, 4, 5),
        (2, 1, 2, False, 0.1, 2, 2),
    ],
)
def test_checkpoints_kept(
    rounds: int, every: int, limit: int, best: bool, no_regret: float, kept: int, at_once: int
) -> None:
    """The newest is whole before an older one goes."""
    training: dict[str, Any] = {"rounds": rounds, "save_every": every, "save_total_limit": limit, "eval_every": every}
    training |= {"load_best_model_at_end": best, "no_regret": no_regret}
    of = recipe_of({}, training=training).training
    assert (checkpoints_kept(of), checkpoints_at_once(of)) == (kept, at_once)


def test_a_dry_run_is_about_the_arms_that_are_named(
    tmp_path: Path, tiny_model_dir: TinyModelDir, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    peers = {name: {"model": str(tiny_model_dir()), "device": "cpu"} for name in "ab"}
    arms: list[dict[str, Any]] = [{"name": "alone", "collaborate": False}, {"name": "F-TIS"}, {"name": "NoIS"}]
    training = {"rounds": 4, "save_every": 4, "prompts_per_round": 8}
    path = str(write_recipe(tmp_path, peers, arms=arms, training=training))
    sampled: list[tuple[str, int]] = []

    def measured(swarm: Recipe, peer: PeerConfig, *args: Any) -> Memory:
        sampled.append((peer.name, swarm.prompts_per_peer))
        return peak_memory(swarm, peer, *args)

    monkeypatch.setattr(estimate, "peak_memory", measured)

    def disk(*arguments: str) -> tuple[float, str]:
        sampled.clear()
        assert ftis("train", path, "--dry-run", *arguments) == 0
        found = re.search(r", and ([0-9.]+) ([kM])B of disk for (.*)$", capsys.readouterr().out, re.M)
        assert found is not None
        return float(found[1]) * {"k": 1e3, "M": 1e6}[found[2]], found[3]

    whole, said = disk()
    assert said == "one checkpoint of each in 3 arms"
    assert sampled == [("a", 8), ("b", 8)]  # alone, they sample all prompts
    one, said = disk("--arm", "F-TIS")
    assert said == "one checkpoint of each"
    assert sampled == [("a", 4), ("b", 4)]
    assert whole == pytest.approx(3 * one, rel=0.01)
    assert disk("--arm", "F-TIS", "--arm", "NoIS")[0] == pytest.approx(2 * one, rel=0.01)
    assert disk("--arm", "F-TIS", "--set=training.save_every=2")[0] == pytest.approx(2 * one, rel=0.01)
    assert ftis("train", path, "--dry-run", "--arm", "TIS") == 1
    assert "no arm 'TIS' in the recipe" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("finished", "steps", "lost"),
    [(7, [], True), (7, [3, 6], False), (3, [], False), (0, [], False)],  # 3: killed while it saved its first
)
def test_records_without_a_checkpoint_are_not_trained_over(
    finished: int, steps: list[int], lost: bool, tmp_path: Path
) -> None:
    recipe = recipe_of({}, {}, training={"rounds": 9, "save_every": 3})
    other, peer = tmp_path / "p0", tmp_path / "p1"
    (other / "checkpoint-6").mkdir(parents=True)
    for step in steps:
        (peer / f"checkpoint-{step}").mkdir(parents=True)
    peer.mkdir(exist_ok=True)
    rows = "".join(f'{{"step": {step}}}\n' for step in range(1, finished + 1))
    (peer / "metrics.jsonl").write_text(rows, encoding="utf-8")
    with pytest.raises(RunError) if lost else nullcontext() as error:
        require_checkpoint(tmp_path, recipe)
        assert bool(repeats(tmp_path, recipe, 0)) == (finished > 0)
        assert ("rounds 4 to 7 again" in repeats(tmp_path, recipe, 3)) == (finished == 7)
        assert f"of p1 ends with round {finished}, and the checkpoint is of round 8" in repeats(tmp_path, recipe, 8)
    if error is not None:
        assert_one_line(error, f"{peer} has 7 finished rounds and no checkpoint", "put the checkpoint back")


@pytest.mark.parametrize(
    ("gpus", "devices", "parallel"),
    [
        (1, ["auto", "auto"], False),
        (2, ["auto", "auto"], True),
        (2, ["cuda", "cuda:0"], False),
        (2, ["cuda:1", "auto"], False),
        (2, ["auto", "cuda:0"], False),
        (2, ["cuda:1", "cuda:0"], True),
        (1, ["cuda:0", "cpu"], False),
        (1, ["cuda:0", "cpu", "cpu", "cpu"], False),
        (2, ["cuda:0", "cuda:1", "cuda:0", "cuda:1"], False),
    ],
)
def test_peers_on_one_gpu_take_turns(
    gpus: int, devices: list[str], parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpus(monkeypatch, *[True] * gpus)
    assert processes.runs_in_parallel(recipe_of(*({"device": device} for device in devices))) == parallel


@pytest.mark.parametrize(
    ("gpus", "devices"), [(1, ["auto"] * 3), (2, ["cuda:0", "cuda:1", "cuda:0"]), (4, ["cuda:0", "cuda:1", "cuda:2"])]
)
def test_peers_are_spread_over_the_gpus(gpus: int, devices: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    arms = [{"name": "alone", "collaborate": False}]
    recipe = recipe_of({}, {}, {}, training={"prompts_per_round": 12}, arms=arms)
    (arm,) = arms_of(recipe)
    parts = [(part.first, peer) for part, peer in zip(arm.parts(), recipe.peers, strict=True)]
    assert [first for first, _ in parts] == [0, 1, 2]
    assert [runs._on_device(recipe, peer, first).peer(peer.name).device for first, peer in parts] == devices
