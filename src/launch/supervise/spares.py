"""Spare workers of the trainer: everything imported, nothing allocated, ready to replace a dead rank."""

import logging
from dataclasses import dataclass

import ray
from ray.exceptions import RayError

from cairn.config.trainer import TrainerBase
from cairn.launch.ray.environment import environment_for_workers
from cairn.launch.ray.worker import RankProcess
from cairn.run.directory import RunDirectory

logger = logging.getLogger(__name__)


@dataclass
class _Spare:
    name: str
    process: RankProcess
    preparing: "ray.ObjectRef[None] | None"
    """Future of its preparation; None once it is ready."""


class Spares:
    """Keeps up to `config.spare_workers` spares; in roles.json they are named `name`0, `name`1, ..."""

    def __init__(self, config: TrainerBase, run: RunDirectory, name: str = "trainer_spare"):
        self.config = config
        self.run = run
        self.name = name
        self._all: list[_Spare] = []
        self._started = 0
        self._failed = 0

    def start(self, count: int) -> None:
        """Start `count` spares now; they prepare in the background."""
        for _ in range(count):
            name = f"{self.name}{self._started}"
            self._started += 1
            process = RankProcess(self.run.logs / f"{name}.log", environment_for_workers(self.config))
            self._all.append(_Spare(name, process, process.prepare(self.config)))

    def tend(self) -> None:
        """Start missing spares, and record which have become ready; call it regularly.

        A spare that fails to prepare is not started again; a dead rank then gets a fresh worker.
        """
        self.start(self.config.spare_workers - len(self._all) - self._failed)
        self._note_ready()

    def wait_ready(self, seconds: float) -> None:
        """Wait at most `seconds` until all started spares are ready."""
        preparing = [spare.preparing for spare in self._all if spare.preparing]
        ray.wait(preparing, num_returns=len(preparing), timeout=seconds)
        self._note_ready()

    def take(self, node: str | None) -> RankProcess | None:
        """Remove and return a ready, living spare on `node` (None: any node), or None if there is none."""
        self._note_ready()
        for spare in list(self._all):
            about = spare.process.about
            if about is None or node not in (None, about.node):
                continue
            self._all.remove(spare)
            if spare.process.answers():
                self._note_state(spare, "done")
                return spare.process
            self._note_state(spare, "failed")
            logger.warning("%s does not answer", spare.name)
            spare.process.kill()
        return None

    def _note_ready(self) -> None:
        for spare in list(self._all):
            preparing = spare.preparing
            if preparing is None or not ray.wait([preparing], timeout=0)[0]:
                continue
            try:
                ray.get(preparing)
                spare.process.wait_started()
            except RayError as error:
                logger.warning("%s did not get ready: %s", spare.name, error)
                self._all.remove(spare)
                self._failed += 1
                continue
            spare.preparing = None
            self._note_state(spare, "waiting")

    def _note_state(self, spare: _Spare, state: str) -> None:
        about = spare.process.wait_started()
        self.run.set_role(spare.name, state, about.pid, about.host)
