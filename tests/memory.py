"""How much memory something takes."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable


def peak_of(body: Callable[[], object]) -> int:
    """The most bytes that Python objects and arrays made by ``body`` held at a time."""
    tracemalloc.start()
    try:
        body()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
