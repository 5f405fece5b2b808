"""What each role of a run does, and the program of its process.

`python -m cairn.launch.roles ROLE RUN_DIR LAUNCHER PIPE TURN`: a role finds everything it needs in the run
directory, written there by the command that started the run; an early one, for which there is none yet, reads
its settings from standard input. It exits when the process LAUNCHER dies. If it fails, it writes the error's
message into PIPE.
"""

import asyncio
import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import cast

from cairn.checkpoint.store import CheckpointStore
from cairn.config.inference import InferenceConfig
from cairn.config.kinds import KINDS, RunConfig, RunKind
from cairn.config.orchestrator import OrchestratorConfig
from cairn.config.rl import SERVER
from cairn.config.trainer import TrainerBase
from cairn.launch.attempt import newest_start, newest_trainer_start
from cairn.launch.jobs.background import JOBS
from cairn.launch.plan.gpu_assignment import gpus_of_server
from cairn.launch.supervise.slot import Turn, send_end, send_error
from cairn.run import heartbeat, noted_calls
from cairn.run.directory import RunDirectory
from cairn.run.exits import END_SERVER, EXIT_LOST, EXIT_STOPPED, answer
from cairn.run.files import DamagedFile
from cairn.run.machine import use_gpus
from cairn.run.messages import Attempt
from cairn.run.output import importing, log_crashes, log_to, start_logging
from cairn.run.processes import allow_open_files, die_with, in_background, stop_on_signals
from cairn.run.signals import on_stop_signals

TURN_SECONDS = 0.05
"""Between two looks at whose turn it is."""
TOKENIZERS = "transformers.models.auto.tokenization_auto"
"""What an orchestrator imports last, for seconds, when it opens its model's tokenizer."""


class RoleStart:
    """When this process begins its role: at once, or when the launcher lets it."""

    def __init__(self, role: str, run: RunDirectory, turn: Turn = "at once"):
        self.role = role
        self.run = run
        self.turn = turn
        self._begun = False
        self._early = threading.Thread(target=self._begin_when_told, daemon=True)
        if turn == "at once":
            self._begin()
        elif turn == "early":
            self._early.start()

    def load(self, *modules: str) -> None:
        """If this is a standby, import modules ahead, at low priority so that the run is not slowed down."""
        for module in modules if self.turn == "standby" else ():
            with importing():
                in_background(partial(importlib.import_module, module))

    def wait(self) -> None:
        """Return when it is this process's turn; call it when everything is prepared."""
        if self.turn == "standby":
            self.run.set_role(f"{self.role}_standby", "waiting")
            _read_turn()
            self.run.set_role(f"{self.role}_standby", "done")
            self._begin()
        elif self.turn == "early":
            self._early.join()

    def end(self, state: str) -> None:
        """Record how the role ended, if this process ever had its turn."""
        if self._begun:
            self.run.set_role(self.role, state)

    def _begin_when_told(self) -> None:
        """In an early process: from then on there is a folder for its log, and it is watched."""
        _read_turn()
        log_to(self.run.logs / f"{self.role}.log")
        self._begin()

    def _begin(self) -> None:
        self._begun = True
        heartbeat.start(self.run.heartbeat(self.role), self.run.spans_of(self.role))
        self.run.set_role(self.role, "running")


def _read_turn() -> None:
    if not sys.stdin.readline():
        os._exit(0)  # the launcher has exited, or no longer needs this process


def run_trainer(config: TrainerBase, run: RunDirectory, turn: RoleStart, taken: Collection[str]) -> int:
    """Train on Ray workers; returns the exit code. `taken`: the GPUs of the run's own server."""
    use_gpus(config.gpus)
    turn.load("cairn.launch.supervise.ranks")
    with importing():
        from cairn.launch.supervise.ranks import Ranks

    state = "failed"
    try:
        with Ranks(config, run, taken) as ranks:
            if turn.turn == "standby":
                ranks.standbys.start([None] * ranks.config.ranks)
                ranks.standbys.wait_ready(config.ray.start_timeout)
            if turn.turn == "early":
                ranks.start_early()
            turn.wait()
            attempt = announced(run)
            with stop_on_signals(run):  # after Ray has started and set its own handler
                store = CheckpointStore(run.checkpoints)
                outcome = ranks.train(lambda: newest_trainer_start(attempt, store, run))
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
    turn: RoleStart,
    at_once: Callable[[], None] | None = None,
) -> int:
    """Ship batches until the trainer announces the last policy; returns the exit code.

    `at_once` is called on the second stop signal.
    """
    turn.load("cairn.inference.pool.server_pool", "cairn.orchestrator.loop", TOKENIZERS)
    with importing():
        from cairn.inference.pool.membership import PoolSettings
        from cairn.inference.pool.server_pool import ServerPool
        from cairn.inference.prompt_scores import scores_of
        from cairn.orchestrator.loop import SERVING, Orchestrator

        importlib.import_module(TOKENIZERS)  # now, and not when the event loop runs

    orchestrator: Orchestrator | None = None

    async def show_progress() -> None:
        while True:
            heartbeat.doing(SERVING if orchestrator is None else orchestrator.doing)
            await asyncio.sleep(heartbeat.INTERVAL)

    async def serve() -> int:
        nonlocal orchestrator
        progress = asyncio.create_task(show_progress())  # stops if the event loop is blocked
        try:
            async with ServerPool(
                config.inference_url,
                PoolSettings(
                    timeout=config.request_timeout,
                    retry_for=config.request_timeout,
                    # If generation and training alternate, no answer is in flight when weights change.
                    keep_cache=config.max_off_policy_steps > 0 and not config.recompute_kv_cache,
                    needs_experts=config.router_replay,
                    fan_out=config.weight_fan_out,
                ),
                servers_file=run.servers,
                sessions_file=run.sessions,
            ) as servers:
                assert config.server_timeout is not None, "the configuration is settled"
                if run.versions.trainers_turn(attempt) is None:  # else a server may wait for its end
                    await servers.wait_ready(config.server_timeout)
                async with scores_of(config.teachers, config.request_timeout) as scores:
                    orchestrator = Orchestrator(config, attempt, servers, scores)
                    return await orchestrator.run()
        finally:
            progress.cancel()

    turn.wait()
    state = "failed"
    try:
        with stop_on_signals(run, at_once):
            attempt = newest_start(attempt, CheckpointStore(run.checkpoints), pass_over=True)
            allow_open_files()
            noted_calls.start(run.calls("orchestrator"), attempt.run_id, attempt.id)
            step = asyncio.run(serve())
        state = "stopped" if step < config.max_steps else "done"
    finally:
        noted_calls.stop(run.calls("orchestrator"))
        turn.end(state)
    return EXIT_STOPPED if state == "stopped" else 0


def run_inference(role: str, config: InferenceConfig, run: RunDirectory) -> int:
    """Run a server for one run, whose model is already resolved; returns the exit code.

    It ignores stop signals and heeds only its launcher's, because the run's last step may still need it.
    """
    from cairn.inference.server import run as serve

    use_gpus(config.gpus)
    try:
        with stop_on_signals(run):
            if config.colocated and not servers_turn(run):
                return 0
            log = run.logs / f"{role.replace(SERVER, 'vllm')}.log"
            return serve(config, config.model.name, log, end_signal=END_SERVER)
    finally:
        run.set_role(role, "stopped")


def servers_turn(run: RunDirectory) -> bool:
    """Wait until servers may use the GPU that they share with the trainer; False if the launcher ends them.

    A server that died while a step is trained would find too little memory.
    """

    def interrupt(_name: str) -> None:
        raise KeyboardInterrupt

    attempt = run.attempt()
    try:
        with on_stop_signals(interrupt, signals=[END_SERVER]):
            while attempt is not None and run.versions.trainers_turn(attempt) is not None:
                heartbeat.doing("waiting until the trainer has published a policy", waiting=True)
                time.sleep(TURN_SECONDS)
    except KeyboardInterrupt:
        return False
    return True


def announced(run: RunDirectory) -> Attempt:
    """The attempt that the launcher has announced.

    Raises:
        DamagedFile: it can't be read.
    """
    attempt = run.attempt()
    if attempt is None:
        raise DamagedFile(f"{run.roles}: is damaged or missing; start the run again with --ckpt.resume auto")
    return attempt


def settings_of(run: RunDirectory, turn: Turn) -> tuple[RunKind, RunConfig]:
    """The kind of the run that a role belongs to, and the run's settings.

    Raises:
        DamagedFile: they can't be read.
    """
    if turn == "early":
        command, settings = json.loads(sys.stdin.readline())
        return KINDS[command], KINDS[command].config.model_validate(settings)
    kind = KINDS[announced(run).command]
    return kind, run.read_config(kind.config)


def main(role: str, folder: str, launcher: str, turn: Turn) -> int:
    """Do the work of `role`; returns the exit code."""
    die_with(int(launcher))
    start_logging()
    log_crashes()
    kind, config = settings_of(RunDirectory(folder), turn)
    if config.log_format != "text":
        start_logging(config.log_format, role)
    run = config.run_directory()
    start = RoleStart(role, run, turn)
    of = partial(kind.of, config=config)
    runs: dict[str, Callable[[], int]] = {
        "trainer": lambda: run_trainer(of("trainer"), run, start, gpus_of_server(config)),
        "orchestrator": lambda: run_orchestrator(of("orchestrator"), announced(run), run, start),
        **{name: partial(run_inference, name, server, run) for name, server in kind.servers(config).items()},
    }
    return runs[role]() if role in runs else JOBS[role].run(config, announced(run), run)


if __name__ == "__main__":
    role, folder, launcher, pipe, turn = sys.argv[1:]
    os.set_inheritable(int(pipe), False)
    try:
        exit_code = answer(
            lambda: main(role, folder, launcher, cast("Turn", turn)),
            tell=lambda message: send_error(int(pipe), message),
        )
    finally:
        send_end(int(pipe))
    if role == "trainer":
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)  # skips Ray's shutdown: see `end_ray`
    sys.exit(exit_code)
