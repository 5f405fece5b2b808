"""Keeps the trainer's ranks going: a dead rank is replaced while the driver and the other ranks stay.

The surviving ranks leave the process group, a spare or a new worker takes the dead rank's slot, and all
ranks form a new group, load the newest good checkpoint and continue from there.
"""

import contextlib
import logging
import os
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError, RayTaskError
from ray.util import get_node_ip_address

from cairn.checkpoint.manifest import Damaged
from cairn.checkpoint.memory.memory_owners import free, hold
from cairn.checkpoint.memory.memory_slots import forget, record_of
from cairn.checkpoint.store import CheckpointStore
from cairn.config.trainer import TrainerBase
from cairn.launch.ray.cluster import cluster_ranks, end_ray, start_ray
from cairn.launch.ray.placement import ClusterPlacement
from cairn.launch.ray.worker import Assignment, RankProcess, RayProcess
from cairn.launch.start import StartDamaged
from cairn.launch.supervise.spares import Spares
from cairn.run import heartbeat
from cairn.run.directory import RunDirectory
from cairn.run.errors import CairnError, OutOfMemory, UsageError
from cairn.run.exits import RayFailed, RoleFailed
from cairn.run.messages import Attempt, Outcome
from cairn.run.metrics import MetricsLog
from cairn.run.processes import log_end
from cairn.run.supervised import RestartRule, Watched
from cairn.run.waiting import Patience


class RankSlot(Watched):
    """One rank of the trainer. Its node and GPU belong to the slot: they stay the same after a restart."""

    def __init__(self, number: int, run: RunDirectory):
        log = run.logs / ("trainer.log" if number == 0 else f"trainer_rank{number}.log")
        name = f"trainer_rank{number}"
        super().__init__(name, log, run.heartbeat(name))
        self.run = run
        self.number = number
        self.node: str | None = None
        self.gpu: str | None = None
        self.how = ""
        """How the newest worker got the slot, for history.jsonl; empty once that is recorded."""
        self.hung: str | None = None
        """Why the worker counted as hung, if it was killed for that."""
        self._worker: RankProcess | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is no worker: between a death and the next start."""
        return self._worker is None

    @property
    def worker(self) -> RankProcess:
        """The worker that has the rank; call it only if there is one."""
        assert self._worker is not None
        return self._worker

    def fill(self, worker: RankProcess, how: str) -> None:
        """Give the slot to a worker."""
        self._worker, self.how = worker, how

    def wait_started(self, seconds: float) -> None:
        """If the worker is a new process, wait until it has started."""
        about = self.worker.wait_started(seconds)
        self.node = about.node
        self.gpu = about.gpu or self.gpu

    def train(
        self, meeting_place: tuple[str, int], config: TrainerBase, attempt: Attempt, neighbours: int
    ) -> "ray.ObjectRef[Any]":
        """Have the worker train, and watch its heartbeat; the future returns its `Outcome`.

        neighbours: ranks on this one's node, itself included.
        """
        self.hung = None
        silence, standstill = config.heartbeat_timeout, config.hang_timeout
        self.watch_over(self._about.pid, silence=silence, standstill=standstill)
        address, port = meeting_place
        rank = Assignment(
            self.number,
            config.ranks,
            neighbours,
            address,
            port,
            gpu=self.gpu,
            name=self.name,
            log=str(self.log),
            launcher=os.getppid(),
        )
        return self.worker.train(rank, config, attempt)

    def look_after(self) -> None:
        """Kill the worker if it hangs; Ray reports its death soon after."""
        if self.hung is None and (problem := self.hang()):
            self.hung = problem
            self.worker.kill()

    def vacate(self) -> RankProcess | None:
        """Kill the worker, if there is one, and empty the slot; returns the worker."""
        if (worker := self._worker) is None:
            return None
        with contextlib.suppress(RayError):
            worker.kill()
        if worker.about:
            self.note_state("failed")
        self._worker = None
        return worker

    def note_state(self, state: str) -> None:
        """Record the worker's state in roles.json; it must have started."""
        self.run.set_role(self.name, state, self._about.pid, self._about.host)

    @property
    def _about(self) -> RayProcess:
        about = self.worker.about
        assert about is not None
        return about


logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
SETTLED_STEPS = 2
"""A spare is started after this many steps: by then the ranks have allocated all their memory."""
SETTLE_SECONDS = 20.0
"""Seconds that the other ranks have, after one failed, to notice it and leave the process group.

It is also how long Ray has to report a death after another rank has noticed it: on a busy machine, seconds.
"""


@dataclass
class _Ended:
    """How the work of the ranks has ended so far."""

    outcomes: dict[int, Outcome]
    dead: dict[int, str]
    errors: list[CairnError]
    final: CairnError | None = None
    """An error of a rank's own, which would recur, whatever became of the other ranks."""
    damaged: Damaged | None = None
    """The error of a rank that could not load the checkpoint."""

    @property
    def broken(self) -> bool:
        """Whether the ranks can't finish any more."""
        return bool(self.dead or self.errors or self.final)


class _RanksDied(Exception):
    """Some ranks died, by number with reasons; `stuck` ranks wait in a collective and must be killed."""

    def __init__(self, dead: dict[int, str], stuck: Collection[int] = ()):
        super().__init__(dead)
        self.dead = dead
        self.stuck = stuck


class Ranks:
    """The trainer's ranks and their spares, as a context manager around the Ray connection.

    Args:
        config: the trainer's configuration, with a resolved model.
        run: the run directory.
        taken: names of this machine's GPUs that a server of the run uses.
    """

    def __init__(self, config: TrainerBase, run: RunDirectory, taken: Collection[str] = ()):
        self.config = config
        self.run = run
        self.spares = Spares(config, run)
        self.standbys = Spares(config, run, "trainer_standby")
        """Spares started ahead of the ranks, by a driver that is itself a standby."""
        self._taken = taken
        self._ranks: list[RankSlot] = []
        self._reserved: ClusterPlacement | None = None
        self._rule = RestartRule(config.max_restarts)
        self._metrics = MetricsLog(run.metrics.path)
        self._step = -1
        self._vacated: dict[int, str] = {}
        """Why ranks died whose slots have been, or will be, filled again."""

    def __enter__(self) -> Self:
        heartbeat.doing("starting Ray")
        start_ray(self.config)
        count = cluster_ranks(self.config)
        self.config = self.config.model_copy(update={"workers": count})
        self._ranks = [RankSlot(number, self.run) for number in range(count)]
        return self

    def __exit__(self, *_: object) -> None:
        end_ray(self.config)

    def start_early(self) -> None:
        """Start the workers while the run may still be refused: they import, and write nothing."""
        self._reserved = ClusterPlacement(self.config)
        for rank in self._ranks:
            worker = self._reserved.start(rank.number, Path(os.devnull))
            worker.import_early()
            rank.fill(worker, "is started again")

    def train(self, newest: Callable[[], Attempt]) -> Outcome:
        """Train to the end, replacing workers that die; returns rank 0's outcome.

        A worker that dies after the run was asked to stop is not replaced.

        Args:
            newest: returns what to resume from; called whenever the ranks start.

        Raises:
            StartDamaged: the checkpoint to resume from is damaged.
            RoleFailed: a worker could not be placed, raised an error, or workers died too often.
            UsageError: the Ray cluster is too small, or a rank refused a setting or the data.
            OutOfMemory: the memory of a rank's GPU does not suffice.
            RayFailed: Ray itself failed.
        """
        try:
            self._reserved = self._reserved or ClusterPlacement(self.config)
            self._hold_memory()
            while True:
                heartbeat.doing("looking for the newest good checkpoint")
                attempt = newest()
                self.run.history.recompute(*self.run.metrics.keep_through(attempt.start_step))
                try:
                    self._fill()
                    return self._train(attempt)
                except _RanksDied as died:
                    self._vacate(died)
                    if self.run.stop_requested():
                        step = self._newest_step()
                        saved = CheckpointStore(self.run.checkpoints).exists(step)
                        return Outcome(step, "a rank died after the run was asked to stop", saved)
                    self._wait_after(died)
        except GetTimeoutError:
            raise RoleFailed(
                f"waited {self.config.ray.start_timeout:g} s for the trainer's workers to start; "
                "ray.start_timeout allows more"
            ) from None
        except RayError as error:
            raise RayFailed(f"Ray failed: {type(error).__name__}: {error}") from None

    def _hold_memory(self) -> None:
        """Start what ends with the launcher, if steps are kept in memory on nodes of a given cluster."""
        ckpt = self.config.ckpt
        if ckpt and ckpt.memory_interval and self.config.ray.address:
            try:
                hold(self.run.memory, os.getppid(), get_node_ip_address())
            except (OSError, subprocess.SubprocessError) as error:
                logger.warning("no step can be kept in memory on nodes (ckpt.memory_interval): %s", error)

    @property
    def _placement(self) -> ClusterPlacement:
        assert self._reserved is not None  # by `train`
        return self._reserved

    def _fill(self) -> None:
        """Fill every empty slot with a spare or a new worker.

        Raises:
            _RanksDied: a worker died while starting.
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
            self._check_gpu(rank)
        for rank in self._ranks:
            if not rank.how:
                continue
            rank.note_state("running")
            if reason := self._vacated.pop(rank.number, None):
                self.run.history.restart(rank.name, step=self._step, reason=reason, how=rank.how)
            rank.how = ""

    def _check_gpu(self, rank: RankSlot) -> None:
        """Check that a rank's GPU, which a given Ray cluster has chosen, is not the server's.

        Raises:
            UsageError: it is.
        """
        about, address = rank.worker.about, self.config.ray.address
        if address and rank.gpu in self._taken and about and about.host == socket.gethostname():
            raise UsageError(
                f"the Ray cluster at {address} gave trainer rank {rank.number} GPU {rank.gpu}, which the "
                "run's server uses: start Ray here with CUDA_VISIBLE_DEVICES naming the other GPUs, "
                "or choose other ones for the server with --inference.gpus"
            )

    def _places_of_spares(self) -> list[str | None]:
        """The nodes on which spares are kept; None: any. On GPUs all ranks start anew when one has died."""
        places: list[str | None] = [None]
        if self._placement.gpus:
            places = [rank.node for rank in self._ranks]
        return places * self.config.spare_workers

    def _spare_for(self, rank: RankSlot) -> RankProcess | None:
        """A spare on the rank's node that can use the rank's GPU, if there is one."""
        if rank.node is None and (self.config.ray.address or self._placement.gpus):
            return None  # the slot never had a worker, so its node is unknown
        return self.standbys.take(rank.node) or self.spares.take(rank.node)

    def _train(self, attempt: Attempt) -> Outcome:
        """Train from `attempt`, with all slots filled.

        Raises:
            StartDamaged: the ranks can't load the checkpoint of `attempt`.
            _RanksDied: some ranks died.
            RoleFailed: a rank raised an error.
            UsageError: a rank refused a setting or the data.
            OutOfMemory: the memory of a rank's GPU does not suffice.
        """
        heartbeat.doing("gathering the ranks", waiting=True)
        try:
            meeting_place = self._ranks[0].worker.meeting_place(self.config.ray.start_timeout)
        except ActorDiedError:
            raise _RanksDied({0: "died while it started"}) from None
        there = Counter(rank.node for rank in self._ranks)
        pending = {
            rank.train(meeting_place, self.config, attempt, there[rank.node]): rank for rank in self._ranks
        }
        ended = _Ended({}, {}, [])
        settling: Patience | None = None
        while pending and not (settling and settling.over):
            # With a timeout, so that signals are handled in between.
            done, _ = ray.wait(list(pending), num_returns=1, timeout=POLL_SECONDS)
            for future in done:
                rank = pending.pop(future)
                _collect(future, rank, ended, beside_server=self._server_may_be_awake(attempt))
                if rank.number in ended.dead:
                    rank.note_state("failed")  # which ranks that wait for its part of a save look at
            if ended.broken and settling is None:
                settling = Patience(SETTLE_SECONDS)
            if (ended.dead or ended.final) and self._placement.gpus:
                break  # a rank that waits in a collective on a GPU can't be woken
            heartbeat.doing("watching the ranks")
            for rank in pending.values():
                rank.look_after()
            if not ended.broken and self._newest_step() >= attempt.start_step + SETTLED_STEPS:
                self.spares.tend(self._places_of_spares())
        if ended.damaged and attempt.resume_from and record_of(Path(attempt.resume_from)):
            logger.warning("the step in memory can't be loaded: %s", ended.damaged)
            forget(Path(attempt.resume_from))
            raise _RanksDied({0: "could not load a step that was in memory"})
        if ended.damaged and attempt.resume_from:
            raise StartDamaged(Path(attempt.resume_from), str(ended.damaged))
        if ended.final:
            raise ended.final
        if ended.dead:
            on_gpu = self._placement.gpus > 0
            raise _RanksDied(ended.dead, [r.number for r in (self._ranks if on_gpu else pending.values())])
        if ended.errors:
            raise ended.errors[0]
        outcome = ended.outcomes[0]
        free(self.run.memory)
        for rank in self._ranks:
            rank.note_state("stopped" if outcome.stopped else "done")
        return outcome

    def _vacate(self, died: _RanksDied) -> None:
        """Make sure that the dead and stuck ranks are gone, and empty their slots."""
        killed = [self._ranks[number].vacate() for number in {*died.dead, *died.stuck}]
        for worker in filter(None, killed if self._placement.gpus else ()):
            worker.wait_ended()  # a spare would at once take the memory of the GPU
        self._vacated |= died.dead
        for number, reason in died.dead.items():
            logger.warning("trainer rank %d %s", number, reason)

    def _wait_after(self, died: _RanksDied) -> None:
        """Wait as the restart rule says.

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

    def _server_may_be_awake(self, attempt: Attempt) -> bool:
        """Whether a server that shares the ranks' GPU may hold its memory now, with `--colocate`."""
        return self.config.shares_gpu and self.run.versions.trainers_turn(attempt) is None

    def _newest_step(self) -> int:
        rows = self._metrics.new_rows()
        self._step = rows[-1]["step"] if rows else self._step
        return self._step


def _collect(future: "ray.ObjectRef[Any]", rank: RankSlot, ended: _Ended, *, beside_server: bool) -> None:
    """Record how a rank's work ended: normally, with an error (perhaps because another died), or by death.

    Args:
        beside_server: whether a server on the rank's GPU may hold memory that a rank gets in its own turn.
    """
    try:
        ended.outcomes[rank.number] = ray.get(future)
    except RayTaskError as error:
        from cairn.checkpoint.saving.arena import WriterDied  # which imports torch

        cause = error.cause
        if isinstance(cause, WriterDied):
            ended.dead[rank.number] = f"lost its checkpoint writer ({cause})"
            return
        if isinstance(cause, UsageError):
            ended.final = cause
            return
        if isinstance(cause, OutOfMemory) and beside_server:
            ended.dead[rank.number] = f"ran out of memory beside an awake server ({cause})"
            return
        if isinstance(cause, OutOfMemory):
            ended.final = OutOfMemory(f"trainer rank {rank.number}: {cause}\n(log: {rank.log})")
            return
        if isinstance(cause, Damaged):
            ended.damaged = cause
        message = f"trainer rank {rank.number}: {type(cause).__name__}: {cause}\n(log: {rank.log})"
        ended.errors.append(RoleFailed(message))
    except RayError as error:
        known = isinstance(error, ActorDiedError)
        died = "died" if known else f"died ({type(error).__name__})"
        ended.dead[rank.number] = f"hung ({rank.hung})" if rank.hung else died
