"""A game with a hidden number: the model answers a problem, hears "+" or "-", and may answer again."""

from __future__ import annotations

import re

from ftis.episodes import EpisodeError
from ftis.rewards.numbers import read_number

NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")


class Guess:
    """A game that compares the answer, an integer, with a turn's last number: ``+`` if it is greater, ``-`` if less."""

    def reset(self, answer: str, **row: object) -> None:
        number = read_number(answer)
        if number is None or number.denominator != 1:
            raise EpisodeError(
                f"task.environment 'guess': the answer {answer!r:.80} is no integer: leave the problem out"
            )
        self.answer, self.solved = int(number), False

    def reply(self, text: str) -> str | None:
        """The sign; None at the right number, or without any."""
        numbers = NUMBER.findall(text)
        guess = read_number(numbers[-1]) if numbers else None
        self.solved = guess == self.answer
        if guess is None or self.solved:
            return None
        return "+" if self.answer > guess else "-"

    def get_reward(self) -> float:
        return float(self.solved)
