"""The benchmark for a machine with one GPU, at toy size on a CPU: all of its code except what only CUDA has."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_every_stage_writes_what_it_measured(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/gpu.py", "--tiny", "--out", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert [found[stage]["ended"] for stage in ("tests", "family", "learning")] == [0, 0, 0]
    family, learning = found["family"], found["learning"]
    for peer in ("small", "medium"):
        alone, together = family[peer][peer], family["together"][peer]
        assert alone["tokens"] > 1.5 * together["tokens"]  # half of the sampling
        assert alone["round"] > 0
        assert together["update"] > 0
        assert set(alone) == set(together)
    for peer in ("full", "lora"):
        steps = [learning[f"{arm} {peer}"]["accuracy"].keys() for arm in ("F-TIS", "alone-part")]
        assert steps[0] == steps[1]
        assert len(learning[f"F-TIS {peer}"]["reward"]) == learning["pilot"]["rounds"]
