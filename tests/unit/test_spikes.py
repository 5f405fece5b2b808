"""The guard against spikes: which updates it leaves out, and that a resumed run decides alike."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from one_rank import one_rank  # noqa: F401
from pydantic import ValidationError
from tiny import write_example

from cairn.checkpoint.step_folder import TrainerRecord
from cairn.config.optimizer import SpikeConfig
from cairn.config.rl_trainer import TrainerConfig
from cairn.config.trainer import SFTConfig
from cairn.run.batches import FROM_TEXT, Batch, Sample
from cairn.tools.audit.report import Report
from cairn.tools.audit.steps import note_skipped
from cairn.trainer.group import RankGroup
from cairn.trainer.losses import Likelihood, LossInputs, LossSums
from cairn.trainer.models.adapter import make_policy
from cairn.trainer.packing import make_rank_batch
from cairn.trainer.spikes import SpikeGuard, TrainingDiverged
from cairn.trainer.state import POLICY, TrainerProgress, TrainerState
from cairn.trainer.step.train_step import train_step

SKIP = SpikeConfig(on_spike="skip", warmup=3, grad_norm=2.0, max_in_a_row=2, decay=0.5)


def judged(guard: SpikeGuard, *norms: float, loss: float = 1.0) -> list[bool]:
    metrics = [{"loss": loss, "grad_norm": norm} for norm in norms]
    return [guard.spike_in(one, f"step {i}") is not None for i, one in enumerate(metrics)]


def test_what_is_above_the_running_mean_is_skipped():
    """Nothing before the warm-up is over; and what was skipped is not in the mean."""
    guard = SpikeGuard(SKIP)
    assert judged(guard, 1.0, 9.0, 1.0) == [False] * 3  # the mean is ((1 + 9) / 2 + 1) / 2 = 3
    assert judged(guard, 6.1, 6.0, 9.1, 9.0) == [True, False, True, False]
    assert guard.saved() == {"grad_norm": 6.75, "loss": 1.0, "applied": 5, "skipped": 2, "in_a_row": 0}


def test_a_loss_can_spike_too():
    guard = SpikeGuard(SKIP.model_copy(update={"loss": 3.0}))
    assert judged(guard, 1.0, 1.0, 1.0) == [False] * 3
    assert judged(guard, 1.0, loss=3.5) == [True]
    assert judged(guard, 1.0, loss=math.nan) == [True]
    assert judged(guard, 1.0, loss=2.5) == [False]


def test_what_is_not_finite_is_skipped_after_the_warm_up_only():
    guard = SpikeGuard(SKIP)
    with pytest.raises(TrainingDiverged, match=r"step 0: the gradient's norm is nan; lower optimizer\.lr"):
        judged(guard, math.nan)
    judged(guard, 1.0, 1.0, 1.0)
    assert judged(guard, math.inf, 1.0, math.nan) == [True, False, True]
    assert guard.spike_in({"loss": 1.0, "grad_norm": 1.0, "critic/grad_norm": math.nan}, "step 7")
    with pytest.raises(TrainingDiverged, match=r"step 8: .* after 2 updates in a row that were left out"):
        guard.spike_in({"loss": 1.0, "grad_norm": math.inf}, "step 8")


def test_a_run_without_guard_ends_as_ever():
    guard = SpikeGuard(SpikeConfig())
    assert judged(guard, 1.0, 1e9) == [False, False]
    assert guard.saved() is None
    with pytest.raises(TrainingDiverged, match="norm of the critic is inf"):
        guard.spike_in({"loss": 1.0, "grad_norm": 1.0, "critic/grad_norm": math.inf}, "step 1")


def test_a_resumed_run_decides_alike():
    """From what trainer/state.json holds, whose other content is as before where there is no guard."""
    norms = [1.0, 1.5, 0.3, 7.0, 0.7, 2.0, 1.1, 3.0, 0.1]
    whole = SpikeGuard(SKIP)
    expected = judged(whole, *norms)
    first, second = SpikeGuard(SKIP), SpikeGuard(SKIP)
    begun = judged(first, *norms[:5])
    record = TrainerRecord(spikes=first.saved())
    assert b'"spikes"' in record.to_json()
    assert b'"spikes"' not in TrainerRecord().to_json()
    second.restore(record.spikes)
    assert begun + judged(second, *norms[5:]) == expected
    assert any(expected)
    assert second.saved() == whole.saved()


class Factor(Likelihood):
    """The likelihood, times a number."""

    factor = 1.0

    def __call__(self, inputs: LossInputs) -> LossSums:
        sums = super().__call__(inputs)
        return LossSums(sums.loss * self.factor, sums.means, sums.maxima)


def test_a_skipped_step_changes_nothing_and_is_counted(one_rank: RankGroup, tmp_path: Path):  # noqa: F811
    """Neither weights nor the optimiser's state; the step and its samples count, and the row says so."""
    config = SFTConfig(seq_len=24, optimizer={"lr": 0.01}, spike=SKIP)
    folder = write_example(tmp_path)
    policy = make_policy(folder, config, one_rank)
    state = TrainerState(config, one_rank, {POLICY: policy}, TrainerProgress())
    state.begin(folder)
    loss = Factor()
    draw = np.random.default_rng(0)

    def step(number: int, factor: float) -> dict[str, float]:
        loss.factor = factor
        samples = [Sample(draw.integers(3, 90, 12).astype(np.int32), np.ones(12, bool))]
        batch = Batch(samples, sampling=FROM_TEXT)
        return train_step(state, make_rank_batch(batch, config, rank=0, world_size=1), number, loss)

    def tensors() -> dict[str, torch.Tensor]:
        return {name: t.clone() for named in state.tensors().values() for name, t in named.items()}

    for number in (1, 2, 3):
        assert "skipped_updates" not in step(number, 1.0)
    before = tensors()
    for number, factor in ((4, 1e3), (5, math.nan)):
        row = step(number, factor)
        after = tensors()
        assert all(torch.equal(after[name], before[name]) for name in before)
        assert row["skipped_updates"] == 1
        assert all(math.isfinite(value) for value in row.values())
    assert state.progress == TrainerProgress(5, 60, 5)
    assert "skipped_updates" not in step(6, 1.0)
    after = tensors()
    assert not any(torch.equal(after[name], before[name]) for name in before if name.endswith(".step"))
    report = Report("run", "sft")
    note_skipped([{"step": 3}, {"step": 4, "skipped_updates": 1}, {"step": 5, "skipped_updates": 2}], report)
    assert report.ok
    (note,) = report.notes
    assert note.startswith("3 updates were skipped as spikes (spike.on_spike), in steps 4, 5: ")


@pytest.mark.parametrize(
    ("config", "section", "words"),
    [
        (TrainerConfig, {"on_spike": "skip", "loss": 3.0}, "spike.loss = 3.0 is for a loss that is above 0"),
        (SFTConfig, {"on_spike": "stop"}, "'off', 'skip' or 'rewind'"),
        (SFTConfig, {"grad_norm": 0.5}, "greater than 1"),
    ],
)
def test_wrong_settings_are_refused(config: Any, section: dict[str, Any], words: str):
    with pytest.raises(ValidationError, match=words):
        config(spike=section)
