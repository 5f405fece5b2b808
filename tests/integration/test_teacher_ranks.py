"""References and teachers over ranks: a frozen copy is sharded, and any number of ranks finds the same."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from families import make
from runs import join, start_ranks
from safetensors.torch import load_file, save_file
from tiny import write_example
from torch.distributed.tensor import DTensor

from cairn.config.rl_trainer import TrainerConfig
from cairn.model.described import sums_of, weight_files
from cairn.model.hub_layout import tensors_in_memory
from cairn.run.batches import Batch, Sample, Sampling
from cairn.run.connections import free_port
from cairn.trainer.frozen.model import TeacherModels
from cairn.trainer.losses import make_loss
from cairn.trainer.models.adapter import make_policy
from cairn.trainer.packing import make_rank_batch
from cairn.trainer.state import POLICY, TrainerProgress, TrainerState
from cairn.trainer.step.train_step import train_step


def batch(step: int) -> Batch:
    """Samples of several lengths, in a number of rows that two ranks can't divide evenly."""
    draw = np.random.default_rng(step)
    made = [
        Sample.of_answer([5, 6], draw.integers(5, 100, n).tolist(), logprobs=-4.0, advantages=draw.normal())
        for n in (18, 12, 7, 20, 3)
    ]
    return Batch(made, sampling=Sampling(0.8))


def run_rank(rank: int, ranks: int, port: int, folder: Path) -> None:
    group = join(rank, ranks, port)
    start, teacher = folder / "start", folder / "teacher"
    config = TrainerConfig(
        optimizer={"lr": 0.003, "eps": 1e-3, "max_grad_norm": 1e9},
        seq_len=24,
        kl={"reference": str(start), "coef": 0.2},
        distill={"teacher": str(teacher), "coef": 0.5},
    )
    policy = make_policy(start, config, group)
    state = TrainerState(config, group, {POLICY: policy}, TrainerProgress())
    state.begin(start)
    state.check_model()
    sums = {str(one): sums_of(weight_files(one)) for one in (start, teacher)}
    teachers = TeacherModels(config, group, state.scorer, sums)
    for copy in teachers._copies.values():
        parameters = list(copy.scorer.model.parameters())
        assert all(isinstance(one, DTensor) for one in parameters) == (ranks > 1), "as the policy"
    loss = make_loss(config.loss, config.kl_in_loss)
    rows = []
    for step in (1, 2):
        work = make_rank_batch(batch(step), config, rank=rank, world_size=ranks)
        rows.append(dict(teachers.score(work)) | train_step(state, work, step, loss))
    weights = tensors_in_memory(policy.module).items()
    after = {name: w.full_tensor() if isinstance(w, DTensor) else w.clone() for name, w in weights}
    if rank == 0:
        (folder / f"{ranks}.json").write_text(json.dumps(rows))
        save_file(after, folder / f"{ranks}.safetensors")
    dist.barrier()
    group.leave()


def test_two_ranks_find_what_one_does(tmp_path: Path):
    write_example(tmp_path / "start")
    make("mamba2", tmp_path / "teacher")  # it needs each sample in a row of its own
    for ranks in (1, 2):
        started = start_ranks(run_rank, ranks, free_port(), tmp_path, world_size=ranks)
        while not started.join():
            pass
    one, two = (json.loads((tmp_path / f"{ranks}.json").read_text()) for ranks in (1, 2))
    for row, other in zip(one, two, strict=True):
        assert {"kl/reference", "kl/teacher", "teacher/logprob_gap"} <= row.keys()
        assert other == pytest.approx(row, rel=1e-4, abs=1e-6)
    assert one[0]["kl/reference"] == pytest.approx(0, abs=1e-9) != one[1]["kl/reference"]
    weights, others = (load_file(tmp_path / f"{ranks}.safetensors") for ranks in (1, 2))
    assert all(weights[name].allclose(others[name], atol=1e-5) for name in weights)
