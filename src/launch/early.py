"""The trainer's driver as a process that starts before its run is planned.

What can be wrong with a command is found out by its launcher in a second or two. Meanwhile an early process
imports Ray and what else a driver needs, and has the processes of its ranks import torch and transformers
(`ray/waiting.py`). It reads and writes no file of the run, and no cluster is there yet. Once the run has
begun, the launcher tells it the run's folder, and it is the trainer's driver like any other. If the command
is refused, it is killed.
"""

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Generator
from typing import Any

from cairn.config.kinds import KINDS
from cairn.launch.ray.waiting import start_waiting, waiting_ranks
from cairn.launch.supervise.role_process import RoleProcess
from cairn.run.machine import this_machine
from cairn.run.output import importing
from cairn.run.processes import die_with

MODULES = ("cairn.launch.roles", "cairn.launch.supervise.ranks")
"""What a driver imports."""


@contextlib.contextmanager
def early_driver(command: str, config: Any) -> Generator[RoleProcess | None]:
    """An early process for the trainer of a command, which ends with the block; None if it has no trainer.

    Args:
        config: the settings as the user gave them.
    """
    trainer = KINDS[command].trainer(config) if command in KINDS else None
    if trainer is None or not trainer.model.name:
        yield None
        return
    ranks = waiting_ranks(trainer, on_gpus=this_machine().has_gpus)
    further = (str(ranks), trainer.model.name, str(int(trainer.beside_servers)))
    process = RoleProcess("trainer", None, None, local_ray=trainer.ray.address is None, further=further)
    try:
        yield process
    finally:
        if process.exit_code is None:
            process.kill()


def main(role: str, launcher: int, pipe: int, ranks: int, model: str, beside_servers: bool) -> None:
    """In the process: import, and wait for the run's folder and the file for what is printed."""
    die_with(launcher)
    os.set_inheritable(pipe, False)
    start_waiting(ranks, model, beside_servers=beside_servers)
    with importing():
        for module in MODULES:
            importlib.import_module(module)
        from cairn.launch.roles import be
    line = sys.stdin.readline()
    if not line:
        os._exit(0)  # the launcher has no use for it
    run, log = json.loads(line)
    with open(log, "ab") as out, open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    be(role, run, str(launcher), pipe)


if __name__ == "__main__":
    name, launched_by, messages, count, folder, shared = sys.argv[1:]
    main(name, int(launched_by), int(messages), int(count), folder, shared == "1")
