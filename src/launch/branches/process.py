"""The process of `rl --branch` that takes the turn of a branch.

`python -m cairn.launch.branches.process SETTINGS STEP PARENT URL...` takes the steps of a branch up to STEP,
as `rl @ SETTINGS --stop-after STEP` does with the servers at URL. It dies with PARENT.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from cairn.config.rl import RLConfig
from cairn.run.exits import EXIT_STOPPED, answer
from cairn.run.output import importing
from cairn.run.processes import die_with


def turn(settings: str, step: str, urls: Sequence[str]) -> int:
    """Take a branch's steps; returns the exit code of `rl`."""
    config = RLConfig.model_validate_json(Path(settings).read_bytes())
    sys.argv = ["rl", "@", settings]  # the run's history notes it as the command that goes on
    with importing():
        from cairn.launch.branches.settings import at_servers
        from cairn.launch.commands import start
    # A branch that ends by itself with its last step is done rather than stopped.
    stop = None if int(step) == config.max_steps else int(step)
    return start("rl", at_servers(config, urls).sharing(stop_after=stop))


def main(settings: str, step: str, parent: str, *urls: str) -> int:
    """Do what the command line says."""
    die_with(int(parent))
    return turn(settings, step, urls)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    sys.exit(answer(lambda: main(*arguments), stopped=EXIT_STOPPED))
