"""Environments for tests, which a helper's process imports too."""

from __future__ import annotations

import signal

NOTHING = None


class Echo:
    """Repeats what it hears until it hears nothing, or the answer."""

    def reset(self, answer: str) -> str:
        self.answer = answer
        return "?"

    def reply(self, text: str) -> str | None:
        return None if text in ("", self.answer) else f"{text}!"


class Priceless(Echo):
    """An environment whose reward a test sets."""

    reward: object = None

    def get_reward(self) -> object:
        return self.reward


class Wallet:
    """An environment with tools."""

    def reset(self, **row: object) -> None:
        self.coins = 0

    def earn(self, coins: int) -> str:
        """Earn coins.

        Args:
            coins: how many.
        """
        self.coins += coins
        return f"{self.coins} coins"

    def get_reward(self) -> float:
        return float(self.coins)


class Parrot(Wallet):
    """Its tools say and raise anything, and its property works only while it has coins."""

    coins = 0

    @property
    def share(self) -> float:
        return 1 / self.coins

    def say(self, text: str) -> str:
        """Say a text.

        Args:
            text: any.
        """
        return text

    def power(self, n: int) -> int:
        """Take a power of ten.

        Args:
            n: which.
        """
        return int(10**n)

    def miss(self, n: int) -> None:
        """Look a power of ten up.

        Args:
            n: which.
        """
        raise KeyError(10**n)


class Quitter(Wallet):
    """Its tool ends the program, as a model's code may."""

    def run(self, code: str) -> None:
        """Run code.

        Args:
            code: of Python.
        """
        exec(code)


class Purse(Wallet):
    """A wallet whose row says what is in it."""

    def reset(self, prompt: object, start: int, **row: object) -> str:  # type: ignore[override]
        self.coins = start
        return f" {start}"


class Found(Wallet):
    """A wallet that its seed fills."""

    def reset(self, seed: int, **row: object) -> str:  # type: ignore[override]
        self.coins = seed % 10
        return f" {self.coins}"


class Stone(Found):
    """One that never takes ten coins."""

    def earn(self, coins: int) -> str:
        """Earn coins.

        Args:
            coins: how many.
        """
        while coins == 10:
            pass
        return super().earn(coins)


class Moody(Echo):
    """Answers the same actions otherwise each time."""

    replies = 0

    def reply(self, text: str) -> str | None:
        Moody.replies += 1
        return "+" * Moody.replies


class Hashed(Echo):
    """Hides a number that depends on its process."""

    def get_reward(self) -> float:
        return float(hash(self.answer) % 2**20)


class Fragile(Echo):
    def reply(self, text: str) -> str | None:
        raise KeyError(text)


class Without:
    """No environment."""

    def reset(self) -> None: ...


class Flood(Echo):
    """Answers with more than any completion has room for, or with an error as long."""

    def reply(self, text: str) -> str | None:
        if text == "0":
            raise ValueError("x" * 10**5)
        return "x" * 10**5


class Stuck(Echo):
    """Never answers one text."""

    def reply(self, text: str) -> str | None:
        while text == "0":
            pass
        return super().reply(text)

    def get_reward(self) -> float:
        return 0.5


class Slow(Stuck):
    """Rings the alarm of a turn itself while it is slow."""

    slow = False

    def reply(self, text: str) -> str | None:
        if self.slow:
            signal.raise_signal(signal.SIGVTALRM)
        return super().reply(text)


class Dice:
    """Answers with a number that its seed gives."""

    def reset(self, question: str, seed: int) -> str:
        self.drawn = seed % 1000
        return f"{self.drawn}."

    def reply(self, text: str) -> str | None:
        return None if text == str(self.drawn) else str(self.drawn)
