"""The model card of an exported model, as the Hub shows it."""

from __future__ import annotations

import hashlib
import re
import textwrap
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import ModelCardData, hf_hub_download
from huggingface_hub.repocard import metadata_load

from ftis.check.quantities import counted
from ftis.comparison.summary import accuracy_is
from ftis.config import FtisError
from ftis.engines.places import looks_local, only_here
from ftis.engines.tokenizers import load_tokenizer
from ftis.environments.contract import tools_named
from ftis.models import pretrained, starters
from ftis.records.plan import RECIPE, read_provenance, recorded_recipe
from ftis.records.reading import PeerRun
from ftis.rollouts import Prompt
from ftis.run.export import Trained
from ftis.tasks.rendering import Tool, prompt_text


class Base(NamedTuple):
    """A model before training.

    Attributes:
        hub: its Hub id; None if none is known.
        words: its place for people, without directories of this machine.
        licence: by the model's own name for it; "" if that is not known.
    """

    hub: str | None
    words: str
    licence: str


def base_of(model: str) -> Base:
    """The facts about a peer's ``model``: from its files, or from the Hub."""
    if starters.is_starter(model):
        return Base(None, f"{model}, a small model that comes with ftis", "Apache-2.0")
    place, local = Path(model), looks_local(model)
    metadata: dict[str, Any] = {}
    with suppress(Exception):  # of another's file, which may hold anything
        file = place / "README.md" if local else hf_hub_download(model, "README.md", local_files_only=only_here(model))
        metadata = metadata_load(file) or {}
    licence = str(metadata.get("license_name") or metadata.get("license") or "")
    if not local:
        return Base(model, model, licence)
    words = place.name if place.is_absolute() else model
    if fetched := pretrained.origin_of(place):
        origin, source = fetched
        return Base(origin.hub, f"{origin.hub}, from {source}", licence or origin.licence)
    return Base(None, words, licence)


def card(trained: Trained, merged: bool) -> str:
    """A model card: what was trained, from what, with whom, how far, what it reached, and how to ask it.

    Args:
        merged: whether an adapter was merged into its base.
    """
    recipe, peer, base = trained.recipe, trained.peer, base_of(trained.peer.model)
    adapter = trained.is_adapter and not merged
    data = ModelCardData(
        base_model=base.hub,
        license=base.licence.lower() if re.fullmatch(r"[\w.-]+", base.licence) else None,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["ftis", "grpo"],
    )
    how = f"through LoRA (r = {peer.lora_r})" if peer.train == "lora" else "in full"
    kept = " This is the adapter alone: it needs its base." if adapter else ""
    others = [f"{p.name} ({base_of(p.model).words})" for p in recipe.peers if p.name != peer.name]
    company = f"together with {counted(len(others), 'other model')}" if others else "alone"
    about = read_provenance(trained.run)
    made_by = [about.get("versions", {}).get("ftis"), about.get("commit")]
    command = f"ftis join {RECIPE} --peer {peer.name}" if trained.joined else f"ftis train {RECIPE}"
    rows = {
        "base": base.words,
        "licence of the base": base.licence or "not known: see the base",
        "task": recipe.task.name,
        "reward": ", ".join(recipe.reward.function),
        "objective": recipe.objective.name,
        "partners": ", ".join(others) or "none",
        "rounds": f"{trained.step} of {recipe.training.rounds}",
        "seed": recipe.seed,
        "recipe": f"{RECIPE} with sha256 `{hashlib.sha256(recorded_recipe(trained.run)).hexdigest()}`",
        "command": f"`{command} --arm {trained.arm}`",
        "ftis": " ".join(filter(None, made_by)) or "not known",
    }
    return "\n".join(
        [
            f"---\n{data.to_yaml()}\n---\n",
            f"# {recipe.name}, {peer.name}\n",
            f"{base.words}, trained {how} by reinforcement learning with ftis, {company}.{kept}\n",
            *_table(["", ""], [[name, str(value)] for name, value in rows.items()]),
            *_reached(trained),
            *_asked(trained, adapter),
        ]
    )


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [[cell.replace("|", r"\|") for cell in line] for line in (head, ["---"] * len(head), *rows)]
    return [*(f"| {' | '.join(line)} |" for line in lines), ""]


def _reached(trained: Trained) -> list[str]:
    """The accuracies before training and at the checkpoint, or at the last evaluation before it."""
    records, rows = PeerRun.read(trained.records), []
    for split in records.splits:
        known = [row for row in records.on(split) if row.step <= trained.step]
        if known:
            first, last = known[0], known[-1]
            rows.append([split, str(last.problems), f"{first.accuracy:.3f}", f"{last.accuracy:.3f}", str(last.step)])
    if not rows:
        return []
    what, head = accuracy_is(trained.recipe), ["split", "problems", "before training", "trained", "after round"]
    return [f"## What it reached\n\n{what[0].upper()}{what[1:]} on problems held out.\n", *_table(head, rows)]


def _asked(trained: Trained, adapter: bool) -> list[str]:
    """The prompt of training, and the ends and length of completions."""
    recipe, sampling = trained.recipe, trained.recipe.sampling
    tokenizer = load_tokenizer(str(trained.checkpoint))
    tools: list[Tool] = []
    with suppress(FtisError):  # the environment may be out of reach here
        tools = tools_named(recipe.task.environment)
    prompt = prompt_text(Prompt(0, "{question}", ""), recipe.prompt, tokenizer, tools)
    played = ""
    if recipe.task.environment:
        played = f" The environment `{recipe.task.environment}` answered its turns, and may add to the question."
    stops = f" Text ends before {', '.join(map(repr, sampling.stop))}." if sampling.stop else ""
    return [
        "## How to ask it\n\nThe prompt of training, with a problem instead of `{question}`:\n",
        textwrap.indent(prompt, "    ", lambda line: True),
        f"\nIt sampled at temperature {sampling.temperature:g}, at most {sampling.max_completion_length} tokens. "
        f"{'' if adapter else '`generation_config.json` says the same temperature.'}{stops}{played}\n",
    ]
