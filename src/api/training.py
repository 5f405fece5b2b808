"""Training from a script or notebook, with the same checks and results as the commands."""

import contextlib
import re
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast, overload

from cairn.api.runs import Run
from cairn.config.arguments import Arguments, Layer, read_file
from cairn.config.branches import layers_of
from cairn.config.cli import require, resolve, resolve_branches
from cairn.config.kinds import KINDS
from cairn.config.preferences import DPOConfig, RewardConfig
from cairn.config.rl import RLConfig
from cairn.config.settings import BaseConfig, Setting, settings_of
from cairn.config.trainer import SFTConfig
from cairn.run.branches import Branches
from cairn.run.errors import UsageError
from cairn.run.view import RunView

Config = TypeVar("Config", bound=BaseConfig)
OfBranches = Sequence[str | Path] | Mapping[str, Mapping[str, Any] | str | Path]
"""The settings of branches: files, or by name dicts or files."""

FLAG = re.compile(
    r"(?<![\w-])--([a-z][\w-]*(?:\.[a-z][\w-]*)*)(?: (\d[\d.]*(?:e-?\d+)?|auto|latest)(?![\w.]*\w))?"
)
"""A flag in a message, and the value that follows it, if it is one."""


def sft(config: "SFTConfig | Mapping[str, Any] | str | Path", **settings: Any) -> Run:
    """Supervised fine-tuning: the command `sft`, called from the main thread of a script or notebook.

    Args:
        config: a file (TOML, JSON or YAML), a dict with the content of such a file, or an `SFTConfig`.
        settings: override the file or dict, as flags do: `max_steps=20, ckpt={"interval": 5}`.

    Returns:
        The run, when it is done or was stopped by a signal such as Ctrl-C (see `state`). A stopped run has
        saved as much as it could.

    Raises:
        cairn.UsageError: the run can't start like this; nothing was written (exit code 2 of the command).
        cairn.CairnError: the run failed (exit code 1).
    """
    return _train("sft", SFTConfig, config, settings)


def dpo(config: "DPOConfig | Mapping[str, Any] | str | Path", **settings: Any) -> Run:
    """Learning from preferences: the command `dpo`. Arguments, result and errors are those of `sft`."""
    return _train("dpo", DPOConfig, config, settings)


def reward(config: "RewardConfig | Mapping[str, Any] | str | Path", **settings: Any) -> Run:
    """Training a reward model: the command `reward`. Arguments, result and errors are those of `sft`."""
    return _train("reward", RewardConfig, config, settings)


@overload
def rl(
    config: "RLConfig | Mapping[str, Any] | str | Path", *, branch: "OfBranches", **settings: Any
) -> dict[str, Run]: ...


@overload
def rl(
    config: "RLConfig | Mapping[str, Any] | str | Path", *, branch: None = None, **settings: Any
) -> Run: ...


def rl(
    config: "RLConfig | Mapping[str, Any] | str | Path",
    *,
    branch: "OfBranches | None" = None,
    **settings: Any,
) -> Run | dict[str, Run]:
    """A complete RL run: the command `rl`. Arguments, result and errors are those of `sft`.

    Without `orchestrator.inference_url`, it starts an inference server and stops it at the end.

    Args:
        branch: files, or settings by the name of a branch, as dicts or files; each makes a branch, as
            `--branch` does (docs/how-to/branches.md), and lies over all other settings.

    Returns:
        With branches the run of each that has begun, by its name, when all are done or stopped.
    """
    if branch is not None:
        return _train_branches(config, branch, settings)
    return _train("rl", RLConfig, config, settings)


def _train(command: str, cls: type[Config], config: object, settings: Mapping[str, Any]) -> Run:
    """What a command does."""
    with _mistakes_in_python(command):
        checked: Any = _checked(cls, config, settings, needs=KINDS[command].needs)
        if getattr(checked, "branch", ()):
            raise UsageError("branch: give the branches to cairn.rl as branch=[...], not in its settings")
        _refuse_a_job(command, checked)
        from cairn.launch.commands import start

        _call(lambda: start(command, checked))
        return Run(checked.output_dir)


def _train_branches(config: object, branch: "OfBranches", settings: Mapping[str, Any]) -> dict[str, Run]:
    """What `rl --branch` does."""
    with _mistakes_in_python("rl"):
        if isinstance(config, RLConfig):
            raise UsageError("branch: the settings of branches lie over a file or a dict; give one of these")
        arguments = _arguments(RLConfig, config, settings)
        checked = resolve(RLConfig, arguments)
        require(checked, *KINDS["rl"].needs)
        _refuse_a_job("rl", checked)
        each = resolve_branches(RLConfig, arguments, _layers(branch))
        from cairn.launch.branches.turns import run_branches

        _call(lambda: run_branches(checked, each))
        runs = {name: Branches(checked.output_dir).run(name) for name in each}
        return {name: Run(path) for name, path in runs.items() if RunView(path).run.exists()}


def _refuse_a_job(command: str, checked: Any) -> None:
    """What is called in Python returns a run that is done, so it submits none."""
    if checked.slurm is not None:
        raise UsageError(
            f"slurm: cairn.{command} trains here; the command {command} submits a job. Leave it out, with "
            "slurm=None if a file has it"
        )


def _layers(branch: "OfBranches") -> dict[str, Layer]:
    """The settings of each branch, by its name."""
    if isinstance(branch, str | Path):
        raise UsageError(f"branch: it is a {type(branch).__name__}: give a list of files, or a dict")
    if not isinstance(branch, Mapping):
        return layers_of([str(file) for file in branch])
    found: dict[str, Layer] = {}
    for name, of in cast("Mapping[str, Any]", branch).items():
        is_file = not isinstance(of, Mapping)
        found[name] = Layer(str(of), (), read_file(str(of))) if is_file else Layer(name, (), dict(of))
    return found


@contextlib.contextmanager
def _mistakes_in_python(command: str) -> Generator[None]:
    """Have a UsageError say how settings are written in Python."""
    try:
        yield
    except UsageError as error:
        error.args = (in_python(str(error), command),)
        raise


def in_python(message: str, command: str) -> str:
    """A message in which settings stand as one writes them in Python: `ckpt={"resume_step": 40}`."""

    def written(match: re.Match[str]) -> str:
        *sections, key = match[1].replace("-", "_").split(".")
        if match[1] in ("help", "dry-run"):
            return match[0] if message[: match.start()].endswith(f"{command} ") else f"`{command} {match[0]}`"
        value = match[2]
        if not sections:
            return f"{key}={_literal(value)}" if value else key
        inner = f'"{key}": {_literal(value) if value else "..."}'
        for section in reversed(sections[1:]):
            inner = f'"{section}": {{{inner}}}'
        return f"{sections[0]}={{{inner}}}"

    message = message.replace(f", as a flag or in a file ({command} @ file.toml)", "")
    return FLAG.sub(written, message)


def _literal(value: str) -> str:
    return value if re.fullmatch(r"[\d.]+(?:e-?\d+)?", value) else f'"{value}"'


def _checked(
    cls: type[Config], config: object, settings: Mapping[str, Any], *, needs: tuple[str, ...]
) -> Config:
    """The caller's configuration, checked as the command checks it; the caller's object is not changed."""
    if isinstance(config, cls):
        if settings:
            raise UsageError(f"set {', '.join(settings)} in the {cls.__name__} itself")
        checked = config.model_copy(deep=True)
    else:
        checked = resolve(cls, _arguments(cls, config, settings))
    require(checked, *needs)
    return checked


def _arguments(cls: type[BaseConfig], config: object, settings: Mapping[str, Any]) -> Arguments:
    """The caller's configuration as the command line that says the same."""
    if isinstance(config, str | Path):
        layer = Layer(str(config), (), read_file(str(config)))
    elif isinstance(config, Mapping):
        layer = Layer("config", (), dict(cast("Mapping[str, Any]", config)))
    else:
        raise UsageError(f"config is a {type(config).__name__}: give a file, a dict or a {cls.__name__}")
    root = settings_of(cls)
    flags = [flag for name, value in settings.items() for flag in _flags(root, (*name.split("."),), value)]
    return Arguments([layer], flags)


def _flags(root: Setting, path: tuple[str, ...], value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The caller's settings as the equivalent flags."""
    setting = root.find(path)
    section = setting is not None and setting.kind == "section"
    if section and value is True:
        value = {}  # like --ckpt alone
    if section and isinstance(value, Mapping):
        yield path, {}
        for key, inner in value.items():
            yield from _flags(root, (*path, key), inner)
    else:
        yield path, value if not section or value is not False else None


def _call(command: Callable[[], int]) -> None:
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            "call this from the main thread: only there can Python handle the signals that stop a run"
        )
    streams = sys.stdout, sys.stderr
    try:
        command()
    finally:
        sys.stdout, sys.stderr = streams  # the run may have replaced them, to outlive its terminal
