"""The work beside a run, by its settings: exports and uploads of its steps."""

import contextlib
from collections.abc import Generator

from cairn.config.kinds import RunConfig
from cairn.launch.jobs.export import exports_of
from cairn.launch.jobs.exporter import ExporterPlace
from cairn.launch.jobs.job import BackgroundPlace, Beside
from cairn.launch.jobs.upload import uploads_of
from cairn.launch.jobs.uploader import UploaderPlace
from cairn.run.attempt import Attempt
from cairn.run.directory import RunDirectory


@contextlib.contextmanager
def work_beside(run: RunDirectory, config: RunConfig, attempt: Attempt) -> Generator[Beside]:
    """All of it, at work as long as the block lasts."""
    places: list[BackgroundPlace] = []
    beside = Beside(config, places)
    try:
        if (uploads := uploads_of(config)) is not None:
            places.append(UploaderPlace(run, config, uploads))
        if (made := exports_of(config, attempt.id)) is not None:
            places.append(ExporterPlace(run, config, made))
        yield beside
    finally:
        beside.stop()
