"""Whether the Hugging Face Hub answers, asked once in a process."""

from __future__ import annotations

from functools import cache
from pathlib import Path

TRIES = 2


def only_here(source: str) -> bool:
    """Whether to look for a model on this machine alone, as ``local_files_only`` of the Hub's clients.

    They would ask for each of its files six times, 23 seconds long, where the Hub does not answer.

    Args:
        source: a directory or a Hub id.
    """
    return not Path(source).exists() and not answers()


@cache
def answers() -> bool:
    """Whether it does, by other than an error of its own. Not where ``HF_HUB_OFFLINE`` is set."""
    from huggingface_hub import constants, get_session

    for _ in range(TRIES):
        try:
            told = get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT, follow_redirects=False)
        except Exception:  # those of the HTTP library, which is not the same in every huggingface_hub
            continue
        if told.status_code < 500:
            return True
    return False
