"""Makes environments in processes of their own, of whichever kind they are there."""

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from cairn.orchestrator.environments.elsewhere import (
    Elsewhere,
    GroupsElsewhere,
    ProgramElsewhere,
    SingleTurnElsewhere,
)
from cairn.orchestrator.environments.elsewhere_turns import ToolsElsewhere, WorldElsewhere
from cairn.orchestrator.environments.protocol import EnvironmentFailed
from cairn.orchestrator.environments.worker_process import Workers

VERIFIERS = "verifiers==0.4.0"


def process_environment(
    environment: str,
    *,
    args: Mapping[str, Any] | None = None,
    packages: Sequence[str] = (),
    python: str | None = None,
    processes: int = 1,
    at_once: int = 1,
    start_timeout: float = 600.0,
) -> Elsewhere:
    """An environment in processes of its own.

    Args:
        environment: module:Class, imported in the process; it has `messages` and `reward`, with `tools` or
            without, or `messages` and `rewards`, or `start` and `step`, or `rollout`.
        args: arguments of its constructor.
        packages: what uv installs for the process, as pip names it, such as "verifiers==0.4.0". The
            environment is uv's, kept in its cache; this interpreter's packages are not in it.
        python: the interpreter, such as that of a virtual environment; with packages, also a version such as
            "3.12". Without packages and python, it is this one.
        processes: number of processes, which share the work.
        at_once: calls that a process works on at the same time; above 1, the methods must be thread-safe.
        start_timeout: seconds until a process must have made the environment, installing included.

    Raises:
        ValueError: an argument is wrong, or the environment can't be made.
    """
    for name, value in {"processes": processes, "at_once": at_once}.items():
        if value < 1:
            raise ValueError(f"{name} = {value}: it must be at least 1")
    if isinstance(packages, str):
        raise ValueError(f'packages is a list, such as ["{packages}"]')
    first = {"name": environment, "args": dict(args or {}), "threads": at_once}
    try:
        json.dumps(first)
        workers = Workers(_command(packages, python), first, processes, start_timeout)
    except TypeError as error:
        raise ValueError(f"the environment's args must be JSON: {error}") from error
    except EnvironmentFailed as error:
        raise ValueError(f"{environment} can't be made in its own process: {error}") from error
    if workers.about["kind"] == "single_turn":
        return SingleTurnElsewhere(workers, processes * at_once)
    if workers.about["kind"] == "groups":
        return GroupsElsewhere(workers, processes * at_once)
    return KINDS[workers.about["kind"]](workers)


KINDS: dict[str, type[Elsewhere]] = {
    "program": ProgramElsewhere,
    "tools": ToolsElsewhere,
    "world": WorldElsewhere,
}


def _command(packages: Sequence[str], python: str | None) -> list[str]:
    """What starts an interpreter with the packages.

    Raises:
        ValueError: uv or the interpreter is missing.
    """
    if not packages:
        found = sys.executable if python is None else shutil.which(python)
        if found is None:
            raise ValueError(f"python = {python!r}: there is no such program")
        return [found]
    uv = os.environ.get("UV") or shutil.which("uv")
    if uv is None:
        raise ValueError(
            "packages needs uv, which is not on the PATH (scripts/setup installs it); or make a virtual "
            "environment with the packages and name its interpreter with python"
        )
    wanted = [option for package in packages for option in ("--with", package)]
    chosen = ["--python", python or f"{sys.version_info.major}.{sys.version_info.minor}"]
    return [uv, "run", "--quiet", "--isolated", "--no-project", *chosen, *wanted, "python"]


def verifiers(
    taskset: str,
    *,
    config: Mapping[str, Any] | None = None,
    problems: int | None = None,
    packages: Sequence[str] = (),
    version: str = VERIFIERS,
    **process: Any,
) -> Elsewhere:
    """The tasks of a taskset for verifiers (v1), whose model calls are the orchestrator's.

    Each task is a problem: one question, one answer, which the task's rewards, metrics and judges score.

    Args:
        taskset: its id, which is the name of the module or package that has it.
        config: the taskset's settings.
        problems: use only the first so many tasks; needed where the taskset never ends.
        packages: what has the taskset, as pip names it.
        version: verifiers itself; "" if `python` names an interpreter that has it.
        process: further arguments of `process_environment`: python, processes, at_once, start_timeout.

    Raises:
        ValueError: an argument is wrong, or the tasks need more than this (a runtime, tools).
    """
    wanted = [*([version] if version else []), *packages]
    args = {"taskset": taskset, "config": dict(config or {}), "problems": problems}
    return process_environment("verifiers_v1:Tasks", args=args, packages=wanted, **process)
