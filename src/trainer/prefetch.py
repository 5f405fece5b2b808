"""The next step's batch, made ready while the current step runs."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from cairn.run.batches import Batch


class Prefetch:
    """Makes batches one step ahead in a thread of its own, one after the other, in the order of steps."""

    def __init__(self, make: Callable[[int], Batch], first: int, last: int):
        """Begin with the batch of step `first`; none is made beyond step `last`."""
        self._make = make
        self._last = last
        self._pool = ThreadPoolExecutor(1, "prefetch")
        self._step = first
        self._batch = self._pool.submit(make, first)

    def next_batch(self, step: int) -> Batch:
        """The batch of `step`, which is one after that of the last call.

        Raises:
            Exception: what making it raised.
        """
        self.make_ready(step)
        return self._batch.result()

    def make_ready(self, step: int) -> None:
        """Begin with the batch of `step`, if that was not done before.

        A good moment is when the calling thread leaves Python to others, as it does in a backward pass.
        """
        if self._step < step <= self._last:
            self._step, self._batch = step, self._pool.submit(self._make, step)

    def close(self) -> None:
        """End the thread, which may be making a batch that nobody needs."""
        self._pool.shutdown(wait=False, cancel_futures=True)
