# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""What a process of the trainer does, as a Ray actor; its driver holds it as a `RankProcess`."""

import gc
import os
import socket
from dataclasses import dataclass

import ray
from ray.util import get_node_ip_address

from cairn.config.trainer import TrainerBase
from cairn.launch.process import stop_on_signals
from cairn.run import heartbeat
from cairn.run.attempt import Attempt, Outcome
from cairn.run.processes import die_after, in_background


@dataclass(frozen=True)
class WorkerProcess:
    """Where a worker runs: its process id, its Ray node, that node's name, and its GPU, if it holds one."""

    pid: int
    node: str
    host: str
    gpu: str | None


@dataclass(frozen=True)
class Assignment:
    """The rank that a worker is to be.

    address, port: where the ranks meet. gpu: the one to use, which Ray has given to this process or to one
    whose place it takes. name: under which it gives its signs of life. log: the file that its output goes to.
    """

    rank: int
    world_size: int
    address: str
    port: int
    gpu: str | None
    name: str
    log: str


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

    def process(self) -> WorkerProcess:
        """What process this is; answers at once unless it is busy."""
        gpus = ray.get_gpu_ids()
        node = ray.get_runtime_context().get_node_id()
        return WorkerProcess(os.getpid(), node, socket.gethostname(), str(gpus[0]) if gpus else None)

    def prepare(self, config: TrainerBase) -> None:
        """Import what training needs, with low priority: other ranks train meanwhile."""

        def prepare() -> None:
            from cairn.trainer.warm import warm_up

            warm_up(config)

        in_background(prepare)

    def address(self) -> tuple[str, int]:
        """This node's address and a port that is free on it, for the ranks to meet at."""
        address = get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((address, 0))
            return address, probe.getsockname()[1]

    def train(self, rank: Assignment, config: TrainerBase, attempt: Attempt) -> Outcome:
        """Join the other ranks and train; afterwards it can be called again."""
        _log_to(rank.log)
        os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank.rank), str(rank.world_size)
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = rank.address, str(rank.port)
        os.environ["LOCAL_RANK"] = str(_index_of(rank.gpu))
        run = config.run_directory()
        heartbeat.start(run.heartbeat(rank.name))
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
