"""The benchmark for GPUs at toy size on a CPU: all of its code but what only CUDA has."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ftis.policy import ModelError

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_each_way_to_keep_a_model_is_measured() -> None:
    command = [sys.executable, "benchmarks/gpu.py", "--tiny", "--device", "cpu"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    (case,) = found["cases"]
    assert case["greedy_parity"]
    (shapes,) = found["shapes"]
    assert shapes["new_length"] > 0 < shapes["step_in_16384"]
    of = {way["way"]: way for way in found["ways"]}
    full = {"full", "full, AdamW in 8 bits"}
    through_lora = {"LoRA", "LoRA, base in bfloat16", "LoRA, base in 4 bits"}
    assert set(of) == full | through_lora
    assert {of[way]["trained"] for way in full} == {case["parameters"]}
    (adapter,) = {of[way]["trained"] for way in through_lora}
    assert 0 < adapter < case["parameters"]
    # what is kept otherwise computes otherwise
    assert len({of[way]["logp_gap_mean"] for way in ("LoRA", "LoRA, base in bfloat16", "LoRA, base in 4 bits")}) == 3


def test_what_fails_is_told_and_the_rest_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    gpu = importlib.import_module("gpu")

    def kept(bench: Any, name: str, shape: dict[str, int], way: str) -> dict[str, Any]:
        if way == "full":
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")
        if way == "LoRA":
            raise ModelError("model 'm' cannot be loaded")
        return {"model": name, "way": way}

    monkeypatch.setattr(gpu, "kept", kept)
    monkeypatch.setattr(gpu, "measure", lambda bench, name, shape, limits: {"model": name})
    monkeypatch.setattr(gpu, "shapes_of", lambda bench, name, shape: {"model": name})
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--tiny", "--device", "cpu"])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 1
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["cases"] == [{"model": "tiny"}]
    assert found["ways"][0] == {"model": "tiny", "way": "full", "failed": "OutOfMemoryError: CUDA out of memory."}
    assert [way["way"] for way in found["ways"] if "failed" in way] == ["full", "LoRA"]
    assert {way["way"] for way in found["ways"]} == set(gpu.WAYS) - gpu.GPU_ONLY
