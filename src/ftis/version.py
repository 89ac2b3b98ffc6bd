"""The version of ftis, with a checkout's commit, and the name under which pip installs it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

VERSION = "0.2.0"
"""The released version; pyproject.toml reads it here."""

DISTRIBUTION = "ftis-rl"
"""The package's name on PyPI."""

CHECKOUT = Path(__file__).parents[2]
"""The root of the checkout, if ftis runs from one."""


def commit() -> str | None:
    """The checkout's commit, with ``+changes`` after it if its code differs from that; None outside a checkout."""
    if not (CHECKOUT / ".git").exists() or not shutil.which("git"):
        return None

    def git(*arguments: str) -> str:
        ended = subprocess.run(["git", "-C", str(CHECKOUT), *arguments], capture_output=True, text=True, check=False)
        return ended.stdout.strip()

    head = git("rev-parse", "HEAD")
    changes = git("status", "--porcelain", "--", "src", "recipes", "examples")
    return (f"{head}+changes" if changes else head) or None


def version() -> str:
    """The released version, and the commit in brackets if there is one: ``0.2.0 (3f2a9c01d4e7+changes)``."""
    head, changes, _ = (commit() or "").partition("+")
    return f"{VERSION} ({head[:12]}{'+changes' * bool(changes)})" if head else VERSION


def extra(name: str) -> str:
    """The argument of ``pip install`` for an optional part, quoted for the shell: ``'ftis-rl[watch]'``."""
    return f"'{DISTRIBUTION}[{name}]'"
