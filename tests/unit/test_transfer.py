"""Policies from the trainer's memory: who asks gets that of the step asked for, whole, or none of it."""

import math
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from fake_ranks import COPIES, PLACED, FakeRank, tensors_of
from torch.distributed.tensor import DTensor, Shard

from cairn.checkpoint.shares import Section, share_of
from cairn.policy.checksums import checksum
from cairn.policy.receiver import WeightReceiver
from cairn.policy.refusals import Gone, NotThere
from cairn.policy.sender import WeightSender

CPU = torch.device("cpu")
GROUPS = [["embed"], ["first.w", "first.b"], ["scalar"]]


@pytest.fixture
def policy() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    shapes = {"embed": (7, 4), "first.w": (5, 3), "first.b": (5,), "scalar": (), "unwanted": (2,)}
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


@pytest.fixture
def sender(policy: dict[str, torch.Tensor]) -> Iterator[WeightSender]:
    sender = WeightSender(policy, rank=0, host="127.0.0.1", device=CPU)
    yield sender
    sender.close()


def get(
    receiver: WeightReceiver, sender: WeightSender, step: int, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    parts = list(receiver.receive(sender.source(step, [sender.here]), GROUPS, dtype))
    assert [list(part) for part in parts] == GROUPS
    return {name: tensor for part in parts for name, tensor in part.items()}


def step_on(policy: dict[str, torch.Tensor], sender: WeightSender, step: int) -> None:
    sender.withdraw()
    for tensor in policy.values():
        tensor.add_(step)
    sender.offer(step)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_version_arrives_in_the_type_that_is_asked_for(
    policy: dict[str, torch.Tensor], sender: WeightSender, dtype: torch.dtype
):
    receivers = [WeightReceiver(CPU), WeightReceiver(CPU)]
    for step in range(1, 4):
        step_on(policy, sender, step)
        for receiver in receivers:
            for name, tensor in get(receiver, sender, step, dtype).items():
                assert tensor.dtype == dtype
                assert torch.equal(tensor, policy[name].to(dtype))


def test_other_versions_than_the_current_one_are_refused(
    policy: dict[str, torch.Tensor], sender: WeightSender
):
    receiver = WeightReceiver(CPU)
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


def test_weights_do_not_change_while_somebody_reads_them(
    policy: dict[str, torch.Tensor], sender: WeightSender
):
    step_on(policy, sender, 1)
    before = {name: tensor.clone() for name, tensor in policy.items()}
    parts = WeightReceiver(CPU).receive(sender.source(1, [sender.here]), GROUPS, torch.float32)
    changing = threading.Thread(target=step_on, args=(policy, sender, 2))
    changing.start()
    time.sleep(0.2)
    assert changing.is_alive()
    got = {name: tensor for part in parts for name, tensor in part.items()}
    changing.join(30)
    assert not changing.is_alive()
    assert all(torch.equal(got[name], before[name]) for name in got)
    assert not torch.equal(policy["embed"], before["embed"])


@pytest.mark.timeout(15)  # less than a rank waits for a server that it has said yes to
def test_if_one_rank_has_gone_on_nobody_sends(policy: dict[str, torch.Tensor], sender: WeightSender):
    other = WeightSender(policy, rank=0, host="127.0.0.1", device=CPU)
    sender.offer(1)
    other.offer(2)
    receiver = WeightReceiver(CPU)
    with pytest.raises(Gone):
        receiver.receive(sender.source(1, [sender.here, other.here]), GROUPS, torch.float32)
    other.close()
    with pytest.raises(NotThere):
        receiver.receive(sender.source(1, [sender.here, other.here]), GROUPS, torch.float32)
    assert torch.equal(get(receiver, sender, 1)["embed"], policy["embed"])
    sender.withdraw()  # which would wait for whoever reads


def test_a_trainer_that_ended_is_told_of(policy: dict[str, torch.Tensor], sender: WeightSender):
    step_on(policy, sender, 1)
    receiver = WeightReceiver(CPU)
    assert torch.equal(get(receiver, sender, 1)["embed"], policy["embed"])
    source = sender.source(1, [sender.here])
    sender.close()
    with pytest.raises(NotThere, match="does not answer"):
        receiver.receive(source, GROUPS, torch.float32)


def test_sections_of_a_tensor_are_sent_as_tensors_of_their_own():
    """As a layer's experts, which are one tensor in the trainer's memory."""
    experts = torch.arange(5 * 6 * 2.0).view(5, 6, 2)
    parts = {f"{i}.up": Section(experts, 12 * i + 6, (3, 2)) for i in range(5)}
    sender = WeightSender(parts, rank=0, host="127.0.0.1", device=CPU)
    sender.offer(1)
    source = sender.source(1, [sender.here])
    assert source.shapes == {name: [3, 2] for name in parts}
    (got,) = WeightReceiver(CPU).receive(source, [list(parts)], torch.float32)
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
            senders.append(WeightSender(tensors, rank=rank, host="127.0.0.1", device=CPU))
        senders[-1].offer(1)
    source = senders[0].source(1, [sender.here for sender in senders])
    receiver = WeightReceiver(CPU)
    (got,) = receiver.receive(source, [list(wholes)], dtype)
    assert got.keys() == wholes.keys()
    for name, whole in wholes.items():
        assert torch.equal(got[name], whole), name
    assert receiver.sent == {name: checksum(whole) for name, whole in wholes.items() if whole.numel()}
    for sender in senders:
        sender.close()


def test_values_are_sent_as_they_are_when_they_are_asked_for():
    """Also those of a shard that is not contiguous in memory: no copy is kept from before."""
    whole = torch.zeros(6, 4)
    with FakeRank(0, 2) as mesh:
        local = whole[:, :2]
        columns = DTensor.from_local(local, mesh, [Shard(1)], run_check=False, shape=(6, 4), stride=(4, 1))
        sender = WeightSender({"w": columns}, rank=0, host="127.0.0.1", device=CPU)
    receiver = WeightReceiver(CPU)
    for step in (1, 2):
        sender.withdraw()
        whole += step
        sender.offer(step)
        (got,) = receiver.receive(sender.source(step, [sender.here]), [["w"]], torch.float32)
        assert torch.equal(got["w"][:, :2], whole[:, :2])
    sender.close()
