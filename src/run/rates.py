"""How long this run's saves and uploads took: what the next ones may be expected to take.

A run that must end soon compares these times with those that are left. They lie in the run directory, so that
a resumed run knows them from its first step on.
"""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cairn.run.files import read_note, write_json

Work = Literal["save", "upload"]

KEPT = 5
"""As many of the newest measurements count."""


@dataclass(frozen=True)
class Span:
    """The seconds that something takes at least and at most, going by the newest measurements."""

    least: float
    most: float

    def __str__(self) -> str:
        least, most = (f"{value:.1f}".removesuffix(".0") for value in (self.least, self.most))
        return f"{least} s" if least == most else f"{least} to {most} s"


class Rates:
    """The newest measurements, by kind of work; each kind has one process that notes them."""

    def __init__(self, folder: Path):
        self.folder = folder

    def note(self, work: Work, nbytes: int, seconds: float) -> None:
        """Note that `work` on so many bytes took so long; a full disk loses the note."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(exist_ok=True)
            write_json(self._file(work), [*self._read(work), [float(nbytes), seconds]][-KEPT:])

    def expected(self, work: Work, nbytes: int) -> Span | None:
        """How long it would take for so many bytes; None if it was never measured.

        Fewer bytes than were measured count as many: part of the time does not depend on the size.
        """
        times = [seconds * max(1.0, nbytes / max(before, 1.0)) for before, seconds in self._read(work)]
        return Span(min(times), max(times)) if times else None

    def _read(self, work: Work) -> list[tuple[float, float]]:
        return read_note(self._file(work), list[tuple[float, float]]) or []

    def _file(self, work: Work) -> Path:
        return self.folder / f"{work}.json"
