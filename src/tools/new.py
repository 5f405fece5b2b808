"""`cairn new`: writes a project of the user's own, whose environment, test and settings run as they are.

The project lies in `templates/` under the name my_task. Files that end in .in are text with fields in braces.
"""

import importlib.metadata
import importlib.resources
import importlib.util
import json
import keyword
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Literal

from cairn import __version__
from cairn.config.shared import ToolCommand
from cairn.run.errors import UsageError
from cairn.tools.ckpt_output import print_json, say

PLACEHOLDER = "my_task"
"""The project's name in the templates."""
RENAMED = {"gitignore": ".gitignore"}
"""Files that would have a meaning in this repository under their own names."""
NAME = re.compile(r"[a-z][a-z0-9_]*")


class New(ToolCommand):
    """Write a small project: an environment with its reward and its test, settings for SFT and RL, a README.

    It trains a tiny model on a CPU, in minutes, and is meant to be changed.
    """

    command = "cairn new"
    positional = ("folder",)
    folder: Path
    """The folder to make; its name becomes the name of the project, of its package and of its environment."""
    build: Literal["cpu", "gpu"] | None = None
    """Which build of vLLM the project installs (default: the one that is installed here, else cpu)."""

    def execute(self) -> int:
        name = self.folder.name
        _check(self.folder, name)
        build = self.build or ("gpu" if _is_installed("vllm") else "cpu")
        files = sorted(_write(self.folder, name, build))
        if self.as_json:
            print_json({"folder": str(self.folder), "files": files})
            return 0
        say(f"{self.folder}: {len(files)} files. The task is in {name}/environment.py; README.md says more:")
        say(f"\n    cd {self.folder}\n    uv sync\n    . .venv/bin/activate")
        say(f"    cairn env try {name} --answer abc\n    cairn rl @ rl.toml")
        return 0


def _check(folder: Path, name: str) -> None:
    """Refuse a folder that is there, and a name that can't be that of a package or an environment.

    Raises:
        UsageError: the message says why.
    """
    about = f"cairn new {folder}"
    if not NAME.fullmatch(name) or keyword.iskeyword(name):
        raise UsageError(
            f"{about}: {name!r} can't be the name of a Python package: give small letters, digits and _, "
            "such as my_task"
        )
    if folder.exists() or folder.is_symlink():
        raise UsageError(f"{about}: {folder} is there already; give another name, or move it away")
    if name in sys.stdlib_module_names or name in ("test", "tests", "model", "cairn"):
        raise UsageError(f"{about}: {name!r} is the name of another module; give another one")
    if importlib.util.find_spec(name) is not None:
        raise UsageError(
            f"{about}: a module {name!r} is installed, and one would hide the other; give another name"
        )
    from cairn.orchestrator.environments import BUILT_IN

    if name in BUILT_IN:
        raise UsageError(f"{about}: Cairn has an environment {name!r} of its own; give another name")


def _write(folder: Path, name: str, build: str) -> Iterator[str]:
    """Make the folder, whole or not at all; yields the files' names in it."""
    fields = {"cairn": requirement(build), "torch": _torch()}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=folder.parent) as aside:
        made = Path(aside) / name
        for parts, file in _files(importlib.resources.files("cairn.tools") / "templates"):
            place = Path(*(part.replace(PLACEHOLDER, name) for part in parts))
            filled = place.suffix == ".in"
            if filled:
                place = place.with_suffix("")
                place = place.with_name(RENAMED.get(place.name, place.name))
            (made / place).parent.mkdir(parents=True, exist_ok=True)
            content = file.read_bytes()
            (made / place).write_bytes(_fill(content.decode(), name, fields).encode() if filled else content)
            yield place.as_posix()
        shutil.move(made, folder)


def _files(folder: Traversable, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Traversable]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _files(entry, (*above, entry.name))
        else:
            yield (*above, entry.name), entry


def _fill(text: str, name: str, fields: dict[str, str]) -> str:
    """The text with the project's name, and with a value for each field; other braces stay."""
    for field, value in fields.items():
        text = text.replace(f"{{{field}}}", value)
    return text.replace(PLACEHOLDER, name)


def requirement(build: str) -> str:
    """What a project depends on to get this Cairn: its version, or the address that it was installed from."""
    try:
        text = importlib.metadata.distribution("cairn").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        text = None
    if text is None:
        return f"cairn[{build}]=={__version__}"
    origin: dict[str, Any] = json.loads(text)
    url, vcs = str(origin["url"]), origin.get("vcs_info")
    address = f"{vcs['vcs']}+{url}@{vcs['commit_id']}" if vcs else url
    return f"cairn[{build}] @ {address}"


def _torch() -> str:
    """The version of torch that Cairn asks for, as a requirement."""
    try:
        wanted = importlib.metadata.requires("cairn") or []
    except importlib.metadata.PackageNotFoundError:
        wanted = []
    return next((one for one in wanted if one.startswith("torch==")), "torch")


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
