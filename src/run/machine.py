# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportMissingTypeStubs=false
"""What a machine has: its GPUs and its memory. Asks the driver (NVML), so torch need not be imported."""

import contextlib
import math
import os
import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml

from cairn.run.errors import UsageError

VISIBLE = "CUDA_VISIBLE_DEVICES"
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)([KMGT]?)")
PLANNED = re.compile(r"(?:([0-9]{1,4})\s*x\s*)?(\S+)")
CGROUPS = "/sys/fs/cgroup"
PCI = "/sys/bus/pci/devices"
NODES = "/sys/devices/system/node"


@dataclass(frozen=True)
class Gpu:
    """One GPU. index: its place among all of the machine, as NVML counts. memory: in bytes.

    capability: CUDA's compute capability, such as (9, 0) of an H100. used: bytes that were taken when NVML
    was asked, by whomever. node: of the machine's memory (NUMA) to which it is attached; None if the kernel
    does not say it, as on virtual machines.
    """

    index: int
    uuid: str
    name: str
    memory: int
    capability: tuple[int, int] = (9, 0)
    used: int = 0
    node: int | None = None


@dataclass(frozen=True)
class Machine:
    """A machine. gpus: those that this process may use, in the order in which CUDA numbers them.

    memory: bytes of host memory, or fewer if a control group (cgroup) allows fewer. driver: version of the
    NVIDIA driver; None without one. cpus: those that this process may use; 0 if that is not known.
    """

    gpus: tuple[Gpu, ...] = ()
    memory: int = 0
    driver: str | None = None
    cpus: int = 0

    @property
    def has_gpus(self) -> bool:
        """Whether there is a GPU."""
        return bool(self.gpus)


def this_machine() -> Machine:
    """This machine, with the GPUs that CUDA_VISIBLE_DEVICES leaves visible."""
    with _nvml() as driver:
        gpus = _gpus() if driver else []
    return Machine(visible(gpus, os.environ.get(VISIBLE)), _host_memory(), driver, _cpus())


CPUS_A_RANK = 2
"""One launches kernels; another copies, writes and prepares the next batch."""


def lack_of_cpus(machine: Machine, ranks: int) -> str | None:
    """What to tell somebody whose ranks on a machine's GPUs would wait for its CPUs; None if they are enough.

    Args:
        ranks: of this machine.
    """
    if not machine.has_gpus or not 0 < machine.cpus < CPUS_A_RANK * ranks:
        return None
    cpus, of_ranks = f"CPU{'s' * (machine.cpus > 1)}", f"rank{'s' * (ranks > 1)}"
    return (
        f"{machine.cpus} {cpus} for {ranks} {of_ranks} on GPUs, fewer than {CPUS_A_RANK} each: the GPUs will "
        "wait for kernels to be launched. A job of Slurm's gets more with --slurm.cpus-per-task (srun "
        "--cpus-per-task), a container with a higher limit"
    )


def keep_near(machine: Machine, name: str | None, neighbours: int) -> str | None:
    """Have all threads of this process, and what they start, run on the CPUs of its GPU's NUMA node.

    So host memory that they touch first lies there, and copies don't cross the link between sockets. Where
    the node is not known, or this process may use less than two of its CPUs for each rank, nothing is done.

    Args:
        machine: with the GPUs that this process sees.
        name: of its GPU, as Ray gives it; None on CPUs.
        neighbours: ranks on this machine, of which the GPUs may be on one node.

    Returns:
        What was done, in words; None if nothing.
    """
    gpus = gpus_named(machine.gpus, name) if name else []
    if len(gpus) != 1 or gpus[0].node is None:
        return None
    allowed = os.sched_getaffinity(0)
    near = _cpus_of(gpus[0].node) & allowed
    if near == allowed or len(near) < CPUS_A_RANK * neighbours:
        return None
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread), near)
    return (
        f"runs on {len(near)} of {len(allowed)} CPUs, those of NUMA node {gpus[0].node}, as GPU {name} does"
    )


def _cpus_of(node: int) -> set[int]:
    """The CPUs of a NUMA node; none if the kernel does not say it."""
    with contextlib.suppress(OSError, ValueError):
        listed = Path(NODES, f"node{node}", "cpulist").read_text().strip()
        ends = [[int(end) for end in part.split("-")] for part in listed.split(",") if part]
        return {cpu for one in ends for cpu in range(one[0], one[-1] + 1)}
    return set()


def visible(gpus: list[Gpu], names: str | None) -> tuple[Gpu, ...]:
    """The GPUs that a value of CUDA_VISIBLE_DEVICES leaves visible, in its order; None leaves all.

    As CUDA does it: names are indices or beginnings of UUIDs, and the first unknown one ends the list.
    """
    if names is None:
        return tuple(gpus)
    chosen: list[Gpu] = []
    for name in map(str.strip, names.split(",")):
        found = gpus_named(gpus, name)
        if len(found) != 1 or found[0] in chosen:
            break
        chosen += found
    return tuple(chosen)


def gpus_named(gpus: Sequence[Gpu], name: str) -> list[Gpu]:
    """The GPUs that an index, a UUID or the beginning of UUIDs names."""
    exact = [gpu for gpu in gpus if name in (str(gpu.index), gpu.uuid)]
    return exact or [gpu for gpu in gpus if name and gpu.uuid.startswith(name)]


# How settings and CUDA_VISIBLE_DEVICES name GPUs


ORDER = "CUDA_DEVICE_ORDER"
"""Variable that says how CUDA numbers GPUs: by speed, or like NVML and nvidia-smi by their PCI bus."""


def gpu_names(value: str) -> tuple[str, ...] | None:
    """The names that a setting such as `gpus` lists; None if it is a number of GPUs.

    0,1 and 3, and GPU-5ab1 are lists; 3 is a number.
    """
    if value.isdecimal():
        return None
    return tuple(name for name in value.split(",") if name)


def gpu_list(names: Sequence[str]) -> str:
    """The value that lists `names`; 0 for none."""
    if len(names) == 1 and names[0].isdecimal():
        return f"{names[0]},"
    return ",".join(names) or "0"


def use_gpus(gpus: str | None) -> None:
    """Let this process, and those that it starts, see these GPUs only; None changes nothing.

    To be called before CUDA is initialised. `gpus` is a value that names them.
    """
    if gpus is None:
        return
    os.environ[VISIBLE] = ",".join(gpu_names(gpus) or ())
    os.environ.setdefault(ORDER, "PCI_BUS_ID")


def machine_of(words: str) -> Machine:
    """The machine that `words` describe, for planning: GPUs, and host memory after a comma.

    8x80G,1T: eight GPUs with 80 GiB each, and 1 TiB of host memory. 64G: no GPU. Without host memory, it is
    four times that of the GPUs.

    Raises:
        UsageError: that is no description of a machine.
    """
    matches = [match for match in (PLANNED.fullmatch(part.strip()) for part in words.split(",")) if match]
    try:
        sizes = [bytes_of(match[2]) for match in matches]
        count = int(matches[0][1] or 0)
        if (
            len(sizes) != words.count(",") + 1
            or len(sizes) > 1 + bool(count)
            or any(m[1] for m in matches[1:])
        ):
            raise ValueError
    except (ValueError, IndexError):
        raise UsageError(
            f"--machine {words}: give GPUs and host memory such as 8x80G,1T, or host memory alone such as 64G"
        ) from None
    gpus = tuple(Gpu(i, f"GPU-{i}", "planned", sizes[0]) for i in range(count))
    return Machine(gpus, sizes[-1] if len(sizes) > bool(count) else 4 * count * sizes[0])


def bytes_of(size: str) -> int:
    """The number of bytes that a size such as 64M, 1.5G or 4096 stands for; K is 1024.

    Raises:
        ValueError: it is no size.
    """
    match = SIZE.fullmatch(size.strip().upper())
    if not match:
        raise ValueError(f"{size!r} is no size; give a number of bytes, or one such as 64M, 1.5G or 2T")
    return int(float(match[1]) * UNITS[match[2]])


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
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    capability = int(major), int(minor)
    return Gpu(index, uuid, name, int(memory.total), capability, int(memory.used), _node_of(handle))


def _node_of(handle: Any) -> int | None:
    """The NUMA node of a GPU, by its address on the PCI bus; None of a slice of a GPU as well."""
    with contextlib.suppress(pynvml.NVMLError, OSError, ValueError):
        address = pynvml.nvmlDeviceGetPciInfo(handle).busId  # such as 00000000:3B:00.0
        domain, _, rest = (address.decode() if isinstance(address, bytes) else str(address)).partition(":")
        node = int(Path(PCI, f"{int(domain, 16):04x}:{rest.lower()}", "numa_node").read_text())
        return node if node >= 0 else None
    return None


def available_memory() -> int:
    """Bytes of host memory that this process could still use: free, or cached files; as its cgroup allows."""
    text = Path("/proc/meminfo").read_text()
    available = [int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("MemAvailable:")]
    for group in _cgroups():
        available.append(group.limit - group.used)
    return max(0, min(available))


def _host_memory() -> int:
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([physical, *(group.limit for group in _cgroups())])


def _cpus() -> int:
    """CPUs of this process's affinity, or fewer if a control group allows less of their time."""
    root, allowed = Path(CGROUPS), [float(len(os.sched_getaffinity(0)))]
    for inside in {"", *_own_groups("cpu")}:
        with contextlib.suppress(OSError, ValueError):  # absent, or "max"
            quota, period = map(int, (root / inside / "cpu.max").read_text().split())
            allowed.append(quota / period)
        with contextlib.suppress(OSError, ValueError):  # of cgroup v1, where -1 is no limit
            folder = root / "cpu" / inside
            quota, period = (int((folder / f"cpu.cfs_{of}_us").read_text()) for of in ("quota", "period"))
            allowed += [quota / period] if quota > 0 else []
    return max(1, math.ceil(min(allowed)))


@dataclass(frozen=True)
class _Cgroup:
    """A control group's memory: its limit, and what is in use, without cached files that can be dropped."""

    limit: int
    used: int


def _cgroups() -> list[_Cgroup]:
    """The control groups with a limit that this process is in, of cgroup v2 and v1."""
    root, inside = Path(CGROUPS), {"", *_own_groups("memory")}
    names = [
        (root, "memory.max", "memory.current"),
        (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ]
    found: list[_Cgroup] = []
    for top, limit, usage in names:
        for folder in {top / path for path in inside}:
            with contextlib.suppress(OSError, ValueError):  # absent, or "max"
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                cached = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
                found.append(
                    _Cgroup(int((folder / limit).read_text()), int((folder / usage).read_text()) - cached)
                )
    return found


def _own_groups(controller: str) -> set[str]:
    """The paths of this process's control groups with a controller, such as memory, and those around them."""
    paths: set[str] = set()
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or controller in controllers.split(","):
                paths |= {str(folder).lstrip("/") for folder in (Path(path), *Path(path).parents)}
    return paths
