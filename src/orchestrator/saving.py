"""The orchestrator's part of a checkpoint: its progress and the ledger."""

from dataclasses import asdict
from typing import Any

from cairn.checkpoint.step_folder import LEDGER, ORCHESTRATOR_STATE, OrchestratorRecord
from cairn.orchestrator.sources import problems_of
from cairn.orchestrator.state import OrchestratorState
from cairn.run.faults import fault_point


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
