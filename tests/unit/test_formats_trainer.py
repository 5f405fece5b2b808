"""Checkpoints of a real Trainer of transformers: Cairn goes on from them, and Trainer from Cairn's."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from families import make
from one_rank import one_rank
from runs import Finished
from test_families import make_rows
from test_formats import begun, ckpt, commit, loss_of
from tiny import tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments, get_scheduler

from cairn.checkpoint.step_folder import StepFolder, verify
from cairn.checkpoint.store import CheckpointStore
from cairn.config.optimizer import SchedulerConfig
from cairn.config.trainer import SFTConfig
from cairn.formats.huggingface.hf_trainer import schedule_of
from cairn.run.batches import FROM_TEXT, Batch, Sample
from cairn.run.recipe import TRAINER, settings_of
from cairn.trainer.group import RankGroup
from cairn.trainer.losses import Likelihood
from cairn.trainer.models.model import build_model
from cairn.trainer.models.trained import Trained
from cairn.trainer.optimizers import make_optimizer
from cairn.trainer.state import POLICY, TrainerProgress, TrainerState
from cairn.trainer.step.train_step import train_step

pytest.importorskip("accelerate", reason="transformers' Trainer needs it; it is in the group `formats`")

group, ckpt = one_rank, ckpt

FAMILIES = ["qwen3_tied", "llama", "qwen3_moe"]
ROWS, WIDTH = 16, 12
TOKENS = torch.arange(ROWS * WIDTH).reshape(ROWS, WIDTH) * 7 % 90 + 5
OPTIMIZER_SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.01}


class Observed(Trainer):
    """Trainer, which also notes what it trains on, and each loss as it is."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.rows: list[torch.Tensor] = []
        self.losses: list[float] = []

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        self.rows.append(inputs["input_ids"].clone())
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.losses.append(loss.item())
        return loss


def trainer_of(model: PreTrainedModel, out: Path, **options: Any) -> Observed:
    """A Trainer with AdamW, two rows a step."""
    arguments = TrainingArguments(
        str(out),
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        adam_beta2=0.99,
        weight_decay=0.01,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    return Observed(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in TOKENS])


def opened(folder: Path) -> PreTrainedModel:
    """The model in a folder, of which every weight must have been found."""
    model, about = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(about.values()), about
    return model


def begin(folder: Path, group: RankGroup, **settings: Any) -> TrainerState:
    """Cairn's state before its first step, the weights still undefined."""
    config = SFTConfig(seq_len=40, optimizer=OPTIMIZER_SETTINGS, **settings)
    model = build_model(folder, config, group)
    policy = Trained(model, make_optimizer(model.named_parameters(), config.optimizer))
    return TrainerState(config, group, {POLICY: policy}, TrainerProgress())


def update(state: TrainerState, number: int, rows: torch.Tensor) -> float:
    """Cairn's optimiser step on these rows; returns the loss."""
    samples = [Sample(row.numpy(), np.arange(WIDTH) >= 1) for row in rows.to(torch.int32)]
    batch = make_rows(state, Batch(samples, sampling=FROM_TEXT))
    return train_step(state, batch, number, Likelihood())["loss"]


def assert_same_weights(state: TrainerState, folder: Path):
    """Those of Cairn's model and of a folder that Trainer saved."""
    theirs = opened(folder).state_dict()
    for name, ours in state.policy.module.state_dict().items():
        torch.testing.assert_close(
            ours, theirs[name], rtol=1e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


@dataclass
class Ran:
    """A Trainer that saved checkpoint-2 and made one more step, which it saved as well."""

    trainer: Observed
    out: Path


@pytest.fixture(scope="module", params=FAMILIES)
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    out = tmp_path_factory.mktemp(request.param)
    model = opened(make(request.param, out / "model"))
    trainer = trainer_of(model, out, max_steps=3, save_steps=2, logging_steps=1)
    trainer.train()
    return Ran(trainer, out)


def test_cairn_makes_trainers_next_step(
    ckpt: Callable[..., Finished], group: RankGroup, ran: Ran, tmp_path: Path
):
    """From checkpoint-2: the same loss and, after the update, the same weights as Trainer itself."""
    finished = ckpt("import", ran.out / "checkpoint-2", tmp_path / "run", "--model", ran.out / "model")
    assert finished.code == 0, finished.output
    step = CheckpointStore(tmp_path / "run" / "checkpoints").folder(2)
    assert verify(step).parts == ["trainer"]
    assert "the position in the data (step 2, epoch 0.25, 2 records at a time)" in finished.output
    record = StepFolder(step).trainer_state()
    assert record is not None
    assert record.recipe is not None
    settings = record.recipe["settings"]
    schedule = {n.partition(".")[2]: v for n, v in settings.items() if n.startswith("scheduler.")}
    assert schedule == {"type": "linear", "warmup_steps": 1, "steps": 4, "min_lr_ratio": 0.0}
    assert settings["optimizer.lr"] == OPTIMIZER_SETTINGS["lr"]
    state = begin(step / "model", group, scheduler=schedule)
    state.load(step)
    loss = update(state, 3, ran.trainer.rows[2])
    assert loss == pytest.approx(ran.trainer.losses[2], rel=1e-5)
    assert_same_weights(state, ran.out / "checkpoint-3")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_trainer_makes_cairns_next_steps(
    ckpt: Callable[..., Finished], group: RankGroup, tmp_path: Path, family: str
):
    """From two steps of Cairn, and whatever weights it was made with: losses and weights are Cairn's."""
    base = make(family, tmp_path / "base")
    state = begin(base, group, scheduler={"type": "cosine", "warmup_steps": 1, "steps": 5})
    state.policy.module.load_state_dict(opened(base).state_dict())
    update(state, 1, TOKENS[:3])
    update(state, 2, TOKENS[3:6])
    settings = settings_of(state.config.model_dump(), TRAINER)
    step = commit(state.policy, CheckpointStore(tmp_path / "run" / "checkpoints"), 2, base, settings)
    out = tmp_path / "out" / "checkpoint-2"
    finished = ckpt("export", step, out, "--format", "hf-trainer", "--shard-size", "100K")
    assert finished.code == 0, finished.output
    assert (out / "model.safetensors.index.json").exists()
    assert loss_of(opened(out)) == loss_of(opened(step / "model"))

    options = {"max_steps": 4, "lr_scheduler_type": "cosine", "logging_steps": 1}
    trainer = trainer_of(opened(base), tmp_path / "out", **options)
    trainer.train(resume_from_checkpoint=str(out))
    assert trainer.state.global_step == 4
    ours = [update(state, number, rows) for number, rows in zip((3, 4), trainer.rows, strict=True)]
    assert ours == pytest.approx(trainer.losses, rel=1e-5)
    assert_same_weights(state, tmp_path / "out" / "checkpoint-4")


def test_what_trainer_could_not_go_on_from_is_refused(
    ckpt: Callable[..., Finished], group: RankGroup, tmp_path: Path
):
    """A step that does not say its settings, one of weights only, and weights that Trainer would decay."""
    base = make("qwen3_tied", tmp_path / "base")
    state = begin(base, group)
    state.policy.module.load_state_dict(opened(base).state_dict())
    update(state, 1, TOKENS[:3])

    def refused(settings: dict[str, object], trained: Trained = state.policy) -> str:
        run = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        step = commit(trained, CheckpointStore(run / "checkpoints"), 1, base, settings)
        finished = ckpt("export", step, tmp_path / "out", "--format", "hf-trainer")
        assert (finished.code, (tmp_path / "out").exists()) == (1, False)
        return finished.output

    settings = settings_of(state.config.model_dump(), TRAINER)
    assert "does not say its optimizer.lr, optimizer.eps" in refused(
        {name: v for name, v in settings.items() if name not in ("optimizer.lr", "optimizer.eps")}
    )
    ending = {**settings, "scheduler.type": "linear"}
    ending.pop("scheduler.steps", None)
    assert "does not say where its linear schedule ends" in refused(ending)
    module = state.policy.module
    untrained = Trained(module, make_optimizer(module.named_parameters(), state.config.optimizer))
    assert "holds weights only" in refused(settings, untrained)


def test_other_weights_that_decay_are_listed(ckpt: Callable[..., Finished], tmp_path: Path):
    """Trainer decays vectors that are no biases and no norms; without weight decay nothing differs."""
    base = make("mamba", tmp_path / "base")
    settings = {"optimizer.lr": 1e-2, "optimizer.betas": [0.9, 0.95], "optimizer.eps": 1e-8}
    trained = begun("mamba")
    for decay, code in ((0.1, 1), (0.0, 0)):
        store = CheckpointStore(tmp_path / f"run{code}" / "checkpoints")
        step = commit(trained, store, 2, base, {**settings, "optimizer.weight_decay": decay})
        finished = ckpt("export", step, tmp_path / "out", "--format", "hf-trainer")
        assert finished.code == code, finished.output
        assert ("differ in these weights: backbone.layers.0.mixer.D," in finished.output) == bool(decay)
    finished = ckpt("import", tmp_path / "out", tmp_path / "again")
    assert finished.code == 0, finished.output
    assert "weight decay of" not in finished.output
    state = torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True)
    for parameters in state["param_groups"][:1]:
        parameters["weight_decay"] = 0.1
    torch.save(state, tmp_path / "out" / "optimizer.pt")
    finished = ckpt("import", tmp_path / "out", tmp_path / "decaying")
    assert "left out: the weight decay of backbone.layers.0.mixer.D," in finished.output


def test_cairn_makes_the_next_step_of_trls_trainer(
    ckpt: Callable[..., Finished], group: RankGroup, tmp_path: Path
):
    """Its checkpoint-2 is Trainer's: the loss of the third step is the same."""
    trl = pytest.importorskip("trl", reason="TRL's own SFTTrainer writes the checkpoint; it is in `bench`")
    seen: list[tuple[torch.Tensor, float]] = []

    class Noting(trl.SFTTrainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
            loss = super().training_step(model, inputs, num_items_in_batch)
            seen.append((inputs["input_ids"].clone(), loss.item()))
            return loss

    arguments = trl.SFTConfig(
        str(tmp_path / "out"),
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        adam_beta2=0.99,
        weight_decay=0.01,
        lr_scheduler_type="linear",
        max_steps=3,
        save_steps=2,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    rows = Dataset.from_list([{"input_ids": row, "labels": row} for row in TOKENS.tolist()])
    model = opened(make("llama", tmp_path / "model"))
    Noting(model, arguments, train_dataset=rows, processing_class=tokenizer()).train()
    finished = ckpt("import", tmp_path / "out" / "checkpoint-2", tmp_path / "run")
    assert finished.code == 0, finished.output
    assert "the source's scheduler.steps: 4" in finished.output
    step = CheckpointStore(tmp_path / "run" / "checkpoints").folder(2)
    state = begin(step / "model", group, scheduler={"type": "linear", "warmup_steps": 1, "steps": 4})
    state.load(step)
    assert update(state, 3, seen[2][0]) == pytest.approx(seen[2][1], rel=1e-5)


# Schedules


def rates_of(kind: str, warmup: int, end: int, **specific: Any) -> list[float]:
    """The rates of transformers' own schedule with a peak of 1: item k is that of step k + 1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = get_scheduler(kind, optimizer, warmup, end, scheduler_specific_kwargs=specific)
    rates = []
    for _ in range(end):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


def logged(rates: list[float], step: int, every: int, shift: int) -> list[dict[str, Any]]:
    """The log of Trainer's first `step` steps; `shift` is 0 where it logs the next step's rate."""
    numbers = range(every, step + 1, every)
    return [{"step": n, "learning_rate": rates[n - shift], "loss": 1.0} for n in numbers] + [
        {"eval_loss": 2.0}
    ]


@pytest.mark.parametrize("shift", [1, 0])
@pytest.mark.parametrize(
    ("kind", "warmup"),
    [
        ("constant", 0),
        ("constant_with_warmup", 7),
        ("linear", 0),
        ("linear", 7),
        ("cosine", 0),
        ("cosine", 7),
    ],
)
def test_the_schedule_is_told_by_its_rates(kind: str, warmup: int, shift: int):
    """From the rates that were logged and the next one: Cairn's settings for it give all later rates."""
    rates = rates_of(kind, warmup, end=60)
    found = schedule_of(logged(rates, 40, 10, shift), rates[40], 40, 60)
    names = {"type", "warmup_steps", "steps", "min_lr_ratio"}
    settings = {name: found[f"scheduler.{name}"] for name in names if f"scheduler.{name}" in found}
    steps = settings.get("steps", 0)
    ours = [SchedulerConfig(**settings).rate(number, 1.0, steps) for number in range(41, 61)]
    assert ours == pytest.approx(rates[40:], rel=1e-9)
    assert settings["type"] == kind.removesuffix("_with_warmup")


@pytest.mark.parametrize(
    ("kind", "warmup", "specific"),
    [
        ("linear", 50, {}),
        ("polynomial", 7, {"power": 2.0}),
        ("inverse_sqrt", 7, {}),
        ("cosine_with_restarts", 0, {"num_cycles": 2}),
    ],
)
def test_what_the_rates_do_not_tell_is_not_said(kind: str, warmup: int, specific: dict[str, Any]):
    """A warm-up that is not over, and schedules that Cairn lacks."""
    rates = rates_of(kind, warmup, 60, **specific)
    assert schedule_of(logged(rates, 40, 10, 1), rates[40], 40, 60) == {}


def test_one_rate_does_not_tell_a_schedule():
    """At the peak, it may be that of the last step of a warm-up."""
    assert schedule_of([], 1.0, 40, 60) == {}
    assert schedule_of([], 0.5, 0, 60) == {}
