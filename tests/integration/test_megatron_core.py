"""Checkpoints of real megatron-core on two ranks: Cairn goes on from them, and Megatron loads Cairn's.

MEGATRON_CORE, a folder with another version of the package, is put before the installed one in the program.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from families import FAMILIES
from one_rank import one_rank
from safetensors.torch import load_file
from tiny import random_model, write
from transformers import AutoConfig, AutoModelForCausalLM

from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.tensors.sharded_files import write_tensors
from cairn.config.trainer import SFTConfig
from cairn.formats import WriteOptions, format_of
from cairn.formats.transfer.export_step import export
from cairn.formats.transfer.import_step import import_checkpoint
from cairn.run.batches import FROM_TEXT, Batch, Sample
from cairn.run.connections import free_port
from cairn.trainer.group import RankGroup
from cairn.trainer.losses import Likelihood
from cairn.trainer.models.model import build_model
from cairn.trainer.models.trained import Trained
from cairn.trainer.optimizers import make_optimizer
from cairn.trainer.packing import make_rank_batch
from cairn.trainer.state import POLICY, TrainerProgress, TrainerState
from cairn.trainer.step.train_step import train_step

pytest.importorskip("megatron.core", reason="install the dependency group megatron")

from megatron_program import BETAS, CLIP, DECAY, EPS, RATE, RUNS, STEPS, WIDTH, Run, tokens

pytestmark = pytest.mark.timeout(1200)
group = one_rank
PROGRAM = Path(__file__).parents[1] / "megatron_program.py"
GROUPS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
"""Two heads for each key, and two keys, so that their order matters."""
TOLERANCE = 2e-6
"""How far values may lie apart that are near 0: steps of AdamW are of the size of the learning rate, 1e-3."""
RESUMED = [run for run in RUNS if run.sharding != "dp_reshardable" and not run.padded]
"""Those that go on with the same loss: rows that pad the vocabulary count in Megatron's loss."""


def by_name(run: Run) -> str:
    return run.name


def launch(command: str, out: Path) -> None:
    """Run the program on two ranks; prints what it printed."""
    arguments = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    arguments += [f"--master-port={free_port()}", str(PROGRAM), command, str(out)]
    paths = [os.environ[name] for name in ("MEGATRON_CORE", "PYTHONPATH") if name in os.environ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stdout + done.stderr
    print(
        "\n".join(
            line for line in done.stdout.splitlines() if line.startswith(("megatron", "trained", "load"))
        )
    )


def make(family: str, folder: Path) -> Path:
    """A model with GROUPS and random norms."""
    about = FAMILIES[family]
    more = {"norm_topk_prob": True} if family == "qwen3_moe" else {}
    model = random_model(AutoConfig.for_model(about.model_type, **{**about.settings, **GROUPS, **more}), 5)
    draws = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += torch.randn(parameter.shape, generator=draws) * 0.2
    return write(model, folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For each of RUNS, Cairn's export and what Megatron made of it."""
    out = tmp_path_factory.mktemp("megatron")
    for run in RUNS:
        make(run.family, out / run.name / "hub")
        first, _, _ = import_checkpoint(out / run.name / "hub", out / run.name / "first", "hf")
        export(first, out / run.name / "start", "megatron", WriteOptions())
    launch("train", out)
    return out


def imported(out: Path, run: Run, *, what: str = "trained", weights_only: bool = False) -> Path:
    """The step that Cairn makes of a checkpoint."""
    source, model = out / run.name / what, out / run.name / "hub"
    to = out / run.name / f"run_{what}_{weights_only}"
    if not to.exists():
        import_checkpoint(source, to, "megatron", model=model, weights_only=weights_only)
    return next((to / "checkpoints").glob("step_*"))


def logits_of(folder: Path) -> torch.Tensor:
    """Of transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(tokens(0, model.config.vocab_size)).logits


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the order of sums; `expected` may have more tokens."""
    torch.testing.assert_close(found, expected[..., : found.shape[-1]], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("run", RUNS, ids=by_name)
def test_megatron_loads_an_export(trained: Path, run: Run):
    """And computes what transformers does."""
    expected = torch.load(trained / run.name / "logits.pt", weights_only=True)["start"]
    assert_same(logits_of(trained / run.name / "hub"), expected)


@pytest.mark.parametrize("run", RUNS, ids=by_name)
def test_imported_weights_compute_what_megatron_did(trained: Path, run: Run):
    """After two steps, from the folder that names the newest iteration."""
    assert format_of(trained / run.name / "trained") == "megatron"
    step = imported(trained, run, weights_only=run.sharding == "dp_reshardable")
    assert step.name == f"step_{STEPS}"
    expected = torch.load(trained / run.name / "logits.pt", weights_only=True)["trained"]
    assert_same(logits_of(step / "model"), expected)


@pytest.mark.parametrize("run", RESUMED, ids=by_name)
def test_cairn_goes_on_with_megatrons_next_step(group: RankGroup, trained: Path, tmp_path: Path, run: Run):
    """The same loss, and the same weights and moments after it."""
    step = imported(trained, run)
    optimizer = {"lr": RATE, "betas": BETAS, "eps": EPS, "weight_decay": DECAY, "max_grad_norm": CLIP}
    config = SFTConfig(seq_len=40, optimizer=optimizer)
    model = build_model(step / "model", config, group)
    policy = Trained(model, make_optimizer(model.named_parameters(), config.optimizer))
    state = TrainerState(config, group, {POLICY: policy}, TrainerProgress())
    state.load(step)
    rows = tokens(STEPS + 1, model.config.vocab_size).to(torch.int32).numpy()
    batch = Batch([Sample(row, np.arange(WIDTH) >= 1) for row in rows], sampling=FROM_TEXT)
    work = make_rank_batch(batch, config, rank=0, world_size=1, arrange=state.scorer.rows.arrange)
    loss = train_step(state, work, STEPS + 1, Likelihood())["loss"]
    expected = json.loads((trained / run.name / "losses.json").read_text())[STEPS]
    print(run.name, "loss of the next step:", loss, "and Megatron's:", expected)
    assert loss == pytest.approx(expected, rel=1e-5)
    after = imported(trained, run, what="next")
    for stem, tensors in policy.tensors().items():
        write_tensors(tmp_path, tensors, stem.rpartition("/")[2])
        ours, theirs = (
            load_file(f"{f}.safetensors") for f in (tmp_path / stem.rpartition("/")[2], after / stem)
        )
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            torch.testing.assert_close(
                ours[name], tensor, rtol=1e-5, atol=TOLERANCE, msg=f"{stem} {name}: {{}}".format
            )


def test_buckets_are_refused_but_for_their_weights(trained: Path, tmp_path: Path):
    """The layout depends on the parallelism; the message says what to do."""
    folder = trained / "buckets"
    with pytest.raises(
        CheckpointError, match=r"(?s)buckets.*--dist-ckpt-optim-fully-reshardable.*--weights-only"
    ):
        import_checkpoint(folder / "trained", tmp_path / "run", "megatron", model=folder / "hub")


def test_megatron_loads_what_was_trained_and_exported(trained: Path):
    """With another tensor parallelism."""
    for run in RESUMED:
        export(imported(trained, run), trained / run.name / "back", "megatron", WriteOptions())
    for run in RUNS:
        if run not in RESUMED:
            (trained / run.name).rename(trained / f"{run.name}.done")
    launch("load", trained)
    for run in RESUMED:
        expected = torch.load(trained / run.name / "logits.pt", weights_only=True)["trained"]
        assert_same(torch.load(trained / run.name / "logits_back.pt", weights_only=True), expected)
