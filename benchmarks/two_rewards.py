"""The task of reversing strings with two named rewards, for `gdpo` in algorithms.py."""

from cairn.orchestrator.environments.protocol import Rewards
from cairn.orchestrator.environments.reverse_text import ReverseText


class TwoRewards(ReverseText):
    """`letters` is ReverseText's reward, and alone the total; `length` is 1 less the length's error."""

    def reward(self, problem: int, answer: str) -> Rewards:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Both parts; `length` has the weight 0, so that curves of all algorithms show the same reward."""
        wanted = len(self.messages(problem)[0]["content"])
        length = max(0.0, 1 - abs(len(answer) - wanted) / wanted)
        return Rewards({"letters": super().reward(problem, answer), "length": length}, {"length": 0.0})
