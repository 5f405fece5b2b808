"""This process's place among the trainer's ranks."""

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cairn.policy.network import address_towards, host_store

# torch.distributed exports no stores.
# pyright: reportPrivateImportUsage=false, reportUnknownMemberType=false


POLL_SECONDS = 0.002


class Meeting:
    """Threads of all ranks, one a rank, that tell each other something in rounds.

    They use a store rather than a process group: operations of another thread would get in between the
    collectives of the training, of which NCCL allows one at a time, and a wait for a store can be given up.

    Args:
        store: of this meeting alone, with a connection of its own.
    """

    def __init__(self, rank: int, world_size: int, store: dist.Store | None):
        self._rank = rank
        self._world_size = world_size
        self._store = store
        self._round = 0

    def gather(self, mine: str, check: Callable[[], object]) -> list[str]:
        """What every rank says in this round, by rank; returns once all have.

        `check` is called again and again meanwhile; what it raises ends the waiting.
        """
        if self._store is None:
            return [mine]
        self._round += 1
        keys = [f"{self._round}/{rank}" for rank in range(self._world_size)]
        self._store.set(keys[self._rank], mine)
        while not self._store.check(keys):
            check()
            time.sleep(POLL_SECONDS)
        said = [value.decode() for value in self._store.multi_get(keys)]
        if self._round > 2:  # all have read the round before the last, since they have come to the last
            self._store.delete_key(f"{self._round - 2}/{self._rank}")
        return said


# torch.distributed exports no stores.
# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false


@dataclass(frozen=True)
class RankGroup:
    """The ranks that train together; `device` is this rank's."""

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh
    store: dist.Store | None = None
    """Through which the ranks have found each other."""

    @classmethod
    def join(
        cls,
        *,
        threads: int,
        deterministic: bool,
        float32_matmul: str = "highest",
        device: torch.device | None = None,
        replicas: int = 1,
        state_on: str = "device",
    ) -> "RankGroup":
        """Form the process group that the environment describes (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).

        On a GPU it uses NCCL, on the CPU gloo.

        Args:
            device: this rank's; default: a GPU if torch sees one.
            float32_matmul: precision of float32 matrix products in this process, as torch names it.
            replicas: how many copies of the sharded model there are; must divide the number of ranks.
            state_on: device or host, where the ranks' shards will be; those on hosts are summed over gloo.
        """
        torch.set_num_threads(threads)
        if float32_matmul != torch.get_float32_matmul_precision():
            torch.set_float32_matmul_precision(float32_matmul)
        if deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
            # Otherwise torch fills new tensors with NaN, which makes the kernel provide memory for all of a
            # model that is yet to be cut into shards, and costs time for every buffer of a collective.
            torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue] # an undeclared property
        place = _meeting_place()
        if device is None:
            here = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            device = here if torch.cuda.is_available() else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
            backend = "cuda:nccl,cpu:gloo" if state_on == "host" else "nccl"
            dist.init_process_group(backend, device_id=device, **place)
        else:
            dist.init_process_group("gloo", **place)
        world_size = dist.get_world_size()
        return cls(
            dist.get_rank(), world_size, device, _mesh(device.type, world_size, replicas), place["store"]
        )

    def meeting(self, name: str) -> Meeting:
        """Where a thread of each rank meets those of the others; each name can be used once."""
        if self.store is None or self.world_size == 1:
            return Meeting(self.rank, self.world_size, None)
        return Meeting(self.rank, self.world_size, dist.PrefixStore(name, self.store.clone()))

    def seed(self, seed: int) -> None:
        """Seed this rank's generators of random numbers, on the CPU and on its GPU.

        `torch.manual_seed` would leak memory: for every kind of device that is absent it queues a call, with
        a stack trace, each time.
        """
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    @property
    def address(self) -> str:
        """This rank's address on the network on which the ranks meet."""
        return address_towards(os.environ["MASTER_ADDR"])

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier()

    def gather_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """The `rows` of all ranks (float64 [n, k], equal n and k on each), on the CPU: [world_size, n, k]."""
        if self.world_size == 1:
            return rows[None].cpu()
        rows = rows.to(self.device)
        gathered = [torch.empty_like(rows) for _ in range(self.world_size)]
        dist.all_gather(gathered, rows)
        return torch.stack(gathered).cpu()

    def any_of(self, *flags: bool) -> list[bool]:
        """For each flag, whether it is set on any rank; the answer is the same on all ranks."""
        return self.gather_rows(torch.tensor([flags], dtype=torch.float64)).amax((0, 1)).bool().tolist()

    def gather_objects(self, mine: Any) -> list[Any]:
        """What every rank gave, on every rank."""
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, mine)
        return gathered

    def leave(self) -> None:
        """Destroy the process group."""
        dist.destroy_process_group()

    def abandon(self) -> None:
        """Leave after an error on this rank, and do not wait for the others.

        With gloo the others notice, and get an error themselves. Destroying an NCCL group would wait for
        ranks that sit in a collective, so it is left as it is: it ends with this process, which the trainer's
        driver does not use again.
        """
        if self.device.type == "cpu":
            self.leave()


def _mesh(device_type: str, world_size: int, replicas: int) -> DeviceMesh:
    """The ranks in one dimension, over which the model is sharded; or in two: replicas, and shards of each.

    A replica's ranks are neighbours, on one machine where that is possible, since they gather each layer from
    each other. Replicas exchange nothing but the gradients of their shards.
    """
    if replicas == 1:
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=("shard",))
    hosts: list[Any] = [None] * world_size
    dist.all_gather_object(hosts, socket.gethostname())
    neighbours = sorted(range(world_size), key=lambda rank: (hosts.index(hosts[rank]), rank))
    shape = torch.tensor(neighbours).view(replicas, -1)
    return DeviceMesh(device_type, shape, mesh_dim_names=("replica", "shard"))


def _meeting_place() -> dict[str, Any]:
    """Arguments of `init_process_group`: the store through which the ranks find each other."""
    rank, world_size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    host = os.environ["MASTER_ADDR"]
    join = host_store if rank == 0 else dist.TCPStore
    store = join(host, port, world_size)
    return {"store": store, "rank": rank, "world_size": world_size}
