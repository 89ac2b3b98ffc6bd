"""A trained model for its users: found in a run, written as a directory of its own, pushed to the Hub."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import GenerationConfig

from ftis.config import PeerConfig, Recipe, RunError, SamplingConfig, first_line
from ftis.engines.models import generation_defaults, load_model
from ftis.engines.places import looks_local
from ftis.engines.sources import base_of_adapter
from ftis.engines.tokenizers import ids_of, load_tokenizer
from ftis.policy import own_ends
from ftis.records.files import checkpoint_path, saved_step, saved_steps, whole_directory
from ftis.records.plan import read_plan
from ftis.records.reading import PeerRun
from ftis.run import checkpoint


@dataclass(frozen=True)
class Trained:
    """A checkpoint of a run.

    Attributes:
        recipe: with exactly the peers of its swarm.
        joined: whether the others were on machines of their own.
    """

    run: Path
    arm: str
    recipe: Recipe
    peer: PeerConfig
    step: int
    joined: bool

    @property
    def records(self) -> Path:
        return self.run / self.arm / self.peer.name

    @property
    def checkpoint(self) -> Path:
        return checkpoint_path(self.records, self.step)

    @property
    def is_adapter(self) -> bool:
        return self.peer.train == "lora"


def find(place: Path, peer: str | None = None, arm: str | None = None, step: int | None = None) -> Trained:
    """The checkpoint that the arguments name, by default the newest, or the best if ``load_best_model_at_end``.

    Args:
        place: a run, or a checkpoint in it, which names the rest.

    Raises:
        RunError: there is no such checkpoint, or the names fit several peers.
        RecordsError: no run is there.
    """
    if (named := saved_step(place)) is not None:
        of_peer = place.resolve().parent
        here = {"arm": of_peer.parent.name, "peer": of_peer.name, "step": named}
        for name, given in (("arm", arm), ("peer", peer), ("step", step)):
            if given not in (None, here[name]):
                raise RunError(
                    f"--{name} {given}: {place} is of {name} {here[name]}; leave --{name} out, or name the run"
                )
        place, arm, peer, step = of_peer.parents[1], of_peer.parent.name, of_peer.name, named
    plan = read_plan(place)
    if plan.is_experiment:
        raise RunError(f"{place} holds runs of several seeds: name one, such as {plan.run_of(plan.seeds[0])}")
    saved = {(of.name, name): saved_steps(place / of.name / name) for of in plan.arms for name in of.peers}
    there = [key for key, steps in saved.items() if steps]
    fitting = [(a, p) for a, p in there if arm in (None, a) and peer in (None, p)]
    if len(fitting) != 1:
        shown = ", ".join(f"--arm {a} --peer {p}" for a, p in fitting or there) or "none yet"
        raise RunError(
            f"{place}: {'name one peer' if fitting else 'no such peer has a checkpoint'}; there are: {shown}"
        )
    steps = saved[fitting[0]]
    if step is not None and step not in steps:
        raise RunError(
            f"{place}: {'/'.join(fitting[0])} has no checkpoint-{step}; there are: {', '.join(map(str, steps))}"
        )
    part = next(of for of in plan.arms if of.name == fitting[0][0]).part_of(fitting[0][1])
    chosen = part.recipe.peer(fitting[0][1])
    if step is None and part.recipe.training.load_best_model_at_end:
        step = PeerRun.read(place / part.name / chosen.name).best
    return Trained(place, part.name, part.recipe, chosen, step or steps[-1], plan.joined is not None)


def require_base_on_hub(trained: Trained) -> None:
    """Refuse an adapter that others cannot load.

    Raises:
        RunError: the adapter's base is a directory of this machine, which nobody else has.
    """
    base = base_of_adapter(str(trained.checkpoint))
    if base is not None and looks_local(base):
        raise RunError(f"the adapter's base is {base}, which others do not have: add --merge to upload a whole model")


def write(trained: Trained, to: Path, merge: bool, card: str, dtype: str = "float32") -> None:
    """Write a checkpoint's model, tokenizer and ``card`` to a new directory, which loads with ``from_pretrained``.

    Args:
        merge: an adapter into its base.
        dtype: of the weights in the files, "float32", "bfloat16" or "float16".

    Raises:
        RunError: there is such a directory, or it cannot be written; an adapter is to have another dtype.
        CheckpointError: a file of the checkpoint is damaged.
        ModelError: the adapter's base is not there.
    """
    if to.exists():
        raise RunError(f"{to} is there already: delete it, or name another place by --to")
    if (rounds := dtype != "float32") and trained.is_adapter and not merge:
        raise RunError(f"--dtype {dtype}: an adapter stays in float32; add --merge to write a whole model")
    checkpoint.require_whole(trained.records, trained.step)
    left_out = shutil.ignore_patterns(checkpoint.STATE, *["adapter_*"] * merge, *["*.safetensors*"] * rounds)
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        with whole_directory(to) as partial:
            shutil.copytree(trained.checkpoint, partial, dirs_exist_ok=True, ignore=left_out)
            if merge or rounds:
                source = str(trained.checkpoint)
                model: Any = load_model(source, PeerConfig(name=trained.peer.name, model=source))
                model.to(getattr(torch, dtype)).save_pretrained(partial)
            if merge or not trained.is_adapter:
                sampling_defaults(str(partial), trained.recipe.sampling).save_pretrained(partial)
            (partial / "README.md").write_text(card, encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"{to} cannot be written ({first_line(error)}), and nothing of it is kept: free some space, or name "
            f"another place by --to; the run is unchanged"
        ) from error


def sampling_defaults(directory: str, sampling: SamplingConfig) -> GenerationConfig:
    """The generation defaults with which a model samples, and ends, as in training; its base's may do otherwise."""
    tokenizer, base = load_tokenizer(directory), generation_defaults(directory)
    return GenerationConfig(
        do_sample=True,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        eos_token_id=sorted(own_ends(tokenizer, base).union(ids_of(tokenizer, sampling.end_tokens))),
        bos_token_id=tokenizer.bos_token_id,
        pad_token_id=tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
    )


def to_gguf(directory: Path, converter: Path, dtype: str) -> Path:
    """Write an exported model as one GGUF file beside its other files, by llama.cpp's ``convert_hf_to_gguf.py``.

    Args:
        dtype: of the weights, as for :func:`write`.

    Raises:
        RunError: the converter fails.
    """
    file = directory / f"{directory.name}.gguf"
    outtype = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[dtype]
    command = [sys.executable, str(converter), str(directory), "--outtype", outtype, "--outfile", str(file)]
    # The converter imports its parts from beside it, which this program's processes may not.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode or not file.exists():
        reason = (done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}").splitlines()[-1]
        raise RunError(
            f"{directory} is written, and {converter} makes no GGUF file of it ({reason}): it needs "
            f"pip install gguf sentencepiece, and a llama.cpp that knows this architecture"
        )
    return file


def push(directory: Path, name: str) -> str:
    """Upload an exported directory to the Hub, into a repository that is private if it is new. Returns its address.

    Raises:
        RunError: the Hub refuses, or is out of reach.
    """
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        made = api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=made.repo_id, folder_path=directory, commit_message="ftis export")
    except Exception as error:  # those of the HTTP library, which is not the same in every huggingface_hub
        raise RunError(
            f"{directory} is written, and the Hub did not take it as {name} ({first_line(error)}): log in by hf auth "
            f"login, check that name and the connection, then run hf upload {name} {directory} . --private"
        ) from error
    return str(made)
