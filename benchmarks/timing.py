"""Medians of times, for benchmarks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def median_seconds(
    body: Callable[[], object], repeats: int, *, warm: int = 1, clock: Callable[[], float] = time.perf_counter
) -> float:
    """The median of ``repeats`` calls, after ``warm`` that are not counted."""
    seconds = []
    for _ in range(warm + repeats):
        began = clock()
        body()
        seconds.append(clock() - began)
    return statistics.median(seconds[warm:])
