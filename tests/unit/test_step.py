"""What lies where in a step's folder, and in folders of other formats."""

import json
from pathlib import Path

import pytest
import torch

from cairn.checkpoint.manifest import Damaged
from cairn.checkpoint.step_folder import (
    MODEL,
    OPTIMIZER,
    ORCHESTRATOR_STATE,
    TRAINER_STATE,
    OrchestratorRecord,
    StepFolder,
    TrainerRecord,
)
from cairn.checkpoint.tensors.sharded_files import read_tensor, write_tensors
from cairn.formats import FORMATS, format_of
from cairn.run.files import DamagedFile, write_json

TRAINER = {
    "progress": {"step": 20, "total_tokens": 5, "total_samples": 3},
    "seed": 1,
    "rows": "packed",
    "optimizer": "AdamW",
    "scheduler": {"steps": 40},
    "recipe": {"settings": {"data.name": "é"}, "changes": []},
}
ORCHESTRATOR = {
    "progress": {"step": 20, "total_problems": 9},
    "seed": 1,
    "recipe": {},
    "prompts": {"environment": {"name": "reverse_text"}, "problems": 4, "epoch": 0, "position": 1},
}


@pytest.fixture
def step(tmp_path: Path) -> StepFolder:
    folder = StepFolder(tmp_path / "step_20")
    for part in ("model", "trainer", "orchestrator"):
        (folder.path / part).mkdir(parents=True)
    return folder


def test_records_are_written_as_they_have_always_been(step: StepFolder):
    """Key by key, in this order: equal states give equal files, also those of earlier versions."""
    for name, content, record in (
        (TRAINER_STATE, TRAINER, TrainerRecord(**TRAINER)),
        (ORCHESTRATOR_STATE, ORCHESTRATOR, OrchestratorRecord(**ORCHESTRATOR)),
    ):
        assert record.to_json() == (json.dumps(content, indent=2) + "\n").encode()
        (step.path / name).write_bytes(record.to_json())
    assert step.trainer_state() == TrainerRecord(**TRAINER)
    assert step.orchestrator_state() == OrchestratorRecord(**ORCHESTRATOR)


def test_records_of_earlier_versions_are_read(step: StepFolder):
    """They had settings and data instead of a recipe; a checkpoint of weights has no record at all."""
    assert (step.trainer_state(), step.orchestrator_state()) == (None, None)
    write_json(
        step.path / TRAINER_STATE, {"progress": {"step": 1}, "config": {"seed": 3}, "data": {"records": 7}}
    )
    saved = step.trainer_state()
    assert saved == TrainerRecord(progress={"step": 1}, config={"seed": 3}, data={"records": 7})
    assert (saved.recipe, saved.seed) == (None, None)


@pytest.mark.parametrize("content", [[], {"progress": 3}, {"progress": {"step": "20"}}, {"seed": "one"}])
def test_a_record_of_another_shape_is_damaged(step: StepFolder, content: object):
    write_json(step.path / TRAINER_STATE, content)
    with pytest.raises(DamagedFile, match=r"trainer/state\.json"):
        step.trainer_state()


def test_tensors_by_stem(step: StepFolder):
    """In one file or in several; none where the step has none, and an error where they are damaged."""
    assert step.tensors(OPTIMIZER) == {}
    tensors = {"a": torch.arange(6.0), "b": torch.arange(4)}
    write_tensors(step.path / "trainer", tensors, "optimizer", max_file_bytes=30)
    found = step.tensors(OPTIMIZER)
    assert {stored.path.parent.name for stored in found.values()} == {"trainer"}
    assert all(torch.equal(read_tensor(found[name]), tensor) for name, tensor in tensors.items())
    next((step.path / "trainer").glob("*.safetensors")).write_bytes(b"")
    with pytest.raises(Damaged):
        step.tensors(OPTIMIZER)


def test_a_hugging_face_folder_is_recognised_and_read(step: StepFolder):
    """By its configuration; its values stay on disk."""
    assert format_of(step.model) is None
    write_json(step.model / "config.json", {})
    assert format_of(step.model) == "hf"
    found = FORMATS["hf"]
    with pytest.raises(FileNotFoundError, match="holds neither"):
        found.read(step.model)
    write_tensors(step.model, {"w": torch.arange(3)}, "model")
    (stored,) = found.read(step.model).tensors[MODEL].values()
    assert torch.equal(read_tensor(stored), torch.arange(3))
