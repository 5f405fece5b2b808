"""The commands: each parses argv into a configuration, runs it, and returns an exit code (`exits.py`).

Heavy modules are imported after the command line is parsed, so that --help answers at once.
"""

import sys
from typing import TYPE_CHECKING

from cairn.config.cli import load, require
from cairn.config.shared import CommandConfig
from cairn.run.exits import EXIT_STOPPED, answer
from cairn.run.imports import importing, saying

if TYPE_CHECKING:
    from cairn.config.kinds import RunConfig
    from cairn.config.slurm import SlurmConfig


def sft() -> int:
    """`sft @ sft.toml`: supervised fine-tuning."""
    return _start("sft")


def dpo() -> int:
    """`dpo @ dpo.toml`: learning from preferences."""
    return _start("dpo")


def reward() -> int:
    """`reward @ reward.toml`: training a reward model."""
    return _start("reward")


def rl() -> int:
    """`rl --trainer @train.toml --orchestrator @orch.toml`: a complete RL run."""
    return _start("rl")


def trainer() -> int:
    """`trainer @ train.toml`: only the trainer of an RL run, for several machines."""
    return _start("trainer")


def _start(command: str) -> int:
    from cairn.config.kinds import KINDS

    def run() -> int:
        kind = KINDS[command]
        config = load(kind.config, sys.argv[1:])
        slurm: SlurmConfig | None = getattr(config, "slurm", None)
        if slurm is not None:
            return _submit(command, config, slurm)
        if config.dry_run:
            return _plan(command, config)
        require(config, *kind.needs)
        with saying("importing PyTorch and Ray"), importing():
            from cairn.launch.commands import start

        return start(command, config)

    return answer(run, stopped=EXIT_STOPPED)


def _submit(command: str, config: "RunConfig", slurm: "SlurmConfig") -> int:
    """`--slurm`: hand the run to Slurm; with --dry-run, print the job's script instead."""
    from cairn.config.kinds import KINDS
    from cairn.launch.slurm.job import job_of, submit

    require(config, *KINDS[command].needs)
    job = job_of(command, config, slurm)
    if config.dry_run:
        print(job.contents[job.script.name], end="", flush=True)
    else:
        submit(job)
    return 0


def orchestrator() -> int:
    """`orchestrator @ orch.toml`: only the orchestrator of an RL run, for several machines."""
    from cairn.config.orchestrator import OrchestratorConfig

    def run() -> int:
        config = load(OrchestratorConfig, sys.argv[1:])
        if config.dry_run:
            return _plan("orchestrator", config)
        with importing():
            from cairn.launch.commands import orchestrate

        return orchestrate(config)

    return answer(run, stopped=EXIT_STOPPED)


def inference() -> int:
    """`inference @ infer.toml`: a vLLM server that outlives runs."""
    from cairn.config.inference import InferenceConfig

    def run() -> int:
        config = load(InferenceConfig, sys.argv[1:])
        if config.dry_run:
            return _plan("inference", config)
        require(config, "model.name")
        from cairn.inference.build import installed_build
        from cairn.inference.server import run as serve
        from cairn.launch.plan.gpu_assignment import placed_server, use_gpus
        from cairn.launch.plan.memory_check import refuse_what_can_not_be_served
        from cairn.launch.plan.model import resolve_model
        from cairn.run.machine import this_machine

        build = installed_build()  # before a model is fetched
        machine = this_machine()
        config = placed_server(config, machine, build)
        use_gpus(config.gpus)
        model = resolve_model(config.model)
        if build == "gpu":
            refuse_what_can_not_be_served(model, config, machine, "--")
        return serve(config, model)

    return answer(run, stopped=0)


def eval() -> int:
    """`eval @ eval.toml --model.name step_N`: evaluate steps of a run, or any models."""
    from cairn.config.evaluate import EvaluateConfig

    def run() -> int:
        config = load(EvaluateConfig, sys.argv[1:])
        if config.dry_run:
            return _plan("eval", config)
        with saying("importing PyTorch"), importing():
            from cairn.evaluate.evaluate import evaluate

        return evaluate(config)

    return answer(run, stopped=EXIT_STOPPED)


def _plan(command: str, config: CommandConfig) -> int:
    with saying("reading the configuration of the model, the machine and the data"):
        from cairn.launch.plan.dry_run import show

        return show(command, config)


def ckpt() -> int:
    """`ckpt list|show|verify|audit ... PATH`: inspect and manage checkpoints and runs."""

    def command() -> int:
        with saying("importing what reads checkpoints"):
            from cairn.tools.ckpt import run

        return run()

    return answer(command)


def rollouts() -> int:
    """`rollouts RUN_DIR`: the answers that a run was trained on, in the terminal."""

    def command() -> int:
        from cairn.tools.rollouts import run

        return run()

    return answer(command)
