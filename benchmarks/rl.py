"""Reinforcement learning: seconds per step of Cairn, synchronous and overlapped, of TRL, and the lower bound.

All train the same model on the same task with equal batches, and compute in the same data type (`--dtype`;
weights and optimiser state stay float32):

- cairn_k0, cairn_k1, cairn_k2: the `rl` command as users run it, with `max_off_policy_steps` 0, 1 and 2,
  against one server that stays up
- trl_1, trl_2: TRL's `GRPOTrainer` with its defaults, which generates in its own process, with one thread,
  and with as many threads as Cairn has computing processes
- bound: max(generate, train), each measured while the other is idle. In cairn_k0 the two alternate, so its
  steps provide both numbers

Tasks: tiny is the README's (a model of 0.6M parameters, answers of at most 12 tokens). long is a model of
about 10M parameters that writes 128 answers of 256 tokens per step; training takes longer there, so the
trainer has two threads. even is the same model with so few answers that generating and training take about
the same time.

Times are wall-clock times from the rows of metrics.jsonl, without the first steps. Systems take turns, and
medians over the rounds are reported. A step's time is an average over the steady run: with generation ahead
of training, single steps may be shorter or longer. TRL is in the dependency group `bench`; without it only
the other systems are run.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import common

from cairn.run.connections import free_port

SYSTEMS = ["cairn_k0", "cairn_k1", "cairn_k2", "trl_1", "trl_2"]


@dataclass(frozen=True)
class RLTask:
    """A model, and the amount that is sampled from it in a step."""

    prompts: int
    samples: int
    max_tokens: int
    seq_len: int
    micro_batch_size: int
    model: dict[str, int]
    """Differences from the README's model."""
    trainer_threads: int = 1
    compile: bool = False
    """Whether the trainer compiles its layers: takes a minute at the start and reduces elementwise work."""
    whole_answers: bool = False
    """Whether every answer has the maximum length; a model with random weights ends some early by chance."""


LARGE = {
    "hidden_size": 384,
    "intermediate_size": 1152,
    "num_hidden_layers": 5,
    "max_position_embeddings": 1024,
}
TASKS = {
    "tiny": RLTask(16, 8, 12, 128, 24, {}),  # all in one micro-batch, as in TRL
    "even": RLTask(2, 4, 256, 512, 2, LARGE, whole_answers=True),
    "long": RLTask(16, 8, 256, 512, 8, LARGE, trainer_threads=2, compile=True, whole_answers=True),
}


def main() -> None:
    """Run the requested tasks and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--systems", nargs="+", default=SYSTEMS, choices=SYSTEMS)
    parser.add_argument("--steps", type=int, default=12, help="measured steps of each system in each round")
    parser.add_argument("--warmup", type=int, default=3, help="warm-up steps before them")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--dtype", default="float32", choices=["float32", "bfloat16"], help="data type to compute in"
    )
    parser.add_argument("--quick", action="store_true", help="the tiny task, few steps, under a minute")
    parser.add_argument("--json", action="store_true", help="print only one JSON object")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.tasks, arguments.steps, arguments.warmup, arguments.rounds = ["tiny"], 3, 1, 1
        arguments.systems = ["cairn_k0", "cairn_k1"]
    if arguments.inside:
        (task,) = arguments.tasks
        print(json.dumps(measure_trl(TASKS[task], arguments.inside, arguments)))
        return
    if not common.has_trl():
        arguments.systems = [name for name in arguments.systems if not name.startswith("trl")]
    report = {}
    for name in arguments.tasks:
        with tempfile.TemporaryDirectory() as folder:
            report[name] = compare(name, arguments, Path(folder))
        if not arguments.json:
            show(name, report[name])
    about = {"benchmark": "rl", "dtype": arguments.dtype, "steps": arguments.steps}
    print(json.dumps({**about, "tasks": report}))


def compare(name: str, arguments: argparse.Namespace, folder: Path) -> dict:
    """All systems in turn, round after round."""
    task = TASKS[name]
    model = common.make_model(folder, task.model, endless=task.whole_answers)
    rounds: dict[str, list[dict[str, float]]] = {system: [] for system in arguments.systems}
    for number in range(arguments.rounds):
        with server(task, model, arguments, folder / "server.log") as url:
            for system in arguments.systems:
                if system.startswith("cairn"):
                    run = folder / f"{system}_{number}"
                    rounds[system].append(measure_cairn(task, model, int(system[-1]), url, run, arguments))
        for system in arguments.systems:
            if system.startswith("trl"):
                flags = ["--inside", model, "--tasks", name, "--steps", arguments.steps]
                flags += ["--warmup", arguments.warmup, "--dtype", arguments.dtype]
                rounds[system].append(common.result_of(__file__, flags, threads=int(system[-1])))
    systems = {
        system: {key: statistics.median(found[key] for found in all_) for key in all_[0]}
        for system, all_ in rounds.items()
    }
    steps = {system: values["step_s"] for system, values in systems.items()}
    report = {
        "systems": systems,
        "rounds": {s: [found["step_s"] for found in all_] for s, all_ in rounds.items()},
    }
    if "cairn_k0" in systems:
        turns = systems["cairn_k0"]
        bound = max(turns["generate_s"], turns["train_s"])
        report["bound"] = {"step_s": bound, "generate_s": turns["generate_s"], "train_s": turns["train_s"]}
        report["ratios"] = {
            **{f"cairn_k0 / {s}": steps["cairn_k0"] / seconds for s, seconds in steps.items()},
            **{f"{s} / bound": seconds / bound for s, seconds in steps.items()},
        }
        for trl in [system for system in steps if system.startswith("trl")]:
            report["ratios"] |= {f"{trl} / {s}": steps[trl] / seconds for s, seconds in steps.items()}
    return report


@contextlib.contextmanager
def server(task: RLTask, model: Path, arguments: argparse.Namespace, log: Path) -> Iterator[str]:
    """The `inference` command; yields its address."""
    port = free_port()
    flags = ("--model.name", model, "--port", port, "--dtype", arguments.dtype, "--kv-cache-memory", "1G")
    flags += ("--max-num-seqs", task.prompts * task.samples, "--max-model-len", 2 * task.seq_len)
    flags += () if arguments.quick else ("--compile",)  # worth a minute: the server stays up
    with open(log, "wb") as out:
        child = subprocess.Popen(
            common.command("inference", flags),
            stdout=out,
            stderr=subprocess.STDOUT,
            env=common.environment(1),
            preexec_fn=common.bound_to_us(),
        )
    try:
        while "inference ready at" not in log.read_text():
            if child.poll() is not None:
                raise RuntimeError(log.read_text()[-3000:])
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        child.terminate()
        child.wait()


def measure_cairn(
    task: RLTask, model: Path, behind: int, url: str, run: Path, arguments: argparse.Namespace
) -> dict[str, float]:
    """The `rl` command, timed from outside; waiting times come from its metrics."""
    flags = (
        *("--model.name", model, "--output-dir", run, "--max-steps", arguments.warmup + arguments.steps),
        *("--trainer.seq-len", task.seq_len, "--trainer.micro-batch-size", task.micro_batch_size),
        *("--trainer.threads", task.trainer_threads, "--trainer.optimizer.lr", 1e-4),
        *("--trainer.precision.compute", arguments.dtype),
        *(("--trainer.compile",) if task.compile else ()),
        *("--orchestrator.inference-url", url),
        *("--orchestrator.prompts-per-step", task.prompts, "--orchestrator.samples-per-prompt", task.samples),
        *("--orchestrator.sampling.max-tokens", task.max_tokens),
        *("--orchestrator.max-off-policy-steps", behind),
    )
    with common.followed(common.command("rl", flags), run, threads=1) as rows:
        seen = list(rows)
    steady = [row for _, row in seen if row["step"] > arguments.warmup]
    seconds = seen[-1][0] - next(when for when, row in seen if row["step"] == arguments.warmup)
    tokens = sum(row["rollout/tokens"] for row in steady)
    idle, busy = (sum(row[key] for row in steady) for key in ("time/server_idle", "time/generate"))
    return {
        "step_s": seconds / len(steady),
        "token_us": 1e6 * seconds / tokens,
        "train_s": statistics.median(row["time/step"] for row in steady),
        "generate_s": statistics.median(row["time/generate"] for row in steady),
        "trainer_idle": sum(row["time/wait"] for row in steady) / seconds,
        "server_idle": idle / (idle + busy),
        "staleness": statistics.fmean(row["staleness/mean"] for row in steady),
    }


# In a new process


def measure_trl(task: RLTask, model: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """TRL's `GRPOTrainer`: one optimiser step per generation and no KL term, like Cairn's."""
    import datasets
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from cairn.config.orchestrator import EnvironmentConfig
    from cairn.orchestrator.environments import make_environment

    warmup, steps = arguments.warmup, arguments.steps
    environment = make_environment(EnvironmentConfig())
    prompts = [
        {"prompt": environment.messages(i), "problem": i} for i in range(task.prompts * (warmup + steps + 1))
    ]
    times, tokens = [], []

    def reward(completions: list, problem: list[int], completion_ids: list, **_: object) -> list[float]:
        tokens.append(sum(map(len, completion_ids)))
        return [environment.reward(i, c[0]["content"]) for i, c in zip(problem, completions, strict=True)]

    class Clock(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            times.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            **{"output_dir": folder, "max_steps": warmup + steps, "learning_rate": 1e-4, "beta": 0.0},
            **{"per_device_train_batch_size": task.prompts * task.samples, "num_generations": task.samples},
            **{"max_completion_length": task.max_tokens, "temperature": 1.0, "gradient_checkpointing": False},
            **{"optim": "adamw_torch_fused", "bf16": arguments.dtype == "bfloat16", "use_cpu": True},
            **{"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 100},
            generation_kwargs={"min_new_tokens": task.max_tokens} if task.whole_answers else None,
        )
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.eos_token = "<eos>"  # TRL requires one; with whole_answers it is never sampled
        trainer = GRPOTrainer(
            str(model),
            reward,
            args=config,
            train_dataset=datasets.Dataset.from_list(prompts),
            processing_class=tokenizer,
        )
        trainer.add_callback(Clock())
        trainer.train()
    seconds = times[-1] - times[warmup - 1]
    return {"step_s": seconds / steps, "token_us": 1e6 * seconds / sum(tokens[warmup : warmup + steps])}


def show(task: str, report: dict) -> None:
    """Print a table."""
    print(f"{task:10}{'s/step':>9}{'us/token':>10}{'trainer idle':>14}{'server idle':>13}{'staleness':>11}")
    for name, values in report["systems"].items():
        shares = "".join(
            f"{values[key]:{width}.2f}" if key in values else "-".rjust(width)
            for key, width in (("trainer_idle", 14), ("server_idle", 13), ("staleness", 11))
        )
        print(f"{name:10}{values['step_s']:9.3f}{values['token_us']:10.1f}{shares}")
    if "bound" in report:
        alone = {key: f"{seconds:.3f}" for key, seconds in report["bound"].items()}
        print(f"bound {alone['step_s']}: generate {alone['generate_s']}, train {alone['train_s']}")
        print("  ".join(f"{name} {ratio:.2f}" for name, ratio in report["ratios"].items()))


if __name__ == "__main__":
    main()
