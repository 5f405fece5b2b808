"""A rank's device: that it is the GPU that Ray gave, or an error that says why not and what to do."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from one_rank import joined

from cairn.config.trainer import SFTConfig
from cairn.run.errors import OutOfMemory, UsageError
from cairn.run.machine import Machine
from cairn.trainer import device, group
from cairn.trainer.device import device_for, out_of_memory, slow_network

FULL = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB"


def test_without_a_gpu_from_ray_a_rank_computes_on_the_cpu():
    """On a machine that has none, or if the settings ask for it."""
    if not torch.cuda.is_available():
        assert device_for(None, 0, on_cpu=False) == torch.device("cpu")
    assert device_for(None, 0, on_cpu=True) == torch.device("cpu")


def test_a_gpu_that_ray_does_not_know_of_is_not_passed_over(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    with pytest.raises(UsageError, match=r"torch sees 8 GPUs on .*, but Ray gave this rank none"):
        device_for(None, 0, on_cpu=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU can be used")
@pytest.mark.parametrize(
    ("cuda", "driver", "needs"),
    [
        (
            "13.0",
            "550.54.14",
            "13.0, which needs an .* version 580 or later; the driver here is 550.54.14. To",
        ),
        ("12.9", "470.1", "is built for CUDA 12.9, .* version 525 or later; the driver here is 470.1. "),
        ("14.1", None, "is built for CUDA 14.1, which needs an NVIDIA driver; there is no driver here. "),
        (None, "580.1", "is built without CUDA; `scripts/setup gpu` installs another build. "),
    ],
)
def test_a_gpu_that_cuda_can_not_use_is_an_error(
    cuda: str | None, driver: str | None, needs: str, monkeypatch: pytest.MonkeyPatch
):
    """And not training on the CPU: torch's own reason, and the driver that is needed."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(device, "this_machine", lambda: Machine((), 1, driver))
    with pytest.raises(
        UsageError, match=f"GPU 5 of .* can't be used: .+\\. torch .*{needs}.*gpus to 0"
    ) as told:
        device_for("5", 0, on_cpu=False)
    with pytest.raises((RuntimeError, AssertionError)) as reason:
        torch.cuda.init()
    assert str(reason.value).split()[:6] == str(told.value).partition("used: ")[2].split()[:6]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(FULL),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("NCCL error: unhandled cuda error; Cuda failure 2 'out of memory'"),
    ],
    ids=["torch", "cublas", "driver", "nccl"],
)
def test_a_full_gpu_names_the_settings_to_change(error: Exception):
    told = out_of_memory(error, SFTConfig(seq_len=4096, micro_batch_size=4, workers=2))
    assert isinstance(told, OutOfMemory)
    assert str(error) in str(told)
    for way in ("micro_batch_size (now 4), lower seq_len (now 4096), turn on activation", "workers (now 2)"):
        assert way in str(told)


def test_settings_that_can_not_help_are_not_named():
    told = str(out_of_memory(torch.OutOfMemoryError(FULL), SFTConfig(activation_checkpointing=True)))
    assert "activation_checkpointing" not in told
    assert "micro_batch_size" not in told
    assert told.endswith("lower seq_len (now 2048), or shard the model over more workers (now 1)")


@pytest.mark.parametrize(
    "error",
    [RuntimeError("CUDA error: an illegal memory access"), ValueError("out of memory"), MemoryError()],
)
def test_other_errors_are_no_full_gpu(error: Exception):
    assert out_of_memory(error, SFTConfig()) is None


def test_after_an_error_only_a_group_on_the_cpu_is_destroyed(monkeypatch: pytest.MonkeyPatch):
    """Destroying an NCCL group waits for ranks that sit in a collective, and so the error for hours."""
    with joined() as group:
        elsewhere = type(group)(group.rank, group.world_size, torch.device("cuda", 0), group.mesh)
        elsewhere.abandon()
        assert dist.is_initialized()
    assert not dist.is_initialized()
    with joined() as group:
        group.abandon()
        assert not dist.is_initialized()
        monkeypatch.setattr(type(group), "leave", lambda _: None)


def test_gpus_that_reach_each_other_slowly_are_told(monkeypatch: pytest.MonkeyPatch):
    with joined() as one:
        assert one.measure(1 << 20) == 0, "alone, nothing comes from others"
        two = dataclasses.replace(one, world_size=2, device=torch.device("cuda", 0))
        slowest = torch.tensor([[[40e9]], [[2.9e9]]], dtype=torch.float64)
        monkeypatch.setattr(group.RankGroup, "measure", lambda _: 40e9)
        monkeypatch.setattr(group.RankGroup, "gather_rows", lambda *_: slowest)
        told = slow_network(two)
        assert told is not None
        assert "gather 2.9 GB/s" in told
        assert slow_network(dataclasses.replace(two, device=one.device)) is None, "on CPUs"
        slowest[1] = 25e9
        assert slow_network(two) is None
