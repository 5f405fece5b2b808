"""Taking up a run: brings the ledger, the batch files and the checkpoint into agreement.

docs/concepts/records.md ("Which record counts") says which of them wins when two disagree.
"""

import logging
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cairn.checkpoint.manifest import Damaged
from cairn.checkpoint.step_folder import LEDGER, ORCHESTRATOR_STATE, OrchestratorRecord, StepFolder
from cairn.checkpoint.store import CheckpointStore
from cairn.config.orchestrator import OrchestratorConfig
from cairn.config.teachers import is_served
from cairn.orchestrator.ledger import FORMAT, Ledger, LedgerRun, to_ranges
from cairn.orchestrator.prompts.sources import PromptSource, problems_of
from cairn.orchestrator.servers import PolicyServers
from cairn.orchestrator.state import OrchestratorState, ShippedSteps, ShippingProgress
from cairn.run.changes import Change
from cairn.run.directory import RunDirectory
from cairn.run.errors import UsageError
from cairn.run.faults import fault_point
from cairn.run.files import read_json, read_note, write_json
from cairn.run.messages import Attempt, ShippedBatch
from cairn.run.recipe import plain

logger = logging.getLogger(__name__)


def take_up(
    config: OrchestratorConfig, attempt: Attempt, sources: list[PromptSource], servers: PolicyServers
) -> OrchestratorState:
    """Take up the run at the step that `attempt` starts from, plus what the ledger has recorded since.

    Raises:
        CheckpointError: the checkpoint's ledger can't be read.
        Damaged: the checkpoint's record of the orchestrator's progress is unusable.
    """
    run = config.run_directory()
    store = CheckpointStore(run.checkpoints)
    step = StepFolder(attempt.resume_from) if attempt.resume_from else None
    recipe = read_json(run.recipe, dict[str, Any]) or {}
    ledger = Ledger(
        run.ledger,
        _whose_ledger(config, attempt, sources),
        step and step.ledger,
        attempt.start_step,
        again="recipe" if recipe.get("prompts_again") else None,  # for them, the run has begun a new branch
    )
    shipped = ShippedSteps(_saved_progress(step) if step else ShippingProgress())
    while (batch := _shipped_already(shipped.newest.step + 1, attempt, run, store, ledger)) is not None:
        shipped.add(batch)
    note_lost(run, attempt, ledger.shipped_after(shipped.newest.step))  # before the ledger forgets it
    ledger.unship_after(shipped.newest.step)
    own = recipe.get("orchestrator", {})
    state = OrchestratorState(config, attempt, run, store, own, sources, servers, ledger, shipped)
    state.rollouts.forget_after(shipped.newest.step)
    return state


def first_policy(config: OrchestratorConfig, attempt: Attempt) -> Path:
    """Hugging Face directory of the policy that the attempt starts from."""
    return StepFolder(attempt.resume_from).model if attempt.resume_from else Path(config.model.name)


def _whose_ledger(config: OrchestratorConfig, attempt: Attempt, sources: list[PromptSource]) -> LedgerRun:
    return LedgerRun(
        run_id=attempt.run_id,
        branch=attempt.branch,
        format=FORMAT,
        seed=config.seed,
        problems=problems_of(sources),
        prompts_per_step=config.prompts_per_step,
        samples_per_prompt=config.samples_per_prompt,
        max_off_policy_steps=config.max_off_policy_steps,
        portions=tuple(source.portion for source in sources),
        remembered=tuple(source.config.pools.remembered for source in sources),
    )


def _saved_progress(step: StepFolder) -> ShippingProgress:
    saved = step.orchestrator_state()
    if saved is None or not saved.progress:
        raise Damaged(f"{step.path / ORCHESTRATOR_STATE}: the orchestrator's progress is missing or invalid")
    return ShippingProgress(**saved.progress)


def _shipped_already(
    step: int, attempt: Attempt, run: RunDirectory, store: CheckpointStore, ledger: Ledger
) -> ShippedBatch | None:
    """The batch of `step`, if it was shipped: its file exists, or is no longer needed since a checkpoint."""
    noted = ledger.shipped(step)
    batch = run.batch(attempt, step)
    if batch is None:
        return noted if (store.latest() or 0) >= step else None
    header = batch.header
    if noted != header.ledger:  # killed before noting the file, or an edited ledger
        if noted is not None:
            logger.warning("the ledger's row of batch %d differs from the batch file; the file counts", step)
        places = [place for first, last in header.ledger.places for place in range(first, last + 1)]
        ledger.ship(header.ledger, dict(zip(places, header.problems, strict=True)))
    return header.ledger


# The orchestrator's part of a checkpoint: its progress and the ledger.


def _environments(state: OrchestratorState) -> dict[str, Any]:
    """The settings of the run's environments, for a checkpoint."""
    config = state.config
    if config.environments:
        return {"environments": [one.model_dump() for one in config.environments]}
    return {"environment": config.environment.model_dump()}


async def save_part(state: OrchestratorState, step: int) -> None:
    """Write the orchestrator's part of checkpoint `step`; the trainer commits it."""
    progress = state.shipped.at(step)
    if progress is None or state.store.has_part(step, "orchestrator", state.attempt.id):
        return  # an earlier process of this attempt has written it
    problems = problems_of(state.sources)
    epoch, position = divmod(progress.total_problems, problems)
    record = OrchestratorRecord(
        progress=asdict(progress),
        seed=state.config.seed,
        recipe=state.recipe,
        prompts={
            **_environments(state),
            "problems": problems,
            "epoch": epoch,
            "position": position,
        },
    )
    files = {ORCHESTRATOR_STATE: record.to_json(), LEDGER: state.ledger.snapshot()}
    ckpt = state.config.ckpt
    read_back = ckpt is not None and ckpt.verify == "save"

    def write() -> None:
        state.store.begin(step, ["orchestrator"])
        fault_point("orchestrator.before_part")
        state.rollouts.flush()
        state.store.write_part(step, "orchestrator", files, state.attempt.id, read_back=read_back)

    await state.disk.do(write)


# Batches that were shipped and are made again from the answers in the ledger, since their files are gone.


ACCEPT = "batches"
"""What `--ckpt.accept-changes` calls another batch than the one that was shipped."""
OF_SAMPLES = ("advantage", "overlong", "router_replay")
"""Settings that say how answers become samples."""


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
