"""Taking up a run: the ledger, the batches' files and the checkpoint are brought to agree.

docs/recovery.md ("Which record counts") has the order in which they are believed.
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
    """Take up the run where `attempt` starts, and where the ledger says that it has got to since.

    Raises:
        CheckpointError: the checkpoint's ledger can't be read.
        Damaged: the checkpoint does not say how far the run had come.
    """
    run = config.run_directory()
    store = CheckpointStore(run.checkpoints)
    step = StepFolder(attempt.resume_from) if attempt.resume_from else None
    ledger = Ledger(
        run.ledger, _whose_ledger(config, attempt, environment), step and step.ledger, attempt.start_step
    )
    recipe = read_json(run.recipe, dict[str, Any]) or {}
    if recipe.get("prompts_again") and ledger.begun:  # who waits was asked by another recipe
        for group in ledger.waiting():
            ledger.drop(group.place, "recipe", attempt.start_step + 1)
    shipped = ShippedSteps(_saved_progress(step) if step else ShippingProgress())
    while (batch := _shipped_already(shipped.newest.step + 1, attempt, run, store, ledger)) is not None:
        shipped.add(batch)
    ledger.unship_after(shipped.newest.step)
    own = recipe.get("orchestrator", {})
    return OrchestratorState(config, attempt, run, store, own, environment, servers, ledger, shipped)


def first_policy(config: OrchestratorConfig, attempt: Attempt) -> Path:
    """The Hugging Face directory of the policy that the attempt starts from."""
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
        raise Damaged(f"{step.path / ORCHESTRATOR_STATE}: does not say how far the run had come")
    return ShippingProgress(**saved.progress)


def _shipped_already(
    step: int, attempt: Attempt, run: RunDirectory, store: CheckpointStore, ledger: Ledger
) -> ShippedBatch | None:
    """The batch of `step`: its file is there, or was and a checkpoint has made it needless since."""
    noted = ledger.shipped(step)
    batch = run.batch(attempt, step)
    if batch is None:
        return noted if (store.latest() or 0) >= step else None
    header = batch.header
    if noted != header.ledger:  # it died between writing the file and noting it, or the ledger was edited
        if noted is not None:
            logger.warning("the ledger's batch %d is not the file's, which is trained on", step)
        places = [place for first, last in header.ledger.places for place in range(first, last + 1)]
        ledger.ship(header.ledger, dict(zip(places, header.problems, strict=True)))
    return header.ledger
