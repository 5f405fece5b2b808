"""A step with a low-rank adapter: the loss of the merged model, and its gradient's chain rule."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import make
from one_rank import one_rank
from tiny import write_example

from cairn.checkpoint.tensors.sharded_files import read_tensors, write_tensors
from cairn.config.preferences import DPOConfig, DPOLossConfig
from cairn.config.rl_trainer import TrainerConfig
from cairn.config.trainer import SFTConfig, TrainerBase
from cairn.run.batches import FROM_TEXT, Batch, Sample, Sampling
from cairn.trainer.group import RankGroup
from cairn.trainer.losses import REFERENCE, SIDE, Loss, make_loss
from cairn.trainer.models.adapter import Adapter, make_policy
from cairn.trainer.models.trained import Trained
from cairn.trainer.packing import RankBatch, make_rank_batch
from cairn.trainer.state import POLICY, TrainerProgress, TrainerState
from cairn.trainer.step.train_step import PolicyLearner, StepMetrics, Update

group = one_rank
LENGTHS = (9, 14, 5, 12, 7, 16, 11, 6)
UNCLIPPED = {"max_grad_norm": 1e9}


def tokens_of(length: int, number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(5, 98, length).astype(np.int32)


def texts() -> Batch:
    made = [Sample(tokens_of(n, i), np.arange(n) > 1) for i, n in enumerate(LENGTHS)]
    return Batch(made, sampling=FROM_TEXT)


def pairs() -> Batch:
    made = []
    for i, n in enumerate(LENGTHS):
        columns = {REFERENCE: np.full(n, -3.0 * n, np.float32), SIDE: np.full(n, 1 - 2 * (i % 2), np.float32)}
        made.append(Sample(tokens_of(n, i), np.arange(n) > 2, columns))
    return Batch(made, sampling=FROM_TEXT, together=2)


def answers() -> Batch:
    draw = np.random.default_rng(0)
    made = [
        Sample.of_answer(
            tokens_of(3, i).tolist(),
            tokens_of(n, i).tolist(),
            logprobs=(-5 * draw.random(n)).tolist(),
            advantages=float(draw.normal()),
            reference_logprobs=(-5 * draw.random(n)).tolist(),
        )
        for i, n in enumerate(LENGTHS)
    ]
    return Batch(made, sampling=Sampling(0.7))


@dataclass(frozen=True)
class Case:
    """A kind of training. `lora` and `settings` are added to its configuration."""

    kind: type[TrainerBase] = SFTConfig
    batch: Any = texts
    family: str | None = None
    tied: bool = True
    lora: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def config(self, *, adapted: bool) -> TrainerBase:
        own = {"lora": {"rank": 4, "alpha": 6, **self.lora}} if adapted else {}
        return self.kind.model_validate({"seq_len": 24, "optimizer": UNCLIPPED, **self.settings, **own})

    def loss(self, config: Any) -> Loss:
        return make_loss(config.loss, getattr(config, "kl_in_loss", None))


KL = {"kl": {"coef": 0.1, "reference": "http://127.0.0.1:9"}}
CASES = {
    "sft": Case(),
    "sft, untied, head in full, rslora": Case(
        tied=False, lora={"rslora": True, "modules_to_save": ["lm_head"]}
    ),
    "activation checkpointing": Case(settings={"activation_checkpointing": True}),
    "mixture with balance": Case(family="qwen3_moe", settings={"router_aux_coef": 0.3}),
    "dpo": Case(DPOConfig, pairs, settings={"loss": DPOLossConfig()}),
    "orpo": Case(DPOConfig, pairs, settings={"loss": {"type": "orpo"}}),
    "rl with kl": Case(TrainerConfig, answers, settings=KL),
    "rl in mini-batches": Case(TrainerConfig, answers, settings={"updates_per_batch": 2}),
}


def begun(case: Case, group: RankGroup, folder: Path) -> tuple[Path, TrainerState, TrainerState]:
    """The base, a trainer of an adapter without zeros, and one of the whole model with the same outputs."""
    base = make(case.family, folder) if case.family else write_example(folder, tied=case.tied)
    states = []
    for adapted in (True, False):
        config = case.config(adapted=adapted)
        policy = make_policy(base, config, group)
        states.append(TrainerState(config, group, {POLICY: policy}, TrainerProgress()))
    policy = states[0].policy
    policy.begin(base)
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in policy.trained().items():
            if ".lora_A." not in name:
                parameter += 0.1 * torch.randn(parameter.shape, generator=draw)
    merge(policy, states[1].policy, folder)
    for state in states:
        state.check_model()
    return base, states[0], states[1]


def merge(adapter: Trained, whole: Trained, folder: Path) -> None:
    """Give `whole` the adapter's merged weights."""
    merged = folder / "merged"
    merged.mkdir(exist_ok=True)
    write_tensors(merged, adapter.served(), "model")
    read_tensors(merged, whole.saved(), "model")


def gradients(state: TrainerState, work: RankBatch, loss: Loss, number: int) -> StepMetrics:
    update = Update(state, work.parts[number], work.temperature, 1, number)
    return update.gradients([PolicyLearner(state, loss, lambda _: None)])


def check_chain_rule(adapter: Trained, whole: Trained) -> None:
    """With y = (W + s B A) x, the gradients of A and B are s B' G and s G A', where G is that of the sum."""
    assert isinstance(adapter, Adapter)
    of_whole = dict(whole.module.named_parameters())
    seen = set()
    for name, layer in adapter._layers():
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        outer, scale = of_whole[f"{name}.weight"].grad.double(), layer.scaling["default"]
        for found, wanted in (
            (a, scale * b.double().T @ outer),
            (b, scale * outer @ a.double().T),
        ):
            size = wanted.norm()
            assert size > 0
            assert (found.grad.double() - wanted).norm() < 2e-5 * size
            seen.add(id(found))
    for name, parameter in adapter.trained().items():
        if id(parameter) not in seen:
            torch.testing.assert_close(parameter.grad, of_whole[name].grad, rtol=1e-4, atol=1e-6)
    frozen = [p for p in adapter.module.parameters() if not p.requires_grad]
    assert frozen
    assert all(p.grad is None for p in frozen)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_an_update_is_that_of_the_merged_model(name: str, group: RankGroup, tmp_path: Path):
    """Its metrics too, in every update of a batch, whatever the task."""
    case = CASES[name]
    _, adapted, whole = begun(case, group, tmp_path)
    config = adapted.config
    updates = getattr(config, "updates_per_batch", 1)
    how = {"rank": 0, "world_size": 1, "mini_batches": updates, "updates": updates}
    work = make_rank_batch(case.batch(), config, arrange=adapted.scorer.rows.arrange, **how)
    assert len(work.parts[0].micros) > 1, "gradients are accumulated"
    for number in range(updates):
        found, wanted = (gradients(state, work, case.loss(config), number) for state in (adapted, whole))
        assert found.means.keys() == wanted.means.keys()
        for metric in found.means.keys() - {"grad_norm"}:
            assert found.means[metric] == pytest.approx(wanted.means[metric], rel=2e-4, abs=1e-5), metric
        check_chain_rule(adapted.policy, whole.policy)
        for parameters in adapted.policy.optimizer.param_groups:
            parameters["lr"] = 1e-2
        adapted.policy.optimizer.step()
        for state in (adapted, whole):
            state.policy.module.zero_grad(set_to_none=True)
        merge(adapted.policy, whole.policy, tmp_path)
