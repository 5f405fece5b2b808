# pyright: reportUnknownMemberType=false
"""A worker process of the trainer, seen from the trainer's driver."""

import contextlib
import os
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cairn.config.trainer import TrainerBase
from cairn.launch.ray.worker import Assignment, RayProcess, Worker
from cairn.run.messages import Attempt

PING_SECONDS = 2.0


class RankProcess:
    """The occupant of a rank's place, or a spare for one.

    Every method that calls the worker can raise Ray's errors, such as `ActorDiedError` for a dead worker.

    Args:
        log: file for the worker's output.
        environment: what the worker is told of this process's environment.
        placement: Ray actor options; without any, no CPU or GPU is reserved for it.
    """

    def __init__(self, log: Path, environment: Mapping[str, str], **placement: Any):
        options = placement or {"num_cpus": 0}
        actor: Any = Worker
        self._worker = actor.options(**options).remote(str(log), os.getpid(), socket.gethostname())
        if environment:
            self._worker.adopt.remote(dict(environment))
        self.about: RayProcess | None = None
        """Its process id and node; None until they are known."""

    def wait_started(self, seconds: float | None = None) -> RayProcess:
        """Wait until the worker has started and is not busy; returns its process id and node.

        Raises:
            GetTimeoutError: it took longer than `seconds`.
        """
        about: RayProcess = self.about or ray.get(self._worker.process.remote(), timeout=seconds)
        self.about = about
        return about

    def prepare(self, config: TrainerBase) -> "ray.ObjectRef[None]":
        """Have it import what training needs; the future is ready when that is done."""
        return self._worker.prepare.remote(config)

    def meeting_place(self, seconds: float) -> tuple[str, int]:
        """An address and a free port on its node."""
        return ray.get(self._worker.address.remote(), timeout=seconds)

    def train(self, rank: Assignment, config: TrainerBase, attempt: Attempt) -> "ray.ObjectRef[Any]":
        """Have it train; the future returns its `Outcome`."""
        return self._worker.train.remote(rank, config, attempt)

    def answers(self) -> bool:
        """Whether it is alive, idle and not stopped (SIGSTOP)."""
        try:
            ray.get(self._worker.process.remote(), timeout=PING_SECONDS)
        except RayError:
            return False
        return True

    def kill(self) -> None:
        """Kill it. SIGKILL also ends a stopped process, which does not react to Ray."""
        about = self.about
        if about and about.node == ray.get_runtime_context().get_node_id():
            _kill(about.pid)
        elif about:
            there: Any = NodeAffinitySchedulingStrategy(about.node, soft=False)
            ray.remote(num_cpus=0, scheduling_strategy=there)(_kill).remote(about.pid)
        ray.kill(self._worker)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
