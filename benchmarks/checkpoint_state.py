"""The model that benchmarks/checkpoint.py trains and saves, and tools to measure time and memory."""

import contextlib
import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from cairn.run.files import sync
from cairn.trainer.models.trained import Trained


class Plain(Trained):
    """A model that is not from Hugging Face: its tensors have the same names in memory and in files."""

    def saved(self) -> dict[str, torch.Tensor]:
        """The tensors by the model's own names."""
        return dict(self.module.state_dict())


class Training:
    """A training loop with about as much compute per parameter as a language model on short rows."""

    def __init__(self, params: int, device: str):
        torch.manual_seed(0)
        width = 1024 if params >= 50e6 else 512
        layers = max(1, round(params / (8 * width * width + 5 * width)))
        self.model = torch.nn.Sequential(
            *(
                torch.nn.Sequential(
                    torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
                )
                for _ in range(layers)
            )
        ).to(device)
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.batch = torch.randn(16, width, device=device)
        self.device = device
        for _ in range(2):
            self.step()
        self.step_seconds = statistics.median(self.timed_step() for _ in range(7))
        state = self.tensors()
        self.total_bytes = sum(
            t.numel() * t.element_size() for named in state.values() for t in named.values()
        )

    def step(self, before_update: Callable[[], None] = lambda: None) -> None:
        """One step: forward, backward, update."""
        self.model(self.batch).square().mean().backward()
        before_update()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.device == "cuda":
            torch.cuda.synchronize()

    def timed_step(self) -> float:
        """Seconds of one step."""
        started = time.perf_counter()
        self.step()
        return time.perf_counter() - started

    def tensors(self) -> dict:
        """The state as Cairn's saver takes it."""
        return Plain(self.model, self.optimizer).tensors()

    def flat(self) -> dict:
        """The state as PyTorch's checkpointing takes it."""
        return {f"{stem}.{name}": t for stem, named in self.tensors().items() for name, t in named.items()}

    def local_buffers(self) -> list:
        """This rank's bytes, as buffers for raw reads and writes."""
        flat = (t.detach() for t in self.flat().values())
        local = (t.to_local() if isinstance(t, DTensor) else t for t in flat)
        return [t.cpu().contiguous() for t in local if t.numel()]


def together(action: Callable[[], None], before: Callable[[], None] = lambda: None) -> float:
    """Seconds until all ranks have finished `action`."""
    before()
    dist.barrier()
    started = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - started


def drop_cache(folder: Path) -> None:
    """Remove the folder's files from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            sync(path)
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


class Memory:
    """Peak memory of this process and its children inside the context, in bytes beyond `base`."""

    def __init__(self, base: int):
        self.base = base
        self.peak = 0
        self._stop = threading.Event()

    def __enter__(self) -> "Memory":
        def watch() -> None:
            while True:
                self.peak = max(self.peak, _memory() - self.base)
                if self._stop.wait(0.1):
                    return

        self._thread = threading.Thread(target=watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def _memory() -> int:
    """Proportional set size of this process and its children in bytes; shared pages are counted once."""
    total = 0
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    for pid in [str(os.getpid()), *children.read_text().split()]:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total
