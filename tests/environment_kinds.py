"""Environments of several kinds, as users bring them. All are deterministic: a run is the same every time."""

import asyncio
import random
import string
import time

from cairn.orchestrator.environments import ReverseText
from cairn.run.seeds import derive


class Letters:
    """A class of its own, which shares nothing with Cairn's: the reward is how many letters are repeated."""

    identity = "letters-1"

    def __init__(self, problems: int, length: int):
        self.problems, self.length = problems, length

    def __len__(self) -> int:
        return self.problems

    def letters(self, problem: int) -> str:
        """Those of a problem."""
        draw = random.Random(derive(0, "letters", problem))
        return "".join(draw.sample(string.ascii_lowercase, self.length))

    def messages(self, problem: int) -> list[dict[str, str]]:
        """They are the user's turn."""
        return [{"role": "user", "content": self.letters(problem)}]

    def reward(self, problem: int, answer: str) -> float:
        """In any order."""
        return len(set(self.letters(problem)) & set(answer)) / self.length


class Slow(ReverseText):
    """Every reward takes its time, on one of several threads, as that of a sandbox would."""

    def __init__(self, seconds: float, **task: int):
        super().__init__(**task)
        self.seconds = seconds

    def reward(self, problem: int, answer: str) -> float:
        """As in reverse text."""
        time.sleep(self.seconds)
        return super().reward(problem, answer)


class Concurrent:
    """Its methods are coroutines, as those of an environment that asks a judge over the network."""

    def __init__(self, seconds: float, **task: int):
        self.seconds, self.task = seconds, ReverseText(**task)

    def __len__(self) -> int:
        return len(self.task)

    async def messages(self, problem: int) -> list[dict[str, str]]:
        """As in reverse text."""
        await asyncio.sleep(self.seconds)
        return self.task.messages(problem)

    async def reward(self, problem: int, answer: str) -> float:
        """Likewise; rewards come in another order than they were asked for in."""
        await asyncio.sleep(self.seconds * (1 + problem % 3))
        return self.task.reward(problem, answer)


class Instructed(ReverseText):
    """Its prompts begin with a system message."""

    def messages(self, problem: int) -> list[dict[str, str]]:
        """As in reverse text otherwise."""
        return [{"role": "system", "content": "reverse"}, *super().messages(problem)]
