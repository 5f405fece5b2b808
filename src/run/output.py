"""What a process prints: its log, text from files, its progress; and a terminal that may be closed."""

import collections
import contextlib
import datetime
import errno
import faulthandler
import gc
import io
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import CodeType, TracebackType
from typing import TYPE_CHECKING, Any, Literal

from cairn.run.errors import UsageError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

LONGEST_TEXT = 4000
"""Characters of a text from outside that are kept where it is quoted."""
UNWRITABLE = re.compile("[\ud800-\udfff\x00]")
"""Half a surrogate pair, which no UTF-8 can hold, and NUL, at which SQLite and C end a text."""
COLORS = re.compile(r"\x1b\[[0-9;]*m")


LOGGED_AGAIN = (10, 100, 1_000, 10_000, 100_000)
"""The times for which a message that was logged before is logged again, with their number."""
MOST_KINDS = 1000
"""Messages and tracebacks that are told from others; further ones are all logged."""
LogFormat = Literal["text", "json"]


def start_logging(form: LogFormat = "text", role: str = "") -> None:
    """Log this process's messages to standard error, each thing once.

    form: text, one line a message, with the time; or json, one object a line, with time, level, role and
    message: so is also what is printed. What other programs and C libraries write stays as it is.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # what user code prints must not raise
    if form == "json":
        sys.stdout, sys.stderr = _JsonStream(1, role), _JsonStream(2, role)
        handler = logging.StreamHandler(os.fdopen(os.dup(2), "w", errors="backslashreplace"))
        handler.setFormatter(_JsonLine(role))
    else:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handler.addFilter(OnlyOnce())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for chatty in ("httpx", "datasets", "filelock"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


class OnlyOnce(logging.Filter):
    """Logs each warning, and each traceback, in full the first time, and then only how often it came.

    Tracebacks of one kind of exception that lead to the same place are the same: the message is then logged
    without. Messages are the same if they read the same: they are then logged now and then (`LOGGED_AGAIN`).
    """

    def __init__(self) -> None:
        super().__init__()
        self._times: collections.Counter[object] = collections.Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is logged."""
        if record.levelno < logging.WARNING:
            return True
        try:
            text = record.getMessage()
        except Exception:  # arguments that don't fit; the handler tells of that
            return True
        if record.exc_info and record.exc_info[0] is not None:
            kind, error, trace = record.exc_info
            if self._count((kind, *((code, line) for code, line in _places(trace)))) == 1:
                return True
            record.exc_info = record.exc_text = None
            text = f"{text}: {kind.__name__}: {quoted(error)} (its traceback is above)"
        times = self._count((record.name, record.levelno, text))
        again = "" if times == 1 else f" (for the {times}th time)"
        record.msg, record.args = f"{text}{again}", None
        return times == 1 or times in LOGGED_AGAIN

    def _count(self, what: object) -> int:
        """How often it came, this time included; 1 for what is not told from others any more."""
        if what not in self._times and len(self._times) >= MOST_KINDS:
            return 1
        self._times[what] += 1
        return self._times[what]


def _places(trace: TracebackType | None) -> Iterator[tuple[CodeType, int]]:
    while trace is not None:
        yield trace.tb_frame.f_code, trace.tb_lineno
        trace = trace.tb_next


def json_line(level: str, role: str, message: str, moment: float) -> str:
    """A line of a log in JSON, without its end. `moment`: in seconds since 1970."""
    stamp = datetime.datetime.fromtimestamp(moment).astimezone().isoformat(timespec="milliseconds")
    return json.dumps({"time": stamp, "level": level, "role": role, "message": message})


class _JsonLine(logging.Formatter):
    """A message as a JSON object; a traceback is part of it."""

    def __init__(self, role: str):
        super().__init__("%(name)s: %(message)s")
        self.role = role

    def format(self, record: logging.LogRecord) -> str:
        return json_line(record.levelname, self.role, super().format(record), record.created)


class _JsonStream(io.TextIOBase):
    """What is printed, a JSON object for each line, with the level OUTPUT."""

    def __init__(self, fd: int, role: str):
        super().__init__()
        self._fd = fd
        self._role = role
        self._begun = ""
        """A line that has not ended."""
        self._lock = threading.RLock()

    def write(self, text: str, /) -> int:
        with self._lock:
            *lines, self._begun = (self._begun + text).split("\n")
            whole = "".join(
                json_line("OUTPUT", self._role, line, time.time()) + "\n" for line in lines if line.strip()
            )
        data = memoryview(whole.encode())
        while data:
            data = data[os.write(self._fd, data) :]
        return len(text)

    def flush(self) -> None:
        """Lines are written when they end."""

    def close(self) -> None:
        """Write a last line that has not ended; the file stays open."""
        with self._lock:
            if self._begun:
                self.write("\n")

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride] # the base's is a variable
        return "utf-8"


def message_of(line: str) -> str:
    """The message of a line of a log: of one of JSON, what it says."""
    if not line.startswith("{"):
        return line
    try:
        found = json.loads(line)
        return f"{found['message']}" if {"level", "role"} <= found.keys() else line
    except (ValueError, KeyError, AttributeError, TypeError):
        return line


STACKS = signal.SIGUSR2
"""The signal on which a role writes the stacks of its threads into its log, even while the GIL is held."""


def log_crashes() -> None:
    """Have the stacks of all threads in the log when this process crashes, and on `STACKS`."""
    faulthandler.enable()
    faulthandler.register(STACKS)


def log_to(log: Path) -> None:
    """Redirect this process's standard output and error to the end of a file, crashes included."""
    log.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    log_crashes()


def writable(text: str) -> str:
    """`text` with U+FFFD for what no database or file of UTF-8 can hold; see `UNWRITABLE`."""
    return UNWRITABLE.sub("\ufffd", text)


def quoted(value: object, most: int = LONGEST_TEXT) -> str:
    """Text from outside, such as an exception's message: writable, and without its middle if it is long."""
    try:
        text = value if isinstance(value, str) else str(value)
    except BaseException as error:  # of the user's own class
        text = f"(its text can't be had: {type(error).__name__})"
    if len(text) > most:
        tail = most // 4
        left_out = f" [... {len(text) - most} characters left out ...] "
        text = text[: most - tail] + left_out + text[-tail:]
    return writable(text)


def printable(text: object) -> str:
    """`text` for a terminal, which what stands in a file must not steer: control characters as escapes.

    Line feeds and tabs stay; colours, which logs are full of, are left out.
    """
    clean = COLORS.sub("", str(text))
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in clean
    )


def counted(number: int, what: str) -> str:
    """A number of things in words."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """A length of time for people, in its two largest units: `42 s`, `12 min`, `3 h 20 min`, `2 d 4 h`."""
    whole = max(round(seconds), 0)
    if whole < 120:
        return f"{whole} s"
    minutes = whole // 60
    if minutes < 120:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h"


class _Terminal(io.FileIO):
    """A terminal; what is written to it once it is gone is lost, which is no error."""

    def write(self, data: "ReadableBuffer", /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return memoryview(data).nbytes


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


# Importing large packages.


SOON = 2.0
"""Seconds after which a command that has printed nothing says what it does."""


@contextlib.contextmanager
def saying(what: str) -> Generator[None]:
    """If this takes longer than `SOON`, print `what` to standard error, so that the screen is not empty."""
    timer = threading.Timer(SOON, lambda: print(f"{what} ...", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def importing() -> Generator[None]:
    """Within it modules are imported without garbage collection; what they created is never traversed again.

    Imports of torch and transformers create about a million objects that live as long as the process. The
    cyclic garbage collector traverses them several times meanwhile, which takes a sixth of the imports'
    processor time, and in every full collection afterwards.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


# How far a long copy or conversion has come: bars on a terminal, and plain lines elsewhere.


Stage = Callable[[str, int], Callable[[int], None]]
"""Begins a stage of so many bytes; returns a function to call with how many more are done, by any thread."""
FIRST_LINE = 2.0
"""Seconds; a stage that takes less prints no plain lines."""
EACH_LINE = 10.0
"""Seconds between two plain lines of a stage."""


def no_progress(stage: str, total: int) -> Callable[[int], None]:
    """A `Stage` that shows nothing."""
    return lambda count: None


@contextlib.contextmanager
def progress_bars() -> Generator[Stage]:
    """A `Stage` that shows name, bytes and rate of each stage on standard error."""
    if not sys.stderr.isatty():
        yield lines(lambda line: print(line, file=sys.stderr, flush=True))
        return
    # rich takes a while to import.
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:

        def begin(stage: str, total: int) -> Callable[[int], None]:
            task = progress.add_task(escape(printable(stage)), total=total)
            return lambda count: progress.advance(task, count)

        yield begin


def lines(say: Callable[[str], None], first: float = FIRST_LINE, every: float = EACH_LINE) -> Stage:
    """A `Stage` that says how far it is, in lines; a stage that said anything also says when it is done.

    Args:
        first: seconds from the begin of a stage until its first line.
        every: seconds between two lines of a stage.
    """

    def begin(stage: str, total: int) -> Callable[[int], None]:
        began = time.monotonic()
        due = began + first
        done = 0
        ended = False
        several = threading.Lock()

        def advance(count: int) -> None:
            nonlocal due, done, ended
            with several:
                done += count
                now = time.monotonic()
                ends = done >= total and now >= began + first
                if ended or (now < due and not ends):
                    return
                due, ended = now + every, ends
                say(f"{printable(stage)}: {in_words(done, total, now - began)}")

        return advance

    return begin


def in_words(done: int, total: int, seconds: float) -> str:
    """How far a stage is that has taken so many seconds, such as `1.2 of 5.0 GB, 310 MB/s`."""
    unit, name = next(((u, n) for u, n in ((1e9, "GB"), (1e6, "MB")) if total >= u), (1e3, "kB"))
    return f"{done / unit:.1f} of {total / unit:.1f} {name}, {done / 1e6 / max(seconds, 1e-3):.0f} MB/s"


def pyplot() -> Any:
    """matplotlib's pyplot, which draws into files.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise UsageError(
            "--png: the package matplotlib is not installed; the extra cairn[dash] brings it"
        ) from None

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
