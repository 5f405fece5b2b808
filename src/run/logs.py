"""What a role's log looks like."""

import logging
import sys


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
