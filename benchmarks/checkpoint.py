"""The cost of saving and loading: Cairn, PyTorch's own systems, and the hardware's limits, side by side.

A transformer-sized stack of linear layers trains with AdamW under FSDP2 while it is saved. For each system:
- stall_s: how long the training loop is blocked by a save
- lost_s: stall plus slowdown of the steps during the save, compared with undisturbed steps
- durable_s: from the call until everything is fsynced (Cairn: and committed)
- load_cold_s, load_warm_s: until the state is restored, page cache empty or filled; Cairn verifies every byte
- raw_cold_s, raw_warm_s: only reading the same files, alternating with the loads (checkpoint_limits.py)
- cached_share: smallest fraction of the files' pages that were in the page cache before a warm load
- extra_bytes: additional memory of the process and its helper processes

A step in memory is measured beside them (checkpoint_memory.py).

Runs as `python benchmarks/checkpoint.py`, or under torchrun for one size only. Needs neither Ray nor vLLM.
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from checkpoint_limits import measure_limits, measure_loads
from checkpoint_memory import measure_memory
from checkpoint_scale import measure_scale
from checkpoint_state import Memory, Training
from checkpoint_systems import CairnSystem, DcpSystem, MetaSystem, WholeFileSystem

SYSTEMS = [
    "cairn",
    "dcp_save",
    "dcp_thread",
    "dcp_process",
    "torch_checkpointing",
    "torch_save",
    "safetensors",
]


def main() -> None:
    """Measure the requested sizes and numbers of ranks, each in new processes, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--params", type=float, nargs="+", default=[100e6, 500e6], help="model sizes")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks")
    parser.add_argument(
        "--repeats", type=int, default=5, help="saves and loads per system; medians are reported"
    )
    parser.add_argument("--systems", nargs="+", default=SYSTEMS, choices=SYSTEMS)
    parser.add_argument("--dir", type=Path, default=Path("outputs/benchmark"), help="on the disk to measure")
    parser.add_argument("--quick", action="store_true", help="one small size, under a minute")
    parser.add_argument("--json", action="store_true", help="print only one JSON object")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.params, arguments.ranks, arguments.repeats = [2e6], [1], 2
        arguments.systems = [name for name in arguments.systems if name != "dcp_process"]
    if "RANK" in os.environ:
        result = measure(arguments, int(arguments.params[0]))
        if os.environ["RANK"] == "0":
            print(json.dumps(result), flush=True)
        return
    runs = []
    for params in arguments.params:
        for ranks in arguments.ranks:
            runs.append(_in_processes(arguments, params, ranks))
            if not arguments.json:
                _show(runs[-1])
    report = {**runs[0], "runs": runs, "scale": measure_scale(100 if arguments.quick else 10_000)}
    if not arguments.json:
        print(json.dumps(report["scale"], indent=2))
    print(json.dumps(report))


def _in_processes(arguments: argparse.Namespace, params: float, ranks: int) -> dict:
    command = [
        *(
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
            __file__,
        ),
        *("--params", str(params), "--repeats", str(arguments.repeats), "--dir", str(arguments.dir)),
        *("--systems", *arguments.systems),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, env=environment, check=True, text=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def _show(run: dict) -> None:
    limits = run["limits"]
    print(f"\n{run['params'] / 1e6:.0f}M parameters, {run['ranks']} ranks, {run['state_bytes'] / 1e9:.2f} GB")
    print("limits: " + "  ".join(f"{key} {value:.3f}" for key, value in limits.items()))
    print("step in memory: " + "  ".join(f"{key} {value:.3f}" for key, value in run["memory"].items()))
    print(f"{'':20}" + "".join(f"{key:>14}" for key in next(iter(run["systems"].values()))))
    for name, values in run["systems"].items():
        print(f"{name:20}" + "".join(f"{'-' if v is None else f'{v:.3f}':>14}" for v in values.values()))


# One size, on the ranks that torchrun has started


def measure(arguments: argparse.Namespace, params: int) -> dict:
    """All systems on the same state; every rank calls it."""
    cuda = torch.cuda.is_available()
    torch.set_num_threads(1)
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    training = Training(params, "cuda" if cuda else "cpu")
    rank = dist.get_rank()
    arguments.dir.mkdir(parents=True, exist_ok=True)
    paths = [tempfile.mkdtemp(dir=arguments.dir) if rank == 0 else None]
    dist.broadcast_object_list(paths)
    root = Path(paths[0])
    try:
        limits = measure_limits(training, root, arguments.repeats)
        in_memory = measure_memory(training, arguments.repeats)
        if rank == 0:  # progress on stderr, in case a long run is interrupted
            noted = {"params": params, "limits": limits, "memory": in_memory}
            print(json.dumps(noted), file=sys.stderr, flush=True)
        systems = {}
        for name in arguments.systems:
            with contextlib.suppress(ImportError):
                systems[name] = measure_system(name, training, root / name, arguments.repeats)
                if rank == 0:
                    print(json.dumps({"params": params, name: systems[name]}), file=sys.stderr, flush=True)
            dist.barrier()
            if rank == 0:
                shutil.rmtree(root / name, ignore_errors=True)
            dist.barrier()
    finally:
        if rank == 0:
            shutil.rmtree(root, ignore_errors=True)
    report = {
        "params": params,
        "ranks": dist.get_world_size(),
        "state_bytes": training.total_bytes,
        "step_s": training.step_seconds,
        "limits": limits,
        "memory": in_memory,
        "systems": systems,
        "ratios": {"copy / memcpy": in_memory["copy_s"] / in_memory["memcpy_s"], **ratios(limits, systems)},
    }
    dist.destroy_process_group()
    return report


def ratios(limits: dict, systems: dict) -> dict:
    """Cairn's values relative to the limits and to the other systems."""
    if "cairn" not in systems:
        return {}
    cairn = systems["cairn"]
    found = {
        "stall / memcpy": cairn["stall_s"] / limits["memcpy_s"],
        "durable / write_fsync": cairn["durable_s"] / limits["write_fsync_s"],
        "load_cold / raw_cold": cairn["load_cold_s"] / cairn["raw_cold_s"],
        "load_warm / raw_warm": cairn["load_warm_s"] / cairn["raw_warm_s"],
    }
    peers = {name: values for name, values in systems.items() if name.startswith("dcp")}
    if "dcp_thread" in peers:
        found["stall / dcp_thread stall"] = cairn["stall_s"] / peers["dcp_thread"]["stall_s"]
    if peers:
        found["lost / best dcp lost"] = cairn["lost_s"] / min(values["lost_s"] for values in peers.values())
    return found


def measure_system(name: str, training: Training, root: Path, repeats: int) -> dict[str, float | None]:
    """Save and load repeatedly with one system, after one save and one load as warm-up."""
    root.mkdir(parents=True, exist_ok=True)
    with Memory(0) as undisturbed:
        for _ in range(3):
            training.step()
    memory = Memory(undisturbed.peak)
    system = {
        "cairn": CairnSystem,
        "dcp_save": DcpSystem,
        "dcp_thread": DcpSystem,
        "dcp_process": DcpSystem,
        "torch_checkpointing": MetaSystem,
        "torch_save": WholeFileSystem,
        "safetensors": WholeFileSystem,
    }[name](name, training, root)
    stalls, losses, durables = [], [], []
    with memory:
        for repeat in range(repeats + 1):
            stall, lost, durable = _one_save(system, training, repeat + 1)
            if repeat:
                stalls.append(stall)
                losses.append(lost)
                durables.append(durable)
            if dist.get_rank() == 0 and name != "cairn":  # Cairn's retention does that
                for path in root.glob("step_*"):
                    if path != root / f"step_{repeat + 1}":
                        shutil.rmtree(path)
            dist.barrier()
    loads = measure_loads(system.load, root, repeats)
    system.close()
    return {
        "stall_s": statistics.median(stalls),
        "lost_s": max(statistics.median(losses), 0.0),
        "durable_s": statistics.median(durables),
        **loads,
        "extra_bytes": memory.peak,
    }


def _one_save(system, training: Training, number: int) -> tuple[float, float, float]:
    """Save once while training continues; returns stall, total time lost, and time to durable, in seconds."""
    step = statistics.median(training.timed_step() for _ in range(5))  # undisturbed, at the moment
    dist.barrier()
    began = time.perf_counter()
    system.save(number)
    stall = time.perf_counter() - began
    waited = [0.0]

    def before_update() -> None:
        started = time.perf_counter()
        system.before_update()
        waited[0] += time.perf_counter() - started

    steps = 0
    durable = None
    while durable is None or steps < 2:
        training.step(before_update)
        steps += 1
        if durable is None:
            durable = system.durable_seconds()
    lost = time.perf_counter() - began - steps * step
    return stall + waited[0], lost, durable


if __name__ == "__main__":
    main()
