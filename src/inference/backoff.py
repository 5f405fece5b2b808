"""Growing pauses between tries."""

FIRST = 0.05
LONGEST = 2.0
"""Seconds."""


class Backoff:
    """The pause before the next try: none at first, then twice the one before, up to LONGEST."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def grow(self) -> None:
        """Another try is made."""
        self.seconds = min(max(FIRST, 2 * self.seconds), LONGEST)

    def reset(self) -> None:
        """A try has succeeded."""
        self.seconds = 0.0
