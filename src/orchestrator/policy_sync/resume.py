"""Taking up a run: brings the ledger, the batch files and the checkpoint into agreement.

docs/recovery.md ("Which record counts") says which of them wins when two disagree.
"""

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cairn.checkpoint.manifest import Damaged
from cairn.checkpoint.step_folder import LEDGER, ORCHESTRATOR_STATE, OrchestratorRecord, StepFolder
from cairn.checkpoint.store import CheckpointStore
from cairn.config.orchestrator import OrchestratorConfig
from cairn.orchestrator.ledger import FORMAT, Ledger, LedgerRun
from cairn.orchestrator.policy_sync.remade_batches import note_lost
from cairn.orchestrator.prompts.sources import PromptSource, problems_of
from cairn.orchestrator.servers import PolicyServers
from cairn.orchestrator.state import OrchestratorState, ShippedSteps, ShippingProgress
from cairn.run.directory import RunDirectory
from cairn.run.faults import fault_point
from cairn.run.files import read_json
from cairn.run.messages import Attempt, ShippedBatch

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
