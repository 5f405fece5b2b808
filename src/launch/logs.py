"""Bounds the logs of a run: what rewards print must not fill the disk.

Roles, and what they start, write into their logs themselves, so that no word is lost with a reader. Whoever
watches over the run looks at the files now and then. One that has grown too large is copied to `NAME.log.1`,
in the place of an older copy and without its middle if that is large, and then cut to nothing. All who write
to it have opened it for appending, so they go on at its beginning.
"""

import contextlib
import logging
import os
import time
from pathlib import Path

logger = logging.getLogger(__name__)

LARGEST = 32 << 20
"""Bytes of a log at which it is copied and begun anew, and of the copy."""
HEAD = 1 << 20
"""Bytes of its beginning that a copy has, if it leaves something out."""
PIECE = 1 << 20
LOOK_SECONDS = 1.0


class BoundedLogs:
    """Keeps all logs of a folder small."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._look_at = 0.0

    def look_after(self) -> None:
        """Begin those logs anew that are too large; call it often."""
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + LOOK_SECONDS
        with contextlib.suppress(OSError):  # a full disk, or a folder that is gone, is for others to report
            for path in self.folder.glob("*.log"):
                if path.stat().st_size > LARGEST:
                    begin_anew(path)


def begin_anew(path: Path) -> None:
    """Copy a log to `NAME.log.1` and cut it to nothing.

    Raises:
        OSError: the disk is full, or can't be written.
    """
    copy, unfinished = path.with_name(f"{path.name}.1"), path.with_name(f"{path.name}.1.tmp")
    with open(path, "r+b") as log, open(unfinished, "wb") as out:
        size = os.fstat(log.fileno()).st_size
        if size > LARGEST:
            out.write(log.read(HEAD))
            skipped = size - LARGEST
            out.write(f"\n[{skipped} bytes left out]\n".encode())
            log.seek(HEAD + skipped)
        while piece := log.read(PIECE):  # up to what was written last
            out.write(piece)
        unfinished.replace(copy)
        note = f"[the log goes on here; what was before is in {copy.name}]\n".encode()
        log.truncate(0)
        with open(path, "ab") as anew:
            anew.write(note)
