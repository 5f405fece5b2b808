"""The trainer's ranks, kept going: one that dies is replaced while the driver and the others stay.

Whoever survives leaves the process group, the dead one's place is taken by a spare or by a new worker, and
all ranks meet anew, load the newest good checkpoint and go on from there.
"""

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError, RayTaskError

from cairn.checkpoint.manifest import Damaged
from cairn.checkpoint.store import CheckpointStore
from cairn.config.trainer import TrainerBase
from cairn.launch.attempt import StartDamaged
from cairn.launch.exits import RayFailed, RoleFailed
from cairn.launch.process import log_end
from cairn.launch.rank_place import RankPlace
from cairn.launch.rank_process import RankProcess
from cairn.launch.ray_cluster import Placement, end_ray, start_ray
from cairn.launch.restarts import RestartRule
from cairn.launch.spares import Spares
from cairn.run import heartbeat
from cairn.run.attempt import Attempt, Outcome
from cairn.run.directory import RunDirectory
from cairn.run.errors import CairnError, UsageError
from cairn.run.metrics import MetricsLog
from cairn.run.waiting import Patience

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
SETTLED_STEPS = 2
"""After so many steps the ranks have all their memory, and a spare is less in their way."""
SETTLE_SECONDS = 5.0
"""How long the others have, once a rank has failed, for noticing it and leaving."""


@dataclass
class _Ended:
    """How the ranks' work ended so far."""

    outcomes: dict[int, Outcome]
    dead: dict[int, str]
    errors: list[CairnError]
    damaged: Damaged | None = None
    """What they could not load."""

    @property
    def broken(self) -> bool:
        """Whether the ranks can't come to a good end any more."""
        return bool(self.dead or self.errors)


class _RanksDied(Exception):
    """Some ranks died, by number and for what reason; others can't be woken."""

    def __init__(self, dead: dict[int, str], stuck: Collection[int] = ()):
        super().__init__(dead)
        self.dead = dead
        self.stuck = stuck


class Ranks:
    """The trainer's ranks and their spares. Use as a context manager, in which Ray runs.

    Args:
        config: of the trainer; its model is resolved.
        run: the run's directory.
    """

    def __init__(self, config: TrainerBase, run: RunDirectory):
        self.config = config
        self.run = run
        self.spares = Spares(config, run)
        self.standbys = Spares(config, run, "trainer_standby")
        """Started ahead of the ranks, for a driver that is a standby itself."""
        self._ranks = [RankPlace(number, run) for number in range(config.workers)]
        self._reserved: Placement | None = None
        self._rule = RestartRule(config.max_restarts)
        self._metrics = MetricsLog(run.metrics.path)
        self._step = -1
        self._vacated: dict[int, str] = {}
        """Why ranks have died whose places were filled again since, or will be."""

    def __enter__(self) -> Self:
        heartbeat.doing("starting Ray")
        start_ray(self.config)
        return self

    def __exit__(self, *_: object) -> None:
        end_ray(self.config)

    def train(self, newest: Callable[[], Attempt]) -> Outcome:
        """Train to the end, through the deaths of workers; returns what rank 0 says of it.

        A worker that dies when the run was asked to stop is not replaced.

        Args:
            newest: what to go on from, asked whenever the ranks start.

        Raises:
            StartDamaged: the checkpoint to go on from is damaged.
            RoleFailed: a worker could not be placed, raised an error, or workers died too often.
            RayFailed: Ray itself failed.
        """
        try:
            self._reserved = Placement(self.config)
            while True:
                heartbeat.doing("looking for the newest good checkpoint")
                attempt = newest()
                self.run.history.recompute(self.run.metrics.keep_through(attempt.start_step))
                try:
                    self._fill()
                    return self._train(attempt)
                except _RanksDied as died:
                    self._vacate(died)
                    if self.run.stop_requested():
                        step = self._newest_step()
                        saved = CheckpointStore(self.run.checkpoints).exists(step)
                        return Outcome(step, "a rank died when the run was asked to stop", saved)
                    self._wait_after(died)
        except GetTimeoutError:
            raise RoleFailed(
                f"waited {self.config.ray.start_timeout:g} s for the trainer's workers to start; "
                "ray.start_timeout allows more"
            ) from None
        except RayError as error:
            raise RayFailed(f"Ray failed: {type(error).__name__}: {error}") from None

    @property
    def _placement(self) -> Placement:
        assert self._reserved is not None  # by `train`
        return self._reserved

    def _fill(self) -> None:
        """Have a process in every rank's place.

        Raises:
            _RanksDied: one died before it could begin.
        """
        heartbeat.doing("starting workers", waiting=True)
        for rank in self._ranks:
            if not rank.is_empty:
                continue
            if spare := self._spare_for(rank):
                rank.fill(spare, "is replaced by a spare")
            else:
                rank.fill(self._placement.start(rank.number, rank.log), "is started again")
        for rank in self._ranks:
            try:
                rank.wait_started(self.config.ray.start_timeout)
            except ActorDiedError:
                raise _RanksDied({rank.number: "died while it started"}) from None
        for rank in self._ranks:
            if not rank.how:
                continue
            rank.note_state("running")
            if reason := self._vacated.pop(rank.number, None):
                rank.note_restart(reason, rank.how, step=self._step)
            rank.how = ""

    def _spare_for(self, rank: RankPlace) -> RankProcess | None:
        """A spare on the rank's node, with the rank's GPU in reach."""
        if rank.node is None and (self.config.ray.address or self._placement.gpus):
            return None  # the place has had no occupant, so its node is not known
        return self.standbys.take(rank.node) or self.spares.take(rank.node)

    def _train(self, attempt: Attempt) -> Outcome:
        """Train from `attempt` on, with all places filled.

        Raises:
            StartDamaged: they can't load what `attempt` goes on from.
            _RanksDied: some died.
            RoleFailed: one raised an error.
            UsageError: one refused what the user asked for.
        """
        heartbeat.doing("gathering the ranks", waiting=True)
        try:
            meeting_place = self._ranks[0].occupant.meeting_place(self.config.ray.start_timeout)
        except ActorDiedError:
            raise _RanksDied({0: "died while it started"}) from None
        pending = {rank.train(meeting_place, self.config, attempt): rank for rank in self._ranks}
        ended = _Ended({}, {}, [])
        settling: Patience | None = None
        while pending and not (settling and settling.over):
            # Not for ever at once, so that a signal is seen in between.
            done, _ = ray.wait(list(pending), num_returns=1, timeout=POLL_SECONDS)
            for future in done:
                _collect(future, pending.pop(future), ended)
            if ended.broken and settling is None:
                settling = Patience(SETTLE_SECONDS)
            if ended.dead and self._placement.gpus:
                break  # nothing wakes a rank that waits in a collective on a GPU
            heartbeat.doing("watching the ranks")
            for rank in pending.values():
                rank.look_after()
            if not ended.broken and self._newest_step() >= attempt.start_step + SETTLED_STEPS:
                self.spares.tend()
        if ended.damaged and attempt.resume_from:
            raise StartDamaged(Path(attempt.resume_from), str(ended.damaged))
        if ended.dead:
            on_gpu = self._placement.gpus > 0
            raise _RanksDied(ended.dead, [r.number for r in (self._ranks if on_gpu else pending.values())])
        if ended.errors:
            raise ended.errors[0]
        outcome = ended.outcomes[0]
        for rank in self._ranks:
            rank.note_state("stopped" if outcome.stopped else "done")
        return outcome

    def _vacate(self, died: _RanksDied) -> None:
        """Make sure that they are dead, and make room for the next."""
        for number in {*died.dead, *died.stuck}:
            self._ranks[number].vacate()
        self._vacated |= died.dead
        for number, reason in died.dead.items():
            logger.warning("trainer rank %d %s", number, reason)

    def _wait_after(self, died: _RanksDied) -> None:
        """Wait as long as the rule for restarts says.

        Raises:
            RoleFailed: workers died too often.
        """
        wait = self._rule.wait_after_death(self._newest_step())
        if wait is None:
            number, reason = next(iter(died.dead.items()))
            log = self._ranks[number].log
            raise RoleFailed(f"trainer rank {number} {reason}; the end of {log}:\n{log_end(log)}")
        heartbeat.doing("waiting before workers are started again", waiting=True)
        time.sleep(wait)

    def _newest_step(self) -> int:
        rows = self._metrics.new_rows()
        self._step = rows[-1]["step"] if rows else self._step
        return self._step


def _collect(future: "ray.ObjectRef[Any]", rank: RankPlace, ended: _Ended) -> None:
    """Note how a rank's work ended: well, with an error (perhaps because another died), or in its death."""
    try:
        ended.outcomes[rank.number] = ray.get(future)
    except RayTaskError as error:
        from cairn.checkpoint.arena import WriterDied  # which imports torch

        cause = error.cause
        if isinstance(cause, WriterDied):
            ended.dead[rank.number] = f"lost its writer of checkpoints ({cause})"
            return
        if isinstance(cause, UsageError):
            ended.errors.insert(0, cause)
            return
        if isinstance(cause, Damaged):
            ended.damaged = cause
        message = f"trainer rank {rank.number}: {type(cause).__name__}: {cause}\n(log: {rank.log})"
        ended.errors.append(RoleFailed(message))
    except RayError as error:
        known = isinstance(error, ActorDiedError)
        died = "died" if known else f"died ({type(error).__name__})"
        ended.dead[rank.number] = f"hung ({rank.hung})" if rank.hung else died
