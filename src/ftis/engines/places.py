"""The places of models on this machine, and a test of whether the Hub answers. No torch."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from pathlib import Path

from ftis.config import did_you_mean

TOKENIZER = "tokenizer.json"
"""The file of a tokenizer beside its model."""
TRIES = 2
"""Requests to the Hub without an answer, after which it counts as out of reach."""
CHECKPOINT = "checkpoint-"
"""The beginning of the name of a checkpoint's directory; the step follows."""


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


def only_here(source: str) -> bool:
    """Whether to look for a model on this machine alone, as ``local_files_only`` of the Hub's clients.

    If the Hub does not answer, the clients would ask for each of the files six times, for 23 seconds. They take a file
    for a Hub id, too.
    """
    place = Path(source)
    return not place.is_dir() and (place.exists() or not answers())


@cache
def answers() -> bool:
    """Whether the Hub answers, without a server error. It does not if ``HF_HUB_OFFLINE`` is set."""
    from huggingface_hub import constants, get_session

    for _ in range(TRIES):
        try:
            response = get_session().head(
                constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT, follow_redirects=False
            )
        except Exception:  # the HTTP library's errors, which differ between versions of huggingface_hub
            continue
        if response.status_code < 500:
            return True
    return False


def tokenizer_here(model: str) -> Path | None:
    """The file of a model's tokenizer, in its directory or in the Hub's cache; None if this machine has none."""
    if (file := Path(model) / TOKENIZER).is_file():
        return file
    if "/" not in model:
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    with suppress(HFValidationError):
        cached = try_to_load_from_cache(model, TOKENIZER)
        return Path(cached) if isinstance(cached, str) else None
    return None
