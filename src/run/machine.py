# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportMissingTypeStubs=false
"""What a machine has: its GPUs and its memory. Asks the driver (NVML), so torch need not be imported."""

import contextlib
import os
import re
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml

from cairn.run.errors import UsageError

VISIBLE = "CUDA_VISIBLE_DEVICES"
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
PLANNED = re.compile(r"(?:(\d+)\s*x\s*)?([\d.]+)([KMGT]?)")
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class Gpu:
    """One GPU. index: its place among all of the machine, as NVML counts. memory: in bytes.

    capability: CUDA's compute capability, such as (9, 0) of an H100.
    """

    index: int
    uuid: str
    name: str
    memory: int
    capability: tuple[int, int] = (9, 0)


@dataclass(frozen=True)
class Machine:
    """A machine. gpus: those that this process may use, in the order in which CUDA numbers them.

    memory: bytes of host memory, or fewer if a control group (cgroup) allows fewer. driver: version of the
    NVIDIA driver; None without one.
    """

    gpus: tuple[Gpu, ...] = ()
    memory: int = 0
    driver: str | None = None

    @property
    def has_gpus(self) -> bool:
        """Whether there is a GPU."""
        return bool(self.gpus)


def this_machine() -> Machine:
    """This machine, with the GPUs that CUDA_VISIBLE_DEVICES leaves visible."""
    with _nvml() as driver:
        gpus = _gpus() if driver else []
    return Machine(visible(gpus, os.environ.get(VISIBLE)), _host_memory(), driver)


def visible(gpus: list[Gpu], names: str | None) -> tuple[Gpu, ...]:
    """The GPUs that a value of CUDA_VISIBLE_DEVICES leaves visible, in its order; None leaves all.

    As CUDA does it: names are indices or beginnings of UUIDs, and the first unknown one ends the list.
    """
    if names is None:
        return tuple(gpus)
    chosen: list[Gpu] = []
    for name in map(str.strip, names.split(",")):
        found = [gpu for gpu in gpus if name in (str(gpu.index), gpu.uuid)]
        found = found or [gpu for gpu in gpus if name and gpu.uuid.startswith(name)]
        if len(found) != 1 or found[0] in chosen:
            break
        chosen += found
    return tuple(chosen)


def machine_of(words: str) -> Machine:
    """The machine that `words` describe, for planning: GPUs, and host memory after a comma.

    8x80G,1T: eight GPUs with 80 GiB each, and 1 TiB of host memory. 64G: no GPU. Without host memory, it is
    four times that of the GPUs.

    Raises:
        UsageError: that is no description of a machine.
    """
    parts = [PLANNED.fullmatch(part.strip()) for part in words.split(",")]
    numbers = [match for match in parts if match]
    with_gpus = bool(numbers) and numbers[0][1] is not None
    if len(numbers) != len(parts) or len(parts) > 1 + with_gpus or any(match[1] for match in numbers[1:]):
        raise UsageError(
            f"--machine {words}: give GPUs and host memory such as 8x80G,1T, or host memory alone such as 64G"
        )
    sizes = [int(float(match[2]) * UNITS[match[3]]) for match in numbers]
    count = int(numbers[0][1]) if with_gpus else 0
    gpus = tuple(Gpu(i, f"GPU-{i}", "planned", sizes[0]) for i in range(count))
    return Machine(gpus, sizes[-1] if len(sizes) > with_gpus else 4 * count * sizes[0])


@contextlib.contextmanager
def _nvml() -> Generator[str | None]:
    """NVML while it is in use; gives the driver's version, or None if there is no driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield str(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()


def _gpus() -> list[Gpu]:
    """All GPUs of this machine, and the slices of GPUs (MIG) that CUDA_VISIBLE_DEVICES names."""
    gpus = [_gpu(i, pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(pynvml.nvmlDeviceGetCount())]
    names = map(str.strip, os.environ.get(VISIBLE, "").split(","))
    for uuid in (name for name in names if name.startswith("MIG-")):
        with contextlib.suppress(pynvml.NVMLError):  # CUDA will not see it either
            gpus.append(_gpu(len(gpus), pynvml.nvmlDeviceGetHandleByUUID(uuid.encode())))
    return gpus


def _gpu(index: int, handle: Any) -> Gpu:
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    uuid, name = str(pynvml.nvmlDeviceGetUUID(handle)), str(pynvml.nvmlDeviceGetName(handle))
    memory = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    return Gpu(index, uuid, name, memory, (int(major), int(minor)))


def _host_memory() -> int:
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [physical]
    for path in map(Path, CGROUP_LIMITS):
        with contextlib.suppress(OSError, ValueError):  # absent, or "max"
            limits.append(int(path.read_text()))
    return min(limits)
