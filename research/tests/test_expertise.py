"""Problems of several kinds in turn, and F-TIS-lifted with another δ."""

from __future__ import annotations

import pytest
import torch

from ftis.config import TaskConfig
from research import expertise
from research.expertise import LIFTED_FURTHER, load


def test_kinds_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("reasoning_gym")
    monkeypatch.setattr(expertise, "SHARED", 20)
    task = load(TaskConfig(name="kinds", options={"kinds": ["sum", "equation"]}, validation_size=10))
    assert [len(task.train), len(task.validation)] == [40, 20]
    for problems in (task.train, task.validation):
        kinds = ["sum" if "arithmetic problem" in p.question else "equation" for p in problems]
        assert kinds == ["sum", "equation"] * (len(problems) // 2)


def test_an_expert_copies_problems_that_nobody_trains_on_or_validates_with() -> None:
    pytest.importorskip("reasoning_gym")
    for kind in expertise.KINDS:
        task = load(TaskConfig(name="kinds", options={"kinds": [kind]}, validation_size=100))
        known = {p.question for p in (*task.train, *task.validation)}
        copied = expertise.copied_of(kind)
        assert len(copied) > 900
        assert not known & {p.question for p in copied}


def test_a_success_is_lifted_down_to_a_hundredth() -> None:
    raw_NT = torch.tensor([[0.05, 0.5], [0.005, 0.5], [0.05, 0.5]])
    advantage_N1 = torch.tensor([[1.0], [1.0], [-1.0]])
    weight_NT = LIFTED_FURTHER.weight(raw_NT, advantage_N1, LIFTED_FURTHER)
    assert weight_NT.tolist() == [[1, 1], raw_NT[1].tolist(), raw_NT[2].tolist()]
