"""The load-balancing loss of mixtures of experts."""

from collections.abc import Iterator

import families
import numpy as np
import pytest
import torch
import torch.distributed as dist
from tiny import VOCABULARY

from cairn.config.rl_trainer import TrainerConfig
from cairn.run.batches import Batch, Sample, Sampling
from cairn.run.errors import UsageError
from cairn.trainer.group import RankGroup
from cairn.trainer.losses import Loss, LossInputs, LossSums
from cairn.trainer.models.trained import Trained
from cairn.trainer.packing import make_rank_batch
from cairn.trainer.router_aux_loss import METRIC, Balance, coefficient_of
from cairn.trainer.state import POLICY, TrainerProgress, TrainerState
from cairn.trainer.step.train_step import train_step


@pytest.fixture(scope="module")
def group() -> Iterator[RankGroup]:
    """One rank alone."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    yield RankGroup(0, 1, torch.device("cpu"), mesh)
    dist.destroy_process_group()


class Nothing(Loss):
    """Minimises nothing, so that gradients are those of the balance alone."""

    def __call__(self, inputs: LossInputs) -> LossSums:
        return LossSums(inputs.logprobs.sum() * 0)


def samples(*lengths: int) -> list[Sample]:
    draw = np.random.default_rng(0)
    return [Sample(draw.integers(3, VOCABULARY, n).astype(np.int32), np.ones(n, bool), {}) for n in lengths]


def step(family: str, group: RankGroup, lengths: list[int], **settings) -> tuple[dict, dict]:
    """Metrics, and the gradients, which clipping leaves as they are."""
    settings = {"seq_len": 32, "optimizer": {"max_grad_norm": 1e9, "lr": 1e-9}, **settings}
    config = TrainerConfig(**settings)
    model = families.make_model(family, 1).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    state = TrainerState(config, group, {POLICY: Trained(model, optimizer)}, TrainerProgress())
    batch = make_rank_batch(Batch(samples(*lengths), sampling=Sampling(1.0)), config, rank=0, world_size=1)
    kept = {}

    def keep() -> None:
        kept.update({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})

    return train_step(state, batch, 1, Nothing(), before_update=keep), kept


def by_transformers(family: str, rows: list[list[int]], coefficient: float) -> tuple[float, dict]:
    """The mean over tokens of the balance of single samples, each without padding; and its gradients."""
    model = families.make_model(family, 1).train()
    total, tokens = torch.zeros(()), sum(map(len, rows))
    for row in rows:
        ids = torch.tensor([row])
        out = model(input_ids=ids, output_router_logits=True, use_cache=False)
        total = total + out.aux_loss * len(row) / tokens
    (coefficient * total).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return total.item(), grads


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_it_is_transformers_loss_without_padding(group, family):
    """Samples of different lengths, each in a micro-batch of its own with padding behind it or not."""
    lengths = [32, 31, 30]
    metrics, grads = step(family, group, lengths, router_aux_coef=0.5)
    rows = [sample.token_ids.tolist() for sample in samples(*lengths)]
    expected, reference = by_transformers(family, rows, 0.5)
    assert metrics[METRIC] == pytest.approx(expected, rel=1e-5)
    assert expected > 1
    for name, gradient in reference.items():
        torch.testing.assert_close(grads[name], gradient, atol=1e-6, rtol=1e-4)
    assert any(gradient.abs().max() > 1e-4 for gradient in reference.values())


def test_padding_does_not_count(group):
    """Two rows of a micro-batch, of which one is mostly padding, against the same samples in one row."""
    padded, _ = step("qwen3_moe", group, [30, 4], micro_batch_size=2, router_aux_coef=1.0)
    ids = [sample.token_ids.tolist() for sample in samples(30, 4)]
    model = families.make_model("qwen3_moe", 1).train()
    logits = [model(input_ids=torch.tensor([row]), output_router_logits=True).router_logits for row in ids]
    balance = Balance(model, 1.0)
    expected = balance._of(tuple(torch.cat(pair) for pair in zip(*logits, strict=True)), 4, 2, None)
    assert padded[METRIC] == pytest.approx(expected.item(), rel=1e-5)


def test_without_it_nothing_is_computed(group):
    metrics, _ = step("qwen3_moe", group, [8])
    assert METRIC not in metrics


def test_the_model_s_own_weight_counts_if_its_configuration_turns_it_on():
    model = families.make_model("qwen3_moe", 1)
    assert coefficient_of(model, TrainerConfig()) == 0
    model.config.output_router_logits = True
    model.config.router_aux_loss_coef = 0.02
    assert coefficient_of(model, TrainerConfig()) == 0.02
    assert coefficient_of(model, TrainerConfig(router_aux_coef=0.0)) == 0


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_models_without_such_a_loss_are_refused(family):
    with pytest.raises(UsageError, match=r"router_aux_coef = 0.1: transformers has no load-balancing loss"):
        Balance(families.make_model(family, 1), 0.1)
