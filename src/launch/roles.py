"""The roles of a run, each in a process of its own.

`sft`, `trainer` and `orchestrator` run one role in the process of the command; `rl` starts
`python -m cairn.launch.roles ROLE RUN_DIR` for each, which finds all that it needs in the run directory.
"""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

from cairn.config.cli import UsageError
from cairn.config.inference import InferenceConfig
from cairn.config.model import ModelConfig
from cairn.config.orchestrator import OrchestratorConfig
from cairn.config.rl import RLConfig
from cairn.config.trainer import DATA_FILES, SFTConfig, TrainerConfig
from cairn.launch.attempt import begin, choose_start
from cairn.launch.display import StepDisplay
from cairn.launch.main import EXIT_STOPPED, answer
from cairn.launch.model import resolve_model
from cairn.launch.process import die_with_parent, stop_on_signals
from cairn.run.directory import Attempt, RunDirectory
from cairn.run.logs import start_logging
from cairn.run.waiting import wait_for


def trainer_command(config: SFTConfig | TrainerConfig) -> int:
    """`sft` and `trainer`: start or resume a run and train."""
    sft = isinstance(config, SFTConfig)
    if sft and Path(config.data.name).suffix in DATA_FILES and not Path(config.data.name).is_file():
        raise UsageError(f"--data.name {config.data.name}: there is no such file")
    start = choose_start(config, needs=["trainer"] if sft else ["trainer", "orchestrator"])
    if start.folder is None:
        config.model = ModelConfig(name=resolve_model(config.model))
    return run_trainer(config, begin(config, start))


def run_trainer(config: SFTConfig | TrainerConfig, attempt: Attempt) -> int:
    """Train on Ray workers, with a progress bar; returns the exit code."""
    from cairn.launch.ray_group import train_on_ray

    run = RunDirectory(config.output_dir, config.ckpt and config.ckpt.dir)
    state = "failed"
    run.set_role("trainer", "running")
    try:
        with StepDisplay(run.metrics, attempt.start_step, config.max_steps) as display:
            outcome = train_on_ray(config, attempt, display.update)
        state = "stopped" if outcome.stopped else "done"
    finally:
        run.set_role("trainer", state)
    if not outcome.stopped:
        where = f", saved in {run.checkpoints / f'step_{outcome.step}'}" if outcome.saved else ""
        print(f"done: step {outcome.step}{where}", flush=True)
        return 0
    if outcome.saved:
        print(f"stopped at step {outcome.step} and saved; --ckpt.resume auto goes on", flush=True)
        return EXIT_STOPPED
    print(
        f"error: stopped at step {outcome.step}, which is lost: --ckpt would have saved it", file=sys.stderr
    )
    return 1


def orchestrator_command(config: OrchestratorConfig) -> int:
    """`orchestrator`: serve the trainer that runs, or will run, in the same output folder."""
    from cairn.orchestrator.environments import make_environment
    from cairn.orchestrator.rollouts import AttemptOver

    if not config.inference_url:
        raise UsageError(
            "--inference-url: give the address of a running server, such as http://127.0.0.1:8000"
        )
    make_environment(config.environment)
    run = RunDirectory(config.output_dir)
    while True:
        print(f"waiting for a trainer in {run.path}", flush=True)
        attempt = wait_for(
            run.live_attempt,
            seconds=config.version_timeout,
            whom=f"a trainer in {run.path}",
            setting="--version-timeout",
        )
        try:
            if attempt.resume_from is None:
                config.model = ModelConfig(name=resolve_model(config.model))
            return run_orchestrator(config, attempt)
        except AttemptOver as over:
            print(over, flush=True)


def run_orchestrator(config: OrchestratorConfig, attempt: Attempt) -> int:
    """Ship batches until the trainer says that the run ends; returns the exit code."""
    from cairn.inference.client import InferenceClient
    from cairn.orchestrator.loop import Orchestrator

    run = RunDirectory(config.output_dir)

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


def _child(role: str, folder: str) -> int:
    """Run one role of the attempt that `rl` has begun in `folder`."""
    die_with_parent()
    start_logging()
    run = RunDirectory(folder)
    config = RLConfig.model_validate_json(run.config.read_text())
    attempt = run.attempt()
    runs: dict[str, Callable[[], int]] = {
        "trainer": lambda: run_trainer(config.trainer, attempt),
        "orchestrator": lambda: run_orchestrator(config.orchestrator, attempt),
        "inference": lambda: run_inference(config.inference, run),
    }
    return runs[role]()


if __name__ == "__main__":
    sys.exit(answer(lambda: _child(sys.argv[1], sys.argv[2])))
