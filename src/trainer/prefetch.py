"""What a step works on: made ready while the step before it runs, or when it is asked for."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetch(Generic[T]):
    """Makes one thing a step, one step ahead, in a thread of its own and in the order of steps."""

    def __init__(self, make: Callable[[int], T], first: int, last: int):
        """Begin with step `first`; nothing is made beyond step `last`."""
        self._make = make
        self._last = last
        self._pool = ThreadPoolExecutor(1, "prefetch")
        self._step = first
        self._made = self._pool.submit(make, first)

    def get(self, step: int) -> T:
        """What was made for `step`, which is one after that of the last call.

        Raises:
            Exception: what making it raised.
        """
        self.make_ready(step)
        return self._made.result()

    def make_ready(self, step: int) -> None:
        """Begin with `step`, if that was not done before.

        A good moment is when the calling thread leaves Python to others, as it does in a backward pass.
        """
        if self._step < step <= self._last:
            self._step, self._made = step, self._pool.submit(self._make, step)

    def close(self) -> None:
        """End the thread, which may be making something that nobody needs."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class OnDemand(Generic[T]):
    """Makes a thing when it is asked for: where it depends on the step before, nothing can be made ahead."""

    def __init__(self, make: Callable[[int], T]):
        self._make = make

    def get(self, step: int) -> T:
        """What is made for `step`."""
        return self._make(step)

    def make_ready(self, step: int) -> None:
        """Nothing can be done yet."""

    def close(self) -> None:
        """Nothing was begun."""
