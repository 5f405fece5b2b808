"""Trackio: metrics of each step to a local tracker, if its package is installed."""

import importlib
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cairn.config.sinks import TrackioConfig
from cairn.run.errors import UsageError
from cairn.run.jsonlines import Row
from cairn.watch.sinks.sink import Sink, SinkRun, numbers

PACKAGE = "trackio"


class Trackio(Sink):
    """A resumed run goes on with the same run of Trackio's.

    Trackio keeps what it has: steps that are made again are there a second time.
    """

    def __init__(self, config: TrackioConfig):
        self.config = config
        self._run: Any = None

    def problems(self, run: Path) -> Iterator[str]:
        """Nothing that may change.

        Raises:
            UsageError: the package is missing.
        """
        if importlib.util.find_spec(PACKAGE) is None:
            raise UsageError(
                f"--sinks.trackio: the package {PACKAGE} is not installed: `uv pip install {PACKAGE}` "
                "installs it beside Cairn, or leave out the section [sinks.trackio]"
            )
        yield from ()

    def begin(self, run: SinkRun, after: int) -> None:
        trackio = importlib.import_module(PACKAGE)
        self._run = trackio.init(
            project=self.config.project,
            name=self.config.name or f"{run.name}-{run.run_id}",
            config=dict(run.config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def rows(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._run.log(dict(numbers(row)), step=row["step"])

    def end(self) -> None:
        if self._run is not None:
            run, self._run = self._run, None
            run.finish()
