"""The trainer's ranks as Ray actors: one process each, placed together."""

import os
import socket
from pathlib import Path

# Under `uv run` Ray would zip the working directory and run the workers in a copy of it.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
# Its memory monitor kills the trainer when somebody else fills the machine.
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cairn.config.trainer import RayConfig, SFTConfig, TrainerBase, TrainerConfig
from cairn.launch.process import RoleFailed, WorkerDied, log_end, stop_on_signals
from cairn.run.directory import Attempt, Outcome, RunDirectory

LOOPBACK = "127.0.0.1"


@ray.remote(max_restarts=0)
class Worker:
    """One rank of the trainer."""

    def __init__(self, log: str):
        """Send everything that this process prints to `log`."""
        os.makedirs(os.path.dirname(log), exist_ok=True)
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(fd, 1)
        os.dup2(fd, 2)

    def address(self) -> tuple[str, int]:
        """This node's address and a port that is free on it, for the ranks to meet at."""
        address = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((address, 0))
            return address, probe.getsockname()[1]

    def train(
        self, environment: dict[str, str], config: SFTConfig | TrainerConfig, attempt: Attempt
    ) -> Outcome:
        """Join the other ranks and train."""
        os.environ.update(environment)
        from cairn.run.logs import start_logging
        from cairn.trainer.group import Group
        from cairn.trainer.loop import train

        start_logging()
        run = RunDirectory(config.output_dir)
        with stop_on_signals(run, at_once=lambda: os._exit(1)):
            group = Group.join(threads=config.threads, deterministic=config.deterministic)
            outcome = train(config, attempt, group)
            group.leave()
        return outcome


def train_on_ray(config: SFTConfig | TrainerConfig, attempt: Attempt) -> Outcome:
    """Run the training loop on `config.workers` Ray actors; returns what rank 0 says of it.

    Raises:
        RoleFailed: a worker could not be placed, raised an error, or died.
    """
    run = RunDirectory(config.output_dir)
    _start_ray(config)
    try:
        with stop_on_signals(run):  # only now, since Ray sets handlers of its own when it starts
            return _train(config, attempt, run)
    finally:
        ray.shutdown()


def _train(config: SFTConfig | TrainerConfig, attempt: Attempt, run: RunDirectory) -> Outcome:
    logs = [_log(run, rank) for rank in range(config.workers)]
    gpus = 1 if ray.cluster_resources().get("GPU") else 0
    group = placement_group([{"CPU": 1, "GPU": gpus}] * config.workers, strategy="PACK")
    if not group.wait(config.ray.start_timeout):
        raise RoleFailed(
            f"Ray has no room for {config.workers} workers with 1 CPU and {gpus} GPU each "
            f"({ray.cluster_resources()}); lower the number of workers, or raise ray.start_timeout"
        )
    workers = [
        Worker.options(
            num_cpus=1,
            num_gpus=gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
        ).remote(str(log))
        for rank, log in enumerate(logs)
    ]
    address, port = ray.get(workers[0].address.remote(), timeout=config.ray.start_timeout)
    pending = {
        worker.train.remote(_rendezvous(rank, config, address, port), config, attempt): rank
        for rank, worker in enumerate(workers)
    }
    outcomes = {}
    while pending:
        # Not for ever at once, so that a signal is seen in between.
        done, _ = ray.wait(list(pending), num_returns=1, timeout=0.5)
        for future in done:
            rank = pending.pop(future)
            outcomes[rank] = _result(future, rank, logs[rank])
    return outcomes[0]


def _start_ray(config: TrainerBase) -> None:
    """Join the cluster at `ray.address`, or start one on this machine.

    Raises:
        RoleFailed: nobody answers there, or it does not start.
    """
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        if config.ray.address:
            _check_address(config.ray)
            ray.init(config.ray.address, **quiet)
            return
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        ray.init(
            "local",  # whatever RAY_ADDRESS says
            num_cpus=config.workers,
            include_dashboard=False,
            object_store_memory=80 << 20,
            _node_ip_address=LOOPBACK,
            **quiet,
        )
    except (RuntimeError, OSError, ValueError) as error:
        where = f"at --ray.address {config.ray.address}" if config.ray.address else "on this machine"
        raise RoleFailed(f"no Ray cluster {where}: {error}") from None


def _check_address(config: RayConfig) -> None:
    """Ray itself waits for minutes where nobody listens.

    Raises:
        OSError: nobody does.
    """
    host, _, port = config.address.rpartition("//")[2].partition(":")
    if port.isdigit():
        socket.create_connection((host, int(port)), timeout=config.start_timeout).close()


def _log(run: RunDirectory, rank: int) -> Path:
    return run.logs / ("trainer.log" if rank == 0 else f"trainer_rank{rank}.log")


def _rendezvous(rank: int, config: TrainerBase, address: str, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(config.workers),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def _result(future: ray.ObjectRef, rank: int, log: Path) -> Outcome:
    """What a worker returned.

    Raises:
        WorkerDied: it died, or the process that writes its checkpoints did.
        RoleFailed: it raised an error.
    """
    try:
        return ray.get(future)
    except ray.exceptions.RayTaskError as error:
        from cairn.checkpoint.saver import WriterDied  # which imports torch

        cause = error.cause
        kind = WorkerDied if isinstance(cause, WriterDied) else RoleFailed
        raise kind(f"trainer rank {rank}: {type(cause).__name__}: {cause}\n(log: {log})") from None
    except ray.exceptions.RayError as error:
        reason = "" if isinstance(error, ray.exceptions.ActorDiedError) else f" ({type(error).__name__})"
        raise WorkerDied(f"trainer rank {rank} died{reason}; the end of {log}:\n{log_end(log)}") from None
