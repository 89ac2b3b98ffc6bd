"""The places of models on this machine. They can be looked at before torch is loaded."""

from __future__ import annotations

from pathlib import Path

from ftis.config import did_you_mean


def looks_local(source: str) -> bool:
    """Whether a model's place is a path, not a Hub id."""
    return source.startswith((".", "~", "/", "models/")) or source.count("/") > 1 or Path(source).exists()


def no_model_at(source: str) -> str:
    """A sentence on a path without a model, with the remedy."""
    directory = Path(source)
    where = "" if source.startswith(("~", "/")) else f" in {Path.cwd()}, where the command runs"
    named = f"ftis models {directory.name} fetches it, if ftis models lists that name"
    beside = [place.name for place in directory.parent.glob("*") if place.is_dir() and place != directory]
    fetched = named if directory.parent == Path("models") else "ftis models lists some"
    return (
        f"no model at {source}{where}: neither config.json nor adapter_config.json there. Give a Hugging Face "
        f"directory, a Hub id such as Qwen/Qwen2.5-1.5B, or starter:small; {fetched}"
        f"{did_you_mean(directory.name, beside)}"
    )
