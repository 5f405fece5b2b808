"""`rl`: starts the roles of an RL run, watches them, and stops what it started."""

import asyncio
import os
import signal
import subprocess
import time

from cairn.config.cli import UsageError
from cairn.config.model import ModelConfig
from cairn.config.rl import RLConfig
from cairn.inference.client import InferenceClient
from cairn.launch.attempt import begin, choose_start
from cairn.launch.display import StepDisplay
from cairn.launch.main import EXIT_STOPPED
from cairn.launch.model import resolve_model
from cairn.launch.process import RoleFailed, log_tail, start_role, stop_on_signals
from cairn.orchestrator.environments import BadEnvironment, make_environment
from cairn.run.directory import RunDirectory

STOP_SECONDS = 20


def run_rl(config: RLConfig) -> int:
    """Start or resume an RL run and see it through; returns the exit code.

    Raises:
        UsageError: it can't start like this; nothing was started or written.
        ServerUnavailable: no server answers at the address that was given.
        RoleFailed: a role died.
    """
    try:
        make_environment(config.orchestrator.environment)
    except BadEnvironment as error:
        raise UsageError(str(error)) from None
    start = choose_start(config, needs=["trainer", "orchestrator"])
    own_server = not config.orchestrator.inference_url
    if own_server:
        config.orchestrator.inference_url = [f"http://{config.inference.host}:{config.inference.port}"]
    else:
        asyncio.run(_check_servers(config.orchestrator.inference_url))
    model = str(start.folder / "model") if start.folder else resolve_model(config.model)
    for owner in (config, config.trainer, config.orchestrator, config.inference):
        owner.model = ModelConfig(name=model)
    attempt = begin(config, start)

    run = RunDirectory(config.output_dir, config.ckpt and config.ckpt.dir)
    roles = ["inference", "trainer", "orchestrator"] if own_server else ["trainer", "orchestrator"]
    children: dict[str, subprocess.Popen] = {}
    try:
        with stop_on_signals(run):
            for role in roles:
                children[role] = start_role(role, run.path, run.logs / f"{role}.log")
            with StepDisplay(run.metrics, attempt.start_step, config.max_steps) as display:
                _watch(children, run, display)
    finally:
        for role, child in reversed(children.items()):
            _stop(role, child, run)
    codes = {children["trainer"].returncode, children["orchestrator"].returncode}
    print(log_tail(run.logs / "trainer.log", 1), flush=True)
    return EXIT_STOPPED if EXIT_STOPPED in codes else 0


async def _check_servers(urls: list[str]) -> None:
    for url in urls:
        async with InferenceClient(url, retry_for=0) as client:
            await client.status()


def _watch(children: dict[str, subprocess.Popen], run: RunDirectory, display: StepDisplay) -> None:
    """Wait until trainer and orchestrator are done.

    Raises:
        RoleFailed: a role died before that.
    """
    while any(children[role].poll() is None for role in ("trainer", "orchestrator")):
        for role, child in children.items():
            code = child.poll()
            if code not in (None, 0, EXIT_STOPPED) or (code == 0 and role == "inference"):
                log = run.logs / f"{role}.log"
                raise RoleFailed(f"{role} died (exit code {code}); the end of {log}:\n{log_tail(log)}")
        display.update()
        time.sleep(0.1)


def _stop(role: str, child: subprocess.Popen, run: RunDirectory) -> None:
    """End a role's process: asked first, then, with its whole session, killed."""
    if child.poll() is None:
        child.terminate() if role == "inference" else _kill(child)
        try:
            child.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            _kill(child)
            child.wait()
        if child.returncode == -signal.SIGKILL:
            run.set_role(role, "failed", child.pid)


def _kill(child: subprocess.Popen) -> None:
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        child.kill()
