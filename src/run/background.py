"""Work that can wait, without being in anybody's way."""

import contextlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def in_background(work: Callable[[], T]) -> T:
    """Do `work` in a thread to which Linux gives only the processor time that nobody else wants.

    A thread of its own, since no process may raise its priority again without privileges. Returns what `work`
    does and raises what it raises.
    """

    def give_way() -> None:
        with contextlib.suppress(AttributeError, OSError):  # then as any other thread
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))

    with ThreadPoolExecutor(1, "background", initializer=give_way) as thread:
        return thread.submit(work).result()
