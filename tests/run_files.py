"""What a run leaves in its directories, as tests compare it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file

from ftis.records.files import read_jsonl

Rows = list[dict[str, Any]]

TIMES = ("step_time", "time/", "seconds", "peak_memory")
"""How the keys begin whose values depend on the clock or on what else the process did; so do keys ending in /waited."""


def without_times(rows: Sequence[dict[str, Any]]) -> Rows:
    return [{k: v for k, v in row.items() if not k.startswith(TIMES) and not k.endswith("/waited")} for row in rows]


def records_of(run: Path) -> dict[str, Rows]:
    """The rows of all records under ``run`` by file, without what depends on the clock."""
    lines = {str(path.relative_to(run)): without_times(read_jsonl(path)) for path in sorted(run.rglob("*.jsonl"))}
    tables = {str(path.relative_to(run)): pq.read_table(path).to_pylist() for path in sorted(run.rglob("*.parquet"))}
    return lines | tables


def differences(got: dict[str, Rows], expected: dict[str, Rows]) -> list[str]:
    """Where records differ, a line each: a failing test then says which numbers, not all there are."""
    out = [f"{path}: only in one" for path in sorted(got.keys() ^ expected.keys())]
    for path in sorted(got.keys() & expected.keys()):
        rows = list(zip_longest(got[path], expected[path], fillvalue=dict[str, Any]()))
        for number, (row, other) in enumerate(rows, 1):
            values = {
                key: (row.get(key, "absent"), other.get(key, "absent")) for key in sorted(row.keys() | other.keys())
            }
            out += [f"{path}:{number} {key}: {one!r}, not {two!r}" for key, (one, two) in values.items() if one != two]
    return out


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Whether tensors have the same names and the same bits."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(next(checkpoint.glob("*.safetensors")))
