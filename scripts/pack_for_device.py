#!/usr/bin/env python3
"""Pack what a machine without a network needs to try Cairn, if it has torch and transformers already.

usage: scripts/pack_for_device.py [--out FOLDER] [--python 3.12] [--has NAME...] [--without NAME...] [--mib N]

Writes FOLDER/cairn.tar.xz, the committed files that run, and FOLDER/site.tar.xz: the packages that Cairn
imports and the machine lacks, in the versions of requirements-gpu.lock, their hashes checked, for x86-64
Linux and that Python; of Ray only what starts and places processes. Fails if both together are larger than
what can be carried there (64 MiB), and prints the commands to run there. vLLM is too large, so servers and RL
can't be tried so.
"""

import argparse
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import bootstrap
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HAS = ("torch", "transformers", "peft", "pyarrow", "httpx", "nvidia-ml-py", "safetensors", "tokenizers")
"""What the machine has, with all that they need but for what Cairn asks for itself."""
WITHOUT = ("wandb", "matplotlib", "obstore")
"""What is imported only for sinks, plots and object stores."""
LOCK = "requirements-gpu.lock"
FILES = ("src", "cairn", "scripts", "benchmarks", "configs", "pyproject.toml", "README.md", "LICENSE")
"""What is packed of the repository."""
UNUSED = (
    *(f"ray/{part}" for part in ("jars", "rllib", "data", "serve", "tune", "train", "llm", "cpp")),
    *("ray/dashboard/client", "pandas/tests"),
)
"""Folders of packages that Cairn does not import."""
SITE = ".site"
"""The folder of the packages there, in that of the repository."""


def main() -> int:
    """Make the pack; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("outputs/pack"), help="folder for the pack")
    parser.add_argument("--python", default="3.12", help="version of the machine's Python")
    parser.add_argument("--has", nargs="+", default=HAS, help="packages that the machine has")
    parser.add_argument("--without", nargs="*", default=WITHOUT, help="packages to leave out")
    parser.add_argument("--mib", type=float, default=64, help="most that can be carried there")
    arguments = parser.parse_args()
    names = needed(arguments.has, arguments.without, arguments.python)
    pins = pins_of((bootstrap.ROOT / LOCK).read_text(), names)
    if lacking := sorted(names - pins.keys()):
        print(f"error: {LOCK} does not have {', '.join(lacking)}; run scripts/lock", file=sys.stderr)
        return 1
    arguments.out.mkdir(parents=True, exist_ok=True)
    made = [arguments.out / "cairn.tar.xz", arguments.out / "site.tar.xz"]
    pack_repository(made[0])
    pack_packages(made[1], pins, arguments.python)
    print(f"packages: {', '.join(sorted(pins))}")
    total = 0.0
    for path in made:
        total += (size := path.stat().st_size / 2**20)
        print(f"{size:6.1f} MiB  {path}")
    if total > arguments.mib:
        print(f"error: {total:.1f} MiB are more than the {arguments.mib:g} MiB of --mib", file=sys.stderr)
        return 1
    print(f"{total:6.1f} MiB together, of {arguments.mib:g}. There, with both files in one folder:\n")
    print("\n".join(commands(arguments.python, with_ray="ray" in pins)))
    return 0


def commands(python: str, *, with_ray: bool) -> list[str]:
    """What to type on the machine."""
    trial = "$python scripts/gpu_trial.py"
    run = "import sys; from cairn.launch.main import sft; sys.exit(sft())"
    flags = "@ configs/reverse_text/sft.toml --ckpt.interval 10 --ckpt.resume auto --max-steps"
    ray = [
        f"$python -c '{run}' {flags} 30",
        f"$python -c '{run}' {flags} 60    # goes on",
        "$python benchmarks/gpu.py --parts sft bare --shapes 0.6b --json",
    ]
    return [
        "mkdir -p cairn && tar -xJf cairn.tar.xz -C cairn && tar -xJf site.tar.xz -C cairn && cd cairn",
        f'export PYTHONPATH="$PWD/{SITE}:$PWD" HF_HUB_OFFLINE=1 python=python{python}',
        f"{trial} --shapes 0.6b",
        f"{trial} --shapes 1.7b 4b --stages step save --steps 'one row' 'four rows' checkpointed compiled",
        *(ray if with_ray else []),
    ]


def needed(has: Collection[str], without: Collection[str], python: str) -> set[str]:
    """The packages that Cairn needs beyond those of a machine."""
    asked = {canonicalize_name(Requirement(one).name): one for one in about_cairn()["dependencies"]}
    own = asked.keys() - set(map(canonicalize_name, has))
    there = closure(has, python, own) | set(map(canonicalize_name, without))
    return closure([asked[name] for name in own], python, there)


def about_cairn() -> dict[str, Any]:
    """The section `project` of pyproject.toml."""
    return tomllib.loads((bootstrap.ROOT / "pyproject.toml").read_text())["project"]


def closure(wanted: Iterable[str], python: str, left_out: Collection[str]) -> set[str]:
    """Names of packages and all that they need, by what is installed here; not what only those left out need.

    Raises:
        PackageNotFoundError: one is not installed here.
    """
    where = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    where |= {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64"}
    found: set[str] = set()
    todo = [Requirement(one) for one in wanted]
    while todo:
        one = todo.pop()
        name = canonicalize_name(one.name)
        if name in found or name in left_out or (one.marker and not one.marker.evaluate(where)):
            continue
        found.add(name)
        todo += map(Requirement, importlib.metadata.requires(name) or ())
    return found


def pins_of(lock: str, names: Collection[str]) -> dict[str, str]:
    """The entries of packages in a lock file, with their hashes, by name."""
    entries = re.split(r"\n(?=\S)", lock)
    found = {canonicalize_name(re.split(r"[=\[ ;]", entry)[0]): entry for entry in entries if "==" in entry}
    return {name: entry for name, entry in found.items() if name in names}


def pack_repository(path: Path) -> None:
    """Write the archive of the repository's committed files."""
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "tree.tar"
        subprocess.run(["git", "archive", "--output", plain, "HEAD", *FILES], cwd=bootstrap.ROOT, check=True)
        tree = Path(folder) / "tree"
        with tarfile.open(plain) as archive:
            archive.extractall(tree, filter="data")
        pack(path, {one.name: one for one in tree.iterdir()})


def pack_packages(path: Path, pins: Mapping[str, str], python: str) -> None:
    """Write the archive of the packages."""
    with tempfile.TemporaryDirectory() as folder:
        asked, site = Path(folder) / "asked.txt", Path(folder) / "site"
        asked.write_text("\n".join(pins.values()))
        command = ["uv", "pip", "install", "--target", site, "--no-deps", "--require-hashes", "-r", asked]
        command += ["--python-version", python, "--python-platform", "x86_64-manylinux_2_28"]
        command += ["--only-binary", ":all:", "--link-mode", "copy"]
        subprocess.run([*map(str, command)], cwd=bootstrap.ROOT, check=True)
        for unused in UNUSED:
            shutil.rmtree(site / unused, ignore_errors=True)
        about = about_cairn()
        own = site / f"{about['name']}-{about['version']}.dist-info"
        own.mkdir()
        (own / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {about['name']}\nVersion: {about['version']}\n"
        )
        pack(path, {SITE: site})


def pack(path: Path, members: Mapping[str, Path]) -> None:
    """Write an archive of folders and files under these names, without owners and times."""

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        member.uid = member.gid = member.mtime = 0
        member.uname = member.gname = ""
        return None if "__pycache__" in member.name else member

    with tarfile.open(path, "w:xz", preset=2) as archive:
        for name, source in sorted(members.items()):
            archive.add(source, name, filter=plain)


if __name__ == "__main__":
    sys.exit(main())
