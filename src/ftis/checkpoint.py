"""Atomic checkpoints: an ordinary Hugging Face directory, plus what it takes to go on exactly from there.

``checkpoint-<step>/`` after ``step`` finished rounds holds the model or adapter and the tokenizer, loadable with
``from_pretrained``, and ``trainer_state/`` with the optimiser's state and the cursor. It is written under another
name and renamed, so a directory named ``checkpoint-*`` is always whole. No generator states are kept: every random
number is drawn from (seed, peer, round).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError

from ftis.config import FtisError, PeerConfig
from ftis.policy import Policy


class CheckpointError(FtisError):
    """State cannot be saved or resumed."""


@dataclass(frozen=True)
class Cursor:
    """How far a peer is, and its running totals."""

    step: int = 0
    """Finished rounds."""
    seconds: float = 0.0
    tokens_sampled: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    foreign_admitted: int = 0
    foreign_used: int = 0
    rounds_without_foreign: int = 0


def save(directory: Path, policy: Policy, cursor: Cursor, keep: int) -> Path:
    """Write ``checkpoint-<step>`` under ``directory`` and delete all but the newest ``keep``.

    Raises:
        CheckpointError: nothing was left half-written; earlier checkpoints are as they were.
    """
    target = directory / f"checkpoint-{cursor.step}"
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=directory))
    try:
        policy.save_pretrained(partial)
        state = partial / "trainer_state"
        state.mkdir()
        torch.save(policy.optimizer.state_dict(), state / "optimizer.pt")
        (state / "cursor.json").write_text(json.dumps(asdict(cursor)), encoding="utf-8")
        _flush(partial)
        if target.exists():
            shutil.rmtree(target)
        partial.chmod(0o755)
        partial.replace(target)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(
            f"checkpoint {target} could not be saved ({str(error).splitlines()[0]}): free some space or change "
            f"output_dir, then run again with --resume"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    for step in steps(directory)[:-keep]:
        shutil.rmtree(directory / f"checkpoint-{step}")
    return target


def steps(directory: Path) -> list[int]:
    """The steps of the whole checkpoints under ``directory``, ascending."""
    matches = (re.fullmatch(r"checkpoint-(\d+)", path.name) for path in directory.glob("checkpoint-*"))
    return sorted(int(match[1]) for match in matches if match)


def load(directory: Path, step: int, config: PeerConfig, model_path: str) -> tuple[Policy, Cursor]:
    """The policy and cursor of ``checkpoint-<step>``; ``model_path`` is where the untrained model came from."""
    source = directory / f"checkpoint-{step}"
    try:
        policy = Policy.load(config, model_path, checkpoint=source)
        state = torch.load(source / "trainer_state" / "optimizer.pt", map_location=policy.device, weights_only=True)
        policy.optimizer.load_state_dict(state)
        cursor = Cursor(**json.loads((source / "trainer_state" / "cursor.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise CheckpointError(
            f"{source} cannot be resumed ({str(error).splitlines()[0]}): delete that directory to go on from the one "
            f"before, or start the run anew"
        ) from error
    return policy, cursor


def _flush(directory: Path) -> None:
    """Force the files to disk, so that the rename cannot overtake their contents at a power failure."""
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
