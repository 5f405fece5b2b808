"""Taking up a run: brings the ledger, the batch files and the checkpoint into agreement.

docs/recovery.md ("Which record counts") says which of them wins when two disagree.
"""

import logging
from pathlib import Path
from typing import Any

from cairn.checkpoint.manifest import Damaged
from cairn.checkpoint.step import ORCHESTRATOR_STATE, StepFolder
from cairn.checkpoint.store import CheckpointStore
from cairn.config.orchestrator import OrchestratorConfig
from cairn.orchestrator.environments import SingleTurn
from cairn.orchestrator.ledger import FORMAT, Ledger, LedgerRun
from cairn.orchestrator.servers import PolicyServers
from cairn.orchestrator.state import OrchestratorState, ShippedSteps, ShippingProgress
from cairn.run.attempt import Attempt
from cairn.run.directory import RunDirectory
from cairn.run.files import read_json
from cairn.run.messages import ShippedBatch

logger = logging.getLogger(__name__)


def take_up(
    config: OrchestratorConfig, attempt: Attempt, environment: SingleTurn, servers: PolicyServers
) -> OrchestratorState:
    """Take up the run at the step that `attempt` starts from, plus what the ledger has recorded since.

    Raises:
        CheckpointError: the checkpoint's ledger can't be read.
        Damaged: the checkpoint's record of the orchestrator's progress is unusable.
    """
    run = config.run_directory()
    store = CheckpointStore(run.checkpoints)
    step = StepFolder(attempt.resume_from) if attempt.resume_from else None
    ledger = Ledger(
        run.ledger, _whose_ledger(config, attempt, environment), step and step.ledger, attempt.start_step
    )
    recipe = read_json(run.recipe, dict[str, Any]) or {}
    if recipe.get("prompts_again") and ledger.begun:  # the waiting prompts come from another recipe
        for group in ledger.waiting():
            ledger.drop(group.place, "recipe", attempt.start_step + 1)
    shipped = ShippedSteps(_saved_progress(step) if step else ShippingProgress())
    while (batch := _shipped_already(shipped.newest.step + 1, attempt, run, store, ledger)) is not None:
        shipped.add(batch)
    ledger.unship_after(shipped.newest.step)
    own = recipe.get("orchestrator", {})
    return OrchestratorState(config, attempt, run, store, own, environment, servers, ledger, shipped)


def first_policy(config: OrchestratorConfig, attempt: Attempt) -> Path:
    """Hugging Face directory of the policy that the attempt starts from."""
    return StepFolder(attempt.resume_from).model if attempt.resume_from else Path(config.model.name)


def _whose_ledger(config: OrchestratorConfig, attempt: Attempt, environment: SingleTurn) -> LedgerRun:
    return LedgerRun(
        run_id=attempt.run_id,
        branch=attempt.branch,
        format=FORMAT,
        seed=config.seed,
        problems=environment.problems,
        prompts_per_step=config.prompts_per_step,
        samples_per_prompt=config.samples_per_prompt,
        max_off_policy_steps=config.max_off_policy_steps,
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
