"""Whether the Hugging Face Hub answers, asked once in a process."""

from __future__ import annotations

from functools import cache
from pathlib import Path

SECONDS = 10
"""How long to wait for the Hub's first answer."""


def only_here(source: str) -> bool:
    """Whether to look for a model or a data set on this machine alone, as ``local_files_only`` of the Hub's clients.

    They would ask for each of its files six times, 23 seconds long, where the Hub does not answer.

    Args:
        source: a directory or a Hub id.
    """
    return not Path(source).exists() and not answers()


@cache
def answers() -> bool:
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=SECONDS)
    except Exception:  # those of the HTTP library, which is not the same in every huggingface_hub
        return False
    return True
