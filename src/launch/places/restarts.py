"""When to restart a dead process and when to give up: one rule for roles and ranks."""

LONGEST_WAIT = 30.0


class RestartRule:
    """Restart at once, then after 4, 8, 16 and 30 seconds; give up if the restarts bring no new step.

    Args:
        max_restarts: restarts without a new step after which it gives up.
    """

    def __init__(self, max_restarts: int):
        self.max_restarts = max_restarts
        self._fruitless = 0
        self._step = -1

    def wait_after_death(self, step: int) -> float | None:
        """Seconds to wait before the restart, or None to give up; `step` is the newest finished step.

        Recomputing a step is no progress.
        """
        self._fruitless = 1 if step > self._step else self._fruitless + 1
        self._step = max(self._step, step)
        if self._fruitless > self.max_restarts:
            return None
        return 0.0 if self._fruitless == 1 else min(2.0**self._fruitless, LONGEST_WAIT)
