"""Recipes as people write them: TOML files, keys from the command line, arms that replace keys. No torch.

Unknown keys are errors that name the nearest known one. Every key can also be set from the command line
(``--set training.rounds=10``, ``--set peers.small.learning_rate=1e-4``, ``--set 'peers.*.device=cpu'``).
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from fnmatch import fnmatchcase
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from ftis.config import ArmConfig, NetworkConfig, Recipe, RecipeError, TaskConfig, nearest
from ftis.version import CHECKOUT

OF_THE_RUN = ("name", "seed", "output_dir", "arms", "experiment", "processes", "offload", "threads", "ood")
"""Keys that no arm can set: arms are compared on the same problems, with as many threads."""


def load(path: str | Path, overrides: Iterable[str] = (), options: Iterable[str] = ()) -> Recipe:
    """Read a recipe from a TOML file (or the recipe.json of a run) and apply ``key=value`` overrides.

    Modules beside the recipe can be imported from now on, since its dotted paths may name some. They stand behind all
    installed ones.

    Args:
        path: the file. If ``recipes/demo.toml`` or its like is not here, it is the one that comes with ftis.
        options: further overrides, applied first; errors in them are not attributed to ``--set``.

    Raises:
        RecipeError: no such file, not TOML, an unknown key, a wrong value; the message names the place.
    """
    path, overrides = Path(path), list(overrides)
    path = path if path.exists() else ready_made(path)
    document = _read(path)
    beside = path.parent.resolve()
    if str(beside) not in sys.path:
        sys.path.append(str(beside))
    for override in (*options, *overrides):
        set_key(document, *split_override(override))
    recipe = parse(document, str(path), overrides)
    _refuse_other_modules([recipe], beside)
    # An arm's mistakes surface before anything is trained.
    _refuse_other_modules([with_arm(recipe, arm) for arm in recipe.arms], beside)
    return recipe


def ready_made(path: Path) -> Path:
    """The recipe that comes with ftis under a path as ``recipes/demo.toml``; the path itself if none does.

    An installed package holds the recipes; an editable install runs from a clone that has them.
    """
    places = (Path(__file__).parents[1], CHECKOUT) if path.parts[:1] == ("recipes",) else ()
    return next((file for place in places if (file := place / path).is_file()), path)


def names_of(task: TaskConfig) -> list[str]:
    """The names of a task's parts, which are dotted paths if they are a user's own."""
    return [task.name, *([task.environment] if task.environment else [])]


def names_in(recipe: Recipe) -> list[str]:
    """The names of all parts of a recipe that may be a user's own."""
    of_tasks = [name for task in (recipe.task, *recipe.ood) for name in names_of(task)]
    attacks = [peer.attack for peer in recipe.peers if peer.attack]
    own = (*recipe.reward.function, recipe.sampling.sampler, *recipe.report_to, *recipe.training.selections)
    return [recipe.objective.name, *of_tasks, *own, *attacks]


def _refuse_other_modules(recipes: Iterable[Recipe], beside: Path) -> None:
    """Refuse a module beside the recipe if Python has, or finds first, another one of that name with other contents."""
    words = [name.partition(".")[0] for recipe in recipes for name in names_in(recipe) if "." in name]
    for file in (beside / f"{name}.py" for name in dict.fromkeys(words)):
        found = importlib.util.find_spec(file.stem) if file.is_file() else None
        taken = Path(found.origin) if found is not None and found.origin else file
        if file.is_file() and taken.is_file() and taken.read_bytes() != file.read_bytes():
            raise RecipeError(
                f"module {file.stem!r} stands beside the recipe, and Python takes {taken}: give one of the two "
                f"another name, or start Python anew where that one was imported for another recipe"
            )


def _read(path: Path) -> dict[str, Any]:
    if path.is_dir():
        there = ", ".join(sorted(file.name for file in path.glob("*.toml"))[:8]) or "none"
        raise RecipeError(f"{path} is a directory: name a recipe; .toml files there: {there}")
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors write a byte-order mark
        return _table(json.loads(text) if path.suffix == ".json" else tomllib.loads(text))
    except FileNotFoundError:
        files = {file.stem: file for place in (path.parent / "recipes", path.parent) for file in place.glob("*.toml")}
        close = difflib.get_close_matches(path.name.removesuffix(".toml"), files, n=1, cutoff=0.6)
        near = f" (did you mean {files[close[0]]}?)" if close else ""
        raise RecipeError(f"no recipe at {path}: check the path (recipes/ holds the ready-made ones){near}") from None
    except (ValueError, OSError) as error:  # TOML's, JSON's and UTF-8's errors are ValueErrors
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise RecipeError(f"{path} cannot be read as {kind}: {error}") from None


def parse(
    document: Mapping[str, Any], where: str = "recipe", overrides: Sequence[str] = (), *, recorded: bool = False
) -> Recipe:
    """A recipe from a plain mapping (TOML or JSON).

    Args:
        where: names it in errors.
        overrides: those that were applied to it. Mistakes in their keys name the override instead of ``where``.
        recorded: a run left the recipe behind, so keys that are gone are left out.
    """
    try:
        return Recipe.model_validate(_table(document))
    except ValidationError as error:
        if recorded and (gone := [one["loc"] for one in error.errors() if _is_gone(one)]):
            left: Any = deepcopy(_table(document))
            for loc in gone:
                del reduce(getitem, loc[:-1], left)[loc[-1]]
            return parse(left, where, overrides)
        raise RecipeError(_explain(error, document, where, overrides)) from None


def network_settings(settings: Mapping[str, Any]) -> NetworkConfig:
    """The section ``[network]``, from a plain mapping."""
    try:
        return NetworkConfig.model_validate(dict(settings))
    except ValidationError as error:
        raise RecipeError(_explain(error, {}, "network")) from None


def set_key(document: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in a recipe document; a list's entries go by name, index or a pattern (``*``, ``*-lora``)."""
    _set_path(document, key.split("."), value, key)


def matches(name: str, pattern: str) -> bool:
    """Whether ``pattern`` is the name, or fits it as a pattern of the shell: ``*-lora``, ``qwen2.?``."""
    return name == pattern or fnmatchcase(name, pattern)


def toml(value: Any) -> str:
    """A value in TOML, which writes texts, booleans and lists as JSON does, without surrogate pairs and DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def split_override(override: str) -> tuple[str, Any]:
    """``key=value`` as typed on the command line → the dotted key and its TOML value."""
    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise RecipeError(f"--set {override!r}: write key=value, as in --set training.rounds=10")
    return key.strip(), _toml_value(override, text.strip())


def with_arm(recipe: Recipe, arm: ArmConfig) -> Recipe:
    """The recipe as ``arm`` runs it: its keys replaced, its name as the only arm.

    Raises:
        RecipeError: the arm sets a key that belongs to the whole run, or one that is not there.
    """
    document, where = recipe.model_dump(), f"arm {arm.name!r}"
    for key, value in dotted(arm.set):
        if key.partition(".")[0] in OF_THE_RUN:
            raise RecipeError(f"{where}: {key} belongs to the whole run; set it outside of the arms")
        try:
            set_key(document, key, value)
        except RecipeError as error:
            raise RecipeError(f"{where}: {error}") from None
    document["arms"] = [{**arm.model_dump(), "set": {}}]
    made = parse(document, where=where)
    if [peer.name for peer in made.peers] != [peer.name for peer in recipe.peers]:
        raise RecipeError(
            f"{where}: all arms have the recipe's peers, in its order: change their other keys, as peers.*.train; "
            f"training.swarm_size divides them"
        )
    return made


def _set_path(node: Any, path: list[str], value: Any, key: str) -> None:
    width = _name_width(node, path) if isinstance(node, (list, tuple)) else 1
    head, rest = ".".join(path[:width]), path[width:]
    if isinstance(node, (list, tuple)):
        for child in _members(node, head, key):
            if not rest:
                raise RecipeError(f"{key}: names a whole entry; name one of its keys, as in {key}.name")
            _set_path(child, rest, value, key)
    elif isinstance(node, dict):
        if rest:
            node.pop(".".join(path), None)  # an arm's set may quote the key, and the later of the two would count
            child = node.setdefault(head, {})
            _set_path(child, rest, value, key)
        else:
            node[head] = value
    else:
        raise RecipeError(f"{key}: {head!r} lies inside a plain value; check the key")


def _name_width(entries: Iterable[Any], path: list[str]) -> int:
    """The number of parts of a split key in an entry's name, which may hold dots (``peers.qwen2.5.model``)."""
    names = [str(entry["name"]) for entry in entries if isinstance(entry, dict) and "name" in entry]
    prefixes = [".".join(path[:width]) for width in range(1, len(path) + 1)]
    fits = [width for width, prefix in enumerate(prefixes, 1) if any(matches(name, prefix) for name in names)]
    return max((width for width in fits if width < len(path)), default=max(fits, default=1))


def _members(entries: Iterable[Any], selector: str, key: str) -> list[Any]:
    entries = list(entries)
    if selector == "*":
        return entries
    named = [(str(entry["name"]), entry) for entry in entries if isinstance(entry, dict) and "name" in entry]
    by_name = [entry for name, entry in named if matches(name, selector)]
    if by_name:
        return by_name
    if selector.isdecimal() and int(selector) < len(entries):
        return [entries[int(selector)]]
    raise RecipeError(f"{key}: no entry {selector!r}{nearest(selector, [name for name, _ in named])}")


def _toml_value(override: str, text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError as error:
        if text[:1] in tuple("[{\"'"):
            raise RecipeError(f"--set {override!r}: its value cannot be read as TOML: {error}") from None
        if re.fullmatch(r"[+-]?\.[0-9]+", text):
            return float(text)  # TOML wants a digit before the point
        return text  # a bare word is a string, as people type it
    return parsed["value"] if len(parsed) == 1 else text  # a line break starts no second key


def dotted(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested tables as dotted keys; an empty table is a leaf."""
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _table(document: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(document, Mapping):
        raise RecipeError(f"a recipe is a table of keys, got {type(document).__name__}")
    return dict(document)


MOST_MISTAKES = 3
"""The mistakes that one message names; it counts the others."""
KNOWN = "; known: "
"""The words before the list of :func:`nearest`. One message has each list once."""


def _explain(error: ValidationError, document: Mapping[str, Any], where: str, overrides: Sequence[str] = ()) -> str:
    """The mistakes in one line: whose they are, and the nearest key to a mistyped one."""
    found: dict[str, list[str]] = {}
    listed = set()
    for one in error.errors():
        place = _place(one["loc"], document)
        mistake, _, known = _mistake(one, document).partition(KNOWN)
        mistake += f"{KNOWN}{known}" if known and known not in listed else ""
        listed.add(known)
        set_by = [o for o in overrides if _says(o.partition("=")[0].strip(), place, one["loc"])]
        among = f" with {', '.join(f'--set {o!r}' for o in overrides)}" if overrides and not place else ""
        at = f"--set {set_by[-1]!r}" if set_by else f"{where}{among}"
        found.setdefault(at, []).append(mistake)
    count = sum(map(len, found.values()))
    shown = [f"{at}: {'; '.join(mistakes[:MOST_MISTAKES])}" for at, mistakes in [*found.items()][:MOST_MISTAKES]]
    left = count - sum(len(mistakes[:MOST_MISTAKES]) for mistakes in [*found.values()][:MOST_MISTAKES])
    return "; ".join(shown) + (f" (and {'one' if left == 1 else left} more)" if left else "")


def _says(key: str, place: str, loc: tuple[int | str, ...]) -> bool:
    """Whether a key of an override, which may hold a pattern, is that place or one around it or inside it."""
    parts = key.split(".")
    for p in (place, ".".join(map(str, loc))):
        if p and (p.startswith(f"{key}.") or any(p == ".".join(parts[:n]) for n in range(1, len(parts) + 1))):
            return True
        if p and matches(p, ".".join(parts[: len(loc)])):  # a star in a longer key would take any place inside
            return True
    return False


def _place(loc: tuple[int | str, ...], document: Mapping[str, Any]) -> str:
    """A dotted key, with an entry's name instead of its number if it has one."""
    node: Any = document
    parts = []
    for part in loc:
        try:
            node = node[part]
        except (KeyError, IndexError, TypeError):
            node = None
        name = node.get("name") if isinstance(part, int) and isinstance(node, dict) else None
        parts.append(name if isinstance(name, str) and name else str(part))
    return ".".join(parts)


_TRL = "for several GPUs a peer, start a TRL script with accelerate launch (docs/gpus.md)"
_SAMPLED = "groups without signal stay in the round; raise sampling.num_generations to have fewer of them"
_OF_PART = 'train = "lora" trains a part of a model, and a TRL script may freeze any part'

GONE = {
    'budget = "seconds"': "training.swarm_size = 1 and prompts_per_round give an arm alone the swarm's time",
    "data_parallel_size": _TRL,
    "fsdp": _TRL,
    "pass_mark": "reward.partial_credit takes a data set's own scores, and a reward function any part of them",
    "prompts_per_peer": "training.prompts_per_round counts the prompts of all peers that learn together",
    "resample": _SAMPLED,
    "resample_budget": _SAMPLED,
    "rounds_late": "only peers of ftis join have late messages",
    "sampling_cost": "give an arm that trains alone the swarm's time by training.swarm_size = 1 and prompts_per_round",
    'train = "subset"': _OF_PART,
    "trainable_parameters": _OF_PART,
    "swarms": "training.swarm_size divides the peers, in their order, into swarms of that size",
    "swarm_size": "write training.swarm_size into the arm's set",
    "wire": "messages have one form, with exact log-probabilities",
}
"""Keys and values that recipes had once, and their successors."""


def _is_gone(one: ErrorDetails) -> bool:
    return one["type"] == "extra_forbidden" and one["loc"][-1] in GONE


def _mistake(one: ErrorDetails, document: Mapping[str, Any]) -> str:
    place = _place(one["loc"], document)
    if _is_gone(one):
        return f"{place} is gone, leave it out: {GONE[str(one['loc'][-1])]}"
    if value := GONE.get(f'{one["loc"][-1]} = "{one["input"]}"') if one["loc"] else None:
        return f"{place} = {one['input']!r} is gone: {value}"
    if one["type"] == "extra_forbidden":
        key = str(one["loc"][-1])
        known = _fields(SECTIONS.get(str(one["loc"][0]), Recipe) if len(one["loc"]) > 1 else Recipe)
        elsewhere = _holders(key)
        if elsewhere and key not in known:
            hint = f" (did you mean {' or '.join(map(repr, elsewhere))}?)"
        else:
            hint = nearest(key, known)
        return f"unknown key {place!r}{hint}"
    if one["type"] == "missing":
        return f"missing key {place!r}: add it"
    if one["type"] == "value_error":
        return str(one["ctx"]["error"])
    words = {"tuple_type": "an array", "model_type": "a table", "dict_type": "a table"}
    message = one["msg"][0].lower() + one["msg"][1:]
    if one["type"] in words:
        message = f"input should be {words[one['type']]}"
    if one["type"] == "string_type" and isinstance(one["input"], int) and not isinstance(one["input"], bool):
        message += f': quote it, as in {place} = "{one["input"]}", and with --set \'{place}="{one["input"]}"\''
    return f"{place} = {one['input']!r}: {message}"


SECTIONS: Mapping[str, type[BaseModel]] = {
    name: kind
    for name, field in Recipe.model_fields.items()
    for kind in (field.annotation, *get_args(field.annotation))  # one section, or an array of them
    if isinstance(kind, type) and issubclass(kind, BaseModel)
}


def _holders(key: str) -> list[str]:
    """The places where a recipe has this key."""
    of_lists = {name: f"{name}.*" for name in ("ood", "peers", "arms")}
    places = [key] if key in _fields(Recipe) else []
    return places + [f"{of_lists.get(name, name)}.{key}" for name, model in SECTIONS.items() if key in _fields(model)]


def _fields(section: type[BaseModel]) -> list[str]:
    return list(section.model_fields)
