"""The scripts under examples/ run as their docstrings say."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_word_problem_starters_are_made_and_compared(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    script = ROOT / "examples" / "word_problem_starters.py"
    command = [sys.executable, str(script), "--scale", "tiny", "--seeds", "1", "--jobs", "1", "--out", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert ended.returncode == 0, ended.stderr
    for arm in ("alone", "NoIS", "F-TIS"):
        for peer in ("small", "large"):
            rows = (tmp_path / "word-problems" / "word-problems-seed0" / arm / peer / "metrics.jsonl").read_text()
            assert rows.count("\n") == 1
    assert (tmp_path / "word-problems" / "report.html").exists()
