"""The source of a model, a directory or the Hub: what is there, the base of a LoRA adapter, and why neither loads."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import huggingface_hub
from transformers.utils.peft_utils import find_adapter_config_file

from ftis.config import ModelError, first_line
from ftis.engines.places import CHECKPOINT, looks_local, no_model_at, only_here

NO_CODE = {"trust_remote_code": False}
"""Refuse Python code in a model's directory. Without this argument transformers asks at the terminal."""


def check_directory(source: str) -> None:
    """Raise ModelError if a local path holds no model. transformers checks a Hub id."""
    directory = Path(source)
    if not looks_local(source) or (directory / "config.json").exists() or (directory / "adapter_config.json").exists():
        return
    found = (place for depth in ("", "*/", "*/*/") for place in directory.glob(f"{depth}{CHECKPOINT}*"))
    below = sorted(found, key=lambda place: (place.parent, len(place.name), place.name))  # by peer, then by step
    if checkpoints := [place.name for place in below if place.parent == directory]:
        raise ModelError(f"no model at {source}, but in {', '.join(checkpoints)} there: name one of these")
    if below:
        parents = ", ".join(dict.fromkeys(str(place.parent) for place in below))
        raise ModelError(f"no model at {source}, but checkpoints in {parents}: name one of these, such as {below[-1]}")
    raise ModelError(no_model_at(source))


def base_of_adapter(source: str) -> str | None:
    """Return the base that a LoRA adapter names, None for any other model; ModelError if it names none."""
    adapter, base = adapter_config(source), None
    if adapter is None:
        return None
    with suppress(ValueError, KeyError, TypeError):  # the file is no JSON, no object, or lacks the key
        base = json.loads(adapter.read_text(encoding="utf-8"))["base_model_name_or_path"]
    if not isinstance(base, str):
        where = adapter if Path(source).exists() else f"{source}: {adapter.name}"
        raise ModelError(f"{where} names no base_model_name_or_path: put back the file that peft wrote")
    return base


def place_of_base(source: str) -> str:
    """Find the place of a model's weights. A LoRA adapter has those of its base."""
    base = base_of_adapter(source)
    if base is None:
        return source
    if looks_local(base) and not Path(base).exists():
        where = "" if Path(base).is_absolute() else f" in {Path.cwd()}, where the command runs"
        raise ModelError(
            f"{adapter_config(source)} names {base!r} as its base, which is not there{where}: put it back, or write "
            f"its whole path or its Hub id into that file as base_model_name_or_path"
        )
    return place_of_base(base)


def adapter_config(source: str) -> Path | None:
    """A LoRA adapter's ``adapter_config.json``, in its directory or from the Hub; None for any other model."""
    with suppress(OSError, ValueError):  # loading the model raises the better error
        found = find_adapter_config_file(source, local_files_only=only_here(source))
        return None if found is None else Path(found)
    return None


def why_not_loaded(error: Exception, source: str) -> str:
    if Path(source).is_file():
        return "it is a file; name a directory in Hugging Face's format"
    reason = first_line(error)
    if "trust_remote_code" in str(error):
        return "it needs Python code of its own, which ftis does not run; take an architecture that transformers has"
    place = place_of_base(source)
    if "in the cached files" not in reason or not only_here(place):
        return reason
    missing = "it is not here" if place == source else f"its base {place!r} is not in {Path.cwd()} or the Hub's cache"
    offline = huggingface_hub.is_offline_mode()
    why = "HF_HUB_OFFLINE is set; unset it" if offline else "the Hub does not answer; check the connection"
    return f"{missing}, and {why}, or name the directory of a copy"
