"""Processes: to die with another one, to run where nobody else wants to, and to end, orderly or by force."""

import contextlib
import ctypes
import os
import re
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, TypeVar

from cairn.run.directory import RunDirectory
from cairn.run.output import message_of
from cairn.run.signals import REPEAT_SECONDS, on_stop_signals, say

T = TypeVar("T")

KEEPER = Path(__file__).with_name("keeper.py")
OPEN_FILES = 1 << 16
"""Most open files that a process asks the system for."""

PR_SET_PDEATHSIG = 1
IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
"""Number of the system call ioprio_set, which the C library has no function for, by machine."""
IOPRIO_WHO_PROCESS = 1
IOPRIO_IDLE = 3 << 13
HIGHEST = 19
"""The highest niceness."""
AUTOGROUP_SECONDS = 1.0
"""How long a change is tried that the kernel refuses because another one came just before."""


def die_with(parent: int) -> None:
    """Have the kernel kill this process as soon as its parent, the process `parent`, dies (Linux).

    However the parent dies, and even while this process is stopped: what an orphan does later could harm the
    processes that have taken over.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was too late
        os.kill(os.getpid(), signal.SIGKILL)


def die_after(process: int) -> None:
    """Have this process killed as soon as `process`, any other one of this machine, has died (Linux 5.3)."""
    try:
        fd = os.pidfd_open(process)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return
    except OSError:  # the system can't
        return

    died = select.poll()  # `select` takes no descriptor above 1023
    died.register(fd, select.POLLIN)

    def watch() -> None:
        died.poll()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="lifetime", daemon=True).start()


def keeper_command(pipe: int, command: Sequence[str], *, on_term: Literal["kill", "pass"]) -> list[str]:
    """The command line that runs `command` so that it leaves nothing behind (`keeper.py`).

    Args:
        pipe: descriptor of the pipe whose other end the owner holds; 0: it is the standard input.
        on_term: whether SIGTERM kills what there is, or is passed on to the command.
    """
    return [sys.executable, "-I", "-S", str(KEEPER), str(pipe), on_term, *command]


def kill_all(members: Callable[[], Iterable[int]], seconds: float) -> None:
    """Kill processes with SIGKILL, again and again until `members` finds none; for at most `seconds`."""
    end = time.monotonic() + seconds
    while (found := list(members())) and time.monotonic() < end:
        for one in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        time.sleep(0.01)


def kill_process(process: int, seconds: float) -> None:
    """Kill a process with SIGKILL, and wait at most `seconds` until it has ended and released what it had."""
    kill_all(lambda: [] if _is_zombie(process) else [process], seconds)


def kill_descent(process: int, seconds: float = 10.0) -> None:
    """Kill a process and all that descend from it with SIGKILL, also those that are stopped.

    The descendants come first, again and again until there are none: the process may be the subreaper that
    orphans of theirs come to, which would be lost with it. Waits at most `seconds` for them.
    """
    kill_all(lambda: _descendants(process), seconds)
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def _descendants(process: int) -> list[int]:
    """The processes that descend from one and still run."""
    found: list[int] = []
    for thread in _threads(process):
        with contextlib.suppress(OSError):
            for child in Path(f"/proc/{process}/task/{thread}/children").read_text().split():
                found += [int(child), *_descendants(int(child))]
    return [one for one in found if not _is_zombie(one)]


def _is_zombie(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def allow_open_files() -> None:
    """Let this process, and those that it starts, have as many open files as the system allows.

    At most `OPEN_FILES`. The soft limit is often 1024: too few for hundreds of rollouts that have processes
    and connections of their own.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def in_background(work: Callable[[], T]) -> T:
    """Do `work` in a thread that Linux schedules at idle priority (SCHED_IDLE).

    The thread is a new one, because a thread can't raise its priority again without privileges. Returns what
    `work` returns and raises what it raises.
    """

    def lower_priority() -> None:
        with contextlib.suppress(AttributeError, OSError):  # then at normal priority
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))

    with ThreadPoolExecutor(1, "background", initializer=lower_priority) as thread:
        return thread.submit(work).result()


def put_in_background(process: int) -> None:
    """Have a process, which leads a session of its own, leave processors and disks to all other processes.

    The niceness is the highest, not the idle class: on a machine without an idle moment the process would
    never come on. Where Linux shares processors out between sessions first (autogroups), the niceness counts
    only within the session, so the session gets the smallest share, too. Disks serve the process when nobody
    else wants them, where their scheduler knows of that. Threads that start later inherit all of it.
    """
    _set_share(process, HIGHEST)
    _set_threads(process, HIGHEST, os.SCHED_BATCH, IOPRIO_IDLE)  # waking up, SCHED_BATCH interrupts nobody


def bring_forward(process: int) -> bool:
    """Undo what `put_in_background` did; returns whether the process now is as one that has just started.

    Otherwise its niceness is still high: to lower that takes a privilege (CAP_SYS_NICE, or RLIMIT_NICE). The
    share of its session and its turn at disks are restored in any case.
    """
    _set_share(process, 0)
    return _set_threads(process, os.getpriority(os.PRIO_PROCESS, 0), os.SCHED_OTHER, 0)


def processor_times(process: int) -> dict[int, tuple[int, int]]:
    """Nanoseconds that each thread of a process has had a processor, and has waited for one.

    Empty if the process has ended, or the system doesn't tell.
    """
    times: dict[int, tuple[int, int]] = {}
    for thread in _threads(process):
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{thread}/schedstat") as file:
            had, waited, _ = map(int, file.read().split())
            times[thread] = had, waited
    return times


def _set_threads(process: int, niceness: int, policy: int, disk_class: int) -> bool:
    """Set the priorities of all threads of a process; False if the niceness of one can't be lowered."""
    libc = ctypes.CDLL(None, use_errno=True)
    done: set[int] = set()
    allowed = True
    while new := _threads(process) - done:  # then those that the others have started meanwhile
        for thread in new:
            libc.syscall(IOPRIO_SET.get(os.uname().machine, -1), IOPRIO_WHO_PROCESS, thread, disk_class)
            with contextlib.suppress(AttributeError, OSError):
                os.sched_setscheduler(thread, policy, os.sched_param(0))
            try:
                os.setpriority(os.PRIO_PROCESS, thread, niceness)
            except PermissionError:
                allowed = False
            except OSError:  # it has ended
                continue
        done |= new
    return allowed


def _threads(process: int) -> set[int]:
    """The threads of a process; none if it has ended."""
    with contextlib.suppress(OSError):
        return {int(name) for name in os.listdir(f"/proc/{process}/task")}
    return set()


def _set_share(process: int, niceness: int) -> None:
    """Set the niceness of a process's session among sessions, where Linux has autogroups."""
    end = time.monotonic() + AUTOGROUP_SECONDS
    while True:
        last = time.monotonic() > end  # before the try, as this process may be stopped after it
        try:
            if os.getsid(process) == process:  # else it would be somebody else's session
                with open(f"/proc/{process}/autogroup", "w") as file:
                    file.write(str(niceness))
            return
        except BlockingIOError:  # without privileges the kernel allows one such change in 0.1 s
            if last:
                return
            time.sleep(0.02)
        except OSError:  # it has none, or they are switched off, or the process has ended
            return


# How much of the processors a process gets of what it asks for.


WINDOW_SECONDS = 2.0
"""The time that a judgement is made of, at least."""
STARVED = 10
"""Who waits for a processor so many times as long as it has one starves; own threads cause less."""
NOTICED = 0.1
"""Who waits for less than this share of the time has hardly asked for a processor, and does not starve."""


class ProcessorUse:
    """Follows how long the threads of a process have processors, and how long they wait for them."""

    def __init__(self, process: int):
        self.process = process
        self._begin()

    def starves(self) -> bool:
        """Whether the process has starved since the last judgement; call it every second or so."""
        seconds = time.monotonic() - self._since
        if seconds < WINDOW_SECONDS:
            return False
        times = self._times_since()
        self._begin()
        had, waited = (sum(spent[i] for spent in times) for i in (0, 1))
        return waited > max(STARVED * had, NOTICED * seconds * 1e9)

    def longest_wait(self) -> float:
        """Seconds that one thread, the one with most of them, has waited for a processor."""
        return max((waited for _, waited in self._times_since()), default=0) / 1e9

    def _begin(self) -> None:
        self._since = time.monotonic()
        self._before = processor_times(self.process)

    def _times_since(self) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for thread, (had, waited) in processor_times(self.process).items():
            had_before, waited_before = self._before.get(thread, (0, 0))
            found.append((had - had_before, waited - waited_before))
        return found


# Ending processes, orderly or by force, and quoting their logs.


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
        end = [message_of(line) for line in _tail(log).splitlines()[-lines:]]
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
    later: float = 0.0,
) -> Generator[None]:
    """On SIGINT, SIGTERM or SIGHUP, ask the run to save and stop; on a second signal call `at_once`.

    Roles pass nothing but the run: their launcher stops them.

    Args:
        seconds: time that is left after SIGTERM, the signal of schedulers.
        tell: prints a line, called from the signal handler.
        later: ask so many seconds after the signal, if this process still lives: for processes that others
            end by a signal, and a kill soon afterwards, when no stop is meant.
    """
    waiting = contextlib.ExitStack()

    def ask(name: str) -> None:
        hint = f"; the same again, after {REPEAT_SECONDS:g} s, stops at once" if at_once else ""
        run.request_stop(name, seconds if name == signal.SIGTERM.name else None)
        tell(f"{name}: stopping at the next step boundary{hint}")

    def ask_later(name: str) -> None:
        timer = threading.Timer(later, ask, (name,))
        timer.start()
        waiting.callback(timer.join)

    with waiting, on_stop_signals(ask_later if later else ask, at_once):
        yield
