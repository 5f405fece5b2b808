"""Runs of TRL's trainers, for benchmarks that compare with them: python trl_runs.py JOB.json...

Settings that both programs have are the same, and what TRL does otherwise by default is switched off: the
records come in the order that the job gives them, in float32. metrics.jsonl gets a row for each step of the
optimiser.
"""

import contextlib
import json
import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

KINDS = ("sft", "dpo", "grpo")
METRICS = "metrics.jsonl"
PROBLEMS = "problems.jsonl"
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
    mini_batches: parts of the recorded answers of a generation, which optimiser steps take in turn: every so
    many-th answer, as in Cairn, in place of TRL's random ones. own_tokens: divide the loss of each of them by
    the number of its own tokens, as Cairn does, and not by the mean number of tokens of all.
    goes_on: the run may have begun, and goes on from the newest checkpoint that transformers finds.
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
    mini_batches: int = 1
    own_tokens: bool = False
    goes_on: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind {self.kind!r}: there are {', '.join(KINDS)}")

    def write(self, path: Path) -> Path:
        """Write the job; returns `path`."""
        path.write_text(json.dumps(asdict(self)))
        return path

    @property
    def model_at_end(self) -> Path:
        """The weights after the last step; they are there when the run is complete."""
        return Path(self.out) / "model"


def command(*jobs: Path) -> list[str]:
    """Runs the jobs in these files, one after the other."""
    return [sys.executable, str(Path(__file__).resolve()), *map(str, jobs)]


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


def make_trainer(job: Job) -> Any:
    """The trainer of a job, which has not begun yet."""
    import datasets
    import torch
    import trl
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    class Logged(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "loss" in logs:
                with (out / METRICS).open("a") as file:
                    file.write(json.dumps({"step": state.global_step, **logs}) + "\n")

    datasets.disable_progress_bars()
    out = Path(job.out)
    name = {"sft": "SFT", "dpo": "DPO", "grpo": "GRPO"}[job.kind]
    arguments = {
        **{"output_dir": str(out), "max_steps": job.steps, "seed": job.seed},
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
            uses = config.num_iterations * config.steps_per_generation // config.gradient_accumulation_steps
            made["rollout_func"] = Recorded(job.answers, uses)
    trainer = getattr(trl, f"{name}Trainer")
    return (dividing_by_own_tokens(trainer) if job.own_tokens else trainer)(**made)


def dividing_by_own_tokens(trainer: Any) -> Any:
    """TRL's `GRPOTrainer`, whose loss of an update is divided by the number of that update's own tokens."""

    class OwnTokens(trainer):
        def _prepare_inputs(self, generation_batch: Any) -> Any:
            inputs = super()._prepare_inputs(generation_batch)
            slices, each = self.args.steps_per_generation, self.args.gradient_accumulation_steps
            first = self._step % slices // each * each
            own = sum(one["completion_mask"].sum() for one in self._buffered_inputs[first : first + each])
            return {**inputs, "num_items_in_batch": own * slices / each}  # `_compute_loss` takes the mean

    return OwnTokens


def dealt_out(parts: int) -> contextlib.AbstractContextManager[Any]:
    """Meanwhile TRL does not shuffle the answers of a generation: they are in the order of so many parts."""
    return mock.patch(
        "trl.trainer.grpo_trainer.shuffle_sequence_dict",
        lambda values: {name: _dealt(one, parts) for name, one in values.items()},
    )


def _dealt(values: Any, parts: int) -> Any:
    """A tensor or list with every so many-th entry together; what has no entries as it is."""
    if values is None or getattr(values, "ndim", 1) == 0:
        return values
    order = [place for first in range(parts) for place in range(first, len(values), parts)]
    return [values[place] for place in order] if isinstance(values, list) else values[order]


def environment_of(arguments: dict[str, Any]) -> Any:
    """Cairn's environment `reverse_text`, which notes its rewards if there is a file for that."""
    import noted_rewards

    from cairn.config.orchestrator import EnvironmentConfig
    from cairn.orchestrator.environments import make_environment

    noted = noted_rewards.NOTED in os.environ
    name = "noted_rewards:NotedRewards" if noted else "reverse_text"
    return make_environment(EnvironmentConfig(name=name, args=arguments))


def reward_of(job: Job) -> Any:
    """The environment's reward, as TRL wants it; what step is trained on which problems goes to PROBLEMS."""
    environment = environment_of(job.environment)

    def reward(completions: list[Any], problem: list[int], trainer_state: Any, **_: Any) -> list[float]:
        with (Path(job.out) / PROBLEMS).open("a") as file:
            file.write(json.dumps({"step": trainer_state.global_step + 1, "problems": problem}) + "\n")
        return [environment.reward(i, c[0]["content"]) for i, c in zip(problem, completions, strict=True)]

    return reward


def main(path: Path) -> None:
    """Run a job."""
    import torch
    from transformers.trainer_utils import get_last_checkpoint

    job = Job(**json.loads(path.read_text()))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    Path(job.out).mkdir(parents=True, exist_ok=job.goes_on)
    trainer = make_trainer(job)
    with dealt_out(job.mini_batches) if job.answers else contextlib.nullcontext():
        trainer.train(resume_from_checkpoint=job.goes_on and get_last_checkpoint(job.out) is not None)
    trainer.save_model(str(job.model_at_end))


if __name__ == "__main__":
    for file in sys.argv[1:]:
        main(Path(file))
