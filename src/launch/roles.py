"""The roles of a run, each in a process of its own: `python -m cairn.launch.roles ROLE RUN_DIR LAUNCHER`.

A role finds all that it needs in the run directory, where the command that started the run has put it.
"""

import asyncio
import importlib
import os
import signal
import sys
from collections.abc import Callable
from functools import partial

from cairn.checkpoint.store import CheckpointStore
from cairn.config.inference import InferenceConfig
from cairn.config.orchestrator import OrchestratorConfig
from cairn.config.rl import RLConfig
from cairn.config.trainer import SFTConfig, TrainerConfig
from cairn.launch.attempt import StartDamaged, newest_start
from cairn.launch.main import EXIT_STOPPED, answer
from cairn.launch.process import RayFailed, stop_on_signals
from cairn.run import heartbeat
from cairn.run.background import in_background
from cairn.run.directory import Attempt, RunDirectory
from cairn.run.files import DamagedFile
from cairn.run.lifetime import die_with
from cairn.run.logs import start_logging

CONFIGS = {"sft": SFTConfig, "trainer": TrainerConfig, "rl": RLConfig}
"""What config.json holds, by the command that started the run."""
WORKING = ("trainer", "orchestrator")
"""The roles that work towards the run's last step; a server does not."""
EXIT_LOST = 3
"""The trainer's exit code where it was asked to stop and had nowhere to save."""
EXIT_CRASHED = 4
"""The trainer's exit code where its Ray cluster broke down."""
EXIT_DAMAGED = 5
"""The trainer's exit code where the checkpoint that it has to go on from is damaged."""
END_SERVER = signal.SIGUSR1
"""The launcher's signal to a server that it started; others ask the run to stop."""
STANDBY = ("trainer", "orchestrator")
"""The roles that a standby can be kept for."""


class Turn:
    """When this process begins with its role: at once, or, as a standby, when the launcher says so."""

    def __init__(self, role: str, run: RunDirectory, *, standby: bool = False):
        self.role = role
        self.run = run
        self.standby = standby
        self._begun = False
        if not standby:
            self._begin()

    def load(self, *modules: str) -> None:
        """Import modules ahead: a standby at its leisure."""
        for module in modules if self.standby else ():
            in_background(partial(importlib.import_module, module))

    def wait(self) -> None:
        """Return when it is this process's turn; call it when all is prepared."""
        if self.standby:
            self.run.set_role(f"{self.role}_standby", "waiting")
            if not sys.stdin.readline():
                os._exit(0)  # it never came
            self.run.set_role(f"{self.role}_standby", "done")
            self._begin()

    def end(self, state: str) -> None:
        """Record how it went, if it ever was this process's turn."""
        if self._begun:
            self.run.set_role(self.role, state)

    def _begin(self) -> None:
        self._begun = True
        heartbeat.start(self.run.heartbeat(self.role))
        self.run.set_role(self.role, "running")


def run_trainer(config: SFTConfig | TrainerConfig, attempt: Attempt, run: RunDirectory, turn: Turn) -> int:
    """Train on Ray workers; returns the exit code."""
    turn.load("cairn.launch.ranks")
    from cairn.launch.ranks import Ranks

    state = "failed"
    try:
        with Ranks(config, run) as ranks:
            if turn.standby:
                ranks.standbys.start(config.workers)
                ranks.standbys.wait_ready(config.ray.start_timeout)
            turn.wait()
            with stop_on_signals(run):  # only now: Ray sets a handler of its own when it starts
                store = CheckpointStore(run.checkpoints)
                outcome = ranks.train(lambda: newest_start(attempt, store, pass_over=False))
        state = "stopped" if outcome.stopped else "done"
    finally:
        turn.end(state)
    if not outcome.stopped:
        return 0
    return EXIT_STOPPED if outcome.saved else EXIT_LOST


def run_orchestrator(
    config: OrchestratorConfig,
    attempt: Attempt,
    run: RunDirectory,
    turn: Turn,
    at_once: Callable[[], None] | None = None,
) -> int:
    """Ship batches until the trainer says that the run ends; returns the exit code.

    `at_once` is called when a signal asks to stop for the second time.
    """
    turn.load("cairn.inference.pool.server_pool", "cairn.orchestrator.loop")
    from cairn.inference.pool.server_pool import ServerPool
    from cairn.orchestrator.loop import Orchestrator

    async def show_progress() -> None:
        while True:
            heartbeat.doing("serving requests, rewards and batches")
            await asyncio.sleep(heartbeat.INTERVAL)

    async def serve() -> int:
        progress = asyncio.create_task(show_progress())  # for as long as the event loop turns
        try:
            async with ServerPool(
                config.inference_url,
                servers_file=run.servers,
                timeout=config.request_timeout,
                retry_for=config.request_timeout,
                # Where generating and training take turns, no answer is in flight when weights change.
                keep_cache=config.max_off_policy_steps > 0 and not config.recompute_kv_cache,
            ) as servers:
                await servers.wait_ready(config.server_timeout)
                return await Orchestrator(config, attempt, servers).run()
        finally:
            progress.cancel()

    turn.wait()
    state = "failed"
    try:
        with stop_on_signals(run, at_once):
            attempt = newest_start(attempt, CheckpointStore(run.checkpoints), pass_over=True)
            step = asyncio.run(serve())
        state = "stopped" if step < config.max_steps else "done"
    finally:
        turn.end(state)
    return EXIT_STOPPED if state == "stopped" else 0


def run_inference(config: InferenceConfig, run: RunDirectory) -> int:
    """A server for one run, whose model is resolved already; returns the exit code.

    The run's last step may need it, so it heeds only its launcher's signal.
    """
    from cairn.inference.server import run as serve

    try:
        with stop_on_signals(run):
            return serve(config, config.model.name, run.logs / "vllm.log", end_signal=END_SERVER)
    finally:
        run.set_role("inference", "stopped")


def _main(role: str, folder: str, launcher: str, *standby: str) -> int:
    die_with(int(launcher))
    start_logging()
    run = RunDirectory(folder)
    attempt = run.attempt()
    if attempt is None:
        raise DamagedFile(f"{run.roles}: is damaged or gone; start the run again with --ckpt.resume auto")
    config = run.read_config(CONFIGS[attempt.command])
    run = RunDirectory(folder, config.ckpt and config.ckpt.dir)
    turn = Turn(role, run, standby=bool(standby))
    of_role = getattr(config, role) if attempt.command == "rl" else config
    runs: dict[str, Callable[[], int]] = {
        "trainer": lambda: run_trainer(of_role, attempt, run, turn),
        "orchestrator": lambda: run_orchestrator(of_role, attempt, run, turn),
        "inference": lambda: run_inference(of_role, run),
    }
    try:
        return runs[role]()
    except RayFailed as error:
        print(f"error: {error}", flush=True)
        return EXIT_CRASHED
    except StartDamaged as error:
        print(f"error: {error}", flush=True)
        error.report(run)
        return EXIT_DAMAGED


if __name__ == "__main__":
    exit_code = answer(lambda: _main(*sys.argv[1:]))
    if sys.argv[1] == "trainer":
        sys.stderr.flush()
        os._exit(exit_code)  # not through Ray's own shutdown: see `end_ray`
    sys.exit(exit_code)
