# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""The Ray cluster of the trainer's ranks: joins or starts it, and reserves room in it."""

import logging
import os
import socket
from pathlib import Path

import ray
from ray.exceptions import RpcError
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cairn.config.shared import names_in
from cairn.config.trainer import TrainerBase
from cairn.launch.ray import local as local_ray
from cairn.launch.ray.access_token import join_with_token
from cairn.launch.ray.room import resources, wait_for_room
from cairn.launch.ray.worker_environment import environment_for_workers
from cairn.launch.supervise.rank_process import RankProcess
from cairn.run import heartbeat
from cairn.run.exits import RayFailed, RoleFailed
from cairn.run.signals import stop_signals_blocked

SPIN_COUNT = 5000
"""GOMP_SPINCOUNT: an idle OpenMP thread spins for about 60 microseconds instead of milliseconds."""


class ClusterPlacement:
    """Room in the Ray cluster for `config.workers` ranks: one CPU each and, if there are any, one GPU."""

    def __init__(self, config: TrainerBase):
        """Reserve the room.

        Raises:
            RoleFailed: the cluster is too small, or others use it.
        """
        self.gpus = wait_for_room(
            config, lambda missing: heartbeat.doing(missing, waiting=True), on_gpus=_on_gpus(config)
        )
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
    return config.workers or int(resources().get("GPU", 0)) or 1


def _on_gpus(config: TrainerBase) -> bool:
    """Whether the ranks compute on GPUs, as the launcher has settled their settings for.

    It has written `gpus` 0 where a given cluster has none, and which ones they are on this machine.
    """
    return config.gpus != "0" if config.ray.address else bool(names_in(config.gpus or "0"))


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
        gpus = len(names_in(config.gpus or "0") or ())
        _start_local(config.ranks, gpus, config.ray.start_timeout)


def _start_local(cpus: int, gpus: int, seconds: float) -> None:
    """Start a cluster with `cpus` CPUs and the first `gpus` visible GPUs; it ends with this process.

    Raises:
        RayFailed: it did not start. A busy machine is a common cause, so a restart may well succeed.
    """
    try:
        local_ray.start(cpus, gpus, seconds)
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
