"""What a pool of servers did: requests, retries, weight updates, and where the time went."""

import time


class Counts:
    """What a pool did since it was last asked."""

    def __init__(self) -> None:
        self._in_flight = 0
        self._marked = time.monotonic()
        self._clear()

    def _clear(self) -> None:
        self.requests = 0
        self.retries = 0
        self.push_bytes = 0
        self.push_seconds = 0.0
        self._idle = self._busy = 0.0

    def begin(self) -> None:
        """A request has been sent."""
        self._mark()
        self._in_flight += 1

    def end(self) -> None:
        """A request has been answered or given up."""
        self._mark()
        self._in_flight -= 1

    def take(self) -> dict[str, float]:
        """The counts, which begin anew."""
        self._mark()
        counts = {
            "servers/requests": self.requests,
            "servers/retries": self.retries,
            "time/generate": self._busy,
            "time/server_idle": self._idle,
            "weights/bytes": self.push_bytes,
            "time/push": self.push_seconds,
        }
        self._clear()
        return counts

    def _mark(self) -> None:
        """Count the time since the last mark."""
        now = time.monotonic()
        if self._in_flight:
            self._busy += now - self._marked
        else:
            self._idle += now - self._marked
        self._marked = now
