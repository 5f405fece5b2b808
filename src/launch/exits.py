"""How the commands and the roles of a run end: what the launcher and its roles agree on.

0: done. 2: bad usage or configuration, before anything is touched. 75: stopped by a signal, with everything
saved that could be; run it again to go on. 1: anything else. The trainer has three more, for its launcher.
"""

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable

from cairn import __version__
from cairn.run.errors import CairnError, UsageError
from cairn.run.output import printable
from cairn.run.signals import on_stop_signals, say

EXIT_USAGE = UsageError.exit_code
EXIT_LOST = 3
"""The trainer was asked to stop and had nowhere to save."""
EXIT_CRASHED = 4
"""The trainer's Ray cluster broke down."""
EXIT_DAMAGED = 5
"""The checkpoint that the trainer has to go on from is damaged (`StartDamaged`)."""
EXIT_STOPPED = 75
EXIT_UNREAD = 128 + signal.SIGPIPE
"""The reader of the command's output, such as `head`, has closed it."""

WORKING = ("trainer", "orchestrator")
"""The roles that work towards the run's last step; a server does not."""
STANDBY = ("trainer", "orchestrator")
"""The roles that a standby can be kept for."""
END_SERVER = signal.SIGUSR1
"""The launcher's signal to a server that it started; others ask the run to stop."""


class RoleFailed(CairnError):
    """A role of the run died; the message shows the end of its log."""


class RayFailed(RoleFailed):
    """The trainer's Ray cluster broke down; another start may well succeed."""

    exit_code = EXIT_CRASHED


def answer(
    run: Callable[[], int], *, stopped: int | None = None, tell: Callable[[str], None] | None = None
) -> int:
    """Run a command or a role; an error that a user can do something about is one message, not a traceback.

    Args:
        run: returns the exit code.
        stopped: the exit code with which a stop signal ends the process at once, which does no harm before
            anything has been started; `run` handles signals in its own way from then on. None: no handler.
        tell: is given the message of such an error as well.
    """

    def stop(name: str) -> None:
        say(f"{name}: stopped before anything was under way; the same command starts again")
        os._exit(stopped or 0)

    def complain(message: str, code: int) -> int:
        print(f"error: {printable(message)}", file=sys.stderr)
        if tell:
            tell(message)
        return code

    try:
        if sys.argv[1:] == ["--version"]:
            print(f"cairn {__version__}", flush=True)
            return 0
        with contextlib.nullcontext() if stopped is None else on_stop_signals(stop):
            code = run()
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of our output, such as `head`, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_UNREAD
    except KeyboardInterrupt:
        return complain("interrupted", 1)
    except CairnError as error:
        return complain(str(error), error.exit_code)
    except OSError as error:  # a full disk, a read-only one, a folder that is gone
        if error.filename is None and error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        where = "standard output" if error.filename is None else error.filename
        return complain(f"{where}: {error.strerror}", 1)
