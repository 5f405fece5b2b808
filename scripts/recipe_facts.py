"""What a result was made with: commit, machine, versions; and what came out of a run: its weights."""

import hashlib
import platform
import subprocess
from pathlib import Path
from typing import Any

from cairn.checkpoint.manifest import installed_version
from cairn.checkpoint.store import CheckpointStore
from cairn.run.directory import RunDirectory

ROOT = Path(__file__).resolve().parents[1]


def versions_of(*packages: str) -> dict[str, str]:
    """The versions of the packages that are installed."""
    found = {name: installed_version(name) for name in packages}
    return {name: version for name, version in found.items() if version is not None}


def weights_of(folder: Path) -> str:
    """SHA-256 of a model's tensor files, one after the other."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def newest_weights(out: Path) -> str | None:
    """SHA-256 of the model files of a run's last step, one after the other; None: no step was saved."""
    store = CheckpointStore(RunDirectory(out).checkpoints)
    newest = store.latest()
    return None if newest is None else weights_of(store.folder(newest) / "model")


def commit(folder: Path) -> str:
    """The commit that is checked out, with a + if the program or the recipe in `folder` differs from it.

    It is asked when a command begins: in the end another may be checked out.
    """
    git = ["git", "-C", str(ROOT)]
    asked = [*git, "describe", "--always", "--abbrev=12", "--exclude=*"]
    found = subprocess.run(asked, capture_output=True, text=True, check=False)
    own = ["src", "scripts", ":!*/results.json", ":!*/results.png"]
    own += [str(folder.resolve())] if folder.resolve().is_relative_to(ROOT) else []
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", *own], capture_output=True, check=False)
    return found.stdout.strip() + "+" * bool(changed.returncode)


def changed_since(commit: str, folder: Path) -> bool:
    """Whether files of the recipe in `folder` may differ from those that `commit` says; see there.

    Its results don't count, nor does recipe.toml, whose commands the results have. Of a recipe outside of
    this repository, the commit says nothing.
    """
    if commit.endswith("+") or not folder.resolve().is_relative_to(ROOT):
        return True
    own = [str(folder.resolve()), ":!*/results.json", ":!*/results.png", ":!*/recipe.toml"]
    command = ["git", "-C", str(ROOT), "diff", "--quiet", commit, "--", *own]
    return subprocess.run(command, capture_output=True, check=False).returncode != 0


def machine() -> dict[str, Any]:
    """What determines the arithmetic's bits; each trainer's rank and each server computes with one thread."""
    import torch

    about: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        about.setdefault(name.strip(), value.strip())
    kind = [f"{name} {about[name]}" for name in ("cpu family", "model", "stepping") if name in about]
    return {
        "processor": ", ".join([about.get("model name", platform.machine()), *kind]),
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }
