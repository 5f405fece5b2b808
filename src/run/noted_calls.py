"""Calls of user code that are in progress, on record outside the process that makes them.

The record is a file that is mapped into memory: to note a call costs about a microsecond, and what is written
stays, however the process ends. After a crash or a hang, `charge` finds the call that was to blame, and
counts a failed try for it in a second file, which the next process reads. So no call can end a run by killing
the process again and again.

A call is noted while it is in progress (`in_progress`), perhaps waiting for a server. A thread is noted while
it executes code of a call (`executing`).
"""

import contextlib
import hashlib
import mmap
import os
import struct
import threading
import time
from collections.abc import Generator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from cairn.run.files import read_note, write_json
from cairn.run.output import writable

THREADS, CALLS = 512, 4096
"""How many can be noted at once; what is beyond is not noted."""
_HEAD = struct.Struct("<q")
_THREAD = struct.Struct("<QQQ")
"""Python's identifier of the thread, the kernel's, and the number of the call + 1; 0: no call."""
_CALL = struct.Struct("<d16s16s216s")
"""When it began (seconds since 1970; 0: there is none), digests of what it is and of what it is about, and
its description."""
_THREADS_AT, _CALLS_AT = 64, 64 + THREADS * 24
_SIZE = _CALLS_AT + CALLS * _CALL.size
_NONE = bytes(_CALL.size)
UNSURE_TRIES = 4
"""Deaths by a signal that may have come from outside (SIGKILL), or that nobody saw, while one call was at
work after which that call counts as failed; with more tries configured, these."""


@dataclass(frozen=True)
class UserCall:
    """A call of user code, or one try of a rollout.

    key: the same whenever the same call is made again, also by another process. about: what several calls
    have in common, such as an environment's method and the problem. text: in words, for messages.
    """

    key: str
    about: str
    text: str


@dataclass(frozen=True)
class Charge:
    """How often the process died while a call was to blame, and how it died the last time.

    sure: of these, how often it was the process itself that failed (a crash, a hang, an exit).
    """

    count: int = 0
    sure: int = 0
    how: str = ""


@dataclass
class Charges:
    """All charges; `deadly` has what calls were about that have used up their tries."""

    owner: str = ""
    attempt: str = ""
    calls: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    deadly: list[str] = field(default_factory=list[str])


@dataclass(frozen=True)
class RunningCall:
    """A call in progress, as another process reads it. threads: identifiers of those that execute its code:
    Python's and the kernel's."""

    key: str
    about: str
    text: str
    since: float
    threads: list[tuple[int, int]]


class _Record:
    """This process's own record."""

    def __init__(self, path: Path):
        path.unlink(missing_ok=True)  # a process that still dies may have it mapped
        with open(path, "w+b") as file:
            os.posix_fallocate(file.fileno(), 0, _SIZE)  # else a full disk would mean SIGBUS later
            self._map = mmap.mmap(file.fileno(), _SIZE)
        self.pid = os.getpid()
        _HEAD.pack_into(self._map, 0, self.pid)
        self._lock = threading.Lock()
        self._free_calls = list(range(CALLS - 1, -1, -1))
        self._free_threads = list(range(THREADS - 1, -1, -1))
        self._own = threading.local()
        self.open: dict[int, tuple[float, str]] = {}
        """When each call in progress began (`time.monotonic`), and its description."""

    def begin(self, call: UserCall) -> int | None:
        """Note a call; returns its number."""
        with self._lock:
            if not self._free_calls:
                return None
            number = self._free_calls.pop()
        text = writable(call.text).encode()[:216]
        at, key, about = _CALLS_AT + number * _CALL.size, _digest(call.key), _digest(call.about)
        _CALL.pack_into(self._map, at, time.time(), key, about, text)
        self.open[number] = time.monotonic(), call.text
        return number

    def end(self, number: int) -> None:
        """Forget a call."""
        at = _CALLS_AT + number * _CALL.size
        self._map[at : at + _CALL.size] = _NONE
        self.open.pop(number, None)
        with self._lock:
            self._free_calls.append(number)

    def mark(self, number: int) -> int:
        """Note that this thread executes code of a call, or of none (0); returns what it did before."""
        slot = getattr(self._own, "slot", None)
        if slot is None:
            slot = self._own.slot = _Slot(self)
        before, slot.call = slot.call, number
        if slot.at is not None:
            _THREAD.pack_into(self._map, slot.at, slot.ident, slot.native, number)
        return before

    def take_thread(self) -> int | None:
        """Where a thread is noted; None if there are too many."""
        with self._lock:
            return _THREADS_AT + self._free_threads.pop() * _THREAD.size if self._free_threads else None

    def leave_thread(self, at: int) -> None:
        """The opposite of `take_thread`."""
        if os.getpid() == self.pid:
            self._map[at : at + _THREAD.size] = bytes(_THREAD.size)
            with self._lock:
                self._free_threads.append((at - _THREADS_AT) // _THREAD.size)


class _Slot:
    """A thread's own place in the record, which is free again when the thread has ended."""

    def __init__(self, record: _Record):
        self.ident, self.native, self.call = threading.get_ident(), threading.get_native_id(), 0
        self._record = record
        self.at = record.take_thread()

    def __del__(self) -> None:
        if self.at is not None:
            self._record.leave_thread(self.at)


_record: _Record | None = None
_charges = Charges()
_charges_path: Path | None = None
_current: ContextVar[int | None] = ContextVar("call in progress", default=None)


def start(path: Path, owner: str, attempt: str = "") -> None:
    """From now on note this process's calls in `path`; charge those that a process left there that died.

    Args:
        owner: the run; charges of another one are forgotten.
        attempt: of the run; in a new one, each call has one more try, as the user may have mended the code.
    """
    global _record, _charges, _charges_path
    path.parent.mkdir(parents=True, exist_ok=True)
    charge(path, None, "ended, and nobody saw how,", sure=False)
    _charges, _charges_path = _read_charges(path), _charges_of(path)
    if _charges.owner != owner:
        _charges = Charges(owner)
    if _charges.attempt != attempt:
        _charges.attempt = attempt
        for key, found in _charges.calls.items():
            one = Charge(**found)
            _charges.calls[key] = vars(Charge(max(0, one.count - 1), max(0, one.sure - 1), one.how))
    write_json(_charges_path, vars(_charges))
    with contextlib.suppress(OSError):  # a full disk is for others to report
        _record = _Record(path)


def stop(path: Path) -> None:
    """The process ends in order, or by its owner's hand: no call in `path` is to blame."""
    path.unlink(missing_ok=True)


@contextlib.contextmanager
def in_progress(call: UserCall | None) -> Generator[None]:
    """Note a call until the block ends. What is executed for it meanwhile (`executing`) counts as its code,
    in tasks and threads that have this one's context, too."""
    record = _record
    number = None if record is None or call is None else record.begin(call)
    if record is None or number is None:
        yield
        return
    token = _current.set(number)
    try:
        yield
    finally:
        _current.reset(token)
        record.end(number)


def current() -> int | None:
    """The number of the call in progress, in this context."""
    return _current.get()


class executing:
    """Note that this thread executes code of a call: of the one with that number, or of this context's.

    A child that user code has forked ends here: what follows is the parent's.
    """

    __slots__ = ("_before", "_number", "_record")

    def __init__(self, number: int | None = None):
        self._record = _record
        self._number = _current.get() if number is None else number

    def __enter__(self) -> None:
        if self._record is not None:
            self._before = self._record.mark(0 if self._number is None else self._number + 1)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._record is None:
            return
        if os.getpid() != self._record.pid:
            code = getattr(error, "code", None) if isinstance(error, SystemExit) else int(error is not None)
            os._exit(code if isinstance(code, int) else int(code is not None))
        self._record.mark(self._before)


def oldest() -> tuple[str, float] | None:
    """The description of the call that has been in progress for longest, and for how many seconds."""
    calls = [] if _record is None else list(_record.open.values())
    since, text = min(calls, default=(0.0, ""))
    return (text, time.monotonic() - since) if text else None


def failed_for_good(call: UserCall, tries: int) -> Charge | None:
    """What a call is charged with, if that is so much that it is not made again.

    Args:
        tries: of each call. A call has only one if another one about the same has used up its own.
    """
    found = charged(call)
    most = 1 if _hex(call.about) in _charges.deadly else tries
    unsure = max(most, UNSURE_TRIES)
    return found if found.sure >= most or found.count >= unsure else None


def charged(call: UserCall) -> Charge:
    """What a call is charged with."""
    return Charge(**_charges.calls.get(_hex(call.key), {}))


def use_up(call: UserCall) -> None:
    """Note that a call has used up its tries by killing the process: others about the same get only one."""
    about = _hex(call.about)
    if _charges_path is not None and about not in _charges.deadly:
        _charges.deadly.append(about)
        write_json(_charges_path, vars(_charges))


def charge(
    path: Path, pid: int | None, how: str, *, sure: bool, suspects: Sequence[int] = ()
) -> list[RunningCall]:
    """Charge the calls to blame for a process's death with a failed try; the record is removed.

    If it is known which threads are to blame, that is the calls which these executed; else all that were
    executed. If there were none and it is sure that the process failed by itself, a thread of the user's own
    may be to blame: then all calls in progress. Where some of them are charged already, only these: such
    calls are made one at a time. The others get away with one lost try.

    Args:
        pid: the process, or None: any.
        how: how it died, in words that follow "the process".
        sure: it failed by itself, rather than by somebody who killed it.
        suspects: identifiers of threads that are to blame, Python's or the kernel's.
    """
    calls = read(path, pid)
    path.unlink(missing_ok=True)
    guilty = [call for call in calls if any(set(pair) & set(suspects) for pair in call.threads)]
    guilty = guilty or [call for call in calls if call.threads]
    guilty = guilty or (calls if sure else [])
    if not guilty:
        return []
    charges = _read_charges(path)
    guilty = [call for call in guilty if call.key in charges.calls] or guilty
    for call in guilty:
        before = Charge(**charges.calls.get(call.key, {}))
        charges.calls[call.key] = vars(Charge(before.count + 1, before.sure + sure, how))
    write_json(_charges_of(path), vars(charges))
    return guilty


def read(path: Path, pid: int | None = None) -> list[RunningCall]:
    """The calls in progress that a process has noted, oldest first; None: any process."""
    try:
        content = path.read_bytes()
    except OSError:
        return []
    if len(content) < _SIZE or pid not in (None, _HEAD.unpack_from(content)[0]):
        return []
    threads: dict[int, list[tuple[int, int]]] = {}
    for at in range(_THREADS_AT, _CALLS_AT, _THREAD.size):
        ident, native, number = _THREAD.unpack_from(content, at)
        if number:
            threads.setdefault(number - 1, []).append((ident, native))
    found: list[RunningCall] = []
    for number in range(CALLS):
        since, key, about, text = _CALL.unpack_from(content, _CALLS_AT + number * _CALL.size)
        if since:
            words = text.rstrip(b"\0").decode(errors="ignore")
            found.append(RunningCall(key.hex(), about.hex(), words, since, threads.get(number, [])))
    return sorted(found, key=lambda call: call.since)


def _read_charges(path: Path) -> Charges:
    return read_note(_charges_of(path), Charges) or Charges()


def _charges_of(path: Path) -> Path:
    return path.with_suffix(".charges")


def _digest(text: str) -> bytes:
    return hashlib.blake2b(writable(text).encode(), digest_size=16).digest()


def _hex(text: str) -> str:
    return _digest(text).hex()
