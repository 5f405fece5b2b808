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

    def bring(self, values: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """Flat `values` on the host, where they are once `wait` returns.

        Args:
            memory: uint8, on the host, large enough for them; the result may lie there, or be `values`.
        """
        return values


class GpuCopies(HostCopies):
    """Copies from one GPU, on a stream of their own, so that they overlap the forward and backward passes."""

    piece_bytes = 128 << 20  # at 50 GB/s the stream is drained 400 times a second at most

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pinned = False

    def follow(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def running(self) -> AbstractContextManager[Any]:
        """Within this context, the current stream is the one of the copies."""
        return torch.cuda.stream(self._stream)

    def wait(self) -> None:
        self._stream.synchronize()

    def pin(self, memory: torch.Tensor) -> None:
        """Register host memory with CUDA. Without that, copies into it are slow, which a warning says."""
        torch.cuda.set_device(self._device)  # else a new thread makes a context on GPU 0
        try:
            torch.cuda.check_error(_cudart().cudaHostRegister(memory.data_ptr(), len(memory), 0))
            self._pinned = True
        except RuntimeError as error:
            logger.warning("the arena is not pinned, so copying from the GPU is slow: %s", error)
            # CUDA keeps the error for this thread, and torch takes it for one of the next kernel's.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=self._device)

    def unpin(self, memory: torch.Tensor) -> None:
        if self._pinned:
            _cudart().cudaHostUnregister(memory.data_ptr())
            self._pinned = False

    def bring(self, values: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """Flat `values` in `memory`, where they are once `wait` returns."""
        return memory[: values.nbytes].view(values.dtype).copy_(values, non_blocking=True)


class Outlet:
    """Brings values into the host's memory piece by piece, for whoever writes or sends them from there.

    On a GPU they come through a piece of pinned memory, allocated once. One thread may use it at a time.

    Args:
        copies: from the device of the values.
        piece_bytes: the largest piece (default: as `copies` has it).
    """

    def __init__(self, copies: HostCopies, piece_bytes: int = 0):
        self.piece_bytes = piece_bytes or copies.piece_bytes
        self._copies = copies
        self._memory = torch.empty(0, dtype=torch.uint8)

    def follow(self) -> None:
        """Have later pieces hold what this thread's work that is queued on the device leaves there."""
        self._copies.follow()

    def running(self) -> AbstractContextManager[Any]:
        """Pieces are brought within this context, beside the work of other threads."""
        if not len(self._memory):
            self._memory = torch.empty(self.piece_bytes, dtype=torch.uint8)
            self._copies.pin(self._memory)
        return self._copies.running()

    def bring(self, values: torch.Tensor) -> torch.Tensor:
        """Flat `values` of at most `piece_bytes` on the host, until the next call."""
        piece = self._copies.bring(values, self._memory)
        self._copies.wait()
        return piece

    def close(self) -> None:
        if len(self._memory):
            self._copies.unpin(self._memory)
        self._memory = torch.empty(0, dtype=torch.uint8)


def copies_from(devices: Iterable[torch.device]) -> HostCopies:
    """What copies tensors from these devices, at most one of which is a GPU."""
    gpu = next((device for device in devices if device.type == "cuda"), None)
    return HostCopies() if gpu is None else GpuCopies(gpu)


def _cudart() -> Any:
    """The CUDA runtime, for which torch has no type hints."""
    return torch.cuda.cudart()
