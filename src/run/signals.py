"""The signals that ask a process to stop, and the one rule for them.

Schedulers, terminals, `timeout` and `uv run` often deliver the same request several times at once: to one
process, to its group, and passed on by whoever started it. So what follows within `REPEAT_SECONDS` is taken
for the same request.
"""

import contextlib
import faulthandler
import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Sequence
from multiprocessing import resource_tracker

STOP_SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
"""Ctrl-C; what schedulers send; the terminal was closed."""
REPEAT_SECONDS = 2.0
"""A signal counts as a second request if it comes at least this long after the first."""


def say(message: str) -> None:
    """Print a line from a signal handler, which may have interrupted another print."""
    with contextlib.suppress(OSError):  # the terminal may be gone
        os.write(1, f"{message}\n".encode())


_handled: list[list[signal.Signals]] = []
"""The signals that this process has handlers of `on_stop_signals` for; several if calls are nested."""
_forking = threading.local()
"""The signal mask of a thread that forks."""


@functools.cache
def _children_are_as_others() -> None:
    """From now on a process that is forked off this one acts on signals as any other process does.

    Python keeps handlers across a fork. Without this, whoever ends a worker that a reward has forked
    (`Process.terminate`, the end of a `Pool`) would ask the run to stop, and the worker would go on. Programs
    that are executed need none of this: the kernel resets handlers then.
    """
    os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_act_as_others)


def _block() -> None:
    """Until the child acts on stop signals as others do, they wait: Python forgets those that come before."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _act_as_others() -> None:
    """In a forked child: undo what this process has installed for itself."""
    for number in {number for numbers in _handled for number in numbers}:
        signal.signal(number, signal.SIG_DFL)
    _handled.clear()
    signal.set_wakeup_fd(-1)  # an event loop's, of the parent
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask - set(STOP_SIGNALS))
    faulthandler.disable()  # the stacks in the parent's log are the parent's
    faulthandler.unregister(signal.SIGUSR2)


@contextlib.contextmanager
def on_stop_signals(
    first: Callable[[str], None],
    again: Callable[[], None] | None = None,
    signals: Sequence[signal.Signals] = STOP_SIGNALS,
) -> Generator[None]:
    """Call `first` with the name of the first of `signals`, and `again` once if another request follows.

    To be used in the main thread. The signals are unblocked inside. SIGHUP stays ignored where it was, which
    is what `nohup` is for.
    """
    since: float | None = None
    repeated = False

    def handle(number: int, _frame: object) -> None:
        nonlocal since, repeated
        now = time.monotonic()
        if since is None:
            since = now
            first(signal.Signals(number).name)
        elif again and not repeated and now - since >= REPEAT_SECONDS:
            repeated = True
            again()

    _children_are_as_others()
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    numbers = [number for number in signals if not (ignored and number == signal.SIGHUP)]
    before = {number: signal.signal(number, handle) for number in numbers}
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    _handled.append(numbers)
    try:
        yield
    finally:
        if numbers in _handled:  # a forked child has forgotten them
            _handled.remove(numbers)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextlib.contextmanager
def stop_signals_blocked() -> Generator[None]:
    """Processes and threads that are started inside don't receive stop signals.

    The mask is inherited by whatever they start in turn, and no handler that they install undoes it; they
    have to unblock the signals themselves (`on_stop_signals` does). What was sent meanwhile to this process
    is delivered afterwards.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def stay_deaf() -> None:
    """In a process that was started with stop signals blocked, keep them so; for its main thread.

    When multiprocessing starts its resource tracker, it unblocks SIGINT and SIGTERM whatever they were
    before. So the tracker is started first.
    """
    if signal.SIGHUP in signal.pthread_sigmask(signal.SIG_BLOCK, []):
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def ignore_stop_signals() -> None:
    """Ignore stop signals, in a process that its owner ends."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
