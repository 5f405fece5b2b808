"""The step_N folders of a run: the rule that says which of them exist, their inner layout, and small files.

A step exists if and only if its manifest.json does. A folder without a manifest is debris and is ignored by
every reader. A symbolic link is never a step.
"""

import json
import os
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cairn.checkpoint.manifest import (
    FILE_NAME,
    STEP_NAME,
    CheckpointError,
    Manifest,
    check_files,
    load_manifest,
)
from cairn.checkpoint.tensors.compression import check_tables, packed_files
from cairn.checkpoint.tensors.layout import StoredTensor, find_tensors
from cairn.run.errors import UsageError
from cairn.run.file_system import appears
from cairn.run.files import read_json


class StepFolders:
    """The steps in the folder `root`, as readers see them."""

    def __init__(self, root: str | Path):
        self.root = Path(root).absolute()
        self.abandoned = self.root / "abandoned"
        """Folder for the steps that were set aside when the run went back to an earlier one."""
        self.away = self.root / "away"
        """Folder for a step whose tensors are in an object store, from where ranks read them."""

    def folder(self, step: int) -> Path:
        """The folder of a step, whether or not it exists."""
        return self.root / f"step_{step}"

    def steps(self) -> list[int]:
        """The steps that exist, oldest first."""
        return [step for step in self._folders() if self.exists(step)]

    def exists(self, step: int) -> bool:
        """Whether a step exists: if and only if its manifest does."""
        folder = self.folder(step)
        return appears(folder / FILE_NAME) and not folder.is_symlink()

    def manifest(self, step: int) -> Manifest:
        """The manifest of a step.

        Raises:
            CheckpointError: the step does not exist, or its manifest is damaged.
        """
        return load_manifest(self.folder(step))

    def links(self) -> list[Path]:
        """Symbolic links named like steps; neither links nor targets are read or changed."""
        return sorted(Path(entry) for entry in self._entries() if entry.is_symlink())

    def debris(self) -> list[Path]:
        """Folders of saves that were never committed."""
        return [self.folder(step) for step in self._folders() if not self.exists(step)]

    def _folders(self) -> list[int]:
        return sorted(step_of(entry) for entry in self._entries() if entry.is_dir(follow_symlinks=False))

    def _entries(self) -> "list[os.DirEntry[str]]":
        try:
            with os.scandir(self.root) as entries:
                return [entry for entry in entries if STEP_NAME.fullmatch(entry.name)]
        except FileNotFoundError:
            if self.root.is_symlink():  # perhaps to a disk that is not mounted, with steps on it
                raise UsageError(f"{self.root}: links to {self.root.readlink()}, which is missing") from None
            return []
        except NotADirectoryError:
            if not os.path.lexists(self.root):  # a parent is not a folder
                return []
            raise UsageError(f"{self.root}: is not a folder, which checkpoints need; move it away") from None

    def latest(self) -> int | None:
        """The newest step that exists; None if there is none."""
        numbers = reversed(self._folders())
        return next((step for step in numbers if self.exists(step)), None)

    def newest_good(self, *, content: bool = True) -> tuple[Path | None, list[str]]:
        """The folder of the newest undamaged step, and what is wrong with each newer one.

        Args:
            content: False checks names and sizes only.
        """
        step, passed_over = newest_good(self.steps(), lambda step: verify(self.folder(step), content=content))
        return None if step is None else self.folder(step), passed_over


def newest_good(steps: Collection[int], check: Callable[[int], object]) -> tuple[int | None, list[str]]:
    """The newest of `steps` for which `check` raises no CheckpointError; and the errors of the newer ones."""
    passed_over: list[str] = []
    for step in sorted(steps, reverse=True):
        try:
            check(step)
            return step, passed_over
        except CheckpointError as error:
            passed_over.append(str(error))
    return None, passed_over


def step_of(folder: "Path | os.DirEntry[str]") -> int:
    """The step number in a folder's name."""
    return int(folder.name.removeprefix("step_"))


def verify(
    folder: Path,
    *,
    content: bool = True,
    tensors: bool = True,
    on_bytes: Callable[[int], None] = lambda n: None,
) -> Manifest:
    """Verify every file of a step against its manifest.

    Args:
        content: False checks names and sizes only.
        tensors: False leaves the content of tensor files to whoever loads them.
        on_bytes: called with the number of bytes checked since the last call, for a progress bar.

    Raises:
        CheckpointError: the folder is not a checkpoint.
        Damaged: a file differs; the message names file and position.
    """
    manifest = load_manifest(folder)
    check_files(folder, manifest, content=content, tensors=tensors, on_bytes=on_bytes)
    check_tables(folder, manifest.contents)
    return manifest


# Inside a step's folder.


MODEL = "model/model"
"""Stem of the weights' files, relative to the step's folder."""
OPTIMIZER = "trainer/optimizer"
"""Stem of the optimiser state's files."""
ADAPTER = "model/adapter_model"
"""Stem of the adapter's files, relative to the step's folder."""
ADAPTER_CONFIG = "adapter_config.json"
BASE_RECORD = "cairn_base.json"
BASE = "base"
"""The folder of an adapter's base model, relative to the step's, if the step holds it."""
OF_ADAPTERS = frozenset({ADAPTER_CONFIG, BASE_RECORD})
"""Files beside an adapter that must not lie beside a whole model: transformers would look for the adapter."""
CRITIC = "trainer/critic/model"
"""Stem of the weights of PPO's critic."""
CRITIC_OPTIMIZER = "trainer/critic/optimizer"
"""Stem of its optimiser state."""
TRAINER_STATE = "trainer/state.json"
ORCHESTRATOR_STATE = "orchestrator/state.json"
LEDGER = "orchestrator/ledger.sqlite"


@dataclass(frozen=True)
class TrainerRecord:
    """The content of trainer/state.json; fields that older versions of Cairn did not write are None or empty.

    progress: step, total_tokens, total_samples. rows: how samples were packed into rows. optimizer: its
    class.
    recipe: the trainer's part of the run's recipe. spikes: what the guard against spikes goes by; written if
    there is one. position: where the batches go on behind this step, if whoever makes them has said so; in
    SFT `records`, the number taken so far, and `sources`, by label of the data set what else is needed to go
    on. validation: the best result of each validation (`cairn.run.metrics`). rewinds: when the run went back
    because of a spike (`cairn.run.history.Rewind`); written if it did.
    """

    progress: dict[str, int] = field(default_factory=dict[str, int])
    seed: int | None = None
    rows: str | None = None
    optimizer: str | None = None
    scheduler: dict[str, Any] | None = None
    recipe: dict[str, Any] | None = None
    spikes: dict[str, float] | None = None
    position: dict[str, Any] | None = None
    validation: dict[str, dict[str, float]] | None = None
    rewinds: list[dict[str, Any]] | None = None
    config: dict[str, Any] | None = None
    """The settings, from versions without a recipe."""
    data: dict[str, Any] | None = None
    """The data set, from versions without a recipe."""

    @property
    def records(self) -> int:
        """Records of its data that an SFT run had taken; earlier versions made one sample of each."""
        return (self.position or {}).get("records", self.progress.get("total_samples", 0))

    def to_json(self) -> bytes:
        """The bytes of the file."""
        optional = ("spikes", "position", "validation", "rewinds")
        left_out = {"config", "data"} | {name for name in optional if getattr(self, name) is None}
        return _to_json({key: value for key, value in asdict(self).items() if key not in left_out})


@dataclass(frozen=True)
class OrchestratorRecord:
    """The content of orchestrator/state.json; fields that older versions did not write are None or empty.

    progress: step, total_tokens, total_samples, total_problems. recipe: the orchestrator's part of the run's
    recipe. prompts: environment, number of problems, and the orchestrator's position in them.
    """

    progress: dict[str, int] = field(default_factory=dict[str, int])
    seed: int | None = None
    recipe: dict[str, Any] | None = None
    prompts: dict[str, Any] = field(default_factory=dict[str, Any])

    def to_json(self) -> bytes:
        """The bytes of the file."""
        return _to_json(asdict(self))


class StepFolder:
    """A step_N folder. Only this class knows its inner layout."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.model = self.path / "model"
        """The Hugging Face directory."""
        self.critic = (self.path / CRITIC).parent
        """The folder of PPO's critic, if there is one."""
        self.base = self.path / BASE
        """The Hugging Face directory of the base, if the step has an adapter and holds its base."""
        self.ledger = self.path / LEDGER

    @staticmethod
    def holding(model: Path) -> Path | None:
        """The step's folder in which the Hugging Face directory `model` lies; None if it is in none."""
        found = model.name == "model" and (model.parent / FILE_NAME).is_file()
        return model.parent if found else None

    def trainer_state(self) -> TrainerRecord | None:
        """The trainer's record; None if the checkpoint holds weights only.

        Raises:
            DamagedFile: the file is not such a record.
        """
        return read_json(self.path / TRAINER_STATE, TrainerRecord)

    def orchestrator_state(self) -> OrchestratorRecord | None:
        """The orchestrator's record; None if there is none.

        Raises:
            DamagedFile: the file is not such a record.
        """
        return read_json(self.path / ORCHESTRATOR_STATE, OrchestratorRecord)

    def tensors(self, stem: str) -> dict[str, StoredTensor]:
        """The locations of a stem's tensors, such as MODEL's, by name; empty if the step has none of them.

        Raises:
            Damaged: an index or a header is invalid.
        """
        where, _, name = stem.rpartition("/")
        folder = self.path / where
        packed = any(file.startswith(name) for file in packed_files(folder))
        if not packed and not any(folder.glob(f"{name}*.safetensors")):
            return {}
        return find_tensors(folder, name)


def _to_json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def is_reward_model(folder: Path) -> bool:
    """Whether a Hugging Face directory says that its model gives numbers for conversations, and no tokens."""
    about = read_json(folder / "config.json", dict[str, Any]) or {}
    return any(str(name).endswith("ForSequenceClassification") for name in about.get("architectures") or ())
