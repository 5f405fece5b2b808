"""Games with Gymnasium's methods, without Gymnasium."""

import random
from typing import Any

WAYS = ["north", "east", "south", "west"]


class Meadow:
    """Look for a flower; the observation tells what was done and where the flower is."""

    def __init__(self, size: int = 3, **spaces: Any):
        self.size, self.closed = size, 0
        self.__dict__ |= spaces

    def tell(self, done: str) -> str:
        """The observation."""
        return f"{done}. you {self.at[0]} {self.at[1]} flower {self.flower[0]} {self.flower[1]}"

    def reset(self, *, seed: int) -> tuple[str, dict[str, Any]]:
        """As in Gymnasium."""
        self.draw = random.Random(seed)
        self.at = [0, 0]
        self.flower = [1 + self.draw.randrange(self.size), 1 + self.draw.randrange(self.size)]
        return self.tell("start"), {}

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """As in Gymnasium."""
        assert action in range(4)
        self.at[action % 2 == 0] += 1 if action in (1, 2) else -1
        if self.draw.random() < 0.25:  # wind, which the seed decides
            self.at[0] += 1
        found = self.at == self.flower
        return self.tell(WAYS[action]), float(found), found, max(self.at) > 9, {}

    def close(self) -> None:
        """As in Gymnasium."""
        self.closed += 1


class Text:
    """A space of letters."""

    contains = staticmethod(str.isalpha)


class Echo:
    """Actions are texts of letters; the observation is what was said. It can't be closed."""

    action_space: Any = Text()

    def reset(self, *, seed: int) -> tuple[str, dict[str, Any]]:
        """As in Gymnasium."""
        return f"{seed % 10}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """As in Gymnasium."""
        return action, 0.25 * (len(action) == 2), action == "end", False, {}


class Drawn(Meadow):
    """It draws itself."""

    def __init__(self, render_mode: str = ""):
        super().__init__()
        self.render_mode = render_mode

    def reset(self, *, seed: int) -> tuple[Any, dict[str, Any]]:
        """The observation is no text."""
        return 7, super().reset(seed=seed)[1]

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """The observation is no text."""
        return 7, *super().step(action)[1:]

    def render(self) -> Any:
        """Colours, as Gymnasium's games have them."""
        return f"\nF\x1b[41m{self.at[0]}\x1b[0mF\n" if self.render_mode == "ansi" else None
