"""The roles of a run, each in a process of its own: `python -m cairn.launch.roles ROLE RUN_DIR`.

A role finds all that it needs in the run directory, where the command that started the run has put it.
"""

import asyncio
import sys
from collections.abc import Callable

from cairn.config.inference import InferenceConfig
from cairn.config.orchestrator import OrchestratorConfig
from cairn.config.rl import RLConfig
from cairn.config.trainer import SFTConfig, TrainerConfig
from cairn.launch.main import EXIT_STOPPED, answer
from cairn.launch.process import die_with_parent, stop_on_signals
from cairn.run.directory import Attempt, RunDirectory
from cairn.run.logs import start_logging

CONFIGS = {"sft": SFTConfig, "trainer": TrainerConfig, "rl": RLConfig}
"""What config.json holds, by the command that started the run."""
WORKING = ("trainer", "orchestrator")
"""The roles that work towards the run's last step; a server does not."""
EXIT_LOST = 3
"""The trainer's exit code where it was asked to stop and had nowhere to save."""


def run_trainer(config: SFTConfig | TrainerConfig, attempt: Attempt, run: RunDirectory) -> int:
    """Train on Ray workers; returns the exit code."""
    from cairn.launch.ray_group import train_on_ray

    state = "failed"
    run.set_role("trainer", "running")
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
    from cairn.inference.client import InferenceClient
    from cairn.orchestrator.loop import Orchestrator

    async def serve() -> int:
        servers = [
            InferenceClient(url, timeout=config.request_timeout, retry_for=config.request_timeout)
            for url in config.inference_url
        ]
        try:
            await asyncio.gather(*(server.wait_ready(config.server_timeout) for server in servers))
            return await Orchestrator(config, attempt, servers).run()
        finally:
            await asyncio.gather(*(server.close() for server in servers))

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


def _main(role: str, folder: str) -> int:
    die_with_parent()
    start_logging()
    run = RunDirectory(folder)
    attempt = run.attempt()
    config = CONFIGS[attempt.command].model_validate_json(run.config.read_text())
    of_role = getattr(config, role) if attempt.command == "rl" else config
    runs: dict[str, Callable[[], int]] = {
        "trainer": lambda: run_trainer(of_role, attempt, run),
        "orchestrator": lambda: run_orchestrator(of_role, attempt, run),
        "inference": lambda: run_inference(of_role, run),
    }
    return runs[role]()


if __name__ == "__main__":
    sys.exit(answer(lambda: _main(sys.argv[1], sys.argv[2])))
