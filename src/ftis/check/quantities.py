"""Durations, sizes and counts as text."""

from __future__ import annotations


def in_time(seconds: float) -> str:
    """A duration for people, as ``40 s``, ``3.2 min`` or ``5.1 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


def in_bytes(count: float) -> str:
    """A number of bytes as a text such as ``1.2 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:  # three figures would make it 1000
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def counted(n: int, noun: str) -> str:
    """``one seed``, ``3 seeds``."""
    return f"one {noun}" if n == 1 else f"{n} {noun}s"
