"""This rank's device, and what can be wrong with a GPU: CUDA can't use it, its memory does not suffice, or it
reaches others slowly."""

import socket

import torch

from cairn.config.trainer import TrainerBase
from cairn.run.errors import OutOfMemory, UsageError
from cairn.run.machine import this_machine
from cairn.trainer.group import RankGroup

SLOW_LINK = 20e9
"""Bytes a second. NVLink gives a GPU some 300e9, InfiniBand of 400 Gb/s 50e9, TCP at 25 Gb/s 3e9."""


def slow_network(group: RankGroup) -> str | None:
    """What to tell somebody whose GPUs reach each other slowly, as NCCL over TCP does; None otherwise.

    All ranks call it. On CPUs, and with one rank, nothing is measured.
    """
    if group.device.type != "cuda" or group.world_size == 1:
        return None
    rate = float(group.gather_rows(torch.tensor([[group.measure()]], dtype=torch.float64)).min())
    if rate >= SLOW_LINK:
        return None
    return (
        f"the ranks gather {rate / 1e9:.1f} GB/s from each other, where GPUs with NVLink or InfiniBand get "
        f"more than {SLOW_LINK / 1e9:g}: steps of large models will wait for it. NCCL_DEBUG=INFO names the "
        "transport (NET/IB, NET/Socket, P2P) in the ranks' logs; --slurm.interface or NCCL_SOCKET_IFNAME "
        "chooses a network, and replicas has each machine gather layers from its own GPUs only"
    )


NEEDED_DRIVERS = {"11": 450, "12": 525, "13": 580}
"""The oldest NVIDIA driver for each major version of CUDA (CUDA Toolkit release notes, table 2)."""


def device_for(gpu: str | None, index: int, *, on_cpu: bool) -> torch.device:
    """The device of a rank: the GPU that Ray gave its process, or the CPU if it gave none.

    Args:
        gpu: the GPU's name, such as in CUDA_VISIBLE_DEVICES.
        index: its number among those that this process sees.
        on_cpu: whether the settings ask for the CPU.

    Raises:
        UsageError: CUDA can't use the GPU, or it sees one that Ray does not know of. Training on the CPU
            instead would be hundreds of times as slow.
    """
    if gpu is None:
        if not on_cpu and torch.cuda.is_available():
            raise UsageError(
                f"torch sees {torch.cuda.device_count()} GPUs on {socket.gethostname()}, but Ray gave this "
                "rank none: start the Ray cluster with its GPUs (ray start --num-gpus), or set gpus to 0 to "
                "train on the CPU"
            )
        return torch.device("cpu")
    device = torch.device("cuda", index)
    try:
        torch.cuda.init()
        torch.ones(1, device=device).item()  # a context, and a kernel made for this kind of GPU
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AssertionError) as error:
        raise UsageError(_unusable(gpu, str(error))) from None
    return device


def out_of_memory(error: BaseException, config: TrainerBase) -> OutOfMemory | None:
    """What to tell a user whose GPU has run out of memory; None if `error` is of another kind."""
    if not isinstance(error, torch.OutOfMemoryError) and not _is_of_library(error):
        return None
    ways = [f"lower seq_len (now {config.seq_len})"]
    if config.micro_batch_tokens is not None and config.micro_batch_tokens > config.seq_len:
        ways.insert(0, f"lower micro_batch_tokens (now {config.micro_batch_tokens})")
    elif config.rows > 1:
        ways.insert(0, f"lower micro_batch_size (now {config.rows})")
    if not config.activation_checkpointing:
        ways.append("turn on activation_checkpointing")
    if config.ranks > config.parallel.context:
        ways.append(f"share rows among ranks (parallel.context, now {config.parallel.context})")
    ways.append(f"shard the model over more workers (now {config.ranks})")
    used = ""
    if torch.cuda.is_initialized():
        peak, total = torch.cuda.max_memory_allocated(), torch.cuda.mem_get_info()[1]
        used = f" At its peak this rank had allocated {peak / 2**30:.1f} of {total / 2**30:.1f} GiB."
    reason = " ".join(str(error).split())
    return OutOfMemory(f"out of memory: {reason}{used} To need less, {', '.join(ways[:-1])}, or {ways[-1]}")


def _is_of_library(error: BaseException) -> bool:
    """Whether an allocation failed that was not torch's own, but the driver's, cuBLAS's or NCCL's."""
    text = str(error)
    return isinstance(error, RuntimeError) and (
        "CUBLAS_STATUS_ALLOC_FAILED" in text or ("out of memory" in text and "cuda" in text.lower())
    )


def _unusable(gpu: str, reason: str) -> str:
    """Why torch can't use a GPU, for a user."""
    what = f"GPU {gpu} of {socket.gethostname()} can't be used: {' '.join(reason.split())}"
    if torch.version.cuda is None:
        needs = f"torch {torch.__version__} is built without CUDA; `scripts/setup gpu` installs another build"
    else:
        driver = this_machine().driver
        oldest = NEEDED_DRIVERS.get(torch.version.cuda.partition(".")[0])
        wanted = f" of version {oldest} or later" if oldest else ""
        needs = (
            f"torch {torch.__version__} is built for CUDA {torch.version.cuda}, which needs an NVIDIA driver"
            f"{wanted}; {f'the driver here is {driver}' if driver else 'there is no driver here'}"
        )
    return f"{what.rstrip('.')}. {needs}. To train on the CPU, set gpus to 0"
