"""Supervised fine-tuning: useful tokens per second of Cairn, TRL and a bare PyTorch loop, side by side.

All train the same model on the same records with the same number of threads, in float32:

- cairn: the `sft` command as users run it, with Ray, its data path and its metrics
- bare: a PyTorch loop over the micro-batches that Cairn makes, prepared in advance: the raw limit
- trl_padded: TRL's `SFTTrainer` with its defaults, one record per row
- trl_packed: the same with `packing=True`, and as many rows as hold the same number of tokens

Useful tokens are those of records, not padding; packing efficiency is their share of the computed ones.
Times are wall-clock times of whole steps after a warm-up. Systems take turns; medians over the rounds are
reported. TRL is in the dependency group `bench`; without it only the others are run.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import common

SYSTEMS = ["cairn", "bare", "trl_padded", "trl_packed"]


def main() -> None:
    """Run the comparison and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--systems", nargs="+", default=SYSTEMS, choices=SYSTEMS)
    parser.add_argument("--steps", type=int, default=150, help="measured steps of each system in each round")
    parser.add_argument("--warmup", type=int, default=20, help="warm-up steps before them")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64, help="records in a step")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="few steps, one round, under a minute")
    parser.add_argument("--json", action="store_true", help="print only one JSON object")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.steps, arguments.warmup, arguments.rounds = 10, 2, 1
    if arguments.inside:
        task = common.Task(arguments.inside, arguments.batch_size, arguments.seq_len, arguments.threads)
        print(json.dumps({name: measure(name, task, arguments) for name in arguments.systems}))
        return
    if not common.has_trl():
        arguments.systems = [name for name in arguments.systems if not name.startswith("trl")]
    with tempfile.TemporaryDirectory() as folder:
        report = compare(arguments, Path(folder))
    if not arguments.json:
        show(report)
    print(json.dumps(report))


def compare(arguments: argparse.Namespace, folder: Path) -> dict:
    """All systems in turn, round after round."""
    task = common.Task(folder / "task", arguments.batch_size, arguments.seq_len, arguments.threads)
    task.prepare()
    rounds: dict[str, list[dict]] = {name: [] for name in arguments.systems}
    for number in range(arguments.rounds):
        for names in [arguments.systems] if arguments.quick else [[name] for name in arguments.systems]:
            inside = [name for name in names if name != "cairn"]
            if "cairn" in names:
                rounds["cairn"].append(measure_cairn(task, folder / f"run_{number}", arguments))
            if inside:
                flags = ["--inside", task.folder, "--systems", *inside, "--steps", arguments.steps]
                flags += ["--warmup", arguments.warmup, "--batch-size", task.batch_size]
                flags += ["--seq-len", task.seq_len, "--threads", task.threads]
                for name, found in common.result_of(__file__, flags, task.threads).items():
                    rounds[name].append(found)
    systems = {
        name: {
            "tokens_per_s": statistics.median(found["tokens_per_s"] for found in all_),
            "step_ms": statistics.median(found["step_ms"] for found in all_),
            "rounds": [found["tokens_per_s"] for found in all_],
            "packing_efficiency": all_[0].get("packing_efficiency"),
        }
        for name, all_ in rounds.items()
    }
    return {
        "batch_size": task.batch_size,
        "seq_len": task.seq_len,
        "threads": task.threads,
        "steps": arguments.steps,
        "systems": systems,
        "ratios": common.ratios({name: values["tokens_per_s"] for name, values in systems.items()}),
    }


def rates(tokens: float, seconds: float, steps: int) -> dict[str, float]:
    """The numbers that are reported for every system."""
    return {"tokens_per_s": tokens / seconds, "step_ms": 1000 * seconds / steps}


def measure_cairn(task: common.Task, run: Path, arguments: argparse.Namespace) -> dict:
    """Run the command, timed from outside."""
    command = task.cairn(run, arguments.warmup + arguments.steps)
    with common.followed(command, run, task.threads) as rows:
        found = [(when, row) for when, row in rows]
    seen = {row["step"]: (when, row["total_tokens"]) for when, row in found}
    begin, end = seen[arguments.warmup], seen[arguments.warmup + arguments.steps]
    packed = statistics.mean(row["packing_efficiency"] for _, row in found)
    return rates(end[1] - begin[1], end[0] - begin[0], arguments.steps) | {"packing_efficiency": packed}


# In new processes


def measure(name: str, task: common.Task, arguments: argparse.Namespace) -> dict:
    """Measure a system that is not a command."""
    import torch

    torch.set_num_threads(task.threads)
    if name == "bare":
        return measure_bare(task, arguments.warmup, arguments.steps)
    return measure_trl(task, arguments.warmup, arguments.steps, packing=name == "trl_packed")


def measure_bare(task: common.Task, warmup: int, steps: int) -> dict:
    """Forward, backward, clip and update over prepared micro-batches."""
    import torch
    import torch.nn.functional as F
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from cairn.config.trainer import SFTDataConfig
    from cairn.trainer.data.batches import SFTData
    from cairn.trainer.packing import make_micro_batches

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = SFTDataConfig(name=str(task.data), batch_size=task.batch_size)
    data = SFTData(config, AutoTokenizer.from_pretrained(task.model), 0, 0)
    size = {"row_length": task.seq_len, "rows_each": 8, "rank": 0, "world_size": 1}
    batches = [data.next_batch(step).samples for step in range(warmup + steps)]
    tokens = sum(len(sample.token_ids) for samples in batches[warmup:] for sample in samples)
    packed = [[m.to(device) for m in make_micro_batches(samples, **size)] for samples in batches]
    model = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.lr, fused=True)
    for step, micros in enumerate(packed):
        if step == warmup:
            started = time.perf_counter()
        learned = sum(int(micro.loss_mask.sum()) for micro in micros)
        for micro in micros:
            logits = model(
                input_ids=micro.input_ids, position_ids=micro.position_ids, use_cache=False
            ).logits[:, :-1]
            labels = micro.input_ids[:, 1:].masked_fill(~micro.loss_mask[:, 1:], -100)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
            (loss / learned).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()  # all systems log the loss
    computed = sum(micro.input_ids.numel() for micros in packed[warmup:] for micro in micros)
    return rates(tokens, time.perf_counter() - started, steps) | {"packing_efficiency": tokens / computed}


def measure_trl(task: common.Task, warmup: int, steps: int, *, packing: bool) -> dict:
    """TRL's trainer; it tokenises and packs the data set before it starts."""
    from transformers import TrainerCallback

    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            times.append(time.perf_counter())

    rows = task.batch_size
    if packing:
        rows = max(round(task.batch_size * mean_length(task) / task.seq_len), 1)
    with tempfile.TemporaryDirectory() as folder:
        trainer = task.trl(Path(folder), warmup + steps, packing=packing, per_device_train_batch_size=rows)
        trainer.add_callback(Clock())
        lengths = [len(ids) for ids in trainer.train_dataset["input_ids"]]
        trainer.train()
    tokens = rows * steps * sum(lengths) / len(lengths)
    return rates(tokens, times[-1] - times[warmup - 1], steps)


def mean_length(task: common.Task) -> float:
    """Average tokens per record."""
    from transformers import AutoTokenizer

    from cairn.config.trainer import SFTDataConfig
    from cairn.trainer.data.batches import SFTData

    config = SFTDataConfig(name=str(task.data), batch_size=1000)
    samples = SFTData(config, AutoTokenizer.from_pretrained(task.model), 0, 0).next_batch(1).samples
    return sum(len(sample.token_ids) for sample in samples) / len(samples)


def show(report: dict) -> None:
    """Print a table."""
    print(f"{'':12}{'tokens/s':>12}{'ms a step':>12}{'no padding':>12}{'cairn is':>12}")
    for name, values in report["systems"].items():
        ratio = report["ratios"].get(f"cairn / {name}")
        ratio = f"{ratio:.2f} x" if ratio else "-"
        packed = values["packing_efficiency"]  # TRL does not say
        share = f"{packed:.1%}" if packed else "-"
        print(f"{name:12}{values['tokens_per_s']:12.0f}{values['step_ms']:12.1f}{share:>12}{ratio:>12}")


if __name__ == "__main__":
    main()
