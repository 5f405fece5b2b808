"""The processes of `rl --branch`: a turn of a branch, and a server that all branches share.

`python -m cairn.launch.branches.process turn SETTINGS STEP PARENT` takes the steps of a branch up to STEP, as
`rl @ SETTINGS --stop-after STEP` does. `... server SETTINGS LOG PARENT` serves. Either dies with PARENT.
"""

import sys
from pathlib import Path

from cairn.config.inference import InferenceConfig
from cairn.config.rl import RLConfig
from cairn.run import heartbeat
from cairn.run.exits import END_SERVER, EXIT_STOPPED, answer
from cairn.run.output import importing
from cairn.run.processes import die_with


def turn(settings: str, step: str) -> int:
    """Take a branch's steps; returns the exit code of `rl`."""
    config = RLConfig.model_validate_json(Path(settings).read_bytes())
    sys.argv = ["rl", "@", settings]  # the run's history notes it as the command that goes on
    with importing():
        from cairn.launch.commands import start
    # A branch that ends by itself with its last step is done rather than stopped.
    stop = None if int(step) == config.max_steps else int(step)
    return start("rl", config.sharing(stop_after=stop))


def server(settings: str, log: str) -> int:
    """Serve until the parent ends it; returns the exit code of `inference`."""
    from cairn.inference.server import run
    from cairn.launch.plan.gpu_assignment import use_gpus

    config = InferenceConfig.model_validate_json(Path(settings).read_bytes())
    heartbeat.start(Path(log).with_name(f"{Path(settings).stem}.heartbeat.json"))
    use_gpus(config.gpus)
    return run(config, config.model.name, Path(log), end_signal=END_SERVER)


def main(kind: str, settings: str, what: str, parent: str) -> int:
    """Do what the command line says."""
    die_with(int(parent))
    return {"turn": turn, "server": server}[kind](settings, what)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    sys.exit(answer(lambda: main(*arguments), stopped=EXIT_STOPPED if arguments[0] == "turn" else None))
