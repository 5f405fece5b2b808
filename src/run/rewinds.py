"""The run's record of when its trainer went back to a checkpoint because of a spike.

It is written before the weights change, so a trainer that dies afterwards and repeats the step goes back
again, also where arithmetic that varies would not show it the spike a second time.
"""

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from cairn.run.attempt import Attempt
from cairn.run.files import read_note, write_json


@dataclass(frozen=True)
class Rewind:
    """One return: update `update` (from 0) of step `step` spiked, as `reason` says.

    to: the step whose weights and optimiser state are those of `step`, too. No batch in between, and not that
    of `step`, has changed them.
    """

    step: int
    update: int
    to: int
    reason: str


def rewind_target(step: int, interval: int) -> int:
    """The step that a spike in `step` goes back to: the last one before it that `ckpt.interval` saves.

    Saves for other reasons do not count: a run that was stopped has more of them than one that was not.
    """
    return (step - 1) // interval * interval


def spared_for_rewinds(unkept: Collection[int], newest: int, interval: int) -> set[int]:
    """The step that a spike in the one after `newest` would go back to, if it is in `unkept`."""
    return {rewind_target(newest + 1, interval)} & set(unkept)


@dataclass(frozen=True)
class _Content:
    run_id: str
    branch: str
    rewinds: list[Rewind] = field(default_factory=list[Rewind])


class RewindLog:
    """The file, which rank 0 of the trainer writes."""

    def __init__(self, path: Path):
        self.path = path

    def of(self, attempt: Attempt) -> list[Rewind]:
        """Those of the branch that `attempt` goes on with, in order; none if the file is damaged."""
        content = read_note(self.path, _Content)
        same = content is not None and (content.run_id, content.branch) == (attempt.run_id, attempt.branch)
        return sorted(content.rewinds, key=lambda one: one.step) if content and same else []

    def write(self, attempt: Attempt, rewinds: Sequence[Rewind]) -> None:
        """Replace the record; it is durable when this returns."""
        content = _Content(attempt.run_id, attempt.branch, list(rewinds))
        write_json(self.path, asdict(content), durable=True)

    def forget_after(self, attempt: Attempt) -> None:
        """Forget those of steps after the attempt's start, which will be others now."""
        if self.path.exists():
            self.write(attempt, [one for one in self.of(attempt) if one.step <= attempt.start_step])


def to_json(rewinds: Sequence[Rewind]) -> list[dict[str, int | str]]:
    """What a checkpoint holds of them."""
    return [asdict(one) for one in rewinds]
