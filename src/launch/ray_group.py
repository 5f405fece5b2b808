"""The trainer's processes as Ray actors: what one of them does, and how they are placed."""

import contextlib
import gc
import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from cairn.config.trainer import RayConfig, TrainerBase
from cairn.launch import local_ray
from cairn.launch.exits import RayFailed, RoleFailed
from cairn.launch.process import stop_on_signals
from cairn.run import heartbeat
from cairn.run.attempt import Attempt, Outcome
from cairn.run.processes import die_after, in_background
from cairn.run.signals import stop_signals_blocked

PING_SECONDS = 2.0
SPIN_COUNT = 5000
"""How often a thread looks for work before it sleeps: 60 microseconds, where OpenMP's own is milliseconds."""


@dataclass(frozen=True)
class Process:
    """Where a worker runs: its process id, its Ray node, that node's name, and its GPU, if it holds one."""

    pid: int
    node: str
    host: str
    gpu: str | None


@ray.remote(max_restarts=0)
class Worker:
    """One rank of the trainer, or a spare for one."""

    def __init__(self, log: str, driver: int, host: str):
        """Send everything that this process prints to `log`; end with process `driver` if `host` is ours.

        Ray ends it as well, but later, when others may be at work in the same run already.
        """
        _log_to(log)
        if host == socket.gethostname():
            die_after(driver)

    def process(self) -> Process:
        """What process this is; answers at once unless it is busy."""
        gpus = ray.get_gpu_ids()
        node = ray.get_runtime_context().get_node_id()
        return Process(os.getpid(), node, socket.gethostname(), str(gpus[0]) if gpus else None)

    def prepare(self, config: TrainerBase) -> None:
        """Import what training needs, so that it can begin at once; those who train are not slowed down."""

        def prepare() -> None:
            from cairn.trainer.warm import warm_up

            warm_up(config)

        in_background(prepare)

    def address(self) -> tuple[str, int]:
        """This node's address and a port that is free on it, for the ranks to meet at."""
        address = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((address, 0))
            return address, probe.getsockname()[1]

    def train(
        self,
        environment: dict[str, str],
        gpu: str | None,
        log: str,
        role: str,
        config: TrainerBase,
        attempt: Attempt,
    ) -> Outcome:
        """Join the other ranks as `role` and train; afterwards it can be called again.

        `gpu` is the one to use, which Ray has given to this process or to one whose place it takes.
        """
        _log_to(log)
        os.environ.update(environment)
        os.environ["LOCAL_RANK"] = str(_index_of(gpu))
        run = config.run_directory()
        heartbeat.start(run.heartbeat(role))
        heartbeat.holds_unsaved(False)
        heartbeat.doing("importing torch")
        from cairn.run.output import start_logging
        from cairn.trainer.group import RankGroup
        from cairn.trainer.loop import train

        start_logging()
        try:
            with stop_on_signals(run):
                heartbeat.doing("meeting the other ranks")
                group = RankGroup.join(threads=config.threads, deterministic=config.deterministic)
                try:
                    return train(config, attempt, group)
                finally:
                    group.leave()
        finally:
            gc.collect()  # of a model that was given up, before the next one is loaded
            heartbeat.doing("waiting for the trainer's driver", waiting=True)


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

    def start(self, rank: int, log: Path) -> "ray.actor.ActorHandle":
        """Start a worker in the place of `rank`."""
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)
        options = {"num_cpus": 1, "num_gpus": self.gpus, "scheduling_strategy": strategy}
        return _start(log, **options)


def start_spare(log: Path) -> "ray.actor.ActorHandle":
    """Start a worker that has no place, and so no CPU or GPU, of its own."""
    return _start(log, num_cpus=0)


def _start(log: Path, **options: object) -> "ray.actor.ActorHandle":
    return Worker.options(**options).remote(str(log), os.getpid(), socket.gethostname())


def answers(worker: "ray.actor.ActorHandle") -> bool:
    """Whether an idle worker is alive and not stopped."""
    try:
        ray.get(worker.process.remote(), timeout=PING_SECONDS)
    except ray.exceptions.RayError:
        return False
    return True


def kill(worker: "ray.actor.ActorHandle", process: Process | None) -> None:
    """Kill a worker, even one that is stopped, and so deaf to Ray."""
    if process and process.node == ray.get_runtime_context().get_node_id():
        _kill_process(process.pid)
    elif process:
        there = NodeAffinitySchedulingStrategy(process.node, soft=False)
        ray.remote(num_cpus=0, scheduling_strategy=there)(_kill_process).remote(process.pid)
    ray.kill(worker)


def _kill_process(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def start_ray(config: TrainerBase) -> None:
    """Join the cluster at `ray.address`, or start one on this machine.

    Raises:
        RoleFailed: nobody answers there.
        RayFailed: it does not start.
    """
    if config.ray.address:
        try:
            _check_address(config.ray)
            ray.init(config.ray.address, log_to_driver=False, logging_level="ERROR")
        except (RuntimeError, OSError, ValueError) as error:
            raise RoleFailed(f"no Ray cluster at --ray.address {config.ray.address}: {error}") from None
        return
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if config.beside_servers and "OMP_WAIT_POLICY" not in os.environ:
        # Servers share the cores, and get one that a thread has nothing to do on only once it sleeps.
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


def _check_address(config: RayConfig) -> None:
    """Ray itself waits for minutes where nobody listens.

    Raises:
        OSError: nobody does.
    """
    host, _, port = config.address.rpartition("//")[2].partition(":")
    if port.isdigit():
        socket.create_connection((host, int(port)), timeout=config.start_timeout).close()


def _index_of(gpu: str | None) -> int:
    """Under which number this process sees a GPU of this node."""
    if gpu is None or ray.get_gpu_ids():
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",").index(gpu) if visible else int(gpu)


def _log_to(log: str) -> None:
    """Send everything that this process prints to `log`."""
    os.makedirs(os.path.dirname(log), exist_ok=True)
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
