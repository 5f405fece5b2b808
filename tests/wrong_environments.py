"""Environments with a mistake, as users may write them."""

from cairn.orchestrator.environments import ReverseText


class Texts(ReverseText):
    """Its messages are text instead of a list of messages."""

    def messages(self, problem: int) -> str:
        """The string itself."""
        return super().messages(problem)[0]["content"]


class Empty(ReverseText):
    """It has no problems."""

    def __len__(self) -> int:
        return 0
