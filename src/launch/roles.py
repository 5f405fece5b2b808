"""The roles of a run, each in a process of its own: `python -m cairn.launch.roles ROLE RUN_DIR LAUNCHER`.

A role finds all that it needs in the run directory, where the command that started the run has put it.
"""

import asyncio
import dataclasses
import logging
import sys
from collections.abc import Callable

from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.store import CheckpointStore, verify
from cairn.config.inference import InferenceConfig
from cairn.config.orchestrator import OrchestratorConfig
from cairn.config.rl import RLConfig
from cairn.config.trainer import SFTConfig, TrainerConfig
from cairn.launch.main import EXIT_STOPPED, answer
from cairn.launch.process import WorkerDied, stop_on_signals
from cairn.run.directory import Attempt, RunDirectory
from cairn.run.lifetime import die_with
from cairn.run.logs import start_logging

logger = logging.getLogger(__name__)

CONFIGS = {"sft": SFTConfig, "trainer": TrainerConfig, "rl": RLConfig}
"""What config.json holds, by the command that started the run."""
WORKING = ("trainer", "orchestrator")
"""The roles that work towards the run's last step; a server does not."""
EXIT_LOST = 3
"""The trainer's exit code where it was asked to stop and had nowhere to save."""
EXIT_CRASHED = 4
"""The trainer's exit code where one of its workers died, for no reason that it knows."""


def run_trainer(config: SFTConfig | TrainerConfig, attempt: Attempt, run: RunDirectory) -> int:
    """Train on Ray workers; returns the exit code."""
    from cairn.launch.ray_group import train_on_ray

    state = "failed"
    run.set_role("trainer", "running")
    run.metrics.keep_through(attempt.start_step)
    try:
        outcome = train_on_ray(config, attempt)
        state = "stopped" if outcome.stopped else "done"
    finally:
        run.set_role("trainer", state)
    if not outcome.stopped:
        return 0
    return EXIT_STOPPED if outcome.saved else EXIT_LOST


def run_orchestrator(config: OrchestratorConfig, attempt: Attempt, run: RunDirectory) -> int:
    """Ship batches until the trainer says that the run ends; returns the exit code."""
    from cairn.inference.pool import ServerPool
    from cairn.orchestrator.loop import Orchestrator

    async def serve() -> int:
        async with ServerPool(
            config.inference_url,
            servers_file=run.servers,
            timeout=config.request_timeout,
            retry_for=config.request_timeout,
        ) as servers:
            await servers.wait_ready(config.server_timeout)
            return await Orchestrator(config, attempt, servers).run()

    state = "failed"
    run.set_role("orchestrator", "running")
    try:
        with stop_on_signals(run):
            step = asyncio.run(serve())
        state = "stopped" if step < config.max_steps else "done"
    finally:
        run.set_role("orchestrator", state)
    return EXIT_STOPPED if state == "stopped" else 0


def run_inference(config: InferenceConfig, run: RunDirectory) -> int:
    """A server for one run, whose model is resolved already; returns the exit code."""
    from cairn.inference.server import run as serve

    run.set_role("inference", "running")
    try:
        return serve(config, config.model.name, run.logs / "vllm.log")
    finally:
        run.set_role("inference", "stopped")


def _main(role: str, folder: str, launcher: str) -> int:
    die_with(int(launcher))
    start_logging()
    run = RunDirectory(folder)
    attempt = run.attempt()
    config = CONFIGS[attempt.command].model_validate_json(run.config.read_text())
    run = RunDirectory(folder, config.ckpt and config.ckpt.dir)
    attempt = newest_start(attempt, CheckpointStore(run.checkpoints))
    of_role = getattr(config, role) if attempt.command == "rl" else config
    runs: dict[str, Callable[[], int]] = {
        "trainer": lambda: run_trainer(of_role, attempt, run),
        "orchestrator": lambda: run_orchestrator(of_role, attempt, run),
        "inference": lambda: run_inference(of_role, run),
    }
    try:
        return runs[role]()
    except WorkerDied as error:
        print(f"error: {error}", flush=True)
        return EXIT_CRASHED


def newest_start(attempt: Attempt, store: CheckpointStore) -> Attempt:
    """The attempt as a role that is started in the middle of it sees it: from its newest good checkpoint."""
    for step in reversed(store.steps()):
        if step <= attempt.start_step:
            break
        try:
            manifest = verify(store.folder(step))
        except CheckpointError as error:
            logger.warning("passing over a damaged checkpoint: %s", error)
            continue
        if (manifest.run_id, manifest.branch) == (attempt.run_id, attempt.branch):
            return dataclasses.replace(attempt, start_step=step, resume_from=str(store.folder(step)))
    return attempt


if __name__ == "__main__":
    sys.exit(answer(lambda: _main(*sys.argv[1:])))
