"""The checkpoints of a run, in its folder or in an object store, as far as a replay needs them."""

from pathlib import Path
from typing import Protocol, TypeVar

from cairn.checkpoint.manifest import Manifest
from cairn.checkpoint.step_folder import (
    ORCHESTRATOR_STATE,
    TRAINER_STATE,
    OrchestratorRecord,
    StepFolder,
    TrainerRecord,
)
from cairn.checkpoint.store import CheckpointStore
from cairn.remote import RemoteStore
from cairn.run.files import DamagedFile, parse_json
from cairn.run.output import Stage

Record = TypeVar("Record")


class RunSteps(Protocol):
    """The checkpoints of a run.

    Those in an object store also raise RemoteError if the store refuses or fails.
    """

    def steps(self) -> list[int]:
        """The steps that exist, oldest first."""
        ...

    def manifest(self, step: int) -> Manifest:
        """The manifest of a step.

        Raises:
            CheckpointError: the step does not exist, or its manifest is damaged.
        """
        ...

    def folder(self, step: int) -> Path:
        """The local folder of a whole step.

        Raises:
            CheckpointError: it does not exist, or is damaged where it comes from.
        """
        ...

    def trainer_state(self, step: int) -> TrainerRecord | None:
        """The trainer's record; None if the checkpoint holds weights only.

        Raises:
            DamagedFile: it is not such a record.
        """
        ...

    def orchestrator_state(self, step: int) -> OrchestratorRecord | None:
        """The orchestrator's record; None if there is none.

        Raises:
            DamagedFile: it is not such a record.
        """
        ...


class LocalSteps:
    """Those in a folder."""

    def __init__(self, store: CheckpointStore):
        self._store = store

    def steps(self) -> list[int]:
        return self._store.steps()

    def manifest(self, step: int) -> Manifest:
        return self._store.manifest(step)

    def folder(self, step: int) -> Path:
        return self._store.folder(step)

    def trainer_state(self, step: int) -> TrainerRecord | None:
        return StepFolder(self.folder(step)).trainer_state()

    def orchestrator_state(self, step: int) -> OrchestratorRecord | None:
        return StepFolder(self.folder(step)).orchestrator_state()


class DownloadedSteps:
    """Those in an object store. What is needed as a whole is downloaded, once."""

    def __init__(self, remote: RemoteStore, downloads: CheckpointStore, stage: Stage):
        """Nothing is asked yet; `downloads`: where steps are downloaded to."""
        self._remote = remote
        self._downloads = downloads
        self._stage = stage

    def steps(self) -> list[int]:
        return self._remote.steps()

    def manifest(self, step: int) -> Manifest:
        return self._remote.manifest(step)

    def folder(self, step: int) -> Path:
        if not self._downloads.exists(step):
            done = self._stage(f"downloading step {step}", self.manifest(step).nbytes)
            self._remote.fetch(step, self._downloads, on_bytes=done)
        return self._downloads.folder(step)

    def trainer_state(self, step: int) -> TrainerRecord | None:
        return self._record(step, TRAINER_STATE, TrainerRecord)

    def orchestrator_state(self, step: int) -> OrchestratorRecord | None:
        return self._record(step, ORCHESTRATOR_STATE, OrchestratorRecord)

    def _record(self, step: int, name: str, kind: type[Record]) -> Record | None:
        """A small file of a step, of which nothing else is downloaded."""
        content = self._remote.objects.get(f"step_{step}/{name}")
        try:
            return None if content is None else parse_json(content, kind)
        except ValueError:
            raise DamagedFile(f"{self._remote}/step_{step}/{name}: is damaged") from None
