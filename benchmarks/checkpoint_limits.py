"""The hardware's limits for benchmarks/checkpoint.py: copying, writing and reading the same bytes.

A raw read reads all bytes of the files that a system has saved into memory that is already allocated and
touched, 8 MiB at a time, on one, two or three threads per rank, through the page cache or, if it is empty,
also with O_DIRECT; the fastest of these counts. Nothing is parsed, checked or moved to its tensor.
"""

import contextlib
import ctypes
import mmap
import os
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
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

    def best(ways: list[Callable[[], None]]) -> float:
        """The median of the fastest way; each way is first tried once, to see which are worth repeating."""
        tried = [[together(way) for way in ways]]
        dist.broadcast_object_list(tried)  # so that all ranks choose the same
        chosen = sorted(range(len(ways)), key=tried[0].__getitem__)[:3]
        return min(statistics.median(together(ways[i]) for _ in range(repeats)) for i in chosen)

    memcpy()
    direct = getattr(os, "O_DIRECT", 0)
    limits = {
        "memcpy_s": best([memcpy]),
        "write_fsync_s": best([lambda f=f, t=t: write(f, t) for f in {0, direct} for t in (1, 2)]),
    }
    path.unlink()
    return limits


class RawReads:
    """Reads all files below a folder; the ranks share their blocks."""

    def __init__(self, root: Path):
        self.files = sorted(path for path in root.rglob("*") if path.is_file() and path.stat().st_size)
        blocks = [(path, at) for path in self.files for at in range(0, path.stat().st_size, BLOCK)]
        self._blocks = blocks[dist.get_rank() :: dist.get_world_size()]
        self._memory = mmap.mmap(-1, max(len(self._blocks), 1) * BLOCK)
        np.frombuffer(self._memory, np.uint8)[:: mmap.PAGESIZE] = 1

    def ways(self, *, cold: bool) -> list[Callable[[], None]]:
        """The ways to read that may be fastest."""
        flags = {0, getattr(os, "O_DIRECT", 0)} if cold else {0}
        return [lambda f=f, t=t: self.read(f, t) for f in sorted(flags) for t in (1, 2, 3)]

    def read(self, flags: int = 0, threads: int = 1) -> None:
        """Read this rank's blocks, with these flags of `open`."""
        with contextlib.ExitStack() as closing:
            view = closing.enter_context(memoryview(self._memory))
            fds = {path: os.open(path, os.O_RDONLY | flags) for path in self.files}
            for fd in fds.values():
                closing.callback(os.close, fd)

            def read_block(number: int) -> None:
                path, at = self._blocks[number]
                count = os.preadv(fds[path], [view[number * BLOCK : (number + 1) * BLOCK]], at)
                assert count == min(BLOCK, path.stat().st_size - at)

            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(read_block, range(len(self._blocks))))

    def cached(self) -> float:
        """The fraction of the files' pages that are in the page cache."""
        held = pages = 0
        for path in self.files:
            size = path.stat().st_size
            with open(path, "rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as mapped:
                found = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
                content = np.frombuffer(mapped, np.uint8)
                where = [ctypes.c_void_p(array.ctypes.data) for array in (content, found)]
                failed = ctypes.CDLL(None, use_errno=True).mincore(where[0], ctypes.c_size_t(size), where[1])
                del content  # the mapping can't be closed before
            if failed:
                raise OSError(ctypes.get_errno(), f"mincore of {path}")
            held, pages = held + int((found & 1).sum()), pages + len(found)
        return held / pages


def measure_loads(load: Callable[[], None], root: Path, repeats: int) -> dict[str, float]:
    """Medians of a system's loads and of raw reads of its files, in turn; all ranks call it.

    cached_share is the least share of the files that the page cache held before a warm load.
    """
    load()  # and with it whatever the last save still does to its files
    dist.barrier()
    raw = RawReads(root)
    cold = _in_turn(load, raw, repeats, lambda: drop_cache(root), cold=True)
    share = 1.0

    def see() -> None:
        nonlocal share
        share = min(share, raw.cached())

    load()
    for _ in range(2):  # the kernel treats pages that were read once otherwise than those that are in use
        together(raw.read)
    warm = _in_turn(load, raw, repeats, see, cold=False)
    return {
        **{"load_cold_s": cold[0], "raw_cold_s": cold[1]},
        **{"load_warm_s": warm[0], "raw_warm_s": warm[1], "cached_share": share},
    }


def _in_turn(
    load: Callable[[], None], raw: RawReads, repeats: int, before: Callable[[], None], *, cold: bool
) -> tuple[float, float]:
    """The median of the loads, and that of the fastest way of reading the same bytes."""
    actions = [load, *raw.ways(cold=cold)]
    rounds = [[together(action, before) for action in actions] for _ in range(repeats)]
    medians = [statistics.median(seconds) for seconds in zip(*rounds, strict=True)]
    return medians[0], min(medians[1:])
