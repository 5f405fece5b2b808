# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""The Ray cluster of the trainer's ranks: joins or starts it, and reserves room in it."""

import logging
import math
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

import ray
from ray._private.state import state as ray_state
from ray.exceptions import RpcError
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cairn.config.gpus import names_in
from cairn.config.trainer import TrainerBase
from cairn.launch.exits import RayFailed, RoleFailed
from cairn.launch.places.rank_process import RankProcess
from cairn.launch.ray import local as local_ray
from cairn.launch.ray.access_token import join_with_token
from cairn.launch.ray.worker_environment import environment_for_workers
from cairn.run import heartbeat
from cairn.run.errors import UsageError
from cairn.run.machine import this_machine
from cairn.run.signals import stop_signals_blocked
from cairn.run.waiting import Patience

JOIN_SECONDS = 30.0
"""How long nodes may take to join a given Ray cluster before it counts as too small."""
POLL_SECONDS = 0.5
SPIN_COUNT = 5000
"""GOMP_SPINCOUNT: an idle OpenMP thread spins for about 60 microseconds instead of milliseconds."""


class Placement:
    """Room in the Ray cluster for `config.workers` ranks: one CPU each and, if there are any, one GPU."""

    def __init__(self, config: TrainerBase):
        """Reserve the room.

        Raises:
            UsageError: the cluster is too small, which is said at once.
            RoleFailed: it has no room, because others use it.
        """
        self.gpus = _check_size(config)
        self._environment = environment_for_workers(config)
        self._group = placement_group([{"CPU": 1, "GPU": self.gpus}] * config.ranks, strategy="PACK")
        if not self._group.wait(config.ray.start_timeout):
            raise RoleFailed(
                f"Ray has no room for {config.ranks} workers with 1 CPU and {self.gpus} GPU each "
                f"({ray.cluster_resources()}); lower the number of workers, or raise ray.start_timeout"
            )

    def start(self, rank: int, log: Path) -> RankProcess:
        """Start a worker in the room reserved for `rank`."""
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)
        return RankProcess(
            log, self._environment, num_cpus=1, num_gpus=self.gpus, scheduling_strategy=strategy
        )


def cluster_ranks(config: TrainerBase) -> int:
    """The number of ranks in the cluster: `workers`, or as many as there are GPUs; on CPUs one."""
    return config.workers or int(_resources().get("GPU", 0)) or 1


def _check_size(config: TrainerBase) -> int:
    """Check that the cluster has a CPU and, if it has any, a GPU for each rank; returns the GPUs of a rank.

    A given cluster has `JOIN_SECONDS` for nodes that are joining it.

    Raises:
        UsageError: it does not, or it has no GPU although this machine has some.
    """
    ranks, given = config.ranks, config.ray.address
    patience = Patience(JOIN_SECONDS if given else 0)
    while True:
        there = _resources()
        each = 0 if config.gpus == "0" or not there.get("GPU") else 1
        room = int(min(there.get("CPU", 0), there["GPU"] if each else math.inf))
        without = given and not each and config.gpus != "0" and this_machine().has_gpus
        if room >= ranks and not without:
            return each
        if patience.over:
            break
        heartbeat.doing("waiting for nodes of the Ray cluster", waiting=True)
        time.sleep(POLL_SECONDS)
    if without:
        raise UsageError(
            f"the Ray cluster at {given} has no GPU, though this machine has: start its nodes with "
            "`ray start --num-gpus`, or train on CPUs with gpus 0"
        )
    raise UsageError(
        f"workers {ranks}: each takes a CPU{' and a GPU' if each else ''} of the Ray cluster"
        f"{f' at {given}' if given else ''}, which has {there.get('CPU', 0):g} CPUs and "
        f"{there.get('GPU', 0):g} GPUs; lower it to {room}, or add nodes"
    )


def _resources() -> Mapping[str, float]:
    """What the cluster has, or can grow to if it starts nodes by itself."""
    there = ray.cluster_resources()
    most = ray_state.get_max_resources_from_cluster_config() or {}
    return {name: max(there.get(name, 0), most.get(name, 0)) for name in {*there, *most}}


def start_ray(config: TrainerBase) -> None:
    """Join the cluster at `ray.address`, or start one on this machine.

    Raises:
        RoleFailed: no cluster answers at `ray.address`.
        UsageError: the cluster there is joined with a token that this user does not have.
        RayFailed: the local cluster does not start.
    """
    if config.ray.address:
        try:
            _check_address(config.ray.address, config.ray.start_timeout)
            join_with_token(config.ray.address)
            ray.init(config.ray.address, log_to_driver=False, logging_level=logging.ERROR)
        except (RuntimeError, OSError, ValueError, RpcError) as error:
            raise RoleFailed(f"no Ray cluster at --ray.address {config.ray.address}: {error}") from None
        return
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if config.beside_servers and "OMP_WAIT_POLICY" not in os.environ:
        # Ranks and servers share the cores; a spinning thread would block a core.
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
    with stop_signals_blocked():  # inherited by Ray's processes, and by workers until they train
        _start_local(config.ranks, len(names_in(config.gpus or "0") or ()))


def _start_local(cpus: int, gpus: int) -> None:
    """Start a cluster with `cpus` CPUs and the first `gpus` visible GPUs; it ends with this process.

    Raises:
        RayFailed: it did not start. A busy machine is a common cause, so a restart may well succeed.
    """
    try:
        local_ray.start(cpus, gpus)
    except Exception as error:  # Ray raises plain exceptions
        message = " ".join(str(error).split())
        raise RayFailed(f"Ray did not start on this machine: {message}") from error


def end_ray(config: TrainerBase) -> None:
    """Leave the cluster. A local one ends with this process, which must exit right after.

    Its processes ignore stop signals, so shutting them down in order would take a second each.
    """
    if config.ray.address:
        ray.shutdown()


def _check_address(address: str, seconds: float) -> None:
    """Check within `seconds` that something listens at the address; Ray itself would wait for minutes.

    Raises:
        OSError: nothing listens there.
    """
    host, _, port = address.rpartition("//")[2].partition(":")
    if port.isdigit():
        socket.create_connection((host, int(port)), timeout=seconds).close()
