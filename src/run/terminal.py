"""Printing to a terminal that may be closed while the process goes on."""

import errno
import io
import sys


class _Terminal(io.FileIO):
    """A terminal; what is written to it once it is gone is lost, which is no error."""

    def write(self, data: bytes) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return len(data)


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
