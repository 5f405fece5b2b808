"""Spare workers of the trainer: all imported, nothing allocated, ready to take a dead rank's place."""

import logging
from dataclasses import dataclass

import ray

from cairn.config.trainer import TrainerBase
from cairn.launch.ray_group import Process, answers, kill, start_spare
from cairn.run.directory import RunDirectory

logger = logging.getLogger(__name__)


@dataclass
class _Spare:
    name: str
    worker: "ray.actor.ActorHandle"
    preparing: "ray.ObjectRef | None"
    process: Process | None = None


class Spares:
    """Keeps up to `config.spare_workers` of them; in roles.json they are `name`0, `name`1, ..."""

    def __init__(self, config: TrainerBase, run: RunDirectory, name: str = "trainer_spare"):
        self.config = config
        self.run = run
        self.name = name
        self._all: list[_Spare] = []
        self._started = 0
        self._failed = 0

    def start(self, count: int) -> None:
        """Start so many now; they get ready in the background."""
        for _ in range(count):
            name = f"{self.name}{self._started}"
            self._started += 1
            worker = start_spare(self.run.logs / f"{name}.log")
            self._all.append(_Spare(name, worker, worker.prepare.remote(self.config)))

    def tend(self) -> None:
        """Start those that are missing, and note which have become ready; call it now and then.

        One that fails to get ready is not tried again: a fresh worker is then all there is.
        """
        self.start(self.config.spare_workers - len(self._all) - self._failed)
        self._note_ready()

    def wait_ready(self, seconds: float) -> None:
        """Wait until those that were started are ready, but no longer than that."""
        preparing = [spare.preparing for spare in self._all]
        ray.wait(preparing, num_returns=len(preparing), timeout=seconds)
        self._note_ready()

    def _note_ready(self) -> None:
        for spare in [spare for spare in self._all if spare.preparing]:
            if not ray.wait([spare.preparing], timeout=0)[0]:
                continue
            try:
                ray.get(spare.preparing)
                spare.process = ray.get(spare.worker.process.remote())
            except ray.exceptions.RayError as error:
                logger.warning("%s did not get ready: %s", spare.name, error)
                self._all.remove(spare)
                self._failed += 1
                continue
            spare.preparing = None
            self.run.set_role(spare.name, "waiting", spare.process.pid, spare.process.host)

    def take(self, node: str | None) -> "tuple[ray.actor.ActorHandle, Process] | None":
        """One that is ready and alive on `node` (None: on any), if there is one; it is no spare any more."""
        self._note_ready()
        for spare in list(self._all):
            if spare.process is None or node not in (None, spare.process.node):
                continue
            self._all.remove(spare)
            alive = answers(spare.worker)
            state = "done" if alive else "failed"
            self.run.set_role(spare.name, state, spare.process.pid, spare.process.host)
            if alive:
                return spare.worker, spare.process
            logger.warning("%s does not answer", spare.name)
            kill(spare.worker, spare.process)
        return None
