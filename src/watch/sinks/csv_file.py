"""A CSV file of all metrics: one row per step, columns that grow."""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cairn.config.sinks import CsvConfig
from cairn.run.files import make_folders, write_atomic
from cairn.run.jsonlines import Row
from cairn.watch.sinks.sink import Sink, SinkRun, problem_of_folder

NAME = "metrics.csv"
FORMULAS = ("=", "+", "-", "@", "\t", "\r")
"""Begin texts that a spreadsheet would compute; such a text gets a quote in front."""


class CsvFile(Sink):
    """Writes the file anew when it begins and when a metric is new; otherwise it appends rows.

    The column `step` comes first, others in the order in which they came up. A metric that a row lacks is an
    empty cell.
    """

    whole = True

    def __init__(self, config: CsvConfig):
        self.config = config
        self._columns: dict[str, None] = {"step": None}
        self._rows: list[Row] = []

    def _path(self, run: Path) -> Path:
        return Path(self.config.file) if self.config.file else run / NAME

    def problems(self, run: Path) -> Iterator[str]:
        path = self._path(run)
        problem = problem_of_folder(path.parent, "--sinks.csv.file: the folder")
        if problem is None and path.exists() and not path.is_file():
            problem = f"--sinks.csv.file {path}: is no file"
        yield from [problem] if problem else []

    def begin(self, run: SinkRun, after: int) -> None:
        self._file = self._path(run.path)
        make_folders(self._file.parent)
        self._write_anew()

    def rows(self, rows: Sequence[Row]) -> None:
        self._rows += rows
        new = dict.fromkeys(name for row in rows for name in row if name not in self._columns)
        self._columns |= new
        if new or not self._file.exists():
            self._write_anew()
            return
        with open(self._file, "a", encoding="utf-8", newline="") as file:
            file.write(self._lines(rows))

    def _write_anew(self) -> None:
        head = io.StringIO()
        csv.writer(head, lineterminator="\n").writerow(map(_cell, self._columns))
        write_atomic(self._file, (head.getvalue() + self._lines(self._rows)).encode(errors="replace"))

    def _lines(self, rows: Sequence[Mapping[str, Any]]) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerows([_cell(row.get(name)) for name in self._columns] for row in rows)
        return text.getvalue()


def _cell(value: Any) -> Any:
    """A number as it is; text so that a spreadsheet shows it and computes nothing."""
    if value is None or isinstance(value, int | float):
        return value
    text = str(value)
    return f"'{text}" if text.startswith(FORMULAS) else text
