"""What the answers of a server say about its progress, as signs of life of the process that started it."""

from typing import Any

from cairn.run import heartbeat


class ServerSigns:
    """Notes a server's progress in the heartbeat of this process."""

    def __init__(self) -> None:
        self._update: tuple[str, float] | None = None

    def note(self, status: dict[str, Any] | None) -> None:
        """Take the server's answer; None: it has not answered.

        A server that answers serves. During an update of its weights its engine says nothing for as long as
        the weights are large, so only the beginning of the update counts as progress.
        """
        if status is None:
            return
        before, update = self._update, status.get("updating")
        self._update = update and (update["version"], update["seconds"])
        if self._update is None:
            heartbeat.doing("serving")
        elif before is None or before[0] != self._update[0] or before[1] > self._update[1]:
            heartbeat.doing(f"taking the weights {self._update[0]}", lengthy=True)
