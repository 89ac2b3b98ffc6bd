"""Atomic checkpoints: an ordinary Hugging Face directory, plus what it takes to go on exactly from there.

``checkpoint-<step>/`` after ``step`` finished rounds holds the model or adapter and the tokenizer, loadable with
``from_pretrained``, and ``trainer_state/`` with the optimiser's state, the cursor and the digests of all files. It is
written, and deleted, under another name, so a directory named ``checkpoint-*`` is always whole. No generator states
are kept: every random number is drawn from (seed, peer, round).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ftis.config import FtisError, PeerConfig
from ftis.policy import Policy, first_line


class CheckpointError(FtisError):
    """State cannot be saved or resumed."""


@dataclass(frozen=True)
class Cursor:
    """How far a peer is. Other totals are sums over metrics.jsonl."""

    step: int = 0
    """Finished rounds."""
    seconds: float = 0.0
    tokens_sampled: int = 0


def save(
    directory: Path,
    policy: Policy,
    cursor: Cursor,
    keep: int,
    selections: Mapping[str, Mapping[str, Any]] | None = None,
) -> Path:
    """Write ``checkpoint-<step>`` under ``directory`` and delete all but the newest ``keep``.

    Args:
        selections: the state of each selection that has one, by its name.

    Raises:
        CheckpointError: nothing was left half-written; earlier checkpoints are as they were.
    """
    target = directory / f"checkpoint-{cursor.step}"
    try:
        for leftover in directory.glob(".partial-*"):  # of a save that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        with _partial(directory) as partial:
            policy.save_pretrained(partial)
            state = partial / "trainer_state"
            state.mkdir()
            torch.save(policy.optimizer.state_dict(), state / "optimizer.pt")
            (state / "cursor.json").write_text(json.dumps(asdict(cursor)), encoding="utf-8")
            (state / "selections.json").write_text(json.dumps(selections or {}), encoding="utf-8")
            (state / "digests.json").write_text(json.dumps(_digests(partial), indent=1), encoding="utf-8")
            _flush(partial)
            delete(target)
            partial.chmod(0o755)
            partial.replace(target)
        for step in steps(directory)[:-keep]:
            delete(directory / f"checkpoint-{step}")
    except (OSError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(
            f"checkpoint {target} could not be saved ({first_line(error)}): free some space or change "
            f"output_dir, then run again with --resume"
        ) from error
    return target


def delete(checkpoint: Path) -> None:
    """Delete a checkpoint, if it is there; a kill on the way leaves none that is half there."""
    if checkpoint.exists():
        with _partial(checkpoint.parent) as partial:
            checkpoint.replace(partial / checkpoint.name)


def steps(directory: Path) -> list[int]:
    """The steps of the whole checkpoints under ``directory``, ascending."""
    matches = (re.fullmatch(r"checkpoint-(\d+)", path.name) for path in directory.glob("checkpoint-*"))
    return sorted(int(match[1]) for match in matches if match)


def load(
    directory: Path, step: int, config: PeerConfig, model_path: str
) -> tuple[Policy, Cursor, dict[str, dict[str, Any]]]:
    """The policy, the cursor and the selections' states of ``checkpoint-<step>``.

    Args:
        model_path: where the untrained model came from.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    source = directory / f"checkpoint-{step}"
    try:
        _check_digests(source)
        policy = Policy.load(config, model_path, checkpoint=source)
        state = torch.load(source / "trainer_state" / "optimizer.pt", map_location=policy.device, weights_only=True)
        policy.optimizer.load_state_dict(state)
        cursor = Cursor(**json.loads((source / "trainer_state" / "cursor.json").read_text(encoding="utf-8")))
        selections = json.loads((source / "trainer_state" / "selections.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise CheckpointError(
            f"{source} cannot be resumed ({first_line(error)}): delete that directory to go on from the one "
            f"before, or start the run anew"
        ) from error
    return policy, cursor, selections


@contextmanager
def _partial(directory: Path) -> Iterator[Path]:
    """A directory in ``directory`` that is gone afterwards, unless renamed."""
    path = Path(tempfile.mkdtemp(prefix=".partial-", dir=directory))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _digests(directory: Path) -> dict[str, str]:
    """SHA-256 of each file, by its path in ``directory``."""
    digests = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                digests[path.relative_to(directory).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def _check_digests(directory: Path) -> None:
    """A damaged file may load without complaint, or fail in any of a dozen ways; so look before."""
    expected = json.loads((directory / "trainer_state" / "digests.json").read_text(encoding="utf-8"))
    found = _digests(directory)
    damaged = [name for name, digest in expected.items() if found.get(name) != digest]
    if damaged:
        raise ValueError(f"{damaged[0]} is {'damaged' if damaged[0] in found else 'missing'}")


def _flush(directory: Path) -> None:
    """Force the files to disk, so that the rename cannot overtake their contents at a power failure."""
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
