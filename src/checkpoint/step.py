"""What lies where in a step's folder, and what its small files say."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cairn.checkpoint.layout import StoredTensor, find_tensors
from cairn.run.files import read_json

MODEL = "model/model"
"""Stem of the files of weights, within the step."""
OPTIMIZER = "trainer/optimizer"
"""Stem of the files of optimiser state."""
TRAINER_STATE = "trainer/state.json"
ORCHESTRATOR_STATE = "orchestrator/state.json"
LEDGER = "orchestrator/ledger.sqlite"


@dataclass(frozen=True)
class TrainerRecord:
    """The content of trainer/state.json; what older versions of Cairn did not write is None or empty.

    progress: step, total_tokens, total_samples. rows: how samples lay in rows. optimizer: its class.
    recipe: the trainer's part of the run's.
    """

    progress: dict[str, int] = field(default_factory=dict[str, int])
    seed: int | None = None
    rows: str | None = None
    optimizer: str | None = None
    scheduler: dict[str, Any] | None = None
    recipe: dict[str, Any] | None = None
    config: dict[str, Any] | None = None
    """The settings, in versions that kept no recipe."""
    data: dict[str, Any] | None = None
    """The data set, in those versions."""

    def to_json(self) -> bytes:
        """As it stands in the file."""
        return _to_json({key: value for key, value in asdict(self).items() if key not in ("config", "data")})


@dataclass(frozen=True)
class OrchestratorRecord:
    """The content of orchestrator/state.json; what older versions of Cairn did not write is None or empty.

    progress: step, total_tokens, total_samples, total_problems. recipe: the orchestrator's part of the run's.
    prompts: environment, problems, and how far in them the orchestrator was.
    """

    progress: dict[str, int] = field(default_factory=dict[str, int])
    seed: int | None = None
    recipe: dict[str, Any] | None = None
    prompts: dict[str, Any] = field(default_factory=dict[str, Any])

    def to_json(self) -> bytes:
        """As it stands in the file."""
        return _to_json(asdict(self))


class StepFolder:
    """A step_N folder: the one place that knows its inner layout."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.model = self.path / "model"
        """The Hugging Face directory."""
        self.ledger = self.path / LEDGER

    def trainer_state(self) -> TrainerRecord | None:
        """What the trainer saved beside its tensors; None in a checkpoint of weights alone.

        Raises:
            DamagedFile: the file is no such record.
        """
        return read_json(self.path / TRAINER_STATE, TrainerRecord)

    def orchestrator_state(self) -> OrchestratorRecord | None:
        """What the orchestrator saved beside its ledger; None if there was none.

        Raises:
            DamagedFile: the file is no such record.
        """
        return read_json(self.path / ORCHESTRATOR_STATE, OrchestratorRecord)

    def tensors(self, stem: str) -> dict[str, StoredTensor]:
        """Where the tensors of a stem, such as MODEL, lie, by name; empty if the step has none of them.

        Raises:
            Damaged: an index or a header can't be right.
        """
        folder, _, name = stem.rpartition("/")
        if not any((self.path / folder).glob(f"{name}*.safetensors")):
            return {}
        return find_tensors(self.path / folder, name)


def _to_json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
