"""Importing large packages."""

import contextlib
import gc
import sys
import threading
from collections.abc import Generator

SOON = 2.0
"""Seconds after which a command that has printed nothing says what it does."""


@contextlib.contextmanager
def saying(what: str) -> Generator[None]:
    """If this takes longer than `SOON`, print `what` to standard error, so that the screen is not empty."""
    timer = threading.Timer(SOON, lambda: print(f"{what} ...", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def importing() -> Generator[None]:
    """Within it modules are imported without garbage collection; what they created is never traversed again.

    Imports of torch and transformers create about a million objects that live as long as the process. The
    cyclic garbage collector traverses them several times meanwhile, which takes a sixth of the imports'
    processor time, and in every full collection afterwards.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
