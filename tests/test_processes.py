"""Which peers share a process, and what they share there."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TinyModelDir

from ftis.config import Recipe
from ftis.lab import processes, runs
from ftis.lab.assembly import assemble
from ftis.lab.local import Hub
from ftis.lab.processes import runs_in_parallel
from ftis.lab.recipes import load, parse
from recipes import write_recipe

LORA = {"train": "lora", "lora_r": 2, "device": "cpu"}


@pytest.fixture
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A core for each peer, and no model too small to be shared."""
    monkeypatch.setattr(processes, "cores", lambda: 8)
    monkeypatch.setattr(processes, "SMALL", 0)


def recipe_of(*peers: dict[str, Any], **keys: Any) -> Recipe:
    named = [{"name": f"p{i}", **peer} for i, peer in enumerate(peers)]
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
    assert parallel(in_four_bits, in_four_bits)  # has its own
    half = one | {"frozen_dtype": "bfloat16", "dtype": "bfloat16"}
    assert parallel(one, half)
    assert not parallel(half, half)
    assert parallel(one, one | {"data_parallel_size": 2})
    assert parallel(one, one, processes="parallel")
    assert not parallel(one, two, processes="inline")
    monkeypatch.setattr(processes, "SMALL", 20_000_000)
    assert parallel(one, one)
    starter = {"model": "starter:small", **LORA}
    assert parallel(starter, starter)


def test_peers_with_a_gpu_each_share_nothing(
    tiny_model_dir: TinyModelDir, many_cores: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = {"model": str(tiny_model_dir()), "train": "lora", "lora_r": 2}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for devices, expected in ((1, False), (2, True)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda n=devices: n)
        assert parallel(one, one) == expected


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

    trimmed: list[str] = []
    monkeypatch.setattr(runs, "assemble", assembled)
    monkeypatch.setattr(runs, "return_freed_memory", lambda: trimmed.append(threading.current_thread().name))
    assert runs.run(load(path))
    assert not trimmed  # too small
    monkeypatch.setattr(runs, "SMALL", 0)
    weights.clear()
    assert runs.run(load(path), overwrite=True)
    assert weights["a"][False] == weights["b"][False] != set()
    assert not weights["a"][True] & weights["b"][True]
    assert {name: trimmed.count(name) for name in "ab"} == {"a": 2, "b": 2}  # while it waited, and at its end


def test_what_follows_a_turn_happens_within_it() -> None:
    seen: list[bool] = []
    hub = Hub(("a", "b"), after_turn=lambda: seen.append(hub.turn.locked()))
    for name in "ab":
        hub.endpoint(name).publish(0, b"")
    with hub.turn:
        hub.endpoint("a").collect(0)
    assert seen == [True]
