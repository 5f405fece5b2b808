"""Exit codes of the commands, and the signals and codes that a launcher and its roles agree on.

0: done. 2: bad usage or configuration, before anything was touched. 75: stopped by a signal, after saving as
much as possible; run the command again to continue. 1: any other failure. The roles have four more codes,
which only their launcher sees.
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
"""The trainer was asked to stop, and saving is off."""
EXIT_CRASHED = 4
"""The trainer's Ray cluster failed."""
EXIT_DAMAGED = 5
"""The checkpoint that the trainer must resume from is damaged (`StartDamaged`)."""
EXIT_ALTERED = 6
"""No server can load what the trainer has published: it is not what the trainer wrote (`PolicyAltered`)."""
EXIT_STOPPED = 75
EXIT_UNREAD = 128 + signal.SIGPIPE
"""The reader of the command's output, such as `head`, has closed the pipe."""

WORKING = ("trainer", "orchestrator")
"""The roles that work towards the run's last step; a server does not."""
STANDBY = ("trainer", "orchestrator")
"""The roles that can have a standby."""
END_SERVER = signal.SIGUSR1
"""Signal by which the launcher ends a server that it started; other signals ask the run to stop."""


class RoleFailed(CairnError):
    """A role of the run died; the message shows the end of its log."""


class PolicyAltered(CairnError):
    """A published policy is damaged; what an attempt publishes first is whole again."""

    exit_code = EXIT_ALTERED


class RayFailed(RoleFailed):
    """The trainer's Ray cluster failed; a restart may well succeed."""

    exit_code = EXIT_CRASHED


def answer(
    run: Callable[[], int], *, stopped: int | None = None, tell: Callable[[str], None] | None = None
) -> int:
    """Run a command or a role, and print errors meant for users as one message without a traceback.

    Args:
        run: does the work and returns the exit code.
        stopped: exit code for a stop signal that arrives before `run` installs its own handler; the process
            then exits at once, which is safe because nothing has started. None: install no handler.
        tell: also called with what such an error sends a launcher, by default its message.
    """

    def stop(name: str) -> None:
        say(f"{name}: stopped before anything was started; run the same command again")
        os._exit(stopped or 0)

    def complain(message: str, code: int, sent: str | None = None) -> int:
        print(f"error: {printable(message)}", file=sys.stderr)
        if tell:
            tell(message if sent is None else sent)
        return code

    try:
        if sys.argv[1:] == ["--version"]:
            print(f"cairn {__version__}", flush=True)
            return 0
        with contextlib.nullcontext() if stopped is None else on_stop_signals(stop):
            code = run()
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of our output, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_UNREAD
    except KeyboardInterrupt:
        return complain("interrupted", 1)
    except CairnError as error:
        return complain(str(error), error.exit_code, error.to_launcher())
    except OSError as error:  # such as a full or read-only disk, or a missing folder
        if error.filename is None and error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        where = "standard output" if error.filename is None else error.filename
        return complain(f"{where}: {error.strerror}", 1)
