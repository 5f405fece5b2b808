"""Reversing strings: a task that a tiny model learns within minutes."""

import random
import string

from cairn.run.seeds import derive


class ReverseText:
    """Reverse a random lower-case string; the reward is how much of the reversed string is in the answer.

    Args:
        problems: number of strings.
        min_length, max_length: letters in a string.
        seed: seed of the random strings.
    """

    def __init__(self, problems: int = 4096, min_length: int = 3, max_length: int = 8, seed: int = 0):
        if problems < 1 or not 1 <= min_length <= max_length:
            raise ValueError("problems must be >= 1, and 1 <= min_length <= max_length")
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
        """2 * longest common subsequence / (both lengths): 1.0 only for the reversed string itself."""
        wanted = self._texts[problem][::-1]
        return 2 * longest_common_subsequence(wanted, answer) / (len(wanted) + len(answer))


def longest_common_subsequence(a: str, b: str) -> int:
    """Length of the longest common subsequence of both strings."""
    row = [0] * (len(b) + 1)
    for letter in a:
        diagonal = 0
        for j, other in enumerate(b, start=1):
            above = row[j]
            row[j] = diagonal + 1 if letter == other else max(above, row[j - 1])
            diagonal = above
    return row[-1]
