"""The sweep over architectures: its verdicts on some, and on numbers that are off."""

from __future__ import annotations

import importlib
import subprocess
import sys
from typing import Any

import pytest
from commands import ROOT

from ftis.engines import agreement, samplers


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("sweep")


@pytest.mark.slow
def test_the_command_says_fast_slow_or_refused() -> None:
    verdicts = {"qwen3": "fast", "deepseek_v4": "slow", "bert (sees what follows)": "refused"}
    command = [sys.executable, "benchmarks/sweep.py", *verdicts]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    found = dict(line.split("\t")[:2] for line in ended.stdout.splitlines() if line.count("\t") == 2)
    assert (found, ended.returncode) == (verdicts, 0), ended.stderr


def test_without_the_guard_ties_of_a_sparse_attention_are_wrong(sweep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "deepseek_v32 (ties)"
    verdict, why = sweep.tried(name)
    assert verdict == "refused", why
    exact = agreement.Gaps(0.0, 0.0, 0.0, (1.0, 1.0))
    monkeypatch.setattr(samplers, "trial", lambda *_: exact)
    with pytest.raises(sweep.WrongError, match="nats from the plain model"):
        sweep.tried(name)


def test_the_page_names_each_configuration_once(sweep: Any) -> None:
    names = sorted({*sweep.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *sweep.VARIANTS})
    assert {*sweep.ALSO, *sweep.NAMED.values()} <= {*names}
    verdicts = [("fast", ""), ("slow", "sampled by generate"), ("refused", "x cannot be loaded: 7")]
    page = sweep.page({name: verdicts[i % 3] for i, name in enumerate(names)})
    rows = [row.split("|") for row in page.split("|---|---|---|")[-1].strip().splitlines()]
    assert sorted(name.strip() for row in rows for name in row[3].split(",")) == names
    assert [row[1].strip() for row in rows] == [verdict for verdict, _ in verdicts]
