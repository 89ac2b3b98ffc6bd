"""A recipe's own reward function, tried on right and wrong answers before a run."""

from __future__ import annotations

import itertools

from ftis.config import FtisError, Recipe
from ftis.preparing.checks import owns_reward
from ftis.prompts import Task
from ftis.recipe.own_code import staying
from ftis.rewards.scoring import CountError, is_built_in, load_scorer

LAYOUTS = ("%s", " %s", "\\boxed{%s}", "#### %s")
"""Ways to write an answer with which a recipe's own reward is tried."""


def about_reward(recipe: Recipe, task: Task) -> list[str]:
    """A line on a recipe's own reward function if its rewards of right and wrong answers cannot teach the task.

    An environment without a reward, as after a misspelt method, has a line too.

    Two problems' own answers, the answers of others and an empty text are written in usual formats and scored. A reward
    that gives right ones less has the wrong sign; one that gives all the same is constant, or reads another format. The
    built-in reward is checked problem by problem elsewhere.

    Raises:
        CountError: the function does not return one number for each completion. An evaluation scores single
            completions, and may not show it.
    """
    if (played := recipe.task.environment) is not None:
        without = f"task.environment {played!r} has no get_reward: the recipe's reward scores whole completions"
        return [] if owns_reward(played) else [without]
    if is_built_in(recipe.reward):
        return []
    score, scored = load_scorer(recipe.reward, recipe.prompt, task.answer_kind), list[tuple[float, float]]()
    answers = list(dict.fromkeys(problem.answer for problem in task.train[:64] if problem.answer.strip()))
    for answer, other in list(itertools.pairwise(answers))[:2] or [(answer, f"not {answer}") for answer in answers]:
        problem = next(problem for problem in task.train if problem.answer == answer)
        layouts = (*LAYOUTS, f"<{recipe.prompt.answer_tag}>%s</{recipe.prompt.answer_tag}>")
        texts = [layout % text for layout in layouts for text in (answer, other)] + ["", ""]
        with staying():
            try:
                rewards = score(problem, texts, [[0] * max(1, len(text)) for text in texts])
            except FtisError as error:
                if isinstance(error, CountError) or isinstance(error.__cause__, SystemExit):
                    raise
                return [str(error)]
        scored += zip(rewards[::2], rewards[1::2], strict=True)
    if any(right < wrong for right, wrong in scored) and not any(right > wrong for right, wrong in scored):
        return [f"reward.function {score.path!r} gives right answers less than wrong ones: check its sign"]
    if len({reward for pair in scored for reward in pair}) == 1:
        return [
            f"reward.function {score.path!r} gives {scored[0][0]:g} to right answers, wrong ones and an empty text: it "
            f"is constant, or reads none of the usual formats"
        ]
    return []
