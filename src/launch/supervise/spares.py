"""Spare workers of the trainer: everything imported, nothing allocated, ready to replace a dead rank."""

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cairn.config.trainer import TrainerBase
from cairn.launch.ray.environment import environment_for_workers
from cairn.launch.ray.worker import RankProcess
from cairn.run.directory import RunDirectory

logger = logging.getLogger(__name__)


@dataclass
class _Spare:
    name: str
    place: str | None
    """The node that it was started on; None: Ray's choice."""
    process: RankProcess
    preparing: "ray.ObjectRef[None] | None"
    """Future of its preparation; None once it is ready."""


class Spares:
    """Keeps spares where they are wanted; in roles.json they are named `name`0, `name`1, ..."""

    def __init__(self, config: TrainerBase, run: RunDirectory, name: str = "trainer_spare"):
        self.config = config
        self.run = run
        self.name = name
        self._all: list[_Spare] = []
        self._started = 0
        self._failed = Counter[str | None]()

    def start(self, places: Iterable[str | None]) -> None:
        """Start a spare on each of these nodes (None: any node) now; they prepare in the background."""
        for place in places:
            name = f"{self.name}{self._started}"
            self._started += 1
            there: dict[str, Any] = {}
            if place is not None:
                strategy = NodeAffinitySchedulingStrategy(place, soft=False)
                there = {"num_cpus": 0, "scheduling_strategy": strategy}
            log, environment = self.run.logs / f"{name}.log", environment_for_workers(self.config)
            process = RankProcess(log, environment, **there)
            self._all.append(_Spare(name, place, process, process.prepare(self.config)))

    def tend(self, places: Iterable[str | None]) -> None:
        """Start what is missing of a spare on each of these nodes, and record which have become ready.

        Call it regularly. A spare that fails to prepare is not started again; a dead rank then gets a fresh
        worker.
        """
        there = Counter(spare.place for spare in self._all) + self._failed
        self.start((Counter(places) - there).elements())
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
                self._failed[spare.place] += 1
                continue
            spare.preparing = None
            self._note_state(spare, "waiting")

    def _note_state(self, spare: _Spare, state: str) -> None:
        about = spare.process.wait_started()
        self.run.set_role(spare.name, state, about.pid, about.host)
