"""What a step in memory costs (`ckpt.memory_interval`), beside a plain copy of the state.

- memcpy_s: copying this rank's state within the host's memory, by one thread
- copy_s: a step in memory, with nothing else to do: copied and checksummed
- stall_s: how long the training loop waits for the copy if it trains meanwhile
- lost_s: how much longer a step takes that a copy overlaps, compared with those around it
- start_s: until the driver has read and compared every byte, and the step has a folder
- load_s: until the state is loaded from there
"""

import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from checkpoint_state import Training, together

from cairn.checkpoint.memory.memory_owners import RankHost
from cairn.checkpoint.memory.memory_slots import MemoryRecord, start_in_memory
from cairn.checkpoint.memory.memory_steps import MemorySteps
from cairn.checkpoint.saving.saver import SavingRank
from cairn.checkpoint.tensors.sharded_files import load_step
from cairn.run.messages import Attempt

START = Attempt("benchmark", 1, "sft", 0, None, "main")


def measure_memory(training: Training, repeats: int) -> dict[str, float]:
    """Keep steps in memory repeatedly; all ranks call it."""
    rank, count = dist.get_rank(), dist.get_world_size()
    folders = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folders)
    folder = Path(str(folders[0])) / "memory"
    launchers = [os.getpid()]
    dist.broadcast_object_list(launchers)

    def gather(mine: object) -> list:
        found: list[object] = [None] * count
        dist.all_gather_object(found, mine)
        return found

    here = SavingRank(rank, count, "benchmark")
    steps = MemorySteps(folder, here, RankHost(int(launchers[0])), gather, lambda: 1 << 60, {}, start=0)

    def record(step: int) -> MemoryRecord:
        about = {"run_id": START.run_id, "attempt": 1, "branch": "main", "parent": None, "parts": ["trainer"]}
        about |= {"world_size": count, "dtypes": {}, "metrics": {}, "versions": {}, "config_digest": ""}
        return MemoryRecord(START.id, here.session, step, 0, about, {})

    def keep(step: int) -> None:
        steps.keep(step, training.tensors(), record(step) if rank == 0 else None)

    for step in (1, 2):  # the pages of both slots are allocated
        keep(step)
        steps.wait()
    buffers = training.local_buffers()
    copies = [torch.empty_like(one) for one in buffers]
    found: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        found.setdefault(name, []).append(seconds)

    def copy_plainly(buffers: list[torch.Tensor] = buffers, copies: list[torch.Tensor] = copies) -> None:
        for source, target in zip(buffers, copies, strict=True):
            target.copy_(source)

    def keep_alone(step: int) -> None:
        keep(step)
        steps.wait()

    copy_plainly()
    for repeat in range(repeats):
        note("memcpy_s", together(copy_plainly))
        note("copy_s", together(partial(keep_alone, 3 + repeat)))
    for repeat in range(repeats):
        step = 3 + repeats + repeat
        calm = statistics.median(training.timed_step() for _ in range(5))
        dist.barrier()
        waited: list[float] = []
        began = time.perf_counter()
        keep(step)
        training.step(lambda waited=waited: waited.append(steps.before_update()))
        note("lost_s", time.perf_counter() - began - calm)
        note("stall_s", waited[0])
        steps.wait()
    dist.barrier()
    began = time.perf_counter()
    starts = [start_in_memory(folder, START, lambda record: True) if rank == 0 else None]
    dist.broadcast_object_list(starts)
    note("start_s", time.perf_counter() - began)
    assert starts[0] is not None
    where = Path(str(starts[0].resume_from))

    def load() -> None:
        load_step(where, training.tensors(), rank=rank, gather=gather)

    note("load_s", together(load))
    steps.close()
    return {name: statistics.median(values) for name, values in found.items()}
