"""Problems of several kinds in turn, and F-TIS-lifted with another δ."""

from __future__ import annotations

import pytest
import torch

from ftis.config import TaskConfig
from research import expertise
from research.expertise import LIFTED_FURTHER, load


def test_kinds_take_turns_and_the_expert_copies_other_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("reasoning_gym")
    monkeypatch.setattr(expertise, "SHARED", 20)
    task = load(TaskConfig(name="kinds", options={"kinds": ["sum", "equation"]}, validation_size=10))
    assert [len(task.train), len(task.validation)] == [40, 20]
    for problems in (task.train, task.validation):
        kinds = ["sum" if "arithmetic problem" in p.question else "equation" for p in problems]
        assert kinds == ["sum", "equation"] * (len(problems) // 2)
    copied = expertise.problems_of("sum", 40, 10)[0][20:]
    assert not {p.question for p in copied} & {p.question for p in task.train}


def test_a_success_is_lifted_down_to_a_hundredth() -> None:
    raw_NT = torch.tensor([[0.05, 0.5], [0.005, 0.5], [0.05, 0.5]])
    advantage_N1 = torch.tensor([[1.0], [1.0], [-1.0]])
    weight_NT = LIFTED_FURTHER.weight(raw_NT, advantage_N1, LIFTED_FURTHER)
    assert weight_NT.tolist() == [[1, 1], raw_NT[1].tolist(), raw_NT[2].tolist()]
