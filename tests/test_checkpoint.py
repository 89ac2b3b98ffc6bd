"""Checkpoints: whole or absent, and going on from one is as if nothing had happened."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TinyPolicy, assert_one_line
from policies import EACH_TRAIN, TRAINS, weights
from run_files import same
from torch import Tensor

from ftis.config import FtisError
from ftis.honesty.selection import HonestyTest
from ftis.member import Cursor
from ftis.policy import Policy
from ftis.records.files import saved_steps
from ftis.run import checkpoint
from ftis.run.checkpoint import CheckpointError
from recipes import recipe_of

RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(4, 50, size=n).astype(np.int32) for n in (3, 7, 2, 5)]
COMPLETIONS = [RNG.integers(4, 50, size=n).astype(np.int32) for n in (6, 1, 9, 4)]


def train_step(policy: Policy, k: int) -> None:
    """Step k: its loss is told apart from other steps'."""

    def loss(logp_nT: Tensor, mask_nT: Tensor, rows: np.ndarray) -> Tensor:
        weight = torch.from_numpy(np.cos(rows + 3.0 * k).astype(np.float32)).unsqueeze(-1)
        return torch.where(mask_nT, logp_nT * weight, 0.0).sum() / len(PROMPTS)

    policy.step(PROMPTS, COMPLETIONS, 1.0, loss)


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


@pytest.fixture
def policy(tiny_policy: TinyPolicy) -> Policy:
    made = tiny_policy(learning_rate=1e-2)
    train_step(made, 0)
    return made


@EACH_TRAIN
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_goes_on_bit_for_bit_as_if_uninterrupted(
    train: str, dtype: str, tiny_policy: TinyPolicy, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"learning_rate": 1e-2, "weight_decay": 0.01, "dtype": dtype}
    uninterrupted = tiny_policy(**TRAINS[train], **settings, tokens_per_microbatch=24)
    for k in range(3):
        train_step(uninterrupted, k)
    cursor, states = Cursor(3, 1.25, 1000), {"penalty": {"rejections": {"b": 3}, "until": {"c": 9}}}
    path = checkpoint.save(tmp_path, uninterrupted, cursor, 2, states)
    assert path == tmp_path / "checkpoint-3"
    assert path.stat().st_mode & 0o777 == 0o755
    config = uninterrupted.config
    resumed, *found = checkpoint.load(tmp_path, 3, config, config.model)
    assert found == [cursor, states]
    assert resumed is not uninterrupted
    assert same(weights(resumed), weights(uninterrupted))
    assert len(resumed.optimizer.state) == len(uninterrupted.trainable)
    for a, b in zip(resumed.trainable, uninterrupted.trainable, strict=True):
        for key, value in uninterrupted.optimizer.state[b].items():
            assert torch.equal(resumed.optimizer.state[a][key], value), key
    for k in (3, 4):
        train_step(resumed, k)
        train_step(uninterrupted, k)
        assert same(weights(resumed), weights(uninterrupted))


def test_the_newest_are_kept_in_the_order_of_their_steps_and_other_names_are_left_alone(
    policy: Policy, tmp_path: Path
) -> None:
    """Half of a save that was killed is ignored, and swept up by the next one."""
    others = ["checkpoint-", "checkpoint-x", "checkpoint-1-old", "checkpoint--1", "my-checkpoint-3", "metrics.jsonl"]
    for name in (*others, ".partial-abc123"):
        (tmp_path / name).mkdir()
    assert saved_steps(tmp_path) == []
    for step in (1, 2, 9, 10, 11, 100):
        checkpoint.save(tmp_path, policy, Cursor(step), keep=3)
    assert saved_steps(tmp_path) == [10, 11, 100]  # numbers, not text
    assert {p.name for p in tmp_path.iterdir()} == {*others, "checkpoint-10", "checkpoint-100", "checkpoint-11"}
    assert checkpoint.load(tmp_path, 11, policy.config, policy.config.model)[1] == Cursor(11)


def test_a_step_saved_again_is_replaced(policy: Policy, tmp_path: Path) -> None:
    checkpoint.save(tmp_path, policy, Cursor(1, seconds=1.0), keep=2)
    (tmp_path / "checkpoint-1" / "stale").touch()
    train_step(policy, 1)
    checkpoint.save(tmp_path, policy, Cursor(1, seconds=2.0), keep=2)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-1"]
    assert not (tmp_path / "checkpoint-1" / "stale").exists()
    resumed, cursor, _ = checkpoint.load(tmp_path, 1, policy.config, policy.config.model)
    assert cursor.seconds == 2.0
    assert same(weights(resumed), weights(policy))


def disk_full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def nothing_said(*_: Any, **__: Any) -> Any:
    raise RuntimeError


@contextmanager
def failing(place: str, failure: Callable[..., Any]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, failure)
        yield


@contextmanager
def no_file_larger_than(limit: int) -> Iterator[None]:
    """The operating system itself refuses to write further."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@EACH_TRAIN
def test_a_save_that_fails_leaves_everything_as_it_was(train: str, tiny_policy: TinyPolicy, tmp_path: Path) -> None:
    policy = tiny_policy(**TRAINS[train], learning_rate=1e-2)
    train_step(policy, 0)
    for step in (1, 2):
        checkpoint.save(tmp_path, policy, Cursor(step), keep=2)
    before, trained = contents(tmp_path), weights(policy)
    sizes = sorted(p.stat().st_size for p in (tmp_path / "checkpoint-2").rglob("*") if p.is_file())
    full = ("tempfile.mkdtemp", "os.fsync", "pathlib.Path.replace")
    faults = [(failing(place, disk_full), "No space left on device") for place in full]
    faults += [(failing("torch.save", nothing_said), "RuntimeError")]
    # The largest files are the weights and the optimiser's state.
    faults += [(no_file_larger_than(limit), "") for limit in (0, *(size - 1 for size in sizes[-3:]))]
    for fault, reason in faults:
        with fault, pytest.raises(CheckpointError) as caught:
            checkpoint.save(tmp_path, policy, Cursor(3), keep=2)
        assert_one_line(caught, str(tmp_path / "checkpoint-3"), reason, "checkpoint-2 is kept", "free some space")
        assert contents(tmp_path) == before
        assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-2"]
    assert same(weights(policy), trained)
    checkpoint.save(tmp_path, policy, Cursor(3), keep=2)  # once there is space again
    assert saved_steps(tmp_path) == [2, 3]


KILLED = """
import os, shutil, signal, sys
from pathlib import Path
from ftis.run import checkpoint
from ftis.config import PeerConfig
from ftis.policy import Policy

directory, model = Path(sys.argv[1]), sys.argv[2]
policy = Policy.load(PeerConfig(name="p", model=model, device="cpu", dtype="float32"))
for step in (1, 2):
    checkpoint.save(directory / "first", policy, checkpoint.Cursor(step), keep=2)


def die_at(point):
    # Each rename, removal, flush and new directory is a point to be killed at.
    left = point

    def deadly(function):
        def wrapper(*args, **kwargs):
            nonlocal left
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            return function(*args, **kwargs)

        return wrapper

    for name in ("rename", "replace", "unlink", "rmdir", "fsync", "mkdir"):
        setattr(os, name, deadly(getattr(os, name)))


point, survived = 0, False
while not survived:
    shutil.copytree(directory / "first", directory / str(point))
    child = os.fork()
    if child == 0:
        die_at(point)
        checkpoint.save(directory / str(point), policy, checkpoint.Cursor(2), keep=1)
        os._exit(0)
    survived = os.waitpid(child, 0)[1] == 0
    point += 1
print(point)
"""


def test_a_save_killed_at_any_point_leaves_whole_checkpoints_only(tiny_policy: TinyPolicy, tmp_path: Path) -> None:
    """Step 2 is saved again, and step 1 is one too many."""
    policy = tiny_policy()
    (tmp_path / "first").mkdir()
    run = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), policy.config.model], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    points = int(run.stdout)
    assert points > 20
    found = set()
    for at in range(points):
        steps = saved_steps(tmp_path / str(at))
        assert steps  # there is always one to go on from
        found.add(tuple(steps))
        for step in steps:
            checkpoint.require_whole(tmp_path / str(at), step)
    assert checkpoint.load(tmp_path / "0", 1, policy.config, policy.config.model)[1] == Cursor(1)
    assert found == {(1,), (1, 2), (2,)}


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0xFF]) + data[middle + 1 :]


@pytest.mark.parametrize("train", ["full", "lora"])
def test_any_damaged_or_missing_file_is_noticed(train: str, tiny_policy: TinyPolicy, tmp_path: Path) -> None:
    policy = tiny_policy(**TRAINS[train], learning_rate=1e-2)
    train_step(policy, 0)
    path = checkpoint.save(tmp_path, policy, Cursor(4), keep=2)
    files = [p for p in sorted(path.rglob("*")) if p.is_file()]
    assert {p.name for p in files} >= {"tokenizer.json", "optimizer.pt", "cursor.json", "digests.json"}
    for file in files:
        whole = file.read_bytes()
        for damage in (lambda: file.unlink(), lambda: file.write_bytes(flipped(whole))):  # noqa: B023
            damage()
            with pytest.raises(CheckpointError) as caught:
                checkpoint.load(tmp_path, 4, policy.config, policy.config.model)
            assert_one_line(caught, str(path), "cannot be resumed", "delete that directory")
        file.write_bytes(whole)
    assert checkpoint.load(tmp_path, 4, policy.config, policy.config.model)[1] == Cursor(4)


def test_a_checkpoint_that_is_not_there_or_of_another_peer(
    policy: Policy, tiny_policy: TinyPolicy, tmp_path: Path
) -> None:
    """The other's files are whole, yet they do not fit."""
    checkpoint.save(tmp_path, policy, Cursor(1), keep=2)
    lora = tiny_policy(**TRAINS["lora"])
    for step, config, kind in ((7, policy.config, CheckpointError), (1, lora.config, FtisError)):
        with pytest.raises(kind) as caught:
            checkpoint.load(tmp_path, step, config, config.model)
        assert_one_line(caught)


def test_a_checkpoint_that_does_not_fit_into_memory_is_not_to_be_deleted(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(tmp_path, policy, Cursor(1), keep=2)

    def full(*of: object, **keys: object) -> Policy:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(Policy, "load", full)
    with pytest.raises(CheckpointError, match=r"does not fit into memory now .* by a bare --resume$") as caught:
        checkpoint.load(tmp_path, 1, policy.config, policy.config.model)
    assert_one_line(caught)


def test_a_state_of_another_version_is_named_with_the_remedy() -> None:
    of_before = HonestyTest(recipe_of("a", "b"))
    with pytest.raises(CheckpointError, match="finish the run with the version that began it"):
        checkpoint.restore([of_before], {"honesty": {"b": {"detector": {}}}})


def test_an_adapters_target_modules_are_written_sorted(tiny_policy: TinyPolicy, tmp_path: Path) -> None:
    """A set's order differs between processes, and so would the digests of a checkpoint."""
    targets = ("v_proj", "up_proj", "q_proj", "k_proj", "o_proj", "down_proj", "gate_proj")
    policy = tiny_policy(**TRAINS["lora"], lora_target_modules=targets)
    policy.save_pretrained(tmp_path)
    again = Policy.load(policy.config, checkpoint=tmp_path)
    again.save_pretrained(tmp_path / "again")
    for place in (tmp_path, tmp_path / "again"):
        assert json.loads((place / "adapter_config.json").read_text())["target_modules"] == sorted(targets)
