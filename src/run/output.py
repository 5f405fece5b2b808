"""What a process prints: its log, text from files, and a terminal that may be closed."""

import errno
import io
import logging
import re
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

COLORS = re.compile(r"\x1b\[[0-9;]*m")


def start_logging() -> None:
    """Log this process's messages to standard error, one line each, with the time."""
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        force=True,
    )
    for chatty in ("httpx", "datasets", "filelock"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def printable(text: object) -> str:
    """`text` for a terminal, which what stands in a file must not steer: control characters as escapes.

    Line feeds and tabs stay; colours, which logs are full of, are left out.
    """
    clean = COLORS.sub("", str(text))
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in clean
    )


class _Terminal(io.FileIO):
    """A terminal; what is written to it once it is gone is lost, which is no error."""

    def write(self, data: "ReadableBuffer", /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return memoryview(data).nbytes


def outlive_terminal() -> None:
    """From now on printing raises no error when the terminal has been closed (a lost ssh connection)."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not stream.isatty() or isinstance(getattr(stream.buffer, "raw", None), _Terminal):
            continue
        stream.flush()
        raw = io.BufferedWriter(_Terminal(stream.fileno(), "wb", closefd=False))
        encoding, errors = stream.encoding, stream.errors
        setattr(sys, name, io.TextIOWrapper(raw, encoding=encoding, errors=errors, line_buffering=True))
