"""On GPUs: training and its share of what the device can do, saves, pushes, and an RL step.

- gather: bytes a second that each of the machine's GPUs gets in an all-gather (NCCL; on CPUs two ranks, gloo)
- sft: the `sft` command as users run it, with records that fill rows: tokens/s on all GPUs together, model
  FLOPs, and what they are of the device's own matrix products, measured in the same run (the raw limit), and
  of the vendor's number where it is known (MFU). Every few steps are saved: the stall is what the trainer
  itself reports, the lost time is how much longer the steps with a save under way take.
- bare: the same batches in a PyTorch loop on one GPU, where the model fits: forward and backward under
  autocast, clip, fused AdamW.
- rl: the `rl` command with as many servers of its own as it chooses (or `--servers`; by `--transport`), and
  one step of staleness (`max_off_policy_steps` 1; with one GPU, which trainer and server share in turns, 0):
  seconds per step, how long each side was idle, and seconds from a published version to servers that answer
  with it.

Models have the shapes of Qwen3 and random weights from a seed; tiny is the README's model, which CI runs on a
CPU. How all of this is computed is in docs/how-to/gpu.md.
"""

import argparse
import json
import os
import random
import re
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common

from cairn.run.connections import free_port
from cairn.run.machine import this_machine

PARTS = ["gather", "sft", "bare", "rl"]
STALL = re.compile(r"saved: durable after ([\d.]+) s, of which training stood still for ([\d.]+) s")
QWEN3 = {"vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 40960}


@dataclass(frozen=True)
class Shape:
    """A model, and how much of it is trained in a step."""

    model: dict[str, Any]
    """Differences from the README's model."""
    seq_len: int
    rows: int
    """Records, each of seq_len tokens, in a step and for each GPU."""
    together: int
    """Rows in a micro-batch."""
    answers: int
    """Answers in a step of RL."""
    max_tokens: int
    flags: tuple[str, ...] = ()
    """Of the trainer."""
    server: tuple[object, ...] = ()


SMALL = QWEN3 | {
    **{"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
}
MEDIUM = QWEN3 | {
    **{"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16}
}
MIDDLE = QWEN3 | {
    **{"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32}
}
LARGE = QWEN3 | {
    **{"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
    **{"tie_word_embeddings": False},
}
MIXTURE = QWEN3 | {
    **{"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "tie_word_embeddings": False},
    **{"hidden_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 32, "num_key_value_heads": 4},
    **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True},
}
"""A quarter of the layers of Qwen3-30B-A3B."""
CHECKPOINTED = ("activation-checkpointing",)
SHAPES = {
    "tiny": Shape({}, 128, 8, 2, 32, 12, server=("--inference.max-model-len", 64)),
    "0.6b": Shape(SMALL, 4096, 8, 1, 256, 1024),
    "0.6b-4x4096": Shape(SMALL, 4096, 8, 4, 256, 1024),
    "0.6b-16k": Shape(SMALL, 16384, 4, 1, 256, 8192),
    "1.7b": Shape(MEDIUM, 4096, 8, 1, 256, 1024),
    "4b-16k": Shape(MIDDLE, 16384, 2, 1, 256, 8192, flags=CHECKPOINTED),
    "4b-32k-on-2": Shape(MIDDLE, 32768, 1, 1, 256, 8192, flags=(*CHECKPOINTED, "parallel.context=2")),
    "8b-a1b": Shape(MIXTURE, 4096, 4, 1, 256, 1024, flags=CHECKPOINTED),
    "8b-a1b-on-8": Shape(MIXTURE, 4096, 4, 1, 256, 1024, flags=(*CHECKPOINTED, "parallel.expert=8")),
    "8b": Shape(LARGE, 4096, 4, 1, 256, 1024, flags=CHECKPOINTED),
}


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, help="default: tiny, and with GPUs 0.6b, 8b")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--steps", type=int, default=20, help="measured steps")
    parser.add_argument("--warmup", type=int, default=3, help="warm-up steps before them")
    parser.add_argument("--save-every", type=int, default=5, help="steps from one save to the next")
    parser.add_argument("--servers", type=int, help="servers of rl (default: as many as it chooses)")
    parser.add_argument(
        "--transport", default="files", choices=["files", "network"], help="how servers get policies"
    )
    parser.add_argument("--folder", type=Path, help="for models and runs, several times the weights' size")
    parser.add_argument("--quick", action="store_true", help="the tiny shape, few steps, under a minute")
    parser.add_argument("--json", action="store_true", help="print only one JSON object")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    machine = this_machine()
    if arguments.quick:
        arguments.shapes, arguments.steps, arguments.warmup, arguments.save_every = ["tiny"], 6, 2, 3
    arguments.shapes = arguments.shapes or (["0.6b", "8b"] if machine.has_gpus else ["tiny"])
    if arguments.inside:
        (name,) = arguments.shapes
        print(json.dumps(measure_bare(SHAPES[name], arguments) if arguments.parts == ["bare"] else limits()))
        return
    report: dict[str, Any] = {
        "benchmark": "gpu",
        "gpus": [gpu.name for gpu in machine.gpus],
        "driver": machine.driver,
        **({"gather": measure_gather(len(machine.gpus))} if "gather" in arguments.parts else {}),
        "limits": common.result_of(__file__, ["--inside", ".", "--shapes", "tiny", "--parts", "sft"], 1),
        "shapes": {},
    }
    for name in arguments.shapes if arguments.parts != ["gather"] else ():
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            found = measure(name, arguments, Path(folder), max(len(machine.gpus), 1), report["limits"])
        report["shapes"][name] = found
        if not arguments.json:
            print(name, json.dumps(found, indent=2))
    print(json.dumps(report))


def measure(
    name: str, arguments: argparse.Namespace, folder: Path, devices: int, limit: dict[str, Any]
) -> dict[str, Any]:
    """All parts for one shape, one after the other."""
    shape = SHAPES[name]
    model = common.make_model(folder, shape.model)
    write_records(shape, folder / "data.jsonl", devices)
    found: dict[str, Any] = {}
    flops = flops_per_token(model, shape.seq_len)
    if "sft" in arguments.parts:
        found["sft"] = measure_sft(shape, arguments, folder, devices)
    if "bare" in arguments.parts:
        flags = ["--inside", folder, "--shapes", name, "--parts", "bare", "--steps", arguments.steps]
        try:
            found["bare"] = common.result_of(__file__, [*flags, "--warmup", arguments.warmup], 1)
        except RuntimeError as error:
            if "OutOfMemoryError" not in str(error):
                raise
            found["bare"] = {"tokens_per_s": None, "why": "the model does not fit on one device"}
    for part, count in (("sft", devices), ("bare", 1)):
        if flops and (rate := found.get(part, {}).get("tokens_per_s")):
            found[part]["tflops"] = flops * rate / count / 1e12
            found[part]["of_matmul"] = flops * rate / count / limit["matmul_flops"]
            if limit["vendor_flops"]:
                found[part]["mfu"] = flops * rate / count / limit["vendor_flops"]
    if found.get("sft") and found.get("bare", {}).get("tokens_per_s"):
        found["ratios"] = {
            "cairn / bare, per GPU": found["sft"]["tokens_per_s"] / devices / found["bare"]["tokens_per_s"]
        }
    if "rl" in arguments.parts:
        found["rl"] = measure_rl(shape, arguments, folder, devices)
    return found


def write_records(shape: Shape, path: Path, devices: int) -> None:
    """Records that fill a row each; a token is a character, and the chat template adds some."""
    draw = random.Random(0)
    with open(path, "w") as out:
        for _ in range(4 * shape.rows * devices):
            text = "".join(draw.choices("abcdefghijklmnopqrstuvwxyz ", k=shape.seq_len))
            messages = [{"role": "user", "content": "write"}, {"role": "assistant", "content": text}]
            out.write(json.dumps({"messages": messages}) + "\n")


def flops_per_token(model: Path, length: int) -> float | None:
    """Of a forward and a backward pass over samples of this length, without what is recomputed."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from cairn.trainer.step.utilisation import model_flops

    with torch.device("meta"):
        counted = model_flops(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)))
    return counted and counted.of([length]) / length


def measure_sft(shape: Shape, arguments: argparse.Namespace, folder: Path, devices: int) -> dict[str, Any]:
    """The `sft` command, timed from outside; a step's own time decides which steps a save has made longer."""
    run, every = folder / "sft", arguments.save_every
    steps = arguments.warmup + arguments.steps
    flags = ("--model.name", folder / "model", "--data.name", folder / "data.jsonl", "--output-dir", run)
    flags += ("--data.batch-size", shape.rows * devices, "--seq-len", shape.seq_len, "--workers", devices)
    flags += ("--micro-batch-size", shape.together)
    flags += (*(f"--{flag}" for flag in shape.flags), "--max-steps", steps)
    flags += ("--ckpt.interval", every, "--ckpt.keep-last", 1)
    with common.watched_gpus() as gpus, common.followed(common.command("sft", flags), run, 1) as rows:
        seen = list(rows)
    at = {row["step"]: (when, row["total_tokens"]) for when, row in seen}
    (begin, before), (end, after) = at[arguments.warmup], at[steps]
    times = {row["step"]: row["time/step"] for _, row in seen if row["step"] > arguments.warmup}
    log = (run / "logs" / "trainer.log").read_text()
    saves = [(float(durable), float(stall)) for durable, stall in STALL.findall(log)]
    # A save that begins after a step is under way in the next ones.
    busy = [seconds for step, seconds in times.items() if step % every == 1 % every]
    free = [seconds for step, seconds in times.items() if step % every != 1 % every]
    return {
        "tokens_per_s": (after - before) / (end - begin),
        "step_s": (end - begin) / arguments.steps,
        "saves": len(saves),
        "stall_s": statistics.median(stall for _, stall in saves),
        "durable_s": statistics.median(durable for durable, _ in saves),
        "lost_s": statistics.median(busy) - statistics.median(free) if busy and free else None,
        **gpus.summary(),
        "estimated_gib": estimated_gib(run),
    }


def estimated_gib(run: Path) -> float:
    """What a rank of a run needs of its device, by the estimate of memory; GiB."""
    from cairn.config.trainer import SFTConfig
    from cairn.launch.memory import training_needs

    config = SFTConfig.model_validate_json((run / "config.json").read_text())
    return training_needs(config.model.name, config, this_machine()).rank.total / 2**30


def measure_rl(shape: Shape, arguments: argparse.Namespace, folder: Path, devices: int) -> dict[str, Any]:
    """The `rl` command with its own server."""
    run, steps = folder / "rl", arguments.warmup + arguments.steps
    shares = devices == 1 and this_machine().has_gpus
    flags = ("--model.name", folder / "model", "--output-dir", run, "--max-steps", steps)
    flags += ("--trainer.seq-len", shape.seq_len, *(f"--trainer.{flag}" for flag in shape.flags))
    flags += ("--inference.port", free_port(), *shape.server)
    flags += ("--trainer.weight-transport", arguments.transport)
    flags += ("--inference.servers", arguments.servers) if arguments.servers else ()
    flags += ("--orchestrator.prompts-per-step", shape.answers // 8, "--orchestrator.samples-per-prompt", 8)
    flags += ("--orchestrator.sampling.max-tokens", shape.max_tokens)
    flags += ("--orchestrator.max-off-policy-steps", 0 if shares else 1)
    with common.watched_gpus() as gpus, common.followed(common.command("rl", flags), run, 1) as rows:
        seen = list(rows)
    config = json.loads((run / "config.json").read_text())
    steady = [row for _, row in seen if row["step"] > arguments.warmup]
    seconds = seen[-1][0] - next(when for when, row in seen if row["step"] == arguments.warmup)
    idle, busy = (sum(row[key] for row in steady) for key in ("time/server_idle", "time/generate"))
    return {
        "ranks": config["trainer"]["workers"],
        "servers": config["inference"]["servers"],
        "transport": arguments.transport,
        **gpus.summary(),
        "step_s": seconds / len(steady),
        "tokens_per_s": sum(row["rollout/tokens"] for row in steady) / seconds,
        "train_s": statistics.median(row["time/step"] for row in steady),
        "push_s": statistics.median(row["time/push"] for row in steady if "time/push" in row),
        "push_bytes": statistics.median(row["weights/bytes"] for row in steady if "weights/bytes" in row),
        "trainer_idle": sum(row["time/wait"] for row in steady) / seconds,
        "server_idle": idle / (idle + busy),
        "staleness": statistics.fmean(row["staleness/mean"] for row in steady),
    }


def measure_gather(gpus: int) -> dict[str, Any]:
    """Bytes a second that the slowest rank gets, with a rank on each GPU; on CPUs with two."""
    import torch.multiprocessing

    if gpus == 1:
        return {"bytes_per_s": None, "why": "there is one GPU, and nothing to gather"}
    ranks = gpus or 2
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(gather, (ranks, free_port(), folder), nprocs=ranks)
        rates = [float((Path(folder) / str(rank)).read_text()) for rank in range(ranks)]
    return {"ranks": ranks, "bytes_per_s": min(rates)}


# In new processes


def gather(rank: int, ranks: int, port: int, folder: str) -> None:
    """Of one rank of several: write down the bytes a second that it gets."""
    from cairn.trainer.group import RankGroup

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    group = RankGroup.join(threads=1, deterministic=False)
    rate = group.measure((1 << 30) if group.device.type == "cuda" else (16 << 20))
    (Path(folder) / str(rank)).write_text(str(rate))
    group.leave()


def limits() -> dict[str, Any]:
    """What one device can do: FLOP/s of large matrix products in the data type that training computes in."""
    import torch

    from cairn.trainer.step.utilisation import peak_of

    on_gpu = torch.cuda.is_available()
    device, dtype, size = ("cuda", torch.bfloat16, 8192) if on_gpu else ("cpu", torch.float32, 512)
    torch.set_num_threads(1)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    rates = []
    for _ in range(20):
        wait_for_device()
        began = time.perf_counter()
        left @ right
        wait_for_device()
        rates.append(2 * size**3 / (time.perf_counter() - began))
    name = torch.cuda.get_device_name() if on_gpu else ""
    vendor = peak_of(name) if name else None
    return {"matmul_flops": statistics.median(rates[5:]), "vendor_flops": vendor, "torch": torch.__version__}


def measure_bare(shape: Shape, arguments: argparse.Namespace) -> dict[str, Any]:
    """Forward, backward, clip and update over the rows that Cairn's data path makes, on one device."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from cairn.config.trainer import SFTDataConfig
    from cairn.trainer.data.batches import SFTData

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder, warmup = arguments.inside, arguments.warmup
    config = SFTDataConfig(name=str(folder / "data.jsonl"), batch_size=shape.rows)
    data = SFTData(config, AutoTokenizer.from_pretrained(folder / "model"), 0, 0)
    steps = range(warmup + arguments.steps)
    batches = [[s.token_ids[: shape.seq_len] for s in data.next_batch(step).samples] for step in steps]
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).to(device).train()
    if "activation-checkpointing" in shape.flags:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    began = time.perf_counter()
    for step, rows in enumerate(batches):
        if step == warmup:
            wait_for_device()
            began = time.perf_counter()
        for first in range(0, len(rows), shape.together):
            several = rows[first : first + shape.together]
            ids = torch.as_tensor(several, dtype=torch.int64, device=device)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            (loss * len(several) / len(rows)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()  # as is logged
    seconds = time.perf_counter() - began
    tokens = sum(len(row) for rows in batches[warmup:] for row in rows)
    return {"tokens_per_s": tokens / seconds, "step_s": seconds / arguments.steps}


def wait_for_device() -> None:
    """Wait for the GPU, if there is one."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
