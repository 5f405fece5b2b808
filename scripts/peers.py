"""`scripts/test --peers`: the tests that need other programs, in an environment of their own that has these.

Elsewhere such tests are skipped: the dependency groups of the programs are not in the lock files, and take
minutes to install. The environment is $XDG_CACHE_HOME/cairn/peers (~/.cache/cairn/peers), which is kept.
"""

import os
import re
import subprocess
from pathlib import Path

import bootstrap

PROGRAMS = {
    "megatron": "megatron.core",
    "deepspeed": "deepspeed",
    "bench": "trl",
    "reasoning-gym": "reasoning_gym",
    "gymnasium": "gymnasium",
}
"""The dependency groups, and what tests import of each."""
VERIFIERS = "verifiers==0.4.0"
"""Runs in a process of its own, which uv makes from its cache (tests/unit/test_verifiers.py)."""
TINKER = ("tinker==0.38.0", "tinker-cookbook[math-rl]==0.5.8")
"""Clients of the service, in an environment of their own: they ask for other versions than Cairn does."""
OTHERS = (
    "tests/unit/test_verifiers.py",
    "tests/integration/test_tinker.py",
    "tests/faults/test_real_slurm.py",
)
"""Files that look for their program by themselves."""


def files(root: Path) -> list[str]:
    """The test files that import one of the programs, or else are skipped."""
    roots = "|".join({name.partition(".")[0] for name in PROGRAMS.values()})
    asks = re.compile(rf'importorskip\(\s*f?"(?:{roots})\b')
    found = {
        str(path.relative_to(root))
        for path in (root / "tests").rglob("test_*.py")
        if asks.search(path.read_text())
    }
    return sorted(found | {name for name in OTHERS if (root / name).exists()})


def environment() -> Path:
    """The folder of the environment."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "cairn" / "peers"


def fetch_tinker() -> bool:
    """Install clients of the service; returns whether they are there, and tells tests where."""
    folder = environment().with_name("tinker")
    python = str(folder / "bin" / "python")
    for command in (
        ("uv", "venv", "--allow-existing", str(folder)),
        ("uv", "pip", "install", "--python", python, *TINKER),
    ):
        bootstrap.show(*command)
        if subprocess.run(command).returncode:
            return False
    os.environ["CAIRN_TINKER_PYTHON"] = python
    return True


def run(arguments: list[str]) -> int:
    """Install the programs, and run their tests; returns pytest's exit code, or 1 if a program is missing.

    What could not be installed, from a registry that lacks it, is named at the end.

    Args:
        arguments: more of pytest's; files among them take the place of all.
    """
    os.chdir(bootstrap.ROOT)
    bootstrap.provide_uv()
    os.environ.pop("UV_NO_SYNC", None)
    os.environ["UV_PROJECT_ENVIRONMENT"] = str(environment())
    sync = ("uv", "sync", "--inexact", "--no-build-isolation-package", "deepspeed")
    bootstrap.run("uv", "sync", "--inexact")  # deepspeed's setup.py imports torch
    missing = []
    for group in PROGRAMS:
        bootstrap.show(*sync, "--group", group)
        if subprocess.run([*sync, "--group", group]).returncode:
            missing.append(group)
    bootstrap.mend_vllm_tag()
    for program in (VERIFIERS,):
        fetch = ("uv", "run", "-q", "--isolated", "--no-project", "--with", program, "python", "-c", "")
        bootstrap.show(*fetch)
        if subprocess.run(fetch).returncode:
            missing.append(program.partition("=")[0])
    if not fetch_tinker():
        missing.append("tinker")
    chosen = [] if any(Path(one.partition("::")[0]).exists() for one in arguments) else files(bootstrap.ROOT)
    command = ("uv", "run", "--no-sync", "pytest", "-n", "2", "--dist", "loadgroup", *chosen, *arguments)
    bootstrap.show(*command)
    code = subprocess.run(command).returncode
    for group in missing:
        print(f"not installed: {group}")
    return code or bool(missing)
