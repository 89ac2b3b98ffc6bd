"""Atomic checkpoints: an ordinary Hugging Face directory, plus the state with which training goes on exactly.

``checkpoint-<step>/``, written after ``step`` finished rounds, holds the model or adapter and the tokenizer, loadable
with ``from_pretrained``. Its ``trainer_state/`` holds the states of optimiser and selections, the cursor, the digests
of all files, and with ``training.overlap`` the groups that were sampled ahead. A checkpoint is written, and deleted,
under another name, so a directory named ``checkpoint-*`` is always whole. No generator state is kept: every random
number is drawn from (seed, peer, round).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ftis.codec import Message, decode, encode
from ftis.config import FtisError, PeerConfig, RecipeError, first_line
from ftis.engines.optimizers import load_state
from ftis.member import Cursor
from ftis.peer import Drawn, Peer
from ftis.policy import Policy
from ftis.records.files import PARTIAL, checkpoint_path, partial_directory, saved_steps, whole_directory
from ftis.selection import Selection

STATE = "trainer_state"
"""The part of a checkpoint that serves training alone."""
UNFINISHED = "unfinished.ftis"
"""The own groups of the next round, if earlier weights have sampled them."""


class CheckpointError(FtisError):
    """State cannot be saved or resumed."""


def save(
    directory: Path,
    policy: Policy,
    cursor: Cursor,
    keep: int,
    selections: Mapping[str, Mapping[str, Any]] | None = None,
    best: int = 0,
    pinned: Collection[int] = (),
    unfinished: bytes = b"",
) -> Path:
    """Write ``checkpoint-<step>`` under ``directory`` and delete all but the newest ``keep`` and ``checkpoint-<best>``.

    Args:
        selections: the state of each selection that has one, by its name.
        pinned: steps that are kept beside these, and do not count among the newest.
        unfinished: the bytes of :func:`unfinished`.

    Raises:
        CheckpointError: the disk is full or refuses to write. Earlier checkpoints are unchanged.
    """
    target = checkpoint_path(directory, cursor.step)
    try:
        for leftover in directory.glob(f"{PARTIAL}*"):  # of a save that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        with whole_directory(target) as partial:
            policy.save_pretrained(partial)
            state = partial / STATE
            state.mkdir()
            torch.save(policy.optimizer.state_dict(), state / "optimizer.pt")
            (state / "cursor.json").write_text(json.dumps(asdict(cursor)), encoding="utf-8")
            (state / "selections.json").write_text(json.dumps(selections or {}), encoding="utf-8")
            if unfinished:
                (state / UNFINISHED).write_bytes(unfinished)
            (state / "digests.json").write_text(json.dumps(_digests(partial), indent=1), encoding="utf-8")
            _flush(partial)
            delete(target)
        for step in [step for step in saved_steps(directory) if step not in pinned][:-keep]:
            if step != best:
                delete(checkpoint_path(directory, step))
    except (OSError, RuntimeError, SafetensorError) as error:
        kept = [checkpoint_path(directory, step).name for step in saved_steps(directory)]
        raise CheckpointError(
            f"checkpoint {target} could not be saved ({first_line(error)}), and {kept[-1] if kept else 'none'} is "
            f"kept: free some space, or move the whole run and name its new place as output_dir, then run the same "
            f"command again, ftis train and join with a bare --resume"
        ) from error
    return target


def delete(checkpoint: Path) -> None:
    """Delete a checkpoint if it exists. A kill in between leaves it whole or gone."""
    if checkpoint.exists():
        with partial_directory(checkpoint.parent) as partial:
            checkpoint.replace(partial / checkpoint.name)


def load(
    directory: Path, step: int, config: PeerConfig, model_path: str
) -> tuple[Policy, Cursor, dict[str, dict[str, Any]]]:
    """The policy with its optimiser, the cursor and the selections' states of ``checkpoint-<step>``.

    Args:
        model_path: the untrained model's place.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    source = checkpoint_path(directory, step)
    states = selections(directory, step)
    with errors_named(source):
        policy = Policy.load(config, model_path, checkpoint=source)
        state = source / STATE / "optimizer.pt"
        load_state(policy.optimizer, torch.load(state, map_location="cpu", weights_only=True, mmap=True))
        cursor = Cursor(**json.loads((source / STATE / "cursor.json").read_text(encoding="utf-8")))
    return policy, cursor, states


def unfinished(peer: Peer) -> bytes:
    """The groups of the round to finish next: a line of JSON with what a message leaves out, then the message.

    Empty if the present weights would draw them again.
    """
    drawn = peer.unfinished
    if drawn is None or not drawn.staleness:
        return b""
    header = replace(peer.member.header, round=drawn.round)
    groups = tuple(scored.group for scored in drawn.own)
    overdue = [[rollout.overdue for rollout in group.rollouts] for group in groups]
    line = json.dumps({"overdue": overdue, "seconds": drawn.seconds}).encode()
    return line + b"\n" + encode(Message(header, groups))


def go_on(peer: Peer, directory: Path, step: int) -> None:
    """Give a peer the groups of the next round that ``checkpoint-<step>`` holds, if it holds some.

    The groups are scored again: any reward function must score them as before. No turn is timed again.
    """
    path, admitter = checkpoint_path(directory, step) / STATE / UNFINISHED, peer.member.admitter
    if path.exists():
        line, _, message = path.read_bytes().partition(b"\n")
        with errors_named(path.parents[1]):
            facts = json.loads(line)
            found = list(zip(decode(message, admitter.terms.limits).groups, facts["overdue"], strict=True))
        groups = [
            replace(group, rollouts=tuple(replace(r, overdue=o) for r, o in zip(group.rollouts, of_group, strict=True)))
            for group, of_group in found
        ]
        peer.ahead = Drawn(step, [admitter.score_group(group) for group in groups], 1, facts["seconds"])


def hand_over(source: Policy, target: Policy) -> None:
    """Give ``target``, which is in use, the trained weights and the moments of another policy of the same peer."""
    with torch.no_grad():
        for old, new in zip(target.trainable, source.trainable, strict=True):
            old.copy_(new)
    target.optimizer.state.clear()
    load_state(target.optimizer, source.optimizer.state_dict())


def selections(directory: Path, step: int) -> dict[str, dict[str, Any]]:
    """The selections' states of ``checkpoint-<step>``, whose files are all checked.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    require_whole(directory, step)
    source = checkpoint_path(directory, step)
    with errors_named(source):
        return dict(json.loads((source / STATE / "selections.json").read_text(encoding="utf-8")))


def require_whole(directory: Path, step: int) -> None:
    """Check all files of ``checkpoint-<step>``: a damaged one may load without complaint, or fail in a dozen ways.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    source = checkpoint_path(directory, step)
    with errors_named(source):
        expected = json.loads((source / STATE / "digests.json").read_text(encoding="utf-8"))
        found = _digests(source)
        if damaged := [name for name, digest in expected.items() if found.get(name) != digest]:
            raise ValueError(f"{damaged[0]} is {'damaged' if damaged[0] in found else 'missing'}")


def states_of(selections: Iterable[Selection]) -> dict[str, dict[str, Any]]:
    """The state of each selection that has one, by its name.

    Raises:
        RecipeError: two selections have one name, or a state is no JSON.
    """
    states: dict[str, dict[str, Any]] = {}
    names: set[str] = set()
    for selection in selections:
        if selection.name in names:
            raise RecipeError(f"two selections are called {selection.name!r}: give the one of your own another name")
        names.add(selection.name)
        state = dict(selection.state())
        try:
            json.dumps(state)
        except (TypeError, ValueError) as error:
            raise RecipeError(
                f"selection {selection.name!r}: its state() cannot be saved ({error}): give numbers, strings, lists "
                f"and dicts of Python"
            ) from None
        if state:
            states[selection.name] = state
    return states


def restore(selections: Iterable[Selection], states: Mapping[str, Mapping[str, Any]]) -> None:
    """Let each selection that has a state there go on from it.

    Raises:
        CheckpointError: the state is of another version.
    """
    for selection in selections:
        if selection.name in states:
            try:
                selection.restore(states[selection.name])
            except (KeyError, TypeError, ValueError) as error:
                raise CheckpointError(
                    f"the checkpoint holds a state of {selection.name!r} that this version cannot read ({error!r}): "
                    f"finish the run with the version that began it, or start it again with --overwrite"
                ) from error


ANEW = "delete that directory to go on from the checkpoint before it, or start the run again with --overwrite"


@contextmanager
def errors_named(source: Path, remedy: str = ANEW) -> Iterator[None]:
    """Turn an error while a checkpoint is read into one that names the checkpoint and the remedy."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise CheckpointError(
            f"{source} does not fit into memory now ({first_line(error)}): free some, then go on by a bare --resume"
        ) from error
    except (OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{source} cannot be resumed ({first_line(error)}): {remedy}") from error


def _digests(directory: Path) -> dict[str, str]:
    """SHA-256 of each file, by its path in ``directory``."""
    digests = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                digests[path.relative_to(directory).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def _flush(directory: Path) -> None:
    """Force the files to disk, so that a power failure cannot leave the new name without its contents."""
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
