"""Checkpoints of real DeepSpeed on two ranks: Cairn goes on from them, and DeepSpeed from Cairn's.

The first launch compiles an extension of DeepSpeed's, which takes minutes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from families import make, make_config
from foreign import next_step, values
from one_rank import one_rank
from safetensors.torch import load_file

from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.step_folder import MODEL, OPTIMIZER
from cairn.formats import FORMATS, WriteOptions, format_of
from cairn.formats.common.match_layout import in_memory
from cairn.formats.transfer.export_step import export
from cairn.formats.transfer.import_step import import_checkpoint
from cairn.model.hub_layout import hub_layout
from cairn.run.connections import free_port
from cairn.trainer.group import RankGroup

pytest.importorskip("deepspeed", reason="install the dependency group deepspeed")

from deepspeed_program import RATE, RUNS, STEPS, Run, tokens

pytestmark = pytest.mark.timeout(1200)
group = one_rank
PROGRAM = Path(__file__).parents[1] / "deepspeed_program.py"
ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
TRAINED = [run for run in RUNS if not run.frozen]
FULL = [run for run in TRAINED if run.kind == "fp32"]
"""Those whose next step Cairn computes in the same precision."""


def name_of(run: Run) -> str:
    return run.name


def launch(what: str, out: Path, ranks: int = 2) -> str:
    """Run the program; returns what it printed."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}"]
    command += [f"--master_port={free_port()}", str(PROGRAM), what, str(out)]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stdout + done.stderr
    return "\n".join(line for line in done.stdout.splitlines() if "trained" in line or "resumed" in line)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What DeepSpeed saved after STEPS steps, for each of RUNS, and what it did in the next one."""
    out = tmp_path_factory.mktemp("deepspeed")
    for family in {run.model for run in RUNS}:
        make(family, out / family)
    print(launch("train", out))
    return out


@pytest.fixture(scope="module")
def imported(trained: Path) -> dict[str, Path]:
    """The step that `ckpt import` makes of each."""
    steps = {}
    for run in TRAINED:
        source = trained / run.name
        assert format_of(source) == "deepspeed"
        model = trained / run.model
        steps[run.name], *_ = import_checkpoint(source, source / "cairn", "deepspeed", model=model)
    return steps


@pytest.fixture(scope="module")
def resumed(trained: Path, imported: dict[str, Path]) -> Path:
    """What DeepSpeed did after it had loaded Cairn's exports, on engines with other weights."""
    for name, step in imported.items():
        export(step, trained / name / "universal", "deepspeed", WriteOptions())
    print(launch("resume", trained))
    print(launch("resume", trained, ranks=1))
    return trained


@pytest.mark.parametrize("run", TRAINED, ids=name_of)
def test_every_bit_is_read(trained: Path, run: Run):
    """The masters and moments that DeepSpeed's own functions gather."""
    folder = trained / run.name
    truth = load_file(folder / "before.safetensors")
    for source in (folder, folder / f"global_step{STEPS}"):
        content = FORMATS["deepspeed"].read(source, trained / run.model)
        assert content.step == STEPS
        assert content.samples == STEPS * 2
        for name, tensor in truth.items():
            stem = OPTIMIZER if ".exp_avg" in name else MODEL
            assert torch.equal(values(content.tensors[stem][name]), tensor.float()), name


@pytest.mark.parametrize("run", FULL, ids=name_of)
def test_cairn_takes_deepspeeds_next_step(
    group: RankGroup, trained: Path, imported: dict[str, Path], run: Run
):
    """The loss shows the weights; the weights after it show the optimiser's state."""
    folder = trained / run.name
    decay = 0.1 if run.groups == 2 else 0.0
    rows = tokens(STEPS + 1, make_config(run.model).vocab_size)
    rate = RATE / 10 if run.more == "warmup" else RATE
    loss, found = next_step(group, imported[run.name], STEPS + 1, rows, lr=rate, weight_decay=decay)
    theirs = json.loads((folder / "losses.json").read_text())[-1]
    print(f"{run.name}: step {STEPS + 1} of Cairn {loss:.9f}, of DeepSpeed {theirs:.9f}")
    assert loss == pytest.approx(theirs, rel=1e-5)
    before, after = (load_file(folder / f"{when}.safetensors") for when in ("before", "after"))
    for name, tensor in after.items():
        if ".exp_avg" not in name:
            assert not torch.equal(before[name], tensor), name
            torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("run", [run for run in TRAINED if run.more != "round-robin"], ids=name_of)
def test_deepspeed_goes_on_from_an_export(resumed: Path, run: Run):
    """It loads every bit, and its next step is the one that it took itself after saving.

    With round-robin gradients, DeepSpeed 0.19.8 loads universal checkpoints into other parameters.
    """
    folder = resumed / run.name
    for saved, loaded in (("before", "loaded-2"), ("after", "resumed-2"), ("before", "loaded-1")):
        expected, found = (load_file(folder / f"{name}.safetensors") for name in (saved, loaded))
        assert expected.keys() == found.keys()
        for name, tensor in expected.items():
            assert torch.equal(tensor, found[name]), (saved, loaded, name)
    theirs = json.loads((folder / "losses.json").read_text())[-1]
    assert json.loads((folder / "resumed-2.json").read_text()) == theirs
    if run.kind == "fp32":
        assert json.loads((folder / "resumed-1.json").read_text()) == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("name", ["qwen3_tied-zero3-fp32", "qwen3_tied-zero2-fp32"])
def test_deepspeeds_own_universal_checkpoints(trained: Path, tmp_path: Path, name: str):
    """As its converter writes them: flat tensors after ZeRO 3, dictionaries after ZeRO 2."""
    out = tmp_path / "out" / "global_step2_universal"
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    command += ["--input_folder", str(trained / name / "global_step2"), "--output_folder", str(out)]
    command += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    theirs = FORMATS["deepspeed"].read(out.parent, trained / "qwen3_tied")
    ours = FORMATS["deepspeed"].read(trained / name, trained / "qwen3_tied")
    assert theirs.step == ours.step
    assert theirs.settings["optimizer.lr"] == ours.settings["optimizer.lr"]
    for stem, named in ours.tensors.items():
        assert theirs.tensors[stem].keys() == named.keys()
        for key, source in named.items():
            assert torch.equal(values(theirs.tensors[stem][key]), values(source)), key


@pytest.mark.parametrize("run", [run for run in RUNS if run.frozen], ids=name_of)
def test_frozen_weights_are_read_but_no_run_goes_on_from_them(trained: Path, tmp_path: Path, run: Run):
    """The weights are whole; the optimiser's state is not that of all of them."""
    content = FORMATS["deepspeed"].read(trained / run.name, trained / run.model)
    layout = hub_layout(make_config(run.model))
    weights = in_memory(content.tensors[MODEL], layout, trained)
    first = load_file(trained / run.model / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(values(weights["model.embed_tokens.weight"]), first)
    with pytest.raises(CheckpointError, match=r"missing for these weights: model\.embed_tokens"):
        import_checkpoint(trained / run.name, tmp_path, "deepspeed", model=trained / run.model)


def test_trainer_with_deepspeed(group: RankGroup, tmp_path: Path):
    """Cairn takes the step after its checkpoint-2, and Trainer takes it from an export of that."""
    pytest.importorskip("accelerate", reason="Trainer needs it; it is in the group `formats`")
    make("llama", tmp_path / "llama")
    print(launch("trainer", tmp_path))
    source = tmp_path / "first" / f"checkpoint-{STEPS}"
    assert format_of(source) == "deepspeed"
    step, *_ = import_checkpoint(source, tmp_path / "cairn", "deepspeed")
    rows = tokens(STEPS + 1, 100)[:1].expand(2, -1)
    loss, found = next_step(group, step, STEPS + 1, rows, lr=RATE, betas=(0.9, 0.999))
    theirs = json.loads((tmp_path / "trained.json").read_text())
    print(f"Trainer: step {STEPS + 1} of Cairn {loss:.9f}, of Trainer {theirs:.9f}")
    assert loss == pytest.approx(theirs, rel=1e-5)
    after = load_file(tmp_path / "first" / f"checkpoint-{STEPS + 1}" / "model.safetensors")
    for name, tensor in after.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=2e-6)
    export(step, tmp_path / "back", "deepspeed", WriteOptions())
    print(launch("trainer", tmp_path))
    assert json.loads((tmp_path / "resumed.json").read_text()) == theirs
