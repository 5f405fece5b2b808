"""A program that trains with DeepSpeed on two ranks, and saves with its engine; started by torchrun.

`deepspeed_program.py train OUT` trains what RUNS lists; `resume OUT` goes on from universal checkpoints.
`trainer OUT` does both with transformers' Trainer: it goes on from `OUT/back`, where that is there.
"""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

STEPS = 2
RATE = 1e-3
BETAS = (0.9, 0.95)
WIDTH = 24


@dataclass(frozen=True)
class Run:
    """A way to train.

    kind: of the model's computation. groups: of the optimiser. more: a name in ZERO, "warmup" for a schedule,
    or "cpu-adam" for DeepSpeed's own optimiser. frozen: whether the embeddings are not trained.
    """

    model: str
    stage: int
    kind: str = "fp32"
    groups: int = 1
    more: str = ""
    frozen: bool = False

    @property
    def name(self) -> str:
        """The folder of its checkpoints."""
        parts = (self.model, f"zero{self.stage}", self.kind, self.more, "frozen" if self.frozen else "")
        return "-".join(part for part in parts if part)


ZERO = {"subgroups": {"sub_group_size": 20000}, "round-robin": {"round_robin_gradients": True}}
WARMUP = {
    "type": "WarmupLR",
    "params": {"warmup_max_lr": RATE, "warmup_num_steps": 10, "warmup_type": "linear"},
}
RUNS = [
    *(Run(model, stage) for model in ("llama", "qwen3_tied", "qwen3_moe") for stage in (1, 2, 3)),
    *(Run("llama", stage, "bf16", groups=2) for stage in (1, 2, 3)),
    # DeepSpeed refuses to compute in float16 on processors without the instructions for it.
    *([Run("llama", 2, "fp16")] if torch.ops.mkldnn._is_mkldnn_fp16_supported() else []),
    Run("llama", 3, groups=2, more="subgroups"),
    Run("llama", 2, groups=2, more="round-robin"),
    Run("llama", 2, more="warmup"),
    *(Run("llama", stage, more="cpu-adam") for stage in (2, 3)),
    *(Run("llama", stage, frozen=True) for stage in (1, 2, 3)),
]


def tokens(step: int, vocabulary: int) -> torch.Tensor:
    """The rows that a step learns: int64 [2, WIDTH]."""
    return torch.randint(0, vocabulary, (2, WIDTH), generator=torch.Generator().manual_seed(step))


class Program:
    """A model in an engine of DeepSpeed."""

    def __init__(self, folder: Path, run: Run, seed: int | None = None):
        self.run = run
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        if seed is not None:
            torch.manual_seed(seed)
            for parameter in self.model.parameters():
                torch.nn.init.normal_(parameter)
        if run.frozen:
            self.model.get_input_embeddings().requires_grad_(False)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        groups: list[dict[str, Any]] = [{"params": parameters, "weight_decay": 0.0}]
        if run.groups == 2:
            groups = [
                {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
                {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
            ]
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": run.stage, **ZERO.get(run.more, {})},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "checkpoint": {"load_universal": seed is not None},
        }
        if run.more == "warmup":
            config["scheduler"] = WARMUP
        if run.kind != "fp32":
            config[run.kind] = {"enabled": True}
        self.engine, *_ = deepspeed.initialize(
            model=self.model,
            optimizer=(DeepSpeedCPUAdam if run.more == "cpu-adam" else torch.optim.AdamW)(
                groups, lr=RATE, betas=BETAS
            ),
            config=config,
            dist_init_required=False,
        )

    def step(self, number: int) -> float:
        """Learn from the rows of a step; the mean loss of all ranks."""
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        rows = tokens(number, self.model.config.vocab_size)[rank::world]
        loss = self.engine(input_ids=rows, labels=rows, use_cache=False).loss
        self.engine.backward(loss)
        self.engine.step()
        mean = loss.detach().float()
        torch.distributed.all_reduce(mean)
        return mean.item() / world

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The masters and moments; on all ranks together.

        Of two groups, DeepSpeed's own function does not find the moments; with round-robin gradients, it
        gives the values of other parameters (0.19.8), so the model's own weights stand for the masters.
        """
        kinds = ("exp_avg", "exp_avg_sq") if len(self.engine.optimizer.param_groups) == 1 else ()
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad:
                continue
            astray = self.run.more == "round-robin"
            yield name, (parameter.detach() if astray else safe_get_full_fp32_param(parameter)).clone()
            for kind in kinds:
                yield f"{name}.{kind}", safe_get_full_optimizer_state(parameter, kind).clone()


def write(out: Path, name: str, program: Program) -> None:
    """Write the state to `<name>.safetensors`, from rank 0."""
    found = dict(program.state())
    if torch.distributed.get_rank() == 0:
        save_file(found, out / f"{name}.safetensors")


def train(out: Path) -> None:
    """Train STEPS steps, save, and write the state before and after the next step, and its loss."""
    for run in RUNS:
        folder = out / run.name
        program = Program(out / run.model, run)
        losses = [program.step(number) for number in range(1, STEPS + 1)]
        program.engine.save_checkpoint(str(folder), tag=f"global_step{STEPS}")
        write(folder, "before", program)
        losses.append(program.step(STEPS + 1))
        write(folder, "after", program)
        if torch.distributed.get_rank() == 0:
            (folder / "losses.json").write_text(json.dumps(losses))
            print(run.name, "trained", losses, flush=True)
        program.engine.destroy()


def resume(out: Path) -> None:
    """Go on from `<run>/universal`, and write the state before and after the next step, and its loss."""
    world = torch.distributed.get_world_size()
    for run in RUNS:
        folder = out / run.name
        if not (folder / "universal").exists():
            continue
        program = Program(out / run.model, run, seed=99)
        engine = program.engine
        path, _ = engine.load_checkpoint(str(folder / "universal"))
        assert path is not None
        assert engine.global_steps == STEPS
        if run.more == "warmup":
            assert engine.lr_scheduler.last_batch_iteration == STEPS - 1
        for state in engine.optimizer.optimizer.state.values():  # see docs/how-to/formats-deepspeed.md
            state["step"] = state["step"].clone()
        write(folder, f"loaded-{world}", program)
        loss = program.step(STEPS + 1)
        write(folder, f"resumed-{world}", program)
        if torch.distributed.get_rank() == 0:
            (folder / f"resumed-{world}.json").write_text(json.dumps(loss))
            print(run.name, "resumed on", world, loss, flush=True)
        engine.destroy()


class SameRow(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Gives the first row of `tokens(STEPS + 1)`, whatever is asked for."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = tokens(STEPS + 1, 100)[0]
        return {"input_ids": row, "labels": row}


def trainer(out: Path) -> None:
    """Let Trainer train STEPS + 1 steps, or go on to there, and write each step's loss."""
    from transformers import Trainer, TrainingArguments

    back = out / "back" if (out / "back").exists() else None
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "checkpoint": {"load_universal": back is not None},
    }
    arguments = TrainingArguments(
        output_dir=str(out / ("resumed" if back else "first")),
        per_device_train_batch_size=1,
        max_steps=STEPS + 1,
        save_steps=1,
        logging_steps=1,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        use_cpu=True,
        deepspeed=config,
        report_to=[],
        disable_tqdm=True,
    )
    model = AutoModelForCausalLM.from_pretrained(out / "llama", dtype=torch.float32)
    run = Trainer(model=model, args=arguments, train_dataset=SameRow())
    done = run.train(resume_from_checkpoint=str(back) if back else None)
    if run.args.process_index == 0:
        losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
        last = losses[-1] if back is None else done.training_loss  # of the step after the resumption
        (out / ("resumed.json" if back else "trained.json")).write_text(json.dumps(last))
        print("Trainer", "resumed" if back else "trained", last, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    deepspeed.init_distributed(dist_backend="gloo")
    {"train": train, "resume": resume, "trainer": trainer}[sys.argv[1]](Path(sys.argv[2]))
