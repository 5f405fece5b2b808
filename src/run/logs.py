"""What a role's log looks like, and what may be printed."""

import logging
import re
import sys

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
