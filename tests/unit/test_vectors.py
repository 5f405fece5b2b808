"""The test vectors of docs/format.md: our reader takes the good ones and refuses the others."""

import json
from pathlib import Path

import pytest
import torch
from runs import REPOSITORY

from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.step_folder import StepFolder, verify
from cairn.checkpoint.tensors.sharded_files import load_step

VECTORS = REPOSITORY / "tests" / "vectors"
REPORT = json.loads((VECTORS / "verdicts.json").read_text())


def read(step: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Verify and load everything."""
    verify(step)
    tensors = {
        stem: {name: torch.full(t.spec.shape, -1.0) for name, t in StepFolder(step).tensors(stem).items()}
        for stem in REPORT["tensors"]
    }
    load_step(step, tensors)
    return tensors


@pytest.mark.parametrize("name", REPORT["checkpoints"])
def test_our_reader_agrees(name: str):
    about = REPORT["checkpoints"][name]
    step = VECTORS / name / about["step"]
    if about["wrong"]:
        with pytest.raises(CheckpointError):
            read(step)
        return
    expected = {
        stem: {key: torch.tensor(values) for key, values in named.items()}
        for stem, named in REPORT["tensors"].items()
    }
    found = read(step)
    assert {stem: named.keys() for stem, named in found.items()} == {s: n.keys() for s, n in expected.items()}
    for stem, named in expected.items():
        for key, values in named.items():
            assert torch.equal(found[stem][key].flatten(), values.flatten()), key


def test_every_vector_has_a_verdict():
    folders = {path.name for path in VECTORS.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == REPORT["checkpoints"].keys()
    assert sum(about["wrong"] is None for about in REPORT["checkpoints"].values()) >= 4
