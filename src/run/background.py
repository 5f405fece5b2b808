"""Work that can wait, without being in anybody's way."""

import contextlib
import os
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def in_background(work: Callable[[], T]) -> T:
    """Do `work` in a thread to which Linux gives only the processor time that nobody else wants.

    A thread of its own, since no process may raise its priority again without privileges. Returns what `work`
    does and raises what it raises.
    """
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        with contextlib.suppress(AttributeError, OSError):  # then as any other thread
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        try:
            done.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="background")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return done[0]
