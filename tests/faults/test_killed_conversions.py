"""`ckpt export`, `import`, `average` and `copy` are killed at many moments.

Nothing that they leave passes for whole, and the same command works afterwards.
"""

import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import draws
import pytest
import torch
from families import make, make_model
from runs import ABOUT, forked
from safetensors.torch import load_file
from safetensors.torch import save as as_bytes
from transformers import AutoModelForCausalLM

from cairn.checkpoint.step_folder import verify
from cairn.checkpoint.store import CheckpointStore
from cairn.formats import EXPORTERS
from cairn.formats.transfer.export_step import UNFINISHED
from cairn.launch import main

KILLED = -signal.SIGKILL
ALWAYS = ("dcp", "hf", "hf-trainer", "pt")
"""Formats that every model and environment can be exported to."""
PATIENCE = 240.0
"""Seconds that a command may take before a test gives up on it."""


@dataclass(frozen=True)
class Command:
    """A `ckpt` command in a process of its own, forked from one that has imported torch."""

    log: Path
    fault: str
    arguments: tuple[str, ...]

    def run(self) -> int:
        """Run it to its end; returns the exit code."""
        with forked(_serve, self) as process:
            process.join(PATIENCE)
            assert process.exitcode is not None, f"still running after {PATIENCE} s: {self.log.read_text()}"
            return process.exitcode


def _serve(command: Command) -> None:
    log = os.open(command.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["CAIRN_FAULT"] = command.fault
    torch.set_num_threads(1)
    sys.argv = ["ckpt", *command.arguments]
    sys.exit(main.ckpt())


@dataclass(frozen=True)
class Place:
    """A folder for commands, with a step to convert."""

    folder: Path

    def ckpt(self, *arguments: object, fault: str = "") -> int:
        """Run a command, with a fault; returns its exit code."""
        return Command(self.folder / "log", fault, tuple(map(str, arguments))).run()

    @property
    def printed(self) -> str:
        """What the last command has printed."""
        return (self.folder / "log").read_text()

    def entries(self) -> set[str]:
        """What lies in the folder, beside what was there."""
        return {path.name for path in self.folder.iterdir()} - {"log", "hf", "run"}

    def store(self, name: str) -> CheckpointStore:
        """The checkpoints of a run."""
        return CheckpointStore(self.folder / name / "checkpoints")

    def listed(self, name: str) -> dict[str, str]:
        """The states that `ckpt list` shows, by folder; empty if it finds none."""
        if self.ckpt("list", self.folder / name, "--json"):
            return {}
        return {Path(row["folder"]).name: row["state"] for row in json.loads(self.printed)}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """With the steps 1 and 2 of a run: weights, and AdamW's state."""
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    folder = make("qwen3_tied", tmp_path / "hf")
    for step in (1, 2):
        make_model("qwen3_tied", seed=step).save_pretrained(folder)
        state: dict[str, torch.Tensor] = {}
        for name, tensor in load_file(folder / "model.safetensors").items():
            state |= {f"{name}.exp_avg": tensor / 2, f"{name}.exp_avg_sq": tensor.square()}
            state[f"{name}.step"] = torch.tensor(float(step))
        settings = {"lr": 1e-3, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.01}
        settings = {f"optimizer.{key}": value for key, value in settings.items()}
        record = {"progress": {"step": step}, "optimizer": "AdamW", "recipe": {"settings": settings}}
        files = {f"model/{path.name}": path.read_bytes() for path in folder.iterdir()}
        files["trainer/optimizer.safetensors"] = as_bytes(state, {"format": "pt"})
        files["trainer/state.json"] = json.dumps(record).encode()
        store.begin(step, ["model", "trainer"])
        store.write_part(step, "files", files, "run:1")
        store.commit(step, {"files": "run:1"}, timeout=0.0, about=ABOUT)
    return Place(tmp_path)


@pytest.mark.parametrize("name", draws.cases(sorted(EXPORTERS), __name__, 1, always=["hf"]))
def test_an_export_that_is_killed(place: Place, name: str):
    """After some bytes, when all is written, and when all is durable, in each format that a commit draws."""
    step, out = place.store("run").folder(2), place.folder / "out"
    export = ("export", step, out, "--format", name, "--shard-size", "64K")
    if place.ckpt(*export):
        assert name not in ALWAYS, place.printed
        pytest.skip(place.printed.strip())  # a package is missing, or the format is not for such a model
    out.rename(place.folder / "wanted")
    for fault in (
        "export.write:kill",
        "export.write:kill@3",
        "export.before_fsync:kill",
        "export.before_rename:kill",
    ):
        code = place.ckpt(*export, fault=fault)
        if code == 0 and "@" in fault:  # the format reports its bytes in fewer pieces
            out.rename(place.folder / "few_pieces")
            continue
        assert code == KILLED, (fault, place.printed)
        assert place.entries() - {"wanted", "few_pieces"} == {out.name + UNFINISHED}
        assert place.listed(out.name) == {}
        with pytest.raises(OSError, match=str(out)):
            AutoModelForCausalLM.from_pretrained(out)
    assert place.ckpt(*export) == 0, place.printed
    assert place.entries() - {"wanted", "few_pieces"} == {out.name}
    sizes, wanted = (
        {path.relative_to(folder): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
        for folder in (out, place.folder / "wanted")
    )
    assert sizes == wanted


def test_an_average_that_is_killed(place: Place):
    """As an export."""
    steps, out = [place.store("run").folder(step) for step in (1, 2)], place.folder / "out"
    average = ("average", *steps, out, "--shard-size", "64K")
    for fault in ("export.write:kill", "export.write:kill@3", "export.before_rename:kill"):
        assert place.ckpt(*average, fault=fault) == KILLED, (fault, place.printed)
        assert place.entries() == {out.name + UNFINISHED}
        with pytest.raises(OSError, match=str(out)):
            AutoModelForCausalLM.from_pretrained(out)
    assert place.ckpt(*average) == 0, place.printed
    assert place.entries() == {out.name}
    AutoModelForCausalLM.from_pretrained(out)


def test_an_import_that_is_killed(place: Place):
    """Before the manifest has its name there is no step, afterwards it is whole."""
    assert place.ckpt("export", place.store("run").folder(2), place.folder / "dcp", "--format", "dcp") == 0
    bring = ("import", place.folder / "dcp", place.folder / "new", "--model", place.folder / "hf")
    store = place.store("new")
    for fault in (
        "import.write:kill",
        "import.write:kill@2",
        "import.before_compare:kill",
        "commit.before_manifest:kill",
        "commit.manifest_written:kill",
    ):
        assert place.ckpt(*bring, fault=fault) == KILLED, (fault, place.printed)
        assert (store.latest(), store.newest_good()) == (None, (None, []))
        assert place.listed("new") == {"step_2": "partial"}
        assert place.ckpt("export", place.folder / "new", place.folder / "out") == 2
    assert place.ckpt(*bring, fault="commit.done:kill") == KILLED
    assert verify(store.folder(2)).parts == ["trainer"]
    assert place.listed("new") == {"step_2": "complete"}
    assert place.ckpt(*bring) == 2, "it is there already"
    bring = (*bring[:2], place.folder / "newer", *bring[3:])
    assert place.ckpt(*bring, fault="import.write:kill@2") == KILLED
    assert place.ckpt(*bring) == 0, place.printed
    assert verify(place.store("newer").folder(2)).files.keys() == verify(store.folder(2)).files.keys()
    for name in ("model/model.safetensors", "trainer/optimizer.safetensors"):
        assert (store.folder(2) / name).read_bytes() == (place.store("newer").folder(2) / name).read_bytes()


@pytest.mark.parametrize("link", [(), ("--link",)])
def test_a_copy_that_is_killed(place: Place, link: tuple[str, ...]):
    """The step itself is not touched."""
    step, store = place.store("run").folder(1), place.store("backup")
    copy = ("copy", step, place.folder / "backup", *link)
    for fault in (
        "adopt.file:kill",
        "adopt.file:kill@3",
        "commit.before_manifest:kill",
        "commit.manifest_written:kill",
    ):
        assert place.ckpt(*copy, fault=fault) == KILLED, (fault, place.printed)
        assert store.latest() is None
        assert place.listed("backup") in ({}, {"step_1": "partial"})
        verify(step)
    assert place.ckpt(*copy) == 0, place.printed
    assert verify(store.folder(1)) == verify(step)
