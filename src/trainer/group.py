"""This process among the trainer's ranks: what the ranks exchange, and this rank's device."""

import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_nccl_timeout
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cairn.policy.network import address_towards, host_store

# torch.distributed exports no stores.
# pyright: reportPrivateImportUsage=false, reportUnknownMemberType=false, reportAttributeAccessIssue=false


POLL_SECONDS = 0.002
RANKS_A_POLL = 64
"""With more ranks each polls more rarely: rank 0's store answers all of them."""


class ThreadRendezvous:
    """Exchanges strings between threads of all ranks, one a rank, in rounds.

    They use a store rather than a process group: operations of another thread would get in between the
    collectives of the training, of which NCCL allows one at a time, and a wait for a store can be given up.
    A counter tells the rank that comes last; it puts together what all say, so that a waiting rank asks for
    one key, however many ranks there are.

    Args:
        store: for this rendezvous alone, with a connection of its own.
    """

    def __init__(self, rank: int, world_size: int, store: dist.Store | None):
        self._rank = rank
        self._world_size = world_size
        self._store = store
        self._round = 0
        self._seconds = POLL_SECONDS * max(1, world_size / RANKS_A_POLL)

    def gather(self, mine: str, check: Callable[[], object]) -> list[str]:
        """What every rank says in this round, by rank; returns once all have.

        `check` is called again and again meanwhile; what it raises ends the waiting.
        """
        if (store := self._store) is None:
            return [mine]
        self._round += 1
        own, everything, come = (f"{self._round}/{what}" for what in (self._rank, "all", "come"))
        store.set(own, mine)
        if store.add(come, 1) == self._world_size:
            keys = [f"{self._round}/{rank}" for rank in range(self._world_size)]
            store.set(everything, json.dumps([value.decode() for value in store.multi_get(keys)]))
            store.delete_key(come)
            if self._round > 1:  # all have read the round before, since they have come to this one
                store.delete_key(f"{self._round - 1}/all")
        while not store.check([everything]):
            check()
            time.sleep(self._seconds)
        said: list[str] = json.loads(store.get(everything))
        store.delete_key(own)
        return said


class ThreadExchange:
    """Exchanges bytes between threads of all ranks, one a rank, in rounds.

    They have a process group of their own, over gloo, so that what they exchange can be large and never gets
    in between the collectives of the training. A rank that dies or leaves ends the exchange with an error.

    Args:
        group: None for a rank that is alone.
    """

    def __init__(self, rank: int, world_size: int, group: dist.ProcessGroup | None):
        self.rank = rank
        self.world_size = world_size
        self._group = group

    def gather(self, mine: bytes) -> list[bytes]:
        """What every rank gives in this round, by rank.

        Raises:
            RuntimeError: a rank is gone.
        """
        if self._group is None:
            return [mine]
        sizes = list(torch.zeros(self.world_size, dtype=torch.int64).split(1))
        dist.all_gather(sizes, torch.tensor([len(mine)]), group=self._group)
        longest = max(int(size) for size in sizes)
        padded = torch.from_numpy(np.frombuffer(mine.ljust(longest, b"\0"), np.uint8).copy())
        whole = torch.empty(self.world_size, longest, dtype=torch.uint8)
        dist.all_gather(list(whole), padded, group=self._group)
        return [row[: int(size)].numpy().tobytes() for row, size in zip(whole, sizes, strict=True)]


@dataclass(frozen=True)
class Axis:
    """One axis of a layout: where this rank stands on it, how many ranks it has, and their process group.

    group: None if the axis has one rank, or if nothing is exchanged along it.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None


NO_AXIS = Axis()
"""Of one rank alone."""


@dataclass(frozen=True)
class RankLayout:
    """Where a rank stands among those that train together.

    data: ranks that see different samples. Batches are divided along it, and nothing else divides them.
    model: ranks that share each sample; all of them give the same losses, of whole samples.
    context: the part of `model` along which the tokens of a sample are cut. tensor: the part along which the
    matrices of layers are. pipeline: the part along which layers are divided into stages.
    """

    data: Axis
    model: Axis
    context: Axis
    tensor: Axis = NO_AXIS
    pipeline: Axis = NO_AXIS

    @classmethod
    def of(
        cls, rank: int, ranks: int, context: Axis, tensor: Axis = NO_AXIS, pipeline: Axis = NO_AXIS
    ) -> "RankLayout":
        """Rank `rank` of `ranks`, of which neighbours along the other axes share their samples.

        With several stages, each has as many ranks one after the other, and the ranks that have the same
        place among those of their stage share samples as well.
        """
        of_stage, near = ranks // pipeline.size, context.size * tensor.size
        place = rank % of_stage
        data = Axis(place // near, of_stage // near)
        model = Axis(pipeline.rank * near + place % near, pipeline.size * near)
        return cls(data, model, context, tensor, pipeline)

    @property
    def reports(self) -> bool:
        """Whether this rank, of those with the same samples, says what came out of them."""
        return self.model.rank == 0

    @property
    def reporting(self) -> slice:
        """Of all ranks, those that report, in the order of `data`."""
        near = self.model.size // self.pipeline.size
        return slice(0, self.data.size * near, near)


@dataclass(frozen=True)
class RankGroup:
    """The ranks that train together; `device` is this rank's."""

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh
    store: dist.Store | None = None
    """Through which the ranks have found each other."""
    patience: timedelta = timedelta(minutes=30)
    """For which a collective waits for other ranks."""
    context: Axis = NO_AXIS
    """The ranks that share this one's samples, and have a part of the tokens of each."""
    tensor: Axis = NO_AXIS
    """The ranks that share this one's samples, and have a part of each matrix of the layers."""
    backend: str = "fsdp2"
    """What lays models out over them: a name in `BACKENDS` (`trainer/backends/backend.py`)."""
    layer_mesh: DeviceMesh | None = None
    """Over which layers are copied (`replica`, if there is more than one), sharded (`shard`) and cut
    (`tensor`); None: `mesh` is for all of a model."""
    expert: Axis = NO_AXIS
    """The ranks that have the experts of a layer together with this one; each has samples of its own."""
    pipeline: Axis = NO_AXIS
    """The ranks that have the other layers of the model, for this one's samples; without a process group."""
    expert_mesh: DeviceMesh | None = None
    """Over which experts are copied (`replica`, if there is more than one), sharded (`shard`) and dealt out
    (`expert`)."""
    repeats: int = 1
    """So many ranks see the same samples, and each of them computes all that a model makes of these."""

    @property
    def layout(self) -> RankLayout:
        """Where this rank stands."""
        return RankLayout.of(self.rank, self.world_size, self.context, self.tensor, self.pipeline)

    @property
    def beside(self) -> "RankGroup":
        """The same ranks for models beside the policy, which FSDP2 shards whatever the policy's backend is.

        It shards them over all ranks, of which those that share samples then compute the same.
        """
        if self.backend == "fsdp2":
            return self
        alone: dict[str, Any] = {"backend": "fsdp2", "layer_mesh": None, "expert_mesh": None}
        axes = dict.fromkeys(("tensor", "expert", "pipeline"), NO_AXIS)
        return replace(self, **alone, **axes, repeats=self.layout.model.size)

    @classmethod
    def join(
        cls,
        *,
        threads: int,
        deterministic: bool,
        float32_matmul: str = "highest",
        device: torch.device | None = None,
        replicas: int = 1,
        context: int = 1,
        tensor: int = 1,
        expert: int = 1,
        pipeline: int = 1,
        backend: str = "fsdp2",
        hang_timeout: float = 600,
    ) -> "RankGroup":
        """Form the process group that the environment describes (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).

        On a GPU it uses NCCL, on the CPU gloo.

        Args:
            device: this rank's; default: a GPU if torch sees one.
            float32_matmul: precision of float32 matrix products in this process, as torch names it.
            replicas: how many copies of the sharded model there are; must divide the number of ranks.
            context: so many ranks share the tokens of each row; must divide the number of ranks.
            tensor: so many neighbours share the matrices of layers; must divide a replica's ranks, and with
                `context` all ranks.
            expert: so many neighbours have the experts of a layer together; must divide a replica's ranks.
            pipeline: stages of consecutive layers, each on as many ranks one after the other.
            backend: what lays models out over the ranks.
            hang_timeout: seconds after which the trainer's driver kills a rank that stands still.
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
        join = _store_arguments()
        if device is None:
            here = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            device = here if torch.cuda.is_available() else torch.device("cpu")
        # Later than the driver, whose message names the rank: NCCL's watchdog aborts all ranks.
        patience = max(default_pg_nccl_timeout or timedelta(), timedelta(seconds=2 * hang_timeout))
        if device.type == "cuda":
            torch.cuda.set_device(device)
            # gloo for states on hosts, and for what ranks agree on without waiting for their GPUs.
            dist.init_process_group("cuda:nccl,cpu:gloo", device_id=device, timeout=patience, **join)
        else:
            dist.init_process_group("gloo", **join)
        world_size = dist.get_world_size()
        mesh = _mesh(device.type, world_size, replicas, together=context * tensor)
        # Meshes first: PyTorch keeps those of an earlier group in this process that are equal, and finds
        # their process groups by number.
        dealt, expert_mesh = _divided(mesh, expert, "expert")
        cut, layer_mesh = _divided(mesh, tensor, "tensor")
        axis = _context_axis(dist.get_rank(), world_size, context, tensor, patience)
        group = cls(dist.get_rank(), world_size, device, mesh, join["store"], patience, axis, backend=backend)
        stage = Axis(group.rank // (world_size // pipeline), pipeline)
        group = replace(group, expert=dealt, expert_mesh=expert_mesh, pipeline=stage)
        return replace(group, tensor=cut, layer_mesh=layer_mesh)

    def rendezvous(self, name: str) -> ThreadRendezvous:
        """Exchange of strings between one thread of each rank; each name can be used once."""
        if self.store is None or self.world_size == 1:
            return ThreadRendezvous(self.rank, self.world_size, None)
        return ThreadRendezvous(self.rank, self.world_size, dist.PrefixStore(name, self.store.clone()))

    def exchange(self) -> ThreadExchange:
        """Exchange of bytes between one thread of each rank; all ranks call it."""
        if self.world_size == 1:
            return ThreadExchange(self.rank, self.world_size, None)
        group = dist.new_group(backend="gloo", timeout=self.patience)
        assert isinstance(group, dist.ProcessGroup)  # of which every rank is a member
        return ThreadExchange(self.rank, self.world_size, group)

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

    def gather_micros(self, rows: torch.Tensor) -> torch.Tensor:
        """Of all micro-batches of a step, in their order: float64 [micro-batches, k], on the CPU.

        Args:
            rows: float64 [n, k], of this rank's micro-batches; ranks that share samples have the same ones.
        """
        of_ranks = self.gather_rows(rows)[self.layout.reporting]
        return of_ranks.transpose(0, 1).flatten(0, 1)

    def any_of(self, *flags: bool) -> list[bool]:
        """For each flag, whether it is set on any rank; the answer is the same on all ranks.

        The ranks' hosts tell each other: a GPU that is still busy with an update is not waited for.
        """
        mine = torch.tensor(flags, dtype=torch.uint8)
        if self.world_size > 1 and flags:
            dist.all_reduce(mine, dist.ReduceOp.MAX)
        return mine.bool().tolist()

    def measure(self, nbytes: int = 256 << 20) -> float:
        """Bytes a second that this rank gets in an all-gather of `nbytes` between devices; all call it."""
        piece = torch.zeros(nbytes // self.world_size, dtype=torch.uint8, device=self.device)
        whole = torch.empty(len(piece) * self.world_size, dtype=torch.uint8, device=self.device)
        seconds = 0.0
        for _ in range(2):  # the first one sets up connections
            dist.barrier()
            begun = time.monotonic()
            dist.all_gather(list(whole.chunk(self.world_size)), piece)
            whole[-1].item()  # waits for the GPU
            seconds = time.monotonic() - begun
        return (len(whole) - len(piece)) / max(seconds, 1e-9)

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


def _mesh(device_type: str, world_size: int, replicas: int, together: int) -> DeviceMesh:
    """The ranks in one dimension, over which the model is sharded; or in two: replicas, and shards of each.

    A replica's ranks are neighbours, on one machine where that is possible, since they gather each layer from
    each other. Replicas exchange nothing but the gradients of their shards.

    Args:
        together: so many neighbours by number share samples, and stay neighbours.
    """
    if replicas == 1:
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=("shard",))
    hosts: list[Any] = [None] * world_size
    dist.all_gather_object(hosts, socket.gethostname())
    firsts = [rank - rank % together for rank in range(world_size)]
    neighbours = sorted(range(world_size), key=lambda rank: (hosts.index(hosts[firsts[rank]]), rank))
    shape = torch.tensor(neighbours).view(replicas, -1)
    return DeviceMesh(device_type, shape, mesh_dim_names=("replica", "shard"))


def _divided(mesh: DeviceMesh, size: int, name: str) -> tuple[Axis, DeviceMesh | None]:
    """The ranks that have something together with this one, neighbours among those of a replica; and all
    ranks in the dimensions of `mesh`, of which the last one is divided."""
    if size == 1:
        return NO_AXIS, None
    ranks = mesh.mesh.unflatten(-1, (-1, size))
    divided = DeviceMesh(mesh.device_type, ranks, mesh_dim_names=(*(mesh.mesh_dim_names or ()), name))
    return Axis(divided.get_local_rank(name), size, divided.get_group(name)), divided


def undivided(mesh: DeviceMesh) -> DeviceMesh:
    """A mesh that `_divided` has made, without the dimension that it has added."""
    names = mesh.mesh_dim_names or ()
    return mesh[names[:-1] if len(names) > 2 else "shard"]


def _context_axis(rank: int, world_size: int, size: int, tensor: int, patience: timedelta) -> Axis:
    """The ranks that share rows with this one: neighbours by number, so on one machine if possible.

    Args:
        tensor: so many neighbours share matrices, so that each of them has its own axis.
    """
    if size == 1:
        return NO_AXIS
    mine = None
    for first in range(0, world_size, size * tensor):  # every rank makes all groups
        for one in range(first, first + tensor):
            ranks = range(one, one + size * tensor, tensor)
            group = dist.new_group(list(ranks), timeout=patience)
            mine = group if rank in ranks else mine
    assert isinstance(mine, dist.ProcessGroup)
    return Axis(rank // tensor % size, size, mine)


def _store_arguments() -> dict[str, Any]:
    """Arguments of `init_process_group`: the store through which the ranks find each other."""
    rank, world_size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    host = os.environ["MASTER_ADDR"]
    make = host_store if rank == 0 else dist.TCPStore
    store = make(host, port, world_size)
    return {"store": store, "rank": rank, "world_size": world_size}
