"""Text to number: the built-in reward function and what it is made of.

``answers.py`` has the function, ``format_and_answer``: the format that a completion must have, the answer inside it,
and when two answers are equal. ``numbers.py`` reads numbers as people write them. ``latex.py`` compares LaTeX in a
process with limits. What calls a reward function, this one or a recipe's own, stands in :mod:`ftis.rewards.scoring`.
"""

from ftis.rewards.answers import answers_equal, extract_answer, format_and_answer, graded

__all__ = ["answers_equal", "extract_answer", "format_and_answer", "graded"]
