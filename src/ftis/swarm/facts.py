"""The facts that peers of a run must agree on: their digest, and the differences between two peers in words.

No input or output. Values of others are made printable."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ftis.config import FtisError, Recipe

MAX_FACTS_BYTES = 64 * 1024
MAX_FACTS_DEPTH = 16
SHOWN = 10
"""Differences that are named in one message."""
MODULES = {"reward_modules": "reward module", "task_modules": "task module"}
"""Facts that hold the digests of modules of the user's own, and how messages call one of these modules."""
OF_SCRIPT = {
    "task_digest": "train_dataset",
    "prompt": "chat_template_kwargs",
    "prompts_per_round": "generation_batch_size / num_generations",
    "rounds": "rounds, from max_steps or num_train_epochs",
    "mode": 'settings["training.mode"]',
    "peers": "Swarm's peers",
    "environment": "environment_factory",
    "max_turns": "max_turns, which is max_tool_calling_iterations + 1",
}
"""The names that a TRL script has for facts. Other facts have the same name there.

They stand here, since the link compares facts: from ``trl/`` they would pass unread through two modules."""


class ExchangeError(FtisError):
    """A round's messages could not be gathered."""


def agreement(recipe: Recipe, task_digest: str, wire: int) -> dict[str, Any]:
    """The facts that must be equal on every peer because they change what a rollout means, as JSON values.

    Peers may differ in the rest: model, trained parameters, optimiser, objective, device. In a joined run
    :mod:`ftis.joining.network` adds facts: the roster; with ids, the tokenizer and the spelling of an environment's
    answers; the digests of reward, task and environment modules; the problems' file, whose name may differ.

    Args:
        wire: the version of the message format that this peer writes and reads.
    """
    training, environment, sampling = recipe.training, recipe.task.environment, recipe.sampling
    of_episodes = {"environment": environment, "max_turns": sampling.max_turns} if environment else {}
    return {
        "name": recipe.name,
        "seed": recipe.seed,
        "task": recipe.task.name,
        "task_digest": task_digest,
        **of_episodes,
        "prompt": recipe.prompt.model_dump(mode="json"),
        "reward": recipe.reward.model_dump(mode="json"),
        **{name: getattr(training, name) for name in ("mode", "rounds", "prompts_per_round")},
        **{name: getattr(sampling, name) for name in ("num_generations", "max_completion_length", "temperature")},
        "stop": list(sampling.stop),
        "end_tokens": sorted(sampling.end_tokens),
        "peers": [peer.name for peer in recipe.peers],
        "wire": wire,
        **({"exchange": "text"} if recipe.exchange == "text" else {}),
        **({"share": training.share} if training.share != "equal" else {}),
    }


def run_id(facts: Mapping[str, Any]) -> str:
    """32 hex digits of the SHA-256 of the agreed facts as canonical JSON.

    It leaves out the name of the problems' file, which ``task_digest`` replaces, and with ``allow_other_code`` the
    digests of modules.
    """
    free = {"problems", *(MODULES if facts.get("allow_other_code") is True else ())}
    return hashlib.sha256(canonical({key: facts[key] for key in facts.keys() - free})).hexdigest()[:32]


def canonical(values: Mapping[str, Any]) -> bytes:
    """A JSON object in one way: ASCII, keys sorted, no spaces."""
    return json.dumps(dict(values), sort_keys=True, separators=(",", ":")).encode("ascii")


def read_facts(data: bytes) -> dict[str, Any] | None:
    """The JSON object in ``data``; None for anything else, above :data:`MAX_FACTS_BYTES` and deep nesting.

    The limit on nesting lets every later step, such as writing or comparing, recurse without harm.
    """
    if len(data) > MAX_FACTS_BYTES:
        return None
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and _is_shallow(found, MAX_FACTS_DEPTH) else None


def _is_shallow(value: Any, levels: int) -> bool:
    """Whether objects and arrays lie at most ``levels`` deep in each other."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return inside is None or (levels > 0 and all(_is_shallow(one, levels - 1) for one in inside))


AFTERWARDS = "then join again, with --overwrite if your own recipe, problems or code changed, else with --resume"
"""The remedy's second half: a peer that waited in vain has left a run behind."""


@dataclass(frozen=True)
class Mismatch:
    """Differences between others' meaning of ``recipe`` and this peer's, in words, and the remedy."""

    recipe: str
    differing: str
    remedy: str

    def of(self, peers: Sequence[str]) -> str:
        """The sentence about ``peers``. All of them mean the same."""
        mean, are = ("means", "is") if len(peers) == 1 else ("mean", "are")
        what = f"{mean} another run by {self.recipe!r} and {are} not heard ({self.differing})"
        return f"{', '.join(peers)} {what}: {self.remedy}"


def mismatch(recipe: str, own: Mapping[str, Any], theirs: Mapping[str, Any]) -> Mismatch | None:
    """The differences between two peers' meaning of ``recipe``; None if they mean the same."""
    allowed = MODULES if own.get("allow_other_code") is theirs.get("allow_other_code") is True else ()
    differing = [key for key in _differing(own, theirs) if key != "problems" and key not in allowed]
    if not differing:
        return None
    scripts = own.get("task") == "train_dataset"  # of TRL
    shown = "; ".join([part for key in differing for part in _in_words(key, own, theirs, scripts)][:SHOWN])
    if "exchange" in differing:
        remedy = 'one has exchange = "text" and the other has not: let all peers set the same'
    elif differing == ["tokenizer"]:
        remedy = 'take models whose vocabulary and end tokens are the same, or let all peers set exchange = "text"'
    elif {"answers"} <= {*differing} <= {"answers", "tokenizer"}:
        remedy = (
            "take models whose tokenizers and chat templates write an environment's answers alike, leave "
            'processing_class out of a TRL script, or let all peers set exchange = "text"'
        )
    elif differing == ["task_digest"] and scripts:
        remedy = "give all scripts a train_dataset of the same rows in the same order, with the same columns"
    elif differing == ["task_digest"]:
        remedy = "give all the same file, in the same order, and the same keys of [task]"
    elif MODULES.keys() >= {*differing} - {"allow_other_code"}:
        remedy = "give all the same file, or let all set network.allow_other_code = true"
    elif differing == ["roster"]:
        remedy = "give all the same roster"
    elif scripts:
        remedy = "let all scripts say the same, with the same version of ftis"
        if "prompts_per_round" in differing:
            remedy += "; generation_batch_size is per_device_train_batch_size x processes x steps_per_generation"
    else:
        remedy = "give all peers the same settings (recipe and --set) and version of ftis"
    return Mismatch(recipe, shown, remedy if scripts else f"{remedy}; {AFTERWARDS}")


def other_code(own: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """The modules of the user's own that differ between two peers, with the start of their digests; "" if none do."""
    return "; ".join(part for key in _differing(own, theirs) if key in MODULES for part in _in_words(key, own, theirs))


def _differing(own: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    return sorted(key for key in own.keys() | theirs.keys() if own.get(key) != theirs.get(key))


def _in_words(key: str, own: Mapping[str, Any], theirs: Mapping[str, Any], scripts: bool = False) -> list[str]:
    """A fact that differs, in words: its parts that differ, if both peers have parts of it."""
    here, there = own.get(key), theirs.get(key)
    if key == "task_digest" and not scripts:
        here, there = (f"{_printable(of.get('problems'))}, {_digest(of.get(key))}" for of in (own, theirs))
        return [f"problems: {here} here, {there} there"]
    if key in MODULES:
        parts = [one if isinstance(one, dict) else {} for one in (here, there)]
        return [
            f"{MODULES[key]} {_printable(name.replace('.', '/') + '.py')}: {_digest(parts[0].get(name))} here, "
            f"{_digest(parts[1].get(name))} there"
            for name in _differing(*parts)
        ]
    if isinstance(here, dict) and isinstance(there, dict) and not (scripts and key in OF_SCRIPT):
        return [
            f"{_printable(f'{key}.{part}')}: {_printable(here.get(part))} here, {_printable(there.get(part))} there"
            for part in _differing(here, there)
        ]
    name = OF_SCRIPT.get(key, key) if scripts else key
    return [f"{_printable(name)}: {_printable(here)} here, {_printable(there)} there"]


def _digest(value: Any) -> str:
    return _printable(value[:8]) if isinstance(value, str) else "none"


def _printable(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return text if len(text) <= 40 else f"{text[:28]}… ({hashlib.sha256(text.encode()).hexdigest()[:8]})"
