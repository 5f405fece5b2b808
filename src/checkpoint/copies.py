# torch is typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Copies of tensors into host memory, from the host itself or from a GPU, while training goes on."""

import contextlib
import logging
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

logger = logging.getLogger(__name__)


class HostCopies:
    """Copies within the host's memory: each is done when `copy_` returns.

    piece_bytes: how much to copy between two calls of `wait`.
    """

    piece_bytes = 8 << 20

    def follow(self) -> None:
        """Have later copies run after the work that this thread has queued on the device so far."""

    def running(self) -> AbstractContextManager[Any]:
        """Within this context, copies are queued beside the work of other threads."""
        return contextlib.nullcontext()

    def wait(self) -> None:
        """Return once the queued copies are done."""

    def pin(self, memory: torch.Tensor) -> None:
        """Prepare host memory (uint8 [n]) as the target of copies; any thread may call it."""

    def unpin(self, memory: torch.Tensor) -> None:
        """Undo `pin`."""

    def bring(self, values: torch.Tensor, dtype: torch.dtype, memory: torch.Tensor) -> torch.Tensor:
        """Flat `values` as `dtype` on the host, where they are once `wait` returns.

        Args:
            memory: uint8, on the host, large enough for them; the result may lie there, or be `values`.
        """
        return values.to(dtype)


class GpuCopies(HostCopies):
    """Copies from one GPU, on a stream of their own, so that they overlap the forward and backward passes."""

    piece_bytes = 128 << 20  # at 50 GB/s the stream is drained 400 times a second at most

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pinned = False

    def follow(self) -> None:
        """Have later copies run after the work that this thread has queued on the GPU so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def running(self) -> AbstractContextManager[Any]:
        """Within this context, the current stream is the one of the copies."""
        return torch.cuda.stream(self._stream)

    def wait(self) -> None:
        """Return once the queued copies are done."""
        self._stream.synchronize()

    def pin(self, memory: torch.Tensor) -> None:
        """Register host memory with CUDA. Without that, copies into it are slow, which a warning says."""
        torch.cuda.set_device(self._device)  # else a new thread makes a context on GPU 0
        try:
            torch.cuda.check_error(_cudart().cudaHostRegister(memory.data_ptr(), len(memory), 0))
            self._pinned = True
        except RuntimeError as error:
            logger.warning("the arena is not pinned, so copying from the GPU is slow: %s", error)

    def unpin(self, memory: torch.Tensor) -> None:
        """Undo `pin`, if it succeeded."""
        if self._pinned:
            _cudart().cudaHostUnregister(memory.data_ptr())
            self._pinned = False

    def bring(self, values: torch.Tensor, dtype: torch.dtype, memory: torch.Tensor) -> torch.Tensor:
        """As in the base class; converted on the GPU, so that no more than the result crosses the bus."""
        there = memory[: len(values) * dtype.itemsize].view(dtype)
        return there.copy_(values.to(dtype), non_blocking=True)


def copies_from(devices: Iterable[torch.device]) -> HostCopies:
    """What copies tensors from these devices, at most one of which is a GPU."""
    gpu = next((device for device in devices if device.type == "cuda"), None)
    return HostCopies() if gpu is None else GpuCopies(gpu)


def _cudart() -> Any:
    """The CUDA runtime, for which torch has no type hints."""
    return torch.cuda.cudart()
