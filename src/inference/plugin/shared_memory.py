"""Memory that the processes of a server share, and the policy that it keeps there for deltas.

Only of runs that publish deltas is a policy kept, as the trainer published it: as many bytes as it has, once
for all workers of the machine, which map it as they map what is prepared of any policy (`staging.py`).
"""

import mmap
import os

import torch

from cairn.policy.receiver import Layout, Room

ALIGNMENT = 64
"""Bytes that a tensor's place in shared memory is a multiple of."""


class SharedMemory:
    """Memory that other processes of this user map by its `path`; freed once all have unmapped it."""

    def __init__(self, size: int):
        self._fd = os.memfd_create("cairn-weights")
        os.ftruncate(self._fd, max(size, 1))
        self._bytes = torch.frombuffer(mmap.mmap(self._fd, max(size, 1)), dtype=torch.uint8)
        self._used = 0
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"

    def place(self, shape: torch.Size, dtype: torch.dtype) -> tuple[int, torch.Tensor]:
        """Room for a tensor, and its offset in bytes."""
        first = -(-self._used // ALIGNMENT) * ALIGNMENT
        self._used = first + shape.numel() * dtype.itemsize
        return first, self._bytes[first : self._used].view(dtype).view(shape)

    def close(self) -> None:
        """Free the memory here."""
        os.close(self._fd)
        del self._bytes


class HeldPolicy(Room):
    """Places for a policy's tensors, which stay; a delta changes them where they are.

    digest: of the policy that they hold; whoever changes them empties it, and sets it once the checksums of
    all are as they should be.
    """

    def __init__(self) -> None:
        self.digest = ""
        self.tensors: dict[str, torch.Tensor] = {}
        self.offsets: dict[str, int] = {}
        """Of each tensor in the memory, in bytes."""
        self._memory: SharedMemory | None = None

    @property
    def layout(self) -> Layout:
        """Of the tensors that there are places for."""
        return {name: (tensor.shape, tensor.dtype) for name, tensor in self.tensors.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def path(self) -> str:
        """By which workers map the memory."""
        assert self._memory is not None
        return self._memory.path

    def begin(self, layout: Layout) -> None:
        """Have places for tensors of this layout; if there are others, what they hold is lost."""
        if self.layout == layout and self._memory is not None:
            return
        self.end()
        sizes = [shape.numel() * dtype.itemsize for shape, dtype in layout.values()]
        self._memory = SharedMemory(sum(sizes) + ALIGNMENT * len(sizes))
        for name, (shape, dtype) in layout.items():
            self.offsets[name], self.tensors[name] = self._memory.place(shape, dtype)

    def place(self, name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        return self.tensors[name]

    def end(self) -> None:
        """Free the memory."""
        self.digest, self.tensors, self.offsets = "", {}, {}
        if self._memory is not None:
            self._memory.close()
            self._memory = None
