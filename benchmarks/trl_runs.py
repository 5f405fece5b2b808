"""Runs of TRL's trainers, for benchmarks that compare with them: python trl_runs.py JOB.json...

Settings that both programs have are the same, and what TRL does otherwise by default is switched off: the
records come in the order that the job gives them, in float32. Three files are written as the run goes on, a
line at a time, so that a kill loses nothing that has happened:

- metrics.jsonl: a row for each optimiser step
- samples.jsonl: what entered the forward pass of each step, as digests of its token ids
- generations.jsonl: each time that answers are asked for, how many, before the first of their tokens is there

A job that finds a checkpoint goes on from it, as TRL's documentation has it (`resume_from_checkpoint=True`).
"""

import json
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

KINDS = ("sft", "dpo", "grpo")
METRICS, SAMPLES, GENERATIONS = "metrics.jsonl", "samples.jsonl", "generations.jsonl"
SAME: dict[str, Any] = {
    **{"bf16": False, "use_cpu": True, "gradient_checkpointing": False, "optim": "adamw_torch"},
    **{"lr_scheduler_type": "constant", "weight_decay": 0.0, "max_grad_norm": 1.0, "adam_epsilon": 1e-8},
    **{"report_to": "none", "logging_steps": 1, "disable_tqdm": True, "save_strategy": "no"},
}
"""Settings of all trainers, which a job's own may change."""
OF_KIND: dict[str, dict[str, Any]] = {
    "sft": {"train_sampling_strategy": "sequential", "completion_only_loss": True},
    "dpo": {"train_sampling_strategy": "sequential", "beta": 0.1},
    "grpo": {"shuffle_dataset": False, "beta": 0.0, "loss_type": "dapo", "temperature": 1.0},
}


@dataclass(frozen=True)
class Job:
    """What is to be run; `python trl_runs.py FILE` reads it as JSON.

    kind: sft, dpo or grpo. model: a Hugging Face folder. data: JSON lines, in the order of training: prompt
    and completion (sft), prompt, chosen and rejected (dpo), prompt and problem (grpo). out: the folder of the
    run. steps: of the optimiser. settings: of the trainer, beside `SAME` and `OF_KIND`. environment: the
    arguments of Cairn's `reverse_text`, whose rewards answers get (grpo). answers: JSON lines of recorded
    answers that are trained on instead of TRL's own, a line for each generation (grpo); see `Recorded`.
    """

    kind: str
    model: str
    data: str
    out: str
    steps: int
    seed: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    answers: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind {self.kind!r}: there are {', '.join(KINDS)}")

    def write(self, path: Path) -> Path:
        """Write the job; returns `path`."""
        path.write_text(json.dumps(asdict(self)))
        return path

    @property
    def checkpoints(self) -> Path:
        """Where TRL saves."""
        return Path(self.out) / "checkpoints"

    @property
    def model_at_end(self) -> Path:
        """The weights after the last step; they are there when the run is complete."""
        return Path(self.out) / "model"


def command(*jobs: Path) -> list[str]:
    """Runs the jobs in these files, one after the other."""
    return [sys.executable, str(Path(__file__).resolve()), *map(str, jobs)]


def note(path: Path, row: dict[str, Any]) -> None:
    """Append a line, in one call: what has been written survives the process."""
    with path.open("ab", buffering=0) as file:
        file.write(json.dumps(row).encode() + b"\n")


def digest(ids: Iterable[int]) -> str:
    """Names a sequence of token ids."""
    return blake2b(" ".join(map(str, ids)).encode(), digest_size=8).hexdigest()


class Recorded:
    """Answers that somebody else has sampled, as TRL's `rollout_func`.

    Line k of the file has those of generation k: `prompt_ids`, `token_ids` and `logprobs`, each a list with
    an entry for every answer, in the order in which TRL asks for them.

    Args:
        uses: optimiser steps that are made with the answers of one generation.
    """

    def __init__(self, path: str, uses: int):
        self.lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
        self.uses = uses

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        line = self.lines[trainer.state.global_step // self.uses]
        rendered = trainer.processing_class.apply_chat_template(
            prompts, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        if rendered != line["prompt_ids"]:
            raise ValueError("the recorded answers are to other prompts than those that TRL asks")
        return {
            "prompt_ids": line["prompt_ids"],
            "completion_ids": line["token_ids"],
            "logprobs": line["logprobs"],
        }


def rows_of(inputs: dict[str, Any]) -> list[str]:
    """A digest of each sample that the trainer's forward pass gets, without its padding.

    Of answers it is the prompt's and the answer's, with a colon between them.
    """
    if "completion_ids" in inputs:  # GRPO
        parts = [("prompt_ids", "prompt_mask"), ("completion_ids", "completion_mask")]
    else:
        parts = [("input_ids", "attention_mask")]
    columns = [
        [digest(ids[mask.bool()].tolist()) for ids, mask in zip(inputs[name], inputs[which], strict=True)]
        for name, which in parts
    ]
    return [":".join(row) for row in zip(*columns, strict=True)]


def noting(trainer: type, out: Path, attempt: int) -> type:
    """TRL's trainer, which notes what its forward passes get."""

    class Noting(trainer):
        def _prepare_inputs(self, inputs: Any) -> Any:
            prepared = super()._prepare_inputs(inputs)
            if self.model.training:
                row = {"step": self.state.global_step + 1, "attempt": attempt, "rows": rows_of(prepared)}
                note(out / SAMPLES, row)
            return prepared

        def _generate(self, prompts: list[Any]) -> Any:  # of GRPO
            row = {"step": self.state.global_step + 1, "attempt": attempt, "answers": len(prompts)}
            note(out / GENERATIONS, row)
            return super()._generate(prompts)

    Noting.__name__ = trainer.__name__
    return Noting


def make_trainer(job: Job, attempt: int) -> Any:
    """The trainer of a job, which has not begun yet."""
    import datasets
    import torch
    import trl
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    class Logged(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "loss" in logs:
                note(
                    out / METRICS, {"step": state.global_step, "attempt": attempt, **logs, "at": time.time()}
                )

    datasets.disable_progress_bars()
    out = Path(job.out)
    name = {"sft": "SFT", "dpo": "DPO", "grpo": "GRPO"}[job.kind]
    arguments = {
        **{"output_dir": str(job.checkpoints), "max_steps": job.steps, "seed": job.seed},
        **SAME,
        **OF_KIND[job.kind],
        **job.settings,
    }
    config = getattr(trl, f"{name}Config")(**arguments)
    records = [json.loads(line) for line in Path(job.data).read_text().splitlines()]
    made = {
        "model": AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32),
        "args": config,
        "train_dataset": datasets.Dataset.from_list(records),
        "processing_class": AutoTokenizer.from_pretrained(job.model),
        "callbacks": [Logged()],
    }
    if job.kind == "grpo":
        made["reward_funcs"] = reward_of(job)
        if job.answers:
            made["rollout_func"] = Recorded(job.answers, config.num_iterations)
    return noting(getattr(trl, f"{name}Trainer"), out, attempt)(**made)


def reward_of(job: Job) -> Any:
    """The environment's reward, as TRL wants it."""
    from cairn.config.orchestrator import EnvironmentConfig
    from cairn.orchestrator.environments import make_environment

    environment: Any = make_environment(EnvironmentConfig(name="reverse_text", args=job.environment))

    def reward(completions: list[Any], problem: list[int], **_: Any) -> list[float]:
        return [environment.reward(i, c[0]["content"]) for i, c in zip(problem, completions, strict=True)]

    return reward


def main(path: Path) -> None:
    """Run a job, from its newest checkpoint if there is one."""
    import torch
    from transformers.trainer_utils import get_last_checkpoint

    job = Job(**json.loads(path.read_text()))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    out = Path(job.out)
    out.mkdir(parents=True, exist_ok=True)
    attempts = out / "attempts.jsonl"
    attempt = len(attempts.read_text().splitlines()) + 1 if attempts.exists() else 1
    note(attempts, {"attempt": attempt, "at": time.time()})
    trainer = make_trainer(job, attempt)
    resumes = job.checkpoints.exists() and get_last_checkpoint(str(job.checkpoints)) is not None
    trainer.train(resume_from_checkpoint=resumes or None)
    trainer.save_model(str(job.model_at_end))


if __name__ == "__main__":
    for file in sys.argv[1:]:
        main(Path(file))
