"""What the trainer's weights give a few tokens; servers are checked against it."""

import numpy as np
import torch

from cairn.config.trainer import TrainerConfig
from cairn.run.batches import Sample
from cairn.run.messages import ROUNDING, Probe
from cairn.run.seeds import derive
from cairn.trainer.models.model import reshard
from cairn.trainer.packing import fill_rows
from cairn.trainer.scoring.tokens import Scorer
from cairn.trainer.self_check import ordinary_tokens, uncompiled

TOKENS = 32


@torch.no_grad()
def make_probe(scorer: Scorer, device: torch.device, config: TrainerConfig) -> Probe:
    """Score the run's probe under the current weights; all ranks call it. Changes no random state."""
    model = scorer.model
    draw = np.random.default_rng(derive(config.seed, "probe"))
    token_ids = draw.choice(np.array(ordinary_tokens(model.config), np.int32), TOKENS)
    micro = fill_rows([[Sample(token_ids, np.ones(TOKENS, bool))]]).to(device)
    was_training = model.training
    try:
        model.eval()
        with uncompiled(model):
            logprobs = scorer.logprobs(micro, 1.0)[0, : TOKENS - 1]
    finally:
        model.train(was_training)
        reshard(model)
    gpu = device.type == "cuda"
    # A server computes from the weights as they were published.
    kinds = (config.precision.settled(gpu=gpu).rounding, config.published_as(gpu=gpu))
    return Probe(token_ids.tolist(), logprobs.tolist(), max(kinds, key=lambda kind: ROUNDING[kind]))
