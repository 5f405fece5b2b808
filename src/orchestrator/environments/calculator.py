"""Arithmetic with a tool: a task with calls that a tiny model learns within minutes."""

import operator
import random
import re
from collections.abc import Callable

from cairn.run.seeds import derive

_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}
_EXPRESSION = re.compile(r"\s*(\d{1,9})\s*([-+*])\s*(\d{1,9})\s*")


class Calculator:
    """Say what an expression such as `37*58` is; a tool computes it. The reward is how much of it is right.

    Args:
        problems: number of expressions.
        digits: of each of their two numbers.
        seed: seed of the random expressions.
    """

    max_turns = 3

    def __init__(self, problems: int = 4096, digits: int = 2, seed: int = 0):
        if problems < 1 or not 1 <= digits <= 9:
            raise ValueError("problems must be >= 1, and 1 <= digits <= 9")
        self.tools = [self.calculate]
        self._expressions = [
            "{}{}{}".format(number(), draw.choice("+-*"), number())
            for draw in (random.Random(derive(seed, "calculator", i)) for i in range(problems))
            for number in [lambda draw=draw: draw.randrange(10 ** (digits - 1), 10**digits)]
        ]

    def __len__(self) -> int:
        return len(self._expressions)

    def calculate(self, expression: str) -> int:
        """Compute an expression.

        Args:
            expression: Two numbers with +, - or * between them.
        """
        if not (found := _EXPRESSION.fullmatch(expression)):
            raise ValueError("expression must be two numbers with +, - or * between them")
        return _OPERATORS[found[2]](int(found[1]), int(found[3]))

    def messages(self, problem: int) -> list[dict[str, str]]:
        """The expression, as the user's turn."""
        return [{"role": "user", "content": self._expressions[problem]}]

    def reward(self, problem: int, answer: str) -> float:
        """The share of characters that are right: 1.0 only for the result itself."""
        wanted = str(self.calculate(self._expressions[problem]))
        right = sum(a == b for a, b in zip(wanted, answer, strict=False))
        return right / max(len(wanted), len(answer))
