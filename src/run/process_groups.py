"""Ends processes, orderly or by force, and quotes their logs."""

import contextlib
import os
import re
import signal
from collections.abc import Callable, Generator
from pathlib import Path

from cairn.run.directory import RunDirectory
from cairn.run.processes import kill_all
from cairn.run.signals import REPEAT_SECONDS, on_stop_signals, say


def kill_session(session: int, seconds: float = 10) -> None:
    """Kill every process of a session with SIGKILL, and wait up to `seconds` until they are gone."""
    kill_all(lambda: _session_members(session), seconds)


def _session_members(session: int) -> list[int]:
    members: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # Fields after the name in brackets: state, parent, process group, session.
                state, _, _, sid = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(sid) == session and state != "Z":
                    members.append(int(entry.name))
    return members


LOOKED_AT = 1 << 18
"""Bytes at the end of a log that are looked at."""
CRASHED = re.compile(r"^Current thread 0x([0-9a-f]+) \(most recent call first\)", re.MULTILINE)
"""How `faulthandler` names the thread in which a process has crashed."""


def _tail(log: Path) -> str:
    with open(log, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LOOKED_AT))
        return file.read().decode(errors="replace")


def thread_that_crashed(log: Path) -> list[int]:
    """Python's identifier of the thread whose stack a process that crashed has written last; perhaps none."""
    with contextlib.suppress(OSError):
        return [int(found, 16) for found in CRASHED.findall(_tail(log))[-1:]]
    return []


def log_end(log: Path, lines: int = 15) -> str:
    """The last lines of a log, for an error message; from its last error on, if that is among them."""
    try:
        end = _tail(log).splitlines()[-lines:]
    except OSError as error:
        return f"(no log: {error.strerror})"
    errors = [i for i, line in enumerate(end) if line.startswith("error: ")]
    return "\n".join(end[errors[-1] :] if errors else end)


@contextlib.contextmanager
def stop_on_signals(
    run: RunDirectory,
    at_once: Callable[[], None] | None = None,
    seconds: float | None = None,
    tell: Callable[[str], None] = say,
) -> Generator[None]:
    """On SIGINT, SIGTERM or SIGHUP, ask the run to save and stop; on a second signal call `at_once`.

    Roles pass nothing but the run: their launcher stops them.

    Args:
        seconds: time that is left after SIGTERM, the signal of schedulers.
        tell: prints a line, called from the signal handler.
    """

    def stop(name: str) -> None:
        hint = f"; the same again, after {REPEAT_SECONDS:g} s, stops at once" if at_once else ""
        run.request_stop(name, seconds if name == signal.SIGTERM.name else None)
        tell(f"{name}: stopping at the next step boundary{hint}")

    with on_stop_signals(stop, at_once):
        yield
