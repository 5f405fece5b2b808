"""The commands. Each turns argv into a configuration, runs, and answers with an exit code (`exits.py`).

Heavy modules are imported after the command line has been read, so that --help answers at once.
"""

import sys

from cairn.config.cli import load, require
from cairn.launch.exits import EXIT_STOPPED, answer


def sft() -> int:
    """`sft @ sft.toml`: supervised fine-tuning."""
    from cairn.config.trainer import SFTConfig

    def run() -> int:
        config = load(SFTConfig, sys.argv[1:])
        require(config, "model.name", "data.name")
        from cairn.launch.commands import train

        return train(config)

    return answer(run, stopped=EXIT_STOPPED)


def trainer() -> int:
    """`trainer @ train.toml`: the trainer of an RL run alone, for multi-node."""
    from cairn.config.trainer import TrainerConfig

    def run() -> int:
        config = load(TrainerConfig, sys.argv[1:])
        require(config, "model.name")
        from cairn.launch.commands import train

        return train(config)

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


def rl() -> int:
    """`rl --trainer @train.toml --orchestrator @orch.toml`: the whole RL run."""
    from cairn.config.rl import RLConfig

    def run() -> int:
        config = load(RLConfig, sys.argv[1:])
        require(config, "model.name")
        from cairn.launch.commands import reinforce

        return reinforce(config)

    return answer(run, stopped=EXIT_STOPPED)


def ckpt() -> int:
    """`ckpt list|show|verify|audit ... PATH`: look at checkpoints and runs."""

    def command() -> int:
        from cairn.tools.ckpt import run

        return run()

    return answer(command)
