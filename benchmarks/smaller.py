"""What `ckpt.compress` and `ckpt.incremental` cost and gain: bytes, seconds until durable, seconds to load.

A stack of linear layers trains with AdamW on one rank; half of its weights are frozen for `incremental`. Each
way saves in turn, so that all meet the same disk. Prints one JSON object:
- bytes: what a step takes on the disk beyond the one before it
- durable_s: from the call until the step is committed; stall_s: how long training stood still
- load_s: until the state is restored, from the page cache, with every byte verified
- processor_s: processor time of a save, with that of the writer process

Runs as `python benchmarks/smaller.py [--params N] [--repeats N]`.
"""

import argparse
import json
import os
import shutil
import statistics
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from checkpoint_state import Training

from cairn.checkpoint.saving.saver import SaveOptions, Saver, SavingRank
from cairn.checkpoint.store import CheckpointStore
from cairn.checkpoint.tensors.sharded_files import load_step

ABOUT = {
    **{"run_id": "benchmark", "attempt": 1, "branch": "main", "parent": None, "parts": ["trainer"]},
    **{"world_size": 1, "dtypes": {}, "metrics": {}, "versions": {}, "config_digest": ""},
}
MODEL, OPTIMIZER = "model/model", "trainer/optimizer"


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--params", type=float, default=50e6, help="model size")
    parser.add_argument("--steps", type=int, default=30, help="optimiser steps before the first save")
    parser.add_argument("--repeats", type=int, default=5, help="saves of each way; medians are reported")
    parser.add_argument("--dir", type=Path, default=Path("outputs/smaller"), help="on the disk to measure")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    training = Training(int(arguments.params), "cpu")
    for parameters in training.optimizer.param_groups:
        parameters["lr"] = 1e-4
    for _ in range(arguments.steps):
        training.step()
    whole = training.tensors()
    frozen = frozenset(list(whole[MODEL])[: len(whole[MODEL]) // 2])
    state = {name: t for name, t in whole[OPTIMIZER].items() if name.rpartition(".")[0] not in frozen}
    half = {MODEL: whole[MODEL], OPTIMIZER: state}
    ways = {
        "plain": (whole, SaveOptions()),
        "compress": (whole, SaveOptions(packed=("trainer",))),
        "half_frozen": (half, SaveOptions()),
        "half_frozen_incremental": (half, SaveOptions(constant={MODEL: frozen})),
    }
    shutil.rmtree(arguments.dir, ignore_errors=True)
    measured: dict[str, dict[str, list[float]]] = {}
    savers = {
        way: Saver(CheckpointStore(arguments.dir / way), SavingRank(0, 1, "benchmark"), how=how)
        for way, (_, how) in ways.items()
    }
    for number in range(1, arguments.repeats + 2):  # the first save of each allocates
        for way, (tensors, _) in ways.items():
            row = _measure(savers[way], tensors, number)
            if number > 1:
                for key, value in row.items():
                    measured.setdefault(way, {}).setdefault(key, []).append(value)
    for saver in savers.values():
        saver.close()
    report: dict = {
        way: {key: round(statistics.median(values), 4) for key, values in row.items()}
        for way, row in measured.items()
    }
    packed = CheckpointStore(arguments.dir / "compress").manifest(arguments.repeats + 1)
    stored = packed.files["trainer/packed-0.bin"].size
    report["ratio_of_optimizer"] = round(stored / sum(e.size for e in packed.contents.values()), 4)
    shutil.rmtree(arguments.dir)
    dist.destroy_process_group()
    print(json.dumps({"params": arguments.params, **report}))


def _measure(saver: Saver, tensors: dict, number: int) -> dict[str, float]:
    os.sync()
    saver.prepare(tensors)
    before = _processor()
    saver.save(number, tensors, {"trainer/state.json": b"{}"}, ABOUT)
    saver.before_update()
    saver.finish()
    (saved,) = saver.check()
    processor = _processor() - before
    folder = saver.store.folder(number)
    found = [path.stat() for path in folder.rglob("*") if path.is_file()]
    nbytes = sum(status.st_size for status in found if status.st_nlink == 1)
    load_step(folder, tensors)
    started = time.perf_counter()
    load_step(folder, tensors)
    loaded = time.perf_counter() - started
    if number > 2:
        saver.store.delete(number - 2)
    return {
        "bytes": nbytes,
        "stall_s": saved.stall_seconds,
        "durable_s": saved.durable_seconds,
        "processor_s": processor,
        "load_s": loaded,
    }


def _processor() -> float:
    """Processor seconds of this process and of its writers, which are children that still live."""
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children())]
    return sum(spent.user + spent.system for spent in times)


if __name__ == "__main__":
    main()
