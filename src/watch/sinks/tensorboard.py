"""TensorBoard event files, written without TensorBoard.

An event file is a series of records: the length of the data (8 bytes, little endian), its masked CRC-32C, the
data, and the masked CRC-32C of the data. The data is a protobuf message `Event`, of which these fields are
written (tensorflow/core/util/event.proto and framework/summary.proto):

    Event:        1 wall_time (double), 2 step (int64), 3 file_version (string), 5 summary, 7 session_log
    Summary:      1 value (repeated)
    Value:        1 tag (string), 2 simple_value (float)
    SessionLog:   1 status (1: START)
"""

import itertools
import os
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from cairn.config.sinks import TensorBoardConfig
from cairn.run.files import make_folders
from cairn.run.jsonlines import Row
from cairn.watch.sinks.sink import Sink, SinkRun, numbers, problem_of_folder

NAME = "tensorboard"
VERSION = "brain.Event:2"
"""From this version on, a START at a step makes void what earlier files have from that step on."""
START = b"\x08\x01"
VARINT, EIGHT_BYTES, MESSAGE, FOUR_BYTES = 0, 1, 2, 5
"""Protobuf's kinds of fields."""
_files = itertools.count()


class TensorBoard(Sink):
    """A scalar for each metric of each step.

    Every object writes a file of its own: one that a killed process has left may end in the middle of a
    record, and nothing can come after that. It begins with the START of a session, so that TensorBoard
    forgets the later steps that earlier files have.
    """

    def __init__(self, config: TensorBoardConfig):
        self.config = config
        self._file: int | None = None

    def _folder(self, run: Path) -> Path:
        return Path(self.config.dir) if self.config.dir else run / NAME

    def problems(self, run: Path) -> Iterator[str]:
        problem = problem_of_folder(self._folder(run), "--sinks.tensorboard.dir")
        yield from [problem] if problem else []

    def begin(self, run: SinkRun, after: int) -> None:
        folder = self._folder(run.path)
        make_folders(folder)
        # TensorBoard reads the files of a folder in the order of their names.
        now = time.time()
        name = f"events.out.tfevents.{now:017.6f}.{run.host}.{os.getpid()}.{next(_files)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        self._file = os.open(folder / name, flags, 0o644)
        self._write(record(event(now, version=VERSION)) + record(event(now, after + 1, session=START)))

    def rows(self, rows: Sequence[Row]) -> None:
        now = time.time()
        self._write(b"".join(record(event(now, row["step"], summary=summary(row))) for row in rows))

    def end(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write(self, data: bytes) -> None:
        assert self._file is not None
        view = memoryview(data)
        while view:
            view = view[os.write(self._file, view) :]


def record(data: bytes) -> bytes:
    """A record of an event file."""
    length = struct.pack("<Q", len(data))
    return length + _checksum(length) + data + _checksum(data)


def _checksum(data: bytes) -> bytes:
    """The CRC-32C in the form that TensorFlow stores."""
    from awscrt import checksums  # pyright: ignore[reportMissingTypeStubs] # it is typed in its code

    crc = checksums.crc32c(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def event(
    wall_time: float,
    step: int = 0,
    *,
    version: str | None = None,
    summary: bytes | None = None,
    session: bytes | None = None,
) -> bytes:
    """A message `Event`."""
    message = _tag(1, EIGHT_BYTES) + struct.pack("<d", wall_time) + _tag(2, VARINT) + _varint(step)
    if version is not None:
        message += _nested(3, version.encode())
    if summary is not None:
        message += _nested(5, summary)
    return message if session is None else message + _nested(7, session)


def summary(row: Row) -> bytes:
    """A message `Summary`: the metrics of a row that are numbers, as single-precision floats."""
    values = (
        _nested(1, name.encode(errors="replace")) + _tag(2, FOUR_BYTES) + _float(value)
        for name, value in numbers(row)
    )
    return b"".join(_nested(1, value) for value in values)


def _float(value: float) -> bytes:
    try:
        return struct.pack("<f", value)
    except OverflowError:  # beyond single precision
        return struct.pack("<f", float("inf") if value > 0 else float("-inf"))


def _tag(field: int, kind: int) -> bytes:
    return _varint(field << 3 | kind)


def _nested(field: int, data: bytes) -> bytes:
    return _tag(field, MESSAGE) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; negative numbers as 64 bits."""
    value &= (1 << 64) - 1
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
