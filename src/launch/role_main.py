"""A role's process: `python -m cairn.launch.role_main ROLE RUN_DIR LAUNCHER PIPE [standby]`.

A role finds everything it needs in the run directory, written there by the command that started the run. It
exits when the process LAUNCHER dies. If it fails, it writes the error's last words into PIPE.
"""

import os
import sys
from collections.abc import Callable
from functools import partial

from cairn.config.kinds import KINDS
from cairn.launch.jobs.export import run_exporter
from cairn.launch.jobs.upload import run_uploader
from cairn.launch.plan.gpu_assignment import gpus_of_server
from cairn.launch.roles import RoleStart, run_inference, run_orchestrator, run_trainer
from cairn.launch.supervise.role_process import say_end, tell_launcher
from cairn.run.directory import RunDirectory
from cairn.run.exits import answer
from cairn.run.files import DamagedFile
from cairn.run.output import log_crashes, start_logging
from cairn.run.processes import die_with


def main(role: str, folder: str, launcher: str, *, standby: bool) -> int:
    """Do the work of `role`; returns the exit code."""
    die_with(int(launcher))
    start_logging()
    log_crashes()
    run = RunDirectory(folder)
    attempt = run.attempt()
    if attempt is None:
        raise DamagedFile(f"{run.roles}: is damaged or missing; start the run again with --ckpt.resume auto")
    kind = KINDS[attempt.command]
    config = run.read_config(kind.config)
    run = config.run_directory()
    turn = RoleStart(role, run, standby=standby)
    of = partial(kind.of, config=config)
    runs: dict[str, Callable[[], int]] = {
        "trainer": lambda: run_trainer(of("trainer"), attempt, run, turn, gpus_of_server(kind, config)),
        "orchestrator": lambda: run_orchestrator(of("orchestrator"), attempt, run, turn),
        "inference": lambda: run_inference(of("inference"), run),
        "exporter": lambda: run_exporter(config, attempt, run),
        "uploader": lambda: run_uploader(config, attempt, run),
    }
    return runs[role]()


if __name__ == "__main__":
    role, folder, launcher, pipe, *standby = sys.argv[1:]
    os.set_inheritable(int(pipe), False)
    try:
        exit_code = answer(
            lambda: main(role, folder, launcher, standby=bool(standby)),
            tell=lambda message: tell_launcher(int(pipe), message),
        )
    finally:
        say_end(int(pipe))
    if role == "trainer":
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)  # skips Ray's shutdown: see `end_ray`
    sys.exit(exit_code)
