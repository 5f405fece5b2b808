#!/usr/bin/env python3
"""Pack what a machine without a network needs to try Cairn, if it has torch and transformers already.

usage: scripts/pack_for_device.py [--out FOLDER] [--python 3.12] [--has NAME...] [--without NAME...] [--mib N]
                                  [--servers] [--architecture 90]

Writes FOLDER/cairn.tar.xz, the committed files that run, and FOLDER/site.tar.xz: the packages that Cairn
imports and the machine lacks, in the versions of requirements-gpu.lock, their hashes checked, for x86-64
Linux and that Python; of Ray only what starts and places processes. Fails if both together are larger than
what can be carried there (64 MiB), and prints the commands to run there.

With --servers also FOLDER/servers.tar.xz, to be carried after them: vLLM's CUDA build and what it imports,
without what dense models don't need, and of the machine code for GPUs only that for one architecture (90 is
Hopper). vLLM's extensions use torch's stable ABI, so they load with other versions of torch than vLLM asks
for; whether the rest of vLLM runs with the torch of that machine shows there.
"""

import argparse
import csv
import importlib.metadata
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import bootstrap
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HAS = (
    *("torch", "transformers", "peft", "pyarrow", "httpx", "nvidia-ml-py", "safetensors", "tokenizers"),
    *("cloudpickle", "einops", "jinja2", "ninja", "opencv-python-headless", "pillow", "prometheus-client"),
    *("psutil", "py-cpuinfo", "regex", "sentencepiece", "setuptools", "six", "tiktoken", "uvloop"),
    *("grpcio", "numba", "torchaudio", "torchvision"),
)
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
SERVER = "vllm"
YOUNG = ("httpx2", "httpcore2", "truststore")
"""What the versions here of packages that the machine has ask for, and its own may not."""
NOT_IMPORTED = (
    *("cryptography", "cffi", "fastapi-cloud-cli", "fastar", "intel-openmp", "pycountry", "pycparser"),
    *("rignore", "sentry-sdk", "torchcodec"),
)
"""Packages that vLLM asks for, and its CUDA build does not import when it serves text."""
NOT_SERVED = (
    *("vllm/vllm-rs", "vllm/third_party/deep_gemm", "vllm/third_party/fmha_sm100", "mistral_common/data"),
    *("vllm/_moe_C*", "vllm/_flashkda*", "vllm/_flashmla*", "vllm/_deepselect*", "vllm/_qutlass*"),
    "vllm/vllm_flash_attn/_vllm_fa2_C*",
)
"""Of vLLM and what it imports, what dense models on Hopper are served without."""
FATBIN, SASS, PTX = 0xBA55ED50, 2, 1
"""What begins a container of code for GPUs; code of one architecture, and for any later one."""
SITE = ".site"
"""The folder of the packages there, in that of the repository."""


def main() -> int:
    """Make the pack; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("outputs/pack"), help="folder for the pack")
    parser.add_argument("--python", default="3.12", help="version of the machine's Python")
    parser.add_argument("--has", nargs="+", default=HAS, help="packages that the machine has")
    parser.add_argument("--without", nargs="*", default=WITHOUT, help="packages to leave out")
    parser.add_argument("--mib", type=float, default=64, help="most that can be carried there at once")
    parser.add_argument("--servers", action="store_true", help="pack vLLM as well, to be carried afterwards")
    parser.add_argument("--architecture", type=int, default=90, help="of the GPUs, 90 for Hopper")
    arguments = parser.parse_args()
    names = needed(arguments.has, arguments.without, arguments.python)
    of_servers = serving(arguments.has, names, arguments.python) if arguments.servers else set[str]()
    pins = pins_of((bootstrap.ROOT / LOCK).read_text(), names | of_servers)
    if lacking := sorted((names | of_servers) - pins.keys()):
        print(f"error: {LOCK} does not have {', '.join(lacking)}; run scripts/lock", file=sys.stderr)
        return 1
    arguments.out.mkdir(parents=True, exist_ok=True)
    made = [arguments.out / "cairn.tar.xz", arguments.out / "site.tar.xz"]
    pack_repository(made[0])
    pack_packages(made[1], {name: pins[name] for name in names}, arguments.python)
    loads = [made]
    if arguments.servers:
        loads.append([arguments.out / "servers.tar.xz"])
        entries = {name: pins[name] for name in of_servers}
        pack_packages(loads[1][0], entries, arguments.python, arguments.architecture)
    print(f"packages: {', '.join(sorted(pins))}")
    for load in loads:
        total = 0.0
        for path in load:
            total += (size := path.stat().st_size / 2**20)
            print(f"{size:6.1f} MiB  {path}")
        if total > arguments.mib:
            print(f"error: {total:.1f} MiB are more than the {arguments.mib:g} MiB of --mib", file=sys.stderr)
            return 1
        print(f"{total:6.1f} MiB to be carried at once, of {arguments.mib:g}")
    print("\nThere, with the files in one folder:\n")
    print("\n".join(commands(arguments.python, with_ray="ray" in pins, with_servers=arguments.servers)))
    return 0


def commands(python: str, *, with_ray: bool, with_servers: bool = False) -> list[str]:
    """What to type on the machine."""
    trial = "$python scripts/gpu_trial.py"
    run = "import sys; from cairn.launch.main import sft; sys.exit(sft())"
    flags = "@ configs/reverse_text/sft.toml --ckpt.interval 10 --ckpt.resume auto --max-steps"
    ray = [
        f"$python -c '{run}' {flags} 30",
        f"$python -c '{run}' {flags} 60    # goes on",
        "$python benchmarks/gpu.py --parts sft bare --shapes 0.6b --json",
    ]
    servers = [
        "tar -xJf ../servers.tar.xz && export VLLM_USE_FLASHINFER_SAMPLER=0  # which is not packed",
        "$python benchmarks/gpu.py --parts rl --shapes 0.6b --json",
        "$python benchmarks/recovery.py --in-turns --repeats 1 --shape 0.6b",
    ]
    return [
        "mkdir -p cairn && tar -xJf cairn.tar.xz -C cairn && tar -xJf site.tar.xz -C cairn && cd cairn",
        f'export PYTHONPATH="$PWD/{SITE}:$PWD" HF_HUB_OFFLINE=1 python=python{python}',
        f"{trial} --shapes 0.6b",
        f"{trial} --shapes 1.7b 4b --stages step save --steps 'one row' 'four rows' checkpointed compiled",
        *(ray if with_ray else []),
        *(servers if with_servers else []),
    ]


def needed(has: Collection[str], without: Collection[str], python: str) -> set[str]:
    """The packages that Cairn needs beyond those of a machine."""
    asked = {canonicalize_name(Requirement(one).name): one for one in about_cairn()["dependencies"]}
    own = asked.keys() - set(map(canonicalize_name, has))
    there = closure(has, python, own) | set(map(canonicalize_name, without))
    return closure([asked[name] for name in own], python, there)


def serving(has: Collection[str], there: Collection[str], python: str) -> set[str]:
    """vLLM and the packages that it needs beyond those of a machine and `there`, for whichever build is here.

    What the CUDA build alone needs are kernels for what is not packed.
    """
    build = SERVER if installed(SERVER) else f"{SERVER}-cpu"
    left_out = closure(has, python, ()) - set(YOUNG) | set(there) | set(NOT_IMPORTED)
    return closure([build], python, left_out) - {f"{SERVER}-cpu"} | {SERVER}


def installed(name: str) -> bool:
    """Whether a package is installed here."""
    return any(True for _ in importlib.metadata.distributions(name=name))


def needs_of(name: str) -> list[str]:
    """What a package asks for; nothing if it is not installed here."""
    return importlib.metadata.requires(name) or [] if installed(name) else []


def about_cairn() -> dict[str, Any]:
    """The section `project` of pyproject.toml."""
    return tomllib.loads((bootstrap.ROOT / "pyproject.toml").read_text())["project"]


def closure(wanted: Iterable[str], python: str, left_out: Collection[str]) -> set[str]:
    """Names of packages and all that they need; not what only those left out need.

    What a package needs is read from what is installed here, so of one that is not, nothing is known.
    """
    where = {"python_version": python, "python_full_version": f"{python}.0"}
    where |= {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64"}
    found = dict[str, set[str]]()  # the extras that were asked for, by name
    todo = [(Requirement(one), "") for one in wanted]
    while todo:
        one, extra = todo.pop()
        name = canonicalize_name(one.name)
        if name in left_out or (one.marker and not one.marker.evaluate(where | {"extra": extra})):
            continue
        for more in {"", *one.extras} - found.setdefault(name, set()):
            found[name].add(more)
            todo += [(Requirement(need), more) for need in needs_of(name)]
    return set(found)


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


def pack_packages(path: Path, pins: Mapping[str, str], python: str, architecture: int | None = None) -> None:
    """Write the archive of the packages; with an architecture, they serve models on such GPUs."""
    glibc = "2_34" if architecture else "2_28"
    with tempfile.TemporaryDirectory() as folder:
        asked, site = Path(folder) / "asked.txt", Path(folder) / "site"
        asked.write_text("\n".join(pins.values()))
        command = ["uv", "pip", "install", "--target", site, "--no-deps", "--require-hashes", "-r", asked]
        command += ["--python-version", python, "--python-platform", f"x86_64-manylinux_{glibc}"]
        command += ["--only-binary", ":all:", "--link-mode", "copy"]
        subprocess.run([*map(str, command)], cwd=bootstrap.ROOT, check=True)
        for unused in UNUSED:
            shutil.rmtree(site / unused, ignore_errors=True)
        if architecture:
            without_unserved(site, architecture)
        about = about_cairn()
        own = site / f"{about['name']}-{about['version']}.dist-info"
        own.mkdir()
        (own / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {about['name']}\nVersion: {about['version']}\n"
        )
        groups = (
            f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
            for group, entries in about["entry-points"].items()
        )
        (own / "entry_points.txt").write_text("\n".join(groups))  # how vLLM finds Cairn's plug-ins
        pack(path, {SITE: site})


def without_unserved(site: Path, architecture: int) -> None:
    """Remove what is not needed to serve, and code for other GPUs; vLLM's RECORD then lists what is left."""
    for pattern in NOT_SERVED:
        for unused in site.glob(pattern):
            shutil.rmtree(unused) if unused.is_dir() else unused.unlink()
    for library in (site / SERVER).rglob("*.so"):
        library.write_bytes(for_architecture(library.read_bytes(), architecture))
    (record,) = site.glob(f"{SERVER}-*.dist-info/RECORD")
    with open(record, newline="") as lines:
        rows = [row for row in csv.reader(lines) if (site / row[0]).exists()]
    with open(record, "w", newline="") as lines:
        csv.writer(lines, lineterminator="\n").writerows(rows)


def for_architecture(library: bytes, architecture: int) -> bytes:
    """A library of the same size in which code for other GPUs is zeros, which compress to nothing.

    A container (a header of 16 bytes: magic, version, size of the header, size of what follows) has entries:
    kind and version (16 bits each), size of the header (32), padded size of the code (64), at byte 28 the
    architecture (32), then the code. Code for any later architecture is kept where there is none for this
    one, and the first entry where there is neither, so that no container is without code.
    """
    found = bytearray(library)
    at = 0
    while (at := library.find(struct.pack("<I", FATBIN), at)) >= 0:
        header, size = struct.unpack_from("<HQ", library, at + 6) if at + 16 <= len(library) else (0, 0)
        if header != 16 or at + 16 + size > len(library):
            at += 4  # the same bytes by chance
            continue
        entries = list(entries_of(library, at + header, at + header + size))
        own = [entry for entry in entries if entry[:2] == (SASS, architecture)]
        later = [entry for entry in entries if entry[0] == PTX and entry[1] <= architecture]
        for entry in entries:
            if entry not in (own or later or entries[:1]):
                _, _, start, length = entry
                found[start : start + length] = bytes(length)
        at += header + size
    return bytes(found)


def entries_of(library: bytes, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Kind, architecture, place and size of each code in a container."""
    while at + 32 <= end:
        kind, _, header, size = struct.unpack_from("<HHIQ", library, at)
        (architecture,) = struct.unpack_from("<I", library, at + 28)
        yield kind, architecture, at + header, size
        at += header + size


def pack(path: Path, members: Mapping[str, Path]) -> None:
    """Write an archive of folders and files under these names, without owners and times."""

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        member.uid = member.gid = member.mtime = 0
        member.uname = member.gname = ""
        return None if "__pycache__" in member.name else member

    with tarfile.open(path, "w:xz", preset=6) as archive:
        for name, source in sorted(members.items()):
            archive.add(source, name, filter=plain)


if __name__ == "__main__":
    sys.exit(main())
