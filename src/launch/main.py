"""The commands. Each turns argv into a configuration, runs, and answers with an exit code (`exits.py`).

Heavy modules are imported after the command line has been read, so that --help answers at once.
"""

import sys

from cairn.config.cli import load, require
from cairn.launch.exits import EXIT_STOPPED, answer


def sft() -> int:
    """`sft @ sft.toml`: supervised fine-tuning."""
    return _start("sft")


def rl() -> int:
    """`rl --trainer @train.toml --orchestrator @orch.toml`: the whole RL run."""
    return _start("rl")


def trainer() -> int:
    """`trainer @ train.toml`: the trainer of an RL run alone, for multi-node."""
    return _start("trainer")


def _start(command: str) -> int:
    from cairn.config.kinds import KINDS

    def run() -> int:
        kind = KINDS[command]
        config = load(kind.config, sys.argv[1:])
        require(config, *kind.needs)
        from cairn.launch.commands import start

        return start(command, config)

    return answer(run, stopped=EXIT_STOPPED)


def orchestrator() -> int:
    """`orchestrator @ orch.toml`: the orchestrator of an RL run alone, for multi-node."""
    from cairn.config.orchestrator import OrchestratorConfig

    def run() -> int:
        config = load(OrchestratorConfig, sys.argv[1:])
        from cairn.launch.commands import orchestrate

        return orchestrate(config)

    return answer(run, stopped=EXIT_STOPPED)


def inference() -> int:
    """`inference @ infer.toml`: the long-lived vLLM server."""
    from cairn.config.inference import InferenceConfig

    def run() -> int:
        config = load(InferenceConfig, sys.argv[1:])
        require(config, "model.name")
        from cairn.inference.server import run as serve
        from cairn.launch.model import resolve_model

        return serve(config, resolve_model(config.model))

    return answer(run, stopped=0)


def ckpt() -> int:
    """`ckpt list|show|verify|audit ... PATH`: look at checkpoints and runs."""

    def command() -> int:
        from cairn.tools.ckpt import run

        return run()

    return answer(command)
