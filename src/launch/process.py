"""The roles' processes: how they are started, killed, and asked to stop in good order."""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from cairn.run.directory import RunDirectory
from cairn.run.errors import CairnError
from cairn.run.signals import REPEAT_SECONDS, on_stop_signals, say, stop_signals_blocked

RAY_SETTINGS = {
    # Under `uv run` Ray would zip the working directory and run the workers in a copy of it.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    # Its memory monitor kills the trainer when somebody else fills the machine.
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray would give training less of the processor than everything else that runs.
    "RAY_worker_niceness": "0",
}
"""What Ray reads when it is imported, by whichever module of a role that is."""

LOCAL_RAY_SETTINGS = {
    # Named after the systems where it is the default: a cluster of this machine alone, on the loopback.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
"""And where it starts a cluster of its own; else that would listen on every network of the machine."""


def _ray_token() -> dict[str, str]:
    """A token of its own for one cluster, whose processes get it in their environment.

    Ray would write one for all clusters to a file in the home folder, which others may be able to read.
    """
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


class RoleFailed(CairnError):
    """A role of the run died; the message shows the end of its log."""


class RayFailed(RoleFailed):
    """The trainer's Ray cluster broke down; another start may well succeed."""


def start_role(
    role: str, output_dir: Path, log: Path, *, local_ray: bool, standby: bool = False
) -> subprocess.Popen:
    """Start `role` of the run in `output_dir`, in a session of its own; its output goes to `log`.

    Stop signals are blocked in it until it is ready to heed them (`stop_on_signals`).

    Args:
        local_ray: a Ray cluster that it starts is for this machine alone.
        standby: it does not begin before a line comes to its standard input.
    """
    environment = {**RAY_SETTINGS, **(LOCAL_RAY_SETTINGS if local_ray else {}), **os.environ}
    if local_ray:
        environment |= _ray_token()
    log.parent.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-m", "cairn.launch.roles", role, str(output_dir), str(os.getpid())]
    with open(log, "ab") as out, stop_signals_blocked():
        return subprocess.Popen(
            [*argv, "standby"] if standby else argv,
            stdin=subprocess.PIPE if standby else subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )


def kill_session(session: int, seconds: float = 10) -> None:
    """Kill every process of a session, and wait until they are gone; they can't do any more harm then."""
    deadline = time.monotonic() + seconds
    while (pids := _session_members(session)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _session_members(session: int) -> list[int]:
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # After the name in brackets: state, parent, process group, session.
                state, _, _, sid = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(sid) == session and state != "Z":
                    members.append(int(entry.name))
    return members


def log_end(log: Path, lines: int = 15) -> str:
    """What a log says last, for an error message: from its last error on, if that is not far up."""
    try:
        end = log.read_text(errors="replace").splitlines()[-lines:]
    except OSError as error:
        return f"(no log: {error.strerror})"
    errors = [i for i, line in enumerate(end) if line.startswith("error: ")]
    return "\n".join(end[errors[-1] :] if errors else end)


@contextlib.contextmanager
def stop_on_signals(run: RunDirectory, at_once: Callable[[], None] | None = None) -> Iterator[None]:
    """On SIGINT, SIGTERM or SIGHUP ask the run to save and stop; on a second request call `at_once`.

    A role leaves it to its launcher to end at once.
    """

    def stop(name: str) -> None:
        hint = f"; the same again, after {REPEAT_SECONDS:g} s, stops at once" if at_once else ""
        run.request_stop(name)
        say(f"{name}: stopping at the next step boundary{hint}")

    with on_stop_signals(stop, at_once):
        yield
