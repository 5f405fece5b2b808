"""Importing large packages."""

import contextlib
import gc
from collections.abc import Generator


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
