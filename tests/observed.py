"""An environment of our own, as a user would bring one: reverse text that tells what it was asked for."""

import sys
import time
from pathlib import Path

from cairn.orchestrator.environments import ReverseText


class Observed(ReverseText):
    """Writes the number of every problem that it hands out to an orchestrator to `folder`/problems.

    (The command that starts a run asks for problem 0 as well, to see whether it can.)

    While there is a file `folder`/hold, the first problem is not handed out; `folder`/held then says that it
    is waited for.
    """

    def __init__(self, folder: str, **task: int):
        super().__init__(**task)
        self.folder = Path(folder)

    def messages(self, problem: int) -> list[dict[str, str]]:
        """As in reverse text."""
        if "orchestrator" not in sys.argv:
            return super().messages(problem)
        while (self.folder / "hold").exists():
            (self.folder / "held").touch()
            time.sleep(0.01)
        with open(self.folder / "problems", "a") as file:
            file.write(f"{problem}\n")
        return super().messages(problem)
