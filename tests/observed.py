"""A user's environment: reverse text that records which problems it was asked for."""

import sys
import time
from pathlib import Path

from cairn.orchestrator.environments import ReverseText


class Observed(ReverseText):
    """Appends the number of every problem that it hands out to an orchestrator to `folder`/problems.

    (The command that starts a run also asks for problem 0, to check the environment.)

    While the file `folder`/hold exists, the first problem is held back; `folder`/held then says that a caller
    is waiting for it.
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
