"""The sweep over architectures: its verdicts on some, and on numbers that are off."""

from __future__ import annotations

import subprocess
import sys

import pytest
import sweep
import torch
from commands import ROOT
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ftis.engines import agreement, samplers


@pytest.mark.slow
def test_the_command_says_fast_slow_refused_or_not_built() -> None:
    verdicts = {"qwen3": "fast", "deepseek_v4": "slow", "bert (sees what follows)": "refused", "musicgen": "not built"}
    command = [sys.executable, "benchmarks/sweep.py", *verdicts]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    found = dict(line.split("\t")[:2] for line in ended.stdout.splitlines() if line.count("\t") == 2)
    assert (found, ended.returncode) == (verdicts, 0), ended.stderr


def test_without_the_guard_ties_of_a_sparse_attention_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "deepseek_v32 (ties)"
    verdict, why = sweep.tried(name)
    assert verdict == "refused", why
    exact = agreement.Gaps(0.0, 0.0, 0.0, (1.0, 1.0))
    monkeypatch.setattr(samplers, "trial", lambda *_: exact)
    with pytest.raises(sweep.WrongError, match="nats from the plain model"):
        sweep.tried(name)


@pytest.mark.parametrize("kind", ["mixtral", "phi3", "qwen2", "qwen3", "starcoder2"])
def test_a_row_beyond_the_window_is_another(kind: str) -> None:
    """By the logits of the plain model, with the window and without it."""
    plain, windowed = (sweep.built(name) for name in (kind, f"{kind} (sliding)"))
    assert windowed.config.sliding_window == sweep.LENGTH
    ids = torch.arange(4, 44)[None]
    with torch.no_grad():
        full, short = (model(input_ids=ids, use_cache=False).logits[0] for model in (plain, windowed))
    apart = (full - short).abs()
    assert float(apart[: sweep.LENGTH].max()) < 1e-5 < 1e-3 < float(apart[sweep.LENGTH :].max())


def test_a_model_with_few_positions_has_its_rows_within_them_and_says_so() -> None:
    assert sweep.tried("llama (dynamic)") == ("fast", "rows of at most 16 tokens, as it has no more positions")


def test_the_page_names_each_configuration_once() -> None:
    names = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *sweep.VARIANTS})
    assert {*sweep.ALSO, *sweep.NAMED.values()} <= {*names}
    verdicts = [("fast", ""), ("slow", "by generate"), ("refused", "x cannot be loaded: 7"), ("not built", "why")]
    page = sweep.page({name: verdicts[i % 4] for i, name in enumerate(names)})
    rows = [row.split("|") for row in page.split("|---|---|---|")[-1].strip().splitlines()]
    assert sorted(name.strip() for row in rows for name in row[3].split(",")) == names
    assert [row[1].strip() for row in rows] == [verdict for verdict, _ in verdicts]
