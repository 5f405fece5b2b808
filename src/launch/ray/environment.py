"""What Ray's processes find around them: environment variables, and a private folder for files and sockets.

Workers in a running cluster have the environment of whoever started their node. Ray's own way to change
that, `runtime_env`, would write the variables into a log on every node, tokens and keys among them; so each
worker gets them by a call, before it imports anything that reads them. A cluster that Cairn starts itself
inherits the whole environment.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from cairn.config.trainer import TrainerBase

RAY_SETTINGS = {
    # Under `uv run`, Ray would zip the working directory and run the workers in a copy of it.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    # Ray's memory monitor kills the trainer even if another program fills the memory.
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray would run workers at a lower priority than everything else.
    "RAY_worker_niceness": "0",
}
"""Environment variables that Ray reads when a role first imports it."""

LOCAL_RAY_SETTINGS = {
    # The default on macOS and Windows: the cluster listens on the loopback interface only.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
"""Variables for a role that starts a local cluster; otherwise Ray listens on every network interface."""


PREFIXES = (
    *("HF_", "TRANSFORMERS_", "TOKENIZERS_", "WANDB_"),
    *("NCCL_", "GLOO_", "CUDA_", "CUBLAS_", "TORCH_", "PYTORCH_", "TORCHINDUCTOR_", "TRITON_"),
    *("OMP_", "GOMP_", "CAIRN_"),
)
"""What the names begin with of the variables that are handed over."""
NAMES = (
    *("PYTHONPATH", "XDG_CACHE_HOME", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
    *("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_PROFILE"),
    *("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ENDPOINT"),
)
"""Others that are handed over; those of proxies also in lower case. Of object stores only where they are:
credentials stay on their machine."""
NODES_OWN = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_HOME", "CUDA_PATH")
"""What begins like this but belongs to a node: its GPUs are given out by Ray, its folders may differ."""
PATHS = ("PYTHONPATH", "_HOME", "_CACHE", "_DIR", "_PATH")
"""Ends of names whose values are paths, or several with colons between them: they are made absolute."""


def cluster_token() -> dict[str, str]:
    """An authentication token for one cluster, which its processes get in their environment.

    By default Ray writes one token for all clusters to a file in the home folder, perhaps readable by others.
    """
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def environment_for_workers(config: TrainerBase) -> dict[str, str]:
    """What the trainer's workers get of this process's environment; nothing in a cluster of Cairn's own."""
    if config.ray.address is None:
        return {}
    return {name: _absolute(name, value) for name, value in os.environ.items() if _is_handed_over(name)}


def adopt(environment: Mapping[str, str]) -> None:
    """In a worker: take over what `environment_for_workers` returned, the path of Python modules included."""
    os.environ.update(environment)
    wanted = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = [path for path in wanted if path not in sys.path]


ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables that PyTorch's allocators read: the present name, and an older one that still counts."""


def extend_segments() -> None:
    """In a worker, before it imports torch: have the allocator of GPU memory extend segments.

    Micro-batches differ in width from step to step, so that blocks of fixed segments fit one step and not the
    next. Not in a server: vLLM's sleep mode has an allocator of its own. A user's setting stays.
    """
    if not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[0]] = "expandable_segments:True"


def _is_handed_over(name: str) -> bool:
    return name not in NODES_OWN and (name.startswith(PREFIXES) or name.upper() in NAMES)


def _absolute(name: str, value: str) -> str:
    if not value or not name.endswith(PATHS) or "://" in value:
        return value
    return os.pathsep.join(os.path.abspath(path) if path else os.getcwd() for path in value.split(os.pathsep))


PREFIX = "cairn-ray-"
LONGEST_SOCKET = "/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
"""Longest path that Ray appends to its folder for a socket; the kernel allows 107 bytes in all."""
LONGEST_FOLDER = 107 - len(LONGEST_SOCKET)


def make_private_folder() -> Path:
    """Make a folder (mode 0700) for this process, with a path short enough for Ray's sockets.

    It stays locked while this process lives; `remove_private_folders` removes it afterwards.

    Raises:
        OSError: no temporary folder is writable.
    """
    remove_private_folders()
    for place in _places():
        with contextlib.suppress(OSError):
            folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
            if _lock(folder) is not None:  # held until this process ends
                return folder
    raise OSError(f"no folder for temporary files is writable; tried {', '.join(map(str, _places()))}")


def remove_private_folders() -> None:
    """Remove the folders of processes that have ended."""
    for place in _places():
        for folder in place.glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError):
                if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                    continue
                if (lock := _lock(folder)) is not None:
                    shutil.rmtree(folder, ignore_errors=True)
                    os.close(lock)


def _places() -> list[Path]:
    """Folders in which to make it, best first."""
    wanted = [os.environ.get("RAY_TMPDIR"), tempfile.gettempdir(), "/tmp", "/var/tmp"]
    room = LONGEST_FOLDER - len(f"/{PREFIX}12345678/r")
    return [Path(place) for place in dict.fromkeys(wanted) if place and len(os.fsencode(place)) <= room]


def _lock(folder: Path) -> int | None:
    """A locked descriptor of the folder; None if a living process holds the lock or the folder is gone."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.stat(folder).st_ino == os.fstat(fd).st_ino:
            return fd
    except OSError:
        pass
    os.close(fd)
    return None
