"""Policies from the trainer's memory: who asks gets that of the step asked for, whole, or none of it."""

import itertools
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import draws
import pytest
import torch
from fake_ranks import COPIES, PLACED, FakeRank, tensors_of
from runs import DEADLINE
from torch.distributed.tensor import DTensor, Shard

from cairn.checkpoint.tensors.host_staging import HostCopies, Outlet
from cairn.checkpoint.tensors.placement import Section, Stored, share_of
from cairn.policy.checksums import checksum, merged
from cairn.policy.delta import LastPublished, digest_of
from cairn.policy.errors import Gone, NotThere
from cairn.policy.network import PATIENCE, address_towards
from cairn.policy.receiver import Room, Source, WeightReceiver
from cairn.policy.sender import OfferedDelta, WeightSender

GROUPS = [["embed"], ["first.w", "first.b"], ["scalar"]]
LARGE = 40 << 20
"""Values that no buffer of the system takes whole, so that their sender has to wait for their reader."""


@pytest.fixture
def policy() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    shapes = {"embed": (7, 4), "first.w": (5, 3), "first.b": (5,), "scalar": (), "unwanted": (2,)}
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


@pytest.fixture
def sender(policy: dict[str, torch.Tensor]) -> Iterator[WeightSender]:
    sender = WeightSender(policy, rank=0, host="127.0.0.1")
    yield sender
    sender.close()


def get(receiver: WeightReceiver, sender: WeightSender, step: int) -> dict[str, torch.Tensor]:
    parts = list(receiver.receive(sender.source(step, [sender.here]), GROUPS))
    assert [list(part) for part in parts] == GROUPS
    return {name: tensor for part in parts for name, tensor in part.items()}


def step_on(policy: dict[str, torch.Tensor], sender: WeightSender, step: int) -> None:
    sender.withdraw()
    for tensor in policy.values():
        tensor.add_(step)
    sender.offer(step)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_version_arrives_in_the_type_that_it_is_published_in(
    policy: dict[str, torch.Tensor], dtype: torch.dtype
):
    sender = WeightSender(policy, rank=0, host="127.0.0.1", dtypes={name: dtype for name in policy})
    receivers = [WeightReceiver(), WeightReceiver()]
    for step in range(1, 4):
        step_on(policy, sender, step)
        for receiver in receivers:
            for name, tensor in get(receiver, sender, step).items():
                assert tensor.dtype == dtype
                assert torch.equal(tensor, policy[name].to(dtype))
    assert sender.source(1, []).bytes == sum(t.numel() for t in policy.values()) * dtype.itemsize
    sender.close()


def test_other_versions_than_the_current_one_are_refused(
    policy: dict[str, torch.Tensor], sender: WeightSender
):
    receiver = WeightReceiver()
    step_on(policy, sender, 5)
    with pytest.raises(Gone):
        get(receiver, sender, 4)
    with pytest.raises(NotThere):
        get(receiver, sender, 6)
    assert torch.equal(get(receiver, sender, 5)["embed"], policy["embed"])
    sender.withdraw()
    with pytest.raises(Gone):
        get(receiver, sender, 5)
    with pytest.raises(NotThere):
        get(receiver, sender, 6)


def test_weights_do_not_change_while_somebody_reads_them():
    values = {name: torch.zeros(LARGE // 4) for name in "ab"}
    sender = WeightSender(values, rank=0, host="127.0.0.1")
    step_on(values, sender, 1)
    parts = WeightReceiver().receive(sender.source(1, [sender.here]), [["a"], ["b"]])
    changing = threading.Thread(target=step_on, args=(values, sender, 2))
    changing.start()
    time.sleep(0.2)
    assert changing.is_alive()
    got = {name: tensor for part in parts for name, tensor in part.items()}
    changing.join(DEADLINE)
    assert not changing.is_alive()
    for name, tensor in values.items():
        assert torch.equal(got[name], torch.ones_like(tensor))
        assert torch.equal(tensor, torch.full_like(tensor, 3))
    sender.close()


def test_if_one_rank_has_gone_on_nobody_sends(
    policy: dict[str, torch.Tensor], sender: WeightSender, monkeypatch: pytest.MonkeyPatch
):
    """Nor does any wait for the one whom it has said yes to, which would end this test."""
    monkeypatch.setattr("cairn.policy.sender.ANSWER", timedelta(hours=1))
    other = WeightSender(policy, rank=0, host="127.0.0.1")
    sender.offer(1)
    other.offer(2)
    receiver = WeightReceiver()
    with pytest.raises(Gone):
        receiver.receive(sender.source(1, [sender.here, other.here]), GROUPS)
    other.close()
    with pytest.raises(NotThere):
        receiver.receive(sender.source(1, [sender.here, other.here]), GROUPS)
    assert torch.equal(get(receiver, sender, 1)["embed"], policy["embed"])
    sender.withdraw()  # which would wait for whoever reads


def test_a_trainer_that_ended_is_told_of(policy: dict[str, torch.Tensor], sender: WeightSender):
    step_on(policy, sender, 1)
    receiver = WeightReceiver()
    assert torch.equal(get(receiver, sender, 1)["embed"], policy["embed"])
    source = sender.source(1, [sender.here])
    sender.close()
    with pytest.raises(NotThere, match="does not answer"):
        receiver.receive(source, GROUPS)


def test_sections_of_a_tensor_are_sent_as_tensors_of_their_own():
    """As a layer's experts, which are one tensor in the trainer's memory."""
    experts = torch.arange(5 * 6 * 2.0).view(5, 6, 2)
    parts = {f"{i}.up": Section(experts, 12 * i + 6, (3, 2)) for i in range(5)}
    sender = WeightSender(parts, rank=0, host="127.0.0.1")
    sender.offer(1)
    source = sender.source(1, [sender.here])
    assert source.shapes == {name: [3, 2] for name in parts}
    (got,) = WeightReceiver().receive(source, [list(parts)])
    assert all(torch.equal(got[f"{i}.up"], experts[i, 3:]) for i in range(5))
    sender.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("placed", PLACED)
def test_a_policy_arrives_whole_however_the_ranks_share_it(placed: str, dtype: torch.dtype):
    """Whatever can be saved can be sent; the checksums are those of the whole tensors."""
    with FakeRank(0, 1) as mesh:
        wholes = {
            name: share_of(name, tensor, 0).local.reshape(tuple(tensor.shape)).to(dtype)
            for name, tensor in tensors_of(mesh, (COPIES,)).items()
        }
    shape, placements = PLACED[placed]
    senders = []
    for rank in range(math.prod(shape)):
        with FakeRank(rank, *shape) as mesh:
            tensors = tensors_of(mesh, placements)
            dtypes = dict.fromkeys(tensors, dtype)
            senders.append(WeightSender(tensors, rank=rank, host="127.0.0.1", dtypes=dtypes))
        senders[-1].offer(1)
    source = senders[0].source(1, [sender.here for sender in senders])
    receiver = WeightReceiver()
    (got,) = receiver.receive(source, [list(wholes)])
    assert got.keys() == wholes.keys()
    for name, whole in wholes.items():
        assert torch.equal(got[name], whole), name
    assert receiver.sent == {name: checksum(whole) for name, whole in wholes.items() if whole.numel()}
    for sender in senders:
        sender.close()


@pytest.mark.slow
@pytest.mark.parametrize("placed", ["copies of shards", "blocks", "FSDP2 over tensor parallelism"])
def test_each_rank_sends_what_it_can(placed: str):
    """A rank whose delta is ready sends that, another one all of its share; together they make the policy."""
    shape, placements = PLACED[placed]
    senders: list[WeightSender] = []
    last: list[LastPublished] = []
    tensors: list[dict[str, Stored]] = []
    for rank in range(6 if placed.startswith("copies") else 4):
        with FakeRank(rank, *shape) as mesh:
            tensors.append(tensors_of(mesh, placements))
            senders.append(WeightSender(tensors[-1], rank=rank, host="127.0.0.1"))
            last.append(LastPublished())
    outlet = Outlet(HostCopies())

    class Kept(Room):
        def __init__(self) -> None:
            super().__init__()
            self.tensors: dict[str, torch.Tensor] = {}

        def place(self, name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
            return self.tensors.setdefault(name, torch.empty(shape, dtype=dtype))

    room, receiver, digest = Kept(), WeightReceiver(), ""
    for step, ready in enumerate(itertools.islice(itertools.cycle([(), (0, 2), range(6)]), 6), 1):
        for sender in senders:
            sender.withdraw()
            if step > 1:
                for share, _ in sender.shares.values():
                    share.local.mul_(1 + 2**-20)
            sender.offer(step)
        deltas = [
            each.advance(sender.shares, outlet, lambda: None)
            for each, sender in zip(last, senders, strict=True)
        ]
        sums = merged(delta.sums for delta in deltas)
        for rank, (sender, delta) in enumerate(zip(senders, deltas, strict=True)):
            if rank in ready:
                sender.offer_delta(OfferedDelta(step, digest, digest_of(sums), delta))
        source = senders[0].source(step, [sender.here for sender in senders], deltas=True)
        list(receiver.receive(source, [list(source.shapes)], room=room))
        room.digest = digest = digest_of(sums)
        assert receiver.sent == sums
        assert {name: checksum(tensor) for name, tensor in room.tensors.items() if name in sums} == sums
        whole = sum(t.nbytes for t in room.tensors.values())
        assert (receiver.nbytes == whole) == (not ready)
        assert receiver.nbytes < whole / 2 or len(ready) < len(senders)
    for sender in senders:
        sender.close()


def test_values_are_sent_as_they_are_when_they_are_asked_for():
    """Also those of a shard that is not contiguous in memory: no copy is kept from before."""
    whole = torch.zeros(6, 4)
    with FakeRank(0, 2) as mesh:
        local = whole[:, :2]
        columns = DTensor.from_local(local, mesh, [Shard(1)], run_check=False, shape=(6, 4), stride=(4, 1))
        sender = WeightSender({"w": columns}, rank=0, host="127.0.0.1")
    receiver = WeightReceiver()
    for step in (1, 2):
        sender.withdraw()
        whole += step
        sender.offer(step)
        (got,) = receiver.receive(sender.source(step, [sender.here]), [["w"]])
        assert torch.equal(got["w"][:, :2], whole[:, :2])
    sender.close()


class Device(HostCopies):
    """Stands for a GPU: what it brings arrives in host memory when it is waited for, and not before."""

    def __init__(self) -> None:
        self.queued: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.pinned: list[torch.Tensor] = []

    def pin(self, memory: torch.Tensor) -> None:
        self.pinned.append(memory)

    def unpin(self, memory: torch.Tensor) -> None:
        self.pinned.clear()

    def bring(self, values: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        assert memory is self.pinned[0]
        there = memory[: values.nbytes].view(values.dtype)
        self.queued.append((there, values))
        return there

    def wait(self) -> None:
        for there, values in self.queued:
            there.copy_(values)
        self.queued.clear()


def test_values_of_a_gpu_come_through_one_piece_of_the_hosts_memory(monkeypatch: pytest.MonkeyPatch):
    """However large a tensor is; and no message is on its way before the device's copy is complete."""
    monkeypatch.setattr("cairn.policy.network.MESSAGE_BYTES", 64)
    monkeypatch.setattr("cairn.policy.sender.MESSAGE_BYTES", 64)
    device = Device()
    values = {"a": torch.randn(100), "b": torch.randn(7, 5)}
    dtypes = dict.fromkeys(values, torch.bfloat16)
    sender = WeightSender(values, rank=0, host="127.0.0.1", dtypes=dtypes, copies=lambda devices: device)
    sender.offer(1)
    receiver = WeightReceiver()
    (got,) = receiver.receive(sender.source(1, [sender.here]), [["a", "b"]])
    assert all(torch.equal(got[name], tensor.bfloat16()) for name, tensor in values.items())
    assert receiver.sent == {name: checksum(tensor.bfloat16()) for name, tensor in values.items()}
    assert [len(memory) for memory in device.pinned] == [64]
    sender.close()


def receive_once(source: Source) -> None:
    """In a process of its own: ask, say that a transfer begins, and take one tensor of it."""
    parts = WeightReceiver().receive(source, [["a"], ["b"]])
    next(parts)
    print("receiving", flush=True)
    time.sleep(60)


@pytest.fixture
def server_in_transfer(tmp_path: Path) -> Iterator[Callable[[WeightSender], subprocess.Popen[str]]]:
    """Starts a process that is in the middle of a transfer when this returns."""
    started: list[subprocess.Popen[str]] = []

    def start(sender: WeightSender) -> subprocess.Popen[str]:
        sender.source(1, [sender.here]).write(tmp_path)
        code = (
            "import pathlib; from test_transfer import receive_once; from cairn.policy.receiver import "
            f"read_source; receive_once(read_source(pathlib.Path({str(tmp_path)!r})))"
        )
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", code],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        )
        assert started[0].stdout is not None
        assert started[0].stdout.readline() == "receiving\n"
        return started[0]

    yield start
    for process in started:
        process.kill()
        process.wait()


@draws.seldom
@pytest.mark.parametrize(("end", "patience"), [(signal.SIGSTOP, 3), (signal.SIGKILL, 600)])
def test_a_server_that_stops_or_dies_in_a_transfer_holds_training_up_for_a_bounded_time(
    server_in_transfer: Callable[[WeightSender], "subprocess.Popen[str]"], end: signal.Signals, patience: int
):
    """For as long as its patience if it stops, and for less if it dies."""
    values = {"a": torch.zeros(3), "b": torch.zeros(LARGE)}
    sender = WeightSender(values, rank=0, host="127.0.0.1", patience=timedelta(seconds=patience))
    sender.offer(1)
    process = server_in_transfer(sender)
    process.send_signal(end)
    started = time.monotonic()
    sender.withdraw()
    assert time.monotonic() - started < DEADLINE
    values["a"] += 1
    sender.offer(2)
    (got,) = WeightReceiver().receive(sender.source(2, [sender.here]), [["a", "b"]])
    assert torch.equal(got["a"], torch.ones(3))
    sender.close()


def test_an_update_does_not_wait_for_ever_for_a_server_that_is_slow():
    """And what that server gets from then on is not confirmed, since it may be of both policies."""
    values = {name: torch.zeros(LARGE // 4) for name in "abc"}
    sender = WeightSender(values, rank=0, host="127.0.0.1")
    sender.offer(1)
    parts = WeightReceiver().receive(sender.source(1, [sender.here]), [["a"], ["b"], ["c"]])
    next(parts)
    started = time.monotonic()
    sender.withdraw(0.5)
    assert 0.4 < time.monotonic() - started < PATIENCE.total_seconds() / 2
    for tensor in values.values():
        tensor += 1
    sender.offer(2)
    with pytest.raises(RuntimeError):
        list(parts)
    (got,) = WeightReceiver().receive(sender.source(2, [sender.here]), [["c"]])
    assert torch.equal(got["c"], values["c"])
    sender.close()


def test_a_trainer_that_dies_in_a_transfer_is_an_error_for_the_server():
    values = {name: torch.zeros(LARGE // 4) for name in "abc"}
    sender = WeightSender(values, rank=0, host="127.0.0.1", patience=PATIENCE / 3)
    sender.offer(1)
    receiver = WeightReceiver(PATIENCE / 3)
    parts = receiver.receive(sender.source(1, [sender.here]), [["a"], ["b"], ["c"]])
    next(parts)
    sender.withdraw(0)
    started = time.monotonic()
    with pytest.raises(RuntimeError):
        list(parts)
    assert time.monotonic() - started < PATIENCE.total_seconds() / 2
    sender.close()


def test_ranks_listen_on_the_address_that_servers_reach(monkeypatch: pytest.MonkeyPatch):
    """The one towards a server, or a given one of this machine; of another one the server says so."""
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert address_towards("127.0.0.2") == "127.0.0.2"
    policy = {"embed": torch.randn(3, 2)}
    sender = WeightSender(policy, rank=0, host=address_towards("127.0.0.2"))
    sender.offer(1)
    assert sender.here.host == "127.0.0.2"
    source = sender.source(1, [sender.here])
    (got,) = WeightReceiver().receive(source, [["embed"]])
    assert torch.equal(got["embed"], policy["embed"])
    elsewhere = replace(source, ranks=[replace(sender.here, host="127.0.0.1")])
    port = sender.here.port
    monkeypatch.setattr("cairn.policy.receiver.ANSWER", timedelta(seconds=1))
    with pytest.raises(NotThere, match=f"answer at 127.0.0.1:{port}.*--trainer.weight-host"):
        WeightReceiver().receive(elsewhere, [["embed"]])
    sender.close()
