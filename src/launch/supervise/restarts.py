"""When to restart a dead process and when to give up: one rule for roles and ranks."""

LONGEST_WAIT = 30.0
MOST_EXCUSED = 200
"""Restarts without a new step that don't count because a call of user code was to blame: each such call has a
bounded number of tries, and an environment too many of whose prompts fail ends the run."""


class RestartRule:
    """Restart at once, then after 4, 8, 16 and 30 seconds; give up if the restarts bring no new step.

    Args:
        max_restarts: restarts without a new step after which it gives up.
    """

    def __init__(self, max_restarts: int):
        self.max_restarts = max_restarts
        self._fruitless = 0
        self._excused, self._excused_at = 0, -1
        self._step = -1

    def wait_after_death(self, step: int, *, excused: bool = False) -> float | None:
        """Seconds to wait before the restart, or None to give up; `step` is the newest finished step.

        Recomputing a step is no progress.

        Args:
            excused: a call of user code was to blame, for which the death counts as a failed try.
        """
        if step > self._excused_at:
            self._excused, self._excused_at = 0, step
        if excused and self._excused < MOST_EXCUSED:
            self._excused += 1
            return 0.0
        self._fruitless = 1 if step > self._step else self._fruitless + 1
        self._step = max(self._step, step)
        if self._fruitless > self.max_restarts:
            return None
        return 0.0 if self._fruitless == 1 else min(2.0**self._fruitless, LONGEST_WAIT)
