# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""The Ray cluster that the trainer's ranks run on: joined or started, and the places in it."""

import logging
import os
import socket
from pathlib import Path

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cairn.config.trainer import TrainerBase
from cairn.launch import local_ray
from cairn.launch.exits import RayFailed, RoleFailed
from cairn.launch.rank_process import RankProcess
from cairn.run.signals import stop_signals_blocked

SPIN_COUNT = 5000
"""GOMP_SPINCOUNT: a thread without work spins for 60 microseconds, not for milliseconds."""


class Placement:
    """Places in the Ray cluster for `config.workers` ranks: one CPU and, where there are any, one GPU."""

    def __init__(self, config: TrainerBase):
        """Reserve them.

        Raises:
            RoleFailed: there is no room.
        """
        self.gpus = 1 if ray.cluster_resources().get("GPU") else 0
        self._group = placement_group([{"CPU": 1, "GPU": self.gpus}] * config.workers, strategy="PACK")
        if not self._group.wait(config.ray.start_timeout):
            raise RoleFailed(
                f"Ray has no room for {config.workers} workers with 1 CPU and {self.gpus} GPU each "
                f"({ray.cluster_resources()}); lower the number of workers, or raise ray.start_timeout"
            )

    def start(self, rank: int, log: Path) -> RankProcess:
        """Start a worker in the place of `rank`."""
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)
        return RankProcess(log, num_cpus=1, num_gpus=self.gpus, scheduling_strategy=strategy)


def start_ray(config: TrainerBase) -> None:
    """Join the cluster at `ray.address`, or start one on this machine.

    Raises:
        RoleFailed: nobody answers there.
        RayFailed: it does not start.
    """
    if config.ray.address:
        try:
            _check_address(config.ray.address, config.ray.start_timeout)
            ray.init(config.ray.address, log_to_driver=False, logging_level=logging.ERROR)
        except (RuntimeError, OSError, ValueError) as error:
            raise RoleFailed(f"no Ray cluster at --ray.address {config.ray.address}: {error}") from None
        return
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if config.beside_servers and "OMP_WAIT_POLICY" not in os.environ:
        # Servers share the cores, and a thread that spins keeps its core from them.
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
    with stop_signals_blocked():  # for Ray's own processes, and for the workers until they train
        _start_local(config.workers)


def _start_local(cpus: int) -> None:
    """Start a cluster with `cpus` CPUs and this machine's GPUs; it ends with this process.

    Raises:
        RayFailed: it did not start; a busy machine is a usual reason, so another start may well succeed.
    """
    try:
        local_ray.start(cpus)
    except Exception as error:  # Ray raises plain ones
        message = " ".join(str(error).split())
        raise RayFailed(f"Ray did not start on this machine: {message}") from error


def end_ray(config: TrainerBase) -> None:
    """Leave the cluster; one of our own ends with this process, which has nothing else to do.

    Asked to end, its processes, which are deaf to signals, would take a second each.
    """
    if config.ray.address:
        ray.shutdown()


def _check_address(address: str, seconds: float) -> None:
    """See that something listens there, within `seconds`; Ray itself would wait for minutes.

    Raises:
        OSError: nobody does.
    """
    host, _, port = address.rpartition("//")[2].partition(":")
    if port.isdigit():
        socket.create_connection((host, int(port)), timeout=seconds).close()
