"""A user's environment: reverse text that records which problems it was asked for."""

import sys
import time
from pathlib import Path

from cairn.orchestrator.environments import ReverseText


class Observed(ReverseText):
    """Appends the number of every problem that it hands out to an orchestrator to `folder`/problems.

    (The command that starts a run also asks for problem 0, to check the environment.)

    While the file `folder`/hold exists, no problem is handed out; `folder`/held then says that a caller is
    waiting for one. While `folder`/hold_some exists, every third problem is held back in the same way.
    """

    def __init__(self, folder: str, **task: int):
        super().__init__(**task)
        self.folder = Path(folder)

    def messages(self, problem: int) -> list[dict[str, str]]:
        """As in reverse text."""
        if "orchestrator" not in sys.argv:
            return super().messages(problem)
        while self._is_held(problem):
            (self.folder / "held").touch()
            time.sleep(0.01)
        with open(self.folder / "problems", "a") as file:
            file.write(f"{problem}\n")
        return super().messages(problem)

    def _is_held(self, problem: int) -> bool:
        return (self.folder / "hold").exists() or (problem % 3 == 0 and (self.folder / "hold_some").exists())
