"""From the command line to a checked configuration.

Whatever is wrong with it is a `UsageError`: one clear message and exit code 2, before anything is started
or written.
"""

import sys
from pathlib import Path
from typing import Any, TypeVar

from pydantic_config import BaseConfig, ConfigFileError, cli

from cairn.config.rl import SHARED, RLConfig
from cairn.run.errors import UsageError

Config = TypeVar("Config", bound=BaseConfig)


def load(cls: type[Config], argv: list[str]) -> Config:
    """The configuration that `argv` asks for: `@ file.toml`, then flags over it.

    Prints and exits with 0 on `--help` and `--dry-run`.

    Raises:
        UsageError: unknown key or flag, missing file, impossible or contradictory value.
    """
    argv = _separate_at_signs(argv)
    if cls is RLConfig:
        _check_shared_values(argv)
    try:
        config = cli(cls, args=argv)
    except ConfigFileError as error:
        raise UsageError(_readable(error.message)) from None
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}") from None
    if config.dry_run:
        print(config.model_dump_json(indent=2), flush=True)
        sys.exit(0)
    return config


def _separate_at_signs(argv: list[str]) -> list[str]:
    """`@file` means `@ file`, at the top as after a flag."""
    separated = []
    for arg in argv:
        separated += ["@", arg[1:]] if arg.startswith("@") and len(arg) > 1 else [arg]
    return separated


def _readable(message: str) -> str:
    lines = message.splitlines()
    if len(lines) > 1 and lines[0].startswith("Failed to validate"):
        pairs = zip(lines[1::2], lines[2::2], strict=False)
        return "\n".join(f"{flag}: {what.strip().removeprefix('Value error, ')}" for flag, what in pairs)
    return message


def _check_shared_values(argv: list[str]) -> None:
    """Refuse two files that disagree on a shared value, and a shared value given to one role alone."""
    overridden = set()
    for arg in argv:
        if not arg.startswith("--"):
            continue
        flag = arg[2:].split("=")[0]
        for role, keys in SHARED.items():
            shared = flag.removeprefix(f"{role}.").removeprefix("no-")
            if flag.startswith(f"{role}.") and shared.split(".")[0].replace("-", "_") in keys:
                raise UsageError(f"--{flag}: all roles share this value; give it once, as --{shared}")
        overridden.add(flag.removeprefix("no-").replace("-", "_"))

    first: dict[str, tuple[Any, str]] = {}
    for source, values in _shared_values_in_files(argv):
        for key, value in values.items():
            if key in overridden:
                continue
            if key in first and first[key][0] != value:
                raise UsageError(
                    f"{key}: {first[key][1]} says {first[key][0]!r}, {source} says {value!r}; "
                    f"make them agree, or give --{key.replace('_', '-')}"
                )
            first.setdefault(key, (value, source))


def _shared_values_in_files(argv: list[str]) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for i, arg in enumerate(argv[:-1]):
        if arg != "@":
            continue
        role = argv[i - 1][2:] if i and argv[i - 1].startswith("--") else None
        content = _read(Path(argv[i + 1]))
        sections = {role: content} if role else {None: content, **{r: content.get(r, {}) for r in SHARED}}
        for section, values in sections.items():
            keys = SHARED.get(section or "trainer", ())
            where = argv[i + 1] if section == role else f"{argv[i + 1]} [{section}]"
            found.append((where, _leaves({k: v for k, v in values.items() if k in keys})))
    return found


def _read(path: Path) -> dict[str, Any]:
    """A config file's content; what is wrong with it is reported by the parser proper, later."""
    import json
    import tomllib

    try:
        text = path.read_text()
        content = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _leaves(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            leaves.update(_leaves(value, f"{prefix}{key}."))
        else:
            leaves[prefix + key] = value
    return leaves
