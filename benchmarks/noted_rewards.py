"""The task of reversing strings, with a note of each answer that gets a reward, for lost_work.py."""

import os
from pathlib import Path

from cairn.orchestrator.environments.reverse_text import ReverseText

NOTED = "NOTED_REWARDS"
"""Environment variable with the file that the notes go to."""


class NotedRewards(ReverseText):
    """ReverseText; each call of `reward` appends a line with the problem's number to the file."""

    def reward(self, problem: int, answer: str) -> float:
        """ReverseText's reward."""
        with Path(os.environ[NOTED]).open("a") as file:
            file.write(f"{problem}\n")
        return super().reward(problem, answer)
