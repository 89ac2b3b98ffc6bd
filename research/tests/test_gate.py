"""The gate's reward, and the one difference between its arms."""

from pathlib import Path

import pytest

from ftis.recipe.arms import arms_of
from research import gate


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [(" 3 + 4 = 7\n", "7", 1.0), (" 7", "7", 1.0), (" 7 = 3 + 4", "7", 0.0), (" 17", "7", 0.0), ("", "7", 0.0)],
)
def test_the_text_behind_the_last_equals_sign_is_the_answer(completion: str, answer: str, expected: float) -> None:
    assert gate.right([completion], [answer]) == [expected]


def test_both_arms_learn_alone_and_one_samples_four_times_as_much(tmp_path: Path) -> None:
    part, everything = arms_of(gate.recipe("sum", 0, tmp_path))
    assert not part.config.collaborate
    assert not everything.config.collaborate
    assert everything.recipe.training.prompts_per_round == 4 * part.recipe.training.prompts_per_round
