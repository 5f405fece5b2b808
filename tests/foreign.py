"""What tests of other programs' checkpoints do with them: read whole tensors, and take Cairn's next step."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from cairn.checkpoint.tensors.reader import DTYPES
from cairn.config.trainer import SFTConfig
from cairn.formats import TensorSource
from cairn.run.batches import FROM_TEXT, Batch, Sample
from cairn.trainer.group import RankGroup
from cairn.trainer.losses import Likelihood
from cairn.trainer.models.model import build_model
from cairn.trainer.models.trained import Trained
from cairn.trainer.optimizers import make_optimizer
from cairn.trainer.packing import make_rank_batch
from cairn.trainer.state import POLICY, TrainerProgress, TrainerState
from cairn.trainer.step.train_step import train_step


def values(source: TensorSource, piece: int = 1 << 20) -> torch.Tensor:
    """A whole tensor, read in pieces of so many values."""
    whole = torch.empty(source.spec.shape, dtype=DTYPES[source.spec.dtype])
    flat = whole.view(-1)
    for first in range(0, len(flat), piece):
        source.fill(first, flat[first : first + piece])
    return whole


def next_step(
    group: RankGroup, step: Path, number: int, rows: torch.Tensor, **optimizer: Any
) -> tuple[float, dict[str, torch.Tensor]]:
    """Cairn's step `number` after the step in the folder `step`: its loss, and the weights after it.

    Args:
        rows: int64 [rows, width], each learned from its second token on.
        optimizer: settings.
    """
    config = SFTConfig(seq_len=max(40, rows.shape[1]), optimizer=optimizer)
    model = build_model(step / "model", config, group)
    policy = Trained(model, make_optimizer(model.named_parameters(), config.optimizer))
    state = TrainerState(config, group, {POLICY: policy}, TrainerProgress())
    state.load(step)
    learned = np.arange(rows.shape[1]) >= 1
    batch = Batch([Sample(row, learned) for row in rows.to(torch.int32).numpy()], sampling=FROM_TEXT)
    work = make_rank_batch(batch, config, rank=0, world_size=1, arrange=state.scorer.rows.arrange)
    loss = train_step(state, work, number, Likelihood())["loss"]
    weights = model.state_dict()
    return loss, {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in weights.items()}
