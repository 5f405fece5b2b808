"""Resuming: seconds from the command to the first finished step, Cairn and TRL side by side.

Each system trains a few steps and saves; then a new process resumes:

- cairn: `sft ... --ckpt.resume latest`, until the step's row is in metrics.jsonl
- trl: a script that makes an `SFTTrainer` and calls `train(resume_from_checkpoint=True)`
- bare: a script that imports torch and transformers, loads model and optimiser, and makes one step: the limit

Systems take turns; medians over the rounds are reported. TRL is in the dependency group `bench`; without it
only the others are run.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import common

SYSTEMS = ["cairn", "trl", "bare"]
SAVED = 5
"""Steps before the resume."""
DONE = "first step done"


def main() -> None:
    """Run the comparison and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--systems", nargs="+", default=SYSTEMS, choices=SYSTEMS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="one round, under a minute")
    parser.add_argument("--json", action="store_true", help="print only one JSON object")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds = 1
    if arguments.inside:
        task = common.Task(arguments.inside, 64, 128, arguments.threads)
        train_trl(task, resume=arguments.resume) if arguments.systems == ["trl"] else train_bare(task)
        return
    if not common.has_trl():
        arguments.systems = [name for name in arguments.systems if name != "trl"]
    with tempfile.TemporaryDirectory() as folder:
        report = compare(arguments, Path(folder))
    if not arguments.json:
        for name, values in report["systems"].items():
            print(f"{name:8}{values['first_step_s']:8.2f} s")
    print(json.dumps(report))


def compare(arguments: argparse.Namespace, folder: Path) -> dict:
    """All systems in turn, round after round, from checkpoints that are made first."""
    task = common.Task(folder / "task", 64, 128, arguments.threads)
    task.prepare()
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda name: make_checkpoint(name, task), arguments.systems))
    rounds: dict[str, list[float]] = {name: [] for name in arguments.systems}
    for number in range(arguments.rounds):
        for name, seconds in rounds.items():
            seconds.append(resume_cairn(task, number) if name == "cairn" else resume(name, task))
    systems = {
        name: {"first_step_s": statistics.median(seconds), "rounds": seconds}
        for name, seconds in rounds.items()
    }
    ratios = common.ratios({name: values["first_step_s"] for name, values in systems.items()})
    return {"threads": task.threads, "systems": systems, "ratios": ratios}


def make_checkpoint(name: str, task: common.Task) -> None:
    """Train `SAVED` steps and save. The bare script starts from the model alone."""
    if name == "cairn":
        command = task.cairn(task.folder / "cairn", SAVED, "--ckpt")
    elif name == "trl":
        command = inside(name, task)
    else:
        return
    subprocess.run(command, env=common.environment(task.threads), check=True, capture_output=True)


def inside(name: str, task: common.Task) -> list[str]:
    """Command that runs one function of this script in a new process."""
    flags = ["--inside", task.folder, "--systems", name, "--threads", task.threads]
    return [sys.executable, __file__, *map(str, flags)]


def resume_cairn(task: common.Task, number: int) -> float:
    """Resume for one step; every round starts from the same checkpoint, in its own run directory."""
    run = task.folder / f"cairn_{number}"
    step = task.folder / "cairn" / "checkpoints" / f"step_{SAVED}"
    command = task.cairn(run, SAVED + 1, "--ckpt.resume", step)
    started = time.perf_counter()
    with common.followed(command, run, task.threads) as rows:
        return next(when for when, row in rows if row["step"] == SAVED + 1) - started


def resume(name: str, task: common.Task) -> float:
    """Seconds until the script reports its first step."""
    started = time.perf_counter()
    with subprocess.Popen(
        [*inside(name, task), "--resume"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=common.environment(task.threads),
        text=True,
    ) as child:
        seen = next((time.perf_counter() for line in child.stdout if line.strip() == DONE), None)
        _, errors = child.communicate()
    if seen is None:
        raise RuntimeError(f"{name} exited with {child.returncode}:\n{errors[-3000:]}")
    return seen - started


# In new processes


def train_trl(task: common.Task, *, resume: bool) -> None:
    """Train and save, or resume for one step."""
    import torch
    from transformers import TrainerCallback

    class Report(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            if resume:
                print(DONE, flush=True)

    torch.set_num_threads(task.threads)
    saving = {"save_strategy": "no"} if resume else {"save_strategy": "steps", "save_steps": SAVED}
    trainer = task.trl(task.folder / "trl", SAVED + 1 if resume else SAVED, **saving)
    trainer.add_callback(Report())
    trainer.train(resume_from_checkpoint=resume)


def train_bare(task: common.Task) -> None:
    """One step from the model's weights, on one batch."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(task.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32).to(device)
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.lr, fused=True)
    records = [json.loads(line) for line in task.data.read_text().splitlines()[: task.batch_size]]
    texts = [r["prompt"][0]["content"] + r["completion"][0]["content"] for r in records]
    batch = tokenizer(texts, padding=True, return_tensors="pt").to(device)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss.backward()
    optimizer.step()
    print(DONE, flush=True)


if __name__ == "__main__":
    main()
