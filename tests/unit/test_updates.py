"""Steps that update the weights several times, and models that learn beside the policy."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from one_rank import one_rank
from pydantic import ValidationError
from tiny import write_example

from cairn.config.rl_trainer import TrainerConfig
from cairn.run.batches import Batch, Sample, Sampling
from cairn.trainer.group import RankGroup
from cairn.trainer.losses import OLD_LOGPROBS, LossInputs, LossSums
from cairn.trainer.losses.likelihood import Likelihood
from cairn.trainer.models.adapter import make_policy
from cairn.trainer.models.model import weights
from cairn.trainer.models.trained import Trained
from cairn.trainer.packing import BatchCounts, MicroBatch, make_rank_batch
from cairn.trainer.scoring.tokens import Scorer, add_logprobs
from cairn.trainer.spikes import TrainingDiverged
from cairn.trainer.state import POLICY, TrainerProgress, TrainerState
from cairn.trainer.step.train_step import Learner, train_step

group = one_rank
CONFIG = TrainerConfig(optimizer={"lr": 0.01, "eps": 1e-3}, seq_len=24)
SAMPLES = [Sample(np.arange(5, 8 + n, dtype=np.int32), np.ones(3 + n, bool)) for n in range(6)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_example(tmp_path_factory.mktemp("model"))


def begin(group: RankGroup, folder: Path, **others: Trained) -> TrainerState:
    state = TrainerState(
        CONFIG, group, {POLICY: make_policy(folder, CONFIG, group), **others}, TrainerProgress()
    )
    state.begin(folder)
    return state


def make_work(samples: list[Sample], **how: int):
    return make_rank_batch(Batch(samples, sampling=Sampling(1.0)), CONFIG, rank=0, world_size=1, **how)


def values(model: Trained) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in weights(model.module).items()}


def equal(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(some[name], others[name]) for name in some.keys() | others.keys())


@pytest.mark.parametrize(
    ("how", "parts"),
    [
        ({"updates": 2}, [SAMPLES, SAMPLES]),
        ({"updates": 2, "mini_batches": 2}, [SAMPLES[::2], SAMPLES[1::2]]),
        ({"updates": 4, "mini_batches": 2}, [SAMPLES[::2], SAMPLES[1::2]] * 2),
    ],
)
def test_several_updates_are_so_many_steps(group: RankGroup, folder: Path, how: dict, parts: list):
    """And the step's metrics are over all of them."""
    once, apart = begin(group, folder), begin(group, folder)
    row = train_step(once, make_work(SAMPLES, **how), 1, Likelihood())
    rows = [train_step(apart, make_work(part), 1, Likelihood()) for part in parts]
    assert equal(values(once.policy), values(apart.policy))
    assert row["loss"] == pytest.approx(np.mean([one["loss"] for one in rows]))
    assert once.progress == TrainerProgress(1, sum(len(s.token_ids) for s in SAMPLES), len(SAMPLES))


def test_more_parts_than_samples_are_as_many_as_samples():
    assert len(make_work(SAMPLES[:2], mini_batches=4, updates=4).parts) == 2


def test_every_update_sees_the_logprobs_of_the_steps_begin(group: RankGroup, folder: Path):
    class Keeps(Likelihood):
        def __call__(self, inputs: LossInputs) -> LossSums:
            seen.append((inputs.logprobs.detach().clone(), inputs.old_logprobs.clone()))
            return super().__call__(inputs)

    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    state = begin(group, folder)
    train_step(state, make_work(SAMPLES), 1, Keeps())
    assert all(torch.equal(now, old) for now, old in seen), "there is one update, so they are the same"
    seen.clear()
    work = make_work(SAMPLES, updates=2)
    add_logprobs(work, OLD_LOGPROBS, state.scorer, group.device)
    train_step(state, work, 2, Keeps())
    before, after = seen[: len(work.micros)], seen[len(work.micros) :]
    for (first, old), (second, still_old) in zip(before, after, strict=True):
        torch.testing.assert_close(first, old)
        assert torch.equal(old, still_old)
        assert (second - old).abs().max() > 1e-4, "the first update has changed the weights"


class Second(Learner):
    """Learns as the policy does, from weights of its own."""

    name, loss_name = "second", "Likelihood"

    def __init__(self, model: Trained, scale: float = 1.0):
        self.model, self.scale = model, scale
        self.scorer = Scorer(model.module, torch.device("cpu"))  # pyright: ignore[reportArgumentType]

    def normaliser(self, counts: BatchCounts) -> float:
        return counts.learned

    def outputs(self, micro: MicroBatch, temperature: float) -> torch.Tensor:
        return self.scorer.logprobs(micro, temperature)

    def sums(self, micro: MicroBatch, outputs: torch.Tensor) -> LossSums:
        inputs = LossInputs.of(outputs, micro)
        sums = Likelihood()(inputs)
        return replace(sums, loss=sums.loss * self.scale)


def test_a_model_beside_the_policy_learns_as_it_would_alone(group: RankGroup, folder: Path):
    alone, both = begin(group, folder), begin(group, folder, second=make_policy(folder, CONFIG, group))
    row = train_step(alone, make_work(SAMPLES), 1, Likelihood())
    found = train_step(
        both, make_work(SAMPLES), 1, Likelihood(), further_learners=[Second(both.models["second"])]
    )
    for model in both.models.values():
        assert equal(values(model), values(alone.policy))
    of_second = {f"second/{name}": row[name] for name in ("loss", "grad_norm", "lr")}
    assert found == {**row, **of_second}


def test_a_model_that_diverges_changes_nothing(group: RankGroup, folder: Path):
    state = begin(group, folder, second=make_policy(folder, CONFIG, group))
    before = {name: values(model) for name, model in state.models.items()}
    others = [Second(state.models["second"], scale=float("nan"))]
    with pytest.raises(TrainingDiverged, match="norm of the second is nan"):
        train_step(state, make_work(SAMPLES), 1, Likelihood(), further_learners=others)
    assert all(equal(values(model), before[name]) for name, model in state.models.items())


def test_parts_are_trained_on_equally_often():
    with pytest.raises(ValidationError, match="updates_per_batch = 3 is no multiple of mini_batches = 2"):
        TrainerConfig(updates_per_batch=3, mini_batches=2)
    assert TrainerConfig(updates_per_batch=4, mini_batches=2).mini_batches == 2
