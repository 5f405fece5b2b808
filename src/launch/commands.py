"""What `sft`, `rl`, `trainer` and `orchestrator` do once their configuration is read.

Everything that can be wrong is looked at first; only then is anything started or written.
"""

import asyncio
import time
from pathlib import Path

from cairn.config.model import ModelConfig
from cairn.config.orchestrator import OrchestratorConfig
from cairn.config.rl import RLConfig
from cairn.config.trainer import SFTConfig, SFTDataConfig, TrainerConfig
from cairn.inference.client import InferenceClient, ServerUnavailable
from cairn.launch.attempt import NewestDamaged, RunConfig, Start, begin, choose_start, is_complete
from cairn.launch.main import EXIT_STOPPED
from cairn.launch.model import resolve_model
from cairn.launch.process import RoleFailed
from cairn.launch.roles import CONFIGS, Turn, run_orchestrator
from cairn.launch.supervisor import run_roles
from cairn.orchestrator.calls import check_environment
from cairn.orchestrator.environments import BadEnvironment
from cairn.orchestrator.rollouts import AttemptOver
from cairn.run.directory import RunDirectory
from cairn.run.errors import UsageError
from cairn.run.files import read_json
from cairn.run.logs import start_logging
from cairn.run.waiting import wait_for
from cairn.trainer.tracking import check_login

ANSWER_SECONDS = 30.0
"""How long a server may take to say how it is, before a run starts."""


def train(config: SFTConfig | TrainerConfig) -> int:
    """`sft` and `trainer`: start or resume a run and train; returns the exit code."""
    sft = isinstance(config, SFTConfig)
    check_login(config)
    start = choose_start(config, needs=_needed_parts(config))
    if is_complete(config, start):
        return _say_complete(config, start)
    if sft:
        _check_data(config.data, start.folder)
    return _see_through(config, start, ["trainer"], command="sft" if sft else "trainer")


def reinforce(config: RLConfig) -> int:
    """`rl`: start or resume an RL run and see it through; returns the exit code.

    Raises:
        UsageError: it can't start like this; nothing was started or written.
        ServerUnavailable: no server answers at an address that was given.
        RoleFailed: a role died.
    """
    _check_environment(config.orchestrator)
    check_login(config.trainer)
    start = choose_start(config, needs=_needed_parts(config))
    if is_complete(config, start):
        return _say_complete(config, start)
    roles = ["trainer", "orchestrator"]
    if config.orchestrator.inference_url:
        resumes = config.ckpt is not None and config.ckpt.resumes
        patience = config.orchestrator.server_timeout if resumes else 0.0
        for url in config.orchestrator.inference_url:
            asyncio.run(_check_server(url, patience))
    else:
        config.orchestrator.inference_url = [f"http://{config.inference.host}:{config.inference.port}"]
        roles.insert(0, "inference")
    return _see_through(config, start, roles, command="rl")


def _needed_parts(config: RunConfig) -> list[str]:
    """The parts that a checkpoint to go on from must have."""
    return ["trainer"] if isinstance(config, SFTConfig) else ["trainer", "orchestrator"]


def _say_complete(config: RunConfig, start: Start) -> int:
    print(
        f"the run is complete: {start.folder} is step {start.step} of --max-steps {config.max_steps}; "
        "a larger one goes on",
        flush=True,
    )
    return 0


def _see_through(config: RunConfig, start: Start, roles: list[str], *, command: str) -> int:
    """Run the roles to the end; a checkpoint that is found damaged on the way costs another attempt."""
    run = RunDirectory(config.output_dir, config.ckpt and config.ckpt.dir)
    model = config.model
    of_roles = [config.trainer, config.orchestrator, config.inference] if command == "rl" else []
    while True:
        name = str(start.folder / "model") if start.folder else resolve_model(model)
        for owner in (config, *of_roles):
            owner.model = ModelConfig(name=name)
        attempt = begin(run, config, start, command=command)
        try:
            return run_roles(run, attempt, roles, config)
        except NewestDamaged as damaged:
            print(f"the trainer died, and its newest checkpoint is damaged: {damaged}", flush=True)
            if run.stop_requested():
                print("stopped; --ckpt.resume auto goes on from the newest good one", flush=True)
                return EXIT_STOPPED
        config.ckpt.resume_step, config.ckpt.resume = None, "auto"
        try:
            start = choose_start(config, needs=_needed_parts(config))
        except UsageError as error:
            raise RoleFailed(str(error)) from None


def orchestrate(config: OrchestratorConfig) -> int:
    """`orchestrator`: serve the trainer that runs, or will run, in the same output folder.

    What the run shares, and its model, is the trainer's to say.
    """
    if not config.inference_url:
        raise UsageError(
            "--inference-url: give the address of a running server, such as http://127.0.0.1:8000"
        )
    _check_environment(config)
    start_logging()
    run = RunDirectory(config.output_dir)
    while True:
        print(f"waiting for a trainer in {run.path}", flush=True)
        attempt = wait_for(
            run.live_attempt,
            seconds=config.version_timeout,
            whom=f"a trainer in {run.path}",
            setting="--version-timeout",
        )
        trainer = run.read_config(CONFIGS[attempt.command])
        if not isinstance(trainer, TrainerConfig):
            raise RoleFailed(
                f"{run.path} is a run of {attempt.command}, which needs no orchestrator of its own"
            )
        shared = {key: getattr(trainer, key) for key in ("model", "seed", "max_steps", "ckpt")}
        of_trainer = RunDirectory(run.path, trainer.ckpt and trainer.ckpt.dir)
        turn = Turn("orchestrator", run)
        try:
            of_run = config.model_copy(update=shared)
            return run_orchestrator(of_run, attempt, of_trainer, turn, at_once=_interrupt)
        except AttemptOver as over:
            print(over, flush=True)


def _interrupt() -> None:
    raise KeyboardInterrupt


def _check_data(config: SFTDataConfig, checkpoint: Path | None) -> None:
    """Look at every record before anything is started; compare with what a checkpoint was trained on.

    What lies on the hub is fetched on the way, before all ranks want it.
    """
    from cairn.trainer.records import BadRecord, examine, load_records, same_records

    try:
        records = load_records(config)
        identity = examine(config, records)
    except BadRecord as error:
        raise UsageError(f"--data.name {error}") from None
    if checkpoint is not None:
        saved = (read_json(checkpoint / "trainer" / "state.json") or {}).get("data")
        if saved and not same_records(saved, identity):
            raise UsageError(
                f"--data.name {config.name} is not the checkpoint's data set: that has {saved['records']} "
                f"records, this has {identity['records']}, or they hold something else; start a new run from "
                "the checkpoint's weights with --model.name"
            )


def _check_environment(config: OrchestratorConfig) -> None:
    try:
        check_environment(config)
    except BadEnvironment as error:
        raise UsageError(str(error)) from None


async def _check_server(url: str, patience: float) -> None:
    """See that the server answers; a run that goes on may come back sooner than its server does.

    Raises:
        ServerUnavailable: it does not, not even within `patience` seconds.
    """
    end = time.monotonic() + patience
    waiting = False
    async with InferenceClient(url, timeout=ANSWER_SECONDS, retry_for=0) as client:
        while True:
            try:
                await client.status()
                return
            except ServerUnavailable as error:
                if time.monotonic() > end:
                    raise
                if not waiting:
                    print(
                        f"waiting for the inference server, at most {patience:g} s "
                        f"(--orchestrator.server-timeout): {error}",
                        flush=True,
                    )
                waiting = True
            await asyncio.sleep(0.5)
