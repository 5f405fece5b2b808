"""The place of a trainer rank; its occupant is a worker process."""

import contextlib
from typing import Any

import ray
from ray.exceptions import RayError

from cairn.config.trainer import TrainerBase
from cairn.launch.ray.worker import Assignment, RayProcess
from cairn.launch.supervise.rank_process import RankProcess
from cairn.launch.supervise.seat import Seat
from cairn.run.directory import RunDirectory
from cairn.run.messages import Attempt


class RankPlace(Seat):
    """One rank of the trainer. Its node and GPU belong to the place: they stay the same after a restart."""

    def __init__(self, number: int, run: RunDirectory):
        log = run.logs / ("trainer.log" if number == 0 else f"trainer_rank{number}.log")
        super().__init__(f"trainer_rank{number}", log, run)
        self.number = number
        self.node: str | None = None
        self.gpu: str | None = None
        self.how = ""
        """How the newest occupant got the place, for history.jsonl; empty once that is recorded."""
        self.hung: str | None = None
        """Why the occupant counted as hung, if it was killed for that."""
        self._occupant: RankProcess | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is no occupant: between a death and the next start."""
        return self._occupant is None

    @property
    def occupant(self) -> RankProcess:
        """The worker that has the rank; call it only if there is one."""
        assert self._occupant is not None
        return self._occupant

    def fill(self, occupant: RankProcess, how: str) -> None:
        """Give the place to a worker."""
        self._occupant, self.how = occupant, how

    def wait_started(self, seconds: float) -> None:
        """If the occupant is a new process, wait until it has started."""
        about = self.occupant.wait_started(seconds)
        self.node = about.node
        self.gpu = about.gpu or self.gpu

    def train(
        self, meeting_place: tuple[str, int], config: TrainerBase, attempt: Attempt
    ) -> "ray.ObjectRef[Any]":
        """Have the occupant train, and watch its heartbeat; the future returns its `Outcome`."""
        self.hung = None
        silence, standstill = config.heartbeat_timeout, config.hang_timeout
        self.watch_over(self._about.pid, silence=silence, standstill=standstill)
        address, port = meeting_place
        log = str(self.log)
        rank = Assignment(self.number, config.ranks, address, port, gpu=self.gpu, name=self.name, log=log)
        return self.occupant.train(rank, config, attempt)

    def look_after(self) -> None:
        """Kill the occupant if it hangs; Ray reports its death soon after."""
        if self.hung is None and (problem := self.hang()):
            self.hung = problem
            self.occupant.kill()

    def vacate(self) -> None:
        """Make sure that the occupant is dead, and empty the place."""
        if self._occupant is None:
            return
        with contextlib.suppress(RayError):
            self._occupant.kill()
        if self._occupant.about:
            self.note_state("failed")
        self._occupant = None

    def note_state(self, state: str) -> None:
        """Record the occupant's state in roles.json; it must have started."""
        self.run.set_role(self.name, state, self._about.pid, self._about.host)

    @property
    def _about(self) -> RayProcess:
        about = self.occupant.about
        assert about is not None
        return about
