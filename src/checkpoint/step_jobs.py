"""Work on a run's steps while it trains, such as exports and uploads: what is due, done, failed and spared.

A job reads all of it from files, so that the trainer, the launcher, the job's own process and `ckpt` agree,
whoever is killed.
"""

import abc
import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from cairn.checkpoint.retention import OF_SPIKES, WAITING, Spare
from cairn.checkpoint.store import CheckpointStore
from cairn.run.history import PREFIX, History, spared_for_rewinds
from cairn.run.jsonlines import as_object

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Hold:
    """Steps that retention would delete although a job still needs them.

    kept: they are spared for now. missed: too many others are.
    """

    kept: frozenset[int] = frozenset()
    missed: frozenset[int] = frozenset()


class StepJob(abc.ABC):
    """One kind of work on the steps in a store.

    Args:
        max_waiting: how many steps retention spares while they wait.
    """

    done: ClassVar[str]
    """What a step is then: exported, uploaded."""
    all_together: ClassVar[float] = 0.0
    """Seconds between two warnings about steps that retention deletes undone; 0: one for each step."""

    def __init__(self, store: CheckpointStore, max_waiting: int):
        self.store = store
        self.max_waiting = max_waiting

    @abc.abstractmethod
    def due(self, steps: Iterable[int]) -> list[int]:
        """Those of `steps` on which the work has to be done, oldest first."""

    @abc.abstractmethod
    def missing(self) -> list[int]:
        """The steps in the store on which the work has to be done and is not, oldest first."""

    @abc.abstractmethod
    def waiting(self) -> list[int]:
        """The missing steps on which it may still be done in this attempt of the run, oldest first."""

    @abc.abstractmethod
    def newest_done(self) -> int:
        """The newest step on which it is done; 0 if there is none."""

    @abc.abstractmethod
    def give_up(self, reason: str) -> None:
        """Note that nothing more is done in this attempt of the run."""

    @abc.abstractmethod
    def by_worth(self, waiting: Collection[int]) -> list[int]:
        """The waiting steps in the order in which retention spares them."""

    @abc.abstractmethod
    def why_missed(self, spared: int, others: int) -> str:
        """Why retention deletes a waiting step, and `others` before it, while it spares `spared` steps."""

    @abc.abstractmethod
    def note_missed(self, history: History, step: int, reason: str) -> None:
        """Record in the run's history that the work is not done on a step."""

    def hold(self, unkept: Collection[int]) -> Hold:
        """What retention must spare of the steps that it would delete, and what it need not."""
        waiting = [step for step in self.by_worth(self.waiting()) if step in unkept]
        return Hold(frozenset(waiting[: self.max_waiting]), frozenset(waiting[self.max_waiting :]))

    def spared(self, unkept: Collection[int]) -> Collection[int]:
        """The steps that stay although no rule keeps them: a `retention.Spare`."""
        return self.hold(unkept).kept

    def is_behind(self) -> bool:
        """Whether retention may have to give up a step, because so many wait."""
        return len(self.waiting()) >= max(1, self.max_waiting)


class StepJobs:
    """All jobs of a run, as retention asks them.

    Args:
        others: what else needs steps, such as the guard against spikes.
        history: where steps are recorded that retention deletes although they wait; None: nothing is said.
    """

    def __init__(self, jobs: Sequence[StepJob], others: Sequence[Spare] = (), history: History | None = None):
        self.jobs = jobs
        self._others = others
        self._reports = [_Report(job, history) for job in jobs] if history is not None else []

    def spared(self, unkept: Collection[int]) -> Collection[int]:
        """The steps that stay although no rule keeps them: a `retention.Spare`."""
        spares = [report.spared for report in self._reports] or [job.spared for job in self.jobs]
        return {step for spare in (*spares, *self._others) for step in spare(unkept)}

    def metrics(self) -> Mapping[str, float]:
        """How many steps waited, and how many of them no rule kept, when the newest step was committed."""
        return {name: value for report in self._reports for name, value in report.metrics().items()}


def spares_of(
    config: Mapping[str, Any], store: CheckpointStore, jobs: Sequence[StepJob], interval: int | None
) -> dict[str, Spare]:
    """Which steps that no rule keeps a run still needs, by the reason, for whoever looks at its steps.

    They wait for one of its jobs, or are what a spike in the next step goes back to.

    Args:
        config: the content of its config.json.
        interval: its `ckpt.interval`.
    """
    found: dict[str, Spare] = {WAITING: StepJobs(jobs).spared}
    spike = as_object(as_object(config.get("trainer") or config).get("spike"))
    if spike.get("on_spike") == "rewind" and interval:
        found[OF_SPIKES] = lambda unkept: spared_for_rewinds(unkept, store.latest() or 0, interval)
    return found


class _Report:
    """Says which steps stay for a job, and which retention deletes although they wait."""

    def __init__(self, job: StepJob, history: History):
        self._job = job
        self._history = history
        self._waiting = 0
        self._spared: frozenset[int] = frozenset()
        self._missed: list[int] = []
        """Steps that are not reported yet."""
        self._say_at = 0.0

    def spared(self, unkept: Collection[int]) -> Collection[int]:
        job = self._job
        self._waiting = len(job.waiting())
        hold = job.hold(unkept)
        for step in sorted(hold.kept - self._spared):
            logger.info("step %d stays until it is %s, although no rule keeps it", step, job.done)
        self._missed += sorted(hold.missed)
        if not job.all_together:
            while self._missed:
                self._say(self._missed.pop(0), job.why_missed(len(hold.kept), 0))
        elif self._missed and time.monotonic() >= self._say_at:
            self._say_at = time.monotonic() + job.all_together
            self._say(self._missed[-1], job.why_missed(len(hold.kept), len(self._missed) - 1))
            self._missed = []
        self._spared = hold.kept
        return hold.kept

    def _say(self, step: int, reason: str) -> None:
        logger.warning("step %d is not %s: %s", step, self._job.done, reason)
        self._job.note_missed(self._history, step, reason)

    def metrics(self) -> Mapping[str, float]:
        name = self._job.done.removesuffix("ed") + "s"
        return {
            f"{PREFIX}{name}_waiting": self._waiting,
            f"{PREFIX}{name}_spared": len(self._spared),
        }
