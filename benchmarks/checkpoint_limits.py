"""The hardware's limits for benchmarks/checkpoint.py: copying, writing and reading the same bytes."""

import mmap
import os
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from checkpoint_state import Training, drop_cache, together

BLOCK = 8 << 20


def measure_limits(training: Training, root: Path, repeats: int) -> dict[str, float]:
    """Seconds that memory and disk take for the same bytes and nothing else."""
    rank = dist.get_rank()
    buffers = training.local_buffers()
    nbytes = sum(b.nbytes for b in buffers) // 4096 * 4096
    arena = mmap.mmap(-1, nbytes + 4096)
    target = torch.frombuffer(arena, dtype=torch.uint8)
    path = root / f"raw{rank}"

    def memcpy() -> None:
        position = 0
        for buffer in buffers:
            flat = buffer.view(-1).view(torch.uint8)
            count = min(len(flat), len(target) - position)
            target[position : position + count].copy_(flat[:count])
            position += count

    def write(flags: int, threads: int) -> None:
        path.unlink(missing_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | flags)
        os.ftruncate(fd, nbytes)
        view = memoryview(arena)
        with ThreadPoolExecutor(threads) as pool:
            list(
                pool.map(
                    lambda at: os.pwrite(fd, view[at : min(at + BLOCK, nbytes)], at), range(0, nbytes, BLOCK)
                )
            )
        os.fsync(fd)
        os.close(fd)
        view.release()

    def read(flags: int, threads: int, run: int = BLOCK, block: int = BLOCK) -> None:
        """Each thread takes the next `run` bytes and reads them in blocks."""
        fd = os.open(path, os.O_RDONLY | flags)
        view = memoryview(arena)

        def read_run(at: int) -> None:
            end = min(at + run, nbytes)
            while at < end:
                at += os.preadv(fd, [view[at : min(at + block, end)]], at)

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(read_run, range(0, nbytes, run)))
        os.close(fd)
        view.release()

    def best(ways: list[Callable[[], None]], before: Callable[[], None] = lambda: None) -> float:
        """The median of the fastest way; each way is first tried once, to see which are worth repeating."""
        tried = [[together(way, before) for way in ways]]
        dist.broadcast_object_list(tried)  # so that all ranks choose the same
        chosen = sorted(range(len(ways)), key=tried[0].__getitem__)[:3]
        return min(statistics.median(together(ways[i], before) for _ in range(repeats)) for i in chosen)

    memcpy()
    direct = getattr(os, "O_DIRECT", 0)
    limits = {
        "memcpy_s": best([memcpy]),
        "write_fsync_s": best([lambda f=f, t=t: write(f, t) for f in {0, direct} for t in (1, 2)]),
    }
    streams = [lambda t=t: read(0, t, run=64 << 20, block=512 << 10) for t in (2, 3)]
    cold = [lambda f=f, t=t: read(f, t) for f in {0, direct} for t in (1, 2)]
    limits["read_cold_s"] = best([*cold, *streams], lambda: drop_cache(root))
    read(0, 1)
    limits["read_warm_s"] = best([*(lambda t=t: read(0, t) for t in (1, 2)), *streams])
    path.unlink()
    return limits
