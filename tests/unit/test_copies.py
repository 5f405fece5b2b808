"""Copies of a GPU's tensors into host memory; CUDA's calls are recorded, since there need be no GPU here."""

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cairn.checkpoint.saving.arena import Arena
from cairn.checkpoint.tensors import host_staging
from cairn.checkpoint.tensors.host_staging import GpuCopies, HostCopies, copies_from
from cairn.checkpoint.tensors.layout import MAX_FILE_BYTES
from cairn.trainer.checkpoints import host_share

GPU = torch.device("cuda", 3)


class Recorded:
    """Stands in for what `torch.cuda` offers; `calls` are in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, registered: int = 0):
        self.calls: list[tuple] = []

        def record(name: str, answer=None):
            return lambda *arguments: self.calls.append((name, *arguments)) or answer

        stream = SimpleNamespace(wait_stream=record("wait_stream"), synchronize=record("synchronize"))
        driver = SimpleNamespace(
            cudaHostRegister=record("register", registered), cudaHostUnregister=record("unregister", 0)
        )

        def check_error(code: int) -> None:
            if code:
                raise RuntimeError("cannot register")

        answers = {"Stream": stream, "current_stream": "main", "cudart": driver, "set_device": None}
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, record(name, answer))
        monkeypatch.setattr(torch.cuda, "check_error", check_error)

    def of(self, *names: str) -> list[tuple]:
        return [call for call in self.calls if call[0] in names]


def test_the_device_of_the_tensors_decides(monkeypatch):
    recorded = Recorded(monkeypatch)
    assert type(copies_from([torch.device("cpu")])) is HostCopies
    assert type(copies_from([torch.device("cpu"), GPU])) is GpuCopies
    assert recorded.of("Stream") == [("Stream", GPU)]


def test_pinning_in_a_thread_uses_the_rank_s_gpu(monkeypatch):
    """A thread begins on GPU 0, where registering memory would make a context of half a gigabyte."""
    recorded = Recorded(monkeypatch)
    copies, memory = GpuCopies(GPU), torch.zeros(64, dtype=torch.uint8)
    thread = threading.Thread(target=copies.pin, args=[memory])
    thread.start()
    thread.join()
    copies.unpin(memory)
    copies.unpin(memory)
    assert recorded.of("set_device", "register", "unregister") == [
        ("set_device", GPU),
        ("register", memory.data_ptr(), 64, 0),
        ("unregister", memory.data_ptr()),
    ]


def test_memory_that_cannot_be_pinned_is_used_as_it_is(monkeypatch, caplog):
    """Measured on an H200: the next kernel of that thread fails with the error, and those after it don't."""
    recorded = Recorded(monkeypatch, registered=2)

    def zeros(*size: int, device: torch.device) -> None:
        launched.append(device)
        raise RuntimeError("CUDA error: part or all of the requested memory range is already mapped")

    launched: list[torch.device] = []
    monkeypatch.setattr(host_staging.torch, "zeros", zeros)
    copies, memory = GpuCopies(GPU), torch.empty(64, dtype=torch.uint8)
    copies.pin(memory)
    copies.unpin(memory)
    assert "not pinned" in caplog.text
    assert launched == [GPU]
    assert not recorded.of("unregister")


def test_a_save_follows_also_the_copies_that_make_strided_values_contiguous():
    """Those run on the training thread's stream, like the step's own work."""

    class Counting(HostCopies):
        def follow(self) -> None:
            seen.append(len(arena._sources))

    seen: list[int] = []
    tensors = {"model/model": {"across": torch.rand(7, 11).t(), "plain": torch.rand(5)}}
    arena = Arena(tensors, 0, MAX_FILE_BYTES, copies=lambda devices: Counting())
    try:
        arena.start_copy(tensors)
        assert seen == [3]  # two tensors and the header
    finally:
        arena.close()


def test_a_save_keeps_contiguous_copies_until_they_are_read(tmp_path: Path):
    """Otherwise the GPU's allocator may hand out their memory while queued copies still read it."""

    class Counting(HostCopies):
        def wait(self) -> None:
            seen.append(len(arena._sources))

    seen: list[int] = []
    tensors = {"model/model": {"across": torch.rand(7, 11).t(), "plain": torch.rand(5)}}
    arena = Arena(tensors, 0, MAX_FILE_BYTES, copies=lambda devices: Counting())
    (tmp_path / "model").mkdir()
    try:
        arena.start_copy(tensors)
        arena.begin(tmp_path, tmp_path / "receipt", "attempt", read_back=False)
        arena.copy()
        arena.end()
        assert seen == [3]  # two tensors and the header, when the last copies are waited for
        assert not arena._sources
    finally:
        arena.close()


@pytest.mark.parametrize(
    ("wanted", "ranks", "room"),
    [
        (10, [(10, 100), (10, 100)], 10),  # all fit
        (40, [(40, 100), (40, 100)], 40),  # just
        (50, [(50, 100), (50, 120)], 40),  # what is available is shared, by need
        (30, [(30, 100), (90, 100)], 20),
        (90, [(30, 100), (90, 100)], 60),
    ],
)
def test_the_ranks_of_a_host_share_its_memory(wanted: int, ranks: list[tuple[int, int]], room: int):
    assert host_share(wanted, ranks) == room
