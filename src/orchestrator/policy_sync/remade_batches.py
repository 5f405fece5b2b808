"""Batches that were shipped and are made again from the answers in the ledger, since their files are gone.

The ledger has the digest of each batch. If all answers of such a batch are kept, and nothing that turns
answers into samples was changed, the batch must have that digest again: SQLite has no checksums, so an answer
may have become another one.
"""

import logging
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from cairn.config.teachers import is_served
from cairn.orchestrator.ledger import to_ranges
from cairn.orchestrator.state import OrchestratorState
from cairn.run.changes import Change
from cairn.run.directory import RunDirectory
from cairn.run.errors import UsageError
from cairn.run.files import read_json, read_note, write_json
from cairn.run.messages import Attempt, ShippedBatch
from cairn.run.recipe import plain

logger = logging.getLogger(__name__)

ACCEPT = "batches"
"""What `--ckpt.accept-changes` calls another batch than the one that was shipped."""
OF_SAMPLES = ("advantage", "overlong")
"""Settings of the orchestrator that say how answers become samples."""


@dataclass(frozen=True)
class Expected:
    """What batches of a branch are expected to be; the content of a file, which outlives the process."""

    run_id: str
    branch: str
    batches: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


def note_lost(run: RunDirectory, attempt: Attempt, lost: Iterable[ShippedBatch]) -> None:
    """Note what the ledger says of shipped batches before these prompts wait again.

    Args:
        lost: those that are to be made again.
    """
    known = {batch.step: batch for batch in (*_noted(run, attempt), *lost)}
    _write(run, attempt, known.values())


def _noted(run: RunDirectory, attempt: Attempt) -> list[ShippedBatch]:
    """What an earlier process has noted, which may have refused a batch."""
    before = read_note(run.remade, Expected)
    if before is None or (before.run_id, before.branch) != (attempt.run_id, attempt.branch):
        return []
    return [ShippedBatch(**row) for row in before.batches]


def _write(run: RunDirectory, attempt: Attempt, batches: Collection[ShippedBatch]) -> None:
    if batches:
        rows = [asdict(batch) for batch in batches]
        write_json(run.remade, asdict(Expected(attempt.run_id, attempt.branch, rows)), durable=True)
    else:
        run.remade.unlink(missing_ok=True)


class Remade:
    """The batches of the run that are made again, and what they were.

    Args:
        ready: the places whose answers are all kept.
    """

    def __init__(self, state: OrchestratorState, ready: Collection[int]):
        self._state = state
        newest, noted = state.shipped.newest.step, _noted(state.run, state.attempt)
        wanted = [batch for batch in noted if batch.step > newest]
        wanted = [batch for batch in wanted if all(place in ready for place in _places(batch))]
        self._by_step = {batch.step: batch for batch in wanted}
        self._write()

    def forget(self, place: int) -> None:
        """A prompt is issued again, so that its answers, and a batch that has it, will be others."""
        doomed = [step for step, batch in self._by_step.items() if place in _places(batch)]
        for step in doomed:
            del self._by_step[step]
        if doomed:
            self._write()

    def check(self, batch: ShippedBatch) -> None:
        """Compare a batch with the one of its step that was shipped before.

        Other prompts may be in it, as more answers were ready by now than then.

        Raises:
            UsageError: it has the same prompts and answers and is another, and that is not accepted.
        """
        expected = self._by_step.get(batch.step)
        if expected is None or expected.digest == batch.digest:
            return
        if to_ranges(_places(expected)) != to_ranges(_places(batch)):
            logger.warning(
                "batch %d is made of other prompts than when it was shipped before: more answers are there",
                batch.step,
            )
            return
        if reason := self._why_another():
            logger.warning("batch %d is another than the one shipped before: %s", batch.step, reason)
            self._note(expected, batch, accepted=False)
            return
        ckpt = self._state.config.ckpt
        if ckpt is None or ACCEPT not in ckpt.accept_changes:
            raise UsageError(
                f"batch {batch.step}, made again from the answers in {self._state.ledger.path}, is not the "
                f"one that was shipped (digest {batch.digest}, {expected.digest} on record), and no setting "
                "that makes samples of answers has changed: an answer in the ledger is not what was sampled. "
                "To have all prompts since the checkpoint answered again, remove that file and resume with "
                f"--ckpt.resume auto; to train on what it has by now, add --ckpt.accept-changes {ACCEPT}"
            )
        logger.warning("batch %d is another than the one shipped before, as accepted", batch.step)
        self._note(expected, batch, accepted=True)

    def shipped(self, step: int) -> None:
        """The batch of this step has a file again."""
        if self._by_step.pop(step, None):
            self._write()

    def _why_another(self) -> str | None:
        """What explains another digest; None if nothing does."""
        served = [source for source in self._state.config.teachers.values() if is_served(source)]
        if served:
            return f"the logprobs of {served[0]} are not the same bit for bit each time"
        start, changes = self._state.attempt.start_step, self._state.recipe.get("changes", [])
        for change in changes:
            names = plain(change["name"]).split(".")
            if change["step"] == start and set(names) & set(OF_SAMPLES):
                return f"{change['name']} was changed after step {start}"
        return None

    def _note(self, was: ShippedBatch, now: ShippedBatch, *, accepted: bool) -> None:
        """Record it as a change of the run: in its history, and in all later checkpoints."""
        state, step = self._state, self._state.attempt.start_step
        change = Change(f"batches.{now.step}", was.digest, now.digest).at(step, accepted)
        state.run.history.change(change)
        state.recipe["changes"] = [*state.recipe.get("changes", []), change]
        recipe = read_json(state.run.recipe, dict[str, Any]) or {}
        write_json(state.run.recipe, {**recipe, "orchestrator": state.recipe}, durable=True)

    def _write(self) -> None:
        _write(self._state.run, self._state.attempt, self._by_step.values())


def _places(batch: ShippedBatch) -> list[int]:
    return [place for first, last in batch.places for place in range(first, last + 1)]
