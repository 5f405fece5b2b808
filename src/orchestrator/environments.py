"""Where prompts and rewards come from."""

import inspect
import random
import string
from collections.abc import Callable
from typing import Any, Protocol

from cairn.config.orchestrator import EnvironmentConfig
from cairn.run.errors import CairnError
from cairn.run.extensions import BadExtension, load, make
from cairn.run.seeds import derive


class BadEnvironment(CairnError):
    """The environment can't be made; the message names it and what is wrong."""


class Environment(Protocol):
    """A fixed set of problems. Problem i is the same in every process and every run.

    `messages` and `reward` may be coroutines. Both are called from a thread of their own, one call at a time
    unless `orchestrator.reward_threads` allows more (`cairn.orchestrator.calls`).
    """

    def __len__(self) -> int:
        """Number of problems: the length of an epoch."""
        ...

    def messages(self, problem: int) -> list[dict[str, str]]:
        """The conversation that asks problem number `problem`."""
        ...

    def reward(self, problem: int, answer: str) -> float:
        """How good `answer` is, for example from 0 to 1; a finite number, also one of numpy or torch."""
        ...


class ReverseText:
    """Reverse a random lower-case string; the reward is how much of it comes out in order.

    Args:
        problems: how many strings there are.
        min_length, max_length: letters in a string.
        seed: of the strings.
    """

    def __init__(self, problems: int = 4096, min_length: int = 3, max_length: int = 8, seed: int = 0):
        if problems < 1 or not 1 <= min_length <= max_length:
            raise ValueError("needs problems >= 1 and 1 <= min_length <= max_length")
        self._texts = [
            "".join(draw.choices(string.ascii_lowercase, k=draw.randint(min_length, max_length)))
            for draw in (random.Random(derive(seed, "reverse_text", i)) for i in range(problems))
        ]

    def __len__(self) -> int:
        return len(self._texts)

    def messages(self, problem: int) -> list[dict[str, str]]:
        """The string, as the user's turn."""
        return [{"role": "user", "content": self._texts[problem]}]

    def reward(self, problem: int, answer: str) -> float:
        """2 x longest common subsequence / (both lengths): 1.0 only for the reversed string itself."""
        wanted = self._texts[problem][::-1]
        return 2 * longest_common_subsequence(wanted, answer) / (len(wanted) + len(answer))


def longest_common_subsequence(a: str, b: str) -> int:
    """Length of the longest string that is left of both when letters are struck out."""
    row = [0] * (len(b) + 1)
    for letter in a:
        diagonal = 0
        for j, other in enumerate(b, start=1):
            above = row[j]
            row[j] = diagonal + 1 if letter == other else max(above, row[j - 1])
            diagonal = above
    return row[-1]


BUILT_IN: dict[str, Callable[..., Environment]] = {"reverse_text": ReverseText}


def make_environment(config: EnvironmentConfig) -> Environment:
    """The built-in environment of that name, or `module:Class`, with the configured arguments.

    Raises:
        BadEnvironment: there is none, it refuses its arguments, or it is no `Environment`.
    """
    try:
        cls = load(config.name, BUILT_IN, "orchestrator.environment.name")
        environment = make(cls, config.args, "orchestrator.environment.args")
    except BadExtension as error:
        raise BadEnvironment(str(error)) from error
    if wrong := _wrong_with(environment):
        raise BadEnvironment(f"orchestrator.environment.name = {config.name!r}: {wrong}")
    return environment


def _wrong_with(environment: Any) -> str | None:
    """What keeps this from being an environment, in words; None if nothing does."""
    for name, arguments in {"messages": ("problem",), "reward": ("problem", "answer")}.items():
        wanted = f"{name}({', '.join(arguments)})"
        method = getattr(environment, name, None)
        if not callable(method):
            return f"it has no method {wanted}"
        try:
            inspect.signature(method).bind(*arguments)
        except TypeError as error:
            return f"its {name} can't be called as {wanted}: {error}"
        except ValueError:
            pass  # it has no signature to look at
    try:
        problems = len(environment)
    except Exception as error:
        return f"len() of it, which is its number of problems, fails: {error!r}"
    return None if problems else "it has no problems: len() of it is 0"
