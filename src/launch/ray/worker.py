# pyright: reportUnknownMemberType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""The trainer's worker process: a Ray actor (`Worker`), and how its driver holds it (`RankProcess`)."""

import contextlib
import gc
import logging
import os
import signal
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import get_node_ip_address
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cairn.checkpoint.memory.memory_owners import RankHost
from cairn.config.trainer import TrainerBase
from cairn.launch.ray.environment import adopt, extend_segments
from cairn.run import heartbeat
from cairn.run.connections import free_port
from cairn.run.machine import keep_near, lack_of_cpus, this_machine
from cairn.run.messages import Attempt, Outcome
from cairn.run.output import importing, log_to
from cairn.run.processes import die_after, in_background, kill_process, stop_on_signals


@dataclass(frozen=True)
class RayProcess:
    """A worker's process id, its Ray node's id and name, and its GPU, if it has one."""

    pid: int
    node: str
    host: str
    gpu: str | None


@dataclass(frozen=True)
class Assignment:
    """The rank that a worker takes.

    neighbours: ranks on its node, itself included. address, port: where the ranks meet. gpu: the one to use;
    Ray assigned it to this process or to the one it replaces. name: its name in heartbeats/ and roles.json.
    log: file for its output. launcher: the process that has started the run, on the driver's machine.
    """

    rank: int
    world_size: int
    neighbours: int
    address: str
    port: int
    gpu: str | None
    name: str
    log: str
    launcher: int


logger = logging.getLogger(__name__)

OUTLIVED_SECONDS = 1.0
"""A rank that lives so long after SIGTERM was asked to stop. When a driver has died, Ray sends SIGTERM to the
ranks of a given cluster, too, but kills them 0.1 s later (`kill_worker_timeout_milliseconds`)."""


@ray.remote(max_restarts=0)
class Worker:
    """A process that trains as one rank, or waits as a spare."""

    _imports: threading.Thread | None = None
    """Imports what training needs, if that was begun early."""

    def __init__(self, log: str, driver: int, host: str):
        """Redirect output to `log`, and die with process `driver` if that runs on `host`, this machine.

        Ray ends orphaned workers too, but later, when new workers may already be running in the same run.
        """
        log_to(Path(log))
        if host == socket.gethostname():
            die_after(driver)

    def adopt(self, environment: dict[str, str]) -> None:
        """Take over a part of the driver's environment; called before anything that reads it is imported."""
        adopt(environment)

    def process(self) -> RayProcess:
        """This process's id and node; answers at once unless the process is busy."""
        gpus = ray.get_gpu_ids()
        node = ray.get_runtime_context().get_node_id()
        return RayProcess(os.getpid(), node, socket.gethostname(), str(gpus[0]) if gpus else None)

    def prepare(self, config: TrainerBase) -> None:
        """Import what training needs, at low priority because other ranks are training."""

        def prepare() -> None:
            extend_segments()
            with importing():
                from cairn.trainer.loop import preload

                preload(config)

        in_background(prepare)

    def import_early(self) -> None:
        """Begin to import what all training needs, in a thread: the worker goes on to answer."""
        self._imports = threading.Thread(target=_import_training, name="imports", daemon=True)
        self._imports.start()

    def address(self) -> tuple[str, int]:
        """This node's address and a free port, where the ranks can meet."""
        address = get_node_ip_address()
        return address, free_port(address)

    def train(self, rank: Assignment, config: TrainerBase, attempt: Attempt) -> Outcome:
        """Join the other ranks and train; can be called again afterwards."""
        log_to(Path(rank.log))
        extend_segments()
        os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank.rank), str(rank.world_size)
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = rank.address, str(rank.port)
        index = _index_of(rank.gpu)
        os.environ["LOCAL_RANK"] = str(index)
        run = config.run_directory()
        heartbeat.start(run.heartbeat(rank.name), run.spans_of(rank.name))
        heartbeat.holds_unsaved(False)
        heartbeat.doing("importing torch")
        machine = this_machine()
        near = keep_near(machine, rank.gpu, rank.neighbours)  # before torch starts threads
        if self._imports is not None:
            self._imports.join()  # two threads that import the same modules in different orders fail
        with importing():
            from cairn.run.output import start_logging
            from cairn.trainer.device import device_for, out_of_memory
            from cairn.trainer.group import RankGroup
            from cairn.trainer.loop import train

        start_logging(config.log_format, rank.name)
        if near:
            logger.info(near)
        try:
            with stop_on_signals(run, later=OUTLIVED_SECONDS):
                if config.ray.address:
                    heartbeat.doing("comparing the model with the GPU's memory")
                    with importing():
                        from cairn.launch.memory import (
                            counted_if_possible,
                            refuse_rank_that_does_not_fit,
                            suggestion_of_replicas,
                        )

                    on_gpu = machine.has_gpus
                    counted = counted_if_possible(config.model.name, config, machine) if on_gpu else None
                    if counted is not None:
                        refuse_rank_that_does_not_fit(counted, config, machine)
                    if lack := lack_of_cpus(machine, rank.neighbours):
                        logger.warning(lack)
                    if (
                        counted is not None
                        and rank.rank == 0
                        and (hint := suggestion_of_replicas(counted, config, machine, rank.neighbours))
                    ):
                        logger.info(hint)
                heartbeat.doing("meeting the other ranks")
                group = None
                try:
                    device = device_for(rank.gpu, index, on_cpu=config.gpus == "0")
                    group = RankGroup.join(
                        threads=config.threads,
                        deterministic=config.deterministic,
                        float32_matmul=config.precision.float32_matmul,
                        device=device,
                        replicas=config.replicas,
                        context=config.parallel.context,
                        tensor=config.parallel.tensor,
                        expert=config.parallel.expert,
                        pipeline=config.parallel.pipeline,
                        backend=config.backend,
                        hang_timeout=config.hang_timeout,
                    )
                    outcome = train(config, attempt, group, _host(config, rank))
                except BaseException as error:
                    if group is not None:
                        group.abandon()
                    if explained := out_of_memory(error, config):
                        raise explained from error
                    raise
                group.leave()
                return outcome
        finally:
            gc.collect()  # free the abandoned model before the next one is loaded
            heartbeat.doing("waiting for the trainer's driver", waiting=True)


def _import_training() -> None:
    extend_segments()
    with importing():
        import cairn.trainer.loop  # noqa: F401


def _host(config: TrainerBase, rank: Assignment) -> RankHost:
    """Where this process runs: in a cluster of the run's own, on the launcher's machine."""
    if not config.ray.address:
        return RankHost(rank.launcher)
    node = ray.get_runtime_context().get_node_id()
    return RankHost(os.getppid(), node, get_node_ip_address())


def _index_of(gpu: str | None) -> int:
    """The index under which this process sees a GPU of this node."""
    if gpu is None or ray.get_gpu_ids():
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",").index(gpu) if visible else int(gpu)


PING_SECONDS = 2.0
ENDING_SECONDS = 30.0
"""Seconds that a killed process has to end: the driver frees the memory of its GPU meanwhile."""


class RankProcess:
    """The worker of a rank, or a spare for one, as the trainer's driver sees it.

    Every method that calls the worker can raise Ray's errors, such as `ActorDiedError` for a dead worker.

    Args:
        log: file for the worker's output.
        environment: what the worker gets of this process's environment.
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
        self._ending: ray.ObjectRef[None] | None = None
        """On another node, once it is killed: ready when the process has ended."""

    def wait_started(self, seconds: float | None = None) -> RayProcess:
        """Wait until the worker has started and is not busy; returns its process id and node.

        Raises:
            GetTimeoutError: it took longer than `seconds`.
        """
        about: RayProcess = self.about or ray.get(self._worker.process.remote(), timeout=seconds)
        self.about = about
        return about

    def import_early(self) -> None:
        """Have it begin to import what all training needs."""
        self._worker.import_early.remote()

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
        if self._is_here:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        elif self.about:
            there: Any = NodeAffinitySchedulingStrategy(self.about.node, soft=False)
            kill = ray.remote(num_cpus=0, scheduling_strategy=there)(kill_process)
            self._ending = kill.remote(self._pid, ENDING_SECONDS)
        ray.kill(self._worker)

    def wait_ended(self) -> None:
        """Wait until the killed process is gone, at most ENDING_SECONDS: so long it has its GPU's memory."""
        if self._is_here:
            kill_process(self._pid, ENDING_SECONDS)
        elif self._ending:
            ray.wait([self._ending], timeout=ENDING_SECONDS)

    @property
    def _is_here(self) -> bool:
        """Whether it is known to run on this node."""
        return self.about is not None and self.about.node == ray.get_runtime_context().get_node_id()

    @property
    def _pid(self) -> int:
        assert self.about is not None
        return self.about.pid
