"""Environments with something wrong, as a user may bring them."""

from cairn.orchestrator.environments import ReverseText


class Texts(ReverseText):
    """Its conversations are none."""

    def messages(self, problem: int) -> str:
        """The string itself."""
        return super().messages(problem)[0]["content"]


class Empty(ReverseText):
    """It has no problems."""

    def __len__(self) -> int:
        return 0
