"""Training from a script or notebook, with the same checks and results as the commands."""

import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from cairn.api.runs import Run
from cairn.config.arguments import Arguments, Layer, read_file
from cairn.config.cli import require, resolve
from cairn.config.kinds import KINDS
from cairn.config.preferences import DPOConfig, RewardConfig
from cairn.config.rl import RLConfig
from cairn.config.settings import BaseConfig, Setting, settings_of
from cairn.config.trainer import SFTConfig
from cairn.run.errors import UsageError

Config = TypeVar("Config", bound=BaseConfig)

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


def rl(config: "RLConfig | Mapping[str, Any] | str | Path", **settings: Any) -> Run:
    """A complete RL run: the command `rl`. Arguments, result and errors are those of `sft`.

    Without `orchestrator.inference_url`, it starts an inference server and stops it at the end.
    """
    return _train("rl", RLConfig, config, settings)


def _train(command: str, cls: type[Config], config: object, settings: Mapping[str, Any]) -> Run:
    """What a command does."""
    try:
        checked: Any = _checked(cls, config, settings, needs=KINDS[command].needs)
        if getattr(checked, "branch", ()):
            raise UsageError("branch: several branches are for the command rl; here, call cairn.rl for each")
        from cairn.launch.commands import start

        return _run(lambda: start(command, checked), checked.output_dir)
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
    elif isinstance(config, str | Path | Mapping):
        file = isinstance(config, str | Path)
        layer = Layer(str(config), (), read_file(str(config))) if file else Layer("config", (), dict(config))
        root = settings_of(cls)
        flags = [
            flag for name, value in settings.items() for flag in _flags(root, (*name.split("."),), value)
        ]
        checked = resolve(cls, Arguments([layer], flags))
    else:
        raise UsageError(f"config is a {type(config).__name__}: give a file, a dict or a {cls.__name__}")
    require(checked, *needs)
    return checked


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


def _run(command: Callable[[], int], output_dir: str) -> Run:
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            "call this from the main thread: only there can Python handle the signals that stop a run"
        )
    streams = sys.stdout, sys.stderr
    try:
        command()
    finally:
        sys.stdout, sys.stderr = streams  # the run may have replaced them, to outlive its terminal
    return Run(output_dir)
